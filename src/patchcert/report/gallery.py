"""Sample images as figures: certificate maps, and images that an attack broke."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from patchcert.report.pictures import data_address, heat_map
from patchcert.report.summary import AttackedImage, Box, CertificateMap
from patchcert.report.words import class_name, margin_text


@dataclass(frozen=True)
class MapFigure:
    """An image beside its certificate map, with the weakest placement to draw into both.

    The map has one cell per placement, shifted by half a patch so that it lies at the patch's centre.
    """

    index: int
    image: str
    heat: str
    height: int
    width: int
    rows: int
    columns: int
    shift_down: float
    shift_right: float
    weakest: Box
    verdict: str
    label: str
    prediction: str
    margin: str


@dataclass(frozen=True)
class AttackFigure:
    """An image before and after the attack that broke it, and the patch by itself where there is just one."""

    index: int
    clean: str
    attacked: str
    height: int
    width: int
    boxes: tuple[Box, ...]
    patch: str
    label: str
    before: str
    after: str


def map_figures(maps: Sequence[CertificateMap], classes: Sequence[str]) -> tuple[MapFigure, ...]:
    """The figures of all maps under one colour scale, so that they can be compared."""
    limit = colour_limit(maps)
    return tuple(_map_figure(sample, limit, classes) for sample in maps)


def colour_limit(maps: Sequence[CertificateMap]) -> float:
    """The margin at which colours are fullest: the middle map's largest, so that no map dims all others."""
    largest = sorted(float(np.nanmax(np.abs(sample.margins))) for sample in maps)
    limit = largest[len(largest) // 2] if largest else 0.0
    return limit if 0 < limit < math.inf else 1.0


def attack_figure(sample: AttackedImage, classes: Sequence[str]) -> AttackFigure:
    """The figure of one broken image."""
    return AttackFigure(
        index=sample.index,
        clean=data_address(sample.clean),
        attacked=data_address(sample.attacked),
        height=sample.clean.shape[-2],
        width=sample.clean.shape[-1],
        boxes=sample.boxes,
        patch=_patch(sample),
        label=class_name(classes, sample.label),
        before=class_name(classes, sample.before),
        after=class_name(classes, sample.after),
    )


def _map_figure(sample: CertificateMap, limit: float, classes: Sequence[str]) -> MapFigure:
    top, left = sample.weakest
    rows, columns = sample.margins.shape
    right = sample.prediction == sample.label
    return MapFigure(
        index=sample.index,
        image=data_address(sample.image),
        heat=heat_map(sample.margins, limit),
        height=sample.image.shape[-2],
        width=sample.image.shape[-1],
        rows=rows,
        columns=columns,
        shift_down=(sample.height - 1) / 2,
        shift_right=(sample.width - 1) / 2,
        weakest=Box(top, left, sample.height, sample.width),
        verdict="certified" if sample.certified else "not certified" if right else "wrong",
        label=class_name(classes, sample.label),
        prediction=class_name(classes, sample.prediction),
        margin=margin_text(sample.least),
    )


def _patch(sample: AttackedImage) -> str:
    if len(sample.boxes) != 1:
        return ""
    box = sample.boxes[0]
    rows, columns = slice(box.top, box.top + box.height), slice(box.left, box.left + box.width)
    return data_address(np.ascontiguousarray(sample.attacked[:, rows, columns]))
