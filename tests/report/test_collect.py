"""From run folders to summaries: evidence is read strictly, pictures come from model and data."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import patchcert as pc
from patchcert.errors import RunError
from patchcert.files import sha256
from patchcert.models import ModelSpec, build, save
from patchcert.report import Pictures, RunSummary, summarise_run, write_report
from patchcert.report.samples import telling_rows
from patchcert.report.statistics import Proportion
from patchcert.train.run_folder import Run
from patchcert.train.spec import DataSettings, ModelSettings, Spec
from patchcert.train.strategies import AllPlacements

IMAGES = 60


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
    images = pc.load_dataset("mnist-mini").test.take(IMAGES)
    found = pc.certify(model, images.floats(), images.labels, pc.Patch(2))
    columns = {
        "label": found.labels,
        "prediction": found.predictions,
        "verdict": found.certified,
        "margin": found.least_margin,
        "worst_top": found.worst_placement[:, 0],
        "worst_left": found.worst_placement[:, 1],
    }
    run.write_evidence("certify-2x2", columns, meta(run, "certify"))
    run.write_evidence("certify-train", columns, meta(run, "certify") | {"data": {"split": "train"}})
    result = pc.PatchAttack(steps=5, step_size=0.5, restarts=5).run(
        model, images.floats(), images.labels, pc.Patch(2)
    )
    rows = {
        "index": torch.arange(IMAGES),
        "label": result.labels,
        "prediction_after": result.predictions,
        "succeeded": result.succeeded,
        "top": result.placement[:, 0],
        "left": result.placement[:, 1],
        "adversarial": result.adversarial,
    }
    run.write_evidence("attack-2x2", rows, meta(run, "attack"))
    return path


def meta(run: Run, kind: str) -> dict[str, object]:
    return {
        "kind": kind,
        "threat": pc.Patch(2).to_dict(),
        "command": f"patchcert {kind} small",
        "weights_sha256": sha256(run.weights),
        "data": {"split": "test"},
    }


@pytest.fixture
def copied(folder, tmp_path) -> Run:
    for file in folder.rglob("*"):
        target = tmp_path / "copy" / file.relative_to(folder)
        if file.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    return Run.open(tmp_path / "copy")


@pytest.fixture(scope="module")
def summary(folder) -> RunSummary:
    return summarise_run(Run.open(folder), Pictures(maps=4))


def test_rows_are_those_of_the_evidence_on_test_images(summary, folder):
    stored = Run.open(folder).evidence("certify-2x2")
    assert len(summary.certificates) == 1
    assert summary.certified == Proportion.of(stored["verdict"])
    assert summary.clean == Proportion.of(stored["prediction"] == stored["label"])
    assert summary.empirical == Proportion.of(~Run.open(folder).evidence("attack-2x2")["succeeded"])
    assert summary.violations == ()


def test_the_weakest_cell_of_a_map_is_the_placement_in_the_evidence(summary):
    rows = summary.certificates[0]
    assert len(summary.maps) == 4
    for sample in summary.maps:
        at = sample.index
        assert sample.margins.shape == (27, 27)
        assert sample.least == pytest.approx(rows.margin[at], abs=1e-4)
        assert sample.weakest == (rows.top[at], rows.left[at])


def test_attacked_pictures_differ_from_the_clean_ones_inside_their_box_alone(summary):
    assert summary.attacked
    for sample in summary.attacked:
        (box,) = sample.boxes
        changed = np.argwhere((sample.clean != sample.attacked).any(axis=0))
        assert len(changed)
        assert (changed >= (box.top, box.left)).all()
        assert (changed < (box.top + box.height, box.left + box.width)).all()
        assert sample.before == sample.label != sample.after


def test_files_have_their_sums_and_the_page_is_written(summary, folder, tmp_path):
    assert summary.checksums["weights.safetensors"] == sha256(folder / "weights.safetensors")
    assert "evidence/certify-2x2.npz" in summary.checksums
    page = write_report([Run.open(folder), summary], tmp_path / "page.html")
    assert page.consistent
    assert "2 runs compared" in page.path.read_text(encoding="utf-8")


def test_evidence_of_other_weights_is_refused(copied):
    rows = copied.evidence("certify-2x2")
    stored = json.loads(str(rows.pop("meta"))) | {"weights_sha256": "0" * 64}
    copied.write_evidence("certify-2x2", rows, stored)
    with pytest.raises(RunError, match="'certify-2x2' of .* was gathered with other weights"):
        summarise_run(copied)


@pytest.mark.parametrize("kept", [0, 10, 300])
def test_a_damaged_file_of_evidence_is_refused_by_name(copied, kept):
    file = copied.path / "evidence" / "certify-2x2.npz"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(RunError, match=r"certify-2x2.npz is no readable file of evidence"):
        summarise_run(copied)


@pytest.mark.parametrize("value", [np.array(3), np.zeros((2, 2)), np.array(["yes"])])
def test_a_column_that_is_no_row_of_numbers_is_refused(copied, value):
    rows = copied.evidence("certify-2x2")
    stored = json.loads(str(rows.pop("meta")))
    copied.write_evidence("certify-2x2", rows | {"margin": value}, stored)
    with pytest.raises(RunError, match="the column 'margin' must hold one number per row"):
        summarise_run(copied)


def test_evidence_that_does_not_name_its_weights_is_refused(copied):
    rows = copied.evidence("certify-2x2")
    stored = json.loads(str(rows.pop("meta")))
    del stored["weights_sha256"]
    copied.write_evidence("certify-2x2", rows, stored)
    with pytest.raises(RunError, match="other weights than those of the run, or does not say with which"):
        summarise_run(copied)


@pytest.mark.parametrize("margin", [-0.25, 0.0, np.nan])
def test_a_certified_image_without_a_positive_margin_is_refused(copied, margin):
    rows = copied.evidence("certify-2x2")
    stored = json.loads(str(rows.pop("meta")))
    rows["verdict"][2], rows["margin"][:] = True, np.where(rows["verdict"], 1.0, -1.0)
    rows["margin"][2] = margin
    copied.write_evidence("certify-2x2", rows, stored)
    with pytest.raises(RunError, match=f"contradicts itself: row 2 is certified with a margin of {margin}"):
        summarise_run(copied)


def test_evidence_that_lacks_a_column_is_refused_by_name(copied):
    rows = copied.evidence("certify-2x2")
    stored = json.loads(str(rows.pop("meta")))
    del rows["margin"]
    copied.write_evidence("certify-2x2", rows, stored)
    with pytest.raises(RunError, match="lacks the column 'margin'; it has: label, prediction"):
        summarise_run(copied)


def test_evidence_without_a_threat_is_refused(copied):
    rows = copied.evidence("certify-2x2")
    stored = json.loads(str(rows.pop("meta"))) | {"threat": {}}
    copied.write_evidence("certify-2x2", rows, stored)
    with pytest.raises(RunError, match="names no threat"):
        summarise_run(copied)


def test_evidence_about_other_images_is_refused(copied):
    rows = copied.evidence("certify-2x2")
    stored = json.loads(str(rows.pop("meta")))
    rows["label"] = (rows["label"] + 1) % 10
    copied.write_evidence("certify-2x2", rows, stored)
    (copied.path / "evidence" / "attack-2x2.npz").unlink()
    with pytest.raises(RunError, match="is about other images than those of mnist-mini"):
        summarise_run(copied)


def test_an_unfinished_run_has_curves_and_no_numbers(copied):
    for name in copied.evidence_names():
        (copied.path / "evidence" / f"{name}.npz").unlink()
    copied.weights.unlink()
    summary = summarise_run(copied)
    assert summary.certified is None
    assert len(summary.metrics) == 1


@pytest.mark.parametrize(("count", "proven"), [(4, 2), (8, 5), (40, 5)])
def test_samples_are_half_proofs_and_half_failures_as_far_as_there_are_enough(run, count, proven):
    rows = run.certificates[0]
    few = type(rows)(
        rows.threat,
        rows.index[:8],
        rows.label[:8],
        rows.prediction[:8],
        rows.index[:8] < 5,
        rows.margin[:8],
        rows.top[:8],
        rows.left[:8],
    )
    chosen = telling_rows(few, count)
    assert len(set(chosen.tolist())) == len(chosen) == min(count, 8)
    assert few.certified[chosen].sum() == proven
