"""`patchcert attack` on deployed votes: what is attacked is what was proven, with a gradient, at every placement."""

from pathlib import Path

import pytest
import torch

import patchcert as pc
from patchcert.cli.app import run
from patchcert.evidence import EvidenceFolder
from patchcert.models import ModelSpec, build, save
from patchcert.train.run_folder import Run
from patchcert.train.spec import DataSettings, ModelSettings, Spec
from patchcert.train.strategies.votes import Blocks, LocalMargins

QUICK = ("--limit", 3, "--device", "cpu", "--steps", 2, "--restarts", 2)


def attack(*words):
    return run(["attack", *map(str, words)])


def saved(path, name, seed, **settings):
    """Weights of an untrained network for digits."""
    spec = ModelSpec(name, 1, 28, 28, **settings)
    model = build(spec, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        list(model.parameters())[-1][7] += (
            1.0  # cells and parts say that all digits are sevens, as the first one is
        )
    save(model, spec, path)
    return path


@pytest.fixture
def parts_file(tmp_path):
    return saved(tmp_path / "parts.safetensors", "resnet18_parts", 0, filters=2)


@pytest.fixture
def local_file(tmp_path):
    return saved(tmp_path / "local.safetensors", "bagnet", 0, filters=4, receptive_field=3)


@pytest.mark.parametrize(
    ("method", "settings", "name"),
    [
        ("bands", ["width=7", "stride=7"], "BandVotes"),
        ("blocks", ["size=20", "stride=4", "wrap=false"], "BlockVotes"),
        ("local-votes", ["scores=softmax"], "LocalVotes"),
    ],
)
def test_votes_are_attacked_as_they_are_deployed(method, settings, name, request, answered):
    file = request.getfixturevalue("local_file" if method == "local-votes" else "parts_file")
    words = [word for setting in settings for word in ("--setting", setting)]
    common = (file, "--data", "mnist-mini", "--patch", 5, *QUICK, "--method", method, *words)
    summary = answered(attack(*common, "--search", "sweep", "--placements", "0,0;10,10"))
    assert summary["classifier"]["name"] == name
    assert summary["gradient_steps"] > 0


@pytest.mark.parametrize("kind", ["blocks", "local"])
def test_a_run_that_was_trained_for_votes_is_attacked_as_such(kind, tmp_path, request, capsys):
    """The bare network of a run for blocks does not even take images."""
    folder = _run(kind, tmp_path, request)
    words = [str(folder.path), "--limit", "3", "--device", "cpu"]
    assert run(["certify", *words]) == 0
    assert attack(folder.path, *QUICK, "--certified-only") == 0
    said = capsys.readouterr()
    assert "FALSE PROOF" not in said.err
    found = {each.kind: each for each in EvidenceFolder(folder.evidence_folder).all()}
    assert found["attack"].meta["classifier"]["name"] == found["certify"].meta["classifier"]["name"]
    assert found["attack"].subject == found["certify"].subject
    assert found["attack"].total == found["certify"].certified > 0


def test_certified_images_of_another_proof_are_not_taken_for_those_of_this_one(tmp_path, request):
    folder = _run("local", tmp_path, request)
    assert run(["certify", str(folder.path), "--limit", "3", "--device", "cpu"]) == 0
    proof = EvidenceFolder(folder.evidence_folder)
    (found,) = proof.all()
    positions = torch.arange(3)
    own = (found.threat, found.selection, found.weights, positions)
    assert proof.proven(*own) is None  # of the bare model nothing is known
    assert proof.proven(*own, found.meta["classifier"]) is not None
    same = {**found.meta["classifier"], "slack": 0.5}  # other proofs, of the same predictions
    assert proof.proven(*own, same) is not None
    assert proof.proven(*own, {**same, "ties": "abstain"}) is None


def _run(kind, tmp_path, request) -> Run:
    file: Path = request.getfixturevalue("parts_file" if kind == "blocks" else "local_file")
    few = Blocks(size=26, wrap=False)
    strategy = few if kind == "blocks" else LocalMargins(aggregation="sum", scores="clipped")
    model = ModelSettings("resnet18_parts" if kind == "blocks" else "bagnet", normalise=False)
    folder = Run.create(
        tmp_path / "run", Spec(DataSettings("mnist-mini"), model, pc.Patch(2, [(0, 0)]), strategy)
    )
    folder.weights.write_bytes(file.read_bytes())
    return folder
