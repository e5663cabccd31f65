"""A finished run as one of its trimmed model."""

from pathlib import Path

from torch import Tensor

from patchcert.models import round_to_half, save, trim
from patchcert.progress import Progress
from patchcert.train.run_folder import ENVIRONMENT, METRICS, WEIGHTS, Run, check_new, write_text


def trim_run(run: Run, folder: Path, images: Tensor, half: bool, progress: Progress | None = None) -> Run:
    """A run in a new folder with the trimmed model and the history of its training, and no evidence yet."""
    check_new(folder)
    trimmed, narrow = trim(run.model(images.device), run.model_spec(), images, progress)
    trimmed = round_to_half(trimmed) if half else trimmed
    made = Run.create(folder, run.spec)
    for name in (ENVIRONMENT, METRICS):
        if (run.path / name).is_file():
            write_text(folder / name, (run.path / name).read_text(encoding="utf-8"))
    save(trimmed, narrow, folder / WEIGHTS, half)
    return made
