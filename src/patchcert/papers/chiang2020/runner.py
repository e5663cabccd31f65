"""Several runs at once on one device, each in its own process; what was cut short goes on."""

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

import patchcert
from patchcert.papers.chiang2020.ablation_evidence import VotedRows
from patchcert.papers.chiang2020.collecting import collect
from patchcert.papers.chiang2020.evidence import Rows
from patchcert.papers.chiang2020.orders import write_orders
from patchcert.papers.chiang2020.plan import Task
from patchcert.papers.chiang2020.results import find_result, is_complete
from patchcert.papers.chiang2020.siblings import Archive
from patchcert.papers.chiang2020.worker import STOP_FILE, is_missing
from patchcert.train.run_folder import EVIDENCE, METRICS, SPEC, WEIGHTS, Run

State = Literal["waiting", "running", "done", "already done", "interrupted", "failed"]
POLL_SECONDS = 0.2
GRACE_SECONDS = 45.0
LOG = "log.txt"


@dataclass(frozen=True, slots=True)
class Workshop:
    """Where runs are carried out and kept. Run folders need not last; results are what counts.

    From the deadline on, a reading of `time.monotonic`, no run is started and those in progress are stopped.
    """

    runs: Path
    results: Path | None = None
    device: str = "cpu"
    data_dir: Path | None = None
    jobs: int = 1
    deadline: float | None = None


class Watcher(Protocol):
    """Hears what becomes of runs."""

    def changed(self, task: Task, state: State, note: str) -> None:
        """A run was started, or has come to some end."""
        ...

    def passed(self, states: dict[str, State], running: Sequence["Job"]) -> None:
        """Time has passed."""
        ...


@dataclass(slots=True)
class StopOrder:
    """Set from outside to have everything stop in order."""

    is_given: bool = False


@dataclass(slots=True)
class Job:
    """A run in progress."""

    task: Task
    folder: Path
    process: subprocess.Popen[bytes]
    started: float = field(default_factory=time.monotonic)

    @property
    def epochs_done(self) -> int:
        """How many epochs have been trained so far."""
        file = self.folder / METRICS
        return len(file.read_bytes().splitlines()) if file.is_file() else 0

    @property
    def words(self) -> str:
        """How far it is."""
        total = self.task.spec.schedule.epochs
        done = self.epochs_done
        if done < total:
            return f"{self.task.label} {done}/{total}"
        last = _last_line(self.folder).partition(" ")[2]
        return f"{self.task.label} on evidence{f', {last}' if last.startswith('votes on') else ''}"

    def stop(self) -> None:
        """Ask it to save its state and end."""
        (self.folder / STOP_FILE).touch()


