"""Evidence is small, named by its question, and checked when it is read."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patchcert.certificates import Certificates
from patchcert.errors import RunError
from patchcert.evidence import Evidence, EvidenceFolder, Question, Selection
from patchcert.evidence.measuring import certificate_columns
from patchcert.threats import Patch, SparsePixels, shapes

RESULTS = Path(__file__).parents[2] / "results"
INTERVALS = {"name": "IntervalBounds", "dtype": "float32"}
ATTACK = {"kind": "PatchAttack", "restarts": 80, "batch_size": 512, "seed": 0}

threats = st.one_of(
    st.builds(Patch, st.tuples(st.integers(1, 9), st.integers(1, 9))),
    st.builds(lambda pixels: Patch(shapes.diamond(pixels)), st.sampled_from([4, 9, 13, 25])),
    st.builds(lambda corner: Patch(2, placements=[corner]), st.tuples(st.integers(0, 9), st.integers(0, 9))),
    st.builds(SparsePixels, st.integers(1, 9), st.sampled_from(["tight", "per-pixel"])),
)
selections = st.builds(
    Selection,
    st.sampled_from(["mnist", "cifar10"]),
    st.sampled_from(["test", "train"]),
    st.none() | st.integers(1, 9),
    st.none(),
)
questions = st.one_of(
    st.builds(
        Question, st.just("certify"), threats, selections, st.sampled_from([INTERVALS, {"name": "X", "a": 1}])
    ),
    st.builds(
        Question,
        st.just("attack"),
        threats,
        selections,
        st.sampled_from([{"name": "Model"}, {"name": "Defended", "defense": "D(1)"}]),
        st.sampled_from([ATTACK, ATTACK | {"restarts": 8}]),
        st.booleans(),
    ),
)


@given(questions, questions)
def test_two_questions_have_one_name_exactly_if_they_are_one(first, second):
    assert (first == second) == (first.name == second.name) == (first.to_dict() == second.to_dict())
    assert Question.from_dict(first.to_dict()) == first


def test_names_do_not_depend_on_batches_or_on_what_else_is_told_of_an_image():
    asked = Question("attack", Patch(5), Selection("mnist"), {"name": "Model"}, ATTACK)
    assert replace(asked, attack=ATTACK | {"batch_size": 16384}).name == asked.name
    proof = Question("certify", Patch(5), Selection("mnist"), INTERVALS)
    assert replace(proof, classifier=INTERVALS | {"verdicts_only": True}).name == proof.name


def test_evidence_of_ten_thousand_images_is_small(tmp_path, generator):
    count = 10_000
    found = Certificates(
        certified=torch.rand(count, generator=generator) < 0.5,
        margins=torch.randn(count, 10, generator=generator),
        worst_placement=torch.randint(0, 28, (count, 2), generator=generator),
        predictions=torch.randint(0, 10, (count,), generator=generator),
        labels=torch.randint(0, 10, (count,), generator=generator),
    )
    np.savez_compressed(tmp_path / "rows.npz", **certificate_columns(found, torch.arange(count)))
    assert (tmp_path / "rows.npz").stat().st_size < 120_000


@pytest.fixture
def file(finished, mlp):
    """Certificates of 100 images, of which the first 94 are right and the first 62 proven."""
    run = finished.run(mlp, {Patch(5): (94, 62)})
    (found,) = EvidenceFolder(run.path / "evidence").files()
    return found


def change(file, **columns):
    with np.load(file) as stored:
        arrays = dict(stored) | columns
    np.savez_compressed(file, **{name: array for name, array in arrays.items() if array is not None})


def column(file, name):
    with np.load(file) as stored:
        return stored[name].copy()


@pytest.mark.parametrize(
    ("name", "value"), [("prediction", 7), ("margin", -1.0), ("margin", 0.0), ("margin", np.nan)]
)
def test_rows_that_contradict_themselves_are_refused(file, name, value):
    changed = column(file, name)
    changed[3] = value
    change(file, **{name: changed})
    with pytest.raises(RunError, match="contradicts itself: row 3 is certified"):
        Evidence.read(file)


@pytest.mark.parametrize("value", [0, -1])
def test_every_image_is_named_once(file, value):
    changed = column(file, "index")
    changed[1] = value
    change(file, index=changed)
    with pytest.raises(RunError, match="does not name every image once, in order"):
        Evidence.read(file)


def test_a_damaged_file_is_refused_by_name(file):
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(RunError, match=r"everywhere-\w+.npz is no readable file of evidence"):
        Evidence.read(file)


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ("{", "no readable file"),
        ("[]", "version unknown"),
        ("{}", "version 1"),
        ('{"version": 2}', "does not say what"),
    ],
)
def test_evidence_that_does_not_say_what_it_is_of_is_refused(file, meta, message):
    change(file, meta=np.array(meta))
    with pytest.raises(RunError, match=message):
        Evidence.read(file)


def test_evidence_without_a_column_is_refused(file):
    change(file, prediction=None)
    with pytest.raises(RunError, match="lacks the column 'prediction'"):
        Evidence.read(file)


def test_verdicts_without_margins_are_counted(file):
    change(file, margin=None)
    assert (Evidence.read(file).correct, Evidence.read(file).certified) == (94, 62)


def test_rows_of_published_test_images_are_all_there(tmp_path):
    """A part of them, the proven ones say, must not pass for all."""
    whole = Evidence.read(next((RESULTS / "02fe3563fc47b749").glob("certify-*.npz")))
    proven = np.flatnonzero(whole.columns["certified"])[:50]
    part = {name: values[proven] for name, values in whole.columns.items()}
    with pytest.raises(RunError, match="has 50 rows; expected those of the 10000 test images"):
        Evidence(part, whole.meta).write(tmp_path / "certify.npz")


def test_an_attack_succeeds_where_the_answer_is_wrong(finished, mlp, attack_rows):
    run = finished.run(mlp, {})
    question = Question("attack", Patch(5), Selection("mnist", drawn=5), {"name": "Model"}, ATTACK)
    file = finished.write(run, question, attack_rows(range(5), withstood=3))
    change(file, succeeded=np.zeros(5, bool))
    with pytest.raises(RunError, match="row 3 says otherwise of the attack than its label"):
        Evidence.read(file)
