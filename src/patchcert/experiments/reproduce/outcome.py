"""Rows of tables recomputed from evidence: nothing here reads an accuracy that was written down before."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from patchcert.experiments.reproduce.ablation_plan import VotePlan
from patchcert.experiments.reproduce.evidence import AttackedRows
from patchcert.experiments.reproduce.imagenet_plan import corner_defense, corner_plan
from patchcert.experiments.reproduce.imagenet_results import CornerResult, corner_results, initially_correct
from patchcert.experiments.reproduce.results import Result, Results
from patchcert.experiments.reproduce.rows import AnyThreat, Recipe, chosen_per_model, recipe
from patchcert.experiments.reproduce.scales import Scale
from patchcert.experiments.reproduce.siblings import check_setting
from patchcert.experiments.reproduce.tables import Entry
from patchcert.experiments.spec import Spec
from patchcert.threats import SparsePixels

Status = Literal["measured", "partly run", "not run"]
PER_MODEL = "settings chosen per model"


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
    defense. A `network` that was not trained here has no spec.
    """

    fingerprint: str
    spec: Spec | None
    clean: Count
    certified: tuple[tuple[AnyThreat, Count], ...]
    seconds: float
    device: str
    attacked: Count | None = None
    defense: str = ""
    drawn_images: int | None = None
    initially_correct: Count | None = None
    network: str = ""
    attack_seed: int = 0

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
    """What we have for a row: for each seed one run, or one of each model where the row is a mean.

    The note says what is missing, or what sets a measured row apart.
    """

    entry: Entry
    status: Status
    seeds: tuple[tuple[RunOutcome, ...], ...] = ()
    scale: float = 1.0
    note: str = ""

    @property
    def clean(self) -> float | None:
        """Mean clean accuracy in per cent."""
        return _mean(_shares(seed, lambda run: run.clean) for seed in self.seeds)

    @property
    def certified(self) -> float | None:
        """Mean certified accuracy in per cent, each run against its worst threat."""
        return _mean(self._certified)

    @property
    def empirical(self) -> float | None:
        """Mean accuracy under attack in per cent."""
        return _mean(_shares(seed, lambda run: run.attacked) for seed in self.seeds)

    @property
    def empirical_of_correct(self) -> float | None:
        """The same among the images that are right without attack and defense, in per cent."""
        return _mean(_shares(seed, lambda run: run.initially_correct) for seed in self.seeds)

    @property
    def network(self) -> str:
        """The network that stands for the paper's, where it was not trained here."""
        return ", ".join(dict.fromkeys(run.network for seed in self.seeds for run in seed if run.network))

    @property
    def spread(self) -> float | None:
        """The standard deviation of the certified accuracy over seeds, in points."""
        values = [value for value in self._certified if value is not None]
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
        """Mean training time of a run; None where nothing was trained."""
        return _mean(None if run.spec is None else run.seconds for seed in self.seeds for run in seed)

    @property
    def hardware(self) -> str:
        """The devices that trained, and what their steps rounded to fewer digits."""
        runs = [run for seed in self.seeds for run in seed]
        words = dict.fromkeys(", ".join((run.device, *run.roundings)) for run in runs)
        return "; ".join(words)

    @property
    def drawn_images(self) -> int | None:
        """On how many random test images the votes of the row were counted, where not on all."""
        drawn = [run.drawn_images for seed in self.seeds for run in seed if run.drawn_images is not None]
        return min(drawn, default=None)

    @property
    def _certified(self) -> list[float | None]:
        return [_shares(seed, lambda run: run.worst) for seed in self.seeds]


def _shares(runs: Sequence[RunOutcome], count: Callable[[RunOutcome], Count | None]) -> float | None:
    """The mean of one number over the runs, where all have it."""
    return _mean(None if (found := count(run)) is None else found.percent for run in runs)


def _mean(values: Iterable[float | None]) -> float | None:
    listed = list(values)
    numbers = [value for value in listed if value is not None]
    return fmean(numbers) if listed and len(numbers) == len(listed) else None


def outcomes(
    entries: Sequence[Entry], folder: Path, scale: Scale | None, seeds: int | None = None
) -> tuple[Outcome, ...]:
    """The rows from a folder of results. Without a scale each row takes the fullest schedule there is."""
    results = Results(folder)
    return tuple(_outcome(entry, results, scale, seeds) for entry in entries)


def _outcome(entry: Entry, results: Results, scale: Scale | None, seeds: int | None) -> Outcome:
    corners = corner_plan(entry)
    if corners is not None:
        is_quick = scale is not None and scale.quick
        found = {} if is_quick else corner_results(results.folder, corners)
        return _corner_outcome(entry, found, seeds)
    made = recipe(entry)
    if made is None:
        return Outcome(entry, "not run")
    made = scale.apply(made) if scale is not None and scale.quick else made
    counted = _counted(entry, results, made, scale, seeds)
    if counted.status == "measured" or made.attack is None or not made.attack.defense:
        return counted
    earlier = replace(made, attack=chosen_per_model(made.attack))
    before = _counted(entry, results, earlier, scale, seeds)
    return replace(before, note=PER_MODEL) if before.status == "measured" else counted


