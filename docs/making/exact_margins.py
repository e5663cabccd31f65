"""Holds proofs to an exact solver: `python docs/making/exact_margins.py RUN`, a run of an mlp that was certified.

Of the images that branch and bound proved, those of least margin are looked at again, at the placement where it is
least: the true minimum of each margin over the patch is a mixed-integer program, one integer for each unit that can
bend, which HiGHS solves. Weights and images are read from their files, and nothing of patchcert's bounds is used.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file
from scipy.optimize import Bounds, LinearConstraint, milp

import patchcert as pc
from patchcert.evidence import Evidence

FILE = Path(__file__).parents[1] / "measurements" / "exact-margins.json"
COUNT, SECONDS = 25, 120
TOLERANCE = 1e-5
"""How far the solver's minimum may be below a proven bound: it keeps constraints to 1e-6."""
NOTE = (
    "Certified test images of least margin, of a run of an mlp that branch and bound has certified: `proven` is the "
    "margin that evidence states, a lower bound for all placements and classes; `exact` the least of the true minima "
    "over a patch at the placement where it is stated, against every other class, as HiGHS finds them by mixed-integer "
    "programs with one integer for each unit that can `bend`."
)

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Layers:
    """A network of one hidden layer in float64, as its file has it."""

    weight: Array
    bias: Array
    readout: Array
    offset: Array

    @staticmethod
    def read(file: Path) -> "Layers":
        """The four tensors of an mlp, and nothing else."""
        stored = load_file(file)
        names = ("linear1.weight", "linear1.bias", "logits.weight", "logits.bias")
        assert set(stored) == set(names), f"{file} holds {sorted(stored)}, no mlp"
        return Layers(*(stored[name].astype(np.float64) for name in names))


@dataclass(frozen=True)
class Exact:
    """The least margin of an image at a placement, by the solver and by evidence."""

    image: int
    label: int
    top: int
    left: int
    bend: int
    proven: float
    exact: float


@dataclass(frozen=True)
class Program:
    """The inputs of units that a patch can change: z = slope e + start for its pixels e in [0, 1]."""

    layers: Layers
    slope: Array
    start: Array

    @staticmethod
    def of(layers: Layers, image: Array, free: NDArray[np.bool_]) -> "Program":
        """For an image of which some pixels are free."""
        rest = layers.weight[:, ~free] @ image[~free] + layers.bias
        return Program(layers, layers.weight[:, free], rest)

    @property
    def least(self) -> Array:
        """Of each unit's input."""
        return self.start + np.minimum(self.slope, 0).sum(axis=1)

    @property
    def most(self) -> Array:
        """Of each unit's input."""
        return self.start + np.maximum(self.slope, 0).sum(axis=1)

    @property
    def bends(self) -> NDArray[np.bool_]:
        """Units whose input can have either sign."""
        return (self.least < 0) & (self.most > 0)

    def minimum(self, label: int, other: int) -> float:
        """Of the margin of a label against a class: its dual bound, which no patch is below."""
        layers, bends, least, most = self.layers, self.bends, self.least, self.most
        form, is_on = layers.readout[label] - layers.readout[other], least >= 0
        constant = form[is_on] @ self.start[is_on] + layers.offset[label] - layers.offset[other]
        slope, start, units = self.slope[bends], self.start[bends], int(bends.sum())
        # Variables are e, the units' results y and whether they are on, d. Then y >= z, y <= z - least (1 - d) and
        # y <= most d, besides 0 <= y, leave y = max(z, 0) alone.
        eye, nothing = np.eye(units), np.zeros((units, units))
        rows = np.vstack(
            [
                np.hstack([slope, -eye, nothing]),
                np.hstack([-slope, eye, -np.diag(least[bends])]),
                np.hstack([np.zeros_like(slope), eye, -np.diag(most[bends])]),
            ]
        )
        limits = np.concatenate([-start, start - least[bends], np.zeros(units)])
        pixels = self.slope.shape[1]
        highest = np.concatenate([np.ones(pixels), most[bends], np.ones(units)])
        found = milp(
            np.concatenate([form[is_on] @ self.slope[is_on], form[bends], np.zeros(units)]),
            integrality=np.concatenate([np.zeros(pixels + units), np.ones(units)]),
            bounds=Bounds(0.0, highest),  # pyright: ignore[reportArgumentType]
            constraints=LinearConstraint(rows, -np.inf, limits),  # pyright: ignore[reportArgumentType]
            options={"time_limit": SECONDS},
        )
        least_sum = found.mip_dual_bound if units else found.fun
        assert least_sum is not None, found.message
        return float(least_sum + constant)


def exact_margin(layers: Layers, images: Array, proof: Evidence, row: int) -> Exact:
    """The true least margin of an image at the placement where evidence has it least."""
    columns, (height, width) = proof.columns, images.shape[1:]
    label, top, left = (int(columns[name][row]) for name in ("label", "worst_top", "worst_left"))
    image = images[int(columns["index"][row])]
    free = np.zeros((height, width), dtype=bool)
    assert isinstance(proof.threat, pc.Patch)
    stamp = proof.threat.stamp.numpy()
    free[top : top + stamp.shape[0], left : left + stamp.shape[1]] = stamp
    program = Program.of(layers, image.ravel(), free.ravel())
    margins = [program.minimum(label, other) for other in range(len(layers.offset)) if other != label]
    proven = float(columns["margin"][row])
    assert min(margins) > max(0.0, proven - TOLERANCE), (
        f"image {row} is proven for {proven}, not {min(margins)}"
    )
    return Exact(row, label, top, left, int(program.bends.sum()), round(proven, 6), round(min(margins), 6))


def measure(run: Path, count: int = COUNT, data: str = "mnist") -> dict[str, object]:
    """All that the file holds."""
    (proof,) = (
        each
        for each in map(Evidence.read, sorted((run / "evidence").glob("certify-*.npz")))
        if each.meta["classifier"].get("refine") == "split"
    )
    certified = np.flatnonzero(proof.columns["certified"])
    hardest = certified[np.argsort(proof.columns["margin"][certified], kind="stable")][:count]
    images = pc.load_dataset(data).test.floats().numpy()[:, 0].astype(np.float64)
    layers = Layers.read(run / "weights.safetensors")
    rows = [exact_margin(layers, images, proof, int(row)) for row in hardest]
    columns = list(asdict(rows[0]))
    return {
        "note": NOTE,
        "command": "python docs/making/exact_margins.py RUN",
        "weights_sha256": proof.meta["weights_sha256"],
        "images": len(rows),
        "programs": len(rows) * (len(layers.offset) - 1),
        "least_exact": min(row.exact for row in rows),
        "most_bend": max(row.bend for row in rows),
        "columns": columns,
        "rows": [[asdict(row)[name] for name in columns] for row in rows],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the folder of a run, with its evidence")
    FILE.write_text(json.dumps(measure(parser.parse_args().run), indent=1) + "\n", encoding="utf-8")
