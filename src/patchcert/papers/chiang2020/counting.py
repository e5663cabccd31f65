"""Rows of tables counted from evidence: nothing here reads an accuracy that was written down before."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from patchcert.certificates import AnyThreat
from patchcert.evidence.record import Evidence
from patchcert.evidence.results import Result, Results, comparable_loss
from patchcert.papers.chiang2020.networks import initially_correct, network_results, with_seed
from patchcert.papers.chiang2020.recipes import PAPER_SCALE, Recipe, Scale, changed_schedule, recipe
from patchcert.papers.chiang2020.tables import AVERAGED, NUMBERS, Entry, authors_entry
from patchcert.report.statistics import Proportion
from patchcert.train.spec import Spec, read_spec

ABSENT = "-"
Status = Literal["measured", "partly run", "not run"]
Rule = Literal["loss", "first", "mean"]
ATTACKED_SEEDS = 1
"""How many seeds of rows under attack are considered unless a number is given: not all were attacked."""


@dataclass(frozen=True, slots=True)
class CountedRun:
    """One run: how many images are right, proven against each threat, and right under attack.

    `initially_correct` counts those right under attack among the images that the model gets right without a
    defense, `certified_of_attacked` those proven among the attacked images, where there is no defense. A `network`
    that was not trained here has no spec. The `training_loss` is that of the last epoch.
    """

    fingerprint: str
    spec: Spec | None
    clean: Proportion
    certified: tuple[tuple[AnyThreat, Proportion], ...]
    seconds: float
    device: str
    attacked: Proportion | None = None
    certified_of_attacked: Proportion | None = None
    defense: str = ""
    drawn_images: int | None = None
    initially_correct: Proportion | None = None
    network: str = ""
    attack_seed: int = 0
    training_loss: float | None = None

    @property
    def model(self) -> str:
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
    def worst(self) -> Proportion | None:
        """What is proven against the threat that leaves the fewest images proven."""
        return min((count for _, count in self.certified), key=lambda count: count.percent, default=None)


@dataclass(frozen=True, slots=True)
class CountedRow:
    """What there is for a row: the runs that count, one of each model, and seeds of them that were passed over.

    Attacks on a network that was not trained here all count, one for each seed of the attack. The note says what
    is missing, or what sets a measured row apart. A `quick` look is no result.
    """

    entry: Entry
    status: Status
    runs: tuple[CountedRun, ...] = ()
    passed_over: tuple[CountedRun, ...] = ()
    scale: float = 1.0
    note: str = ""
    quick: bool = False

    def seeds_of(self, run: CountedRun) -> tuple[CountedRun, ...]:
        """A run that counts among the other seeds of its model, in their order."""
        others = [other for other in self.passed_over if other.model == run.model]
        return tuple(sorted((run, *others), key=lambda each: each.seed))

    @property
    def by_first_seed(self) -> "CountedRow":
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
    def spread(self) -> float | None:
        """The standard deviation of one model's certified accuracy over all its seeds, in points."""
        if len(self.runs) != 1:
            return None
        values = [run.worst.percent for run in self.seeds_of(self.runs[0]) if run.worst]
        return stdev(values) if len(values) > 1 else None

    @property
    def stated_by_authors(self) -> float | None:
        """What the authors' repository states as certified, in per cent, where it does."""
        found = authors_entry(self.entry)
        return None if found is None else found.certified

    @property
    def mean(self) -> float | None:
        """Certified accuracy in per cent, the mean over all seeds of each model and then over the models."""
        return _mean(replace(self, runs=self.seeds_of(run)).certified for run in self.runs)

    def difference_by(self, rule: Rule) -> float | None:
        """Our certified accuracy minus the paper's in points, by the seed of least `loss`, the `first` seed, or the
        `mean` over all seeds."""
        ours = {"loss": self.certified, "first": self.by_first_seed.certified, "mean": self.mean}[rule]
        return None if ours is None or self.entry.certified is None else ours - self.entry.certified

    @property
    def difference(self) -> float | None:
        """Our certified accuracy minus the paper's in points; where it has none, that under attack."""
        if self.entry.certified is not None:
            return self.difference_by("loss")
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
    def data(self) -> str:
        """The data set, and what stands in for it in a quick look."""
        return self.entry.data_name + (" (by mnist-mini)" if self.quick else "")

    @property
    def training(self) -> str:
        """How the row's models were trained, or the defense in front of them."""
        entry = self.entry
        attack = f", {entry.attack} attack" if entry.attack else ""
        return entry.preset or (f"{entry.defense}{attack}" if entry.defense else entry.strategy)

    @property
    def model(self) -> str:
        """The paper's model, and ours where it is another."""
        words, networks = self.entry.model_words, dict.fromkeys(run.network for run in self.runs)
        ours = ", ".join(filter(None, networks))
        return f"{words} (ours: {ours})" if ours else words

    @property
    def missing(self) -> str:
        """Why there is no number of ours, where there is none."""
        if self.status == "measured":
            return ""
        return f"{self.status} ({self.note})" if self.note else self.status

    @property
    def schedule(self) -> str:
        """Whether the schedule was that of the paper, whether only some test images were asked, and the row's note."""
        if not self.runs:
            return ABSENT
        if self.quick:
            return "quick"
        words = [] if self.scale == 1.0 else [f"scaled by {self.scale:g}"]
        words += [f"changed schedule ({self.changed})"] if self.changed else []
        words = words or ["full"]
        if self.drawn_images is not None:
            words.append(f"{self.drawn_images:,} random test images")
        totals = [(run.clean.total, run.attacked.total) for run in self.runs if run.spec and run.attacked]
        if totals:
            where = "all" if all(clean == tried for clean, tried in totals) else "attack"
            words.append(f"{where} on {min(tried for _, tried in totals):,} random test images")
        return "; ".join([*words, *filter(None, [self.note])])

    @property
    def changed(self) -> str:
        """Which models have another schedule than the paper's, and by which decision; empty where none has."""
        models = AVERAGED if self.entry.model == "average" else (self.entry.model,)
        decisions = {model: changed_schedule(self.entry, model) for model in models}
        changed = {model: number for model, number in decisions.items() if number is not None}
        words = " and ".join(f"decision {number}" for number in dict.fromkeys(changed.values()))
        if not changed and self.entry.preset:
            own, paper = (read_spec(name) for name in (self.entry.preset, f"paper-{self.entry.dataset}"))
            return "longer than the paper's" if own.schedule != paper.schedule else ""
        return f"{words} for {', '.join(changed)}" if 0 < len(changed) < len(models) else words

    @property
    def seeds(self) -> str:
        """How many seeds there are and that one of them counts, with the models' names where they differ in it."""
        if not self.runs:
            return ABSENT
        if not self.passed_over:
            return str(self.number_of_seeds)
        counts = {run.model: len(self.seeds_of(run)) for run in self.runs}
        if len(set(counts.values())) == 1:
            return f"1 of {self.number_of_seeds}"
        alike = {count: [model for model in counts if counts[model] == count] for count in counts.values()}
        return "; ".join(
            f"1 of {count} for {', '.join(models)}" for count, models in alike.items() if count > 1
        )

    @property
    def number_of_seeds(self) -> int:
        """The most seeds that any model of the row was run with, or its network attacked with."""
        counts = Counter(run.model for run in (*self.runs, *self.passed_over))
        return max(counts.values(), default=0)

    def to_json(self) -> dict[str, Any]:
        """All that is known, down to the counts of every run."""
        entry = self.entry
        return {
            "row": entry.label,
            "status": self.status,
            "note": self.note,
            "paper": {name: getattr(entry, name) for name in NUMBERS},
            "authors_certified": self.stated_by_authors,
            "clean": self.clean,
            "empirical": self.empirical,
            "empirical_of_initially_correct": self.empirical_of_correct,
            "certified": self.certified,
            "certified_of_attacked": self.certified_of_attacked,
            "difference": self.difference,
            "mean": self.mean,
            "spread": self.spread,
            "seconds": self.seconds,
            "scale": self.scale if self.runs else None,
            "changed_schedule": self.changed,
            "seeds": self.number_of_seeds,
            "runs": [_run_to_json(run) for run in self.runs],
            "passed_over": [_run_to_json(run) for run in self.passed_over],
        }

    def _share(self, count: Callable[[CountedRun], Proportion | None]) -> float | None:
        """The mean of one number over the runs that count, where all have it."""
        return _mean(None if (found := count(run)) is None else found.percent for run in self.runs)


