"""`patchcert bench`: the engine against the dense way, on this machine."""

from typing import Annotated

import typer

from patchcert.cli.output import print_json, say
from patchcert.cli.parsing import parse_device
from patchcert.errors import InvalidInput


def bench(
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ..., or auto.")] = "auto",
    only: Annotated[str | None, typer.Option(help="Only the cases whose name holds this text.")] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Images at once: 256 on a GPU, 32 on a CPU.")
    ] = None,
    certify_images: Annotated[int | None, typer.Option(min=1, help="Images to certify: 8 batches.")] = None,
    spend: Annotated[float, typer.Option(min=0, help="Seconds to repeat each call for.")] = 1.0,
    sizes: Annotated[bool, typer.Option(help="Also measure larger images.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Time per image for all placements of a patch: dense bounds, the engine, certification, a training step."""
    from patchcert.bench import CASES, Machine, run_case
    from patchcert.bench.cases import SIZES
    from patchcert.bench.report import show, summary
    from patchcert.bench.timing import Ceilings

    chosen = parse_device(device)
    cases = [case for case in (*CASES, *(SIZES if sizes else ())) if only is None or only in case.name]
    if not cases:
        raise InvalidInput(f"no case holds {only!r}", hint=f"cases: {', '.join(case.name for case in CASES)}")
    images = batch or (256 if chosen.type == "cuda" else 32)
    machine = Machine(chosen, Ceilings.of(chosen), images, certify_images or 8 * images, spend)
    measurements = []
    for case in cases:
        say(f"measuring {case.name} ...")
        measurements.append(run_case(case, machine))
    if as_json:
        print_json(summary(machine, measurements))
    else:
        show(machine, measurements)
