"""Measurements that commands make: where their evidence is kept, what is said of them, what an interruption leaves."""

import shlex
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from patchcert.cli.output import detail, progress_bar, say
from patchcert.cli.threads import describe_threads
from patchcert.errors import InvalidInput, PatchcertError

if TYPE_CHECKING:
    from patchcert.cli.target import Target
    from patchcert.evidence import Attacking, Certification, Evidence
    from patchcert.train.run_folder import Run

Measurement = TypeVar("Measurement", "Certification", "Attacking")


def command_line(*, without: tuple[str, ...] = (), without_options: tuple[str, ...] = ()) -> str:
    """The command that was given, as evidence names it, less some of its words, and some options with their values."""
    pairs = zip(sys.argv, sys.argv[1:], strict=False)
    kept = [word for before, word in pairs if not {before, word.partition("=")[0]} & {*without_options}]
    return shlex.join(["patchcert", *(word for word in kept if word not in without)])


def kept_with(target: "Target", work: Measurement) -> Measurement:
    """The same work, its evidence kept in the folder of the target's run where no file is named for it.

    A file that is named, and the one beside it where blocks are kept, must hold nothing but earlier evidence of the
    same question and weights.
    """
    from patchcert.evidence import EvidenceFolder

    _check_free(work)
    if work.file is not None or target.run is None:
        return work
    return work.into(EvidenceFolder(target.run.evidence_folder))


def measure(work: "Certification | Attacking", target: "Target") -> "Evidence":
    """The evidence; an interruption says what is left of the work."""
    from patchcert.evidence import Attacking

    subject, selection = work.subject, work.subject.selection
    label, word, positions = "certifying", "against", subject.positions()
    if isinstance(work, Attacking):
        label, word, positions = "attacking", "with", work.positions
    images = f"{len(positions)} {selection.split} images of {selection.data}"
    say(f"{label} {images} {word} {work.threat} on {subject.device}")
    detail(f"weights {subject.weights} of {target.weights}, {describe_threads()}")
    if work.kept:
        say(f"resuming after {work.kept} images that were done before")
    try:
        with progress_bar(label, "images") as report:
            return work.run(report)
    except KeyboardInterrupt:
        say(_what_is_kept(work, len(positions)))
        raise


def _check_free(work: "Certification | Attacking") -> None:
    from patchcert.evidence import Evidence

    if work.file is not None and work.in_the_way is not None:
        raise InvalidInput(
            f"{work.in_the_way} holds what is done of other work, which was interrupted",
            hint="name another file, give the command of that work again, or delete it first.",
        )
    if work.file is None or not work.file.exists():
        return
    found = None
    with suppress(PatchcertError):
        found = Evidence.read(work.file)
    if found is None or (found.question, found.weights) != (work.question, work.subject.weights):
        what = "no evidence" if found is None else f"other evidence, {found.question.name}"
        raise InvalidInput(f"{work.file} holds {what}", hint="name another file, or delete it first.")


def measure_once(work: "Certification | Attacking", run: "Run", label: str) -> None:
    """Leave the evidence in the run's folder, unless the same was measured with the same weights and data before."""
    from patchcert.evidence import EvidenceFolder

    folder = EvidenceFolder(run.evidence_folder)
    if folder.find(work.question, work.subject.weights, work.subject.dataset.checksums) is None:
        with progress_bar(label, "images") as report:
            work.into(folder).run(report)


def _what_is_kept(work: "Certification | Attacking", count: int) -> str:
    if not work.can_resume:
        return "nothing is kept: that needs --out or a run folder, and a model without layers of your own"
    if not work.kept:
        return "nothing is kept: the first block of images was not done"
    return f"{work.kept} of {count} images are kept: the same command resumes from there"
