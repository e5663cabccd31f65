"""Runs of `patchcert reproduce`: started, watched, stopped in order, and talked about."""

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING

from patchcert.cli.output import say
from patchcert.errors import DataError
from patchcert.papers.chiang2020.imagenet_plan import Piece, pieces_of
from patchcert.papers.chiang2020.imagenet_runner import PieceRunner, require_material
from patchcert.papers.chiang2020.plan import Effort, Task, plan
from patchcert.papers.chiang2020.runner import Runner, State, StopOrder, Workshop

if TYPE_CHECKING:
    from patchcert.papers.chiang2020.runner import Job
    from patchcert.papers.chiang2020.tables import Entry

FAILED, LEFT_OVER, INTERRUPTED = 1, 3, 130
TALK_EVERY = 30.0
STDERR = 2


def carry_out(entries: "Sequence[Entry]", effort: Effort, shop: Workshop) -> int:
    """Train and certify what the rows need and is not there yet; the exit code that says how it went."""
    pieces = available_pieces(entries, effort, shop)
    tasks = plan(entries, effort, shop.data_dir)
    also = f" and {len(pieces)} attacks on ImageNet" if pieces else ""
    rows, runs = _counted(len(entries), "row"), _counted(len(tasks), "run")
    verb = "needs" if len(entries) == 1 else "need"
    say(f"{rows} {verb} {runs}{also} ({effort.scale.words}) on {shop.device}")
    with stop_on_signals() as stop:
        states = run_in_stages(tasks, shop, stop)
        states |= PieceRunner(shop, PieceTalk(), stop).run(pieces)
    counted = Counter(states.values())
    say(", ".join(f"{count} {state}" for state, count in counted.items()) or "nothing to run")
    if stop.is_given:
        say("stopped; give the same command again to go on")
        return INTERRUPTED
    if counted["failed"]:
        return FAILED
    if counted["waiting"] or counted["interrupted"]:
        say("the time limit is reached; give the same command again to go on")
        return LEFT_OVER
    return 0


def run_in_stages(tasks: Sequence[Task], shop: Workshop, stop: StopOrder) -> dict[str, State]:
    """What became of each task. First all settings of defenses are tried, since runs of a row share one."""
    tuned = [replace(task, tunes_only=True) for task in tasks if task.tunings]
    if tuned:
        say(f"first the settings of defenses are tried on {len(tuned)} runs")
        Runner(shop, Talk(), stop).run(tuned)
    return Runner(shop, Talk(), stop).run(tasks)


def available_pieces(entries: "Sequence[Entry]", effort: Effort, shop: Workshop) -> tuple[Piece, ...]:
    """What is to be attacked on ImageNet: nothing in a quick look, nor where other rows can do without it."""
    pieces = () if effort.scale.quick else pieces_of(entries, effort.seeds)
    try:
        require_material(pieces, shop.data_dir)
    except DataError as error:
        if all(entry.dataset == "imagenet" for entry in entries):
            raise
        say(f"left out the attacks on ImageNet: {error}")
        return ()
    return pieces


def _counted(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


class PieceTalk:
    """A line for whatever becomes of an attack on ImageNet, for each of its parts, and from time to time."""

    def __init__(self) -> None:
        self._words, self._passes, self._said_at = "", 0, 0.0

    def piece_changed(self, piece: Piece, state: State, note: str) -> None:
        """Say what became of an attack."""
        self._words = ""
        say(f"{state}: {piece.plan.label}{', ' if note else ''}{note}")

    def piece_passed(self, piece: Piece, words: str) -> None:
        """Say what begins, and later how often the network has looked at images."""
        now, is_new = time.monotonic(), words != self._words
        self._passes = 1 if is_new else self._passes + 1
        if is_new or now - self._said_at >= TALK_EVERY:
            self._words, self._said_at = words, now
            say(f"{piece.plan.label}: {words}{'' if is_new else f', {self._passes} passes'}")


class Talk:
    """A line for whatever happens, and from time to time one on how far everything is."""

    def __init__(self) -> None:
        self._said_at = time.monotonic()

    def changed(self, task: Task, state: State, note: str) -> None:
        """Say what became of a run."""
        stage = " with the trials of settings" if task.tunes_only else ""
        say(f"{state}{stage}: {task.label} [{task.name}]{', ' if note else ''}{note}")

    def passed(self, states: dict[str, State], running: "Sequence[Job]") -> None:
        """Say how far the runs are, unless it was said just now."""
        if time.monotonic() - self._said_at < TALK_EVERY:
            return
        self._said_at = time.monotonic()
        ended = sum(state not in ("waiting", "running") for state in states.values())
        say(f"{ended} of {len(states)} runs; now {'; '.join(job.words for job in running)}")


@contextmanager
def stop_on_signals() -> Iterator[StopOrder]:
    """While this lasts Ctrl-C and a polite kill ask for an orderly stop; a second one does not wait.

    A signal may come while a line is being written, and the stream refuses another one then: so what is said
    goes past the stream.
    """
    order = StopOrder()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, frame: FrameType | None) -> None:
        if order.is_given:
            raise KeyboardInterrupt
        order.is_given = True
        os.write(STDERR, b"stopping: every run saves its state\n")

    for number in before:
        signal.signal(number, ask)
    try:
        yield order
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
