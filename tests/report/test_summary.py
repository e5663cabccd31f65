"""What follows from evidence, and run folders as summaries: evidence is read strictly, pictures need model and data."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import patchcert as pc
from patchcert.certificates import IntervalBounds
from patchcert.data import load_dataset
from patchcert.errors import InvalidInput, RunError
from patchcert.evidence import Attacking, Certification, Evidence, EvidenceFolder, Selection, Subject
from patchcert.files import sha256
from patchcert.models import ModelSpec, build, save
from patchcert.report.page import write_report
from patchcert.report.pictures import attacked_images
from patchcert.report.statistics import Proportion
from patchcert.report.summary import (
    BROKEN_CERTIFICATE,
    BROKEN_CLEAN,
    ModelSummary,
    Source,
    sources_of,
    summarise,
)
from patchcert.threats import Patch
from patchcert.train.run_folder import Run
from patchcert.train.spec import DataSettings, ModelSettings, Spec
from patchcert.train.strategies import AllPlacements

IMAGES = 60


def test_the_headline_is_about_the_threat_trained_against(run, asked):
    rows = run.certificates[0]
    other = asked(rows, threat=Patch(3))
    assert replace(run, certificates=(other, rows)).headline is rows
    assert replace(run, certificates=(other,)).headline is other


def test_the_headline_has_the_most_images_of_the_run_s_own_data_and_is_no_audit(run, asked):
    rows = run.certificates[0]
    few = asked(rows, selection=Selection("made-up", limit=8))
    few = replace(few, columns={name: column[:8] for name, column in rows.columns.items()})
    elsewhere = asked(rows, selection=Selection("other"))
    audit = asked(rows, classifier={"name": "IntervalBounds", "dtype": "float64"})
    assert replace(run, certificates=(few, audit, elsewhere, rows)).headline is rows


def test_nothing_is_known_of_an_empty_run():
    run = ModelSummary("empty")
    assert (run.clean, run.empirical, run.certified, run.on_the_same_images) == (None, None, None, None)
    assert run.contradictions == ()


def test_the_accuracies_on_the_same_images(run):
    same = run.on_the_same_images
    assert (same.clean, same.empirical, same.certified) == (
        Proportion(18, 20),
        Proportion(14, 20),
        Proportion(14, 20),
    )
    assert run.contradictions == ()


def test_several_attacks_count_together(run, changed):
    first = run.attacks[0]
    second = changed(first, succeeded=first.columns["index"] == 24)
    assert replace(run, attacks=(first, second)).empirical == Proportion(13, 20)


def test_an_attack_within_another_threat_on_other_data_or_on_a_defense_is_no_evidence_here(run, asked):
    first = run.attacks[0]
    for other in (
        asked(first, threat=Patch(5)),
        asked(first, selection=Selection("elsewhere")),
        asked(first, classifier={"name": "Defended", "defense": "smoothing"}),
    ):
        assert replace(run, attacks=(other,)).empirical is None


def test_an_attack_on_another_predictor_of_the_same_weights_is_no_evidence_here(run, masked_run, asked):
    on_the_bare_network = run.attacks[0]
    attacked = replace(masked_run, attacks=(on_the_bare_network,))
    assert attacked.empirical is None
    assert attacked.contradictions == ()
    on_what_is_proven = asked(on_the_bare_network, classifier=masked_run.certificates[0].meta["classifier"])
    both = replace(masked_run, attacks=(on_the_bare_network, on_what_is_proven))
    assert both.headline_attacks == (on_what_is_proven,)


def test_without_certificates_attacks_on_one_thing_alone_count_together(run, asked):
    first = run.attacks[0]
    others = asked(first, classifier={"name": "MaskedDetection"}), asked(first, threat=Patch(5))
    alone = replace(run, certificates=(), threat=None, attacks=(first, *others))
    assert alone.lead is first
    assert alone.headline_attacks == (first,)


def test_each_contradiction_is_named(run, changed):
    rows, attack = run.certificates[0], run.attacks[0]
    nothing_broken = changed(attack, succeeded=attack.columns["index"] == 4)
    found = replace(run, certificates=(rows,), attacks=(nothing_broken,)).contradictions
    assert {each.index: each.claim for each in found} == {
        4: BROKEN_CERTIFICATE,
        36: BROKEN_CLEAN,
        38: BROKEN_CLEAN,
    }


def test_certificates_that_are_not_the_headline_may_be_refuted_too(run, asked, changed):
    rows, attack = run.certificates[0], run.attacks[0]
    larger, stronger = asked(rows, threat=Patch(3)), asked(attack, threat=Patch(3))
    stronger = changed(stronger, succeeded=attack.columns["succeeded"] | (attack.columns["index"] == 10))
    found = replace(run, certificates=(rows, larger), attacks=(attack, stronger)).contradictions
    assert [(each.index, each.claim) for each in found] == [(10, BROKEN_CERTIFICATE)]


def test_an_attack_on_certified_images_alone_refutes_but_counts_for_no_accuracy(run, asked, changed):
    attack = run.attacks[0]
    only = asked(changed(attack, succeeded=attack.columns["index"] == 6), certified_only=True)
    alone = replace(run, attacks=(only,))
    assert alone.empirical is None
    assert alone.on_the_same_images is None
    assert [(found.index, found.claim) for found in alone.contradictions][:1] == [(6, BROKEN_CERTIFICATE)]
    both = replace(run, attacks=(attack, only))
    assert both.empirical == Proportion(13, 20)


def test_a_vote_may_change_its_answer_to_a_clean_image(run, voted_run, asked, changed):
    rows, attack = voted_run.certificates[0], run.attacks[0]
    harmless = asked(attack, threat=rows.threat, classifier=rows.meta["classifier"])
    harmless = changed(harmless, succeeded=np.zeros(20, bool))
    assert replace(voted_run, attacks=(harmless,)).contradictions == ()


def test_an_alert_is_no_success_where_patches_are_to_be_detected(run, asked, changed):
    detection = {"name": "MaskedDetection"}
    proof, attack = (asked(each, classifier=detection) for each in (run.certificates[0], run.attacks[0]))
    after = np.where(attack.columns["succeeded"], -1, attack.columns["prediction_after"])
    alarmed = replace(run, certificates=(proof,), attacks=(changed(attack, prediction_after=after),))
    assert run.empirical == Proportion(14, 20)
    assert alarmed.empirical == Proportion(18, 20)
    assert alarmed.contradictions == ()


def test_attacks_on_images_with_other_labels_are_refused(run, changed):
    attack = run.attacks[0]
    other = replace(run, attacks=(changed(attack, label=(attack.columns["label"] + 1) % 10),))
    with pytest.raises(InvalidInput, match="image 0 has label 0 in the certificates but 1 in the attack"):
        _ = other.on_the_same_images


def test_a_guarantee_is_what_the_evidence_says(run, voted_run):
    rows = voted_run.certificates[0]
    assert rows.guarantee.confidence == 0.95
    stated = replace(rows, meta={**rows.meta, "guarantee": {"promise": "detection", "confidence": 0.9}})
    assert (stated.guarantee.promise, stated.guarantee.confidence) == ("detection", 0.9)
    assert run.certificates[0].guarantee.is_deterministic


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run with an untrained model, certified and attacked on the first test images."""
    path = tmp_path_factory.mktemp("runs") / "small"
    spec = Spec(DataSettings("mnist-mini"), ModelSettings("mlp", hidden=6), pc.Patch(2), AllPlacements())
    run = Run.create(path, spec)
    model_spec = ModelSpec("mlp", channels=1, height=28, width=28, hidden=6)
    model = build(model_spec, torch.Generator().manual_seed(3))
    save(model, model_spec, run.weights)
    run.append_metrics({"epoch": 0, "epsilon": 1.0, "loss": 2.0, "seconds": 0.1})
    dataset, weights, place = load_dataset("mnist-mini"), sha256(run.weights), torch.device("cpu")
    for split in ("test", "train"):
        selection = Selection("mnist-mini", split, limit=IMAGES)
        subject = Subject(IntervalBounds(model), weights, dataset, selection, place)
        proof = Certification(subject, pc.Patch(2), command="patchcert certify small")
        proof.run().write(evidence_of(run).file(proof.question))
    subject = Subject(model, weights, dataset, Selection("mnist-mini", limit=IMAGES), place)
    attack = Attacking(
        subject, pc.PatchAttack(steps=5, step_size=0.5, restarts=5), pc.Patch(2), save_images=True
    )
    attack.run().write(evidence_of(run).file(attack.question))
    return path


