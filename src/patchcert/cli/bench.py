"""`patchcert bench`: the engine against the dense way and the attack against the plain loop, on this machine."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchcert.cli import options
from patchcert.cli.output import print_json, say
from patchcert.errors import InvalidInput

if TYPE_CHECKING:
    import torch

    from patchcert.bench import AnyCase, Machine


def bench(
    device: options.Device = "auto",
    only: Annotated[str | None, typer.Option(help="Only the cases whose name holds this text.")] = None,
    patch: Annotated[int | None, options.number_option("Side of the patch in pixels: 5.")] = None,
    batch: Annotated[int | None, options.number_option("Images at once: 256 on a GPU, 32 on a CPU.")] = None,
    certify_images: Annotated[
        int | None, options.number_option("Images to certify: 10,000 on a GPU, one batch on a CPU.")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of the data: certify its test images, not random ones.")
    ] = None,
    spend: Annotated[
        float, options.number_option("Seconds to repeat each call for.", kind=float, least=0)
    ] = 1.0,
    sizes: Annotated[bool, typer.Option(help="Also measure larger images.")] = False,
    source: Annotated[
        Path | None, typer.Option("--from", help="Measure nothing: show what --json printed into this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print Markdown instead of tables.")
    ] = False,
) -> None:
    """Time per image for all placements of a patch: dense bounds, the engine, certification, a training step.

    Also the rate of the patch attack, with images and restarts in shared batches, against a plain loop over
    restarts: 400 images and 80 restarts on a GPU, one batch and 8 on a CPU; the rate of forward passes behind masks,
    against the bare network; and the time of local votes, in their pass and in sums over placements.
    """
    from patchcert.bench.report import markdown, show

    if source is not None:
        facts = _read(source)
    else:
        place, cases = options.parse_device(device), _cases(only, patch, sizes)
        facts = _measure(cases, _machine(place, batch, certify_images, spend, data_dir))
    if as_json:
        print_json(facts)
    elif as_markdown:
        typer.echo(markdown(facts), nl=False)
    else:
        show(facts)


def _read(source: Path) -> dict[str, Any]:
    try:
        facts = json.loads(source.read_text())
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"{source} is not a file of measurements: {error}", hint="write one with --json"
        ) from error
    if not isinstance(facts, dict) or "cases" not in facts:
        raise InvalidInput(f"{source} holds no measurements", hint="write them with patchcert bench --json")
    return facts


def _cases(only: str | None, patch: int | None, sizes: bool) -> "list[AnyCase]":
    from patchcert.bench import CASES, MASKED_CASES, SIZES, VOTES_CASES

    known = (*CASES, *(SIZES if sizes else ()), *MASKED_CASES, *VOTES_CASES)
    cases = [replace(case, patch=patch or case.patch) for case in known]
    chosen = [case for case in cases if only is None or only in case.name]
    if not chosen:
        raise InvalidInput(f"no case holds {only!r}", hint=f"cases: {'; '.join(case.name for case in known)}")
    return chosen


def _machine(
    device: "torch.device", batch: int | None, certify_images: int | None, spend: float, data_dir: Path | None
) -> "Machine":
    """The machine, with numbers of images that suit it where none are given."""
    from patchcert.bench import Machine
    from patchcert.bench.floor import Ceilings

    on_gpu = device.type == "cuda"
    images = batch or (256 if on_gpu else 32)
    return Machine(
        device=device,
        ceilings=Ceilings.of(device),
        batch=images,
        certified_images=certify_images or (10_000 if on_gpu else images),
        spend=spend,
        attacked_images=400 if on_gpu else images,
        restarts=80 if on_gpu else 8,
        data_dir=data_dir,
    )


def _measure(cases: "list[AnyCase]", machine: "Machine") -> dict[str, Any]:
    from patchcert.bench import MaskedCase, VotesCase, run_case, run_masked_case, run_votes_case
    from patchcert.bench.report import summary

    measurements, masked, votes = [], [], []
    for case in cases:
        say(f"measuring {case.name} ...")
        if isinstance(case, MaskedCase):
            masked.append(run_masked_case(case, machine))
        elif isinstance(case, VotesCase):
            votes.append(run_votes_case(case, machine))
        else:
            measurements.append(run_case(case, machine))
    return summary(machine, measurements, masked, votes)
