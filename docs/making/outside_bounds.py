"""Compares linear bounds with outside computations of the same properties: `python docs/making/outside_bounds.py`.

Open properties of MLPs of the zoo are exported as ONNX and VNN-LIB, and read back from these files by code that shares
nothing with the package: the triangle relaxation as a linear program for HiGHS, and auto_LiRPA, if there is a folder
with it, made by `pip install --no-deps --target FOLDER auto_LiRPA==0.3 appdirs tqdm`.
"""

import argparse
import json
import re
import sys
import tempfile
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import numpy_helper
from scipy.optimize import linprog
from torch import Tensor, nn

import patchcert as pc
from patchcert.bounds import Interval, Rounding, trace
from patchcert.bounds.linear import adaptive, linear_margins
from patchcert.bounds.network import Network
from patchcert.bounds.reduction import reduced
from patchcert.bounds.splitting import Problems, Splitting
from patchcert.certificates.claims import Claim, claims_of, write_properties
from patchcert.models import save_onnx

FILE = Path(__file__).parents[1] / "measurements" / "linear-bounds.json"
MODELS, BENDING = ("mnist-1-pixel-mlp", "mnist-5x5-mlp"), ("mnist-5x5-mlp", "mnist-5x5-cnn2")
IMAGES, COUNT, CLASSES, THREAT = 40, 50, 10, pc.Patch(5)
STEPS = 60
TOLERANCE = 1e-6
"""How far a bound may be above the optimum of its program: HiGHS keeps constraints to 1e-7."""
OUTWARD = Rounding.outward(torch.float64)
COLUMNS = (
    "image",
    "label",
    "top",
    "left",
    "intervals",
    "three_slopes",
    "ascended",
    "program",
    "crown",
    "alpha_crown",
)

NOTE = (
    "Properties (an image that is right, a placement of a 5x5 patch) that intervals leave open, for models of the zoo: "
    f"{COUNT} of each model, evenly spread over all that are open on the first {IMAGES} test images of mnist-mini. "
    "`bending`: units that can bend on the box. `programs`: margins to all other classes, by our bounds and by outside "
    "ones that read the exported ONNX and VNN-LIB files: the linear program of the triangle relaxation, solved by "
    "HiGHS, and CROWN and alpha-CROWN of auto_LiRPA 0.3. A row has the least over all classes. `below`: how far "
    f"margins are below the program on average, `nearest`: at least; slopes ascended for {STEPS} steps or until the "
    "margin is proven, without splitting. `crown_apart`: how far our bound with the same slopes is from that of "
    "auto_LiRPA."
)

Array = NDArray[np.float64]
Layers = list[tuple[Array, Array]]


@dataclass(frozen=True)
class Exported:
    """A model with the claims that intervals leave open, of images that it gets right, in files."""

    model: nn.Module
    images: Tensor
    claims: Sequence[Claim]
    folder: Path


