"""How the perturbation size and the learning rate change over a training run, counted in epochs from 0."""

from dataclasses import dataclass, replace
from typing import Literal

from patchcert.errors import InvalidInput, at_least

Ramp = Literal["linear", "smooth"]
Phase = Literal["natural", "growing", "full"]
NATURAL_BELOW = 1e-6


def scale(epochs: int, factor: float) -> int:
    """A count of epochs times the factor, rounded, and at least 1 where there was any."""
    return max(1, round(epochs * factor)) if epochs > 0 else 0


@dataclass(frozen=True, slots=True)
class EpsilonSchedule:
    """Epsilon is 0 for the natural epochs, grows over the ramp epochs, and is 1 from then on.

    Within an epoch it moves evenly from the epoch's first batch to its last. A linear ramp of r epochs grows
    by 1/r in each; a smooth one bends the same line by 3t^2 - 2t^3, so that it starts and ends gently.
    """

    natural_epochs: int = 1
    ramp_epochs: int = 60
    ramp: Ramp = "linear"

    def __post_init__(self) -> None:
        at_least(0, "natural_epochs", self.natural_epochs)
        at_least(0, "ramp_epochs", self.ramp_epochs)

    @property
    def full_from(self) -> int:
        """The first epoch whose every batch has epsilon 1."""
        return self.natural_epochs + self.ramp_epochs

    def end(self, epoch: int) -> float:
        """Epsilon of the epoch's last batch; the next epoch starts there, unless there is no ramp."""
        return self._bend(self._line_end(epoch))

    def for_batch(self, epoch: int, batch: int, batches: int) -> float:
        """Epsilon of one batch: the first of an epoch has the epoch's start, the last the epoch's end."""
        start, end = self._line(epoch), self._line_end(epoch)
        share = batch / (batches - 1) if batches > 1 else 1.0
        return self._bend(start + (end - start) * share)

    def phase(self, epoch: int) -> Phase:
        """Whether epsilon is 0, grows, or is 1 throughout the epoch; at 0 it trains by plain cross entropy."""
        if self.end(epoch) < NATURAL_BELOW:
            return "natural"
        return "full" if epoch >= self.full_from else "growing"

    def scaled(self, factor: float) -> "EpsilonSchedule":
        """The same schedule with each part shrunk in proportion; no part that was there vanishes."""
        return replace(
            self,
            natural_epochs=scale(self.natural_epochs, factor),
            ramp_epochs=scale(self.ramp_epochs, factor),
        )

    def _line(self, epoch: int) -> float:
        into_ramp = epoch - self.natural_epochs
        if into_ramp < 0:
            return 0.0
        return into_ramp / self.ramp_epochs if into_ramp < self.ramp_epochs else 1.0

    def _line_end(self, epoch: int) -> float:
        return self._line(epoch + 1) if epoch >= self.natural_epochs else 0.0

    def _bend(self, value: float) -> float:
        return value * value * (3 - 2 * value) if self.ramp == "smooth" else value


@dataclass(frozen=True, slots=True)
class LearningRateSchedule:
    """The initial rate, multiplied by `decay_factor` after every `decay_every` epochs from a given one.

    That is `decay_from` or, where it is not given, the one in which the schedule of epsilon has ended. With `one_cycle`
    nothing decays: batch by batch the rate rises evenly from 0, reaches `initial` when this share of all batches is
    done, and falls evenly to 0.
    """

    initial: float = 5e-4
    decay_factor: float = 0.5
    decay_every: int = 10
    decay_from: int | None = None
    one_cycle: float | None = None

    def __post_init__(self) -> None:
        if not self.initial > 0:
            raise InvalidInput(f"the initial learning rate is {self.initial}; expected a number above 0")
        if not 0 < self.decay_factor <= 1:
            raise InvalidInput(f"decay_factor is {self.decay_factor}; expected above 0 and at most 1")
        at_least(1, "decay_every", self.decay_every)
        at_least(0, "decay_from", self.decay_from)
        if self.one_cycle is None:
            return
        if not 0 < self.one_cycle < 1:
            raise InvalidInput(f"one_cycle is {self.one_cycle}; expected a share above 0 and below 1")
        if replace(self, one_cycle=None) != LearningRateSchedule(self.initial):
            raise InvalidInput(
                "one_cycle is set, but so are decays of the learning rate",
                hint="leave decay_factor, decay_every and decay_from out",
            )

    def scaled(self, factor: float) -> "LearningRateSchedule":
        """The same rates with the decays closer together, in proportion."""
        if self.one_cycle is not None:
            return self
        start = None if self.decay_from is None else scale(self.decay_from, factor)
        return replace(self, decay_every=scale(self.decay_every, factor), decay_from=start)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A whole training run: its length, epsilon in each batch and the learning rate in each epoch.

    Unless it says otherwise, the learning rate starts to decay one epoch after epsilon has first been 1 for a
    whole epoch, the paper's count of S + K epochs with S natural ones and a grid of K values for epsilon (here
    K = ramp_epochs + 1).
    """

    epochs: int = 100
    epsilon: EpsilonSchedule = EpsilonSchedule()
    learning_rate: LearningRateSchedule = LearningRateSchedule()

    def __post_init__(self) -> None:
        at_least(1, "epochs", self.epochs)

    @property
    def decay_from(self) -> int:
        """The epoch from which the decays of the learning rate are counted."""
        given = self.learning_rate.decay_from
        return self.epsilon.full_from + 1 if given is None else given

    def rate(self, epoch: int, batch: int = 0, batches: int = 1) -> float:
        """The learning rate of one batch of an epoch, which is that of all its batches unless there is one cycle.

        The first decay comes `decay_every` epochs after `decay_from`. One cycle has its ends before the first batch and
        after the last one, so that no batch has a rate of 0.
        """
        rates, top = self.learning_rate, self.learning_rate.one_cycle
        if top is not None:
            done = (epoch * batches + batch + 1) / (self.epochs * batches + 1)
            return rates.initial * min(done / top, (1 - done) / (1 - top))
        return rates.initial * rates.decay_factor ** (max(epoch - self.decay_from, 0) // rates.decay_every)

    def scaled(self, factor: float) -> "Schedule":
        """Every part shrunk (or stretched) in proportion, each at least 1 epoch where it was above 0."""
        if not 0 < factor <= 1000:
            hint = "0.1 runs a tenth of the epochs"
            raise InvalidInput(f"the scale is {factor}; expected a number above 0, 1000 at most", hint=hint)
        return Schedule(
            scale(self.epochs, factor), self.epsilon.scaled(factor), self.learning_rate.scaled(factor)
        )
