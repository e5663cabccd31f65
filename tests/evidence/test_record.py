"""One name for each question, one format for each answer, and no answer that contradicts itself."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import patchcert as pc
from patchcert.certificates import Certificates
from patchcert.errors import InvalidInput, RunError
from patchcert.evidence import Certification, Evidence, EvidenceFolder, Question, Selection, refuted
from patchcert.evidence.measuring import certificate_columns
from patchcert.evidence.record import VERSION

RESULTS = Path(__file__).parents[2] / "results"
INTERVALS = {"name": "IntervalBounds", "dtype": "float32"}


def stamps():
    rows = st.lists(st.lists(st.booleans(), min_size=2, max_size=2), min_size=2, max_size=2)
    return rows.filter(lambda grid: any(map(any, grid))).map(lambda grid: pc.Patch(torch.tensor(grid)))


def threats():
    corners = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=3, unique=True)
    maps = st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=3, max_size=3)
    return st.one_of(
        st.integers(1, 3).map(pc.Patch),
        stamps(),
        corners.map(lambda listed: pc.Patch(2, placements=listed)),
        maps.filter(lambda grid: any(map(any, grid))).map(
            lambda grid: pc.Patch(2, placements=torch.tensor(grid))
        ),
        st.builds(pc.SparsePixels, st.integers(1, 3), st.sampled_from(["tight", "per-pixel", "per-value"])),
    )


def questions():
    selections = st.builds(
        Selection,
        data=st.sampled_from(["mnist", "mnist-mini"]),
        split=st.sampled_from(["test", "train"]),
        limit=st.none() | st.integers(1, 2),
        drawn=st.none() | st.integers(1, 2),
        seed=st.integers(0, 1),
    )
    classifiers = st.sampled_from(
        [INTERVALS, {**INTERVALS, "dtype": "float64"}, {"name": "RandomAblation", "retained": 45}]
    )
    certified = st.builds(Question, st.just("certify"), threats(), selections, classifiers)
    attacked = st.builds(
        Question,
        st.just("attack"),
        threats(),
        selections,
        st.sampled_from(
            [{"name": "Model"}, {"name": "Defended", "defense": "A"}, {"name": "Defended", "defense": "B"}]
        ),
        st.sampled_from(
            [{"kind": "PatchAttack", "steps": 1, "seed": 0}, {"kind": "PatchAttack", "steps": 1, "seed": 1}]
        ),
        st.booleans(),
    )
    return certified | attacked


@given(st.lists(questions(), min_size=2, max_size=6))
def test_two_questions_have_one_name_exactly_if_they_are_the_same(asked):
    for first in asked:
        for second in asked:
            assert (first.name == second.name) == (first == second)


@given(questions())
def test_a_question_is_read_back_as_it_was_asked(question):
    again = Question.from_dict(json.loads(json.dumps(question.to_dict())))
    assert again == question
    assert again.threat == question.threat
    assert hash(again) == hash(question)


def test_two_maps_of_one_patch_and_sparse_threats_have_names_of_their_own():
    """These once shared a name, or had two."""
    first, second = torch.zeros(27, 27, dtype=torch.bool), torch.zeros(27, 27, dtype=torch.bool)
    first[0, 0] = second[0, 1] = True
    asked = [
        Question("certify", threat, Selection("mnist"), INTERVALS)
        for threat in (pc.Patch(2, placements=first), pc.Patch(2, placements=second), pc.SparsePixels(4))
    ]
    assert len({question.name for question in asked}) == 3
    diamond = Question("certify", pc.Patch(pc.shapes.diamond(25)), Selection("mnist"), INTERVALS)
    assert diamond.name.startswith("certify-patch-diamond-of-25-pixels-everywhere-")


def test_batch_sizes_and_what_else_is_said_of_an_image_are_no_part_of_the_question():
    series = {"kind": "AttackSeries", "attacks": [{"kind": "PatchAttack", "batch_size": 1}], "batch_size": 2}
    other = {"kind": "AttackSeries", "attacks": [{"kind": "PatchAttack", "batch_size": 512}], "batch_size": 9}
    asked = [
        Question("attack", pc.Patch(2), Selection("mnist"), {"name": "Model"}, each)
        for each in (series, other)
    ]
    assert asked[0] == asked[1]
    assert asked[0].name == asked[1].name
    proof = Question("certify", pc.Patch(5), Selection("mnist"), INTERVALS)
    assert replace(proof, classifier={**INTERVALS, "verdicts_only": True}).name == proof.name


def test_images_are_drawn_by_the_seed_alone():
    first, again, other = (Selection("mnist", drawn=400, seed=seed).positions(1000) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len(first.unique()) == 400
    assert Selection("mnist", drawn=400).positions(10).tolist() == list(range(10))
    assert Selection("mnist", limit=3).positions(10).tolist() == [0, 1, 2]


@pytest.fixture
def evidence(subject):
    found = Certification(subject, pc.Patch(3)).run()
    assert 0 < found.certified < found.total == found.correct
    return found


def changed(evidence, **columns):
    return Evidence({**evidence.columns, **columns}, evidence.meta)


def test_evidence_is_read_back_as_it_was_written(evidence, tmp_path):
    evidence.write(tmp_path / "rows.npz")
    again = Evidence.read(tmp_path / "rows.npz")
    assert again.meta == evidence.meta
    assert all(np.array_equal(again.columns[name], evidence.columns[name]) for name in evidence.columns)
    assert again.question == evidence.question
    assert again.meta["version"] == 2


@pytest.mark.parametrize(
    ("setting", "written", "others"),
    [
        (0.3, ("0.3", "0.30", "3e-1"), ("0.2", "", "true", "0.3,0.3")),
        (12, ("12",), ("1", "twelve", "1e")),
        ([3, 2], ("3,2",), ("3", "2,3", "3,2,2")),
        (True, ("true",), ("false", "1")),
        (None, ("none",), ("0", "false")),
        ("bfloat16", ("bfloat16",), ("float16",)),
    ],
)
def test_a_setting_is_found_as_commands_write_it(evidence, setting, written, others):
    classifier = evidence.meta["classifier"] | {"tried": setting}
    found = replace(evidence, meta=evidence.meta | {"classifier": classifier})
    assert all(found.has_settings([f"tried={word}"]) for word in written)
    assert not any(found.has_settings([f"tried={word}"]) for word in others)
    assert found.has_settings([])
    assert not found.has_settings(["missing=none"])
    assert found.has_settings([f"tried={others[0]}", f"tried={written[0]}"])
    assert not found.has_settings([f"tried={written[0]}", f"tried={others[0]}"])


def test_contradictions_are_refused(evidence):
    rows = evidence.columns
    flipped = ~rows["certified"]
    with pytest.raises(RunError, match=r"contradicts itself: row \d+ is certified with a margin of -"):
        changed(evidence, certified=flipped).check()
    wrong = np.where(rows["certified"], (rows["label"] + 1) % 4, rows["prediction"])
    with pytest.raises(RunError, match="is certified, but predicted wrongly"):
        changed(evidence, prediction=wrong.astype(np.int8)).check()
    with pytest.raises(RunError, match="does not name every image once, in order"):
        changed(evidence, index=rows["index"][::-1].copy()).check()
    with pytest.raises(RunError, match="has columns of"):
        changed(evidence, margin=rows["margin"][:-1]).check()
    with pytest.raises(RunError, match="lacks the column 'label'"):
        Evidence({name: rows[name] for name in rows if name != "label"}, evidence.meta).check()
    for meta, message in (
        ({**evidence.meta, "version": 1}, "is evidence of version 1; expected version 2"),
        ({**evidence.meta, "threat": {"kind": "laser"}}, "does not say what it is evidence of"),
        ({**evidence.meta, "kind": "guess"}, "does not say what it is evidence of: 'guess'"),
        ({**evidence.meta, "classifier": "a word"}, "does not say what it is evidence of"),
        (
            {key: evidence.meta[key] for key in evidence.meta if key != "weights_sha256"},
            "does not name its weights",
        ),
    ):
        with pytest.raises(RunError, match=message):
            Evidence(rows, meta).check()


def test_an_attack_that_says_otherwise_than_its_labels_is_refused(evidence):
    forged = changed(attacked(evidence, np.zeros(20, bool)), succeeded=np.ones(20, bool))
    with pytest.raises(RunError, match="row 0 says otherwise of the attack than its label"):
        forged.check()


def test_rows_of_published_test_images_are_all_there(tmp_path):
    """A part of them, the proven ones say, must not pass for all."""
    whole = Evidence.read(next((RESULTS / "02fe3563fc47b749").glob("certify-*.npz")))
    proven = np.flatnonzero(whole.columns["certified"])[:50]
    part = {name: values[proven] for name, values in whole.columns.items()}
    with pytest.raises(RunError, match="has 50 rows; expected those of the 10000 test images"):
        Evidence(part, whole.meta).write(tmp_path / "certify.npz")


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


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ("{", "not a readable evidence file"),
        ("[]", "is no evidence: it has no `meta`"),
        ("{}", "version 1"),
        ('{"version": 2}', "does not say what"),
    ],
)
def test_evidence_that_does_not_say_what_it_is_of_is_refused(evidence, tmp_path, meta, message):
    np.savez_compressed(tmp_path / "rows.npz", meta=np.array(meta), **evidence.columns)
    with pytest.raises(RunError, match=message):
        Evidence.read(tmp_path / "rows.npz")


@pytest.mark.parametrize("margin", [np.array(1.0), np.ones((20, 2)), np.array(["a"] * 20)])
def test_a_column_that_is_not_one_number_per_image_is_refused(evidence, margin):
    with pytest.raises(RunError, match="'margin' must hold one number for each image"):
        changed(evidence, margin=margin).check()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda whole: b"", "it is empty"),
        (lambda whole: b"PK cut short", "it is no .npz archive, or it is cut short"),
        (lambda whole: whole[:300], "it is no .npz archive, or it is cut short"),
        (lambda whole: bytes(range(256)), "it is no .npz archive, or it is cut short"),
        (lambda whole: whole[:80] + bytes(40) + whole[120:], "what it holds is damaged"),
    ],
)
def test_a_damaged_file_is_named_in_words_of_our_own(evidence, tmp_path, damage, words):
    file = tmp_path / "rows.npz"
    evidence.write(file)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(
        RunError, match=rf"rows\.npz is not a readable evidence file: {re.escape(words)}"
    ) as caught:
        Evidence.read(file)
    assert "pickle" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("label", "a whole number"), ("index", "a whole number"), ("certified", "yes or no")],
)
def test_columns_hold_the_kind_of_number_that_they_are_about(evidence, name, expected):
    column = evidence.columns[name].astype(np.float64)
    with pytest.raises(
        RunError, match=f"the column '{name}' must hold {expected} for each image, got float64"
    ):
        changed(evidence, **{name: column}).check()


def attacked(evidence, broken):
    columns = {name: evidence.columns[name] for name in ("index", "label", "prediction")}
    after = np.where(broken, (columns["label"] + 1) % 4, columns["label"])
    columns |= {"prediction_after": after, "succeeded": broken}
    columns |= {name: np.zeros(20, np.int64) for name in ("top", "left", "steps")}
    asked = {"kind": "attack", "attack": {"kind": "PatchAttack"}, "classifier": {"name": "Model"}}
    return Evidence(columns, {**evidence.meta, **asked})


def test_an_alert_withstands_an_attack_where_detection_is_promised(evidence):
    shown = attacked(evidence, np.ones(20, bool))
    columns = {
        **shown.columns,
        "prediction": shown.columns["label"].copy(),
        "prediction_after": np.full(20, -1),
    }
    columns["prediction"][:3] = -1
    for name, withstood in (("MaskedDetection", 17), ("DoubleMasking", 0)):
        assert Evidence(columns, {**shown.meta, "classifier": {"name": name}}).withstood == withstood


def test_a_broken_proof_is_refuted_unless_it_is_about_something_else(evidence):
    everything = attacked(evidence, np.ones(20, bool))
    assert refuted(evidence, everything).tolist() == np.flatnonzero(evidence.columns["certified"]).tolist()
    assert not refuted(evidence, attacked(evidence, ~evidence.columns["certified"])).size
    for change in (
        {"weights_sha256": "0" * 64},
        {"threat": pc.Patch((1, 4)).to_dict()},
        {"data": {**evidence.meta["data"], "split": "train"}},
        {"classifier": {"name": "Defended", "defense": "A"}},
    ):
        assert not refuted(evidence, Evidence(everything.columns, {**everything.meta, **change})).size
    smaller = Evidence(everything.columns, {**everything.meta, "threat": pc.Patch((1, 2)).to_dict()})
    assert refuted(evidence, smaller).size, "a patch of fewer pixels is a member of the threat too"


def test_a_counterexample_of_one_proof_refutes_another(evidence):
    columns = {**evidence.columns, "broken": evidence.columns["certified"].copy()}
    columns["certified"] = np.zeros_like(columns["certified"])
    searched = Evidence(
        columns, {**evidence.meta, "classifier": {**evidence.meta["classifier"], "refine": "split"}}
    )
    assert refuted(evidence, searched).tolist() == np.flatnonzero(evidence.columns["certified"]).tolist()
    assert not refuted(searched, searched).size
    assert not refuted(evidence, evidence).size


def test_a_folder_knows_which_images_are_proven(subject, tmp_path):
    folder = EvidenceFolder(tmp_path)
    found = Certification(subject, pc.Patch(1)).into(folder).run()
    positions = torch.tensor([3, 7, 19])
    proven = folder.proven(pc.Patch(1), subject.selection, subject.weights, positions)
    assert proven.tolist() == found.columns["certified"][positions].tolist()
    assert folder.proven(pc.Patch(2), subject.selection, subject.weights, positions) is None
    assert folder.proven(pc.Patch(1), subject.selection, "0" * 64, positions) is None
    assert (
        folder.proven(pc.Patch(1), replace(subject.selection, split="train"), subject.weights, positions)
        is None
    )
    assert folder.proven(pc.Patch(1), subject.selection, subject.weights, torch.tensor([25])) is None
    other = {"toy.bin": "2" * 64}
    assert folder.proven(pc.Patch(1), subject.selection, subject.weights, positions, INTERVALS, other) is None
    assert folder.files() == (folder.file(found.question),)


@pytest.mark.parametrize("chosen", [{"limit": 0}, {"limit": -3}, {"drawn": 0}])
def test_a_selection_has_images(chosen):
    with pytest.raises(InvalidInput, match="expected at least one image"):
        Selection("mnist", **chosen)


def test_rows_that_are_both_certified_and_broken_are_refused(tmp_path):
    question = Question("certify", pc.Patch(2), Selection("mnist-mini", limit=3), {"name": "TheirBounds"})
    columns = {
        "index": np.arange(3),
        "label": np.zeros(3, np.int8),
        "prediction": np.zeros(3, np.int8),
        "certified": np.array([True, False, True]),
        "broken": np.array([False, True, True]),
    }
    evidence = Evidence(columns, {"version": VERSION, **question.to_dict(), "weights_sha256": "0" * 64})
    with pytest.raises(RunError, match="row 2 is both certified and broken"):
        evidence.write(tmp_path / "evidence.npz")
    columns["certified"][2] = False
    assert evidence.write(tmp_path / "evidence.npz").broken == 2


@pytest.mark.parametrize(
    "measured", [5, {"images": 0, "seconds": 1.0}, {"images": "3", "seconds": 1.0}, {"images": 3}]
)
def test_a_time_of_predictions_must_be_one(finished, mlp, measured):
    question = Question("certify", pc.Patch(5), Selection("mnist"), INTERVALS)
    run = finished.run(mlp, {pc.Patch(5): (50, 40)})
    columns = Evidence.read(next((run.path / "evidence").glob("*.npz"))).columns
    with pytest.raises(RunError, match="does not say how many images were predicted in how many seconds"):
        finished.write(run, question, columns, prediction=measured)


def test_evidence_without_a_time_of_predictions_has_none(finished, mlp):
    run = finished.run(mlp, {pc.Patch(5): (50, 40)})
    assert Evidence.read(next((run.path / "evidence").glob("*.npz"))).prediction_milliseconds is None
