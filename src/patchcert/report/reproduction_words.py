"""The words of a reproduced row that tables, charts and pages share."""

from collections import Counter

from patchcert.papers.chiang2020.counts import Outcome

ABSENT = "-"


def training_words(outcome: Outcome) -> str:
    """How the row's models were trained, or the defense in front of them."""
    entry = outcome.entry
    attack = f", {entry.attack} attack" if entry.attack else ""
    return entry.preset or (f"{entry.defense}{attack}" if entry.defense else entry.strategy)


def model_words(outcome: Outcome) -> str:
    """The paper's model, and ours where it is another."""
    words = outcome.entry.model_words
    return f"{words} (ours: {outcome.network})" if outcome.network else words


def schedule_words(outcome: Outcome, quick: bool) -> str:
    """Whether the schedule was that of the paper, whether only some test images were asked, and the row's note."""
    if not outcome.runs:
        return ABSENT
    if quick:
        return "quick"
    words = "full" if outcome.scale == 1.0 else f"scaled by {outcome.scale:g}"
    drawn = outcome.drawn_images
    words += "" if drawn is None else f"; {drawn:,} random test images"
    attacked = outcome.attacked_images
    if attacked is not None:
        where = "all" if outcome.is_counted_on_attacked else "attack"
        words += f"; {where} on {attacked:,} random test images"
    return f"{words}; {outcome.note}" if outcome.note else words


def seeds_words(outcome: Outcome) -> str:
    """How many seeds there are and that one of them counts, with the models' names where they differ in it."""
    if not outcome.runs:
        return ABSENT
    if not outcome.passed_over:
        return str(number_of_seeds(outcome))
    counts = {run.model: len(outcome.seeds_of(run)) for run in outcome.runs}
    if len(set(counts.values())) == 1:
        return f"1 of {number_of_seeds(outcome)}"
    alike = {count: [model for model in counts if counts[model] == count] for count in counts.values()}
    return "; ".join(f"1 of {count} for {', '.join(models)}" for count, models in alike.items() if count > 1)


def number_of_seeds(outcome: Outcome) -> int:
    """The most seeds that any model of the row was run with, or its network attacked with."""
    counts = Counter(run.model for run in (*outcome.runs, *outcome.passed_over))
    return max(counts.values(), default=0)
