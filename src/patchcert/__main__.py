"""`python -m patchcert` is the command `patchcert`."""

from patchcert.cli.app import main

if __name__ == "__main__":
    main()
