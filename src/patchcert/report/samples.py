"""Which images a page shows, and their certificate maps and attacked versions."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from patchcert.certificates import placement_margins
from patchcert.data import Split
from patchcert.report.summary import (
    AttackedImage,
    AttackRows,
    Box,
    CertificateMap,
    CertificateRows,
    Floats,
    Integers,
)
from patchcert.threats import Patch


def telling_rows(rows: CertificateRows, count: int) -> Integers:
    """Rows over the whole range of margins: proofs from the widest to the narrowest, then failures likewise.

    Half of the rows are certified and half are not, as far as there are enough of either.
    """
    order = np.argsort(-rows.margin, kind="stable")
    proven, unproven = order[rows.certified[order]], order[~rows.certified[order]]
    failures = min(len(unproven), max(count // 2, count - len(proven)))
    return np.concatenate([_spread(proven, count - failures), _spread(unproven, failures)])


def _spread(ordered: Integers, count: int) -> Integers:
    """So many entries at even distances, the first and the last among them; all where there are fewer."""
    if len(ordered) <= count:
        return ordered
    return ordered[np.linspace(0, len(ordered) - 1, count).round().astype(int)]


def certificate_maps(
    model: nn.Module, images: Split, rows: CertificateRows, chosen: Integers
) -> list[CertificateMap]:
    """The certificate of the chosen rows at every placement; none for threats without placements."""
    threat = rows.threat
    if not isinstance(threat, Patch) or not len(chosen):
        return []
    split = images[torch.from_numpy(rows.index[chosen])]
    device = next(model.parameters()).device
    margins = placement_margins(model, split.floats().to(device), split.labels.to(device), threat)
    grids = _grids(_least(margins.cpu(), split.labels), threat, split.images.shape[-2:])
    return [
        CertificateMap(
            index=int(rows.index[row]),
            image=image.numpy(),
            label=int(rows.label[row]),
            prediction=int(rows.prediction[row]),
            certified=bool(rows.certified[row]),
            height=threat.height,
            width=threat.width,
            margins=grid,
        )
        for row, image, grid in zip(chosen.tolist(), split.images, grids, strict=True)
    ]


def attacked_images(
    images: Split, certificates: CertificateRows, attacks: Sequence[AttackRows], count: int
) -> list[AttackedImage]:
    """The first images that were right before the attack and wrong after it, as far as they were kept."""
    before = dict(zip(certificates.index.tolist(), certificates.prediction.tolist(), strict=True))
    found: dict[int, AttackedImage] = {}
    for rows in attacks:
        for at in np.flatnonzero(rows.succeeded).tolist():
            index = int(rows.index[at])
            is_new = index in rows.images and index not in found
            if is_new and before.get(index) == rows.label[at]:
                found[index] = _attacked(rows, at, images.images[index].numpy())
    return [found[index] for index in sorted(found)][:count]


def _attacked(rows: AttackRows, at: int, clean: NDArray[np.uint8]) -> AttackedImage:
    index = int(rows.index[at])
    attacked = np.rint(255 * rows.images[index]).astype(np.uint8)
    return AttackedImage(
        index=index,
        clean=clean,
        attacked=attacked,
        label=int(rows.label[at]),
        before=int(rows.label[at]),
        after=int(rows.prediction_after[at]),
        boxes=_boxes(rows, at, clean, attacked),
    )


def _boxes(
    rows: AttackRows, at: int, clean: NDArray[np.uint8], attacked: NDArray[np.uint8]
) -> tuple[Box, ...]:
    """The patch where it lies; for a threat without placements every changed pixel."""
    if isinstance(rows.threat, Patch) and rows.top[at] >= 0:
        return (Box(int(rows.top[at]), int(rows.left[at]), rows.threat.height, rows.threat.width),)
    changed = np.argwhere((clean != attacked).any(axis=0)).tolist()
    return tuple(Box(top, left, 1, 1) for top, left in changed)


def _least(margins: Tensor, labels: Tensor) -> Tensor:
    """The least margin (n, placements) over the other classes."""
    own = labels[:, None, None].expand(-1, margins.shape[1], 1)
    return margins.scatter(2, own, torch.inf).amin(dim=2)


def _grids(least: Tensor, threat: Patch, size: Sequence[int]) -> Floats:
    """The margins (n, rows, columns) by top-left corner; NaN where the patch may not be."""
    height, width = size
    grid = np.full((len(least), height - threat.height + 1, width - threat.width + 1), np.nan)
    top, left = threat.placements(height, width).corners.T.numpy()
    grid[:, top, left] = least.double().numpy()
    return grid
