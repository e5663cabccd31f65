"""Carries out a specification: from its TOML to a finished run folder, alone or with other processes."""

import copy
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Generator, nn

from patchcert.certificates.checks import check_fit
from patchcert.data import Dataset
from patchcert.errors import PatchcertError, RunError, SpecError
from patchcert.models import ModelSpec, build, save
from patchcert.train.batch_norms import batch_norms
from patchcert.train.checkpoint import Best, load_state, save_state
from patchcert.train.distributed import ALONE, World, shared_accuracies
from patchcert.train.environment import describe_environment, describe_session
from patchcert.train.loop import EpochSummary, Position, train
from patchcert.train.pace import TrainingPace
from patchcert.train.recipe import initialise_for_intervals
from patchcert.train.run_folder import Run, exclusive, prepare_run
from patchcert.train.spec import Spec
from patchcert.train.step import Plan, Rows, Trainee, TrainingStep
from patchcert.train.strategy import Subject, derived_seed, natural_objective

SAVE_SHARE = 0.02
"""At most this share of the time is spent on saving the state."""

QUICK_STEP = 0.5
"""Seconds of a step that is tried twice before it is timed."""


@dataclass(frozen=True, slots=True)
class Workplace:
    """Where a run is carried out: device, data, and the processes that share it."""

    device: torch.device
    data_dir: Path | None = None
    world: World = ALONE


class Listener(Protocol):
    """Hears how training proceeds, to show it."""

    def on_start(self, pace: TrainingPace) -> None:
        """Before the first batch, with what tells how long it takes; the listener notes batches in it."""
        ...

    def on_stop(self) -> None:
        """When a stop is asked for; the batch under way is finished before."""
        ...

    def on_batch(self, position: Position, batches: int) -> None:
        """Between two batches; `position` is what comes next."""
        ...

    def on_epoch(self, row: Mapping[str, Any]) -> None:
        """After an epoch, with its row of metrics."""
        ...


class Interrupted(KeyboardInterrupt):
    """Training was asked to stop; its state is saved in the folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"nothing is lost; resume with: patchcert train {folder} --resume")


@dataclass(slots=True)
class StopRequest:
    """Set by the first Ctrl-C; a second one interrupts at once."""

    is_made: bool = False


@contextmanager
def stop_on_interrupt(answer: Callable[[], None] | None = None) -> Iterator[StopRequest]:
    """While this lasts the first Ctrl-C only asks to stop, so that no step is cut in half; `answer` says so at once."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def ask(number: int, frame: FrameType | None) -> None:
        request.is_made = True
        signal.signal(signal.SIGINT, before)
        if answer is not None:
            answer()

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield request
    finally:
        signal.signal(signal.SIGINT, before)


def train_run(
    spec: Spec, folder: Path, place: Workplace, resume: bool = False, listener: Listener | None = None
) -> Run:
    """The finished run of a specification in a folder; an unfinished one there is resumed, a finished one returned."""
    _check_epsilon(spec)
    dataset = spec.data.load(place.data_dir)
    check_fit(spec.threat, dataset.test.take(1).floats())
    if not place.world.is_main:
        _agree(place, None)
        return _train(Run.open(folder), spec, dataset, place, None)
    with ExitStack() as stack:
        try:
            stack.enter_context(exclusive(folder))
            run = prepare_run(folder, spec, resume)
            _check_data(run, dataset)
        except PatchcertError as error:
            _agree(place, error)
            raise
        _agree(place, None)
        return _train(run, spec, dataset, place, listener)


def _train(run: Run, spec: Spec, dataset: Dataset, place: Workplace, listener: Listener | None) -> Run:
    """The run, trained to its end. Only the main process obeys Ctrl-C; its end then ends the others."""
    if run.is_finished:
        return run
    training = _Training(run, spec, dataset, place, listener)
    with stop_on_interrupt(None if listener is None else listener.on_stop) as stop:
        try:
            training.carry_out(stop)
        except RunError as error:
            if stop.is_made and not place.world.is_main:
                raise Interrupted(run.path) from error
            raise
    if place.world.is_main:
        training.finish()
    return run