def _counted(entry: Entry, results: Results, made: Recipe, scale: Scale | None, seeds: int | None) -> Outcome:
    """The row by the runs of its recipe; a defended one only if they had the setting that their trials give."""
    limit = scale.test_images if scale is not None else None
    found = [_found(spec, results, made, limit) for spec in made.specs]
    factors = set.intersection(*(set(by_factor) for by_factor in found))
    if scale is not None and not scale.quick:
        factors &= {scale.factor}
    for factor in sorted(factors, key=lambda factor: (factor != 1.0, -factor)):
        common = set.intersection(*(set(by_factor[factor]) for by_factor in found))
        chosen = sorted(common)[:seeds]
        if chosen:
            runs = tuple(tuple(by_factor[factor][seed] for by_factor in found) for seed in chosen)
            if made.attack is not None and made.attack.defense:
                for seed in runs:
                    check_setting([results.named(run.fingerprint) for run in seed], made.attack)
            return Outcome(entry, "measured", runs, factor)
    some = sum(bool(by_factor) for by_factor in found)
    if some:
        return Outcome(entry, "partly run", note=f"{some} of {len(found)} runs")
    return Outcome(entry, "not run")


def _found(
    spec: Spec, results: Results, asked: Recipe, limit: int | None
) -> dict[float, dict[int, RunOutcome]]:
    """By scale and seed, the runs with evidence for all threats; those with exact steps before TF32."""
    found: dict[float, dict[int, RunOutcome]] = {}
    for result in sorted(results.of(spec), key=lambda result: result.spec.optimiser.roundings):
        factor = float(result.summary["scale"])
        is_same = result.spec.schedule == (spec if factor == 1.0 else spec.scaled(factor)).schedule
        is_same &= asked.votes is None or result.voted(asked.votes) is not None
        if is_same and result.covers(asked.threats, limit, [asked.attack] if asked.attack else []):
            found.setdefault(factor, {}).setdefault(result.spec.seed, _count(result, asked, limit))
    return found


def _device(summary: Mapping[str, Any]) -> str:
    """The device, and that several runs were given to it at once: their training times then include waiting."""
    jobs = summary.get("jobs", 1)
    return f"{summary['device']}, {jobs} runs at once" if jobs > 1 else str(summary["device"])


def _count(result: Result, asked: Recipe, limit: int | None) -> RunOutcome:
    """Clean accuracy is counted on all certified images, else on the attacked ones, behind their defense."""
    if asked.votes is not None:
        return _count_votes(result, asked.votes, asked.pixels)
    evidence = [rows for threat in asked.threats if (rows := result.evidence(threat, limit)) is not None]
    attacked = result.attack(asked.attack) if asked.attack else None
    basis = evidence[0] if evidence else attacked
    assert basis is not None
    summary: Any = result.summary
    return RunOutcome(
        fingerprint=result.path.name,
        spec=result.spec,
        clean=Count(basis.correct, basis.total),
        certified=tuple((rows.threat, Count(rows.certified, rows.total)) for rows in evidence),
        seconds=float(summary["training_seconds"]),
        device=_device(summary),
        attacked=None if attacked is None else Count(attacked.withstood, attacked.total),
        defense="" if attacked is None else attacked.meta["defense"] or "",
    )


def _count_votes(result: Result, plan: VotePlan, pixels: int) -> RunOutcome:
    """Clean accuracy is the share of images that the vote decides rightly; an abstention is an error."""
    rows = result.voted(plan)
    assert rows is not None
    summary: Any = result.summary
    return RunOutcome(
        fingerprint=result.path.name,
        spec=result.spec,
        clean=Count(rows.correct, rows.total),
        certified=((SparsePixels(pixels), Count(rows.certified(pixels), rows.total)),),
        seconds=float(summary["training_seconds"]),
        device=_device(summary),
        drawn_images=rows.drawn_images,
    )


def _corner_outcome(entry: Entry, results: Mapping[int, CornerResult], seeds: int | None) -> Outcome:
    """The row of an attack on ImageNet from results by seed."""
    cell = corner_defense(entry), entry.attack == "adaptive"
    found = {seed: result for seed, result in results.items() if cell in result.cells}
    chosen = [found[seed] for seed in sorted(found)[:seeds]]
    runs = tuple((_count_corners(result, result.cells[cell]),) for result in chosen)
    return Outcome(entry, "measured", runs) if runs else Outcome(entry, "not run")


def _count_corners(result: CornerResult, rows: AttackedRows) -> RunOutcome:
    kept, right = initially_correct(rows)
    return RunOutcome(
        fingerprint=result.path.name,
        spec=None,
        clean=Count(rows.correct, rows.total),
        certified=(),
        seconds=float(rows.meta["seconds"]),
        device=rows.meta["device"],
        attacked=Count(rows.withstood, rows.total),
        defense=rows.meta["defense"],
        drawn_images=rows.total,
        initially_correct=Count(kept, right) if right else None,
        network=rows.meta["network"],
        attack_seed=int(rows.meta["plan"]["seed"]),
    )
