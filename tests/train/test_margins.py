"""Margins for a loop of one's own: those of all placements, with the gradient of the one that attains them."""

import pytest
import torch
from torch import nn

import patchcert as pc
from patchcert.bounds import trace
from patchcert.bounds.sparse import sparse_margins
from patchcert.errors import InvalidInput, InvalidThreat, ModelError
from patchcert.testing.networks import randomise
from patchcert.windows.dense import reference_margins


def batch():
    generator = torch.Generator().manual_seed(0)
    return torch.rand(3, 2, 6, 7, generator=generator).double(), torch.tensor([0, 2, 1])


class Enlarged(nn.Module):
    """Has no windows, so that placements are bounded one by one."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Conv2d(2, 3, 2, stride=2), nn.Linear(36, 3)

    def forward(self, images):
        return self.head(nn.functional.interpolate(torch.relu(self.first(images)), (4, 3)).flatten(1))


def models():
    layers = [
        nn.Conv2d(2, 3, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(126, 5),
        nn.ReLU(),
        nn.Linear(5, 3),
    ]
    return [
        randomise(each, torch.Generator().manual_seed(1)).double()
        for each in (nn.Sequential(*layers), Enlarged())
    ]


@pytest.mark.parametrize("model", models(), ids=["windows", "dense"])
@pytest.mark.parametrize("epsilon", [0.3, 1.0])
def test_they_are_the_least_over_all_placements_and_so_is_their_gradient(model, epsilon):
    images, labels = batch()
    found = pc.worst_case_margins(model, images, labels, pc.Patch((2, 3)), epsilon)
    expected = reference_margins(trace(model), images, labels, pc.Patch((2, 3)), epsilon).amin(dim=1)
    torch.testing.assert_close(found, expected)
    weights = list(model.parameters())
    factors = torch.rand(found.shape, generator=torch.Generator().manual_seed(2)).double()
    gradients = [torch.autograd.grad((margins * factors).sum(), weights) for margins in (found, expected)]
    for own, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(own, reference)


def test_pixels_anywhere_have_them_too():
    (model, _), (images, labels) = models(), batch()
    threat = pc.SparsePixels(2)
    found = pc.worst_case_margins(model, images, labels, threat, 0.5)
    torch.testing.assert_close(found, sparse_margins(trace(model), images, labels, 2, "tight", 0.5))
    assert found.requires_grad


def test_a_certificate_needs_them_to_be_positive():
    (model, _), (images, _) = models(), batch()
    labels = model(images).argmax(dim=1)
    margins = pc.worst_case_margins(model, images, labels, pc.Patch(1)).detach()
    certified = pc.certify(model, images, labels, pc.Patch(1)).certified
    others = margins.scatter(1, labels[:, None], torch.inf).amin(dim=1)
    assert torch.equal(certified, others > 0)


def test_mistakes_are_named():
    (model, _), (images, labels) = models(), batch()
    with pytest.raises(InvalidInput, match=r"images must lie in \[0, 1\]"):
        pc.worst_case_margins(model, images * 3, labels, pc.Patch(2))
    with pytest.raises(InvalidThreat):
        pc.worst_case_margins(model, images, labels, pc.Patch(9))
    normed = nn.Sequential(nn.BatchNorm2d(2), model).double().train()
    with pytest.raises(ModelError, match="statistics of the batch"):
        pc.worst_case_margins(normed, images, labels, pc.Patch(2))
