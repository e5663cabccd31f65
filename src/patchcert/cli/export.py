"""`patchcert export`: the network and what is claimed of it, for other tools."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchcert.cli.options import (
    CameraOption,
    DataFolderOption,
    DataOption,
    NormaliseOption,
    PatchOption,
    PlacementsOption,
    ShapeOption,
    SplitOption,
    TargetArgument,
    WeightsOption,
    number_option,
    parse_threat,
)
from patchcert.cli.output import print_json, say
from patchcert.cli.target import Target, open_data, open_target, select_images, through_camera
from patchcert.errors import InvalidInput, InvalidThreat

if TYPE_CHECKING:
    from patchcert.certificates import AnyThreat
    from patchcert.data import Dataset
    from patchcert.evidence import Selection

MODEL = "model.onnx"
KINDS = ("open", "proven")


def export(
    target: TargetArgument,
    weights: WeightsOption = None,
    normalise: NormaliseOption = None,
    onnx: Annotated[
        Path | None, typer.Option(help="The ONNX file to write.", dir_okay=False, metavar="FILE")
    ] = None,
    vnnlib: Annotated[
        Path | None,
        typer.Option(
            help="The folder for one VNN-LIB property per image and placement.",
            file_okay=False,
            metavar="FOLDER",
        ),
    ] = None,
    only: Annotated[str | None, typer.Option(help="Only claims that are open, or proven.")] = None,
    patch: PatchOption = None,
    shape: ShapeOption = None,
    placements: PlacementsOption = None,
    camera: CameraOption = None,
    data: DataOption = None,
    data_dir: DataFolderOption = None,
    split: SplitOption = "test",
    limit: Annotated[int, number_option("Properties of the first N images.")] = 1,
) -> None:
    """Write a model as an ONNX file, and what interval bounds claim of it as VNN-LIB properties.

    A verifier that answers `unsat` agrees that no patch at that placement changes the prediction. Beside the
    properties, claims.csv says what is proven and what is open, and instances.csv lists them for verifiers; the model
    is written there too, as model.onnx, unless --onnx names a file.
    """
    from patchcert.models import save_onnx

    if onnx is None and vnnlib is None:
        raise InvalidInput("nothing is asked for", hint="give --onnx FILE, --vnnlib FOLDER, or both.")
    if only is not None and only not in KINDS:
        raise InvalidInput(f"--only {only} is unknown", hint=f"choose one of {', '.join(KINDS)}.")
    opened = open_target(target, weights=weights, normalise=normalise)
    threat = None
    if vnnlib is not None:
        resized = through_camera(opened, camera, data, data_dir)
        threat = parse_threat(patch, shape, None, None, placements, opened.threat, resized=resized)
    dataset = None
    if vnnlib is not None or opened.image_shape is None:
        dataset = open_data(opened, data, data_dir)
    selection = None if dataset is None else select_images(opened, dataset, split, limit)
    shape_of_images = opened.image_shape or _size(dataset, selection)
    file = onnx if onnx is not None else Path(str(vnnlib)) / MODEL
    save_onnx(opened.model, file, shape_of_images)
    say(f"the network is in {file}")
    summary: dict[str, Any] = {"onnx": str(file)}
    if vnnlib is not None:
        assert dataset is not None
        assert selection is not None
        summary |= _write(opened, threat, dataset, selection, vnnlib, file, only)
    print_json(summary)


def _size(dataset: "Dataset | None", selection: "Selection | None") -> tuple[int, int, int]:
    assert dataset is not None
    assert selection is not None
    channels, height, width = dataset.split(selection.split).image_size
    return channels, height, width


def _write(
    target: Target,
    threat: "AnyThreat | None",
    dataset: "Dataset",
    selection: "Selection",
    folder: Path,
    file: Path,
    only: str | None,
) -> dict[str, Any]:
    from patchcert.certificates.claims import claims_of, write_properties
    from patchcert.threats import Patch

    if not isinstance(threat, Patch):
        raise InvalidThreat(
            f"properties are about patches, and the threat is {threat}", hint="give --patch 5."
        )
    images = dataset.split(selection.split).take(selection.limit or 1)
    pixels, labels = images.floats(), images.labels
    claims = claims_of(target.model, pixels, labels, range(len(images)), threat)
    chosen = [each for each in claims if only is None or each.is_proven == (only == "proven")]
    classes = target.model(pixels[:1]).shape[1]
    write_properties(folder, chosen, pixels, classes, threat, os.path.relpath(file, folder))
    proven = sum(each.is_proven for each in chosen)
    say(f"{len(chosen)} properties are in {folder}: {proven} proven, {len(chosen) - proven} open")
    return {"vnnlib": str(folder), "properties": len(chosen), "proven": proven, "open": len(chosen) - proven}
