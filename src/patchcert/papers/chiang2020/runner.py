"""What is to be trained and measured for some rows, every run once; and several runs at once on one device.

Each has its own process; what was interrupted resumes.
"""

import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Literal, Protocol

import patchcert
from patchcert.data import load_dataset
from patchcert.evidence.record import EvidenceFolder, Question
from patchcert.evidence.results import FIRST_SEED, Circumstances, Result, collect
from patchcert.files import read_json, sha256, write_text
from patchcert.papers.chiang2020.networks import NetworkResult, collect_network
from patchcert.papers.chiang2020.recipes import PAPER_SCALE, Recipe, Scale, recipe
from patchcert.papers.chiang2020.tables import Entry
from patchcert.train.run_folder import EVIDENCE, METRICS, SPEC, WEIGHTS, Run
from patchcert.train.spec import Spec
from patchcert.train.strategies import RandomPlacements

State = Literal["waiting", "running", "done", "already done", "interrupted", "failed"]
POLL_SECONDS = 0.2
GRACE_SECONDS = 45.0
LOG, QUESTIONS, STOP_FILE = "log.txt", ".questions.json", ".stop"
WORKER = (sys.executable, "-m", "patchcert.papers.chiang2020.worker")


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one process does: train a run, unless a `network` comes trained, and answer questions about it.

    Specification and data decide the name, which its folders have among runs and results.
    """

    name: str
    label: str
    questions: tuple[Question, ...]
    spec: Spec | None = None
    network: str = ""
    scale: float = 1.0

    def write(self, folder: Path, jobs: int) -> None:
        """Leave it in the folder of its run; `jobs` is how many runs share the device."""
        if self.spec is not None and not (folder / SPEC).is_file():
            Run.create(folder, self.spec)
        Circumstances(self.scale, jobs).write(folder)
        asked = {"network": self.network, "questions": [question.to_dict() for question in self.questions]}
        write_text(folder / QUESTIONS, json.dumps(asked))


def read_questions(folder: Path) -> tuple[str, tuple[Question, ...]]:
    """The network, where it comes trained, and the questions that were left in the folder of a run."""
    plain = read_json(folder / QUESTIONS)
    return plain["network"], tuple(Question.from_dict(each) for each in plain["questions"])


@dataclass(frozen=True, slots=True)
class Effort:
    """At which scale, with how many seeds, and whether training steps may round: to TF32, or also to bfloat16."""

    scale: Scale = PAPER_SCALE
    seeds: int = 1
    tf32: bool = False
    bfloat16: bool = False

    def specs(self, made: Recipe) -> tuple[Spec, ...]:
        """All runs of a recipe, every seed of them."""
        seeded = [replace(spec, seed=spec.seed + extra) for extra in range(self.seeds) for spec in made.specs]
        if self.tf32 or self.bfloat16:
            windows = "bfloat16" if self.bfloat16 else None
            seeded = [
                replace(spec, optimiser=replace(spec.optimiser, tf32=True, windows=windows))
                for spec in seeded
            ]
        return tuple(seeded)


def plan(entries: Sequence[Entry], effort: Effort, data_dir: Path | None) -> tuple[Assignment, ...]:
    """The runs behind the rows in their order; reads the data to know their sums, so that none is missing."""
    checksums: dict[str, Mapping[str, str]] = {}
    planned: dict[str, Assignment] = {}
    for entry in entries:
        made = recipe(entry, effort.scale)
        for spec in effort.specs(made):
            data = spec.data.name
            if data not in checksums:
                checksums[data] = load_dataset(data, data_dir).checksums
            name = spec.fingerprint(checksums[data])
            found = planned.get(name, Assignment(name, _label(spec), (), spec, scale=effort.scale.factor))
            asked = tuple(dict.fromkeys((*found.questions, *made.questions)))
            planned[name] = replace(found, questions=asked)
    return tuple(planned.values())


def _label(spec: Spec) -> str:
    strategy = spec.strategy.kind
    if isinstance(spec.strategy, RandomPlacements):
        strategy = f"random({spec.strategy.placements})"
    seed = f" seed {spec.seed}" if spec.seed != FIRST_SEED else ""
    threat = str(spec.threat).partition("(")[2].split(",")[0].rstrip(")")
    return f"{spec.data.name} {spec.model.name} {strategy} {threat}{seed}"


@dataclass(frozen=True, slots=True)
class Workshop:
    """Where runs are carried out and kept. Run folders need not last; results are what counts."""

    runs: Path
    results: Path
    device: str = "cpu"
    data_dir: Path | None = None
    jobs: int = 1


class Watcher(Protocol):
    """Hears what becomes of runs."""

    def changed(self, assignment: Assignment, state: State, note: str) -> None:
        """A run was started, or has come to some end."""
        ...

    def passed(self, states: dict[str, State], running: Sequence["Job"]) -> None:
        """Time has passed."""
        ...


@dataclass(slots=True)
class Job:
    """A run in progress."""

    assignment: Assignment
    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def epochs_done(self) -> int:
        file = self.folder / METRICS
        return len(file.read_bytes().splitlines()) if file.is_file() else 0

    @property
    def words(self) -> str:
        label, spec, done = self.assignment.label, self.assignment.spec, self.epochs_done
        if spec is not None and done < spec.schedule.epochs:
            return f"{label} {done}/{spec.schedule.epochs}"
        last = _last_line(self.folder).partition(" ")[2]
        return f"{label} on evidence{f', {last}' if last and not last.startswith('{') else ''}"


class Runner:
    """Carries out assignments, as many at a time as there are jobs, until a stop is asked for.

    One that fails does not stop the others.
    """

    def __init__(self, shop: Workshop, watcher: Watcher, stop: Event) -> None:
        self.shop, self.watcher, self.stop = shop, watcher, stop
        self.states: dict[str, State] = {}
        self._running: list[Job] = []

    def run(self, assignments: Sequence[Assignment]) -> dict[str, State]:
        """What became of each assignment."""
        self.states = {each.name: "waiting" for each in assignments}
        waiting = deque(each for each in assignments if not self._is_done(each))
        try:
            while (waiting or self._running) and not self.stop.is_set():
                while waiting and len(self._running) < self.shop.jobs:
                    self._start(waiting.popleft())
                time.sleep(POLL_SECONDS)
                self._look()
        finally:
            self._end_all()
        return self.states

    def _is_done(self, assignment: Assignment) -> bool:
        """Whether results, or else the folder of the run, have every answer; the latter is collected then."""
        if not set(assignment.questions) <= set(self._answered(assignment)):
            if not self._is_finished(assignment):
                return False
            self._collect(assignment)
        self._set(assignment, "already done")
        return True

    def _is_finished(self, assignment: Assignment) -> bool:
        folder = self.shop.runs / assignment.name
        if assignment.spec is None or not (folder / SPEC).is_file() or not Run.open(folder).is_finished:
            return False
        kept, weights = EvidenceFolder(folder / EVIDENCE), sha256(folder / WEIGHTS)
        return all(kept.find(question, weights) is not None for question in assignment.questions)

    def _start(self, assignment: Assignment) -> None:
        folder = self.shop.runs / assignment.name
        (folder / STOP_FILE).unlink(missing_ok=True)
        assignment = self._to_ask(assignment)
        assignment.write(folder, self.shop.jobs)
        with (folder / LOG).open("ab") as log:
            process = subprocess.Popen(
                self._command(folder),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(self.shop.jobs),
                start_new_session=True,
            )
        self._running.append(Job(assignment, folder, process))
        self._set(assignment, "running")

    def _command(self, folder: Path) -> list[str]:
        command = [*WORKER, str(folder.resolve())]
        command += ["--device", self.shop.device, "--parent", str(os.getpid())]
        return command + (["--data-dir", str(self.shop.data_dir)] if self.shop.data_dir else [])

    def _to_ask(self, assignment: Assignment) -> Assignment:
        """With the questions that are left of a network; of a run that must be trained again, also with those that the
        results answer by certificates and plain attacks, since evidence of earlier weights is replaced."""
        asked, answered = assignment.questions, self._answered(assignment)
        if assignment.spec is None:
            return replace(assignment, questions=tuple(each for each in asked if each not in answered))
        if (self.shop.runs / assignment.name / WEIGHTS).is_file():
            return assignment
        found = (each for each in answered if not each.certified_only)
        earlier = (each for each in found if each.attack.get("kind", "PatchAttack") == "PatchAttack")
        return replace(assignment, questions=tuple(dict.fromkeys((*asked, *earlier))))

    def _answered(self, assignment: Assignment) -> tuple[Question, ...]:
        path = self.shop.results / assignment.name
        if assignment.spec is None:
            found = NetworkResult(path).evidence
        else:
            found = Result.open(path).evidence if (path / SPEC).is_file() else ()
        return tuple(each.question for each in found)

    def _look(self) -> None:
        for job in [job for job in self._running if job.process.poll() is not None]:
            self._running.remove(job)
            self._finish(job)
        self.watcher.passed(self.states, self._running)

    def _finish(self, job: Job, stopped: bool = False) -> None:
        (job.folder / STOP_FILE).unlink(missing_ok=True)
        code = job.process.returncode
        if code == 0:
            self._set(job.assignment, "done", self._collect(job.assignment))
        elif stopped or code == 130:
            self._set(job.assignment, "interrupted", f"after {job.epochs_done} epochs")
        else:
            note = f"exit code {code}, {job.folder / LOG}: {_last_line(job.folder)}"
            self._set(job.assignment, "failed", note)

    def _end_all(self) -> None:
        """Ask all to stop and wait; what does not stop in time is killed, and resumes from its last state."""
        for job in self._running:
            (job.folder / STOP_FILE).touch()
        until = time.monotonic() + GRACE_SECONDS
        while self._running:
            job = self._running.pop()
            try:
                job.process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                job.process.kill()
                job.process.wait()
            self._finish(job, stopped=True)

    def _collect(self, assignment: Assignment) -> str:
        """Bring a finished run's evidence to the results; what it found, in words."""
        folder = self.shop.runs / assignment.name
        if assignment.spec is None:
            weights = EvidenceFolder(folder / EVIDENCE).all()[0].weights
            found = collect_network(folder, self.shop.results, weights).evidence
            return ", ".join(f"{each.withstood / each.total:.1%} withstood" for each in found)
        run = Run.open(folder)
        result = collect(run, self.shop.results)
        return f"{_found(result)}, trained in {run.training_seconds:.0f} s"

    def _set(self, assignment: Assignment, state: State, note: str = "") -> None:
        self.states[assignment.name] = state
        self.watcher.changed(assignment, state, note)


def _environment(jobs: int) -> dict[str, str]:
    """The same package for the processes, and a fair share of the processor for each."""
    source = str(Path(patchcert.__file__).resolve().parents[1])
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    return {"OMP_NUM_THREADS": threads, **os.environ, "PYTHONPATH": os.pathsep.join(paths), "NO_COLOR": "1"}


def _found(result: Result) -> str:
    """The accuracies of a finished run against the threat that it was trained on, or the first it has."""
    proven = [each for each in result.evidence if each.kind == "certify"]
    if not proven:
        return f"{len(result.evidence)} attacks"
    own = next((each for each in proven if each.threat == result.spec.threat), proven[0])
    return f"{own.correct / own.total:.2%} right, {own.certified / own.total:.2%} certified"


def _last_line(folder: Path) -> str:
    lines = (folder / LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"
