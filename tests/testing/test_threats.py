import pytest
import torch

from patchcert.testing import THREAT_CHECKS, ConformanceError, check_threat
from patchcert.threats import Patch, SparsePixels, shapes

GOOD = (
    Patch(2),
    Patch((2, 3), "corners"),
    Patch(shapes.diamond(4)),
    Patch(shapes.parallelogram(4), [(0, 0), (4, 4)]),
    Patch((6, 7)),
    SparsePixels(1),
    SparsePixels(3, "per-pixel"),
    SparsePixels(2, "per-value"),
)


@pytest.mark.parametrize("threat", GOOD, ids=str)
def test_our_threats_pass_every_check(threat):
    report = check_threat(threat)
    assert report.names == tuple(check.__name__ for check in THREAT_CHECKS)
    assert not report.failures


class Wrapped:
    """A 2x2 patch whose parts can be broken one by one."""

    inner = Patch(2)
    stamp = inner.stamp

    def placements(self, height, width):
        return self.inner.placements(height, width)

    def contains(self, clean, changed):
        return self.inner.contains(clean, changed)

    def sample(self, images, generator):
        return self.inner.sample(images, generator)

    def project(self, clean, changed):
        return self.inner.project(clean, changed)

    def to_dict(self):
        return {"kind": "wrapped"}


class DeniesTheCleanImage(Wrapped):
    def contains(self, clean, changed):
        return super().contains(clean, changed) & (clean != changed).flatten(1).any(dim=1)


class SamplesALargerPatch(Wrapped):
    def sample(self, images, generator):
        return Patch(3).sample(images, generator)


class SamplesWithoutGenerator(Wrapped):
    def sample(self, images, generator):
        return super().sample(images, torch.Generator().manual_seed(0))


class NeverSamplesTheLastRowAndColumn(Wrapped):
    def sample(self, images, generator):
        height, width = images.shape[2:]
        return Patch(2, [(top, left) for top in range(height - 2) for left in range(width - 2)]).sample(
            images, generator
        )


class SamplesNoExtremes(Wrapped):
    def sample(self, images, generator):
        changed = super().sample(images, generator)
        return torch.where(changed == images, images, changed.clamp(0.01, 0.99))


class ContainsABitMore(Wrapped):
    def contains(self, clean, changed):
        different = (clean != changed).any(dim=1).flatten(1).sum(dim=1)
        valid = ((changed >= 0) & (changed <= 1)).flatten(1).all(dim=1)
        return super().contains(clean, changed) | (valid & (different <= 5))


class ContainsNanAndLargeValues(Wrapped):
    def contains(self, clean, changed):
        return super().contains(clean, torch.where(clean == changed, clean, changed.nan_to_num().clamp(0, 1)))


class ProjectsWithoutClamping(Wrapped):
    def project(self, clean, changed):
        return torch.where(super().project(clean, changed) == clean, clean, changed)


class ProjectsToTheFirstPlacement(Wrapped):
    def project(self, clean, changed):
        member = super().contains(clean, changed)[:, None, None, None]
        return torch.where(member, changed, Patch(2, [(0, 0)]).project(clean, changed))


class DescribesAnother(Wrapped):
    def to_dict(self):
        return Patch(3).to_dict()


class ProjectsMembersElsewhere(Wrapped):
    def project(self, clean, changed):
        return torch.where(super().project(clean, changed) == clean, clean, 0.25)


BROKEN = {
    DeniesTheCleanImage: "the_clean_image_is_contained",
    SamplesALargerPatch: "samples_are_contained",
    SamplesWithoutGenerator: "samples_follow_the_generator_and_spare_the_images",
    NeverSamplesTheLastRowAndColumn: "samples_reach_every_placement",
    SamplesNoExtremes: "samples_reach_every_covered_value",
    ContainsABitMore: "every_filled_placement_is_contained_and_no_stray_pixel",
    ProjectsMembersElsewhere: "what_is_contained_is_its_own_projection",
    ContainsNanAndLargeValues: "values_that_are_no_pixels_are_not_contained",
    ProjectsWithoutClamping: "projections_are_contained_and_stay_where_they_are",
    ProjectsToTheFirstPlacement: "projections_are_nearer_than_any_sample",
    DescribesAnother: "plain_types_give_an_equal_threat",
}


def test_a_correct_threat_of_another_class_passes():
    assert not check_threat(Wrapped()).failures


@pytest.mark.parametrize(("broken", "check"), BROKEN.items())
def test_a_broken_threat_is_caught_by_the_check_that_is_about_it(broken, check):
    the_check = [known for known in THREAT_CHECKS if known.__name__ == check]
    with pytest.raises(ConformanceError, match=f"FAILS  {check}"):
        check_threat(broken(), checks=the_check)


def test_every_check_catches_some_broken_threat():
    assert {check.__name__ for check in THREAT_CHECKS} == set(BROKEN.values())
