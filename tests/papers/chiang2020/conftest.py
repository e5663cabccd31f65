"""Finished runs without the training: what a run folder holds once it is trained and certified."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from patchcert.files import sha256
from patchcert.models import ModelSpec, build, save
from patchcert.papers.chiang2020.collecting import collect
from patchcert.papers.chiang2020.evidence import evidence_name
from patchcert.train.run_folder import Run
from patchcert.train.spec import read_spec

CHECKSUMS = {"file": "0" * 64}


@pytest.fixture(autouse=True)
def _no_other_data(monkeypatch, tmp_path_factory):
    """No test finds the data of the machine it runs on."""
    monkeypatch.delenv("PATCHCERT_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def columns(correct, certified, total=100):
    """Rows of which the first are right and, of those, the first are proven."""
    index = np.arange(total)
    return {
        "label": np.zeros(total, np.int8),
        "prediction": np.where(index < correct, 0, 1).astype(np.int8),
        "verdict": index < certified,
        "margin": np.where(index < certified, 0.5, -0.5).astype(np.float32),
        "worst_top": np.zeros(total, np.int16),
        "worst_left": np.zeros(total, np.int16),
    }


@pytest.fixture
def finished(tmp_path):
    """Makes a finished run, or one of its trimmed model, from a spec and {threat: (correct, certified)}."""

    def make(spec, counts, limit=None, seconds=10.0, weights_seed=0, loss=1.0, trimmed=False):
        name = spec.fingerprint(CHECKSUMS)
        run = Run.create(tmp_path / ("trimmed" if trimmed else "made") / name, spec)
        tiny = ModelSpec("mlp", 1, 4, 4, **({"widths": (1,)} if trimmed else {"hidden": 2}))
        save(build(tiny, torch.Generator().manual_seed(weights_seed)), tiny, run.weights)
        run.append_metrics({"epoch": spec.schedule.epochs - 1, "loss": loss, "seconds": seconds})
        run.write_environment({"device": "NVIDIA H200", "data": {"checksums": CHECKSUMS}, "commit": "abc"})
        for threat, (correct, certified) in counts.items():
            meta = {
                "kind": "certify",
                "weights_sha256": sha256(run.weights),
                "data": {"name": spec.data.name, "split": "test", "limit": limit, "sha256": CHECKSUMS},
                "threat": threat.to_dict(),
            }
            run.write_evidence(evidence_name(threat, limit), columns(correct, certified), meta)
        return run

    return make


@pytest.fixture
def collected(finished, tmp_path):
    """Makes a finished run and brings it to the results."""

    def make(spec, counts, scale=1.0, **options):
        run = finished(spec, counts, **options)
        return collect(run, run.path.name, tmp_path / "results", scale)

    return make


@pytest.fixture
def mlp():
    """The paper's mlp on MNIST, all placements of a 5x5 patch."""
    return read_spec("paper-mnist")


def with_model(spec, name):
    return replace(spec, model=replace(spec.model, name=name))
