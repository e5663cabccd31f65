"""Patches for many images, and patches under random transforms: what is shown is always a member of the threat."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import patchcert as pc
from patchcert.attacks import Transform, TransformedAttack, UniversalAttack
from patchcert.attacks.printed import Printer, _grid
from patchcert.errors import InvalidInput
from patchcert.testing import check_attack
from patchcert.testing.conformance import seeded
from patchcert.testing.networks import randomise
from strategies import seeds, threats


class Mean(nn.Module):
    """Says 1 where the mean of the image exceeds one half."""

    def forward(self, images):
        mean = images.flatten(1).mean(dim=1)
        return torch.stack([0.5 - mean, mean - 0.5], dim=1)


def grey(count, level=0.47, size=6):
    return torch.full((count, 1, size, size), level), torch.zeros(count, dtype=torch.long)


@st.composite
def transforms(draw):
    values = st.sampled_from((0.0, 0.3, 0.9))
    return Transform(
        draw(st.sampled_from((0.0, 20.0, 180.0))), draw(values), draw(values), draw(st.integers(0, 3))
    )


@settings(deadline=None, max_examples=60)
@given(threats(5, 6), transforms(), seeds())
def test_whatever_is_drawn_is_a_member(patch, transform, seed):
    printer = Printer(patch, transform, seeded(seed))
    images = torch.rand(8, 2, 5, 6, generator=seeded(seed + 1))
    corners = transform.moved(printer.corners(images), printer.placements(images), seeded(seed))
    shown = printer.show(images, corners, printer.noise(images))
    assert patch.contains(images, shown).all()
    mask = patch.masks(images, corners)[:, None].expand_as(images)
    assert torch.equal(shown[~mask], images[~mask])


def test_without_a_transform_contents_are_shown_as_they_are():
    patch = pc.Patch(pc.shapes.diamond(5))
    printer, images = Printer(patch, Transform(), seeded()), torch.rand(4, 3, 6, 6, generator=seeded(1))
    corners, contents = printer.corners(images), printer.noise(images)
    shown = printer.show(images, corners, contents)
    for image, (top, left), content in zip(shown, corners.tolist(), contents, strict=True):
        window = image[:, top : top + 3, left : left + 3]
        assert torch.equal(window[:, patch.stamp], content[:, patch.stamp])


def sampled(content, angle, factor):
    grid = _grid(content, torch.tensor([angle]), torch.tensor([factor]))
    return F.grid_sample(content, grid, align_corners=False)


def test_patches_turn_about_their_centre_and_pixels_stay_squares():
    square = torch.rand(1, 2, 5, 5, generator=seeded())
    torch.testing.assert_close(sampled(square, math.pi / 2, 1.0), torch.rot90(square, 1, (2, 3)))
    long = torch.rand(1, 1, 2, 6, generator=seeded(1))
    torch.testing.assert_close(sampled(long, math.pi, 1.0), long.flip(2, 3))
    turned = sampled(long, math.pi / 2, 1.0)
    torch.testing.assert_close(turned[..., 2:4], torch.rot90(long[..., 2:4], 1, (2, 3)))
    assert (turned[..., :2] == 0).all()
    assert (turned[..., 4:] == 0).all()


def test_patches_grow_and_shrink_by_their_factor():
    dot = torch.zeros(1, 1, 6, 6)
    dot[..., 2:4, 2:4] = 1.0
    assert sampled(dot, 0.0, 2.0).sum() == pytest.approx(16, abs=1)
    full = sampled(torch.ones(1, 1, 6, 6), 0.0, 0.5)
    assert full.sum() == pytest.approx(9, abs=1)
    assert full[..., 0, 0] == 0


def test_what_a_smaller_patch_leaves_free_shows_the_image():
    printer = Printer(pc.Patch(6, [(1, 1)]), Transform(scale=0.9), seeded(3))
    images = torch.full((40, 1, 8, 8), 0.25)
    shown = printer.show(images, printer.corners(images), torch.ones(1, 1, 6, 6))
    corner = shown[:, 0, 1, 1]
    assert (corner == 0.25).any()
    assert (corner == 1.0).any()


def test_brightness_multiplies_and_shift_moves_within_what_is_allowed():
    printer = Printer(pc.Patch(2), Transform(brightness=0.5), seeded())
    images = torch.zeros(200, 1, 4, 4)
    levels = printer.show(images, printer.corners(images), torch.full((1, 1, 2, 2), 0.4)).amax(dim=(1, 2, 3))
    assert 0.2 <= levels.min() < 0.25
    assert 0.55 < levels.max() <= 0.6
    patch = pc.Patch(2, [(0, 0), (0, 1), (2, 2)])
    start = torch.tensor([[0, 0]]).expand(300, -1)
    moved = Transform(shift=2).moved(start, patch.placements(4, 4), seeded())
    assert {tuple(corner) for corner in moved.tolist()} == {(0, 0), (0, 1), (2, 2)}


def test_one_patch_misleads_images_that_it_was_not_learned_on():
    images, labels = grey(20)
    threat, attack = pc.Patch(2), UniversalAttack(images, labels, steps=60, step_size=0.1, batch_size=8)
    assert (attack.learn(Mean(), threat, seeded()) == 1).all()
    others, truth = grey(30, level=0.46)
    result = attack.run(Mean(), others, truth, threat)
    assert result.succeeded.all()
    assert len({tuple(corner) for corner in result.placement.tolist()}) > 5
    assert (result.steps == 60).all()
    contents = [
        image[:, top : top + 2, left : left + 2]
        for image, (top, left) in zip(result.adversarial, result.placement.tolist(), strict=True)
    ]
    assert all(torch.equal(content, contents[0]) for content in contents)


def test_the_best_of_several_universal_patches_counts_and_trials_try_several_placements():
    class Corner(nn.Module):
        """Says 1 where the first pixel is bright."""

        def forward(self, images):
            return torch.stack([0.5 - images[:, 0, 0, 0], images[:, 0, 0, 0] - 0.5], dim=1)

    images, labels = grey(64, level=0.1, size=4)
    few, many = (
        UniversalAttack(images, labels, steps=40, step_size=0.1, restarts=2, loss="margin", trials=trials)
        for trials in (1, 40)
    )
    once = few.run(Corner(), images, labels, pc.Patch(2))
    assert 0 < once.succeeded.sum() < 32  # one placement of nine reaches the corner
    assert many.run(Corner(), images, labels, pc.Patch(2)).succeeded.double().mean() > 0.9


def test_universal_patches_break_no_certificate_and_follow_the_seed():
    layers = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    model = randomise(nn.Sequential(*layers), seeded(1), 0.3)
    images = torch.rand(60, 1, 6, 6, generator=seeded(2))
    labels, threat = model(images).argmax(dim=1), pc.Patch(3)
    attack = UniversalAttack(images[:30], labels[:30], Transform(rotation=30, scale=0.2), steps=30, trials=5)
    results = [attack.run(model, images[30:], labels[30:], threat, seeded(seed)) for seed in (1, 1, 2)]
    assert torch.equal(results[0].adversarial, results[1].adversarial)
    assert not torch.equal(results[0].adversarial, results[2].adversarial)
    certified = pc.certify(model, images[30:], labels[30:], threat).certified
    assert not (results[0].succeeded & certified).any()


def test_a_universal_attack_describes_what_it_was_learned_on():
    images, labels = grey(5)
    described = json.loads(json.dumps(UniversalAttack(images, labels, Transform(shift=1)).describe()))
    assert described["kind"] == "UniversalAttack"
    assert described["learned_on"] == 5
    assert len(described["learned_on_sha256"]) == 64
    assert described["transform"] == "Transform(rotation=0.0, scale=0.0, brightness=0.0, shift=1)"
    assert "images" not in described
    other = UniversalAttack(images + 0.1, labels).describe()
    assert other["learned_on_sha256"] != described["learned_on_sha256"]


def test_a_transformed_attack_is_an_attack():
    check_attack(TransformedAttack(Transform(), steps=4, step_size=0.5, restarts=3, samples=1))


class Chessboard(nn.Module):
    """Says 1 where the image is bright, and more so where it is bright on white fields of a chessboard."""

    def forward(self, images):
        rows, columns = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
        fields = 1 - 2.0 * ((rows + columns) % 2)
        score = (images[:, 0] * (1 + 2 * fields)).sum(dim=(1, 2))
        return torch.stack([torch.full_like(score, 10.0), score], dim=1)


def test_a_patch_made_for_moves_survives_all_of_them():
    """Moved by one pixel, the best chessboard is the worst: 8 + 16 becomes 8 - 16; a white patch has 16 anywhere."""
    images, labels, threat = torch.zeros(60, 1, 8, 8), torch.zeros(60, dtype=torch.long), pc.Patch(4)
    moves = Transform(shift=1)
    fixed = TransformedAttack(Transform(), steps=40, step_size=0.1, samples=1, restarts=1)
    assert fixed.run(Chessboard(), images, labels, threat).succeeded.all()
    found = fixed.run(Chessboard(), images, labels, threat)
    printer = Printer(threat, moves, seeded(2))
    contents = torch.stack(
        [
            image[:, top : top + 4, left : left + 4]
            for image, (top, left) in zip(found.adversarial, found.placement.tolist(), strict=True)
        ]
    )
    moved = moves.moved(found.placement, printer.placements(images), seeded(3))
    survived = Chessboard()(printer.show(images, moved, contents)).argmax(dim=1)
    assert 10 < survived.sum() < 50
    robust = TransformedAttack(moves, steps=40, step_size=0.1, samples=32, restarts=1)
    assert robust.run(Chessboard(), images, labels, threat).succeeded.double().mean() > 0.95


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rotation": 200}, "rotation of a transform is 200"),
        ({"scale": 1.0}, "scale of a transform is 1.0"),
        ({"brightness": -0.1}, "brightness of a transform is -0.1"),
        ({"shift": -1}, "shift of a transform is -1"),
        ({"rotation": math.nan}, "rotation of a transform is nan"),
    ],
)
def test_transforms_out_of_range_are_refused(values, message):
    with pytest.raises(InvalidInput, match=message):
        Transform(**values)


def test_what_cannot_be_attacked_so_is_refused():
    images, labels = grey(4)
    attack = UniversalAttack(images, labels)
    for threat in (pc.SparsePixels(2), pc.Patches(pc.Patch(2))):
        with pytest.raises(InvalidInput, match="UniversalAttack attacks with a Patch"):
            attack.run(Mean(), images, labels, threat)
    with pytest.raises(InvalidInput, match="one image at least"):
        UniversalAttack(images[:0], labels[:0])
    with pytest.raises(InvalidInput, match=r"must lie in \[0, 1\]"):
        UniversalAttack(images * 3, labels)
    with pytest.raises(InvalidInput, match="trials is 0"):
        TransformedAttack(trials=0)
    with pytest.raises(InvalidInput, match="samples is 0"):
        TransformedAttack(samples=0)
    with pytest.raises(InvalidInput, match="steps is -1"):
        TransformedAttack(steps=-1)


@pytest.mark.parametrize("kind", ["universal", "transformed"])
def test_steps_in_parts_find_what_whole_steps_find_and_report_every_part(kind, monkeypatch):
    model = randomise(nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2)), seeded(3))
    images = torch.rand(20, 1, 6, 6, generator=seeded(4))
    labels, transform = model(images).argmax(dim=1), Transform(rotation=15, shift=1)
    attack = (
        UniversalAttack(images[:11], labels[:11], transform, steps=3)
        if kind == "universal"
        else TransformedAttack(transform, steps=3, restarts=2, samples=2)
    )

    def found(work):
        monkeypatch.setattr("patchcert.attacks.climbing.WORK_AT_ONCE", work)
        reports = list[float]()
        result = attack.run(
            model,
            images,
            labels,
            pc.Patch(3),
            seeded(5),
            progress=lambda done, total: reports.append(done / total),
        )
        return result, reports

    (whole, few), (cut, many) = found(2**34), found(0)
    assert torch.equal(whole.succeeded, cut.succeeded)
    assert torch.allclose(whole.adversarial, cut.adversarial, atol=1e-5)
    assert many == sorted(many)
    assert len(many) > 2 * len(few)
    assert many[-1] == few[-1] == 1
