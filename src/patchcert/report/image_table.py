"""The page's table of images: one row each, to sort and filter."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from patchcert.report.pictures import sprite
from patchcert.report.summary import CertificateRows, RunSummary
from patchcert.report.words import class_name, margin_text

VERDICTS = ("certified", "not certified", "wrong")
OUTCOMES = ("withstood", "broken", "wrong already", "not attacked")
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
        "margin": [float(f"{value:.4g}") if math.isfinite(value) else None for value in rows.margin.tolist()],
        "top": rows.top.tolist(),
        "left": rows.left.tolist(),
        "outcome": [_outcome(run, rows, at) for at in range(len(rows.index))],
        "classes": list(run.classes),
        "verdicts": VERDICTS,
        "outcomes": OUTCOMES,
        "spriteColumns": SPRITE_COLUMNS,
    }


def _verdicts(rows: CertificateRows) -> np.ndarray:
    return np.where(rows.certified, 0, np.where(rows.correct, 1, 2))


def _outcome(run: RunSummary, rows: CertificateRows, at: int) -> int:
    held = run.withstood.get(int(rows.index[at]))
    if held is None:
        return OUTCOMES.index("not attacked")
    failed = "broken" if rows.prediction[at] == rows.label[at] else "wrong already"
    return OUTCOMES.index("withstood" if held else failed)


def _text(run: RunSummary, rows: CertificateRows, at: int) -> tuple[str, ...]:
    top, left = int(rows.top[at]), int(rows.left[at])
    return (
        str(int(rows.index[at])),
        class_name(run.classes, int(rows.label[at])),
        class_name(run.classes, int(rows.prediction[at])),
        VERDICTS[int(_verdicts(rows)[at])],
        margin_text(float(rows.margin[at])),
        f"{top}, {left}" if top >= 0 else "",
        OUTCOMES[_outcome(run, rows, at)],
    )