def evidence_of(run: Run) -> EvidenceFolder:
    return EvidenceFolder(run.path / "evidence")


def found(run: Run, kind: str) -> Evidence:
    """The one piece of evidence on test images of a kind."""
    kept = evidence_of(run).all()
    (only,) = [each for each in kept if each.kind == kind and each.selection.split == "test"]
    return only


@pytest.fixture
def copied(folder, tmp_path) -> Run:
    return Run.open(shutil.copytree(folder, tmp_path / "copy"))


@pytest.fixture(scope="module")
def summary(folder) -> ModelSummary:
    return summarise(Source(Run.open(folder)), maps=4)


def test_rows_are_those_of_the_evidence_on_test_images(summary, folder):
    stored = found(Run.open(folder), "certify")
    assert len(summary.certificates) == 1
    assert summary.certified == Proportion(stored.certified, IMAGES)
    assert summary.clean == Proportion(stored.correct, IMAGES)
    assert summary.empirical == Proportion(found(Run.open(folder), "attack").withstood, IMAGES)
    assert summary.contradictions == ()


def test_the_weakest_cell_of_a_map_is_the_placement_in_the_evidence(summary):
    rows = summary.certificates[0].columns
    assert len(summary.maps) == 4
    for sample in summary.maps:
        at = sample.index
        assert sample.margins.shape == (27, 27)
        assert sample.least == pytest.approx(rows["margin"][at], abs=1e-4)
        weakest = sample.weakest
        assert (weakest.top, weakest.left) == (rows["worst_top"][at], rows["worst_left"][at])
        assert (weakest.height, weakest.width) == (2, 2)


