"""Certificates shared out over several processes: each proves its own images, and all get all results."""

import torch
from torch import nn

from patchcert.certificates import AnyThreat, Certificates, certify
from patchcert.tensors import Images, Labels
from patchcert.train.distributed import World


def certify_sharded(
    model: nn.Module, images: Images, labels: Labels, threat: AnyThreat, world: World
) -> Certificates:
    """Verdicts and predictions for all images, the same in every process and however many there are."""
    if world.size == 1:
        return certify(model, images, labels, threat)
    rows = world.rows(len(labels))
    facts = torch.zeros(len(labels), 2, dtype=torch.int64, device=images.device)
    if rows.start < rows.stop:
        own = certify(model, images[rows], labels[rows], threat)
        facts[rows] = torch.stack([own.certified.long(), own.predictions], dim=1)
    world.sum_in_place([facts])
    return Certificates(facts[:, 0].bool(), facts[:, 1], labels)
