"""Seconds of a call, and what the device can do at most."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from patchcert.bounds.rounding import fast_arithmetic, precise_arithmetic


def synchronise(device: torch.device) -> None:
    """Waits until the device has done all it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_LONG_CALL, _VERY_LONG_CALL = 2.0, 10.0
"""Seconds from which on a call is timed once after a warm-up, and from which on without: it warms up by itself."""


def seconds(call: Callable[[], object], device: torch.device, spend: float) -> float:
    """The median time of the call, repeated for about `spend` seconds after a warm-up; at least three times."""
    first = _timed(call, device)
    if first > _VERY_LONG_CALL:
        return first
    if first > _LONG_CALL:
        return _timed(call, device)
    times: list[float] = []
    while len(times) < 3 or (sum(times) < spend and len(times) < 50):
        times.append(_timed(call, device))
    return statistics.median(times)


def _timed(call: Callable[[], object], device: torch.device) -> float:
    synchronise(device)
    began = time.perf_counter()
    call()
    synchronise(device)
    return time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured rates: float32 and TF32 products in operations, copies in bytes, each per second."""

    float32: float
    tf32: float
    bandwidth: float

    @staticmethod
    def of(device: torch.device) -> "Ceilings":
        """Measured with a large square product and a large copy."""
        size = 8192 if device.type == "cuda" else 1024
        left, right = torch.randn(2, size, size, device=device).unbind()
        operations = 2.0 * size**3
        with precise_arithmetic():
            exact = operations / seconds(lambda: left @ right, device, 0.3)
        with fast_arithmetic():
            fast = operations / seconds(lambda: left @ right, device, 0.3)
        source = torch.randn(2**28 if device.type == "cuda" else 2**25, device=device)
        target = torch.empty_like(source)
        copied = 2.0 * source.numel() * source.element_size()
        return Ceilings(exact, fast, copied / seconds(lambda: target.copy_(source), device, 0.3))
