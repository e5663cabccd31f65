"""`patchcert certify`: proofs for the images of a data set."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

import patchcert as pc
from patchcert.cli import options
from patchcert.cli.measuring import command_line, kept_with, measure
from patchcert.cli.output import print_error, print_json, say
from patchcert.cli.target import (
    Target,
    choose_classifier,
    open_data,
    open_target,
    select_images,
    through_camera,
)
from patchcert.cli.threads import using_threads
from patchcert.errors import InvalidInput

if TYPE_CHECKING:
    from patchcert.certificates import AnyThreat
    from patchcert.certificates.explaining import Width
    from patchcert.evidence import Evidence, Subject

DIFFERS = 1
LEAST_BUDGET = 100_000
LITTLE = 0.1
"""Up to this share of right images proven, it is said why."""
EXPLAINED, SHOWN = 4, 6
"""How many images the reasons are looked for in, and how many layers are spoken of."""
_OF_ONE_METHOD = ("--method", "--setting", "--dtype", "--memory-budget", "--refine", "--out")
"""Options that a proof of another kind refuses, or that name the file of this one."""


def certify(
    target: options.Target,
    weights: options.Weights = None,
    normalise: options.Normalise = None,
    image_size: options.ImageSize = None,
    patch: options.Patch = None,
    shape: options.Shape = None,
    sparse: options.Sparse = None,
    bound: Annotated[
        str | None, typer.Option(help="With --sparse: tight (default), per-pixel or per-value.")
    ] = None,
    placements: options.Placements = None,
    patches: options.Patches = None,
    camera: options.Camera = None,
    data: options.Data = None,
    data_dir: options.DataFolder = None,
    split: options.Split = "test",
    limit: options.Limit = None,
    method: options.Method = None,
    setting: options.Settings = None,
    masks: options.Masks = None,
    device: options.Device = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="Interval bounds: float32 (default), or float64 as an audit.")
    ] = None,
    memory_budget: Annotated[
        str | None, typer.Option(help="Interval bounds: memory to work in, like 2GiB.")
    ] = None,
    refine: options.Refine = None,
    threads: options.Threads = None,
    out: options.EvidenceFile = None,
) -> None:
    """Prove for each image that no member of the threat changes the prediction.

    Without a threat the one that the model was trained on is taken. The summary is JSON on stdout. A proof of
    zoo:NAME is compared with its card, image by image; where they differ, the exit code is 1. Interrupted, the same
    command resumes where it stopped, if evidence is kept. `torchrun -m patchcert certify ...` shares the images among
    processes.
    """
    from patchcert.evidence import Certification, Subject
    from patchcert.report.statistics import in_words, summarise
    from patchcert.train.distributed import joined_world, local_device

    opened = open_target(target, data_dir, weights, normalise, image_size)
    resized = through_camera(opened, camera, data, data_dir)
    threat = options.parse_threat(patch, shape, sparse, bound, placements, opened.threat, patches, resized)
    budget, place = _parse_budget(memory_budget), local_device(options.parse_device(device))
    options.check_evidence_file(out)
    opened.model.to(place)
    settings = {
        "dtype": None if dtype is None else options.parse_dtype(dtype),
        "memory_budget": budget,
        "refine": refine,
    }
    classifier = choose_classifier(opened, threat, method, options.with_masks(setting, masks), settings)
    dataset = open_data(opened, data, data_dir)
    selection = select_images(opened, dataset, split, limit)
    subject = Subject(classifier, opened.weights_sha256, dataset, selection, place)
    command = command_line()
    with using_threads(threads), joined_world(place) as world:
        certification = kept_with(opened, Certification(subject, threat, out, command, world))
        if not world.is_main:
            certification.run()
            return
        limits = _limits(subject, refine)
        evidence = measure(certification, opened)
    _say_why(subject, threat, evidence)
    card = _compare(opened, evidence)
    print_json({**summarise(evidence), **limits, **card})
    say(in_words(evidence))
    if card.get("card", {}).get("differences"):
        raise typer.Exit(DIFFERS)


def _limits(subject: "Subject", refine: str | None) -> dict[str, Any]:
    """Say which layers stop the refinement."""
    if refine is None or not isinstance(subject.classifier, pc.IntervalBounds):
        return {}
    limits = subject.classifier.limits(subject.images(subject.positions()[:1]).floats())
    if limits.by_interval:
        say(f"without a linear rule, bounded by intervals: {', '.join(limits.by_interval)}")
    if limits.unsplit and refine == "split":
        say(f"no branch and bound: {', '.join(limits.unsplit)} bend otherwise than a ReLU")
    return {"refinement": {"by_interval": list(limits.by_interval), "unsplit": list(limits.unsplit)}}


def _say_why(subject: "Subject", threat: "AnyThreat", evidence: "Evidence") -> None:
    """Where little is proven: why, of bounds where those of a few images grow wide, and what to try instead."""
    from patchcert.certificates.explaining import blown_up, widths

    if evidence.correct and evidence.certified > LITTLE * evidence.correct:
        return
    kind = type(subject.classifier).__name__
    if not evidence.correct:
        say("nothing is proven, because nothing is right: do weights, --normalise and classes fit the data?")
        if not isinstance(subject.classifier, pc.IntervalBounds):
            say(f"  if they do: {kind} shows the model parts of images, for which it may have to be trained")
        return
    little = f"little is proven: {evidence.certified} of {evidence.correct} right images, by"
    if not isinstance(subject.classifier, pc.IntervalBounds):
        say(f"{little} {kind}: models are seldom proven unless trained for it")
        say("  `patchcert explain TARGET IMAGE` draws why, of one image; `patchcert train --help` trains")
        return
    say(f"{little} interval bounds")
    if isinstance(threat, pc.Patch):
        few = subject.images(subject.positions()[evidence.right_rows.nonzero()[0][:EXPLAINED]])
        found = widths(subject.classifier.model, few.floats(), threat)
        say(
            f"why: with the patch in the middle of {len(few)} of them, shares of values that it reaches, their bounds "
            "against the size of values, and shares of these that are unstable, of either sign:"
        )
        for each in _some(found):
            say(f"  {each}")
        wide = blown_up(found)
        if wide is not None:
            say(
                f"  bounds stay wide from here on: {wide.name}; models not trained on bounds are seldom proven"
            )
        say("  `patchcert explain TARGET IMAGE` draws this of one image")
    say(
        "next: train on bounds, see `patchcert train --help`, or patchcert.worst_case_margins for a loop of your own"
    )
    command = command_line(without_options=_OF_ONE_METHOD)
    if not isinstance(threat, pc.SparsePixels):
        say(f"  or prove the model by masks: {command} --method masking")
        say(f"  or by votes, if it is trained for them: {command} --method bands")
    else:
        say(f"  or prove it by votes, if it is trained for them: {command} --method ablation")


def _some(found: "list[Width]") -> "list[Width]":
    """At most `SHOWN` of them, the first and the last among them."""
    steps = max(len(found) - 1, 1) / (SHOWN - 1)
    return found if len(found) <= SHOWN else [found[round(steps * place)] for place in range(SHOWN)]


def _compare(target: Target, evidence: "Evidence") -> dict[str, Any]:
    """Say whether the certificates are those of the model's card, and how they differ where they do not."""
    from patchcert.zoo.recheck import differences, why_not_comparable

    card = target.card
    if card is None:
        return {}
    reason = why_not_comparable(card, evidence)
    if reason:
        say(f"not compared with the card of {card.name}: {reason}")
        return {"card": {"name": card.name, "compared": False, "reason": reason}}
    found = differences(card, evidence)
    for difference in found:
        print_error(f"differs from the card of {card.name}: {difference}")
    if not found:
        say(f"matches the card of {card.name}, image by image")
    return {"card": {"name": card.name, "compared": True, "matches": not found, "differences": list(found)}}


def _parse_budget(text: str | None) -> int | None:
    budget = options.parse_bytes(text)
    if budget is not None and budget < LEAST_BUDGET:
        raise InvalidInput(
            f"--memory-budget {text} is {budget:,} bytes, too few to work in",
            hint="write it with its unit, like 2GiB or 500MB.",
        )
    return budget