def test_attacked_pictures_differ_from_the_clean_ones_inside_their_box_alone(summary):
    assert summary.attacked
    for sample in summary.attacked:
        (box,) = sample.boxes
        differ = np.argwhere((sample.clean != sample.attacked).any(axis=0))
        assert len(differ)
        assert (differ >= (box.top, box.left)).all()
        assert (differ < (box.top + box.height, box.left + box.width)).all()
        assert sample.label != sample.after
        assert sample.patch.shape == (1, 2, 2)


def test_an_alert_is_no_picture_of_a_success(folder, asked, changed):
    attack, images = found(Run.open(folder), "attack"), load_dataset("mnist-mini").test
    alerts = changed(
        attack, prediction_after=np.where(attack.columns["succeeded"], -1, attack.columns["label"])
    )
    assert attacked_images(images, [alerts], IMAGES)
    assert not attacked_images(images, [asked(alerts, classifier={"name": "MaskedDetection"})], IMAGES)


def test_files_have_their_sums_and_the_page_is_written(summary, folder, tmp_path):
    assert summary.checksums["weights.safetensors"] == sha256(folder / "weights.safetensors")
    assert f"evidence/{found(Run.open(folder), 'certify').path.name}" in summary.checksums
    page = write_report([summarise(Source(Run.open(folder))), summary], tmp_path / "page.html")
    assert not summary.contradictions
    assert "2 models compared" in page.read_text(encoding="utf-8")


