"""The interval certifier keeps every promise of the public suite."""

from functools import partial

import pytest
import torch

from patchcert.certificates import certify
from patchcert.testing import check_certifier

VARIANTS = (
    partial(certify, memory_budget=1),
    partial(certify, memory_budget=2**14),
    partial(certify, dtype=torch.float64),
    partial(certify, verdicts_only=True),
)


def test_certify_conforms():
    report = check_certifier(certify, variants=VARIANTS, sparse=True)
    assert not report.failures
    assert "batches_and_variants_do_not_change_verdicts" in report.names


def test_the_float64_audit_conforms():
    check_certifier(partial(certify, dtype=torch.float64), sparse=True)


def test_verdicts_alone_conform():
    check_certifier(partial(certify, verdicts_only=True), bounds_margins=False, sparse=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_certify_conforms_on_cuda():
    check_certifier(certify, variants=VARIANTS, sparse=True, device="cuda")
