"""Certificates of many images in blocks, which are kept as they are done, so that an interruption costs little."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from patchcert.certificates import Certificates, IntervalCertifier
from patchcert.experiments.environment import source_sha256
from patchcert.files import atomic_write
from patchcert.progress import Progress
from patchcert.threats import Patch, SparsePixels

FIRST_BLOCK, LARGEST_BLOCK = 64, 4096
BLOCK_SECONDS = 20.0
GPU_BLOCK = 2048
"""Sums on a GPU depend on how many images are bounded at once, so there the blocks must not depend on the clock."""
CLAIM = "claim"
COLUMNS = tuple(column.name for column in fields(Certificates))


@final
@dataclass(frozen=True)
class Proving:
    """Certifies in blocks. Those that are done wait in the file `partial` until all are; None keeps nothing.

    `claim` says what the certificates are about: weights, data, threat, arithmetic. Blocks of another claim, or of
    other code, are not taken up again.
    """

    certifier: IntervalCertifier
    partial: Path | None = None
    claim: Mapping[str, Any] = field(default_factory=dict)

    def certify(
        self,
        model: nn.Module,
        images: Tensor,
        labels: Tensor,
        threat: Patch | SparsePixels,
        progress: Progress | None = None,
    ) -> Certificates:
        """Certificates of all images; blocks that were kept are not proven again."""
        done, total, size = self.kept(labels), len(labels), _first_size(images)
        if progress is not None:
            progress(len(done.labels) if done else 0, total)
        while done is None or len(done.labels) < total:
            start, began = len(done.labels) if done else 0, time.perf_counter()
            chosen = slice(start, start + size)
            certifier = replace(self.certifier, progress=_shifted(progress, start, total))
            block = certifier.certify(model, images[chosen], labels[chosen], threat)
            done = block if done is None else _joined(done, block)
            self._keep(done, total)
            size = _next_size(images, size, time.perf_counter() - began)
        return done

    def kept(self, labels: Tensor) -> Certificates | None:
        """What an interrupted call has left of these certificates, where it has left something."""
        if self.partial is None or not self.partial.is_file():
            return None
        try:
            with safe_open(self.partial, framework="pt") as file:
                if (file.metadata() or {}).get(CLAIM) != self._claim():
                    return None
                found = Certificates(**{name: file.get_tensor(name).to(labels.device) for name in COLUMNS})
        except (SafetensorError, OSError):
            return None
        is_theirs = len(found.labels) <= len(labels) and found.labels.equal(labels[: len(found.labels)])
        return found if is_theirs else None

    def _keep(self, done: Certificates, total: int) -> None:
        """Write the blocks that are done, or remove the file once they are all."""
        if self.partial is None:
            return
        if len(done.labels) == total:
            self.partial.unlink(missing_ok=True)
            return
        columns = {name: getattr(done, name).contiguous().cpu() for name in COLUMNS}
        with atomic_write(self.partial) as stream:
            stream.write(save(columns, {CLAIM: self._claim()}))

    def _claim(self) -> str:
        settings = {"dtype": str(self.certifier.dtype), "verdicts_only": self.certifier.verdicts_only}
        return json.dumps({**self.claim, **settings, "code": source_sha256()}, sort_keys=True)


def partial_of(evidence: Path) -> Path:
    """Where blocks wait that are to become a file of evidence."""
    return evidence.with_name(f"{evidence.name}.partial")


def _shifted(progress: Progress | None, start: int, total: int) -> Progress | None:
    return None if progress is None else lambda done, _: progress(start + done, total)


def _joined(first: Certificates, second: Certificates) -> Certificates:
    return Certificates(
        **{name: torch.cat([getattr(first, name), getattr(second, name)]) for name in COLUMNS}
    )


def _first_size(images: Tensor) -> int:
    return FIRST_BLOCK if images.device.type == "cpu" else GPU_BLOCK


def _next_size(images: Tensor, size: int, seconds: float) -> int:
    """On a CPU about as many images as take `BLOCK_SECONDS`, but no leap from a block that was quick by chance."""
    if images.device.type != "cpu":
        return GPU_BLOCK
    wanted = int(size * BLOCK_SECONDS / max(seconds, 1e-3))
    return max(1, min(wanted, 8 * size, LARGEST_BLOCK))