def test_evidence_of_other_weights_is_refused(copied):
    rows = found(copied, "certify")
    replace(rows, meta={**rows.meta, "weights_sha256": "0" * 64}).write(rows.path)
    with pytest.raises(
        RunError, match=r"certify-.*npz was gathered with other weights than those of the run"
    ):
        summarise(Source(copied))


@pytest.mark.parametrize("kept", [0, 10, 300])
def test_a_damaged_file_of_evidence_is_refused_by_name(copied, kept):
    file = found(copied, "certify").path
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(RunError, match=r"certify-.*npz is not a readable evidence file"):
        summarise(Source(copied))


def test_evidence_about_other_images_is_refused(copied):
    rows = found(copied, "certify")
    label = (rows.columns["label"] + 1) % 10
    columns = {**rows.columns, "label": label, "certified": np.zeros(IMAGES, bool)}
    replace(rows, columns=columns).write(rows.path)
    found(copied, "attack").path.unlink()
    with pytest.raises(RunError, match="is about other images than those of mnist-mini"):
        summarise(Source(copied))


def test_pictures_are_of_the_data_that_was_certified_not_of_the_training(copied):
    file = copied.path / "spec.toml"
    file.write_text(file.read_text().replace('name = "mnist-mini"', 'name = "cifar10"'))
    summary = summarise(Source(Run.open(copied.path)), 4)
    assert len(summary.maps) == 4
    assert summary.thumbnails is not None


def test_certificates_on_data_that_is_not_at_hand_have_numbers_but_no_pictures(copied):
    rows = found(copied, "certify")
    data = {**rows.meta["data"], "name": "folder:elsewhere"}
    replace(rows, meta={**rows.meta, "data": data}).write(rows.path)
    summary = summarise(Source(copied))
    assert summary.certified is not None
    assert (summary.maps, summary.attacked, summary.thumbnails) == ((), (), None)


def test_an_unfinished_run_has_curves_and_no_numbers(copied):
    shutil.rmtree(copied.path / "evidence")
    copied.weights.unlink()
    summary = summarise(Source(copied))
    assert summary.certified is None
    assert len(summary.metrics) == 1


def test_evidence_goes_to_the_run_of_its_weights_and_else_to_a_model_of_its_own(folder, tmp_path):
    run = Run.open(folder)
    own = found(run, "certify").write(tmp_path / "own.npz")
    other = replace(own, meta={**own.meta, "weights_sha256": "cd" * 32}).write(tmp_path / "other.npz")
    of_run, alone = sources_of([run], [other, own, other])
    assert of_run == Source(run, (own,))
    assert alone == Source(None, (other,))
    assert [summarise(each, maps=2).name for each in (of_run, alone)] == ["small", str(other.path)]


def test_without_weights_images_show_the_weakest_placement_of_the_rows(folder, summary):
    rows = found(Run.open(folder), "certify")
    bare = summarise(Source(files=(rows,)), maps=4)
    assert (bare.maps, summary.placed) == ([], [])
    assert [each.index for each in bare.placed] == [each.index for each in summary.maps]
    for shown in bare.placed:
        assert shown.least == rows.columns["margin"][shown.index]
        assert (shown.weakest.top, shown.weakest.left) == (
            rows.columns["worst_top"][shown.index],
            rows.columns["worst_left"][shown.index],
        )
    assert bare.thumbnails is not None
    assert bare.certified == summary.certified


def test_pictures_of_an_attack_need_no_certificates(folder):
    attack = found(Run.open(folder), "attack")
    alone = summarise(Source(files=(attack,)))
    assert alone.attacked
    assert alone.certified is None


def test_attacks_on_other_images_than_those_at_hand_are_refused(copied):
    attack = found(copied, "attack")
    other = replace(attack, columns={**attack.columns, "index": attack.columns["index"] + 900})
    with pytest.raises(RunError, match="is about other images than those of mnist-mini"):
        summarise(Source(files=(other,)))
