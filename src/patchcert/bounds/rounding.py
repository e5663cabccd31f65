"""Rounding as part of soundness: error bounds for floating-point sums, and arithmetic that honours them.

The error bounds are the classical ones (Higham, Accuracy and Stability of Numerical Algorithms, section 3):
with unit roundoff u, an inner product of n terms summed in any order differs from the exact one by at most
gamma(n) = n u / (1 - n u) times the inner product of the absolute values. They hold for plain products and
sums, fused or not; they do not hold for TF32, for half precision, or for Winograd and FFT convolutions. So
bounds that must be sound are computed inside `precise_arithmetic()`, and their convolutions are written as
matrix products.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Annotated, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from patchcert.errors import InvalidInput


class _Switch(Protocol):
    """Where torch keeps the precision of some float32 operations: "ieee", "tf32", "bf16" or, unset, "none"."""

    fp32_precision: str


_CUDA: tuple[_Switch, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)  # pyright: ignore
_CPU: tuple[_Switch, ...] = (torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv)  # pyright: ignore
_PARENTS: tuple[_Switch, ...] = (torch.backends, torch.backends.cudnn)  # pyright: ignore
"""Switches from which those above inherit while they are unset."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """How far computed bounds are widened: by what rounding can have cost or, with `unit` 0, not at all."""

    unit: float
    tiny: float

    @staticmethod
    def outward(dtype: torch.dtype) -> "Rounding":
        """Bounds of the given type contain the exact real values."""
        information = torch.finfo(dtype)
        return Rounding(unit=information.eps / 2, tiny=information.tiny)

    @property
    def is_outward(self) -> bool:
        return self.unit > 0

    def gamma(self, roundings: int) -> float:
        """The relative error of a term that is rounded `roundings` times; less than 1/8."""
        relative = roundings * self.unit
        # Below 0.1, gamma is at most 0.1 / 0.9 < 1/8, on which the constants of this package rely.
        if relative >= 0.1:
            raise InvalidInput(
                f"a term of a layer's sum is rounded up to {roundings} times, too often for units of {self.unit}",
                hint="ask for bounds with dtype=torch.float64",
            )
        return relative / (1 - relative)

    def product(
        self,
        left: Annotated[Tensor, "... rows inner"],
        right: Annotated[Tensor, "... inner columns"],
        terms: int | None = None,
    ) -> Annotated[Tensor, "... rows columns"]:
        """The matrix product, in the form whose rounding is known where bounds must be sound.

        `terms` is how many products of a sum can differ from zero, where that is fewer than all.
        """
        return blocked_product(left, right, terms) if self.is_outward else left @ right


_SHORT_BLOCK, _LONG_BLOCK = 128, 1152
_FEWEST_ROWS, _FEWEST_COLUMNS = 32, 16


def _block(length: int) -> int:
    """Terms of a block: few where the sum is short and each rounding shows, more where adding them costs."""
    return _SHORT_BLOCK if length <= 4 * _SHORT_BLOCK else _LONG_BLOCK


def summed_roundings(terms: int, length: int | None = None) -> int:
    """How many roundings one term of a `blocked_product` can meet: those of its block, and one for each later block.

    In a block of b terms these are one product and b - 1 sums, and one is to spare. `length` is how many terms the
    product runs over where only `terms` of them, anywhere, can differ from zero: adding a zero rounds nothing.
    """
    block = _block(length or terms)
    return terms + 1 if terms <= block else block + -(-(length or terms) // block)


def blocked_product(
    left: Annotated[Tensor, "... features"],
    right: Annotated[Tensor, "... features outputs"],
    terms: int | None = None,
) -> Annotated[Tensor, "... outputs"]:
    """The matrix product, with long sums cut into blocks, so that fewer roundings pile up on one term.

    `terms` is how many products of a sum can differ from zero, where that is fewer than all. Libraries sum in
    another order when there are only a few rows or columns: such products get more, of zeros, so that on a CPU
    the result of a row does not depend on how many others are computed with it. Each block is summed by itself
    before it is added: libraries that add a product to a matrix may start the sum from the matrix, and then
    every block would round all blocks before it.
    """
    (rows, length), columns = left.shape[-2:], right.shape[-1]
    if rows < _FEWEST_ROWS:
        left = F.pad(left, (0, 0, 0, _FEWEST_ROWS - rows))
    if columns < _FEWEST_COLUMNS:
        right = F.pad(right, (0, _FEWEST_COLUMNS - columns))
    size = _block(length)
    if (terms or length) <= size:
        return (left @ right)[..., :rows, :columns]
    total = left[..., :size] @ right[..., :size, :]
    for start in range(size, length, size):
        block = slice(start, start + size)
        total += left[..., block] @ right[..., block, :]
    return total[..., :rows, :columns]


def lifted(scale: Annotated[Tensor, "..."]) -> Annotated[Tensor, "..."]:
    """The scale with every absolute value at least the smallest normal number, and its sign kept.

    Below it, rounding to the type may cost a scale all its digits. What is lost is at most a unit of that smallest
    number, so that the usual units of the lifted scale pay for it.
    """
    tiny = torch.finfo(scale.dtype).tiny
    return torch.where(scale.abs() < tiny, torch.full_like(scale, tiny).copysign(scale), scale)


NEAREST = Rounding(unit=0.0, tiny=0.0)
"""Plain floating-point arithmetic, as training uses it: bounds are exact up to rounding."""


@contextmanager
def precise_arithmetic() -> Iterator[None]:
    """Inside, float32 products are float32 products: TF32, bf16 and autocast are off; restored after.

    The switches belong to the process: while one thread is inside, all threads compute like this.
    """
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(_WISHES.asked("ieee", _CUDA + _CPU))
        yield


@contextmanager
def subnormals_kept() -> Iterator[None]:
    """Inside, `torch.set_flush_denormal` is off; restored after. Threads that have inherited it cannot be reached,
    and are refused."""
    was_flushed = _flushes(1)
    if was_flushed:
        torch.set_flush_denormal(False)
    try:
        if _flushes(_SHARE_OF_A_THREAD * torch.get_num_threads()):
            raise InvalidInput(
                "threads of this process flush subnormal numbers to zero, so that bounds would not hold",
                hint="start the process without torch.set_flush_denormal(True)",
            )
        yield
    finally:
        if was_flushed:
            torch.set_flush_denormal(True)


_SHARE_OF_A_THREAD = 2**15
"""A sum over this many numbers per thread is computed by all threads."""


def _flushes(count: int) -> bool:
    halves = torch.full((count,), torch.finfo(torch.float32).tiny, dtype=torch.float32, device="cpu") * 0.5
    return bool((halves == 0).any())


@contextmanager
def fast_arithmetic() -> Iterator[None]:
    """Inside, CUDA products may use TF32: enough to rank placements, never for a bound that must hold."""
    with _WISHES.asked("tf32", _CUDA):
        yield


class _PlaceByPlace:
    """Kernels of convolutions for which what is given at a place hangs on nothing that this place does not see.

    The switches belong to the process: while one thread is inside, all threads compute like this, and when the last one
    has left they are as they were before the first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = self._without_cudnn = 0
        self._before = (False, False, False)

    @contextmanager
    def __call__(self, cudnn: bool = True) -> Iterator[None]:
        """Inside, NNPACK is off, whose transforms compute several places together, and cuDNN does not choose by trial,
        so that equal shapes always meet equal kernels. Without `cudnn`, which may choose transforms, it is off too."""
        with self._lock:
            if not self._inside:
                (nnpack,) = torch.backends.nnpack.set_flags(False)
                self._before = (nnpack, torch.backends.cudnn.benchmark, torch.backends.cudnn.enabled)
                torch.backends.cudnn.benchmark = False
            self._count(1, cudnn)
        try:
            yield
        finally:
            with self._lock:
                self._count(-1, cudnn)
                if not self._inside:
                    torch.backends.nnpack.set_flags(self._before[0])
                    torch.backends.cudnn.benchmark = self._before[1]

    def _count(self, more: int, cudnn: bool) -> None:
        self._inside += more
        self._without_cudnn += 0 if cudnn else more
        torch.backends.cudnn.enabled = self._before[2] and not self._without_cudnn


