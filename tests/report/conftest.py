"""A made-up run whose every number is known."""

from dataclasses import replace

import numpy as np
import pytest
from torch import nn

from patchcert.certificates.masking import DoubleMasking
from patchcert.evidence import Evidence, Question, Selection
from patchcert.evidence.record import VERSION
from patchcert.report.pictures import AttackedImage, Box, CertificateMap
from patchcert.report.summary import ModelSummary
from patchcert.threats import Patch, SparsePixels

IMAGES = 40
CLEAN, CERTIFIED, ATTACKED, BROKEN = 36, 28, 20, 6
INTERVALS = {"name": "IntervalBounds", "dtype": "float32"}
ATTACK = {"name": "PatchAttack", "restarts": 8, "seed": 0}


def evidence(question: Question, columns: dict[str, np.ndarray], command: str) -> Evidence:
    """Evidence as if it had been gathered on the first images of a made-up data set."""
    meta = {"version": VERSION, **question.to_dict(), "weights_sha256": "ab" * 32, "command": command}
    return Evidence(columns, meta)


def with_columns(rows: Evidence, **changes: np.ndarray | None) -> Evidence:
    """The same evidence with other columns; None takes one away."""
    columns = {name: column for name, column in {**rows.columns, **changes}.items() if column is not None}
    return replace(rows, columns=columns)


def with_question(rows: Evidence, **changes: object) -> Evidence:
    """The same rows as the answer to another question."""
    question = replace(rows.question, **changes)
    return replace(rows, meta={**rows.meta, **question.to_dict()})


@pytest.fixture
def changed():
    """Changes columns of evidence."""
    return with_columns


@pytest.fixture
def asked():
    """Changes what evidence answers."""
    return with_question


def certificates(side: int = 2, certified: int = CERTIFIED) -> Evidence:
    """The last images are wrong, the first ones certified."""
    index = np.arange(IMAGES)
    label = index % 10
    columns = {
        "index": index,
        "label": label,
        "prediction": np.where(index < CLEAN, label, (label + 1) % 10),
        "certified": index < certified,
        "margin": np.where(index < certified, 1.25 + index, -0.5 - index),
        "worst_top": np.full(IMAGES, 3),
        "worst_left": np.full(IMAGES, 7),
    }
    question = Question("certify", Patch(side), Selection("made-up"), INTERVALS)
    return evidence(question, columns, f"patchcert certify runs/known --patch {side}")


def attacks(rows: Evidence) -> Evidence:
    """Every second image is attacked; those neither certified nor wrong withstand."""
    index = np.arange(0, IMAGES, 2)
    succeeded = index >= CERTIFIED
    label = rows.columns["label"][index]
    columns = {
        "index": index,
        "label": label,
        "prediction": rows.columns["prediction"][index],
        "prediction_after": np.where(succeeded, (label + 1) % 10, label),
        "succeeded": succeeded,
        "top": rows.columns["worst_top"][index],
        "left": rows.columns["worst_left"][index],
        "steps": np.ones_like(index),
    }
    question = Question("attack", rows.threat, rows.selection, {"name": "Model"}, ATTACK)
    return evidence(question, columns, "patchcert attack runs/known --restarts 8")


def images() -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (IMAGES, 1, 12, 12), dtype=np.uint8)


@pytest.fixture
def run() -> ModelSummary:
    rows, pictures = certificates(), images()
    margins = np.full((11, 11), 2.0)
    margins[3, 7] = -0.75
    patched = pictures[30].copy()
    patched[:, 3:5, 7:9] = 255 - patched[:, 3:5, 7:9]
    return ModelSummary(
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
        maps=(CertificateMap(29, pictures[29], 9, 9, False, Patch(2), margins),),
        attacked=(AttackedImage(30, pictures[30], patched, 0, 1, (Box(3, 7, 2, 2),)),),
        thumbnails=pictures,
        classes=tuple(f"class {number}" for number in range(10)),
        environment={"versions": {"torch": "9.9.9"}, "device": "cpu"},
        checksums={"weights.safetensors": "ab" * 32},
    )


@pytest.fixture
def contradictory_run(run: ModelSummary) -> ModelSummary:
    """An attack broke image 4, which is certified."""
    attack = run.attacks[0]
    hit = attack.columns["succeeded"] | (attack.columns["index"] == 4)
    return replace(run, attacks=(with_columns(attack, succeeded=hit),))


@pytest.fixture
def voted_run(run: ModelSummary) -> ModelSummary:
    """A run certified by votes with some confidence, against any 4 pixels; it abstains from the last images."""
    rows = run.certificates[0]
    label, prediction = rows.columns["label"], rows.columns["prediction"]
    votes = np.where(np.arange(10) == label[:, None], 991, 1)
    columns = {
        "index": rows.columns["index"],
        "label": label,
        "prediction": np.where(prediction == label, label, -1),
        "certified": rows.columns["certified"],
        "radius": np.where(rows.columns["certified"], 6, -1),
        "selected": label,
        "votes": votes,
    }
    settings = {"name": "RandomAblation", "retained": 45, "error_rate": 0.05}
    question = Question("certify", SparsePixels(4), Selection("made-up"), settings)
    voted = evidence(question, columns, "patchcert certify runs/known --method ablation --sparse 4")
    return replace(run, threat=SparsePixels(4), certificates=(voted,), attacks=(), maps=(), attacked=())


@pytest.fixture
def masked_run(run: ModelSummary) -> ModelSummary:
    """A run certified by masks; image 29 fails behind masks 0 and 4, all others have least lead behind mask 2 alone."""
    rows = run.certificates[0]
    columns = {name: rows.columns[name] for name in ("index", "label", "prediction", "certified")}
    index = columns["index"]
    columns |= {
        "lead": np.where(columns["certified"], 0.25, -0.5),
        "first_mask": np.where(index == 29, 4, 2),
        "second_mask": np.where(index == 29, 0, 2),
    }
    settings = DoubleMasking(nn.Identity(), Patch(2), masks=3, fill=0.0).describe()
    question = Question("certify", Patch(2), Selection("made-up"), settings)
    masked = evidence(question, columns, "patchcert certify runs/known --method masking --masks 3")
    return replace(run, certificates=(masked,), attacks=(), maps=(), attacked=())
