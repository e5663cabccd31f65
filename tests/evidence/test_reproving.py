"""Proofs that are done again: what was forged past every other check is named, image by image."""

import json

import numpy as np
import pytest
import torch

import patchcert as pc
from forged_evidence import forge
from patchcert.cli.app import run
from patchcert.evidence import Certification, Evidence, EvidenceFolder, Selection, Subject
from patchcert.evidence.audit import audit_evidence
from patchcert.evidence.manifest import Manifest
from patchcert.evidence.reproving import AtHand, provable, reprove
from patchcert.zoo import shipped

NAME, IMAGES = "mnist-5x5-cnn2", 12
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def digits():
    return pc.load_dataset("mnist-mini")


@pytest.fixture
def results(tmp_path, digits):
    """Results with certificates of a model of the zoo on the first digits."""
    weights = shipped().card(NAME).weights_sha256
    subject = Subject(
        pc.IntervalBounds(pc.load(NAME)), weights, digits, Selection(digits.name, limit=IMAGES), CPU
    )
    folder = tmp_path / "results"
    Certification(subject, pc.Patch(5)).into(EvidenceFolder(folder / "made")).run()
    return folder


def again(results, digits, count=IMAGES):
    weights = shipped().card(NAME).weights_sha256
    (evidence,) = provable(results)[weights]
    at_hand = AtHand(f"zoo:{NAME}", weights, lambda: pc.load(NAME))
    return reprove(at_hand, evidence, digits, count, torch.Generator().manual_seed(0), CPU)


def forge_all(results, change):
    """Forges the only file past what other audits see."""
    (file,) = results.rglob("*.npz")
    forge(file, change)
    assert audit_evidence(file) == ()
    return file


def test_an_honest_proof_is_found_again(results, digits):
    found = again(results, digits, 5)
    assert (found.model, found.images, found.findings) == (f"zoo:{NAME}", 5, ())


def test_a_verdict_forged_together_with_its_margin_is_named(results, digits):
    image = None

    def forged(columns):
        nonlocal image
        right = columns["prediction"] == columns["label"]
        image = np.flatnonzero(~columns["certified"] & right)[0]
        columns["certified"][image], columns["margin"][image] = True, 0.5

    file = forge_all(results, forged)
    findings = again(results, digits).findings
    assert {finding.path for finding in findings} == {file}
    assert all(str(finding.what).startswith(f"image {image}: ") for finding in findings)
    assert findings[0].what == f"image {image}: certified is stated as True, but is False by zoo:{NAME}"


def test_a_margin_of_the_right_sign_is_compared_too(results, digits):
    forge_all(results, lambda columns: columns.update(margin=columns["margin"] * 2))
    findings = again(results, digits).findings
    assert len(findings) == IMAGES
    assert all("margin is stated as" in finding.what for finding in findings)


def test_an_image_that_is_called_certified_and_breaks_is_named(results, digits):
    """All verdicts are forged: some of the images that were refused can be broken."""

    def forged(columns):
        columns["certified"] = columns["prediction"] == columns["label"]
        columns["margin"] = np.where(columns["certified"], 0.5, -0.5).astype(np.float32)

    forge_all(results, forged)
    assert any(
        "certified, but broken by an attack" in finding.what for finding in again(results, digits).findings
    )


def test_votes_are_not_proven_again(results):
    (file,) = results.rglob("*.npz")
    found = Evidence.read(file)
    columns = {name: found.columns[name] for name in ("index", "label", "prediction", "certified")}
    Evidence(columns, {**found.meta, "classifier": {"name": "Mine"}}).write(file)
    assert provable(results) == {}


def masked_in_half(tmp_path, digits, forged=0):
    """Results with certificates by masks in bfloat16, of which some are forged."""
    weights = shipped().card(NAME).weights_sha256
    masks = pc.DoubleMasking(pc.load(NAME), pc.Patch(2), masks=6, precision="bfloat16")
    subject = Subject(masks, weights, digits, Selection(digits.name, limit=IMAGES), CPU)
    folder = EvidenceFolder(tmp_path / "results" / "made")
    found = Certification(subject, pc.Patch(2)).into(folder).run()
    columns = {name: column.copy() for name, column in found.columns.items()}
    chosen = np.flatnonzero(columns["certified"])[:forged]
    columns["certified"][chosen], columns["lead"][chosen] = False, -1.0
    Evidence(columns, found.meta).write(found.path)
    return tmp_path / "results"


def test_proofs_in_half_precision_are_done_again_too(tmp_path, digits):
    assert again(masked_in_half(tmp_path, digits), digits).findings == ()


def test_a_few_verdicts_in_half_precision_may_differ_from_device_to_device(tmp_path, digits):
    assert again(masked_in_half(tmp_path, digits, forged=1), digits).findings == ()
    findings = again(masked_in_half(tmp_path, digits, forged=3), digits).findings
    assert sum("certified is stated as False, but is True" in finding.what for finding in findings) == 3


def test_the_command_names_the_image_and_exits_with_1(results, capsys):
    Manifest().now(results).write(results)
    command = ["audit", str(results), "--reprove", "12", "--seed", "0", "--device", "cpu"]
    assert run(command) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [each["images"] for each in printed["reproved"]] == [12]
    forge_all(results, lambda columns: columns.update(margin=columns["margin"] * 2))
    (results / "manifest.json").unlink()
    Manifest().now(results).write(results)
    assert run(command) == 1
    assert "image 0: margin is stated as" in capsys.readouterr().err


def test_counterexamples_of_a_refined_proof_beside_the_results_are_tried_again(tmp_path, digits):
    weights = shipped().card(NAME).weights_sha256
    refined = pc.IntervalBounds(pc.load(NAME), refine="split")
    subject = Subject(refined, weights, digits, Selection(digits.name, limit=IMAGES), CPU)
    file = tmp_path / "refined.npz"
    made = Certification(subject, pc.Patch(5), file).run()
    assert made.broken

    def found():
        (evidence,) = provable(tmp_path / "results", [file])[weights]
        at_hand = AtHand(f"zoo:{NAME}", weights, lambda: pc.load(NAME))
        return reprove(at_hand, evidence, digits, IMAGES, torch.Generator().manual_seed(0), CPU).findings

    assert found() == ()
    forge(file, lambda columns: columns["adversarial"].fill(0.5))
    assert audit_evidence(file) == ()
    names = [finding.what.partition(":")[0] for finding in found()]
    assert names == [f"image {image}" for image in np.flatnonzero(made.columns["broken"])]
