"""The command `patchcert`: results as JSON on stdout, talk on stderr, one file per command."""
