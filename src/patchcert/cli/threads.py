"""How many CPU threads compute, and how they wait for each other."""

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

SPINS = "1000"
"""How often a thread of GNU's OpenMP looks whether there is work before it sleeps.

By default it does so for milliseconds. Where other programs use the cores, it then holds the very core that the thread
needs which it waits for, and work takes ten times as long; a thousand looks take microseconds, and on idle cores cost
nothing that can be measured.
"""


def wait_gently(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have threads sleep instead of spin, unless the user has chosen; it counts if torch is not imported yet."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPINS)


@contextmanager
def using_threads(count: int | None) -> Iterator[None]:
    """`count` threads for torch while this lasts; sums, and so trained weights, depend on their number."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def describe_threads() -> str:
    """What computes on the CPU, in a few words."""
    import torch

    spins = os.environ.get("GOMP_SPINCOUNT", os.environ.get("OMP_WAIT_POLICY", "OpenMP's own"))
    return f"torch {torch.__version__}, CPU threads: {torch.get_num_threads()}, waiting: {spins}"
