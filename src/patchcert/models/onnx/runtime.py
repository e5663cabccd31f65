"""The packages `onnx` and `onnxruntime`, which need not be installed, and how networks are compared with them."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from patchcert.errors import ModelError
from patchcert.tensors import Images, Logits

COMPARED = 8
"""How many drawn images a file is compared on."""
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
"""How far outputs may differ from those of ONNX Runtime, in parts of the largest one or of 1.

Both sum thousands of products, in other orders, through tens of layers: in float32, of unit 6e-8, they differ by some
1e-6 in parts of the largest sum. A setting that is read wrongly changes outputs by parts of their own size.
"""


def import_onnx(for_what: str) -> Any:  # noqa: ANN401 - a module that need not be installed
    """The package `onnx`, or what to install."""
    try:
        return importlib.import_module("onnx")
    except ImportError as error:
        raise ModelError(
            f"{for_what} needs the package onnx, which is not installed", hint="pip install 'patchcert[onnx]'"
        ) from error


def has_runtime() -> bool:
    """Whether ONNX Runtime is installed."""
    try:
        importlib.import_module("onnxruntime")
    except ImportError:
        return False
    return True


def drawn_images(shape: tuple[int, int, int]) -> Images:
    """Images of noise, and in them many pixels that are black or white."""
    drawn = torch.rand(COMPARED, *shape, generator=torch.Generator().manual_seed(0))
    return (drawn * 2 - 0.5).clamp(0, 1)


def compare_with_runtime(
    model: nn.Module, path: Path, images: Images, left_out: str = "", content: bytes | None = None
) -> float:
    """The largest difference to what ONNX Runtime computes, in parts of the largest output.

    Refused above the tolerance. `left_out` is an operator that the file has after the logits, and the model has not.
    `content` is what the file is going to hold, where it is not yet written.
    """
    weights = (value for value in model.state_dict().values() if value.is_floating_point())
    images = images.to(next(weights, images))
    try:
        theirs = runtime_outputs(content or str(path), images)
    except Exception as error:
        raise ModelError(
            f"{path} cannot be run by ONNX Runtime: {str(error).splitlines()[0]}",
            hint="export it anew; load_onnx(path, check=False) does without the runtime.",
        ) from error
    with torch.no_grad():
        ours = model(images).cpu()
    if left_out:
        ours = ours.softmax(dim=1) if left_out == "Softmax" else ours.log_softmax(dim=1)
    if ours.shape != theirs.shape:
        raise ModelError(
            f"{path} gives outputs of shape {tuple(theirs.shape)} in ONNX Runtime, the model {tuple(ours.shape)}"
        )
    difference = float((ours - theirs).abs().max() / max(1.0, float(theirs.abs().max())))
    if not difference <= TOLERANCE[images.dtype]:
        raise ModelError(
            f"{path} gives other outputs in ONNX Runtime: they differ by {difference:.1e} of the largest, where "
            f"{TOLERANCE[images.dtype]:.0e} is allowed for rounding",
            hint="certify the module that the file was made from, and report the file.",
        )
    return difference


def runtime_outputs(file: str | bytes, images: Images) -> Logits:
    """What ONNX Runtime makes of each image by itself, on the CPU, with the network of a file or of its content."""
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1  # errors alone, and no threads that spin
    session = runtime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    rows = [session.run(None, {name: image[None].numpy()})[0] for image in images.cpu()]
    return torch.from_numpy(np.concatenate(rows))
