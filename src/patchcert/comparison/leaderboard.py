"""The leaderboard format: rows of results in a JSON file, which others can add to; docs/comparison.md describes it."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal, final

from patchcert.comparison.schema import leaderboard_schema, mistakes
from patchcert.errors import DataError, InvalidInput
from patchcert.files import write_text

FORMAT, VERSION = "patchcert-leaderboard", 1
PUBLISHED = "published.json"
FROZEN = "8569d90aebdf7c6c372e476fc057502dc1305bb260f3c5f2ed3384c98aba14cb"
"""Of what others have published, as `published_sha256` sums it up; it was compared with its sources when this was
written."""
NO_OUTSIDE_DATA = "none"
EVERYWHERE = "everywhere"

SourceKind = Literal["evidence", "published", "unconfirmed"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a prediction takes, what 10,000 certificates take, and what training took; None where it is not known.

    `passes` are those of the network at least, `multiply_adds` those of all passes together, and `milliseconds` are
    for one prediction among many at once.
    """

    passes: float | None = None
    multiply_adds: float | None = None
    milliseconds: float | None = None
    certificate_seconds: float | None = None
    training_seconds: float | None = None
    device: str | None = None
    training_device: str | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Seeds:
    """Trainings that differ in their seed alone: how many, which one counts, and what is certified over all of them."""

    count: int
    mean: float
    counted: int | None = None
    spread: float | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """The file of evidence behind a row: its sum, that of the weights, and its counts of images."""

    sha256: str
    weights_sha256: str
    correct: int
    certified: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a row comes from: counted from `evidence`, `published`, or known only by hearsay (`unconfirmed`)."""

    kind: SourceKind
    title: str
    link: str | None = None
    note: str | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One classifier against one threat on one data set; accuracies in per cent of the images that were asked.

    `recounted` is true of rows that were counted here and now; no file can say it of its own rows.
    """

    data: str
    images: int
    patch: str
    pixels: Literal["native", "upscaled"]
    method: str
    promise: Literal["recovery", "detection"]
    outside_data: str
    certified: float
    source: Source
    placements: str = EVERYWHERE
    confidence: float = 1.0
    network: str | None = None
    parameters: int | None = None
    clean: float | None = None
    cost: Cost = field(default_factory=Cost)
    seeds: Seeds | None = None
    evidence: Counted | None = None
    recounted: bool = False

    @property
    def threat(self) -> tuple[str, str, str]:
        """What the attacker may do: rows with other threats are not comparable."""
        return self.patch, self.placements, self.pixels

    @property
    def is_like_ours(self) -> bool:
        """Whether the patch changes native pixels, and nothing was learned from outside."""
        return self.pixels == "native" and self.outside_data == NO_OUTSIDE_DATA

    def to_dict(self) -> dict[str, Any]:
        """Plain types, without what is not known or is as usual, and without `recounted`."""
        return _plain(replace(self, recounted=False))

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> "Row":
        """The row of a document that its schema allows."""
        kinds: Mapping[str, type] = {"cost": Cost, "seeds": Seeds, "evidence": Counted, "source": Source}
        parts: Mapping[str, Any] = {name: kinds[name](**plain[name]) for name in kinds.keys() & plain.keys()}
        return Row(**{**plain, **parts})

    def contradictions(self) -> Iterator[str]:
        """What in the row cannot be, though the schema allows it."""
        if self.clean is not None and self.certified > self.clean:
            yield f"certified is {self.certified}, more than clean, {self.clean}"
        yield from self._contradicting_seeds()
        counted = self.evidence
        if (counted is None) == (self.source.kind == "evidence"):
            yield f"the source is of kind {self.source.kind!r} {'without' if counted is None else 'with'} evidence"
        if counted is None:
            return
        if not counted.certified <= counted.correct <= self.images:
            yield f"its evidence counts {counted.certified} certified and {counted.correct} right of {self.images}"
            return
        shares = {"clean": (self.clean, counted.correct), "certified": (self.certified, counted.certified)}
        for name, (stated, count) in shares.items():
            if stated != 100 * count / self.images:
                share = 100 * count / self.images
                yield f"{name} is {stated}, but its evidence counts {count} of {self.images}, which is {share}"

    def _contradicting_seeds(self) -> Iterator[str]:
        """One seed is its own mean, and has no spread."""
        seeds = self.seeds
        if seeds is None or seeds.count > 1:
            return
        if seeds.spread is not None or abs(seeds.mean - self.certified) > 1e-9:
            yield f"certified is {self.certified}, but its only seed has {seeds.mean} with a spread of {seeds.spread}"


def read_rows(path: Path) -> tuple[Row, ...]:
    """The rows of a leaderboard file, refused with every mistake's place if it is not as the schema says."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}", hint="name a leaderboard file") from error
    return parse_rows(text, str(path))


def parse_rows(text: str, name: str) -> tuple[Row, ...]:
    """The rows in the text of a leaderboard file; messages call it by the name."""
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(
            f"{name} is no JSON: {error}", hint="docs/comparison.md describes leaderboard files"
        ) from error
    _refuse(name, list(mistakes(plain, leaderboard_schema())))
    rows = tuple(Row.from_dict(each) for each in plain["rows"])
    _refuse(
        name, [f"rows[{place}]: {what}" for place, row in enumerate(rows) for what in row.contradictions()]
    )
    return rows


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """Store the rows in a leaderboard file, which appears whole or not at all."""
    plain = {"format": FORMAT, "version": VERSION, "rows": [row.to_dict() for row in rows]}
    write_text(path, json.dumps(plain, indent=1, allow_nan=False) + "\n")


def published_rows() -> tuple[Row, ...]:
    """What others have published, as it ships with the package."""
    file = resources.files("patchcert.comparison").joinpath(PUBLISHED)
    return parse_rows(file.read_text("utf-8"), file.name)


def published_sha256(text: str) -> str:
    """A sum over all rows of the file of what others have published; notes are ours, and no part of it."""
    rows = [row.to_dict() for row in parse_rows(text, PUBLISHED)]
    for row in rows:
        row["source"].pop("note", None)
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def _refuse(name: str, found: Sequence[str]) -> None:
    if found:
        more = f" ({len(found) - 1} more mistakes)" if len(found) > 1 else ""
        raise InvalidInput(
            f"{name}: {found[0]}{more}",
            hint="docs/comparison.md describes leaderboard files, with an example",
        )


def _plain(value: Any) -> Any:  # noqa: ANN401 - fields of dataclasses
    if not is_dataclass(value):
        return value
    usual = {each.name: each.default for each in fields(value)}
    given = {name: getattr(value, name) for name in usual}
    plain = {name: _plain(item) for name, item in given.items() if item is not None and item != usual[name]}
    return {name: item for name, item in plain.items() if item != {}}
