"""Interval bounds keep every promise of the public suite."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from patchcert.certificates import certify
from patchcert.testing import check_certifier


class IntervalBounds:
    def __init__(self, model, **settings):
        self.model, self.settings = model, settings

    def predict(self, images):
        with torch.no_grad():
            return self.model(images).argmax(dim=1)

    def certify(self, images, labels, threat):
        found = certify(self.model, images, labels, threat, **self.settings)
        bare = bool(found.margins.isnan().all()) and self.settings.get("verdicts_only")
        return SimpleNamespace(
            certified=found.certified,
            predictions=found.predictions,
            margins=None if bare else found.margins,
            worst_placement=None if bare else found.worst_placement,
            placements=None,
            guarantee=SimpleNamespace(promise="recovery", confidence=1.0),
        )


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_interval_bounds_conform_on_cuda():
    check_certifier(IntervalBounds, variants=VARIANTS, sparse=True, device="cuda")
