"""The cases, and what is measured of each: dense bounds, the sweep, certification, a training step, the attack, and
linear bounds."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

from patchcert import zoo
from patchcert.attacks import AttackResult, PatchAttack, default_batch_size, reference_patch_attack
from patchcert.bench.floor import Ceilings, Work, seconds, synchronise
from patchcert.bounds import Network, Rounding, precise_arithmetic, trace
from patchcert.bounds.restriction import Restriction
from patchcert.bounds.rounding import fast_arithmetic
from patchcert.certificates import certify
from patchcert.data import Split, load_dataset
from patchcert.models import ModelSpec, build
from patchcert.tensors import Images, Labels
from patchcert.threats import Patch
from patchcert.threats.patch import stamp_cells
from patchcert.train.spec import DataSettings, ModelSettings, OptimiserSettings, Spec
from patchcert.train.step import CapturedStep, Plan, Trainee, TrainingStep
from patchcert.train.strategies import AllPlacements
from patchcert.train.strategy import Subject, margin_loss
from patchcert.windows.dense import dense_linear_margins, dense_margins
from patchcert.windows.linear_placements import images_at_once, linear_placement_margins
from patchcert.windows.passes import clean_pass
from patchcert.windows.sweep import PlacementSweep, default_budget

Call = Callable[[], object]

ATTACK_STEPS, FEWEST_ATTACK_STEPS = 150, 5
_MOST_LINEAR_IMAGES, _LINEAR_PLACEMENTS = 1_000, 24


@dataclass(frozen=True, slots=True)
class Case:
    """One network, image size and patch; weights and images are random, which does not change the work."""

    model: str
    data: str
    patch: int
    channels: int
    size: int

    @property
    def name(self) -> str:
        return f"{self.model} {self.data} {self.patch}x{self.patch}"

    @property
    def threat(self) -> Patch:
        return Patch(self.patch)

    def build(self, device: torch.device) -> nn.Module:
        """The network with fresh weights."""
        mean, std = (0.5,) * self.channels, (0.2,) * self.channels
        spec = ModelSpec(self.model, self.channels, self.size, self.size, mean=mean, std=std)
        return build(spec, Generator().manual_seed(0)).to(device)

    def images(self, count: int, device: torch.device) -> tuple[Images, Labels]:
        """Random images and labels."""
        generator = Generator().manual_seed(1)
        images = torch.rand(count, self.channels, self.size, self.size, generator=generator)
        return images.to(device), torch.randint(10, (count,), generator=generator).to(device)


CASES = (
    Case("mlp", "mnist", 5, 1, 28),
    Case("cnn2", "mnist", 5, 1, 28),
    Case("cnn4", "cifar10", 5, 3, 32),
    Case("cnn5w", "cifar10", 5, 3, 32),
)

TEST_IMAGES = 10_000
"""What the usual test sets have, and times are stated for."""

DATA_SETS = ("mnist", "cifar10")
"""The data of cases that have real images."""

SIZES = tuple(Case("cnn4", f"{size}px", 5, 3, size) for size in (32, 64, 96))
"""The same network on larger images, for how the cost grows."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The device, its ceilings, how long calls are repeated, and the numbers of images.

    `batch` images are taken at once. `restarts` are those of the attack. Test images in `data_dir` are certified,
    random ones where there is none.
    """

    device: torch.device
    ceilings: Ceilings
    batch: int
    certified_images: int
    spend: float
    attacked_images: int
    restarts: int
    data_dir: Path | None = None


def run_case(case: Case, machine: Machine) -> dict[str, Any]:
    """All figures of one case, measured one after another on the same machine, in plain types.

    Times are microseconds per image for all placements; peak gigabytes are None where the device does not count
    them. A ratio says how many times faster something is than the dense step.
    """
    model = case.build(machine.device)
    network = trace(model)
    images, labels = case.images(machine.batch, machine.device)
    dense = _Dense(network, images, labels, case, machine)
    dense_forward, dense_step = dense.forward(), dense.step()
    dense_gigabytes = _peak(machine.device)
    sweep = PlacementSweep.of(network, images, case.threat, default_budget(machine.device))
    work = Work.of(sweep)
    exact, fast = _sweeps(sweep, images, labels, machine)
    certified = _certified_images(case, machine)
    certification, verdicts = _certifications(model, case, certified, machine)
    _reset_peak(machine.device)
    step = _micro(_training_step(case, machine), machine, machine.batch)
    step_gigabytes = _peak(machine.device)
    measured = {
        "case": case.name,
        "placements": len(sweep.order),
        "dense_forward": dense_forward,
        "dense_step": dense_step,
        "sweep_float32": exact,
        "sweep_tf32": fast,
        "certification": certification,
        "certified_images": len(certified),
        "are_test_images": machine.data_dir is not None and case.data in DATA_SETS,
        "verdicts": verdicts,
        "training_step": step,
        "floor_float32": work.seconds(machine.ceilings, tf32=False) * 1e6,
        "floor_tf32": work.seconds(machine.ceilings, tf32=True) * 1e6,
        "dense_gigabytes": dense_gigabytes,
        "step_gigabytes": step_gigabytes,
        "attack": _attack_rates(case, machine),
        "linear": _linear_bounds(model, case, machine),
    }
    return {**measured, **derived_figures(measured)}


def derived_figures(case: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a case that others determine."""
    return {
        "step_ratio": case["dense_step"] / case["training_step"],
        "sweep_ratio": case["dense_step"] / case["sweep_float32"],
        "certification_ratio": case["dense_step"] / case["certification"],
        "certification_seconds": case["certification"] * case["certified_images"] / 1e6,
        "sweep_fraction_of_floor": case["floor_float32"] / case["sweep_float32"],
    }


