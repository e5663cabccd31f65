"""With what and on what a run was made: enough to find out later why two runs differ."""

import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import patchcert
from patchcert.data import Dataset

PACKAGES = ("numpy", "safetensors")


def describe_environment(device: torch.device, dataset: Dataset, processes: int) -> dict[str, Any]:
    """Versions, device, commit of the code where it is a checkout, and the sums of the data."""
    return {
        "versions": {
            "patchcert": patchcert.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        | {name: metadata.version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "device": device_name(device),
        "processes": processes,
        "threads": torch.get_num_threads(),
        "commit": _commit(),
        "data": {"name": dataset.name, "checksums": dict(dataset.checksums)},
    }


def describe_session(device: torch.device, epoch: int, batch: int) -> dict[str, Any]:
    """When and from where the training was started or taken up again."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    return {"started": started, "device": device_name(device), "epoch": epoch, "batch": batch}


def device_name(device: torch.device) -> str:
    """The name of the GPU, or of the processor's kind."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.machine()})"


def _commit() -> str:
    """The commit of the source tree that the package is imported from; empty for an installed package."""
    package = Path(patchcert.__file__).parent
    if not any((parent / ".git").exists() for parent in package.parents[:2]):
        return ""
    command = ["git", "-C", str(package), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
