"""`patchcert audit RESULTS`: whether evidence, cards, measurements and documents can be believed."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import patchcert as pc
from patchcert.cli import options
from patchcert.cli.output import print_json, say
from patchcert.errors import DataError, InvalidInput

if TYPE_CHECKING:
    import torch

    from patchcert.data import Dataset
    from patchcert.evidence import Evidence
    from patchcert.evidence.audit import Finding
    from patchcert.evidence.reproving import AtHand, Reproof
    from patchcert.papers.chiang2020.quoting import Sources

FOUND = 1
README, PAGE = "README.md", "docs/results.md"
PERFORMANCE = "docs/performance/*.json"
LISTED = (
    PERFORMANCE,
    "docs/measurements/*.json",
    "docs/measurements/*.npz",
    "docs/pictures/*",
    "trials/*.toml",
    "trials/results/**/*",
)
ENTRIES, PAPER = "src/patchcert/zoo/entries", "src/patchcert/papers/chiang2020"
PUBLISHED = "src/patchcert/comparison/published.json"


def audit(
    results: Annotated[Path, typer.Argument(help="A folder of results, such as `results` of a checkout.")],
    write: Annotated[
        bool,
        typer.Option(
            "--write",
            help="First bring manifest, cards and documents up to date; nothing listed may be missing.",
        ),
    ] = False,
    again: Annotated[
        int,
        options.number_option(
            "Prove and attack this many random images of each model again.", "--reprove", least=0
        ),
    ] = 0,
    runs: Annotated[
        list[Path] | None,
        typer.Option(help="Run folders whose weights are at hand for --reprove, beside the zoo. Repeatable."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the images for --reprove; by default a new one.")
    ] = None,
    device: options.Device = "auto",
    data_dir: options.DataFolder = None,
) -> None:
    """Check every file of evidence against its manifest, the true labels and its own columns.

    In a checkout also the paper's numbers, the page of results, figures in documents, measurements of speed and the
    cards of the zoo. Exits with 1 if anything is wrong, and names the file; with --reprove also the image.
    """
    from patchcert.evidence.audit import audit_results
    from patchcert.evidence.manifest import MANIFEST
    from patchcert.evidence.reproving import provable

    if not results.is_dir():
        raise InvalidInput(f"there is no folder {results}", hint="name the folder that holds the results")
    if not any(results.rglob("*.npz")) and not (results / MANIFEST).is_file():
        raise InvalidInput(
            f"{results} holds neither evidence nor a manifest", hint="name the folder that holds the results"
        )
    checkout = Checkout(results.resolve())
    if write:
        checkout.write()
    found = audit_results(checkout.results, checkout.beside)
    findings = [*found.findings, *checkout.findings()]
    seed = secrets.randbelow(2**31) if seed is None else seed
    reproofs = []
    if again:
        models, place = checkout.models(runs or []), options.parse_device(device)
        stored = provable(checkout.results, checkout.beside)
        reproofs = _reproved(stored, models, again, seed, place, data_dir)
    findings += [finding for reproof in reproofs for finding in reproof.findings]
    for finding in findings:
        say(str(finding))
    print_json(
        {
            "results": str(results),
            "files": found.files,
            "superseded": found.superseded,
            "without_curve": len(found.without_curve),
            "without_commit": len(found.without_commit),
            **({"reproved": _counted(reproofs), "seed": seed} if again else {}),
            "findings": [{"path": str(each.path), "what": each.what} for each in findings],
        }
    )
    if findings:
        say("hint: put back what was not meant to change; --write brings the rest up to date")
        raise typer.Exit(FOUND)


def _counted(reproofs: "Sequence[Reproof]") -> list[dict[str, object]]:
    return [{"model": each.model, "evidence": each.path.name, "images": each.images} for each in reproofs]


@dataclass(frozen=True)
class Checkout:
    """What lies beside the results where they are part of a checkout; elsewhere there is nothing of it."""

    results: Path

    @property
    def root(self) -> Path:
        """The folder of the checkout."""
        return self.results.parent

    @property
    def zoo(self) -> "pc.zoo.Zoo | None":
        """The models of the checkout with their cards."""
        entries = self.root / ENTRIES
        return pc.zoo.Zoo(entries) if entries.is_dir() else None

    @property
    def has_documents(self) -> bool:
        """Whether there are documents whose figures are to be checked."""
        return all((self.root / each).is_file() for each in (README, PAGE))

    @property
    def beside(self) -> tuple[Path, ...]:
        """What the manifest lists too: measurements, pictures, and trials on held-out images with what they found."""
        found = (file for pattern in LISTED for file in self.root.glob(pattern))
        return tuple(sorted(file for file in found if file.is_file()))

    @cached_property
    def sources(self) -> "Sources":
        """What figures in documents are taken from, once the manifest is as it should be."""
        from patchcert.papers.chiang2020.quoting import Sources

        return Sources(self.root, self.results)

    def write(self) -> None:
        """Bring the manifest, the cards, the page of results and the figures in documents up to date."""
        from patchcert.zoo.audit import recount

        self._write_manifest()
        say(f"wrote the manifest of {self.results}")
        if self.zoo is not None:
            recount(self.zoo, self.results)
        if self.has_documents:
            self._write_documents()
            self._write_manifest()  # a drawing among them is listed too

    def _write_manifest(self) -> None:
        from patchcert.evidence.manifest import Manifest

        Manifest.read(self.results).updated(self.results, self.beside).write(self.results)

    def _write_documents(self) -> None:
        from patchcert.files import write_text
        from patchcert.papers.chiang2020.quoting import PLOT, updated

        sources = self.sources
        made = {self.root / PAGE: sources.page, self.root / PLOT: sources.plot}
        made |= {page: updated(page.read_text(encoding="utf-8"), sources) for page in sources.documents}
        for page, text in made.items():
            if not page.is_file() or text != page.read_text(encoding="utf-8"):
                write_text(page, text)
                say(f"wrote {page}")

    def models(self, runs: "Sequence[Path]") -> "Iterator[AtHand]":
        """The zoo's models, those of the checkout where it has some, and those of run folders."""
        from patchcert.cli.target import open_run
        from patchcert.evidence.reproving import AtHand
        from patchcert.files import sha256

        zoo = self.zoo or pc.zoo.shipped()
        for name in zoo.names():
            yield AtHand(f"zoo:{name}", zoo.card(name).weights_sha256, partial(zoo.load, name))
        for run in map(open_run, runs):
            yield AtHand(str(run.path), sha256(run.weights), run.model)

    def findings(self) -> "Iterator[Finding]":
        """What is wrong with the files beside the results."""
        from patchcert.bench.report import contradictions
        from patchcert.comparison.trials import audit_trials
        from patchcert.evidence.audit import Finding
        from patchcert.files import read_json
        from patchcert.papers.chiang2020.quoting import audit_documents, audit_paper, audit_published
        from patchcert.zoo.audit import audit_zoo

        for file in self.root.glob(PERFORMANCE):
            yield from (Finding(file, what) for what in contradictions(read_json(file)))
        yield from audit_trials(self.root / "trials")
        if (self.root / PAPER).is_dir():
            yield from audit_paper(self.root / PAPER)
        if (self.root / PUBLISHED).is_file():
            yield from audit_published(self.root / PUBLISHED)
        if self.zoo is not None:
            yield from audit_zoo(self.zoo, self.results)
        if self.has_documents:
            yield from audit_documents(self.sources)


def _reproved(
    stored: "Mapping[str, Sequence[Evidence]]",
    models: "Iterator[AtHand]",
    images: int,
    seed: int,
    device: "torch.device",
    data_dir: Path | None,
) -> "list[Reproof]":
    """Every proof of the models, done again on random images of the data that are at hand."""
    from torch import Generator

    from patchcert.evidence.reproving import reprove

    find_dataset = cache(partial(_dataset, data_dir=data_dir))
    reproofs = []
    for model in models:
        for evidence in stored.get(model.weights_sha256, ()):
            dataset = find_dataset(evidence.selection.data)
            if dataset is not None:
                say(f"proving again: {model.name} against {evidence.threat}")
                generator = Generator().manual_seed(seed)
                reproofs.append(reprove(model, evidence, dataset, images, generator, device))
    return reproofs


def _dataset(name: str, data_dir: Path | None) -> "Dataset | None":
    try:
        return pc.load_dataset(name, data_dir)
    except DataError as error:
        say(f"nothing on {name} is proven again: {error.message}")
        return None
