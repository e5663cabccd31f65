"""A made-up run whose every number is known, a reader of pages, and a browser."""

from dataclasses import replace

import numpy as np
import pytest

from patchcert.report.summary import (
    AttackedImage,
    AttackRows,
    Box,
    CertificateMap,
    CertificateRows,
    RunSummary,
)
from patchcert.threats import Patch

IMAGES = 40
CLEAN, CERTIFIED, ATTACKED, BROKEN = 36, 28, 20, 6


def certificates(side: int = 2, certified: int = CERTIFIED) -> CertificateRows:
    """The last images are wrong, the first ones certified."""
    index = np.arange(IMAGES)
    label = index % 10
    prediction = np.where(index < CLEAN, label, (label + 1) % 10)
    margin = np.where(index < certified, 1.25 + index, -0.5 - index)
    zeros = np.zeros(IMAGES, dtype=np.int64)
    meta = {"command": f"patchcert certify runs/known --patch {side}"}
    return CertificateRows(
        Patch(side), index, label, prediction, index < certified, margin, zeros + 3, zeros + 7, meta
    )


def attacks(rows: CertificateRows) -> AttackRows:
    """Every second image is attacked; those neither certified nor wrong withstand."""
    index = np.arange(0, IMAGES, 2)
    succeeded = index >= CERTIFIED
    label = rows.label[index]
    after = np.where(succeeded, (label + 1) % 10, label)
    meta = {"command": "patchcert attack runs/known --restarts 8"}
    return AttackRows(rows.threat, index, label, after, succeeded, rows.top[index], rows.left[index], meta)


def images() -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (IMAGES, 1, 12, 12), dtype=np.uint8)


@pytest.fixture
def run() -> RunSummary:
    rows, pictures = certificates(), images()
    margins = np.full((11, 11), 2.0)
    margins[3, 7] = -0.75
    changed = pictures[30].copy()
    changed[:, 3:5, 7:9] = 255 - changed[:, 3:5, 7:9]
    return RunSummary(
        name="known run",
        dataset="made-up",
        model="mlp (hidden 8)",
        threat=Patch(2),
        spec_text='[model]\nname = "mlp"\n',
        metrics=[
            {"epoch": 0, "epsilon": 0.0, "loss": 2.25, "learning_rate": 0.01},
            {"epoch": 1, "epsilon": 0.5, "loss": 1.5, "clean_accuracy": 0.8, "certified_accuracy": 0.25},
            {"epoch": 2, "epsilon": 1.0, "loss": 1.0, "clean_accuracy": 0.9, "certified_accuracy": 0.7},
        ],
        certificates=(rows,),
        attacks=(attacks(rows),),
        maps=(CertificateMap(29, pictures[29], 9, 9, False, 2, 2, margins),),
        attacked=(AttackedImage(30, pictures[30], changed, 0, 0, 1, (Box(3, 7, 2, 2),)),),
        thumbnails=pictures,
        classes=tuple(f"class {number}" for number in range(10)),
        environment={"versions": {"torch": "9.9.9"}, "device": "cpu"},
        checksums={"weights.safetensors": "ab" * 32},
    )


@pytest.fixture
def contradictory_run(run: RunSummary) -> RunSummary:
    """An attack broke image 4, which is certified."""
    attack = run.attacks[0]
    return replace(run, attacks=(replace(attack, succeeded=attack.succeeded | (attack.index == 4)),))
