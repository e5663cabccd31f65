"""`patchcert audit RESULTS`: whether evidence, cards, measurements and documents can be believed."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchcert.cli.output import print_json, say
from patchcert.errors import InvalidInput

if TYPE_CHECKING:
    from patchcert.evidence.audit import Finding

FOUND = 1
PAGE = Path("docs/results.md")
MEASUREMENTS = "docs/performance/*.json"
ENTRIES = Path("src/patchcert/zoo/entries")
PAPER = Path("src/patchcert/papers/chiang2020/paper.json")


def audit(
    results: Annotated[Path, typer.Argument(help="A folder of results, such as `results` of a checkout.")],
    write: Annotated[
        bool,
        typer.Option("--write", help="First bring the manifest up to date; nothing listed may be missing."),
    ] = False,
) -> None:
    """Check every file of evidence against its manifest, the true labels and its own columns.

    In a checkout also the paper's numbers, the page of results, measurements of speed and the cards of the zoo. Exits
    with 1 if anything is wrong, and names the file.
    """
    from patchcert.evidence.audit import audit_results

    if not results.is_dir():
        raise InvalidInput(f"there is no folder {results}", hint="name the folder that holds the results")
    folder = results.resolve()
    checkout = Checkout(folder.parent)
    if write:
        checkout.write(folder)
    found = audit_results(folder, checkout.measurements)
    findings = [*found.findings, *checkout.findings(folder)]
    for finding in findings:
        say(str(finding))
    print_json(
        {
            "results": str(results),
            "files": found.files,
            "superseded": found.superseded,
            "without_curve": len(found.without_curve),
            "without_commit": len(found.without_commit),
            "findings": [{"path": str(each.path), "what": each.what} for each in findings],
        }
    )
    if findings:
        raise typer.Exit(FOUND)


@dataclass(frozen=True)
class Checkout:
    """What lies beside the results where they are part of a checkout; elsewhere there is nothing of it."""

    root: Path

    @property
    def measurements(self) -> tuple[Path, ...]:
        """Measurements of speed, which the manifest lists too."""
        return tuple(sorted(self.root.glob(MEASUREMENTS)))

    def write(self, folder: Path) -> None:
        """The manifest, brought up to date."""
        from patchcert.evidence.manifest import Manifest

        Manifest.read(folder).updated(folder, self.measurements).write(folder)
        say(f"wrote the manifest of {folder}")

    def findings(self, results: Path) -> "Iterator[Finding]":
        """What is wrong with the files beside the results."""
        from patchcert.bench.report import contradictions
        from patchcert.evidence.audit import Finding
        from patchcert.papers.chiang2020.audit import audit_page, audit_paper
        from patchcert.zoo.audit import audit_zoo
        from patchcert.zoo.shelf import Zoo

        for file in self.measurements:
            facts = json.loads(file.read_text(encoding="utf-8"))
            yield from (Finding(file, what) for what in contradictions(facts))
        if (self.root / PAPER).is_file():
            yield from audit_paper(self.root / PAPER)
        if (self.root / ENTRIES).is_dir():
            yield from audit_zoo(Zoo(self.root / ENTRIES), results)
        if (self.root / PAGE).is_file():
            yield from audit_page(self.root / PAGE, results)
