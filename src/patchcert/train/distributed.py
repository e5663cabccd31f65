"""Several processes that train or certify one model: each takes its rows of the images, and all get the sums."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from patchcert.certificates import AnyThreat, certify
from patchcert.errors import InvalidInput, RunError
from patchcert.tensors import Images, Labels

TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class World:
    """This process's number and the number of processes; one alone unless `torchrun` started several."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that writes files and talks."""
        return self.rank == 0

    def rows(self, count: int) -> slice:
        """The rows of `count` that belong to this process; shares differ by at most one row."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def sum_in_place(self, tensors: Sequence[Tensor]) -> None:
        """Every tensor becomes its sum over all processes, by one message per kind of number."""
        if self.size == 1:
            return
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            group = [tensor for tensor in tensors if tensor.dtype == dtype]
            joined = torch.cat([tensor.reshape(-1) for tensor in group])
            with lost_processes_named():
                dist.all_reduce(joined)
            for tensor, part in zip(group, joined.split([t.numel() for t in group]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def agree(self, is_well: bool, device: torch.device) -> bool:
        """Whether all is well in every process."""
        failures = torch.tensor(float(not is_well), device=device)
        self.sum_in_place([failures])
        return not failures.item()


ALONE = World()
"""One process that does everything."""


@contextmanager
def lost_processes_named() -> Iterator[None]:
    """Turns the failure of a collective operation into one message that says what it means and what to do."""
    try:
        yield
    except RuntimeError as error:
        first = str(error).strip().splitlines()[0]
        raise RunError(
            f"another process of this run has ended or no longer answers ({first})",
            hint="see that process's own message; resume from the last checkpoint with --resume",
        ) from error


@contextmanager
def joined_world(device: torch.device) -> Iterator[World]:
    """The world that `torchrun` announced in RANK and WORLD_SIZE, joined on entry and left on exit."""
    world = announced_world()
    if world.size == 1:
        yield world
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with lost_processes_named():
        dist.init_process_group(backend, rank=world.rank, world_size=world.size, timeout=TIMEOUT)
    try:
        yield world
    finally:
        dist.destroy_process_group()


def announced_world() -> World:
    """Rank and size from the environment; one process where it says nothing."""
    size, rank = os.environ.get("WORLD_SIZE", "1"), os.environ.get("RANK", "0")
    if not (size.isdecimal() and rank.isdecimal() and int(rank) < int(size)):
        raise InvalidInput(
            f"RANK={rank!r} and WORLD_SIZE={size!r} do not describe a process of several",
            hint="start the processes with torchrun",
        )
    return World(int(rank), int(size))


def local_device(device: torch.device) -> torch.device:
    """The GPU of this process where several share a machine: `cuda` becomes cuda:LOCAL_RANK."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return device


@dataclass(frozen=True, slots=True)
class Accuracies:
    """Shares of images that are classified correctly, and that are certified."""

    clean_accuracy: float
    certified_accuracy: float


def shared_accuracies(
    model: nn.Module, images: Images, labels: Labels, threat: AnyThreat, world: World
) -> Accuracies:
    """The same in every process and however many there are: each certifies its own rows, and counts are summed."""
    rows, counts = world.rows(len(labels)), torch.zeros(2, dtype=torch.float64, device=images.device)
    if rows.start < rows.stop:
        found = certify(model, images[rows], labels[rows], threat, verdicts_only=True)
        correct = found.predictions == found.labels
        counts += torch.stack([correct.sum(), found.certified.sum()])
    world.sum_in_place([counts])
    clean, certified = (counts / len(labels)).tolist()
    return Accuracies(clean, certified)
