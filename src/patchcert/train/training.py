"""Carries out a specification: from its words to a finished run folder, alone or with other processes."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Generator, nn

from patchcert.bounds import Network
from patchcert.certificates.checks import check_fit
from patchcert.data import Dataset, Split
from patchcert.errors import PatchcertError, RunError
from patchcert.models import ModelSpec, build, save
from patchcert.train.build import (
    build_strategy,
    check_votes,
    choose_data,
    describe_model,
    load_data,
    step_settings,
)
from patchcert.train.checkpoint import load_state
from patchcert.train.distributed import ALONE, World
from patchcert.train.environment import describe_environment, describe_session
from patchcert.train.loop import EpochSummary, Plan, Position, derived_seed, train
from patchcert.train.observer import (
    Best,
    Interrupted,
    Listener,
    RunObserver,
    StopRequest,
    stop_on_interrupt,
)
from patchcert.train.prepare import exclusive, prepare_run
from patchcert.train.run_folder import Run
from patchcert.train.sharding import certify_sharded
from patchcert.train.spec import AblatedTraining, Spec
from patchcert.train.step import Trainee
from patchcert.train.strategies.ablated import WholeModel


@dataclass(frozen=True, slots=True)
class Workplace:
    """Where a run is carried out: device, data, and the processes that share it."""

    device: torch.device
    data_dir: Path | None = None
    world: World = ALONE


def train_run(
    spec: Spec, folder: Path, place: Workplace, resume: bool = False, listener: Listener | None = None
) -> Run:
    """Train a specification into a folder, or go on with it there; a finished run is returned as it is."""
    dataset = load_data(spec.data, place.data_dir)
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
    training = _Training(run, spec, dataset, place)
    with stop_on_interrupt() as stop:
        try:
            training.carry_out(stop, listener)
        except RunError as error:
            if stop.is_made and not place.world.is_main:
                raise Interrupted(run.path) from error
            raise
    if place.world.is_main:
        training.finish()
    return run


class _Training:
    """One run with all its parts in memory."""

    def __init__(self, run: Run, spec: Spec, dataset: Dataset, place: Workplace) -> None:
        self.run, self.spec, self.dataset, self.place = run, spec, dataset, place
        self.model_spec: ModelSpec = describe_model(spec.model, dataset)
        generator = Generator().manual_seed(derived_seed(spec.seed, "weights"))
        self.model: nn.Sequential = build(self.model_spec, generator).to(place.device)
        self.best = Best()
        self.data, self.held_out = self._splits()
        self.plan = self._plan()
        self.trainee = Trainee(self.model, self.plan.strategy.helper, self.plan.settings, self._network())

    def carry_out(self, stop: StopRequest, listener: Listener | None) -> None:
        """Train from the saved state, or from the start, to the end."""
        start = self._restore()
        if self.place.world.is_main:
            self.run.truncate_metrics(start.epoch)
            self._record_session(start)
        observer = RunObserver(
            run=self.run,
            trainee=self.trainee,
            batches=self.plan.batches,
            checkpoint_seconds=self.spec.run.checkpoint_seconds,
            check=self._check,
            stop=stop,
            best=self.best,
            writes=self.place.world.is_main,
            listener=listener,
        )
        train(self.trainee, self.plan, observer, start)
        observer.save(Position(self.spec.schedule.epochs))

    def finish(self) -> None:
        """Write the weights that the run is for: the last, or the best on the validation images."""
        if self.best.weights:
            self.model.load_state_dict(self.best.weights)
        save(self.model, self.model_spec, self.run.weights)

    def _splits(self) -> tuple[Split, Split | None]:
        data, held_out = choose_data(self.dataset, self.spec.data)
        device = self.place.device
        return data.to(device), None if held_out is None else held_out.to(device)

    def _plan(self) -> Plan:
        strategy = build_strategy(self.spec, self.model_spec)
        if strategy.helper is not None:
            strategy.helper.to(self.place.device).train()
        return Plan(
            strategy=strategy,
            data=self.data,
            schedule=self.spec.schedule,
            settings=step_settings(self.spec),
            seed=self.spec.seed,
            cuda_graph=self.spec.run.cuda_graph,
            world=self.place.world,
        )

    def _network(self) -> Network | None:
        """The model itself where its strategy asks for no bounds; else it is traced."""
        if not self.is_voting:
            return None
        check_votes(self.model, self.model_spec)
        return WholeModel.in_training(self.model)

    @property
    def is_voting(self) -> bool:
        """Whether the model learns to vote, so that bounds say nothing of it."""
        return isinstance(self.spec.strategy, AblatedTraining)

    def _restore(self) -> Position:
        if not self.run.state.is_file():
            return Position()
        position, notes, kept = load_state(self.run.state, self.trainee)
        self.best.accuracy, self.best.epoch = notes["best_accuracy"], notes["best_epoch"]
        self.best.weights = {name: value.to(self.place.device) for name, value in kept.items()}
        return position

    def _record_session(self, start: Position) -> None:
        device = self.place.device
        before = self.run.environment().get("sessions", [])
        session = describe_session(device, start.epoch, start.batch)
        facts = describe_environment(device, self.dataset, self.place.world.size)
        self.run.write_environment(facts | {"sessions": [*before, session]})

    def _check(self, summary: EpochSummary) -> dict[str, Any]:
        """Clean and certified accuracy on images that are no test images, where a check is due."""
        full = self.spec.schedule.epsilon.phase(summary.epoch) == "full"
        chooses = full and self.spec.select == "best-validation"
        if not (chooses or self._is_due(summary.epoch)):
            return {}
        images = self.held_out if self.held_out is not None else self.data
        sample = images if chooses else images.take(self.spec.run.check_images)
        accuracies = self._accuracies(sample)
        if chooses and accuracies["certified_accuracy"] > self.best.accuracy:
            self._keep(summary.epoch, accuracies["certified_accuracy"])
        name = "train" if self.held_out is None else "validation"
        return accuracies | {"checked_on": name, "checked_images": len(sample)}

    def _is_due(self, epoch: int) -> bool:
        every = 0 if self.is_voting else self.spec.run.check_every
        return bool(every) and ((epoch + 1) % every == 0 or epoch + 1 == self.spec.schedule.epochs)

    def _accuracies(self, sample: Split) -> dict[str, float]:
        world = self.place.world
        found = certify_sharded(self.model, sample.floats(), sample.labels, self.spec.threat, world)
        return {"clean_accuracy": found.clean_accuracy, "certified_accuracy": found.certified_accuracy}

    def _keep(self, epoch: int, accuracy: float) -> None:
        self.best.accuracy, self.best.epoch = accuracy, epoch
        self.best.weights = {name: value.clone() for name, value in self.model.state_dict().items()}


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


def _check_data(run: Run, dataset: Dataset) -> None:
    before = run.environment().get("data", {}).get("checksums", dict(dataset.checksums))
    if before != dict(dataset.checksums):
        raise RunError(
            f"{run.path} was begun with other files of {dataset.name} than those found now",
            hint="give the same --data-dir, or another folder with --out",
        )


def _agree(place: Workplace, error: PatchcertError | None) -> None:
    """All processes go on, or none: the main one has the message, the others only end."""
    is_well = place.world.agree(error is None, place.device)
    if not is_well and error is None:
        raise RunError("the main process could not begin the run", hint="see the message of process 0")
