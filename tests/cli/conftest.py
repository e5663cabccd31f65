import json

import pytest
import torch

from hidden_data import no_other_data as no_other_data
from patchcert.models import ModelSpec, build, load, save
from patchcert.train.run_folder import Run
from patchcert.train.spec import DataSettings, ModelSettings, Spec
from patchcert.train.strategies import AllPlacements


@pytest.fixture
def model_file(tmp_path):
    """A small untrained model for 28 x 28 images."""
    spec = ModelSpec("mlp", 1, 28, 28, hidden=8)
    path = tmp_path / "model.safetensors"
    save(build(spec, torch.Generator().manual_seed(0)), spec, path)
    return path


@pytest.fixture
def run_of(tmp_path):
    """Makes a finished run, as training would leave it, of an mlp in a file."""

    def make(file, threat):
        hidden = load(file)[1].hidden
        spec = Spec(DataSettings("mnist-mini"), ModelSettings("mlp", hidden=hidden), threat, AllPlacements())
        made = Run.create(tmp_path / "run", spec)
        made.weights.write_bytes(file.read_bytes())
        return made

    return make


@pytest.fixture
def answered(capsys):
    """The JSON that a command has printed, which must have ended with 0."""

    def read(code):
        assert code == 0
        return json.loads(capsys.readouterr().out)

    return read


@pytest.fixture
def refused(capsys):
    """What a command has said, in one line, that must have ended with 2."""

    def read(code):
        assert code == 2
        return " ".join(capsys.readouterr().err.split())

    return read