class _Training:
    """One run with all its parts in memory; observes its own loop to check, record and save.

    Processes other than the main one check along, but write nothing. The state is saved when `checkpoint_seconds` have
    passed, but never so often that it costs more than `SAVE_SHARE` of the time; the row of an epoch is always written
    before a state that lies behind it.
    """

    def __init__(
        self, run: Run, spec: Spec, dataset: Dataset, place: Workplace, listener: Listener | None
    ) -> None:
        self.run, self.spec, self.dataset, self.place = run, spec, dataset, place
        self.stop, self.listener = StopRequest(), listener
        self.model_spec: ModelSpec = spec.model.for_data(dataset)
        generator = Generator().manual_seed(derived_seed(spec.seed, "weights"))
        self.model: nn.Sequential = build(self.model_spec, generator)
        if spec.bounds.initialisation == "interval":
            initialise_for_intervals(self.model, generator)
        if not run.state.is_file():
            spec.model.begin(self.model)
        self.model.to(place.device)
        data, held_out = spec.data.split(dataset)
        self.held_out = None if held_out is None else held_out.to(place.device)
        self.plan = Plan(spec, data.to(place.device), place.world)
        _check_batches(self.plan, self.model)
        self.trainee = self._trainee(self.model)
        self.best = Best()
        self._saved_at, self._save_took = 0.0, 0.0

    def _trainee(self, model: nn.Module) -> Trainee:
        spec = self.spec
        is_rounded = spec.optimiser.windows is not None and self.place.device.type == "cuda"
        windows = torch.bfloat16 if is_rounded else None
        subject = Subject(model, self.model_spec, spec.threat, spec.seed, windows)
        return Trainee(model, spec.strategy.bind(subject), spec.optimiser)

    def carry_out(self, stop: StopRequest) -> None:
        """Train from the saved state, or from the start, to the end or until a stop is asked for."""
        self.stop, start = stop, Position()
        if self.run.state.is_file():
            start, self.best = load_state(self.run.state, self.trainee)
        if self.place.world.is_main:
            self.run.truncate_metrics(start.epoch)
            self._record_session(start)
        self._saved_at = time.monotonic()
        if self.listener is not None:
            tried = self._try_batches(start)
            self.listener.on_start(TrainingPace(self.spec.schedule, self.plan.batches, start, tried))
        train(self.trainee, self.plan, self, start)
        self._save(Position(self.spec.schedule.epochs))

    def _try_batches(self, start: Position) -> dict[bool, float]:
        """The seconds of a batch, natural and not, on a CPU; tried on a copy, so that nothing of the run changes.

        A GPU, on which natural epochs take seconds, will soon tell by itself.
        """
        if self.place.device.type != "cpu" or self.place.world.size > 1:
            return {}
        schedule, trainee = self.spec.schedule, self._trainee(copy.deepcopy(self.model))
        trainee.epsilon.fill_(schedule.epsilon.end(schedule.epochs - 1))
        rows = torch.arange(min(self.spec.optimiser.batch_size, len(self.plan.data)))
        kinds = {schedule.epsilon.phase(epoch) == "natural" for epoch in range(start.epoch, schedule.epochs)}
        return {is_natural: _seconds_of(trainee, self.plan, is_natural, rows) for is_natural in kinds}

    def finish(self) -> None:
        """Write the weights that the run is for: the last, or the best on the validation images."""
        with self.trainee.deployed() as model:
            if self.best.weights:
                model.load_state_dict(self.best.weights)
            save(model, self.model_spec, self.run.weights)

    def after_batch(self, position: Position) -> None:
        """Save if it is time or if training is to stop."""
        if self.listener is not None:
            self.listener.on_batch(position, self.plan.batches)
        if self.stop.is_made and self.place.world.is_main:
            self._save(position)
            raise Interrupted(self.run.path)
        waited = time.monotonic() - self._saved_at
        if waited >= max(self.spec.run.checkpoint_seconds, self._save_took / SAVE_SHARE):
            self._save(position)

    def after_epoch(self, summary: EpochSummary) -> None:
        """Check the model where a check is due, and write the epoch's row."""
        row = asdict(summary) | self._check(summary)
        if self.place.world.is_main:
            self.run.append_metrics(row)
        if self.listener is not None:
            self.listener.on_epoch(row)

    def _save(self, position: Position) -> None:
        """Write the state from which the run can be resumed at this position, once queued steps are done."""
        if not self.place.world.is_main:
            return
        self.trainee.sums.cpu()
        began = time.monotonic()
        save_state(self.run.state, self.trainee, position, self.best)
        self._saved_at = time.monotonic()
        self._save_took = self._saved_at - began

    def _record_session(self, start: Position) -> None:
        device = self.place.device
        before = self.run.environment().get("sessions", [])
        session = describe_session(device, start.epoch, start.batch)
        facts = describe_environment(device, self.dataset, self.place.world.size)
        self.run.write_environment(facts | {"sessions": [*before, session]})

    def _check(self, summary: EpochSummary) -> dict[str, Any]:
        """Clean and certified accuracy on images that are not test images, where a check is due."""
        full = self.spec.schedule.epsilon.phase(summary.epoch) == "full"
        chooses = full and self.spec.select == "best-validation"
        if not (chooses or self._is_due(summary.epoch)):
            return {}
        images = self.plan.data if self.held_out is None else self.held_out
        sample = images if chooses else images.take(self.spec.run.check_images)
        with self.trainee.deployed() as model:
            found = shared_accuracies(
                model, sample.floats(), sample.labels, self.spec.threat, self.place.world
            )
            if chooses and found.certified_accuracy > self.best.accuracy:
                weights = {name: value.clone() for name, value in model.state_dict().items()}
                self.best = Best(found.certified_accuracy, summary.epoch, weights)
        name = "train" if self.held_out is None else "validation"
        return asdict(found) | {"checked_on": name, "checked_images": len(sample)}

    def _is_due(self, epoch: int) -> bool:
        every = self.spec.run.check_every if self.spec.strategy.has_bounds else 0
        return bool(every) and ((epoch + 1) % every == 0 or epoch + 1 == self.spec.schedule.epochs)


