"""Evidence: a file for each question, with a row for each image, and all that is needed to ask it again."""

import hashlib
import json
import math
import re
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from patchcert.certificates import ABSTAINED, AnyThreat, Guarantee, method_named
from patchcert.data import count_test_images
from patchcert.errors import InvalidInput, PatchcertError, RunError
from patchcert.files import atomic_write
from patchcert.threats import Patch, threat_from_dict

VERSION = 2
Kind = Literal["certify", "attack"]
COLUMNS: dict[str, tuple[str, ...]] = {
    "certify": ("index", "label", "prediction", "certified"),
    "attack": ("index", "label", "prediction", "prediction_after", "succeeded", "top", "left", "steps"),
}
"""What every file of a kind has. Certificates may add margin, worst_top and worst_left, or radius, selected and votes,
or lead, first_mask and second_mask, and broken; attacks a margin. Both may add images that are classified wrongly:
`adversarial`, whose rows are named by `adversarial_row`."""
KINDS = {
    **dict.fromkeys(("index", "label", "prediction", "prediction_after", "steps", "top", "left"), "iu"),
    **dict.fromkeys(("certified", "succeeded", "broken"), "b"),
}
"""The kinds of numbers, in numpy's letters, that columns hold where not any will do."""
MODEL: Mapping[str, Any] = {"name": "Model"}
"""How a model is described that is asked as it is."""
_NOT_ASKED = ("batch_size", "verdicts_only")


@final
@dataclass(frozen=True, slots=True)
class Selection:
    """Which images of a data set: a whole split, its first `limit`, or `drawn` of it at random, as the seed says."""

    data: str
    split: str = "test"
    limit: int | None = None
    drawn: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("limit", self.limit), ("drawn", self.drawn)):
            if value is not None and value < 1:
                raise InvalidInput(f"{name} is {value}; expected at least one image")

    @property
    def is_whole_test_set(self) -> bool:
        """Whether all test images are asked for."""
        return self.split == "test" and self.limit is None and self.drawn is None

    def positions(self, total: int) -> Tensor:
        """Where the images stand among all of the split, in ascending order."""
        if self.drawn is not None:
            order = torch.randperm(total, generator=torch.Generator().manual_seed(self.seed))
            return order[: self.drawn].sort().values
        return torch.arange(total if self.limit is None else min(self.limit, total))

    def to_dict(self) -> dict[str, Any]:
        """The selection in plain types; what does not apply is left out."""
        values = {"limit": self.limit, "drawn": self.drawn, "seed": None if self.drawn is None else self.seed}
        given = {name: value for name, value in values.items() if value is not None}
        return {"name": self.data, "split": self.split, **given}

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> "Selection":
        """The selection that `to_dict` wrote; other keys are ignored."""
        return Selection(
            plain["name"], plain["split"], plain.get("limit"), plain.get("drawn"), plain.get("seed", 0)
        )


@final
@dataclass(frozen=True)
class Question:
    """What evidence answers, of whatever weights and on whatever machine.

    `classifier` is what `Classifier.describe` says, or how an attacked model is defended; `attack` what the attack says
    of itself, with its seed. An attack on images that are certified alone is another question than one on all.
    """

    kind: Kind
    threat: AnyThreat
    selection: Selection
    classifier: Mapping[str, Any]
    attack: Mapping[str, Any] = field(default_factory=dict)
    certified_only: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The question in plain types, as it stands in a file of evidence."""
        asked: dict[str, Any] = {
            "kind": self.kind,
            "threat": self.threat.to_dict(),
            "data": self.selection.to_dict(),
            "classifier": dict(self.classifier),
        }
        if self.kind == "attack":
            asked |= {"attack": dict(self.attack), "certified_only": self.certified_only}
        return asked

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> "Question":
        """The question that `to_dict` wrote; other keys are ignored."""
        return Question(
            kind=plain["kind"],
            threat=threat_from_dict(plain["threat"]),
            selection=Selection.from_dict(plain["data"]),
            classifier=plain["classifier"],
            attack=plain.get("attack", {}),
            certified_only=plain.get("certified_only", False),
        )

    @cached_property
    def key(self) -> str:
        """The same for two questions exactly if they are the same; batch sizes are a matter of the machine."""
        return json.dumps(_asked(self.to_dict()), sort_keys=True)

    @property
    def name(self) -> str:
        """The name of the answer's file: a few words for people, and 64 bits of a sum over all that is asked."""
        words = [self.kind, str(self.threat), "certified only" if self.certified_only else ""]
        words += [str(self.classifier["defense"])[:40]] if "defense" in self.classifier else []
        slug = "-".join(re.sub(r"[^a-z0-9]+", "-", word.lower()).strip("-") for word in words if word)
        return f"{slug}-{hashlib.sha256(self.key.encode()).hexdigest()[:16]}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Question) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def _damage(path: Path) -> str:
    """What is wrong with a file that cannot be read as evidence."""
    if not path.is_file():
        return "there is no such file"
    if not path.stat().st_size:
        return "it is empty"
    if not zipfile.is_zipfile(path):
        return "it is no .npz archive, or it is cut short"
    return "what it holds is damaged"


