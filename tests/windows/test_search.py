"""The weakest placement of every image and class is found, on windows and the dense way."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patchcert.bounds import trace
from patchcert.threats import Patch, shapes
from patchcert.windows import WeakestPlacements, reference_margins
from patchcert.windows.dense import dense_weakest
from strategies import cases

PATCHES = [Patch(2), Patch(shapes.diamond(5)), Patch((1, 3), "corners")]


@pytest.mark.parametrize("epsilon", [1.0, 0.4, torch.tensor(0.4, dtype=torch.float64)], ids=str)
@pytest.mark.parametrize("patch", PATCHES, ids=str)
def test_the_weakest_placement_is_found_for_every_class(small_model, small_batch, patch, epsilon):
    network, (images, labels) = trace(small_model), small_batch
    with torch.no_grad():
        margins = reference_margins(network, images, labels, patch, float(epsilon))
    for found in (
        WeakestPlacements(patch).find(network, images, labels, epsilon),
        dense_weakest(network, images, labels, patch, epsilon, 2**16),
    ):
        reached = margins.gather(1, found[:, None]).squeeze(1)
        torch.testing.assert_close(reached, margins.amin(dim=1))


@given(cases(dtype=torch.float64), st.sampled_from([1.0, 0.5]))
def test_the_search_is_right_on_any_network(case, epsilon):
    network = trace(case.model)
    with torch.no_grad():
        margins = reference_margins(network, case.images, case.labels, case.threat, epsilon)
    found = WeakestPlacements(case.threat, 2**16).find(network, case.images, case.labels, epsilon)
    reached = margins.gather(1, found[:, None]).squeeze(1)
    torch.testing.assert_close(reached, margins.amin(dim=1), rtol=1e-9, atol=1e-9)