def _micro(call: Call, machine: Machine, images: int) -> float:
    """Microseconds per image of a call on `images` images."""
    return seconds(call, machine.device, machine.spend) / images * 1e6


def _sweeps(sweep: PlacementSweep, images: Tensor, labels: Tensor, machine: Machine) -> tuple[float, float]:
    """The search for the weakest placements, in float32 and in TF32."""

    @torch.no_grad()
    def swept() -> None:
        sweep.margins(clean_pass(sweep.layout.network, images, labels), labels).argmin(dim=1)

    with precise_arithmetic():
        exact = _micro(_graphed(swept, machine.device), machine, len(images))
    with fast_arithmetic():
        fast = _micro(_graphed(swept, machine.device), machine, len(images))
    return exact, fast


def _certifications(model: nn.Module, case: Case, images: Split, machine: Machine) -> tuple[float, float]:
    """Whole calls of `certify`, tracing included: with all margins, and for verdicts only."""
    pixels, labels = images.floats(), images.labels

    def micro(verdicts_only: bool) -> float:
        def call(count: int) -> None:
            certify(model, pixels[:count], labels[:count], case.threat, verdicts_only=verdicts_only)

        call(1)
        return _micro(lambda: call(len(labels)), machine, len(labels))

    return micro(False), micro(True)


def _certified_images(case: Case, machine: Machine) -> Split:
    """The test images where there is a folder of data with them, else random ones."""
    if machine.data_dir is not None and case.data in DATA_SETS:
        return (
            load_dataset(case.data, machine.data_dir).test.take(machine.certified_images).to(machine.device)
        )
    images, labels = case.images(machine.certified_images, machine.device)
    return Split((images * 255).to(torch.uint8), labels)