class Runner:
    """Carries out tasks, as many at a time as there are jobs; one that fails does not stop the others."""

    def __init__(self, shop: Workshop, watcher: Watcher, stop: StopOrder) -> None:
        self.shop, self.watcher, self.stop = shop, watcher, stop
        self.states: dict[str, State] = {}
        self._running: list[Job] = []

    def run(self, tasks: Sequence[Task]) -> dict[str, State]:
        """What became of each task."""
        self.states = {task.name: "waiting" for task in tasks}
        waiting = deque(task for task in tasks if not self._is_done(task))
        try:
            while (waiting and not self._must_stop) or self._running:
                if self._must_stop:
                    self._end_all()
                    break
                while waiting and len(self._running) < self.shop.jobs:
                    self._start(waiting.popleft())
                time.sleep(POLL_SECONDS)
                self._look()
        finally:
            self._end_all()
        return self.states

    @property
    def _must_stop(self) -> bool:
        deadline = self.shop.deadline
        return self.stop.is_given or (deadline is not None and time.monotonic() >= deadline)

    def _is_done(self, task: Task) -> bool:
        if self._is_among_results(task):
            self._set(task, "already done")
            return True
        folder = self.shop.runs / task.name
        if not (folder / SPEC).is_file():
            return False
        run = Run.open(folder)
        if not run.is_finished or any(is_missing(run, name) for name in task.evidence_names):
            return False
        if not self._archive.has_chosen_settings(task, folder / EVIDENCE):
            return False
        self._collect(task)
        self._set(task, "already done")
        return True

    def _is_among_results(self, task: Task) -> bool:
        """What must be trained again for its attacks is so before settings are chosen: its trials change too."""
        results = self.shop.results
        if results is None or not is_complete(results, task):
            return False
        if task.tunes_only and not (self.shop.runs / task.name / WEIGHTS).is_file():
            return is_complete(results, replace(task, tunes_only=False))
        return self._archive.has_chosen_settings(task, results / task.name)

    @property
    def _archive(self) -> Archive:
        return Archive(self.shop.runs, self.shop.results)

    def _start(self, task: Task) -> None:
        folder = self.shop.runs / task.name
        (folder / STOP_FILE).unlink(missing_ok=True)
        if not (folder / SPEC).is_file():
            Run.create(folder, task.spec)
        task = self._with_earlier_threats(task)
        write_orders(folder, task, self.shop.jobs)
        with (folder / LOG).open("ab") as log:
            process = subprocess.Popen(
                self._command(folder),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(self.shop.jobs),
                start_new_session=True,
            )
        self._running.append(Job(task, folder, process))
        self._set(task, "running")

    def _command(self, folder: Path) -> list[str]:
        command = [sys.executable, "-m", "patchcert.papers.chiang2020.worker", str(folder.resolve())]
        command += ["--device", self.shop.device, "--parent", str(os.getpid())]
        command += ["--results", str(self.shop.results.resolve())] if self.shop.results else []
        return command + (["--data-dir", str(self.shop.data_dir)] if self.shop.data_dir else [])

    def _with_earlier_threats(self, task: Task) -> Task:
        """Results of earlier weights are replaced, so that the new ones must answer what those answered.

        Attacks behind a defense are not repeated unasked: their setting is chosen together with other runs.
        """
        result = find_result(self.shop.results, task)
        if result is None or (self.shop.runs / task.name / WEIGHTS).is_file():
            return task
        earlier = [rows.threat for rows in result.rows if rows.limit == task.test_images]
        undefended = [rows.plan for rows in result.attacks if not rows.plan.defense]
        return replace(
            task,
            threats=tuple(dict.fromkeys((*task.threats, *earlier))),
            attacks=tuple(dict.fromkeys((*task.attacks, *undefended))),
            votes=tuple(dict.fromkeys((*task.votes, *(rows.plan for rows in result.votes)))),
        )

    def _look(self) -> None:
        for job in [job for job in self._running if job.process.poll() is not None]:
            self._running.remove(job)
            self._finish(job)
        self.watcher.passed(self.states, self._running)

    def _finish(self, job: Job, stopped: bool = False) -> None:
        (job.folder / STOP_FILE).unlink(missing_ok=True)
        code = job.process.returncode
        if code == 0:
            note = self._collect(job.task)
            self._set(job.task, "done", note)
        elif stopped or code == 130:
            self._set(job.task, "interrupted", f"after {job.epochs_done} epochs")
        else:
            self._set(job.task, "failed", f"exit code {code}, {job.folder / LOG}: {_last_line(job.folder)}")

    def _end_all(self) -> None:
        """Ask all to stop and wait; what does not stop in time is killed, and goes on from its last state."""
        for job in self._running:
            job.stop()
        until = time.monotonic() + GRACE_SECONDS
        while self._running:
            job = self._running.pop()
            try:
                job.process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                job.process.kill()
                job.process.wait()
            self._finish(job, stopped=True)

    def _collect(self, task: Task) -> str:
        """Bring a finished run's evidence to the results; what it found, in words."""
        run = Run.open(self.shop.runs / task.name)
        if self.shop.results is not None:
            collect(run, task.name, self.shop.results, task.scale)
        return f"{_found(run)}, trained in {run.training_seconds:.0f} s"

    def _set(self, task: Task, state: State, note: str = "") -> None:
        self.states[task.name] = state
        self.watcher.changed(task, state, note)


def _environment(jobs: int) -> dict[str, str]:
    """The same package for the processes, and a fair share of the processor for each."""
    source = str(Path(patchcert.__file__).resolve().parents[1])
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    return {"OMP_NUM_THREADS": threads, **os.environ, "PYTHONPATH": os.pathsep.join(paths), "NO_COLOR": "1"}


def _found(run: Run) -> str:
    """The accuracies of a finished run against the threat that it was trained on, or the first it has."""
    names = [name for name in run.evidence_names() if name.startswith("certify-")]
    rows = [Rows.read(run.path / EVIDENCE / f"{name}.npz") for name in names]
    own = next((each for each in rows if each.threat == run.spec.threat), rows[0] if rows else None)
    voted = [name for name in run.evidence_names() if name.startswith("votes-")]
    if own is None and voted:
        return VotedRows.read(run.path / EVIDENCE / f"{voted[-1]}.npz").words
    if own is None:
        return f"{sum(name.startswith('attack-') for name in run.evidence_names())} attacks"
    return f"{own.correct / own.total:.2%} right, {own.certified / own.total:.2%} certified"


def _last_line(folder: Path) -> str:
    lines = (folder / LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"