def _run_to_json(run: CountedRun) -> dict[str, Any]:
    attacked, right = run.attacked, run.initially_correct
    return {
        "fingerprint": run.fingerprint,
        "model": run.model,
        "seed": run.seed,
        "training_loss": run.training_loss,
        "images": run.clean.total,
        "correct": run.clean.successes,
        "certified": [
            {"threat": threat.to_dict(), "certified": count.successes} for threat, count in run.certified
        ],
        "attacked": attacked and attacked.total,
        "withstood": attacked and attacked.successes,
        "certified_of_attacked": run.certified_of_attacked and run.certified_of_attacked.successes,
        "initially_correct": right and right.total,
        "withstood_of_them": right and right.successes,
        "defense": run.defense,
        "seconds": run.seconds,
        "device": run.device,
    }


def _mean(values: Iterable[float | None]) -> float | None:
    listed = list(values)
    numbers = [value for value in listed if value is not None]
    return fmean(numbers) if listed and len(numbers) == len(listed) else None


def count_rows(
    entries: Sequence[Entry], source: Path | Results, scale: Scale | None = None, seeds: int | None = None
) -> tuple[CountedRow, ...]:
    """The rows from results, or from the folder of them. Without a scale each row takes the fullest schedule there is.

    Tables that are counted from the same `Results` read every file of evidence once.
    """
    results = source if isinstance(source, Results) else Results(source)
    return tuple(_row(entry, results, scale, seeds) for entry in entries)


