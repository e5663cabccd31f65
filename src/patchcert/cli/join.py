"""`patchcert join TARGET TARGET ...`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchcert.cli.output import print_json, say
from patchcert.cli.target import open_target
from patchcert.errors import InvalidInput

if TYPE_CHECKING:
    from patchcert.cli.target import Target
    from patchcert.models import ModelSpec


def join(
    targets: Annotated[
        list[str],
        typer.Argument(
            help="Trained networks of one architecture: run folders, .safetensors files with a model, zoo:NAME."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The file of weights to be made, .safetensors.", dir_okay=False)],
) -> None:
    """Put trained networks side by side in one whose logits are the mean of theirs.

    Chains of layers, which may differ in their widths, become a wider one; others become its members. It is a network
    of its own: what was proven of its members says nothing about it. Certify the file next, or begin another training
    with it.
    """
    from patchcert.files import sha256
    from patchcert.models import join as join_models
    from patchcert.models import save
    from patchcert.work import parameter_count

    if out.suffix != ".safetensors":
        raise InvalidInput(f"--out is {out}; expected a file whose name ends in .safetensors")
    if out.exists():
        raise InvalidInput(f"{out} is there already", hint="name a new file")
    opened = {target: open_target(target) for target in targets}
    specs = [_described(target, opened[target]) for target in targets]
    joined, wide = join_models([opened[target].model for target in targets], specs)
    save(joined, wide, out)
    parameters = parameter_count(joined)
    say(f"{len(targets)} networks are one of {parameters:,} parameters; next: patchcert certify {out}")
    print_json(
        {
            "out": str(out),
            "members": [
                {"target": target, "weights_sha256": opened[target].weights_sha256} for target in targets
            ],
            "widths": list(wide.widths),
            "parameters": parameters,
            "weights_sha256": sha256(out),
        }
    )


def _described(name: str, target: "Target") -> "ModelSpec":
    if target.spec is None:
        raise InvalidInput(
            f"{name} does not say which architecture its network is of",
            hint="save it with patchcert.models.save(model, spec, path)",
        )
    return target.spec