class _Dense:
    """The published way: every placement is a whole image. Measured on as many placements as fit, and scaled up."""

    def __init__(
        self, network: Network, images: Tensor, labels: Tensor, case: Case, machine: Machine
    ) -> None:
        self.network, self.threat, self.machine = network, case.threat, machine
        corners = self.threat.placements(case.size, case.size).corners
        self.placements = len(corners)
        per_box = 12 * sum(value.numel() for value in network.values(images[:1])) * 4
        room = 40 * 2**30 if machine.device.type == "cuda" else 2**30
        boxes = max(16, room // per_box)
        self.corners = corners[: min(boxes, self.placements)].to(machine.device)
        count = max(1, min(boxes // self.placements, len(images), 64))
        self.images, self.labels = images[:count], labels[:count]

    def forward(self) -> float:
        """Microseconds per image, bounds only."""
        return self._per_image(torch.no_grad()(self._margins))

    def step(self) -> float:
        """Microseconds per image, with the gradient through every placement."""
        count = len(self.labels)
        return self._per_image(
            lambda: margin_loss(self._margins().amin(dim=1), self.labels, count).backward()
        )

    def _margins(self) -> Tensor:
        return dense_margins(self.network, self.images, self.labels, self.threat, self.corners)

    def _per_image(self, call: Call) -> float:
        _reset_peak(self.machine.device)
        with precise_arithmetic():
            measured = _micro(call, self.machine, len(self.images))
        return measured * self.placements / len(self.corners)


def _training_step(case: Case, machine: Machine) -> Call:
    """A whole step of all-patch training at epsilon 1, with the default settings, as the training loop runs it."""
    images, labels = case.images(machine.batch, machine.device)
    strategy, optimiser = AllPlacements(), OptimiserSettings(batch_size=machine.batch)
    spec = Spec(DataSettings(), ModelSettings(), case.threat, strategy, optimiser=optimiser)
    model = case.build(machine.device)
    model_spec = ModelSpec(case.model, case.channels, case.size, case.size)
    trainee = Trainee(model, strategy.bind(Subject(model, model_spec, case.threat)), optimiser)
    trainee.learning_rate.fill_(1e-4)
    plan = Plan(spec, Split((images * 255).to(torch.uint8), labels))
    step = TrainingStep(trainee, plan, phase="full")
    index = torch.arange(machine.batch, device=machine.device)
    if machine.device.type != "cuda":
        return lambda: step(index)
    captured = CapturedStep(step, machine.batch, trainee.generator, may_fall_back=False)
    for _ in range(captured.warm_up_steps + 1):
        captured(index)
    return lambda: captured(index)


def _graphed(call: Call, device: torch.device) -> Call:
    """The call recorded as a CUDA graph, where there is CUDA: what is timed is then work, not launches."""
    if device.type != "cuda":
        return call
    with torch.cuda.stream(torch.cuda.Stream(device)):
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


def _peak(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None


def _linear_bounds(model: nn.Module, case: Case, machine: Machine) -> dict[str, float]:
    """Linear bounds at some of the placements, scaled up to all: of whole images, one at a time, and of many images on
    what the patch moves, where that is small enough.

    How many units bend depends on the weights: where the zoo has such a network, they are its own.
    """
    name = f"{case.data}-{case.patch}x{case.patch}-{case.model}"
    model = zoo.load(name) if name in zoo.names() else model
    network = trace(copy.deepcopy(model).double().to(machine.device))
    rounding = Rounding.outward(torch.float64)
    images, labels = case.images(_MOST_LINEAR_IMAGES, machine.device)
    count = images_at_once(network, images.double())
    images, labels = images[:count].double(), labels[:count]
    corners = case.threat.placements(case.size, case.size).corners
    largest = max(value.numel() for value in network.values(images[:1]))
    boxes = min(len(corners), max(1, default_budget(machine.device) // (8 * 12 * 10 * largest)))
    drawn = torch.randperm(len(corners), generator=Generator().manual_seed(0))
    some = corners[drawn[:_LINEAR_PLACEMENTS]].to(machine.device)

    def microseconds(bounds: Callable[..., Tensor], count: int, chosen: Tensor) -> float:
        @torch.no_grad()
        def bound() -> None:
            bounds(network, images[:count], labels[:count], case.threat, chosen, rounding)

        return _micro(bound, machine, count) * len(corners) / len(chosen)

    with precise_arithmetic(), torch.no_grad():
        whole = microseconds(dense_linear_margins, 1, corners[:boxes].to(machine.device))
        pixels = stamp_cells(case.threat, some[:1], images.shape[1:])[0]
        is_small = Restriction.of(network, images, pixels) is not None
        moved = microseconds(linear_placement_margins, len(images), some) if is_small else whole
    return {"dense": whole, "microseconds": moved, "ratio": whole / moved, "seconds": moved / 1e3}


def _attack_rates(case: Case, machine: Machine) -> dict[str, float]:
    """Image-steps per second, a forward and a backward pass of one image each, of the same steps done both ways.

    These are the paper's steps, or fewer where a call would take longer than `spend` seconds. No image is dropped
    early, which with random weights would measure luck. The plain loop does one of the restarts, each of which
    costs it the same.
    """
    device, count, restarts = machine.device, machine.attacked_images, machine.restarts
    model, (images, _) = case.build(device), case.images(count, device)
    with torch.no_grad():
        labels = model(images).argmax(dim=1)  # all images are right, so that all of them are attacked

    def batched(attack: PatchAttack) -> AttackResult:
        return attack.run(model, images, labels, case.threat, Generator().manual_seed(0))

    def plain(attack: PatchAttack) -> AttackResult:
        return reference_patch_attack(attack, model, images, labels, case.threat, Generator().manual_seed(0))

    attack = PatchAttack(
        FEWEST_ATTACK_STEPS, restarts=restarts, early_stop=False, batch_size=default_batch_size(device)
    )
    short = seconds(lambda: batched(attack), device, 0.0)
    steps = min(max(int(machine.spend / short * FEWEST_ATTACK_STEPS), FEWEST_ATTACK_STEPS), ATTACK_STEPS)
    attack, single = replace(attack, steps=steps), replace(attack, steps=steps, restarts=1)
    fast = count * restarts * steps / seconds(lambda: batched(attack), device, machine.spend)
    slow = count * steps / seconds(lambda: plain(single), device, machine.spend)
    rates = {"plain": slow, "batched": fast, "ratio": fast / slow}
    return {"images": count, "restarts": restarts, "steps": steps, **rates}
