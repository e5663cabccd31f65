"""`patchcert certify`: proofs for the images of a data set."""

import hashlib
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchcert.cli.options import (
    DataFolderOption,
    DataOption,
    PatchOption,
    PlacementsOption,
    ShapeOption,
    SparseOption,
    SplitOption,
)
from patchcert.cli.output import print_error, print_json, say
from patchcert.cli.parsing import parse_bytes, parse_device, parse_dtype, parse_threat
from patchcert.cli.progress import progress_bar
from patchcert.cli.target import Target, choose_images, open_data, open_target
from patchcert.errors import InvalidInput

if TYPE_CHECKING:
    from torch import Tensor, nn

    from patchcert.certificates.intervals import Certificates
    from patchcert.evidence.proving import Proof, Proving
    from patchcert.threats import Patch, SparsePixels

DIFFERS = 1
LEAST_BUDGET = 100_000


def certify(
    target: Annotated[
        str,
        typer.Argument(help="A run folder, a .safetensors file with a model, zoo:NAME, or zoo:FOLDER/NAME."),
    ],
    patch: PatchOption = None,
    shape: ShapeOption = None,
    sparse: SparseOption = None,
    bound: Annotated[
        str | None, typer.Option(help="With --sparse: tight (default), per-pixel or per-value.")
    ] = None,
    placements: PlacementsOption = None,
    data: DataOption = None,
    data_dir: DataFolderOption = None,
    split: SplitOption = "test",
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N images.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ..., or auto.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, or float64 as an audit.")] = "float32",
    memory_budget: Annotated[str | None, typer.Option(help="Memory for bounds, like 2GiB.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Where to write one row of evidence per image; a run folder keeps its own."),
    ] = None,
) -> None:
    """Prove for each image that no member of the threat changes the prediction.

    Without a threat the one that the model was trained on is taken. The summary is JSON on stdout. A proof of
    zoo:NAME is compared with its card, image by image; where they differ, the exit code is 1.
    """
    from patchcert.certificates.intervals import IntervalCertifier
    from patchcert.evidence.proving import Proving
    from patchcert.files import sha256
    from patchcert.train.environment import describe_machine

    opened = open_target(target)
    weights = sha256(opened.weights)
    threat = parse_threat(patch, shape, sparse, bound, placements, opened.threat)
    precision, budget, place = parse_dtype(dtype), parse_bytes(memory_budget), parse_device(device)
    _check_output(out)
    _check_budget(memory_budget, budget)
    dataset = open_data(opened, data, data_dir)
    images = choose_images(opened, dataset, split, limit).to(place)
    model, pixels = opened.model.to(place), images.floats()
    say(f"certifying {len(images)} {split} images of {dataset.name} against {threat} on {place}")
    other_data = "" if dataset.name == opened.data else dataset.name
    out = out or _run_evidence(opened, _evidence_name(threat, other_data, split, limit, dtype))
    claim = {
        "kind": "certify",
        "weights_sha256": weights,
        "data": {"name": dataset.name, "split": split, "limit": limit, "sha256": dict(dataset.checksums)},
        "threat": threat.to_dict(),
        "settings": {"dtype": dtype, "memory_budget": budget},
        **describe_machine(place),
    }
    proving = Proving.towards(out, IntervalCertifier(precision, budget), model, claim)
    before = proving.kept(images.labels)
    if before is not None:
        say(f"going on after {len(before)} images that were certified before")
    proof = _prove(proving, model, pixels, images.labels, threat)
    certificates = proof.certificates
    circumstances = {
        "command": shlex.join(["patchcert", *sys.argv[1:]]),
        "seconds": round(proof.seconds, 3),
    }
    meta = claim | circumstances
    if out is not None:
        write_evidence(out, certificates, meta)
    proving.discard()
    card = _compare(opened, certificates, meta)
    print_json({**summarise(certificates), **meta, "evidence": None if out is None else str(out), **card})
    if card.get("card", {}).get("differences"):
        raise typer.Exit(DIFFERS)


def _prove(
    proving: "Proving", model: "nn.Module", images: "Tensor", labels: "Tensor", threat: "Patch | SparsePixels"
) -> "Proof":
    """The certificates; an interruption says what is left of the work."""
    try:
        with progress_bar("certifying", "images") as report:
            return proving.certify(model, images, labels, threat, report)
    except KeyboardInterrupt:
        kept = proving.kept(labels)
        if proving.partial is None:
            say("nothing is kept: that needs --out or a run folder, and a model without layers of your own")
        elif kept is not None:
            say(f"{len(kept)} of {len(labels)} images are kept: the same command goes on from there")
        raise