def _asked(value: Any) -> Any:  # noqa: ANN401 - plain JSON of any shape
    """The same without what is not part of the question."""
    if isinstance(value, Mapping):
        return {key: _asked(item) for key, item in value.items() if key not in _NOT_ASKED}
    return [_asked(item) for item in value] if isinstance(value, list | tuple) else value


@final
@dataclass(frozen=True, eq=False)
class Evidence:
    """The answer to a question, image by image. Reading a file checks that its columns do not contradict each other.

    `meta` is the question and the circumstances: weights_sha256, the sums of the data and the size of its images (below
    `data`), command, seconds, device and versions. Certificates gathered since 16 November 2026 also have `prediction`:
    how many images the deployed classifier predicted in one call, and in how many seconds.
    """

    columns: Mapping[str, NDArray[Any]]
    meta: Mapping[str, Any]
    path: Path | None = None

    @classmethod
    def read(cls, path: Path) -> "Evidence":
        """The evidence in a file, refused by name if it is damaged or contradicts itself."""
        try:
            with path.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
                columns = {name: stored[name] for name in stored.files}
            meta = json.loads(str(columns.pop("meta", "null")))
        except (EOFError, OSError, TypeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
            raise RunError(
                f"{path} is not a readable evidence file: {_damage(path)}",
                hint="delete it and gather the evidence again",
            ) from error
        found = cls(columns, meta, path)
        found.check()
        return found

    def write(self, path: Path) -> "Evidence":
        """Store the evidence in a file, which appears whole or not at all."""
        self.check()
        with atomic_write(path) as stream:
            arrays = {"meta": np.array(json.dumps(self.meta)), **self.columns}
            np.savez_compressed(stream, **arrays)  # pyright: ignore[reportArgumentType]
        return Evidence(self.columns, self.meta, path)

    @cached_property
    def question(self) -> Question:
        """What was asked."""
        return Question.from_dict(self.meta)

    @property
    def kind(self) -> Kind:
        """Whether images were certified or attacked."""
        return self.meta["kind"]

    @property
    def threat(self) -> AnyThreat:
        """What the images were certified against, or attacked with."""
        return self.question.threat

    @property
    def selection(self) -> Selection:
        """Which images were asked for."""
        return self.question.selection

    def has_settings(self, words: Iterable[str]) -> bool:
        """Whether the classifier has all settings that are given in words like `threshold=0.3`; of two words for one
        setting the later counts."""
        classifier, parts = self.meta["classifier"], (word.partition("=") for word in words)
        given = {name: value for name, _, value in parts}
        return all(name in classifier and _is_written(classifier[name], given[name]) for name in given)

    @property
    def weights(self) -> str:
        """The SHA-256 sum of the weights."""
        return self.meta["weights_sha256"]

    @property
    def where(self) -> str:
        """How messages call it."""
        return "the evidence" if self.path is None else str(self.path)

    @property
    def total(self) -> int:
        """How many images there are."""
        return len(self.columns["label"])

    @property
    def correct(self) -> int:
        """How many are predicted rightly without a patch; an abstention is not."""
        return int(np.count_nonzero(self.right_rows))

    @property
    def right_rows(self) -> NDArray[np.bool_]:
        """Which images are predicted rightly without a patch."""
        return self.columns["prediction"] == self.columns["label"]

    @property
    def certified(self) -> int:
        """How many are proven."""
        return int(np.count_nonzero(self.columns["certified"]))

    @property
    def broken(self) -> int | None:
        """How many a proof has found a counterexample of; None where it has not looked for any."""
        return int(np.count_nonzero(self.columns["broken"])) if "broken" in self.columns else None

    @property
    def withstood(self) -> int:
        """How many are predicted rightly under attack; with those that were right and raise an alert that suffices."""
        return int(np.count_nonzero(self.withstood_rows))

    @property
    def withstood_rows(self) -> NDArray[np.bool_]:
        """Which images these are."""
        return ~self.columns["succeeded"] | (self.right_rows & ~self.broken_rows)

    @property
    def broken_rows(self) -> NDArray[np.bool_]:
        """Which images an attack, or a proof that found counterexamples, has broken.

        An alert breaks nothing where proofs promise detection.
        """
        if self.kind == "certify":
            return self.columns.get("broken", np.zeros(self.total, np.bool_))
        method = method_named(self.meta["classifier"].get("name", ""))
        is_alert = self.columns["prediction_after"] == ABSTAINED
        forgiven = is_alert & (method is not None and method.promise == "detection")
        return self.columns["succeeded"] & ~forgiven

    @property
    def guarantee(self) -> Guarantee:
        """What certificates promise; where evidence does not say it, what the method and its settings do."""
        return Guarantee(**self.meta["guarantee"]) if "guarantee" in self.meta else self._promised

    @property
    def _promised(self) -> Guarantee:
        """What the method and its settings promise."""
        settings = self.meta["classifier"]
        method = method_named(settings.get("name", ""))
        promise = "recovery" if method is None else method.promise
        return Guarantee(promise, 1 - settings.get("error_rate", 0.0))

    @property
    def prediction_milliseconds(self) -> float | None:
        """What a prediction took the deployed classifier, on the device; None where it was not measured."""
        measured = self.meta.get("prediction")
        return None if measured is None else 1000 * measured["seconds"] / measured["images"]

    @property
    def is_undefended(self) -> bool:
        """Whether an attack was on the model that certificates are about, with no defense in between."""
        return "defense" not in self.meta["classifier"]

    @property
    def about(self) -> tuple[object, ...]:
        """What the rows are about, whatever the threat: weights, predictor and data."""
        predictor, selection = predictor_of(self.meta["classifier"]), self.selection
        return self.weights, predictor, selection.data, selection.split

    @property
    def subject(self) -> tuple[object, ...]:
        """What the rows are about: two files with the same subject can contradict each other."""
        return *self.about, self.threat

    def certified_against(self, threat: AnyThreat) -> NDArray[np.bool_] | None:
        """Which images are proven against a threat, where the rows say so: by verdicts, or by radii in pixels."""
        if threat == self.threat:
            return self.columns["certified"]
        if "radius" not in self.columns:
            return None
        return (self.columns["radius"] >= threat.pixels) & self.right_rows

    def is_of_data(self, sums: Mapping[str, str] | None) -> bool:
        """Whether it is about images in files with these sums; published files may also be there packed."""
        own, name = self.meta["data"].get("sha256", {}), self.selection.data
        if sums is None or dict(own) == dict(sums):
            return True
        return None not in (count_test_images(name, own), count_test_images(name, sums))

    def has_rows_of(self, other: "Evidence") -> bool:
        """Whether both say the same of the same images."""
        mine, theirs = self.columns, other.columns
        return mine.keys() == theirs.keys() and all(
            np.array_equal(mine[name], theirs[name], equal_nan=mine[name].dtype.kind == "f") for name in mine
        )

    def adversarial(self) -> dict[int, NDArray[np.float32]]:
        """The attacked images, or counterexamples, that were kept, by position in the data set."""
        if "adversarial" not in self.columns:
            return {}
        index = self.columns["index"][self.columns["adversarial_row"]]
        return dict(zip(index.tolist(), self.columns["adversarial"], strict=True))

    def check(self) -> None:
        """Raises unless the rows are complete and consistent."""
        self._check_meta()
        self._check_columns()
        self._check_images()
        contradiction = self._contradiction()
        if contradiction:
            raise self._refused(f" contradicts itself: {contradiction}")

    def _refused(self, what: str) -> RunError:
        return RunError(f"{self.where}{what}", hint="gather the evidence again")

    def _check_meta(self) -> None:
        if not isinstance(self.meta, Mapping):
            raise self._refused(" is no evidence: it has no `meta` that says what it is of")
        if self.meta.get("version") != VERSION:
            version = self.meta.get("version", 1)
            raise self._refused(f" is evidence of version {version}; expected version {VERSION}")
        try:
            _ = COLUMNS[self.kind], self.question.key
        except (PatchcertError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._refused(f" does not say what it is evidence of: {error}") from error
        if "weights_sha256" not in self.meta:
            raise self._refused(" does not name its weights_sha256")
        if not _is_time(self.meta.get("seconds", 0.0)):
            raise self._refused(f" does not say in how many seconds: {self.meta['seconds']!r}")
        measured = self.meta.get("prediction", {"images": 1, "seconds": 0.0})
        is_measured = isinstance(measured, Mapping) and _is_time(measured.get("seconds"))
        images = measured.get("images") if is_measured else None
        if not isinstance(images, int) or images < 1:
            raise self._refused(
                f" does not say how many images were predicted in how many seconds: {measured}"
            )

    def _check_columns(self) -> None:
        missing = [name for name in COLUMNS[self.kind] if name not in self.columns]
        if missing:
            raise self._refused(f" lacks the column {missing[0]!r}")
        rows = {name: column for name, column in self.columns.items() if not name.startswith("adversarial")}
        for name, column in rows.items():
            if column.ndim != (2 if name == "votes" else 1) or column.dtype.kind not in "biuf":
                got = f"{column.dtype} {column.shape}"
                raise self._refused(f": the column {name!r} must hold one number for each image, got {got}")
            if column.dtype.kind not in KINDS.get(name, "biuf"):
                expected = "yes or no" if KINDS[name] == "b" else "a whole number"
                raise self._refused(
                    f": the column {name!r} must hold {expected} for each image, got {column.dtype}"
                )
        lengths = {len(column) for column in rows.values()}
        if len(lengths) != 1 or (self.kind == "certify" and lengths == {0}):
            raise self._refused(f" has columns of {sorted(lengths)} rows; expected one number above 0")

    def _check_images(self) -> None:
        """Every image once, in order, and as many as were asked for of published data."""
        index, data = self.columns["index"], self.meta["data"]
        if (np.diff(index) <= 0).any() or (index < 0).any():
            raise self._refused(" does not name every image once, in order")
        published = count_test_images(data["name"], data.get("sha256", {}))
        if published is None or self.selection.split != "test" or self.question.certified_only:
            return
        if not np.array_equal(index, self.selection.positions(published).numpy()):
            raise self._refused(
                f" has {self.total} rows; expected those of the {published} test images that were asked for, "
                "one for each"
            )

    def _contradiction(self) -> str:
        label, prediction = self.columns["label"], self.columns["prediction"]
        if self.kind == "attack":
            wrong = self.columns["prediction_after"] != label
            differ = np.flatnonzero(wrong != self.columns["succeeded"])
            if differ.size:
                return f"row {differ[0]} says otherwise of the attack than its label"
            return self._kept_contradiction()
        unfit = {
            "certified, but predicted wrongly": prediction != label,
            "both certified and broken": self.broken_rows,
        }
        for words, rows in unfit.items():
            both = np.flatnonzero(self.columns["certified"] & rows)
            if both.size:
                return f"row {both[0]} is {words}"
        return self._kept_contradiction() or self._method_contradiction()

    def _method_contradiction(self) -> str:
        """What contradicts the rules and the promise of the kind of proof."""
        stated, promised = self.meta.get("guarantee"), asdict(self._promised)
        method = method_named(self.meta["classifier"].get("name", ""))
        if method is None:
            return ""
        if stated not in (None, promised):
            return f"it states the guarantee {stated}, but {method.__name__} promises {promised}"
        try:
            return method.contradiction(self.columns, self.meta)
        except (PatchcertError, IndexError, KeyError, TypeError, ValueError) as error:
            return f"its rows and settings are not those of {method.__name__}: {error}"

    def _kept_contradiction(self) -> str:
        """Where images are kept, it is of exactly the rows that are said to be broken, each within [0, 1]."""
        names = [name for name in ("adversarial", "adversarial_row") if name in self.columns]
        if not names:
            return ""
        broken = self.broken_rows if self.kind == "certify" else self.columns["succeeded"] & self.right_rows
        expected = np.flatnonzero(broken)
        if len(names) != 2 or not np.array_equal(self.columns["adversarial_row"], expected):
            return "images are not kept of exactly the rows that are broken"
        images, size = self.columns["adversarial"], self.meta["data"].get("image")
        if images.shape != (len(expected), *(size or images.shape[1:])):
            return f"images of shape {images.shape} are kept; expected {len(expected)} of {size}"
        outside = ~((images >= 0) & (images <= 1)).all(axis=tuple(range(1, images.ndim)))
        row = np.flatnonzero(outside)
        return (
            f"the image kept of row {expected[row[0]]} is none: its pixels leave [0, 1]" if row.size else ""
        )


def _is_time(value: object) -> bool:
    """Whether it is a number of seconds, which NaN and infinity are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def predictor_of(classifier: Mapping[str, Any]) -> str:
    """Of what a classifier says of itself, all that decides its predictions: the same for proofs of one predictor."""
    method = method_named(classifier["name"])
    if method is None:
        return json.dumps(dict(classifier), sort_keys=True)
    if method.predicts_as_its_model:
        return json.dumps(MODEL)
    decides = {name: value for name, value in classifier.items() if name not in method.of_proofs_alone}
    return json.dumps(decides, sort_keys=True)


def refuted(proven: Evidence, attacked: Evidence) -> NDArray[np.integer]:
    """Positions of images that are proven in one file and broken in the other, by a member of the same threat.

    None for files of other weights, predictors or data, or of a threat with other members: they cannot contradict a
    proof.
    """
    if not _includes(proven.threat, attacked.threat) or proven.about != attacked.about:
        return np.empty(0, np.int64)
    certified = proven.columns["index"][proven.columns["certified"]]
    broken = attacked.columns["index"][attacked.broken_rows]
    return np.intersect1d(certified, broken)


def implies(hard: Evidence, easy: Evidence) -> bool:
    """Whether what one proof shows of an image follows from the other's rules: with the same settings against a patch
    inside, by intervals and then refined, or by pairs of masks and then by single ones."""
    if hard is easy or hard.selection != easy.selection or not _includes(hard.threat, easy.threat):
        return False
    settings, others = (_asked(each.question.classifier) for each in (hard, easy))
    if hard.threat != easy.threat:
        return settings == others
    methods, more = (settings.pop("name"), others.pop("name")), others.keys() - settings.keys()
    if any(others.get(name) != value for name, value in settings.items()):
        return False
    if methods == ("DoubleMasking", "MaskedDetection"):
        return others.get("threshold") == 0
    return methods == ("IntervalBounds", "IntervalBounds") and "refine" in more


def _includes(threat: AnyThreat, other: AnyThreat) -> bool:
    """Whether every member of the other threat is known to be one of this: the same, or smaller rectangles anywhere."""
    if threat == other:
        return True
    both = [each for each in (threat, other) if isinstance(each, Patch) and each.is_solid]
    if len(both) < 2 or any(str(each.rule) != "everywhere" for each in both):
        return False
    large, small = both
    return small.height <= large.height and small.width <= large.width


def _is_written(setting: object, word: str) -> bool:
    """Whether a setting, as evidence has it in JSON, is what commands write as this word."""
    if setting is None or isinstance(setting, bool):
        return word == str(setting).lower()
    if isinstance(setting, list):
        parts = word.split(",")
        return len(parts) == len(setting) and all(map(_is_written, setting, parts))
    if isinstance(setting, int | float):
        try:
            return float(word) == setting
        except ValueError:
            return False
    return word == setting


@final
@dataclass(frozen=True, slots=True)
class EvidenceFolder:
    """The evidence of one model, in files that are named by their questions: a later answer replaces the earlier."""

    path: Path

    def file(self, question: Question) -> Path:
        """Where the answer to a question stands, or will."""
        return self.path / f"{question.name}.npz"

    def files(self) -> tuple[Path, ...]:
        """All files of evidence, by name; hidden files are none."""
        return tuple(sorted(file for file in self.path.glob("*.npz") if not file.name.startswith(".")))

    def all(self) -> tuple[Evidence, ...]:
        """All evidence, by name of file."""
        return tuple(Evidence.read(file) for file in self.files())

    def find(
        self, question: Question, weights: str, sums: Mapping[str, str] | None = None
    ) -> Evidence | None:
        """The answer that was found with these weights; where sums are given, of these files of data."""
        file = self.file(question)
        if not file.is_file():
            return None
        found = Evidence.read(file)
        return found if found.weights == weights and found.is_of_data(sums) else None

    def proven(
        self,
        threat: AnyThreat,
        selection: Selection,
        weights: str,
        positions: Tensor,
        classifier: Mapping[str, Any] = MODEL,
        sums: Mapping[str, str] | None = None,
    ) -> Tensor | None:
        """Which of the images at these positions are proven to be right by the predictor of this classifier, where one
        file of evidence says it of all of them; where sums are given, of these files of data."""
        for found in self.all():
            asked = found.kind, found.weights, found.selection.data, found.selection.split
            if asked != ("certify", weights, selection.data, selection.split) or not found.is_of_data(sums):
                continue
            if predictor_of(found.meta["classifier"]) != predictor_of(classifier):
                continue
            certified = found.certified_against(threat)
            known = np.isin(positions.numpy(), found.columns["index"])
            if certified is not None and known.all():
                rows = np.searchsorted(found.columns["index"], positions.numpy())
                return torch.from_numpy(certified[rows])
        return None
