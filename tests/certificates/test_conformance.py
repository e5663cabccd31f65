"""Every kind of proof keeps the promises of the public suite."""

from functools import partial

import pytest
import torch
from torch import nn

from patchcert.certificates import IntervalBounds
from patchcert.certificates.ablation import RandomAblation
from patchcert.testing import check_certifier

VARIANTS = (
    partial(IntervalBounds, memory_budget=1),
    partial(IntervalBounds, memory_budget=2**14),
    partial(IntervalBounds, dtype=torch.float64),
    partial(IntervalBounds, verdicts_only=True),
)


def test_interval_bounds_conform():
    report = check_certifier(IntervalBounds, variants=VARIANTS, sparse=True)
    assert not report.failures
    assert "batches_and_variants_do_not_change_verdicts" in report.names


def test_the_float64_audit_conforms():
    check_certifier(partial(IntervalBounds, dtype=torch.float64), sparse=True)


def test_verdicts_alone_conform():
    check_certifier(partial(IntervalBounds, verdicts_only=True), sparse=True)


@pytest.mark.slow
def test_refined_bounds_conform():
    check_certifier(partial(IntervalBounds, refine="split", budget=20))


class SeesRetainedPixels(nn.Module):
    """A model of images as one of ablated images: those pixels that are gone are black."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.train(model.training)

    def forward(self, encoded):
        return self.model(encoded[:, : encoded.shape[1] // 2])


def ablation_of(model):
    return RandomAblation(
        SeesRetainedPixels(model), retained=2, selection_samples=20, estimation_samples=60, batch_size=2000
    )


def test_random_ablation_conforms():
    check_certifier(ablation_of, logits_decide=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_interval_bounds_conform_on_cuda():
    check_certifier(IntervalBounds, variants=VARIANTS, sparse=True, device="cuda")