def summarise(certificates: "Certificates") -> dict[str, Any]:
    """Counts and shares, with the exact 95 % intervals of the latter."""
    from patchcert.report.statistics import clopper_pearson

    total = len(certificates.labels)
    correct = int((certificates.predictions == certificates.labels).sum())
    certified = int(certificates.certified.sum())
    return {
        "images": total,
        "correct": correct,
        "certified": certified,
        "clean_accuracy": correct / total,
        "clean_interval": list(clopper_pearson(correct, total)),
        "certified_accuracy": certified / total,
        "certified_interval": list(clopper_pearson(certified, total)),
    }


def write_evidence(path: Path, certificates: "Certificates", meta: dict[str, Any]) -> None:
    """One row per image; `margin` is the least over the classes other than the label."""
    import numpy as np

    from patchcert.files import atomic_write

    tops, lefts = certificates.worst_placement.cpu().numpy().T
    with atomic_write(path) as stream:
        np.savez_compressed(
            stream,
            meta=np.array(json.dumps(meta)),
            label=certificates.labels.cpu().numpy(),
            prediction=certificates.predictions.cpu().numpy(),
            verdict=certificates.certified.cpu().numpy(),
            margin=certificates.least_margin.cpu().numpy(),
            worst_top=tops,
            worst_left=lefts,
        )


def _compare(target: Target, certificates: "Certificates", meta: dict[str, Any]) -> dict[str, Any]:
    """Say whether the certificates are those of the model's card, and how they differ where they do not."""
    from patchcert.threats import threat_from_dict
    from patchcert.zoo.recheck import differences, why_not_comparable

    card = target.card
    if card is None:
        return {}
    data, threat = meta["data"], threat_from_dict(meta["threat"])
    reason = why_not_comparable(card, threat, data["name"], data["split"], meta["settings"]["dtype"])
    if reason:
        say(f"not compared with the card of {card.name}: {reason}")
        return {"card": {"name": card.name, "compared": False, "reason": reason}}
    found = differences(card, certificates, data["sha256"])
    for difference in found:
        print_error(f"differs from the card of {card.name}: {difference}")
    if not found:
        say(f"matches the card of {card.name}, image by image")
    return {"card": {"name": card.name, "compared": True, "matches": not found, "differences": list(found)}}


def _check_output(path: Path | None) -> None:
    """Found out before the work, not after it."""
    if path is None:
        return
    if path.suffix != ".npz" or path.is_dir():
        raise InvalidInput(f"--out {path} is no name of an evidence file", hint="end it with .npz.")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise InvalidInput(f"--out {path} cannot be written", hint="name a file in a folder of yours.")


def _check_budget(text: str | None, budget: int | None) -> None:
    if budget is not None and budget < LEAST_BUDGET:
        raise InvalidInput(
            f"--memory-budget {text} is {budget:,} bytes, too few to work in",
            hint="write it with its unit, like 2GiB or 500MB.",
        )


def _run_evidence(target: Target, name: str) -> Path | None:
    return None if target.run is None else target.run.path / "evidence" / f"{name}.npz"


def _evidence_name(
    threat: "Patch | SparsePixels", data: str, split: str, limit: int | None, dtype: str
) -> str:
    """The same question has the same name, so that a later answer replaces the earlier; others do not."""
    words = str(threat)
    parts = [
        "certify",
        words,
        "" if _is_spelt_out(threat) else _digest(threat),
        data,
        "" if split == "test" else split,
        "" if limit is None else f"first-{limit}",
        "" if dtype == "float32" else dtype,
    ]
    return "-".join(re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-") for part in parts if part)


def _is_spelt_out(threat: "Patch | SparsePixels") -> bool:
    """Whether the threat's words say all of it: rectangles do, other shapes may be mirrored or turned."""
    is_solid = getattr(threat, "is_solid", True)
    return is_solid and not re.search("listed|mapped", str(threat))


def _digest(threat: "Patch | SparsePixels") -> str:
    """Tells apart threats that are too long to spell out."""
    return hashlib.sha256(json.dumps(threat.to_dict()).encode()).hexdigest()[:8]
