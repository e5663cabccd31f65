"""How long-running work reports its progress."""

import time
from collections.abc import Callable
from typing import final

Progress = Callable[[float, int], None]
"""Called with the number of parts done and the number of all parts: images, placements, votes. Of a part that takes
long, the share of it that is done counts too. Work in several stages may count other parts in each: what never falls is
the share of all that is done."""


@final
class Overture:
    """The progress of a first stage of work, reported as a share of it and of what follows.

    The first stage takes as long as its parts have taken so far, and what it took to prepare until none was done; what
    follows takes the seconds that `foretell` gives, whose own time counts as preparation.
    """

    def __init__(
        self,
        report: Progress,
        foretell: Callable[[], float],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.report, self.clock, self.began = report, clock, clock()
        self.share, self.following, self.prepared = 0.0, foretell(), 0.0

    def __call__(self, done: float, total: int) -> None:
        """So much of the first stage is done."""
        passed = self.clock() - self.began
        if done == 0:
            self.prepared = passed
        elif passed > 0:
            stage = self.prepared + (passed - self.prepared) * total / done
            self.share = max(self.share, passed / (stage + self.following))
        self.report(self.share, 1)