def export(name: str, folder: Path, count: int = COUNT) -> Exported:
    """Some open properties, evenly spread over all of the first images."""
    model, digits = pc.load(name), pc.load_dataset("mnist-mini").test.take(IMAGES)
    images, labels = digits.floats(), digits.labels
    is_right = model(images).argmax(dim=1) == labels
    found = claims_of(model, images, labels, range(IMAGES), THREAT)
    left = [claim for claim in found if not claim.is_proven and is_right[claim.row]]
    chosen = [left[place * len(left) // COUNT] for place in range(count)]
    save_onnx(model, folder / "model.onnx", (1, 28, 28))
    write_properties(folder, chosen, images, CLASSES, THREAT, "model.onnx")
    return Exported(model, images, chosen, folder)


def _boxes(exported: Exported) -> tuple[Network, Interval, Tensor, Tensor]:
    """What our bounds take: the network, boxes, labels, and all other classes of each label."""
    rows = torch.tensor([claim.row for claim in exported.claims])
    corners = torch.tensor([(claim.top, claim.left) for claim in exported.claims])
    labels = torch.tensor([claim.label for claim in exported.claims])
    boxes = THREAT.boxes(exported.images[rows].double(), corners[:, None])
    box = Interval(boxes.lower[:, 0], boxes.upper[:, 0])
    targets = torch.stack(
        [torch.tensor([each for each in range(CLASSES) if each != label]) for label in labels]
    )
    return trace(exported.model.double()), box, labels, targets


@torch.no_grad()
def our_bounds(exported: Exported) -> dict[str, Array]:
    """For each property a row of margins to the other classes, by each kind of bound."""
    network, box, labels, targets = _boxes(exported)
    intervals = network.margins(box, labels, rounding=OUTWARD).gather(1, targets)
    first, best = (
        linear_margins(network, box, labels, targets, CLASSES, OUTWARD, *slopes)
        for slopes in (((adaptive,),), ())
    )
    small = reduced(network, box, labels, targets, CLASSES, OUTWARD)
    assert small is not None
    rows = torch.arange(len(labels)).repeat_interleave(CLASSES - 1)
    own, outputs = torch.arange(len(rows)), torch.arange(CLASSES - 1).repeat(len(labels))
    problems = Problems(small, rows, outputs, own)
    outcome = Splitting(OUTWARD, budget=1, iterations=STEPS).solve(
        problems, torch.zeros_like(own), lambda problem, _: problem < 0
    )
    ascended = outcome.lower.reshape(targets.shape)
    found = {"intervals": intervals, "adaptive": first, "three_slopes": best, "ascended": ascended}
    return {name: value.numpy() for name, value in found.items()}


def read_property(path: Path) -> tuple[Array, Array, int]:
    """The box and the label."""
    text = path.read_text(encoding="utf-8")
    ends: dict[str, dict[int, float]] = {">": {}, "<": {}}
    for sign, place, number in re.findall(r"\(([<>])= X_(\d+) ([\d.]+)\)", text):
        ends[sign][int(place)] = float(number)
    lower, upper = (np.array([ends[sign][place] for place in range(len(ends[sign]))]) for sign in "><")
    (label,) = set(re.findall(r"\(>= Y_\d+ Y_(\d+)\)", text))
    return lower, upper, int(label)


def read_layers(path: Path) -> Layers:
    """Weights and biases of a chain of Gemm and Relu."""
    graph = onnx.load(path).graph
    weights = {each.name: numpy_helper.to_array(each).astype(np.float64) for each in graph.initializer}
    kinds = [node.op_type for node in graph.node if node.op_type != "Flatten"]
    assert kinds == [*["Gemm", "Relu"] * (len(kinds) // 2), "Gemm"], kinds
    return [(weights[node.input[1]], weights[node.input[2]]) for node in graph.node if node.op_type == "Gemm"]


def program_margins(layers: Layers, lower: Array, upper: Array, label: int) -> Array:
    """The optimum for each other class of the triangle relaxation on the box, with interval bounds inside.

    Variables are the pixels that can move and the units that can bend; all else is a linear function of them.
    """
    free = np.flatnonzero(upper > lower)
    table, offset = np.zeros((len(lower), len(free))), np.where(upper > lower, 0.0, lower)
    table[free, np.arange(len(free))] = 1.0
    bounds: list[tuple[float | None, float | None]] = list(zip(lower[free], upper[free], strict=True))
    rows: list[Array] = []
    limits: list[float] = []
    for weight, bias in layers[:-1]:
        rising, falling = np.maximum(weight, 0), np.minimum(weight, 0)
        least, most = rising @ lower + falling @ upper + bias, rising @ upper + falling @ lower + bias
        before, start = weight @ table, weight @ offset + bias
        bent = np.flatnonzero((least < 0) & (most > 0))
        own = np.zeros((len(bias), len(bent)))
        own[bent, np.arange(len(bent))] = 1.0
        rows = [np.concatenate([row, np.zeros(len(bent))]) for row in rows]
        for unit in bent:
            chord = most[unit] / (most[unit] - least[unit])
            rows.append(np.concatenate([before[unit], -own[unit]]))
            limits.append(-start[unit])
            rows.append(np.concatenate([-chord * before[unit], own[unit]]))
            limits.append(chord * (start[unit] - least[unit]))
        is_on = (least >= 0)[:, None]
        table = np.concatenate([np.where(is_on, before, 0.0), own], axis=1)
        offset = np.where(is_on[:, 0], start, 0.0)
        bounds += [(0.0, None)] * len(bent)
        lower, upper = np.maximum(least, 0), np.maximum(most, 0)
    weight, bias = layers[-1]
    given = (np.array(rows), np.array(limits)) if rows else (None, None)
    margins = []
    for other in range(len(bias)):
        if other != label:
            form = weight[label] - weight[other]
            found = linprog(form @ table, *given, bounds=bounds, method="highs")
            assert found.status == 0, found.message
            margins.append(found.fun + form @ offset + bias[label] - bias[other])
    return np.array(margins)


def import_lirpa(folder: Path) -> types.ModuleType:
    """auto_LiRPA 0.3, of 2022, with the names of NumPy and PyTorch that it needs where they were then."""
    from torch.onnx._internal.torchscript_exporter import _globals, utils

    helper = types.ModuleType("torch.onnx.symbolic_helper")
    helper._set_opset_version = lambda version: setattr(  # pyright: ignore[reportAttributeAccessIssue]
        _globals.GLOBALS, "export_onnx_opset_version", version
    )
    sets = types.ModuleType("numpy.lib.arraysetops")
    sets.isin = np.isin  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules |= {"numpy.lib.arraysetops": sets, "torch.onnx.symbolic_helper": helper}
    torch.onnx.utils._optimize_graph = utils._optimize_graph  # pyright: ignore
    torch._C.Node.__getitem__ = lambda node, key: getattr(node, node.kindOf(key))(key)  # pyright: ignore
    sys.path.insert(0, str(folder))
    import auto_LiRPA  # pyright: ignore[reportMissingImports]

    return auto_LiRPA


def lirpa_margins(
    library: types.ModuleType, layers: Layers, properties: Sequence[tuple[Array, Array, int]]
) -> dict[str, Array]:
    """CROWN, and CROWN with optimised slopes, of a module made of the weights."""
    modules: list[nn.Module] = []
    for weight, bias in layers:
        layer = nn.Linear(*weight.shape[::-1]).double()
        layer.weight.data, layer.bias.data = torch.from_numpy(weight), torch.from_numpy(bias)
        modules += [layer, nn.ReLU()]
    torch.set_default_dtype(torch.float64)  # of what it makes itself
    found: dict[str, list[Array]] = {"crown": [], "alpha_crown": []}
    for ends, label in ((torch.from_numpy(np.stack(each[:2])), each[2]) for each in properties):
        lower, upper, eye = ends[:1], ends[1:], torch.eye(CLASSES).double()
        forms = (eye[label] - torch.cat([eye[:label], eye[label + 1 :]]))[None]
        box = library.BoundedTensor(
            lower, library.PerturbationLpNorm(norm=float("inf"), x_L=lower, x_U=upper)
        )
        for name, method in (("crown", "CROWN"), ("alpha_crown", "CROWN-Optimized")):
            network = library.BoundedModule(nn.Sequential(*modules[:-1]), lower)
            margins, _ = network.compute_bounds(x=(box,), C=forms, method=method)
            found[name].append(margins[0].detach().numpy())
    torch.set_default_dtype(torch.float32)
    return {name: np.stack(rows) for name, rows in found.items()}


def compared(exported: Exported, library: types.ModuleType | None = None) -> dict[str, Any]:
    """Every kind of bound of each property, the least over all classes, and how they lie to each other."""
    layers = read_layers(exported.folder / "model.onnx")
    properties = [read_property(exported.folder / claim.file) for claim in exported.claims]
    program = np.stack([program_margins(layers, *each) for each in properties])
    ours = our_bounds(exported)
    found = {**ours, "program": program}
    found |= {} if library is None else lirpa_margins(library, layers, properties)
    for name in (*ours, "crown", "alpha_crown"):
        assert name not in found or (found[name] <= program + TOLERANCE).all(), f"{name} is above its program"
    kinds = ("three_slopes", "ascended", "intervals")
    named = {name: found[name].min(axis=1) for name in COLUMNS[4:] if name in found}
    rows = [
        [claim.image, claim.label, claim.top, claim.left, *(_short(named, name, row) for name in COLUMNS[4:])]
        for row, claim in enumerate(exported.claims)
    ]
    summary: dict[str, Any] = {
        "units": sum(len(bias) for _, bias in layers[:-1]),
        "properties": len(rows),
        "margins": int(program.size),
        "below": {name: round(fmean((program - found[name]).flat), 4) for name in kinds},
        "nearest": {name: float(f"{(program - found[name]).min():.1e}") for name in kinds},
    }
    if library is not None:
        apart = np.abs(found["crown"] - ours["adaptive"]).max()
        summary["crown_apart"] = float(f"{apart:.1e}")
        summary["below"]["alpha_crown"] = round(fmean((program - found["alpha_crown"]).flat), 4)
    return {**summary, "columns": list(COLUMNS), "rows": rows}


def _short(named: dict[str, Array], name: str, row: int) -> float | None:
    return round(float(named[name][row]), 6) if name in named else None


@torch.no_grad()
def bending(exported: Exported) -> dict[str, int]:
    """How many units there are, and how many of them can bend on the boxes."""
    network, box, labels, targets = _boxes(exported)
    small = reduced(network, box, labels, targets, CLASSES, OUTWARD)
    assert small is not None
    counts = sum(((each.lower < 0) & (each.upper > 0)).sum(dim=1) for each in small.known.values())
    assert isinstance(counts, Tensor)
    values = network.values(exported.images[:1].double())
    units = sum(
        values[number][0].numel() for number, step in enumerate(network.steps, 1) if "relu" in step.name
    )
    return {
        "units": units,
        "lowest": int(counts.min()),
        "median": round(median(counts.tolist())),
        "highest": int(counts.max()),
    }


def measure(folder: Path, library: types.ModuleType | None = None) -> dict[str, Any]:
    """All that the file holds."""
    exports = {name: export(name, folder / name) for name in dict.fromkeys((*MODELS, *BENDING))}
    return {
        "note": NOTE,
        "command": "python docs/making/outside_bounds.py --lirpa FOLDER",
        "bending": {name.rpartition("-")[2]: bending(exports[name]) for name in BENDING},
        "programs": {name: compared(exports[name], library) for name in MODELS},
    }


def as_text(found: dict[str, Any]) -> str:
    """JSON with one line for each row."""

    def on_one_line(match: re.Match[str]) -> str:
        return "[" + " ".join(match[1].split()) + "]"

    return re.sub(r"\[\s+([^\[\]]*?)\s+\]", on_one_line, json.dumps(found, indent=1)) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lirpa", type=Path, help="the folder with auto_LiRPA")
    parser.add_argument("--keep", type=Path, help="where the exported files stay")
    given = parser.parse_args()
    outside = None if given.lirpa is None else import_lirpa(given.lirpa)
    with tempfile.TemporaryDirectory() as temporary:
        FILE.write_text(as_text(measure(given.keep or Path(temporary), outside)), encoding="utf-8")
