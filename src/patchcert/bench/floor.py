"""Seconds of a call, what the device can do at most, and the least time that all placements of one image need.

That least work is the products of the windows, and one trip of each window to memory.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from patchcert.bounds.operations import Convolution, Linear
from patchcert.bounds.rounding import fast_arithmetic, precise_arithmetic
from patchcert.windows.passes import Group
from patchcert.windows.sweep import PlacementSweep


def synchronise(device: torch.device) -> None:
    """Wait until the device has done everything it was asked to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_LONG_CALL, _VERY_LONG_CALL = 2.0, 10.0
"""Calls that take this many seconds are timed once after a warm-up, or once without: long calls warm themselves up."""


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


@dataclass(frozen=True, slots=True)
class Work:
    """Floating-point operations and bytes per image, for deviation and radius over all placements."""

    operations: float
    bytes: float

    @staticmethod
    def of(sweep: PlacementSweep) -> "Work":
        """Counted over the windows: a product and a sum per weight used, a write and a read per number kept."""
        operations, numbers = 0.0, 0.0
        for group in sweep.groups:
            for position in range(len(sweep.layout.network.steps)):
                products, kept = _step_work(sweep, group, position)
                operations += 4.0 * products * len(group)
                numbers += 2.0 * kept * len(group)
        return Work(operations, 2 * 4 * numbers)

    def seconds(self, ceilings: Ceilings, tf32: bool) -> float:
        """The larger of both times: no way of doing this work is faster."""
        rate = ceilings.tf32 if tf32 else ceilings.float32
        return max(self.operations / rate, self.bytes / ceilings.bandwidth)


def _step_work(sweep: PlacementSweep, group: Group, position: int) -> tuple[int, int]:
    """Products and results of one step for one placement."""
    step = sweep.layout.network.steps[position]
    source, area = group.windows[step.inputs[0]], sweep.layout.maps[step.inputs[0]]
    if isinstance(step.operation, Linear):
        outputs, inputs = step.operation.weight().shape
        if source is not None and area is not None:
            inputs = area.channels * source.height * source.width
        return inputs * outputs, outputs
    target = group.windows[position + 1]
    if isinstance(step.operation, Convolution) and target is not None:
        weight = step.operation.weight()
        outputs = weight.shape[0] * target.height * target.width
        return outputs * weight[0].numel(), outputs
    return 0, 0
