"""The settings of a defense, chosen against the attack that does not know it."""

from collections.abc import Iterable

import torch
from torch import Generator, Tensor, nn

from patchcert.attacks.base import Attack, Task
from patchcert.attacks.judging import check_batch, require_contained
from patchcert.bounds import precise_arithmetic
from patchcert.defenses import Defense, SearchResult, search_defense
from patchcert.progress import Progress
from patchcert.threats import Threat


@precise_arithmetic()
def tune_defense(
    attack: Attack,
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    threat: Threat,
    defenses: Iterable[Defense],
    *,
    largest_drop: float = 0.02,
    generator: Generator | None = None,
    progress: Progress | None = None,
) -> SearchResult:
    """Every defense tried on validation images and on the same images as attacked on the undefended model.

    Best is what withstands this weak attack and costs at most `largest_drop` of clean accuracy; the images
    must not be those that the defense is later judged on.
    """
    check_batch(model, images, labels)
    task = Task(images, labels, threat, generator or torch.Generator().manual_seed(0))
    attacked = attack.exhaustive().propose(model, task).images
    require_contained(threat, images, attacked)
    return search_defense(
        model,
        defenses,
        images,
        attacked,
        labels,
        largest_drop=largest_drop,
        batch_size=attack.batch_size,
        progress=progress,
    )
