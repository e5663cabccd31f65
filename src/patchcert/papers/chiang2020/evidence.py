"""Evidence of certified runs, one row per test image, small enough to be kept beside the code."""

import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from patchcert.certificates import Certificates
from patchcert.data import count_test_images
from patchcert.errors import RunError
from patchcert.papers.chiang2020.attack_plan import AttackPlan
from patchcert.papers.chiang2020.rows import AnyThreat
from patchcert.threats import Patch, threat_from_dict
from patchcert.threats.shapes import name_of
from patchcert.train.run_folder import can_be_proven, read_arrays, read_meta

ATTACK_COLUMNS = ("index", "label", "prediction", "prediction_after", "succeeded")
COLUMNS = ("label", "prediction", "verdict", "margin", "worst_top", "worst_left")


def evidence_name(threat: AnyThreat, limit: int | None) -> str:
    """The name of a threat's evidence; different threats have different names."""
    words = re.sub(r"[^a-z0-9]+", "-", str(threat).lower()).strip("-")
    plain = json.dumps(threat.to_dict(), sort_keys=True)
    is_solid = isinstance(threat, Patch) and threat.pixels == threat.height * threat.width
    digest = "" if is_solid else f"-{hashlib.sha256(plain.encode()).hexdigest()[:8]}"
    return f"certify-{words}{digest}{'' if limit is None else f'-first-{limit}'}"


def certify_command(run: str, threat: AnyThreat, limit: int | None) -> str:
    """What certifies the model in a run's folder anew, wherever that lies."""
    if isinstance(threat, Patch):
        options = ["--shape", name_of(threat.stamp) or "STAMP.txt"]
    else:
        options = ["--sparse", str(threat.pixels), "--bound", threat.bound]
    return shlex.join(
        ["patchcert", "certify", run, *options, *([] if limit is None else ["--limit", str(limit)])]
    )


def certificate_columns(certificates: Certificates) -> dict[str, NDArray[Any]]:
    """The rows in the smallest types that hold them; margins are rounded down, so that they stay proven."""
    tops, lefts = certificates.worst_placement.cpu().numpy().T
    classes = np.int16 if certificates.margins.shape[1] > np.iinfo(np.int8).max else np.int8
    return {
        "label": certificates.labels.cpu().numpy().astype(classes),
        "prediction": certificates.predictions.cpu().numpy().astype(classes),
        "verdict": certificates.certified.cpu().numpy(),
        "margin": round_down(certificates.least_margin.double().cpu().numpy()),
        "worst_top": tops.astype(np.int16),
        "worst_left": lefts.astype(np.int16),
    }


