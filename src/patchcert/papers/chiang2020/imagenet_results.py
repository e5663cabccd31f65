"""Results of the ImageNet table: one folder for each network and size of patch, counted from its rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from patchcert.errors import RunError
from patchcert.papers.chiang2020.evidence import AttackedRows
from patchcert.papers.chiang2020.imagenet_corners import DEFENSES, DefenseName
from patchcert.papers.chiang2020.imagenet_plan import CornerPlan, evidence_file

SUMMARY = "summary.json"
COLUMNS = ("undefended", "undefended_after", "margin", "steps", "top", "left")
Cell = tuple[DefenseName, bool]
CELLS: tuple[Cell, ...] = tuple((name, adaptive) for name in DEFENSES for adaptive in (False, True))


@dataclass(frozen=True)
class CornerResult:
    """The evidence of one network and one size of patch, by defense and whether the attack knows of it."""

    path: Path

    @cached_property
    def cells(self) -> Mapping[Cell, AttackedRows]:
        """The rows of every cell that is there, which must be of the same network, images and plan."""
        files = {cell: self.path / evidence_file(*cell) for cell in CELLS}
        found = {cell: AttackedRows.read(file) for cell, file in files.items() if file.is_file()}
        for cell, rows in found.items():
            self._check(cell, rows)
        return found

    @property
    def plan(self) -> CornerPlan | None:
        """What was carried out; None where nothing was."""
        return next((_plan_of(rows) for rows in self.cells.values()), None)

    def has(self, defenses: Sequence[DefenseName]) -> bool:
        """Whether all cells of the defenses are there."""
        return all(cell in self.cells for cell in CELLS if cell[0] in defenses)

    def summary(self) -> dict[str, Any]:
        """Accuracies for people to look at."""
        first = next(iter(self.cells.values()))
        return {
            "fingerprint": self.path.name,
            "plan": first.meta["plan"],
            "images": first.total,
            "undefended_accuracy": _share(first.columns["undefended"] == first.columns["label"]),
            "cells": {rows.path.stem: _accuracies(rows) for rows in self.cells.values()},
            **{key: first.meta[key] for key in ("device", "versions", "weights_sha256", "source_sha256")},
        }

    def _check(self, cell: Cell, rows: AttackedRows) -> None:
        meta = rows.meta
        missing = [name for name in COLUMNS if name not in rows.columns]
        if missing:
            raise RunError(f"{rows.path} lacks the column {missing[0]!r}", hint="attack again")
        plan = _plan_of(rows)
        name = plan.fingerprint(meta["weights_sha256"], meta["data"]["sha256"])
        if name != self.path.name or cell != (meta["defense_name"], meta["adaptive"]):
            raise RunError(
                f"{rows.path} is not evidence of what its folder and name say",
                hint="weights, data or plan were others; attack again",
            )
        if {len(column) for column in rows.columns.values()} != {plan.images}:
            raise RunError(f"{rows.path} does not have {plan.images} rows in every column")


def initially_correct(rows: AttackedRows) -> tuple[int, int]:
    """Of the images that the undefended network gets right, how many are right under attack, and how many are."""
    right = rows.columns["undefended"] == rows.columns["label"]
    return int(np.count_nonzero(right & ~rows.columns["succeeded"])), int(np.count_nonzero(right))


def corner_results(folder: Path, plan: CornerPlan) -> dict[int, CornerResult]:
    """The results of the plan in a folder by their seed, whatever the weights and images."""
    found: dict[int, CornerResult] = {}
    for path in sorted(folder.glob(f"imagenet-{plan.network}-{plan.patch}x{plan.patch}-*")):
        result = CornerResult(path)
        if result.plan is not None and _same_but_seed(result.plan, plan):
            found.setdefault(result.plan.seed, result)
    return found


def _same_but_seed(one: CornerPlan, other: CornerPlan) -> bool:
    return one.to_dict() | {"seed": 0} == other.to_dict() | {"seed": 0}


def _plan_of(rows: AttackedRows) -> CornerPlan:
    return CornerPlan.from_dict(rows.meta["plan"])


def _accuracies(rows: AttackedRows) -> dict[str, float]:
    kept, right = initially_correct(rows)
    return {
        "clean_accuracy": rows.correct / rows.total,
        "accuracy": rows.withstood / rows.total,
        "accuracy_of_initially_correct": kept / right if right else 0.0,
        "undefended_accuracy_after": _share(rows.columns["undefended_after"] == rows.columns["label"]),
        "seconds": rows.meta["seconds"],
    }


def _share(flags: Any) -> float:  # noqa: ANN401
    return float(np.mean(flags))