def _seconds_of(trainee: Trainee, plan: Plan, is_natural: bool, rows: Rows) -> float:
    """What a step on these rows takes; what a quick one does for the first time is not counted."""
    objective = natural_objective(trainee.objective.network) if is_natural else trainee.objective
    step, seconds = TrainingStep(trainee, plan, objective), 0.0
    for _ in range(2):
        began = time.perf_counter()
        step(rows)
        seconds = time.perf_counter() - began
        if seconds > QUICK_STEP:
            break
    return seconds


def summarise(run: Run) -> dict[str, Any]:
    """What a finished run can say of itself without looking at test images."""
    rows = run.metrics()
    checked: Mapping[str, Any] = next((row for row in reversed(rows) if "checked_on" in row), {})
    keys = ("clean_accuracy", "certified_accuracy", "checked_on", "checked_images")
    return {
        "run": str(run.path),
        "fingerprint": run.spec.fingerprint(),
        "epochs": len(rows),
        "loss": rows[-1]["loss"] if rows else None,
        "seconds": round(run.training_seconds, 3),
    } | {key: checked[key] for key in keys if key in checked}


def _check_epsilon(spec: Spec) -> None:
    if not spec.strategy.has_epsilon and spec.schedule.epsilon.full_from:
        raise SpecError(
            f"the strategy {spec.strategy.kind!r} has no epsilon, but the schedule has natural or ramp epochs",
            hint="set schedule.epsilon.natural_epochs = 0 and schedule.epsilon.ramp_epochs = 0",
        )


def _check_batches(plan: Plan, model: nn.Module) -> None:
    """Batch norms cannot learn from a single image, which the last batch of an epoch may leave for a process."""
    last = len(plan.data) - (plan.batches - 1) * plan.spec.optimiser.batch_size
    if last < 2 * plan.world.size and batch_norms(model):
        raise SpecError(
            f"batch norms need two images or more, but the last batch of an epoch has {last} "
            f"for {plan.world.size} process{'es' * (plan.world.size > 1)}",
            hint="choose another optimiser.batch_size, or set data.limit",
        )


def _check_data(run: Run, dataset: Dataset) -> None:
    before = run.environment().get("data", {}).get("checksums", dict(dataset.checksums))
    if before != dict(dataset.checksums):
        raise RunError(
            f"{run.path} was begun with other files of {dataset.name} than those found now",
            hint="give the same --data-dir, or another folder with --out",
        )


def _agree(place: Workplace, error: PatchcertError | None) -> None:
    """All processes continue, or none: the main one has the message, the others only end."""
    is_well = place.world.agree(error is None, place.device)
    if not is_well and error is None:
        raise RunError("the main process could not begin the run", hint="see the message of process 0")