def round_down(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """The largest float32 that is not above each value."""
    rounded = values.astype(np.float32)
    return np.where(rounded > values, np.nextafter(rounded, np.float32(-np.inf)), rounded)


@dataclass(frozen=True, eq=False)
class Rows:
    """The evidence in one file; reading it checks that verdicts, predictions and margins agree."""

    path: Path
    columns: Mapping[str, NDArray[Any]]
    meta: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> "Rows":
        """The rows in a file of evidence, refused if they contradict themselves."""
        columns, meta = load_columns(path, COLUMNS)
        rows = cls(path, columns, meta)
        rows.check()
        return rows

    @property
    def threat(self) -> AnyThreat:
        """What the images were certified against."""
        return threat_from_dict(self.meta["threat"])

    @property
    def limit(self) -> int | None:
        """How many of the first test images the rows are about; None for all."""
        return self.meta["data"].get("limit")

    @property
    def is_of_test_images(self) -> bool:
        """Whether the images are those of the test set."""
        return self.meta["data"].get("split") == "test"

    @property
    def total(self) -> int:
        """How many images there are."""
        return len(self.columns["label"])

    @property
    def correct(self) -> int:
        """How many are predicted rightly without a patch."""
        return int(np.count_nonzero(self.columns["prediction"] == self.columns["label"]))

    @property
    def certified(self) -> int:
        """How many are proven."""
        return int(np.count_nonzero(self.columns["verdict"]))

    def check(self) -> None:
        """A proven image is predicted rightly, and its margin is positive, or none has a margin."""
        shapes = {self.columns[name].shape for name in COLUMNS}
        if len(shapes) != 1 or shapes <= {(), (0,)} or self.columns["label"].ndim != 1:
            raise RunError(
                f"{self.path} has columns of {sorted(shapes)} rows; expected one number above 0 for all"
            )
        if self.limit is not None and self.total > self.limit:
            raise RunError(f"{self.path} has {self.total} rows of the first {self.limit} images")
        self._check_count()
        verdict = self.columns["verdict"].astype(bool)
        right = self.columns["prediction"] == self.columns["label"]
        broken = np.flatnonzero(verdict & ~(right & can_be_proven(self.columns["margin"], self.meta)))
        if broken.size:
            raise RunError(
                f"{self.path} contradicts itself: image {broken[0]} is certified, but its prediction is "
                "wrong or its margin not positive",
                hint="certify the run again",
            )

    def _check_count(self) -> None:
        """Rows about all test images of published data are as many as those."""
        data = self.meta["data"]
        expected = count_test_images(data.get("name", ""), data.get("sha256", {}))
        if expected is None or not self.is_of_test_images:
            return
        expected = expected if self.limit is None else min(self.limit, expected)
        if self.total != expected:
            raise RunError(
                f"{self.path} has {self.total} rows; expected {expected}, one for each image",
                hint="certify the run again",
            )


@dataclass(frozen=True, eq=False)
class AttackedRows:
    """The evidence of one attack; reading it checks that an attack succeeded where the answer is wrong."""

    path: Path
    columns: Mapping[str, NDArray[Any]]
    meta: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> "AttackedRows":
        """The rows in a file of evidence, refused if they contradict themselves."""
        columns, meta = load_columns(path, ATTACK_COLUMNS)
        rows = cls(path, columns, meta)
        broken = np.flatnonzero((columns["prediction_after"] != columns["label"]) != columns["succeeded"])
        if broken.size:
            raise RunError(f"{path} contradicts itself in row {broken[0]}", hint="attack the run again")
        return rows

    @property
    def plan(self) -> AttackPlan:
        """How the images were attacked."""
        return AttackPlan.from_dict(self.meta["plan"])

    @property
    def total(self) -> int:
        """How many images were attacked."""
        return len(self.columns["label"])

    @property
    def correct(self) -> int:
        """How many are predicted rightly, behind the defense where there is one, without an attack."""
        return int(np.count_nonzero(self.columns["prediction"] == self.columns["label"]))

    @property
    def withstood(self) -> int:
        """How many are predicted rightly under attack."""
        return int(np.count_nonzero(~self.columns["succeeded"].astype(bool)))

    def concerns(self, proven: Rows) -> bool:
        """Whether the certificates are about what was attacked: same threat, all images, no defense in between."""
        return not self.plan.defense and proven.threat == self.plan.threat and proven.limit is None

    def certified(self, proven: Rows) -> int:
        """How many of the attacked images are proven."""
        return int(np.count_nonzero(proven.columns["verdict"][self.columns["index"]]))

    def check_against(self, proven: Rows) -> None:
        """The images are those of the certificates, and none that is proven for the same threat may have been broken
        without a defense in between."""
        check_same_images(self.path, self.columns, proven)
        if not self.concerns(proven):
            return
        index = self.columns["index"]
        refuted = index[proven.columns["verdict"][index] & self.columns["succeeded"]]
        if refuted.size:
            raise RunError(f"{proven.path}: image {refuted[0]} is certified, but {self.path.name} broke it")


def check_same_images(path: Path, columns: Mapping[str, NDArray[Any]], proven: Rows) -> None:
    """The rows of a file name each image once, and label it as the certificates of all test images do."""
    if proven.limit is not None or not proven.is_of_test_images:
        return
    index, labels = columns["index"], proven.columns["label"]
    is_one_each = len(np.unique(index)) == len(index) and (index >= 0).all() and (index < len(labels)).all()
    if not is_one_each or not np.array_equal(labels[index], columns["label"]):
        raise RunError(
            f"{path} is about other images than {proven.path.name}",
            hint="both must come from the same data set; gather the evidence again",
        )


def load_columns(path: Path, names: Sequence[str]) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """The columns in a file of evidence, among them those of the names, and how they came about."""
    columns = read_arrays(path)
    missing = [name for name in (*names, "meta") if name not in columns]
    if missing:
        raise RunError(f"{path} lacks the column {missing[0]!r}", hint="gather the evidence again")
    meta = read_meta(path, columns)
    unsaid = [key for key in ("data", "weights_sha256") if key not in meta]
    if unsaid:
        raise RunError(f"{path} does not name its {unsaid[0]}", hint="gather the evidence again")
    del columns["meta"]
    return columns, meta
