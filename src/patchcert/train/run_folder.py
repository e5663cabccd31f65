"""The folder of a training run: what was asked for, what came out, and the evidence gathered since."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from patchcert.errors import RunError
from patchcert.files import naming, new_folder, read_json, write_text
from patchcert.models import ModelSpec, load, round_to_half, save, trim
from patchcert.progress import Progress
from patchcert.tensors import Images
from patchcert.train.spec import Spec, read_spec, write_spec
from patchcert.train.toml import to_table

try:
    import fcntl
except ImportError:
    fcntl = None

SPEC, WEIGHTS, STATE = "spec.toml", "weights.safetensors", "state.safetensors"
METRICS, ENVIRONMENT, EVIDENCE = "metrics.jsonl", "environment.json", "evidence"


@final
@dataclass(frozen=True, slots=True)
class Run:
    """A training run on disk. Files appear whole or not at all, so a folder is never half written."""

    path: Path
    spec: Spec

    @classmethod
    def open(cls, path: str | Path) -> "Run":
        """The run in a folder that `patchcert train` wrote, finished or not."""
        folder = Path(path)
        if not (folder / SPEC).is_file():
            raise _no_run(folder)
        return cls(folder, read_spec(folder / SPEC))

    @classmethod
    def create(cls, path: Path, spec: Spec) -> "Run":
        """A new run in an empty or new folder."""
        write_text(path / SPEC, write_spec(spec))
        return cls(path, spec)

    @property
    def weights(self) -> Path:
        """The file of the trained weights, which exists once the run has finished."""
        return self.path / WEIGHTS

    @property
    def state(self) -> Path:
        """The file from which an unfinished run resumes."""
        return self.path / STATE

    @property
    def evidence_folder(self) -> Path:
        """Where evidence of the trained model is kept."""
        return self.path / EVIDENCE

    @property
    def is_finished(self) -> bool:
        """Whether training has ended."""
        return self.weights.is_file()

    def model(self, device: torch.device | str = "cpu") -> nn.Sequential:
        """The trained model, in eval mode."""
        return self._load()[0].to(device)

    def model_spec(self) -> ModelSpec:
        """What the trained model was built from."""
        return self._load()[1]

    def metrics(self) -> list[dict[str, Any]]:
        """One row per finished epoch."""
        file = self.path / METRICS
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        rows = []
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError):  # cut short by a kill
                rows.append(json.loads(line))
        return rows

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Add the row of an epoch."""
        file = self.path / METRICS
        before = file.read_text(encoding="utf-8") if file.is_file() else ""
        write_text(file, f"{before}{json.dumps(dict(row))}\n")

    def truncate_metrics(self, epoch: int) -> None:
        """Forget the rows of this epoch and all later ones."""
        rows = [row for row in self.metrics() if row["epoch"] < epoch]
        write_text(self.path / METRICS, "".join(json.dumps(row) + "\n" for row in rows))

    @property
    def training_seconds(self) -> float:
        """Wall time of all epochs, without the checks between them."""
        return sum(row["seconds"] for row in self.metrics())

    def environment(self) -> dict[str, Any]:
        """Versions, device, commit and data sums of the training; empty before it began."""
        file = self.path / ENVIRONMENT
        return read_json(file) if file.is_file() else {}

    def write_environment(self, facts: Mapping[str, Any]) -> None:
        """Record where and with what the run is trained."""
        write_text(self.path / ENVIRONMENT, json.dumps(dict(facts), indent=2) + "\n")

    def _load(self) -> tuple[nn.Sequential, ModelSpec]:
        if not self.is_finished:
            raise RunError(
                f"the run in {self.path} has not finished training",
                hint=f"resume it with: patchcert train {self.path} --resume",
            )
        return load(self.weights)


def prepare_run(folder: Path, spec: Spec, resume: bool) -> Run:
    """The run in a folder; refuses one that holds something else, or is neither new nor to be resumed."""
    for leftover in folder.glob(".*.part"):
        leftover.unlink(missing_ok=True)
    if not (folder / SPEC).is_file():
        if folder.is_dir() and any(not entry.name.startswith(".") for entry in folder.iterdir()):
            raise RunError(f"{folder} is not empty and holds no run", hint="give another folder with --out")
        return Run.create(folder, spec)
    run = Run.open(folder)
    if not (resume or run.is_finished or run.state.is_file() or run.metrics()):
        # It was refused, or killed, before it had a state to lose.
        (folder / ENVIRONMENT).unlink(missing_ok=True)
        return Run.create(folder, spec)
    if run.spec.fingerprint() != spec.fingerprint():
        difference = _first_difference(to_table(run.spec), to_table(spec))
        raise RunError(f"{folder} holds a different run: {difference}", hint="give another folder with --out")
    if not resume:
        if run.is_finished:
            raise RunError(
                f"{folder} already holds this run, finished",
                hint="give another folder with --out, or delete it",
            )
        raise RunError(f"{folder} holds this run, unfinished", hint="add --resume to continue it")
    return run


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Keep a second process out of the folder; the lock ends with this process, however it ends."""
    if fcntl is None:
        yield
        return
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    with lock as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunError(
                f"another process is training in {folder}",
                hint="wait for it, or give another folder with --out",
            ) from error
        yield


def _first_difference(there: Mapping[str, Any], here: Mapping[str, Any], path: str = "") -> str:
    for key in dict.fromkeys([*there, *here]):
        name, old, new = f"{path}{key}", there.get(key), here.get(key)
        if old == new or name == "run":
            continue
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            return _first_difference(old, new, f"{name}.")
        return f"{name} is {old!r} there and {new!r} here"
    return "it was written by another version"


def trim_run(
    run: Run, folder: Path, images: Images | None, half: bool, progress: Progress | None = None
) -> Run:
    """A run in a new folder with the model trimmed on these images and the history of its training, but no evidence.

    Without images all of the model stays, and only its weights can be rounded.
    """
    check_new(folder)
    trimmed, narrow = run.model(), run.model_spec()
    if images is not None:
        trimmed, narrow = trim(run.model(images.device), narrow, images, progress)
    trimmed = round_to_half(trimmed) if half else trimmed
    with new_folder(folder):
        made = Run.create(folder, run.spec)
        for name in (ENVIRONMENT, METRICS):
            if (run.path / name).is_file():
                write_text(folder / name, (run.path / name).read_text(encoding="utf-8"))
        save(trimmed, narrow, folder / WEIGHTS, half)
    return made


def _no_run(folder: Path) -> RunError:
    if folder.is_file():
        return RunError(
            f"{folder} is a file, not a run folder", hint="give the folder it lies in, if that is one"
        )
    what = "holds no run" if folder.is_dir() else "is not there"
    return RunError(
        f"the run folder {folder} {what}", hint=f"train one with: patchcert train ... --out {folder}"
    )


def check_new(folder: Path) -> None:
    """Refuse a folder for a whole run at once unless it is empty or not there yet."""
    place = folder.resolve()
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise RunError(f"{folder} is not empty", hint="name a new folder")
