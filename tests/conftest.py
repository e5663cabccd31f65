"""What every test shares: one thread, reproducible examples, and the real data where there are any."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from patchcert.testing.shapes import check_shapes_on_import

# Before any other module of the package is imported, so that every call in every test is checked.
check_shapes_on_import("patchcert")

settings.register_profile("ci", deadline=None, derandomize=True, max_examples=40)
settings.register_profile("deep", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_draws():
    """A test that draws without a generator draws the same every time, in whatever order tests run."""
    torch.manual_seed(0)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="session")
def real_data():
    """Where official data files are: $PATCHCERT_DATA, or a folder of data beside the checkout."""
    beside = Path(__file__).parents[2]
    named = os.environ.get("PATCHCERT_DATA")
    for folder in [Path(named)] if named else [beside / "data", beside / "shared" / "data"]:
        if folder.is_dir():
            return folder
    pytest.skip("no official data files: set $PATCHCERT_DATA to their folder")
