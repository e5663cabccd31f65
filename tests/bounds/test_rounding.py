"""The error bounds that certificates rest on, and the switches that keep them true."""

import threading
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patchcert.bounds import NEAREST, Rounding, precise_arithmetic, subnormals_kept
from patchcert.bounds import rounding as rounding_module
from patchcert.bounds.rounding import blocked_product, fast_arithmetic, place_by_place, summed_roundings
from patchcert.errors import InvalidInput

LENGTHS = (1, 127, 128, 129, 300, 512, 513, 1000, 1152, 1153, 3072)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_unit_is_half_the_distance_to_the_next_number(dtype):
    unit = Rounding.outward(dtype).unit
    assert torch.tensor(1.0, dtype=dtype) + unit == 1
    assert torch.nextafter(torch.tensor(1.0, dtype=dtype), torch.tensor(2.0, dtype=dtype)) == 1 + 2 * unit


def test_gamma_grows_faster_than_the_roundings_and_gives_up_in_time():
    rounding = Rounding.outward(torch.float32)
    assert rounding.gamma(100) > 100 * rounding.unit
    assert NEAREST.gamma(10**9) == 0
    with pytest.raises(InvalidInput, match="rounded up to 2000000 times"):
        rounding.gamma(2_000_000)


def test_longer_sums_round_no_less():
    counts = [summed_roundings(terms) for terms in range(1, 4000)]
    assert counts == sorted(counts)
    assert all(count <= terms + 1 for terms, count in enumerate(counts, start=1))


def worst_excess(length, columns, dimensions, terms=None, device="cpu"):
    """How far the product of one large and many small terms is from the exact sum, over the bound on that.

    Each small term alone is too small to change the large one: lost one by one, they would all be missed.
    """
    right = torch.zeros(length, columns, device=device)
    right[torch.linspace(0, length - 1, terms or length, device=device).long()] = 0.49
    right[0] = 2.0**24
    exact = sum(Fraction(value) for value in right[:, 0].tolist())
    left = torch.ones(40, length, device=device)
    for _ in range(dimensions - 2):
        left, right = left[None].repeat(2, *[1] * left.dim()), right[None].repeat(2, *[1] * right.dim())
    with precise_arithmetic():
        computed = blocked_product(left, right, terms).unique().tolist()
    gamma = Rounding.outward(torch.float32).gamma(summed_roundings(terms or length, length))
    return max(abs(Fraction(value) - exact) for value in computed) / (Fraction(gamma) * exact)


@pytest.mark.parametrize("dimensions", [2, 3, 4])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_block_is_summed_before_it_joins_the_others(length, dimensions):
    assert max(worst_excess(length, columns, dimensions) for columns in (1, 2, 10, 100)) <= 1


@pytest.mark.parametrize("length", [130, 576, 1024])
@pytest.mark.parametrize("terms", [100, 129])
def test_scattered_terms_meet_the_roundings_of_all_blocks(length, terms):
    """In a long product with few terms a block may hold any number of them."""
    assert worst_excess(length, 3, 2, terms) <= 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_blocks_are_summed_apart_on_cuda():
    for length in LENGTHS:
        for columns in (1, 2, 10, 100):
            for dimensions in (2, 3, 4):
                assert worst_excess(length, columns, dimensions, device="cuda") <= 1
        assert worst_excess(length, 3, 2, min(length, 129), device="cuda") <= 1


