"""What `patchcert demo` does, step by step; each leaves a file, so that no step is done twice."""

import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from patchcert.attacks import PatchAttack
from patchcert.certify.intervals import certify
from patchcert.cli.attack_choice import describe_attack
from patchcert.cli.attack_steps import evidence_arrays, evidence_name
from patchcert.cli.progress import Report, progress_bar
from patchcert.cli.training_view import training_view
from patchcert.data import Split, load_dataset
from patchcert.files import sha256
from patchcert.threats import Patch
from patchcert.train.environment import describe_machine
from patchcert.train.run_folder import Run
from patchcert.train.schedules import EpsilonSchedule, LearningRateSchedule, Schedule
from patchcert.train.spec import DataSettings, ModelSettings, OptimiserSettings, RunSettings, Spec
from patchcert.train.strategies import AllPlacements
from patchcert.train.training import Workplace, train_run

SIDE = 2


@dataclass(frozen=True)
class DemoPlan:
    """What is trained, and how much of it is certified and attacked."""

    spec: Spec
    attack: PatchAttack
    images: int = 1000
    sides: tuple[int, ...] = (1, 3, 4)
    side_images: int = 250
    attacked: int = 200


def full_plan() -> DemoPlan:
    """A network of one hidden layer against 2x2 patches, with settings chosen on held-out training images."""
    attack = PatchAttack(steps=40, step_size=0.1, restarts=20, search="certificate", batch_size=512)
    return DemoPlan(_spec(hidden=100, epochs=10, ramp_epochs=3, limit=None), attack)


def quick_plan() -> DemoPlan:
    """The same steps in a few seconds, for a look at how they fit together; the model is worse."""
    spec = _spec(hidden=32, epochs=4, ramp_epochs=1, limit=1500)
    attack = PatchAttack(steps=20, step_size=0.2, restarts=5, search="certificate", batch_size=512)
    return DemoPlan(spec, attack, images=200, sides=(1, 3), side_images=50, attacked=40)


def _spec(hidden: int, epochs: int, ramp_epochs: int, limit: int | None) -> Spec:
    return Spec(
        data=DataSettings("mnist-mini", validation=500, limit=limit, crop_padding=1),
        model=ModelSettings("mlp", hidden=hidden),
        threat=Patch(SIDE),
        strategy=AllPlacements(),
        schedule=Schedule(
            epochs,
            EpsilonSchedule(natural_epochs=1, ramp_epochs=ramp_epochs),
            LearningRateSchedule(initial=0.005, decay_factor=0.6, decay_every=1),
        ),
        optimiser=OptimiserSettings(batch_size=100),
        run=RunSettings(checkpoint_seconds=5.0, check_every=1, check_images=200),
    )


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """So many threads for torch while this lasts; sums, and so trained weights, depend on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train_demo(plan: DemoPlan, folder: Path, device: torch.device) -> Run:
    """The trained run; goes on where an earlier call was interrupted."""
    with training_view(plan.spec.schedule.epochs) as view:
        return train_run(plan.spec, folder, Workplace(device), resume=True, listener=view)


def measure(plan: DemoPlan, run: Run, device: torch.device) -> None:
    """Everything that the plan measures, as evidence in the run's folder."""
    measurements = Measurements(plan, run, device)
    measurements.certify(SIDE, plan.images)
    for side in plan.sides:
        measurements.certify(side, plan.side_images)
    measurements.attack()


@final
class Measurements:
    """What is measured on the first test images of the trained run, and kept as evidence in its folder."""

    def __init__(self, plan: DemoPlan, run: Run, device: torch.device) -> None:
        self.plan = plan
        self.run = run
        self.device = device
        self.dataset = load_dataset(run.spec.data.name)
        self.weights = sha256(run.weights)

    def certify(self, side: int, count: int) -> None:
        """Certificates against squares of a side, anywhere."""
        task = _Task(
            kind="certify",
            unit="images",
            threat=Patch(side),
            limit=self._limit(count),
            options=["--patch", f"{side}x{side}"],
            settings={"dtype": "float32"},
        )
        self._once(task, self._certificates)

    def attack(self) -> None:
        """An attack within the threat trained against, which keeps the images that it broke."""
        attack = self.plan.attack
        values = {name: str(getattr(attack, name)) for name in ("loss", "search", "restarts", "steps")}
        options = values | {"step-size": str(attack.step_size)}
        task = _Task(
            kind="attack",
            unit="restarts",
            threat=Patch(SIDE),
            limit=self._limit(self.plan.attacked),
            options=[
                *(word for name, value in options.items() for word in (f"--{name}", value)),
                "--save-images",
            ],
            settings=describe_attack(attack),
            named=(*values.values(), f"step-{attack.step_size}"),
        )
        self._once(task, self._attacked)

    def _limit(self, count: int) -> int | None:
        return None if count >= len(self.dataset.test) else count

    def _once(self, task: "_Task", take: Callable[[Patch, Split, Report], dict[str, Any]]) -> None:
        """Measure and keep, unless the same was measured with the same weights before."""
        claim = self._claim(task)
        known = self.run.evidence_meta(task.name) if task.name in self.run.evidence_names() else {}
        if known and all(known.get(key) == value for key, value in claim.items()):
            return
        images = self.dataset.test[: task.limit].to(self.device)
        started = time.perf_counter()
        with progress_bar(f"{task.kind} {task.threat.height}x{task.threat.width}", task.unit) as report:
            arrays = take(task.threat, images, report)
        seconds = round(time.perf_counter() - started, 3)
        circumstances = {
            "command": task.command(self.run.path),
            "seconds": seconds,
            **describe_machine(self.device),
        }
        self.run.write_evidence(task.name, arrays, claim | circumstances)

    def _claim(self, task: "_Task") -> dict[str, Any]:
        """What makes two measurements the same."""
        checksums = dict(self.dataset.checksums)
        return {
            "kind": task.kind,
            "weights_sha256": self.weights,
            "data": {"name": self.dataset.name, "split": "test", "limit": task.limit, "sha256": checksums},
            "threat": task.threat.to_dict(),
            "settings": task.settings,
        }

    def _certificates(self, threat: Patch, images: Split, report: Report) -> dict[str, Any]:
        found = certify(self.run.model(self.device), images.floats(), images.labels, threat, progress=report)
        return {
            "label": found.labels,
            "prediction": found.predictions,
            "verdict": found.certified,
            "margin": found.least_margin,
            "worst_top": found.worst_placement[:, 0],
            "worst_left": found.worst_placement[:, 1],
        }

    def _attacked(self, threat: Patch, images: Split, report: Report) -> dict[str, Any]:
        model = self.run.model(self.device)
        found = self.plan.attack.run(model, images.floats(), images.labels, threat, progress=report)
        return evidence_arrays(found, torch.arange(len(images)), save_images=True)


@dataclass(frozen=True)
class _Task:
    """One measurement, and how the command line asks for the same."""

    kind: str
    unit: str
    threat: Patch
    limit: int | None
    options: Sequence[str]
    settings: dict[str, Any]
    named: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name under which the command of that kind keeps its evidence."""
        first = "" if self.limit is None else f"first-{self.limit}"
        return evidence_name(self.kind, [self.threat, first, *self.named])

    def command(self, folder: Path) -> str:
        """The command that measures it again."""
        limit = [] if self.limit is None else ["--limit", str(self.limit)]
        return shlex.join(["patchcert", self.kind, str(folder), *self.options, *limit])
