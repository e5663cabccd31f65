"""What was counted for a row of a table: runs with their counts, those that count and those passed over."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Literal

from patchcert.papers.chiang2020.rows import AnyThreat
from patchcert.papers.chiang2020.tables import Entry
from patchcert.train.spec import Spec

Status = Literal["measured", "partly run", "not run"]


@dataclass(frozen=True, slots=True)
class Count:
    """So many images of so many."""

    successes: int
    total: int

    @property
    def percent(self) -> float:
        """The share in per cent."""
        return 100 * self.successes / self.total


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """One run: how many images are right, proven against each threat, and right under attack.

    `initially_correct` counts those right under attack among the images that the model gets right without a
    defense, `certified_of_attacked` those proven among the attacked images, where there is no defense. A `network`
    that was not trained here has no spec. The `training_loss` is that of the last epoch.
    """

    fingerprint: str
    spec: Spec | None
    clean: Count
    certified: tuple[tuple[AnyThreat, Count], ...]
    seconds: float
    device: str
    attacked: Count | None = None
    certified_of_attacked: Count | None = None
    defense: str = ""
    drawn_images: int | None = None
    initially_correct: Count | None = None
    network: str = ""
    attack_seed: int = 0
    training_loss: float | None = None

    @property
    def model(self) -> str:
        """The name of the model."""
        return self.network if self.spec is None else self.spec.model.name

    @property
    def seed(self) -> int:
        """The seed of the training or, without one, of the attack."""
        return self.attack_seed if self.spec is None else self.spec.seed

    @property
    def roundings(self) -> tuple[str, ...]:
        """What training steps rounded to fewer digits, in words."""
        return () if self.spec is None else self.spec.optimiser.roundings

    @property
    def worst(self) -> Count | None:
        """What is proven against the threat that leaves the fewest images proven."""
        return min((count for _, count in self.certified), key=lambda count: count.percent, default=None)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What we have for a row: the runs that count, one of each model, and seeds of them that were passed over.

    Attacks on a network that was not trained here all count, one for each seed of the attack. The note says what
    is missing, or what sets a measured row apart.
    """

    entry: Entry
    status: Status
    runs: tuple[RunOutcome, ...] = ()
    passed_over: tuple[RunOutcome, ...] = ()
    scale: float = 1.0
    note: str = ""

    def seeds_of(self, run: RunOutcome) -> tuple[RunOutcome, ...]:
        """A run that counts among the other seeds of its model, in their order."""
        others = [other for other in self.passed_over if other.model == run.model]
        return tuple(sorted((run, *others), key=lambda each: each.seed))

    @property
    def by_first_seed(self) -> "Outcome":
        """The row if the first seed of each model counted, whatever its loss."""
        return replace(self, runs=tuple(self.seeds_of(run)[0] for run in self.runs), passed_over=())

    @property
    def clean(self) -> float | None:
        """Mean clean accuracy in per cent."""
        return self._share(lambda run: run.clean)

    @property
    def certified(self) -> float | None:
        """Mean certified accuracy in per cent, each run against its worst threat."""
        return self._share(lambda run: run.worst)

    @property
    def empirical(self) -> float | None:
        """Mean accuracy under attack in per cent."""
        return self._share(lambda run: run.attacked)

    @property
    def certified_of_attacked(self) -> float | None:
        """Mean certified accuracy on the images that were attacked, in per cent."""
        return self._share(lambda run: run.certified_of_attacked)

    @property
    def empirical_of_correct(self) -> float | None:
        """The same among the images that are right without attack and defense, in per cent."""
        return self._share(lambda run: run.initially_correct)

    @property
    def network(self) -> str:
        """The network that stands for the paper's, where it was not trained here."""
        return ", ".join(dict.fromkeys(run.network for run in self.runs if run.network))

    @property
    def spread(self) -> float | None:
        """The standard deviation of one model's certified accuracy over all its seeds, in points."""
        if len(self.runs) != 1:
            return None
        found = [run.worst for run in self.seeds_of(self.runs[0])]
        values = [worst.percent for worst in found if worst is not None]
        return stdev(values) if len(values) > 1 else None

    @property
    def difference(self) -> float | None:
        """Our certified accuracy minus the paper's in points; where it has none, that under attack."""
        if self.entry.certified is not None:
            ours, paper = self.certified, self.entry.certified
        else:
            ours, paper = self.empirical, self.entry.empirical
        return None if ours is None or paper is None else ours - paper

    @property
    def seconds(self) -> float | None:
        """Mean training time of a run that counts; None where nothing was trained."""
        return _mean(None if run.spec is None else run.seconds for run in self.runs)

    @property
    def hardware(self) -> str:
        """The devices that trained what counts, and what their steps rounded to fewer digits."""
        return "; ".join(dict.fromkeys(", ".join((run.device, *run.roundings)) for run in self.runs))

    @property
    def drawn_images(self) -> int | None:
        """On how many random test images the votes of the row were counted, where not on all."""
        drawn = [run.drawn_images for run in self.runs if run.drawn_images is not None]
        return min(drawn, default=None)

    @property
    def attacked_images(self) -> int | None:
        """On how many random test images our own models were attacked, where they were."""
        found = [run.attacked.total for run in self.runs if run.spec is not None and run.attacked is not None]
        return min(found, default=None)

    @property
    def is_counted_on_attacked(self) -> bool:
        """Whether clean accuracy too is that of the attacked images alone."""
        return all(run.attacked is not None and run.clean.total == run.attacked.total for run in self.runs)

    def _share(self, count: Callable[[RunOutcome], Count | None]) -> float | None:
        """The mean of one number over the runs that count, where all have it."""
        return _mean(None if (found := count(run)) is None else found.percent for run in self.runs)


def _mean(values: Iterable[float | None]) -> float | None:
    listed = list(values)
    numbers = [value for value in listed if value is not None]
    return fmean(numbers) if listed and len(numbers) == len(listed) else None


def certified_gaps(outcomes: Sequence[Outcome]) -> tuple[float, ...]:
    """Our certified accuracies less the paper's, in points, of the rows that were run with the full schedule."""
    whole = [outcome for outcome in outcomes if outcome.status == "measured" and outcome.scale == 1.0]
    proven = [outcome for outcome in whole if outcome.entry.certified is not None]
    return tuple(gap for outcome in proven if (gap := outcome.difference) is not None)