@given(st.sampled_from(LENGTHS), st.integers(1, 80), st.integers(0, 2**16))
def test_a_row_hardly_depends_on_the_others(length, rows, seed):
    """Nor does a number of terms that leaves out only zeros."""
    generator = torch.Generator().manual_seed(seed)
    left, right = torch.randn(96, length, generator=generator), torch.randn(length, 7, generator=generator)
    whole = blocked_product(left, right)
    torch.testing.assert_close(blocked_product(left[:rows], right), whole[:rows], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(whole, (left.double() @ right.double()).float(), rtol=1e-5, atol=1e-4)
    right[length // 2 + 1 :] = 0
    torch.testing.assert_close(
        blocked_product(left, right, length // 2 + 1), left @ right, rtol=1e-5, atol=1e-4
    )


SWITCHES = {
    "cuda matmul": torch.backends.cuda.matmul,
    "cudnn conv": torch.backends.cudnn.conv,
    "mkldnn matmul": torch.backends.mkldnn.matmul,
    "mkldnn conv": torch.backends.mkldnn.conv,
}


def precisions():
    everything = {name: switch.fp32_precision for name, switch in SWITCHES.items()}
    return everything | {
        "global": torch.backends.fp32_precision,
        "cudnn": torch.backends.cudnn.fp32_precision,
    }


@pytest.fixture
def switches():
    """Puts every switch back after the test, whatever it did."""
    legacy, before = torch.get_float32_matmul_precision(), precisions()
    yield
    torch.set_float32_matmul_precision(legacy)
    torch.backends.fp32_precision = before["global"]
    for name, switch in SWITCHES.items():
        switch.fp32_precision = before[name]


@pytest.mark.usefixtures("switches")
@pytest.mark.parametrize("legacy", ["highest", "high", "medium"])
def test_shortcuts_are_off_inside_and_as_they_were_after(legacy):
    torch.set_float32_matmul_precision(legacy)
    before = precisions()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with precise_arithmetic():
            assert {switch.fp32_precision for switch in SWITCHES.values()} == {"ieee"}
            assert not torch.is_autocast_enabled("cpu")
            assert not torch.is_autocast_enabled("cuda")
        assert torch.is_autocast_enabled("cpu")
    assert precisions() == before
    assert torch.get_float32_matmul_precision() == legacy


@pytest.mark.usefixtures("switches")
def test_inherited_precision_is_not_pinned():
    """A switch that was unset follows its parent again afterwards."""
    torch.backends.fp32_precision = "tf32"
    with precise_arithmetic():
        assert torch.backends.mkldnn.conv.fp32_precision == "ieee"
    assert torch.backends.mkldnn.conv.fp32_precision == "tf32"
    torch.backends.fp32_precision = "ieee"
    assert torch.backends.mkldnn.conv.fp32_precision == "ieee"


@pytest.mark.usefixtures("switches")
@pytest.mark.parametrize("arithmetic", [precise_arithmetic, fast_arithmetic])
def test_switches_are_put_back_after_an_error(arithmetic):
    before = precisions()
    with pytest.raises(ZeroDivisionError), arithmetic():
        raise ZeroDivisionError
    assert precisions() == before


@pytest.mark.usefixtures("switches")
def test_fast_arithmetic_lets_only_cuda_take_shortcuts():
    with fast_arithmetic():
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        assert torch.backends.cudnn.conv.fp32_precision == "tf32"
        assert torch.backends.mkldnn.matmul.fp32_precision != "tf32"
    with precise_arithmetic(), fast_arithmetic(), precise_arithmetic():
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"


def test_subnormal_numbers_are_kept_inside_and_flushed_again_after():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        with subnormals_kept():
            assert float(torch.tensor([1e-39]) * 1e38) > 0.09
        assert float(torch.tensor([1e-39]) * 1e38) == 0
    finally:
        torch.set_flush_denormal(False)
    with subnormals_kept():
        assert float(torch.tensor([1e-39]) * 1e38) > 0.09


def test_threads_that_flush_nevertheless_are_refused(monkeypatch):
    monkeypatch.setattr(rounding_module, "_flushes", lambda count: count > 1)
    with pytest.raises(InvalidInput, match="threads of this process flush"), subnormals_kept():
        pass


def test_threads_that_overlap_keep_each_other_precise_and_leave_the_users_settings():
    """The switches belong to the process: whoever leaves first must not take precision from the others."""
    legacy = torch.get_float32_matmul_precision()
    first_is_inside, second_is_inside, first_has_left = (threading.Event() for _ in range(3))
    seen = {}

    def first():
        with precise_arithmetic():
            first_is_inside.set()
            second_is_inside.wait(5)
            seen["both"] = torch.backends.cuda.matmul.fp32_precision
        first_has_left.set()

    def second():
        first_is_inside.wait(5)
        with fast_arithmetic():
            seen["fast beside precise"] = torch.backends.cuda.matmul.fp32_precision
        with precise_arithmetic():
            second_is_inside.set()
            first_has_left.wait(5)
            seen["after the first"] = torch.backends.cuda.matmul.fp32_precision
            with fast_arithmetic():
                seen["fast within precise"] = torch.backends.cuda.matmul.fp32_precision

    try:
        torch.set_float32_matmul_precision("medium")
        threads = [threading.Thread(target=each) for each in (first, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == {
            "both": "ieee",
            "fast beside precise": "ieee",
            "after the first": "ieee",
            "fast within precise": "tf32",
        }
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision(legacy)


def test_kernels_are_place_by_place_until_the_last_thread_has_left():
    def switches():
        was_on = torch.backends.nnpack.set_flags(False)[0]
        torch.backends.nnpack.set_flags(was_on)
        return was_on, torch.backends.cudnn.benchmark

    before, entered, may_leave = switches(), threading.Event(), threading.Event()

    def stay():
        with place_by_place():
            entered.set()
            may_leave.wait(10)

    torch.backends.cudnn.benchmark = True
    try:
        with place_by_place():
            assert switches() == (False, False)
            with place_by_place():
                pass
            assert switches() == (False, False)
            other = threading.Thread(target=stay)
            other.start()
            entered.wait(10)
        assert switches() == (False, False)
        may_leave.set()
        other.join()
        assert switches() == (before[0], True)
    finally:
        torch.backends.cudnn.benchmark = before[1]


def test_cudnn_is_off_while_anyone_inside_does_without_it():
    with place_by_place(cudnn=False):
        assert not torch.backends.cudnn.enabled
        with place_by_place():
            assert not torch.backends.cudnn.enabled
    with place_by_place():
        assert torch.backends.cudnn.enabled
        with place_by_place(cudnn=False):
            assert not torch.backends.cudnn.enabled
        assert torch.backends.cudnn.enabled
    assert torch.backends.cudnn.enabled
