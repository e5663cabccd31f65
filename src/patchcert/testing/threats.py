"""What every threat promises about its members, samples and projections."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from patchcert.testing.brute_force import PlacedThreat, placed_stamps
from patchcert.testing.conformance import ConformanceReport, require, run_checks, seeded
from patchcert.threats import Threat, threat_from_dict


@dataclass(frozen=True)
class ThreatUnderTest:
    """A threat and the (channels, height, width) of the images it is tried on."""

    threat: Threat
    shape: tuple[int, int, int]
    device: str = "cpu"

    def images(self, count: int) -> Tensor:
        """Random images, the same at every call."""
        return torch.rand(count, *self.shape, generator=seeded(), dtype=torch.float64).to(self.device)

    def grey(self, count: int) -> Tensor:
        """Images of 1/2, which no sample can be mistaken for."""
        return torch.full((count, *self.shape), 0.5, dtype=torch.float64, device=self.device)

    def sample(self, images: Tensor, seed: int = 0) -> Tensor:
        """One random member per image, reproducible."""
        return self.threat.sample(images, seeded(seed))

    @property
    def placed(self) -> dict[tuple[int, int], Annotated[Tensor, "h w"]]:
        """True under the stamp at each placement, by its corner; empty where the threat has no placements."""
        if not isinstance(self.threat, PlacedThreat):
            return {}
        return placed_stamps(self.threat, self.shape)


def the_clean_image_is_contained(subject: ThreatUnderTest) -> None:
    """An attacker need not change anything."""
    images = subject.images(8)
    require(subject.threat.contains(images, images).all(), "a clean image is not contained")


def samples_are_contained(subject: ThreatUnderTest) -> None:
    """Whatever `sample` draws, `contains` accepts."""
    images = subject.images(200)
    found = subject.threat.contains(images, subject.sample(images))
    require(found.all(), f"{int((~found).sum())} of 200 samples are not contained")


def samples_follow_the_generator_and_spare_the_images(subject: ThreatUnderTest) -> None:
    """The same seed draws the same members, another seed others, and the clean images stay as they were."""
    images = subject.images(50)
    kept = images.clone()
    first, again, other = subject.sample(images, 1), subject.sample(images, 1), subject.sample(images, 2)
    require(torch.equal(first, again), "two samples from the same seed differ")
    require(not torch.equal(first, other), "samples from different seeds are the same")
    require(torch.equal(images, kept), "sampling changed the clean images")
    require(
        first.dtype == images.dtype and first.device == images.device, "a sample has another dtype or device"
    )


def samples_reach_every_placement(subject: ThreatUnderTest) -> None:
    """Every allowed placement is drawn, up to the last row and column."""
    if not subject.placed:
        return
    images = subject.grey(25 * len(subject.placed))
    changed = (subject.sample(images) != images).any(dim=1).cpu()
    for corner, mask in subject.placed.items():
        drawn = (changed == mask).flatten(1).all(dim=1)
        require(drawn.any(), f"in {len(images)} samples the placement {corner} was never filled")


def samples_reach_every_covered_value(subject: ThreatUnderTest) -> None:
    """Every channel of every pixel that may change is changed by some sample, at the extremes too."""
    images = subject.grey(4000)
    samples = subject.sample(images)
    allowed = torch.ones(subject.shape, dtype=torch.bool)
    if subject.placed:
        allowed = torch.stack([*subject.placed.values()]).any(dim=0).expand(subject.shape)
    for value in (0.0, 1.0):
        missing = allowed & ~(samples == value).any(dim=0).cpu()
        require(
            not missing.any(),
            f"no sample sets {missing.nonzero()[:3].tolist()} (channel, row, column) to {value}",
        )


def every_filled_placement_is_contained_and_no_stray_pixel(subject: ThreatUnderTest) -> None:
    """The stamp at each placement is a member; with one pixel more, only if another placement covers all."""
    if not subject.placed:
        return
    masks, clean = torch.stack([*subject.placed.values()]), subject.grey(1)
    for corner, mask in subject.placed.items():
        for stray in (None, *_some_pixels(~mask)):
            wanted = mask.clone()
            if stray is not None:
                wanted[stray] = True
            expected = not (wanted & ~masks).flatten(1).any(dim=1).all()
            found = bool(subject.threat.contains(clean, torch.where(wanted.to(clean.device), 1.0, clean)))
            what = f"the placement {corner}" + ("" if stray is None else f" with the stray pixel {stray}")
            require(found == expected, f"{what}: contained is {found}, expected {expected}")


def what_is_contained_is_its_own_projection(subject: ThreatUnderTest) -> None:
    """An image is a member exactly if projecting leaves it as it is: a member, one value more, or all new."""
    images = subject.images(60)
    samples = subject.sample(images)
    stray = samples.clone()
    places = torch.arange(len(images), device=images.device)
    stray.flatten(1)[places, (places * 7919) % images[0].numel()] = 0.125
    for name, changed in (
        ("sample", samples),
        ("sample with one value more", stray),
        ("new image", images.flip(0)),
    ):
        own = (subject.threat.project(images, changed) == changed).flatten(1).all(dim=1)
        inside = subject.threat.contains(images, changed)
        require(torch.equal(own, inside), f"a {name} is contained or its own projection, but not both")


def values_that_are_no_pixels_are_not_contained(subject: ThreatUnderTest) -> None:
    """A member has all its pixels in [0, 1] and no NaN."""
    images = subject.grey(20)
    samples = subject.sample(images)
    for value in (-0.001, 1.001, float("nan"), float("inf")):
        wrong = torch.where(samples != images, value, images)
        require(
            not subject.threat.contains(images, wrong).any(), f"an image with the value {value} is contained"
        )


def projections_are_contained_and_stay_where_they_are(subject: ThreatUnderTest) -> None:
    """Projecting gives a member, and projecting a member gives that member."""
    images = subject.images(50)
    noise = torch.randn(images.shape, generator=seeded(3), dtype=torch.float64).to(images.device)
    projected = subject.threat.project(images, images + noise)
    require(subject.threat.contains(images, projected).all(), "a projection is not contained")
    again = subject.threat.project(images, projected)
    require(torch.equal(projected, again), "projecting twice is not the same as projecting once")
    samples = subject.sample(images)
    require(torch.equal(subject.threat.project(images, samples), samples), "projecting a member changes it")


def projections_are_nearer_than_any_sample(subject: ThreatUnderTest) -> None:
    """No other member that was found is nearer to the changed image."""
    images = subject.images(50)
    changed = images + torch.randn(images.shape, generator=seeded(4), dtype=torch.float64).to(images.device)
    nearest = _distances(subject.threat.project(images, changed), changed)
    for seed in range(20):
        sample = subject.sample(images, seed)
        moved = torch.where(sample != images, changed.clamp(0, 1), images)
        for member in (sample, moved):
            nearer = _distances(member, changed) < nearest - 1e-9
            require(not nearer.any(), "a member is nearer to the changed image than its projection")


def plain_types_give_an_equal_threat(subject: ThreatUnderTest) -> None:
    """`to_dict` holds everything that a known kind of threat is."""
    plain = subject.threat.to_dict()
    if plain.get("kind") in ("patch", "patches", "sparse"):
        require(threat_from_dict(plain) == subject.threat, f"{plain} describes another threat")


THREAT_CHECKS = (
    the_clean_image_is_contained,
    samples_are_contained,
    samples_follow_the_generator_and_spare_the_images,
    samples_reach_every_placement,
    samples_reach_every_covered_value,
    every_filled_placement_is_contained_and_no_stray_pixel,
    what_is_contained_is_its_own_projection,
    values_that_are_no_pixels_are_not_contained,
    projections_are_contained_and_stay_where_they_are,
    projections_are_nearer_than_any_sample,
    plain_types_give_an_equal_threat,
)


def check_threat(
    threat: Threat,
    *,
    shape: tuple[int, int, int] = (3, 6, 7),
    device: str = "cpu",
    checks: Sequence[Callable[[ThreatUnderTest], None]] = THREAT_CHECKS,
) -> ConformanceReport:
    """Raise a ConformanceError unless the threat keeps its promises on images of this (c, h, w) shape."""
    return run_checks(f"threat {threat}", ThreatUnderTest(threat, shape, device), checks)


def _some_pixels(free: Tensor) -> list[tuple[int, int]]:
    """The first, the middle and the last free pixel."""
    places = [(row, column) for row, column in free.nonzero().tolist()]
    return sorted({places[0], places[len(places) // 2], places[-1]}) if places else []


def _distances(first: Tensor, second: Tensor) -> Tensor:
    return (first - second).square().flatten(1).sum(dim=1)
