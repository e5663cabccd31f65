"""Rows of tables recomputed from evidence: nothing here reads an accuracy that was written down before."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from patchcert.papers.chiang2020.ablation_plan import VotePlan
from patchcert.papers.chiang2020.counts import Count, Outcome, RunOutcome
from patchcert.papers.chiang2020.evidence import AttackedRows, Rows
from patchcert.papers.chiang2020.imagenet_plan import corner_defense, corner_plan
from patchcert.papers.chiang2020.imagenet_results import CornerResult, corner_results, initially_correct
from patchcert.papers.chiang2020.results import Result, Results
from patchcert.papers.chiang2020.rows import Recipe, recipe
from patchcert.papers.chiang2020.scales import Scale
from patchcert.papers.chiang2020.seeds import by_model, by_whole_seed
from patchcert.papers.chiang2020.siblings import check_setting
from patchcert.papers.chiang2020.tables import Entry
from patchcert.threats import SparsePixels
from patchcert.train.spec import Spec


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
    return _counted(entry, results, made, scale, seeds)


def _counted(entry: Entry, results: Results, made: Recipe, scale: Scale | None, seeds: int | None) -> Outcome:
    """The row by the runs of its recipe; a defended one only if they had the setting that their trials give."""
    limit = scale.test_images if scale is not None else None
    found = [_found(spec, results, made, limit) for spec in made.specs]
    factors = set.intersection(*(set(by_factor) for by_factor in found))
    if scale is not None and not scale.quick:
        factors &= {scale.factor}
    is_defended = made.attack is not None and bool(made.attack.defense)
    for factor in sorted(factors, key=lambda factor: (factor != 1.0, -factor)):
        tried = [by_factor[factor] for by_factor in found]
        choice = by_whole_seed(tried, seeds) if is_defended else by_model(tried, seeds)
        if choice is None:
            continue
        if choice.unknown is not None:
            lacking = f"{choice.unknown.model} with seed {choice.unknown.seed}"
            return Outcome(entry, "partly run", note=f"no training loss of {lacking} on record")
        if is_defended:
            _check_settings(results, made, (*choice.runs, *choice.passed_over))
        return Outcome(entry, "measured", choice.runs, choice.passed_over, factor)
    some = sum(bool(by_factor) for by_factor in found)
    if some:
        return Outcome(entry, "partly run", note=f"{some} of {len(found)} runs")
    return Outcome(entry, "not run")


def _check_settings(results: Results, made: Recipe, runs: Sequence[RunOutcome]) -> None:
    """The runs of every seed had the setting that the trials with this seed give."""
    assert made.attack is not None
    for seed in {run.seed for run in runs}:
        check_setting([results.named(run.fingerprint) for run in runs if run.seed == seed], made.attack)


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
        certified_of_attacked=None if attacked is None else _certified_of(attacked, evidence),
        defense="" if attacked is None else attacked.meta["defense"] or "",
        training_loss=result.training_loss,
    )


def _certified_of(attacked: AttackedRows, evidence: Sequence[Rows]) -> Count | None:
    about = [rows for rows in evidence if attacked.concerns(rows)]
    return Count(attacked.certified(about[0]), attacked.total) if about else None


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
        training_loss=result.training_loss,
    )


def _corner_outcome(entry: Entry, results: Mapping[int, CornerResult], seeds: int | None) -> Outcome:
    """The row of an attack on ImageNet: the mean over its seeds, none of which trained anything."""
    cell = corner_defense(entry), entry.attack == "adaptive"
    found = {seed: result for seed, result in results.items() if cell in result.cells}
    chosen = [found[seed] for seed in sorted(found)[:seeds]]
    runs = tuple(_count_corners(result, result.cells[cell]) for result in chosen)
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
