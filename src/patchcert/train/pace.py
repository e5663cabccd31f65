"""How long a training still takes, by the seconds of batches that were tried beforehand and of those done since."""

import time
from collections.abc import Callable, Mapping
from typing import final

from patchcert.train.loop import Position
from patchcert.train.schedules import Schedule

ENOUGH_SECONDS = 3.0
"""Of a kind of batches that took so long, no trial is needed any more."""


@final
class TrainingPace:
    """Counts natural batches and those with bounds apart, since the latter take many times as long.

    `tried` are the seconds of one batch of either kind, by whether it is natural; a kind may lack.
    """

    def __init__(
        self,
        schedule: Schedule,
        batches: int,
        start: Position,
        tried: Mapping[bool, float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.schedule, self.batches, self.position = schedule, batches, start
        self.tried, self.clock = tried, clock
        self.began = self.at = clock()
        self.seconds, self.done = {True: 0.0, False: 0.0}, {True: 0, False: 0}

    def note(self, position: Position) -> None:
        """The batches before this position are done, and what follows an epoch too."""
        kind, now = self._is_natural(self.position.epoch), self.clock()
        self.seconds[kind] += now - self.at
        self.done[kind] += self._count(position) - self._count(self.position)
        self.position, self.at = position, now

    @property
    def elapsed(self) -> float:
        """Seconds since the training began, or resumed."""
        return self.clock() - self.began

    @property
    def share(self) -> float:
        """The share of all batches that is done."""
        return self._count(self.position) / (self.schedule.epochs * self.batches)

    @property
    def remaining(self) -> float | None:
        """The seconds that are left; None as long as batches are to come of which nothing is known, and where what
        is under way, like the check after an epoch, takes longer than all that was left.
        """
        total = 0.0
        for kind, left in self._left().items():
            each = self._seconds_of_one(kind)
            if left and each is None:
                return None
            total += left * (each or 0.0)
        left = total - (self.clock() - self.at)
        return left if left > 0 else None if total else 0.0

    def _seconds_of_one(self, kind: bool) -> float | None:
        is_known = self.done[kind] and (self.seconds[kind] >= ENOUGH_SECONDS or kind not in self.tried)
        return self.seconds[kind] / self.done[kind] if is_known else self.tried.get(kind)

    def _left(self) -> dict[bool, int]:
        """How many batches of either kind are to come."""
        left = {True: 0, False: 0}
        for epoch in range(self.position.epoch, self.schedule.epochs):
            done = self.position.batch if epoch == self.position.epoch else 0
            left[self._is_natural(epoch)] += self.batches - done
        return left

    def _is_natural(self, epoch: int) -> bool:
        return self.schedule.epsilon.phase(epoch) == "natural"

    def _count(self, position: Position) -> int:
        return position.epoch * self.batches + position.batch
