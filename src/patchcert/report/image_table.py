"""The page's table of images: one row each, to sort and filter."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from patchcert.report.pictures import sprite
from patchcert.report.summary import CertificateRows, RunSummary
from patchcert.report.words import class_name

VERDICTS = ("certified", "not certified", "wrong")
OUTCOMES = ("withstood", "broken", "not attacked")
STATIC_ROWS = 12
SPRITE_COLUMNS = 40


@dataclass(frozen=True)
class ImageTable:
    """All rows as columns of plain numbers for the page's script; the first few as text for those without."""

    total: int
    data: Mapping[str, object]
    rows: tuple[tuple[str, ...], ...]
    sprite: str
    height: int
    width: int


def image_table(run: RunSummary, rows: CertificateRows) -> ImageTable:
    """The table of all images of the headline's certificates."""
    pictures = run.thumbnails
    height, width = pictures.shape[-2:] if pictures is not None else (0, 0)
    return ImageTable(
        total=len(rows.index),
        data=_columns(run, rows),
        rows=tuple(_text(run, rows, at) for at in range(min(STATIC_ROWS, len(rows.index)))),
        sprite=sprite(pictures, SPRITE_COLUMNS) if pictures is not None else "",
        height=height,
        width=width,
    )


def _columns(run: RunSummary, rows: CertificateRows) -> dict[str, object]:
    return {
        "index": rows.index.tolist(),
        "label": rows.label.tolist(),
        "prediction": rows.prediction.tolist(),
        "verdict": _verdicts(rows).tolist(),
        "margin": [value if math.isfinite(value) else None for value in rows.margin.round(4).tolist()],
        "top": rows.top.tolist(),
        "left": rows.left.tolist(),
        "outcome": [_outcome(run, index) for index in rows.index.tolist()],
        "classes": list(run.classes),
        "verdicts": VERDICTS,
        "outcomes": OUTCOMES,
        "spriteColumns": SPRITE_COLUMNS,
    }


def _verdicts(rows: CertificateRows) -> np.ndarray:
    return np.where(rows.certified, 0, np.where(rows.correct, 1, 2))


def _outcome(run: RunSummary, index: int) -> int:
    held = run.withstood.get(index)
    return OUTCOMES.index("not attacked" if held is None else "withstood" if held else "broken")


def _text(run: RunSummary, rows: CertificateRows, at: int) -> tuple[str, ...]:
    top, left = int(rows.top[at]), int(rows.left[at])
    margin = float(rows.margin[at])
    return (
        str(int(rows.index[at])),
        class_name(run.classes, int(rows.label[at])),
        class_name(run.classes, int(rows.prediction[at])),
        VERDICTS[int(_verdicts(rows)[at])],
        f"{margin:.2f}" if math.isfinite(margin) else "not finite",
        f"{top}, {left}" if top >= 0 else "",
        OUTCOMES[_outcome(run, int(rows.index[at]))],
    )
