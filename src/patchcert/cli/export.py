"""`patchcert export`: the network and what is claimed of it, for other tools."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import patchcert as pc
from patchcert.cli import options
from patchcert.cli.output import print_json, say
from patchcert.cli.target import open_data, open_target, select_images, through_camera
from patchcert.errors import InvalidInput, InvalidThreat

if TYPE_CHECKING:
    from torch import nn

    from patchcert.certificates import AnyThreat
    from patchcert.data import Split

MODEL = "model.onnx"
KINDS = ("open", "proven")


def export(
    target: options.Target,
    weights: options.Weights = None,
    normalise: options.Normalise = None,
    image_size: options.ImageSize = None,
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
    patch: options.Patch = None,
    shape: options.Shape = None,
    placements: options.Placements = None,
    camera: options.Camera = None,
    data: options.Data = None,
    data_dir: options.DataFolder = None,
    split: options.Split = "test",
    limit: Annotated[int, options.number_option("Properties of the first N images.")] = 1,
) -> None:
    """Write a model as an ONNX file, and what interval bounds claim of it as VNN-LIB properties.

    A verifier that answers `unsat` agrees that no patch at that placement changes the prediction. Beside the
    properties, claims.csv says what is proven and what is open, and instances.csv lists them for verifiers; the model
    is written there too, as model.onnx, unless --onnx names a file.
    """
    from patchcert.models import save_onnx

    if onnx is None and vnnlib is None:
        raise InvalidInput("nothing is asked for", hint="give --onnx FILE, --vnnlib FOLDER, or both.")
    options.check_choice("--only", only, KINDS)
    opened = open_target(target, data_dir, weights, normalise, image_size)
    threat = None
    if vnnlib is not None:
        resized = through_camera(opened, camera, data, data_dir)
        threat = options.parse_threat(patch, shape, None, None, placements, opened.threat, resized=resized)
    size, images = opened.image_shape, None
    if vnnlib is not None or size is None:
        dataset = open_data(opened, data, data_dir)
        images = dataset.split(select_images(opened, dataset, split, limit).split).take(limit)
        size = images.image_size
    file = onnx if onnx is not None else Path(str(vnnlib)) / MODEL
    save_onnx(opened.model, file, size)
    say(f"the network is in {file}")
    summary: dict[str, Any] = {"onnx": str(file)}
    if vnnlib is not None and images is not None:
        summary |= _write(opened.model, threat, images, vnnlib, file, only)
    print_json(summary)


def _write(
    model: "nn.Module",
    threat: "AnyThreat | None",
    images: "Split",
    folder: Path,
    file: Path,
    only: str | None,
) -> dict[str, Any]:
    from patchcert.certificates.claims import claims_of, write_properties

    if not isinstance(threat, pc.Patch):
        raise InvalidThreat(
            f"properties are about patches, and the threat is {threat}", hint="give --patch 5."
        )
    pixels = images.floats()
    claims = claims_of(model, pixels, images.labels, range(len(images)), threat)
    chosen = [each for each in claims if only is None or each.is_proven == (only == "proven")]
    classes = model(pixels[:1]).shape[1]
    write_properties(folder, chosen, pixels, classes, threat, os.path.relpath(file, folder))
    proven = sum(each.is_proven for each in chosen)
    say(f"{len(chosen)} properties are in {folder}: {proven} proven, {len(chosen) - proven} open")
    return {"vnnlib": str(folder), "properties": len(chosen), "proven": proven, "open": len(chosen) - proven}
