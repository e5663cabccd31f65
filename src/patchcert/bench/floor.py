"""The least work all placements of one image need: products of the windows, and one trip of each window to memory."""

from dataclasses import dataclass

from patchcert.bench.timing import Ceilings
from patchcert.bounds.operations import Convolution, Linear
from patchcert.windows import PlacementSweep
from patchcert.windows.groups import Group


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
