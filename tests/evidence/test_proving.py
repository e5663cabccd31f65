"""Certificates in blocks are those of one call, and an interruption loses no block that was done."""

import copy

import pytest
import torch
from patchcert.evidence.proving import COLUMNS, Proving, has_foreign_code, partial_of
from torch import nn

import patchcert as pc
from patchcert.bounds.lowering import LAYER_RULES
from patchcert.certificates.intervals import IntervalCertifier
from patchcert.evidence import proving
from patchcert.threats import Patch

THREAT = Patch(2)


@pytest.fixture
def case(generator, monkeypatch):
    monkeypatch.setattr(proving, "FIRST_BLOCK", 3)
    monkeypatch.setattr(proving, "LARGEST_BLOCK", 7)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4)).eval()
    images = torch.rand(20, 1, 6, 6, generator=generator)
    return model, images, model(images).argmax(dim=1)


def same(first, second):
    return all(getattr(first, name).equal(getattr(second, name)) for name in COLUMNS)


class Interrupt:
    """Stops like Ctrl-C once so many images are done."""

    def __init__(self, after):
        self.after, self.told = after, []

    def __call__(self, done, total):
        self.told.append((done, total))
        if done >= self.after:
            raise KeyboardInterrupt


@pytest.mark.parametrize("verdicts_only", [False, True])
def test_blocks_give_the_certificates_of_one_call(case, verdicts_only):
    certifier = IntervalCertifier(verdicts_only=verdicts_only)
    told = []
    found = Proving(certifier).certify(*case, THREAT, lambda *counts: told.append(counts)).certificates
    whole = certifier.certify(*case, THREAT)
    assert found.certified.equal(whole.certified)
    assert verdicts_only or same(found, whole)
    assert told[0] == (0, 20)
    assert told[-1] == (20, 20)
    assert told == sorted(told)


def test_an_interrupted_proof_goes_on_after_its_last_block(case, tmp_path, monkeypatch):
    partial = partial_of(tmp_path / "proof.npz")
    work = Proving(IntervalCertifier(), partial, {"weights": "a"})
    with pytest.raises(KeyboardInterrupt):
        work.certify(*case, THREAT, Interrupt(11))
    left = work.kept(case[2])
    assert 3 <= len(left) < 20
    progress = Interrupt(100)
    proof = work.certify(*case, THREAT, progress)
    assert same(proof.certificates, pc.certify(*case, THREAT))
    assert proof.seconds > left.seconds > 0
    assert progress.told[0] == (len(left), 20)
    assert same(work.kept(case[2]).certificates, proof.certificates)
    work.discard()
    assert list(tmp_path.iterdir()) == []


def test_blocks_of_another_claim_or_other_code_are_not_taken_up(case, tmp_path, monkeypatch):
    partial = partial_of(tmp_path / "proof.npz")
    work = Proving(IntervalCertifier(), partial, {"weights": "a"})
    with pytest.raises(KeyboardInterrupt):
        work.certify(*case, THREAT, Interrupt(11))
    labels = case[2]
    assert work.kept(labels) is not None
    assert Proving(IntervalCertifier(), partial, {"weights": "b"}).kept(labels) is None
    assert Proving(IntervalCertifier(torch.float64), partial, {"weights": "a"}).kept(labels) is None
    assert Proving(IntervalCertifier(verdicts_only=True), partial, {"weights": "a"}).kept(labels) is None
    assert work.kept((labels + 1) % 4) is None
    assert work.kept(labels[:2]) is None
    for code in ("other code", ""):
        monkeypatch.setattr(proving, "source_sha256", lambda code=code: code)
        assert work.kept(labels) is None


def test_a_broken_file_of_blocks_is_as_good_as_none(case, tmp_path):
    partial = tmp_path / "proof.npz.partial"
    partial.write_bytes(b"no tensors")
    work = Proving(IntervalCertifier(), partial)
    assert work.kept(case[2]) is None
    assert same(work.certify(*case, THREAT).certificates, pc.certify(*case, THREAT))


def test_the_clock_has_no_part_in_blocks_whose_sums_depend_on_their_size(case):
    model, images, _ = case
    narrow, wide = Proving(IntervalCertifier()), Proving(IntervalCertifier(torch.float64))
    assert narrow._blocks(model, images).after(0.001).size != narrow._blocks(model, images).size
    assert wide._blocks(model, images).after(0.001) == wide._blocks(model, images)
    double = copy.deepcopy(model).double()
    assert narrow._blocks(double, images.double()).after(0.001) == wide._blocks(model, images)


def test_layers_and_rules_of_others_are_seen(case, monkeypatch):
    class Mine(nn.ReLU):
        pass

    model = case[0]
    assert not has_foreign_code(model)
    assert has_foreign_code(nn.Sequential(model, Mine()))
    monkeypatch.setitem(LAYER_RULES, nn.ReLU, lambda layer: None)
    assert has_foreign_code(model)


def test_another_network_of_the_same_weights_does_not_go_on(case, tmp_path):
    """As when the code that registers an architecture is changed between two calls."""
    model, _, labels = case
    evidence = tmp_path / "proof.npz"
    work = Proving.towards(evidence, IntervalCertifier(), model, {"weights": "a"})
    with pytest.raises(KeyboardInterrupt):
        work.certify(*case, THREAT, Interrupt(11))
    again = copy.deepcopy(model)
    assert Proving.towards(evidence, IntervalCertifier(), again, {"weights": "a"}).kept(labels) is not None
    again[1] = nn.LeakyReLU(0.5)
    assert Proving.towards(evidence, IntervalCertifier(), again, {"weights": "a"}).kept(labels) is None
    foreign = nn.Sequential(type("Mine", (nn.ReLU,), {"__module__": "mine"})())
    assert Proving.towards(evidence, IntervalCertifier(), foreign, {}).partial is None
    assert Proving.towards(None, IntervalCertifier(), model, {}).partial is None


def test_no_images_are_certified_too(case):
    model, images, labels = case
    assert len(Proving(IntervalCertifier()).certify(model, images[:0], labels[:0], THREAT)) == 0
