"""Votes of a trained run, counted as planned, block after block of images; an interruption loses nothing."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator

from patchcert.certificates.ablation import RandomAblation
from patchcert.data import Dataset, Split
from patchcert.errors import RunError
from patchcert.files import atomic_write, sha256
from patchcert.papers.chiang2020.ablation_evidence import Rules, VotedRows, vote_columns
from patchcert.papers.chiang2020.ablation_plan import VotePlan
from patchcert.papers.chiang2020.attacking import drawn_images
from patchcert.progress import Progress
from patchcert.train.environment import describe_machine, device_name
from patchcert.train.run_folder import EVIDENCE, Run
from patchcert.train.strategies import Ablated
from patchcert.train.strategy import derived_seed

BLOCK = 40
KEEP_SECONDS = 5.0
CPU_BATCH = 1_100
CUDA_IMAGES = {"cnn2_ablation": 4}


def vote_run(
    run: Run, dataset: Dataset, plan: VotePlan, device: torch.device, progress: Progress | None = None
) -> VotedRows:
    """Count the votes of the run's model as planned, from where it stopped, and leave them as evidence."""
    strategy = run.spec.strategy
    if not isinstance(strategy, Ablated):
        raise RunError(f"{run.path} has not learnt to vote: its strategy is {strategy.kind!r}")
    index = drawn_images(len(dataset.test), plan.images or len(dataset.test), plan.seed)
    images = dataset.test[index].to(device)
    ablation = _ablation(run, plan, strategy.retained, device)
    sums = json.dumps(dict(dataset.checksums), sort_keys=True)
    origin = f"{sha256(run.weights)} on {device_name(device)} by {ablation.batch_size} of {sums}"
    kept = _count(run, plan, ablation, images, origin, progress)
    pixels = images.images.shape[2] * images.images.shape[3]
    rules = Rules(pixels, strategy.retained, plan.estimation, plan.error_rate)
    columns = vote_columns(rules, index.numpy(), images.labels.cpu().numpy(), kept.selected, kept.votes)
    meta = _meta(run, dataset, plan, ablation, device) | {"pixels": pixels, "seconds": round(kept.seconds, 3)}
    run.write_evidence(plan.name, columns, meta)
    _Kept.file(run, plan).unlink(missing_ok=True)
    return VotedRows.read(run.path / EVIDENCE / f"{plan.name}.npz")


def _count(
    run: Run,
    plan: VotePlan,
    ablation: RandomAblation,
    images: Split,
    origin: str,
    progress: Progress | None,
) -> "_Kept":
    """All votes. What is counted is kept every few seconds, and in any case when it is cut short."""
    kept, kept_at = _Kept.read(run, plan, origin), time.monotonic()
    try:
        while len(kept) < len(images):
            kept = kept.extended(*_block(ablation, images, len(kept), plan.seed))
            if progress is not None:
                progress(len(kept), len(images))
            if time.monotonic() - kept_at > KEEP_SECONDS:
                kept.write(run, plan)
                kept_at = time.monotonic()
    finally:
        kept.write(run, plan)
    return kept


def _ablation(run: Run, plan: VotePlan, retained: int, device: torch.device) -> RandomAblation:
    """Batches that hold whole images on a GPU, so that a block fills them without a rest."""
    samples = plan.selection + plan.estimation
    batch = CUDA_IMAGES.get(run.spec.model.name, 1) * samples if device.type == "cuda" else CPU_BATCH
    return RandomAblation(
        run.model(device), retained, plan.selection, plan.estimation, plan.error_rate, batch, plan.precision
    )


def _block(
    ablation: RandomAblation, images: Split, start: int, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], float]:
    """Selected classes and fresh votes of the images from `start` on, and the seconds that took.

    The draws of a block depend on the seed and the block alone, so that an interruption changes nothing.
    """
    began = time.perf_counter()
    generator = Generator(images.images.device).manual_seed(derived_seed(seed, "votes", start))
    ballots = ablation.ballots(images[start : start + BLOCK].floats(), generator)
    selected, votes = ballots.selected.cpu().numpy(), ballots.estimation.cpu().numpy()
    return selected, votes, time.perf_counter() - began


@dataclass(frozen=True, eq=False, slots=True)
class _Kept:
    """What has been counted so far, in the folder of the run until it is complete.

    The origin names weights, device and batches: counts of another are not gone on with.
    """

    selected: NDArray[np.int64]
    votes: NDArray[np.int64]
    seconds: float
    origin: str

    def __len__(self) -> int:
        return len(self.selected)

    @staticmethod
    def file(run: Run, plan: VotePlan) -> Path:
        return run.path / f".{plan.name}.npz"

    @classmethod
    def read(cls, run: Run, plan: VotePlan, origin: str) -> "_Kept":
        """Counts of this very origin, or none."""
        file = cls.file(run, plan)
        if file.is_file():
            with np.load(file, allow_pickle=False) as stored:
                facts = json.loads(str(stored["meta"]))
                if facts["origin"] == origin:
                    return cls(stored["selected"], stored["votes"], facts["seconds"], origin)
        return cls(np.zeros(0, np.int64), np.zeros((0, 0), np.int64), 0.0, origin)

    def extended(self, selected: NDArray[np.int64], votes: NDArray[np.int64], seconds: float) -> "_Kept":
        before = self.votes.reshape(-1, votes.shape[1])
        return _Kept(
            np.concatenate([self.selected, selected]),
            np.concatenate([before, votes]),
            self.seconds + seconds,
            self.origin,
        )

    def write(self, run: Run, plan: VotePlan) -> None:
        meta = np.array(json.dumps({"origin": self.origin, "seconds": self.seconds}))
        with atomic_write(self.file(run, plan)) as stream:
            np.savez(stream, selected=self.selected, votes=self.votes, meta=meta)


def _meta(
    run: Run, dataset: Dataset, plan: VotePlan, ablation: RandomAblation, device: torch.device
) -> dict[str, Any]:
    return {
        "kind": "votes",
        "plan": plan.to_dict(),
        "retained": ablation.retained,
        "confidence": 1 - plan.error_rate,
        "settings": {"batch_size": ablation.batch_size, "block": BLOCK, "precision": ablation.precision},
        "seed": plan.seed,
        "weights_sha256": sha256(run.weights),
        "data": {
            "name": dataset.name,
            "split": "test",
            "images": plan.images,
            "test_images": len(dataset.test),
            "limit": None,
            "sha256": dict(dataset.checksums),
        },
        **describe_machine(device),
    }