def _row(entry: Entry, results: Results, scale: Scale | None, seeds: int | None) -> CountedRow:
    is_quick = scale is not None and scale.quick
    made = recipe(entry, scale if scale is not None and is_quick else PAPER_SCALE)
    if made.network:
        return CountedRow(entry, "not run") if is_quick else _network_row(entry, results.folder, made, seeds)
    found = [_found(spec, results, made) for spec in made.specs]
    factors = set.intersection(*(set(by_factor) for by_factor in found))
    if scale is not None and not is_quick:
        factors &= {scale.factor}
    if factors:
        factor = max(factors, key=lambda factor: (factor == 1.0, factor))
        limit = seeds or (None if made.attack is None else ATTACKED_SEEDS)
        return _best_seeds(entry, [by_factor[factor] for by_factor in found], factor, limit)
    some = sum(bool(by_factor) for by_factor in found)
    if some:
        return CountedRow(entry, "partly run", note=f"{some} of {len(found)} runs")
    return CountedRow(entry, "not run")


def _best_seeds(
    entry: Entry, models: Sequence[Mapping[int, CountedRun]], factor: float, limit: int | None
) -> CountedRow:
    """Of each model the first seeds' run whose mean training loss in the last epoch is least.

    No test image has a part in it: docs/decisions/0006-which-seed-counts.md.
    """
    tried = [[by_seed[seed] for seed in sorted(by_seed)[:limit]] for by_seed in models]
    runs = tuple(min(seeds, key=lambda run: comparable_loss(run.training_loss)) for seeds in tried)
    contested = [run for seeds in tried if len(seeds) > 1 for run in seeds]
    unknown = next((run for run in contested if run.training_loss is None), None)
    if unknown is not None:
        note = f"no training loss of {unknown.model} with seed {unknown.seed} on record"
        return CountedRow(entry, "partly run", note=note)
    passed_over = tuple(run for run in contested if run not in runs)
    return CountedRow(entry, "measured", runs, passed_over, factor)


