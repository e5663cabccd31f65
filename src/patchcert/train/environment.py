"""With what and on what a run was made: enough to find out later why two runs differ."""

import hashlib
import platform
import subprocess
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import patchcert
from patchcert.data import Dataset


def describe_environment(device: torch.device, dataset: Dataset, processes: int) -> dict[str, Any]:
    """Versions, device, sums of the code and of the data, and the commit where the code is a checkout."""
    return {
        **describe_machine(device),
        "platform": platform.platform(),
        "processes": processes,
        "threads": torch.get_num_threads(),
        "commit": _commit(),
        "source_sha256": source_sha256(),
        "data": {"name": dataset.name, "checksums": dict(dataset.checksums)},
    }


def describe_session(device: torch.device, epoch: int, batch: int) -> dict[str, Any]:
    """When, from where and with what code the training was started or taken up again."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device_name(device),
        "epoch": epoch,
        "batch": batch,
        "torch": torch.__version__,
        "source_sha256": source_sha256(),
    }


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Where, and with what, evidence was gathered."""
    versions = {
        "patchcert": patchcert.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: metadata.version(name) for name in ("numpy", "safetensors")},
    }
    return {"device": device_name(device), "versions": versions}


@cache
def source_sha256() -> str:
    """A sum over the package's own files as they were when this module was read, which tells the code apart where there
    is no commit; empty where there are no such files."""
    package = Path(patchcert.__file__).parent
    total = hashlib.sha256()
    files = sorted(package.rglob("*.py"))
    for file in files:
        total.update(f"{file.relative_to(package).as_posix()}\n".encode())
        total.update(file.read_bytes())
    return total.hexdigest() if files else ""


source_sha256()


def device_name(device: torch.device) -> str:
    """The name of the GPU, or of the processor's kind."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.machine()})"


def commit_of(source: str) -> str:
    """The commit of this checkout if its code has that sum: that of a run which was trained from a copy of it."""
    return _commit() if source and source == source_sha256() else ""


def _commit() -> str:
    """The commit of the source tree that the package is imported from; empty for an installed package."""
    package = Path(patchcert.__file__).parent
    return commit_at(package) if any((parent / ".git").exists() for parent in package.parents[:2]) else ""


_CHANGED = ("status", "--porcelain", "--untracked-files=all", "--ignored", "--", "*.py")


def commit_at(folder: Path) -> str:
    """The commit that a folder's code is at; empty where there is none, or the code is another than committed."""
    try:
        changed, head = (
            subprocess.run(
                ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=5, check=False
            )
            for words in (_CHANGED, ("rev-parse", "HEAD"))
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    is_committed = changed.returncode == head.returncode == 0 and not changed.stdout
    return head.stdout.strip() if is_committed else ""
