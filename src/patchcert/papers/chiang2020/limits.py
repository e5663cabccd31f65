"""What no weights can reach: an upper bound of certified accuracy against sparse changes, from the images alone.

A certificate bounds every neuron of the first layer by itself, as if each could be moved by k pixels of its own choice.
Where the intervals of two images meet at every neuron, features exist that both images allow. Certificates of both
would give these features two labels; so of images of different labels that meet, one at most is certified.

Two images meet, whatever the weights, if over all pixels that a neuron sees the shares d / (1 + d) sum up to at most k,
where d is how far the images differ at a pixel. Say the neuron is larger on the first image: by at most the sum of
|w| d over the pixels where w pulls that way. There the first image can make it fall, and the second rise, by a total
of |w| (1 + d). The k largest falls are no less than the sum of all falls, each times its share, and so are the
k largest rises; both sums together are the sum of |w| d. This is about the bound `tight`. Under `per-pixel`, which is
the paper's, falls and rises are |w| each, a total of 2 |w|, so that the shares are d / 2.
"""

import json
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from patchcert.data import load_dataset
from patchcert.defenses.watermarking import window_sums
from patchcert.tensors import Images, Labels
from patchcert.threats import SparsePixels

Conflicts = Annotated[Tensor, "n n"]
"""True for two images of which one at most is certified."""


def conflicts(images: Images, labels: Labels, threat: SparsePixels, kernel: int) -> Conflicts:
    """Of grey images, for a first layer of square kernels of odd side, with zeros around the image and any stride."""
    is_tight = threat.bound == "tight"
    # A sum of m shares of at most 1/2 is off by less than m^2 u / 2, u = eps / 2: in float32 by 1e-3 for 13x13 kernels.
    tolerance = max(1e-3, kernel**4 * torch.finfo(images.dtype).eps / 4)
    rows = [_largest_sum(images, image, kernel, is_tight) <= threat.pixels - tolerance for image in images]
    return torch.stack(rows) & (labels[:, None] != labels)


def _largest_sum(
    images: Images, image: Annotated[Tensor, "1 h w"], kernel: int, is_tight: bool
) -> Annotated[Tensor, "n"]:
    """Over all places of the kernel, the largest sum of shares between the image and each of the others."""
    apart = (images - image).abs()[:, 0]
    shares = apart / (1 + apart) if is_tight else apart / 2
    return window_sums(F.pad(shares, (kernel // 2,) * 4), kernel).flatten(1).amax(dim=1)


def most_certified(conflicts: Conflicts) -> int:
    """The most images that can be certified: as many as groups in which each image conflicts with every other.

    Groups are found greedily, so the true number may be less.
    """
    left = torch.ones(len(conflicts), dtype=torch.bool)
    groups = 0
    for first in conflicts.sum(dim=1).argsort(descending=True).tolist():
        if left[first]:
            _remove_group(conflicts, first, left)
            groups += 1
    return groups


def _remove_group(conflicts: Conflicts, first: int, left: Annotated[Tensor, "n"]) -> None:
    """Takes out of those left an image, and others as long as there are any that conflict with all of the group."""
    left[first] = False
    candidates = conflicts[first] & left
    while candidates.any():
        index = candidates.nonzero().flatten()
        chosen = int(index[(conflicts[index] & candidates).sum(dim=1).argmax()])
        left[chosen] = False
        candidates &= conflicts[chosen] & left


def main(arguments: Sequence[str] | None = None) -> None:
    """Print, as JSON, how many test images can be certified against any number of pixels, group by group of images."""
    parser = ArgumentParser(
        description="An upper bound of certified accuracy against sparse changes, for any weights."
    )
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--pixels", type=int, default=4)
    parser.add_argument("--bound", choices=("tight", "per-pixel"), default="tight")
    parser.add_argument("--kernel", type=int, default=3)
    parser.add_argument("--group", type=int, default=2000, help="Images that are compared with each other.")
    options = parser.parse_args(arguments)
    test = load_dataset(options.data, options.data_dir).test
    groups = zip(test.floats().split(options.group), test.labels.split(options.group), strict=True)
    threat = SparsePixels(options.pixels, options.bound)
    most = [most_certified(conflicts(*group, threat, options.kernel)) for group in groups]
    found = {"images": len(test), "most certified": sum(most), "by group": most}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
