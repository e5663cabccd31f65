"""What the page's template draws, worked out from run summaries: every text and coordinate, no markup."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from patchcert.report import charts
from patchcert.report.figures import Chart
from patchcert.report.gallery import AttackFigure, MapFigure, attack_figure, colour_limit, map_figures
from patchcert.report.image_table import ImageTable, image_table
from patchcert.report.statistics import Proportion, Violation
from patchcert.report.summary import RunSummary
from patchcert.report.tables import NOT_MEASURED, percent
from patchcert.report.words import describe_threat, lead_sentence

KEEP_PICTURES = "Pictures are kept by `patchcert attack` with --save-images."
NOT_STATED = "not stated"


@dataclass(frozen=True)
class Number:
    """An accuracy as shown, in per cent; where not measured, `share` is None and `text` says so."""

    label: str
    meaning: str
    style: str
    text: str = NOT_MEASURED
    interval: str = ""
    count: str = ""
    share: float | None = None
    low: float = 0.0
    high: float = 0.0


@dataclass(frozen=True)
class RunView:
    """Everything the page shows of one run."""

    anchor: str
    name: str
    sentence: str
    facts: tuple[tuple[str, str], ...]
    numbers: tuple[Number, ...]
    same_images: tuple[Number, ...]
    same_total: str
    checked: str
    violations: tuple[Violation, ...]
    curves: tuple[Chart, ...]
    sizes: Chart | None
    maps: tuple[MapFigure, ...]
    map_limit: str
    attacked: tuple[AttackFigure, ...]
    attack_note: str
    table: ImageTable | None
    commands: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str], ...]
    checksums: tuple[tuple[str, str], ...]
    spec_text: str


def run_view(run: RunSummary, position: int) -> RunView:
    """The view of a run; what was not measured is said to be so, never left at zero."""
    bracket = run.bracket
    return RunView(
        anchor=f"run-{position}",
        name=run.name,
        sentence=lead_sentence(run),
        facts=_facts(run),
        numbers=_numbers(run.clean, run.empirical, run.certified),
        same_images=_numbers(bracket.clean, bracket.empirical, bracket.certified) if bracket else (),
        same_total=f"{bracket.clean.total:,}" if bracket else NOT_MEASURED,
        checked=f"{len(run.withstood):,}" if run.withstood else "",
        violations=run.violations,
        curves=charts.training_curves(run.metrics),
        sizes=charts.sizes_chart(run),
        maps=map_figures(run.maps, run.classes),
        map_limit=f"{colour_limit(run.maps):.3g}",
        attacked=tuple(attack_figure(sample, run.classes) for sample in run.attacked),
        attack_note=_attack_note(run),
        table=image_table(run, run.headline) if run.headline else None,
        commands=_commands(run),
        environment=flatten(run.environment),
        checksums=tuple(sorted(run.checksums.items())),
        spec_text=run.spec_text,
    )


def flatten(values: Mapping[str, object], prefix: str = "") -> tuple[tuple[str, str], ...]:
    """Nested tables as rows of dotted name and text."""
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            rows.extend(flatten(value, f"{prefix}{key}."))
        else:
            rows.append(
                (f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value, default=str))
            )
    return tuple(rows)


def number(label: str, meaning: str, style: str, proportion: Proportion | None) -> Number:
    """A proportion as a number to show."""
    if proportion is None:
        return Number(label, meaning, style)
    low, high = proportion.interval
    interval = f"{100 * low:.1f} to {percent(high)}"
    count = f"{proportion.successes:,} of {proportion.total:,}"
    share = 100 * proportion.value
    return Number(
        label, meaning, style, percent(proportion.value), interval, count, share, 100 * low, 100 * high
    )


def _numbers(
    clean: Proportion | None, empirical: Proportion | None, certified: Proportion | None
) -> tuple[Number, ...]:
    return (
        number("Clean", "right when nobody interferes", "plain", clean),
        number("Empirical", "right under every attack tried", "soft", empirical),
        number("Certified", "proven right under every attack possible", "accent", certified),
    )


def _facts(run: RunSummary) -> tuple[tuple[str, str], ...]:
    threat = run.headline.threat if run.headline else run.threat
    shown = describe_threat(threat) if threat else ""
    facts = (("Threat", shown), ("Model", run.model), ("Data", run.dataset))
    return tuple((name, value or NOT_STATED) for name, value in facts)


def _attack_note(run: RunSummary) -> str:
    if run.empirical is None:
        return f"Accuracy under attack: {NOT_MEASURED}."
    wrong = run.empirical.total - run.empirical.successes
    attacked = f"{run.empirical.total:,} images attacked"
    if run.bracket is None or run.bracket.clean.total != run.empirical.total:
        return f"Of {attacked}, {wrong:,} ended with a wrong prediction."
    already = run.bracket.clean.total - run.bracket.clean.successes
    held = run.empirical.successes
    counts = f"{attacked}: {already:,} wrong already, {wrong - already:,} broken, {held:,} not broken."
    return counts if run.attacked or wrong == already else f"{counts} {KEEP_PICTURES}"


def _commands(run: RunSummary) -> tuple[tuple[str, str], ...]:
    sources = [("certify", rows) for rows in run.certificates] + [("attack", rows) for rows in run.attacks]
    rows = [(f"{what}: {describe_threat(rows.threat)}", rows.meta.get("command")) for what, rows in sources]
    return tuple((what, str(command) if command else NOT_STATED) for what, command in rows)
