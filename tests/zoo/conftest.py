"""Small models, really trained and certified on the embedded images, in folders of the tests alone."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from patchcert.certificates import IntervalBounds
from patchcert.data import load_dataset
from patchcert.evidence import Certification, Evidence, EvidenceFolder, Selection, Subject
from patchcert.files import sha256
from patchcert.train.run_folder import Run
from patchcert.train.spec import read_spec
from patchcert.train.training import Workplace, train_run
from patchcert.zoo import Zoo
from patchcert.zoo.adding import add_run

CHANGES = (
    "data.name=mnist-mini",
    "data.limit=600",
    "model.hidden=16",
    "threat.stamp=2x2",
    "schedule.epochs=3",
    "schedule.epsilon.natural_epochs=1",
    "schedule.epsilon.ramp_epochs=1",
    "schedule.learning_rate.initial=0.005",
    "run.check_every=0",
)


def certify_run(run: Run) -> Run:
    """Leave evidence of all test images in the run's folder."""
    subject = Subject(
        IntervalBounds(run.model()),
        sha256(run.weights),
        load_dataset("mnist-mini"),
        Selection("mnist-mini"),
        torch.device("cpu"),
    )
    proof = Certification(subject, run.spec.threat, command="patchcert certify run")
    proof.run().write(evidence_of(run).file(proof.question))
    return run


def evidence_of(run: Run) -> EvidenceFolder:
    return EvidenceFolder(run.path / "evidence")


@pytest.fixture
def certified():
    """What leaves evidence in a run's folder."""
    return certify_run


@pytest.fixture
def proof_of():
    """What reads the one proof in a run's folder."""

    def read(run: Run) -> Evidence:
        (found,) = [each for each in evidence_of(run).all() if each.kind == "certify"]
        return found

    return read


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """A trained and certified run folder; tests that change it work on a copy."""
    folder = tmp_path_factory.mktemp("zoo") / "run"
    run = train_run(read_spec("paper-mnist", CHANGES), folder, Workplace(torch.device("cpu"), None))
    return certify_run(run).path


@pytest.fixture
def another(trained, tmp_path):
    """Makes a run of the same name in the zoo with other weights, by scaling the hidden layer of the first."""

    def make(scale: float) -> Run:
        from patchcert.models import load, save

        first = Run.open(trained)
        run = Run.create(tmp_path / f"scaled-{scale}", replace(first.spec, seed=7))
        model, spec = load(first.weights)
        with torch.no_grad():
            model.get_submodule("linear1").weight.mul_(scale)
        save(model, spec, run.weights)
        run.write_environment(first.environment())
        return certify_run(run)

    return make


@pytest.fixture
def zoo(tmp_path, trained) -> Zoo:
    """A zoo with one model."""
    made = Zoo(tmp_path / "zoo")
    add_run(made, Run.open(trained))
    return made
