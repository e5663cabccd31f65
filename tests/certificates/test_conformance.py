"""Every kind of proof keeps the promises of the public suite."""

from functools import partial

import pytest
import torch
from torch import nn

from patchcert.certificates import IntervalBounds
from patchcert.certificates.ablation import RandomAblation
from patchcert.certificates.masking import DoubleMasking, MaskedDetection
from patchcert.testing import check_certifier
from patchcert.threats import Patch

VARIANTS = (
    partial(IntervalBounds, memory_budget=1),
    partial(IntervalBounds, memory_budget=2**14),
    partial(IntervalBounds, dtype=torch.float64),
    partial(IntervalBounds, verdicts_only=True),
)


def test_interval_bounds_conform():
    report = check_certifier(IntervalBounds, variants=VARIANTS, sparse=True, several=True)
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


def masked(kind, **settings):
    """Masks for 3x3 patches cover all that the suite tries on images of 4x5."""
    return partial(kind, threat=Patch(3), **{"masks": 2, "batch_size": 32, **settings})


def test_double_masking_conforms():
    variants = (masked(DoubleMasking, batch_size=7), masked(DoubleMasking, with_map=True))
    check_certifier(masked(DoubleMasking), variants=variants, logits_decide=False)
    check_certifier(masked(DoubleMasking, with_map=True), logits_decide=False)


def test_detection_by_masks_conforms():
    variants = (masked(MaskedDetection, batch_size=7),)
    check_certifier(masked(MaskedDetection), variants=variants, logits_decide=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_double_masking_conforms_on_cuda():
    check_certifier(masked(DoubleMasking), logits_decide=False, device="cuda")
    check_certifier(masked(DoubleMasking, precision="bfloat16"), logits_decide=False, device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_interval_bounds_conform_on_cuda():
    check_certifier(IntervalBounds, variants=VARIANTS, sparse=True, device="cuda")