def _found(spec: Spec, results: Results, asked: Recipe) -> dict[float, dict[int, CountedRun]]:
    """By scale and seed, the runs that answer every question; those with exact steps before TF32."""
    found: dict[float, dict[int, CountedRun]] = {}
    for result in sorted(results.of(spec), key=lambda result: result.spec.optimiser.roundings):
        factor = float(result.summary["scale"])
        is_same = result.spec.schedule == (spec if factor == 1.0 else spec.scaled(factor)).schedule
        if is_same and result.answers(asked.questions):
            found.setdefault(factor, {}).setdefault(result.spec.seed, _count(result, asked))
    return found


def _count(result: Result, asked: Recipe) -> CountedRun:
    """Clean accuracy is counted on all certified images, else on the attacked ones, behind their defense."""
    proofs = [each for question in asked.proofs if (each := result.find(question)) is not None]
    attacked = result.find(asked.attack) if asked.attack is not None else None
    basis = proofs[0] if proofs else attacked
    assert basis is not None
    return CountedRun(
        fingerprint=result.path.name,
        spec=result.spec,
        clean=Proportion(basis.correct, basis.total),
        certified=tuple(_proven(proof, asked.against or proof.threat) for proof in proofs),
        seconds=result.training_seconds,
        device=result.device,
        attacked=None if attacked is None else Proportion(attacked.withstood, attacked.total),
        certified_of_attacked=None if attacked is None else _certified_of(attacked, proofs),
        defense="" if attacked is None else attacked.meta["classifier"].get("defense", ""),
        drawn_images=basis.selection.drawn if asked.against is not None else None,
        training_loss=result.training_loss,
    )


def _proven(proof: Evidence, threat: AnyThreat) -> tuple[AnyThreat, Proportion]:
    certified = proof.certified_against(threat)
    assert certified is not None
    return threat, Proportion.of(certified)


def _certified_of(attacked: Evidence, proofs: Sequence[Evidence]) -> Proportion | None:
    """How many of the attacked images are proven, where certificates are about the very model that was attacked."""
    if not attacked.is_undefended:
        return None
    for proof in proofs:
        if proof.threat == attacked.threat and proof.selection.is_whole_test_set:
            return Proportion.of(proof.columns["certified"][attacked.columns["index"]])
    return None


def _network_row(entry: Entry, folder: Path, asked: Recipe, seeds: int | None) -> CountedRow:
    """The row of a network that was not trained here: the mean over all seeds of its attack."""
    assert asked.attack is not None
    found: dict[int, CountedRun] = {}
    for result in network_results(folder, asked.network):
        for evidence in result.evidence:
            seed = evidence.selection.seed
            if evidence.question == with_seed(asked.attack, seed):
                found.setdefault(seed, _count_network(result.path.name, evidence))
    runs = tuple(found[seed] for seed in sorted(found)[:seeds])
    return CountedRow(entry, "measured", runs) if runs else CountedRow(entry, "not run")


def _count_network(name: str, evidence: Evidence) -> CountedRun:
    kept, right = initially_correct(evidence)
    return CountedRun(
        fingerprint=name,
        spec=None,
        clean=Proportion(evidence.correct, evidence.total),
        certified=(),
        seconds=float(evidence.meta["seconds"]),
        device=evidence.meta["device"],
        attacked=Proportion(evidence.withstood, evidence.total),
        defense=evidence.meta["classifier"]["defense"],
        drawn_images=evidence.total,
        initially_correct=Proportion(kept, right) if right else None,
        network=evidence.meta["network"],
        attack_seed=evidence.selection.seed,
    )