place_by_place = _PlaceByPlace()


class _Wishes:
    """What the threads of this process ask of the switches, which all of them share: the most precise wish counts.

    Of one thread the innermost wish counts. When the last wish is gone, the switches are as they were before the first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_thread: dict[int, list[tuple[str, tuple[_Switch, ...]]]] = {}
        self._before: list[str] = []

    @contextmanager
    def asked(self, precision: str, switches: tuple[_Switch, ...]) -> Iterator[None]:
        """Inside, this thread asks for a precision."""
        thread = threading.get_ident()
        with self._lock:
            if not self._by_thread:
                self._before = _own_precisions(_CUDA + _CPU)
            self._by_thread.setdefault(thread, []).append((precision, switches))
            self._apply()
        try:
            yield
        finally:
            with self._lock:
                self._by_thread[thread].pop()
                if not self._by_thread[thread]:
                    del self._by_thread[thread]
                self._apply()

    def _apply(self) -> None:
        for switch, before in zip(_CUDA + _CPU, self._before, strict=True):
            wishes = [_innermost(stack, switch) for stack in self._by_thread.values()]
            asked = [wish for wish in wishes if wish]
            switch.fp32_precision = "ieee" if "ieee" in asked else asked[0] if asked else before


_WISHES = _Wishes()


def _innermost(stack: list[tuple[str, tuple[_Switch, ...]]], switch: _Switch) -> str:
    return next((precision for precision, switches in reversed(stack) if switch in switches), "")


def _own_precisions(switches: tuple[_Switch, ...]) -> list[str]:
    """What the switches are set to themselves; to see it, the parents they inherit from are silenced."""
    inherited = []
    for parent in _PARENTS:
        inherited.append(parent.fp32_precision)
        parent.fp32_precision = "none"
    try:
        return [switch.fp32_precision for switch in switches]
    finally:
        for parent, precision in zip(_PARENTS, inherited, strict=True):
            parent.fp32_precision = precision
