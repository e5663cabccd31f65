"""A finished run as one of its trimmed model."""

from pathlib import Path

from torch import Tensor

from patchcert.errors import RunError
from patchcert.experiments.runs import ENVIRONMENT, METRICS, WEIGHTS, Run, write_text
from patchcert.models import load, round_to_half, save, trim
from patchcert.models.trimming import Progress


def trim_run(run: Run, folder: Path, images: Tensor, half: bool, progress: Progress | None = None) -> Run:
    """A run in a new folder with the trimmed model and the history of its training, and no evidence yet."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(f"{folder} is not empty", hint="name a new folder")
    if not run.is_finished:
        raise RunError(
            f"the run in {run.path} has not finished training",
            hint=f"go on with: patchcert train {run.path} --resume",
        )
    model, spec = load(run.weights)
    trimmed, narrow = trim(model.to(images.device), spec, images, progress)
    trimmed = round_to_half(trimmed) if half else trimmed
    made = Run.create(folder, run.spec)
    for name in (ENVIRONMENT, METRICS):
        if (run.path / name).is_file():
            write_text(folder / name, (run.path / name).read_text(encoding="utf-8"))
    save(trimmed, narrow, folder / WEIGHTS, half)
    return made
