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

from patchcert.bounds.lowering import FUNCTION_RULES, LAYER_RULES
from patchcert.certify.checks import bound_dtype
from patchcert.certify.intervals import Certificates, IntervalCertifier
from patchcert.files import atomic_write
from patchcert.progress import Progress
from patchcert.threats import Patch, SparsePixels
from patchcert.train.environment import source_sha256

FIRST_BLOCK, LARGEST_BLOCK = 64, 4096
BLOCK_SECONDS = 10.0
FIXED_BLOCK, GPU_BLOCK = 256, 2048
"""In float64 and on a GPU sums depend on how many images are bounded at once: there the clock must have no part."""
CLAIM, SECONDS = "claim", "seconds"
COLUMNS = tuple(column.name for column in fields(Certificates))


@final
@dataclass(frozen=True, slots=True)
class Proof:
    """Certificates, and how long they took, earlier calls that were interrupted included."""

    certificates: Certificates
    seconds: float = 0.0

    def __len__(self) -> int:
        return len(self.certificates.labels)


@final
@dataclass(frozen=True)
class Proving:
    """Certifies in blocks, which wait in the file `partial` until `discard` is called; None keeps nothing.

    `claim` says what the certificates are about: weights, data, threat, settings, machine. Blocks of another claim, or
    of other code of this package, are not taken up again. See `has_foreign_code`.
    """

    certifier: IntervalCertifier
    partial: Path | None = None
    claim: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def towards(
        cls, evidence: Path | None, certifier: IntervalCertifier, model: nn.Module, claim: Mapping[str, Any]
    ) -> "Proving":
        """Blocks wait beside the file of evidence that they are to become, unless the model has code of others.

        What others register may build another network for the same weights, so that the claim spells it out.
        """
        partial = None if evidence is None or has_foreign_code(model) else partial_of(evidence)
        return cls(certifier, partial, {**claim, "model": str(model)})

    def certify(
        self,
        model: nn.Module,
        images: Tensor,
        labels: Tensor,
        threat: Patch | SparsePixels,
        progress: Progress | None = None,
    ) -> Proof:
        """Certificates of all images; blocks that were kept are not proven again."""
        proof, total, blocks = self.kept(labels), len(labels), self._blocks(model, images)
        if progress is not None:
            progress(len(proof) if proof else 0, total)
        while proof is None or len(proof) < total:
            start, began = len(proof) if proof else 0, time.perf_counter()
            chosen = slice(start, start + blocks.size)
            certifier = replace(self.certifier, progress=_shifted(progress, start, total))
            block = certifier.certify(model, images[chosen], labels[chosen], threat)
            seconds = time.perf_counter() - began
            proof = _extended(proof, block, seconds)
            self._keep(proof)
            blocks = blocks.after(seconds)
        return proof

    def kept(self, labels: Tensor) -> Proof | None:
        """What an interrupted call has left of these certificates, where it has left something."""
        if self.partial is None or not self.partial.is_file() or not source_sha256():
            return None
        try:
            with safe_open(self.partial, framework="pt") as file:
                noted = file.metadata() or {}
                if noted.get(CLAIM) != self._claim():
                    return None
                found = Certificates(**{name: file.get_tensor(name).to(labels.device) for name in COLUMNS})
        except (SafetensorError, OSError):
            return None
        is_theirs = len(found.labels) <= len(labels) and found.labels.equal(labels[: len(found.labels)])
        return Proof(found, float(noted[SECONDS])) if is_theirs else None

    def discard(self) -> None:
        """Remove the blocks, once what they prove is written down elsewhere."""
        if self.partial is not None:
            self.partial.unlink(missing_ok=True)

    def _keep(self, proof: Proof) -> None:
        if self.partial is None:
            return
        columns = {name: getattr(proof.certificates, name).contiguous().cpu() for name in COLUMNS}
        notes = {CLAIM: self._claim(), SECONDS: repr(proof.seconds)}
        with atomic_write(self.partial) as stream:
            stream.write(save(columns, notes))

    def _claim(self) -> str:
        settings = {"dtype": str(self.certifier.dtype), "verdicts_only": self.certifier.verdicts_only}
        return json.dumps({**self.claim, **settings, "code": source_sha256()}, sort_keys=True)

    def _blocks(self, model: nn.Module, images: Tensor) -> "_Blocks":
        if images.device.type != "cpu":
            return _Blocks(GPU_BLOCK, adapts=False)
        if bound_dtype(model, images, self.certifier.dtype) != torch.float32:
            return _Blocks(FIXED_BLOCK, adapts=False)
        return _Blocks(FIRST_BLOCK, adapts=True)


@final
@dataclass(frozen=True, slots=True)
class _Blocks:
    """How many images the next block has."""

    size: int
    adapts: bool

    def after(self, seconds: float) -> "_Blocks":
        """About as many images as take `BLOCK_SECONDS`, but no leap from a block that was quick by chance."""
        if not self.adapts:
            return self
        wanted = int(self.size * BLOCK_SECONDS / max(seconds, 1e-3))
        return replace(self, size=max(1, min(wanted, 8 * self.size, LARGEST_BLOCK)))


def partial_of(evidence: Path) -> Path:
    """Where blocks wait that are to become a file of evidence."""
    return evidence.with_name(f"{evidence.name}.partial")


def has_foreign_code(model: nn.Module) -> bool:
    """Whether layers, or rules that they may use, are of neither PyTorch nor this package.

    No sum tells whether such code has changed since an interruption, so that nothing of its proofs may be kept.
    """
    types = {type(layer) for layer in model.modules()}
    rules = [*FUNCTION_RULES.values(), *(LAYER_RULES[kind] for kind in types & LAYER_RULES.keys())]
    return any(each.__module__.partition(".")[0] not in ("torch", "patchcert") for each in (*types, *rules))


def _shifted(progress: Progress | None, start: int, total: int) -> Progress | None:
    return None if progress is None else lambda done, _: progress(start + done, total)


def _extended(proof: Proof | None, block: Certificates, seconds: float) -> Proof:
    if proof is None:
        return Proof(block, seconds)
    pairs = {name: [getattr(proof.certificates, name), getattr(block, name)] for name in COLUMNS}
    joined = Certificates(**{name: torch.cat(pair) for name, pair in pairs.items()})
    return Proof(joined, proof.seconds + seconds)
