"""Random boxes of images, points in them, and networks to bound there."""

import torch
from hypothesis import strategies as st

from patchcert.bounds import Interval, Rounding
from patchcert.testing.conformance import seeded
from strategies import image_batches, image_shapes, networks, seeds

OUTWARD = Rounding.outward(torch.float64)


def box_around(images, seed, reach=0.3):
    """A random box inside [0, 1] that holds the images; some sides are single points."""
    below, above = torch.rand(2, *images.shape, generator=seeded(seed), dtype=images.dtype) * reach
    return Interval((images - below.round(decimals=1)).clamp(min=0), (images + above).clamp(max=1))


def points_of(box, seed, count=6):
    """Corners and inner points of the box."""
    for index in range(count):
        mix = torch.rand(box.shape, generator=seeded(seed + index), dtype=box.lower.dtype)
        yield torch.lerp(box.lower, box.upper, mix if index % 2 else mix.round())


def contains(outer, inner, tolerance=0.0):
    below, above = (outer.lower <= inner.lower + tolerance), (inner.upper <= outer.upper + tolerance)
    return bool(below.all() and above.all())


@st.composite
def networks_with_boxes(draw, **options):
    shape = draw(image_shapes(7))
    network, images = draw(networks(shape, **options)), draw(image_batches(shape))
    return network, box_around(images, draw(seeds()))


def boxes_of(case, count=6):
    """The boxes of the first image of a case at its first placements."""
    corners = case.threat.placements(*case.images.shape[2:]).corners
    boxes = case.threat.boxes(case.images[:1], corners[:count])
    return Interval(boxes.lower[0], boxes.upper[0])
