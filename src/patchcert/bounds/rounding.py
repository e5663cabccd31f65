"""Rounding as part of soundness: error bounds for floating-point sums, and arithmetic that honours them.

The error bounds are the classical ones (Higham, Accuracy and Stability of Numerical Algorithms, section 3): with unit
roundoff u, an inner product of n terms summed in any order differs from the exact one by at most
gamma(n) = n u / (1 - n u) times the inner product of the absolute values. They hold for plain products and sums,
fused or not; they do not hold for TF32, for half precision, or for Winograd and FFT convolutions. So bounds that
must be sound are computed inside `precise_arithmetic()`, and their convolutions are written as matrix products.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

_PRECISION_SWITCHES = (
    torch.backends.cuda.matmul,
    torch.backends.cudnn.conv,
    torch.backends.mkldnn.matmul,
    torch.backends.mkldnn.conv,
)


@dataclass(frozen=True, slots=True)
class Rounding:
    """How far computed bounds are widened: outward by what rounding can have cost, or, with `unit` 0, not at all."""

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

    def gamma(self, terms: int) -> float:
        """The relative error of a sum of that many products, against the sum of their absolute values."""
        relative = terms * self.unit
        if relative >= 0.1:
            raise OverflowError(f"a sum of {terms} products cannot be bounded with unit roundoff {self.unit}")
        return relative / (1 - relative)


NEAREST = Rounding(unit=0.0, tiny=0.0)
"""Plain floating-point arithmetic, as training uses it: bounds are exact up to rounding."""


@contextmanager
def precise_arithmetic() -> Iterator[None]:
    """Inside, float32 products are float32 products: TF32, bf16 shortcuts and autocast are off, and restored after."""
    saved = [switch.fp32_precision for switch in _PRECISION_SWITCHES]
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, enabled=False))
        try:
            for switch in _PRECISION_SWITCHES:
                switch.fp32_precision = "ieee"
            yield
        finally:
            for switch, precision in zip(_PRECISION_SWITCHES, saved, strict=True):
                switch.fp32_precision = precision
