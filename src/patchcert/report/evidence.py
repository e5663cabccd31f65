"""Evidence files as typed rows; a file that lacks something, or is about other weights, says so."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from patchcert.errors import PatchcertError, RunError
from patchcert.files import sha256
from patchcert.report.summary import AnyThreat, AttackRows, CertificateRows
from patchcert.threats import threat_from_dict
from patchcert.train.run_folder import EVIDENCE, Run, can_be_proven, read_arrays, read_meta


@dataclass(frozen=True, eq=False)
class Evidence:
    """All that was measured on the test images of a run, in the order of the files' names."""

    certificates: tuple[CertificateRows, ...]
    attacks: tuple[AttackRows, ...]


def read_evidence(run: Run) -> Evidence:
    """The evidence on a run's test images; files of other kinds or on other images are left out."""
    weights = sha256(run.weights) if run.is_finished else ""
    return read_files([run.path / EVIDENCE / f"{name}.npz" for name in run.evidence_names()], weights)


def read_files(paths: Iterable[Path], weights: str) -> Evidence:
    """The evidence in files, all of which must have been gathered with the weights of that SHA-256 sum."""
    files = [_File.read(path) for path in paths]
    files = [file for file in files if file.is_of_test_images and not file.is_empty]
    for file in files:
        file.check_weights(weights)
    certificates = tuple(file.certificates() for file in files if file.kind == "certify")
    attacks = tuple(file.attacks() for file in files if file.kind == "attack")
    return Evidence(certificates, attacks)


@dataclass(frozen=True, eq=False)
class _File:
    where: str
    arrays: Mapping[str, NDArray[Any]]
    meta: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> "_File":
        arrays = read_arrays(path)
        owner = path.parent.parent if path.parent.name == EVIDENCE else path.parent
        return cls(f"evidence {path.stem!r} of {owner}", arrays, read_meta(path, arrays))

    @property
    def kind(self) -> str:
        return str(self.meta.get("kind", ""))

    @property
    def is_of_test_images(self) -> bool:
        data = self.meta.get("data", {})
        return not isinstance(data, Mapping) or data.get("split", "test") == "test"

    @property
    def is_empty(self) -> bool:
        return not self.arrays.get("label", np.ones(1)).size

    def check_weights(self, weights: str) -> None:
        if self.meta.get("weights_sha256") != weights:
            raise RunError(
                f"{self.where} was gathered with other weights than those of the run, or does not say with which",
                hint="delete that file, or certify and attack the run again",
            )

    def certificates(self) -> CertificateRows:
        label = self.column("label")
        rows = CertificateRows(
            threat=self.threat(),
            index=self.index(len(label)),
            label=label.astype(np.int64),
            prediction=self.column("prediction").astype(np.int64),
            certified=self.column("verdict").astype(bool),
            margin=self.column("margin").astype(np.float64),
            top=self.column("worst_top").astype(np.int64),
            left=self.column("worst_left").astype(np.int64),
            meta=self.meta,
        )
        self.check_margins(rows)
        return rows

    def check_margins(self, rows: CertificateRows) -> None:
        """A certified image has a positive margin, or none where only verdicts were asked for."""
        broken = np.flatnonzero(rows.certified & ~can_be_proven(rows.margin, self.meta))
        if broken.size:
            raise RunError(
                f"{self.where} contradicts itself: row {broken[0]} is certified with a margin of "
                f"{rows.margin[broken[0]]}",
                hint="delete that file and certify the run again",
            )

    def attacks(self) -> AttackRows:
        label = self.column("label")
        index = self.index(len(label))
        return AttackRows(
            threat=self.threat(),
            index=index,
            label=label.astype(np.int64),
            prediction_after=self.column("prediction_after").astype(np.int64),
            succeeded=self.column("succeeded").astype(bool),
            top=self.column("top").astype(np.int64),
            left=self.column("left").astype(np.int64),
            meta=self.meta,
            images=self.adversarial(index),
            certified_only=bool(self.meta.get("certified_only", False)),
        )

    def adversarial(self, index: NDArray[np.int64]) -> dict[int, NDArray[np.float32]]:
        """The attacked images that were kept, by image; those of the rows that `adversarial_row` names."""
        if "adversarial" not in self.arrays:
            return {}
        kept = self.arrays["adversarial"]
        rows = self.arrays.get("adversarial_row", np.arange(len(kept)))
        return {int(index[row]): image for row, image in zip(rows.tolist(), kept, strict=True)}

    def threat(self) -> AnyThreat:
        try:
            return threat_from_dict(self.meta.get("threat", {}))
        except PatchcertError as error:
            raise RunError(f"{self.where} names no threat: {error.message}") from error

    def index(self, count: int) -> NDArray[np.int64]:
        """Which test images the rows are about: the first ones, unless a column says otherwise."""
        return np.asarray(self.arrays.get("index", np.arange(count))).astype(np.int64)

    def column(self, name: str) -> NDArray[Any]:
        if name not in self.arrays:
            known = ", ".join(sorted(set(self.arrays) - {"meta"}))
            raise RunError(f"{self.where} lacks the column {name!r}; it has: {known}")
        values = self.arrays[name]
        if values.ndim != 1 or values.dtype.kind not in "biuf":
            raise RunError(
                f"{self.where}: the column {name!r} must hold one number per row, got {values.dtype} "
                f"{values.shape}"
            )
        return values
