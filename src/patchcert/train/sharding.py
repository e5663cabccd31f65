"""Certificates shared out over several processes: each proves its own images, and all get all results."""

import torch
from torch import Tensor, nn

from patchcert.certificates import Certificates, certify
from patchcert.threats import Patch, SparsePixels
from patchcert.train.distributed import World


def certify_sharded(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    threat: Patch | SparsePixels,
    world: World,
    dtype: torch.dtype | None = None,
) -> Certificates:
    """The certificates of all images, the same in every process and however many there are."""
    if world.size == 1:
        return certify(model, images, labels, threat, dtype=dtype)
    rows = world.rows(len(labels))
    own = certify(model, images[rows], labels[rows], threat, dtype=dtype) if rows.start < rows.stop else None
    count, classes = len(labels), _classes(model, images)
    margins = images.new_zeros(count, classes, dtype=torch.float64)
    facts = torch.zeros(count, 4, dtype=torch.int64, device=images.device)
    if own is not None:
        margins[rows] = own.margins.to(margins)
        columns = (own.certified, own.predictions, *own.worst_placement.unbind(dim=1))
        facts[rows] = torch.stack([column.to(facts) for column in columns], dim=1)
    world.sum_in_place([margins, facts])
    return Certificates(
        certified=facts[:, 0].bool(),
        margins=margins.to(dtype or torch.promote_types(images.dtype, torch.float32)),
        worst_placement=facts[:, 2:],
        predictions=facts[:, 1],
        labels=labels,
    )


def _classes(model: nn.Module, images: Tensor) -> int:
    with torch.no_grad():
        return model(images[:1]).shape[1]
