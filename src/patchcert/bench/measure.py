"""One case measured: dense bounds, the engine's sweep, certification and a whole training step."""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from patchcert.bench.cases import Case
from patchcert.bench.floor import Work
from patchcert.bench.timing import Ceilings, seconds, synchronise
from patchcert.bounds import Rounding, precise_arithmetic, trace
from patchcert.bounds.rounding import fast_arithmetic
from patchcert.certify import certify
from patchcert.data import Split
from patchcert.engine import PlacementSweep, clean_pass, default_budget, dense_margins
from patchcert.train.capture import CapturedStep
from patchcert.train.distributed import ALONE
from patchcert.train.step import StepSettings, Trainee, TrainingStep
from patchcert.train.strategies import AllPlacements
from patchcert.train.strategy import margin_loss


@dataclass(frozen=True, slots=True)
class Machine:
    """Where is measured, and for how long each call is repeated."""

    device: torch.device
    ceilings: Ceilings
    batch: int
    spend: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """Microseconds per image for all placements, and peak gigabytes where the device counts them."""

    case: str
    placements: int
    dense_forward: float
    dense_step: float
    sweep_float32: float
    sweep_tf32: float
    certification: float
    training_step: float
    floor_float32: float
    floor_tf32: float
    dense_gigabytes: float
    step_gigabytes: float

    @property
    def step_ratio(self) -> float:
        """How many times faster a whole training step is than the dense step."""
        return self.dense_step / self.training_step

    @property
    def sweep_ratio(self) -> float:
        return self.dense_step / self.sweep_float32

    @property
    def certification_ratio(self) -> float:
        return self.dense_step / self.certification

    def to_dict(self) -> dict[str, float | str]:
        """All figures and ratios in plain types."""
        ratios = {
            "step_ratio": self.step_ratio,
            "sweep_ratio": self.sweep_ratio,
            "certification_ratio": self.certification_ratio,
            "sweep_fraction_of_floor": self.floor_float32 / self.sweep_float32,
        }
        return asdict(self) | ratios


def run_case(case: Case, machine: Machine) -> Measurement:
    """All figures of one case, measured after one another on the same machine."""
    device, micro = machine.device, 1e6
    model = case.build(device)
    network = trace(model)
    images, labels = case.images(machine.batch, device)
    placements = len(case.threat.placements(case.size, case.size))
    dense = _Dense(network, images, labels, case, machine)
    dense_forward, dense_step = dense.forward(), dense.step()
    dense_gigabytes = _peak(device)
    sweep = PlacementSweep.of(network, images, case.threat, default_budget(device))
    work = Work.of(sweep)

    @torch.no_grad()
    def swept() -> None:
        sweep.worst(clean_pass(network, images, labels), labels)

    with precise_arithmetic():
        exact = seconds(_graphed(swept, device), device, machine.spend)
    with fast_arithmetic():
        fast = seconds(_graphed(swept, device), device, machine.spend)
    certified = seconds(lambda: certify(model, images, labels, case.threat), device, machine.spend)
    _reset_peak(device)
    step = seconds(_training_step(case, machine), device, machine.spend)
    scale = micro / machine.batch
    return Measurement(
        case=case.name,
        placements=placements,
        dense_forward=dense_forward * micro,
        dense_step=dense_step * micro,
        sweep_float32=exact * scale,
        sweep_tf32=fast * scale,
        certification=certified * scale,
        training_step=step * scale,
        floor_float32=work.seconds(machine.ceilings, tf32=False) * micro,
        floor_tf32=work.seconds(machine.ceilings, tf32=True) * micro,
        dense_gigabytes=dense_gigabytes,
        step_gigabytes=_peak(device),
    )


class _Dense:
    """The published way: every placement is a whole image. Measured on as many placements as fit, and scaled up."""

    def __init__(self, network, images: Tensor, labels: Tensor, case: Case, machine: Machine) -> None:  # noqa: ANN001
        self.network, self.threat, self.machine = network, case.threat, machine
        corners = self.threat.placements(case.size, case.size).corners
        self.placements = len(corners)
        per_box = 12 * sum(value.numel() for value in network.values(images[:1])) * 4
        room = 40 * 2**30 if machine.device.type == "cuda" else 2**30
        boxes = max(16, room // per_box)
        self.corners = corners[: min(boxes, self.placements)].to(machine.device)
        count = max(1, min(boxes // self.placements, len(images), 64))
        self.images, self.labels = images[:count], labels[:count]

    def _per_image(self, call) -> float:  # noqa: ANN001
        _reset_peak(self.machine.device)
        spent = seconds(call, self.machine.device, self.machine.spend)
        return spent / len(self.images) * self.placements / len(self.corners)

    def forward(self) -> float:
        """Seconds per image, bounds only."""

        @torch.no_grad()
        def call() -> None:
            dense_margins(self.network, self.images, self.labels, self.threat, self.corners)

        with precise_arithmetic():
            return self._per_image(call)

    def step(self) -> float:
        """Seconds per image, with the gradient through every placement."""

        def call() -> None:
            margins = dense_margins(self.network, self.images, self.labels, self.threat, self.corners)
            margin_loss(margins.amin(dim=1), self.labels, len(self.labels)).backward()

        with precise_arithmetic():
            return self._per_image(call)


def _training_step(case: Case, machine: Machine):  # noqa: ANN202
    images, labels = case.images(machine.batch, machine.device)
    settings = StepSettings(batch_size=machine.batch, tf32=True)
    trainee = Trainee(case.build(machine.device), None, settings)
    trainee.learning_rate.fill_(1e-4)
    data = Split((images * 255).to(torch.uint8), labels)
    step = TrainingStep(trainee, AllPlacements(case.threat), data, settings, ALONE, is_full=True)
    index = torch.arange(machine.batch, device=machine.device)
    if machine.device.type != "cuda":
        return lambda: step(index)
    captured = CapturedStep(step, machine.batch, trainee.generator, may_fall_back=False)
    for _ in range(captured.warm_up_steps + 1):
        captured(index)
    return lambda: captured(index)


def _graphed(call, device: torch.device):  # noqa: ANN001, ANN202
    """The call recorded as a CUDA graph, where there is CUDA: what is timed is then work, not launches."""
    if device.type != "cuda":
        return call
    aside = torch.cuda.Stream(device)
    with torch.cuda.stream(aside):
        call()
    synchronise(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else float("nan")
