"""Checks that a certifier's answers are consistent, complete and free of side effects."""

import copy

import torch
from torch import Tensor, nn

from patchcert.testing.brute_force import members, other_classes, reached_margins
from patchcert.testing.certifier import CertifierUnderTest
from patchcert.testing.probes import Shape, brightness_probe, constant, random_networks, stamp_probe
from patchcert.testing.report import require
from patchcert.testing.state import changed_state, seeded, state_around
from patchcert.threats import Patch, shapes

SHAPE: Shape = (1, 4, 5)


def insensitive_networks_are_certified(certifier: CertifierUnderTest) -> None:
    """What no patch can change is certified; without this a certifier that always says no would pass."""
    images = torch.rand(3, *SHAPE, generator=seeded())
    certified = certifier.verdicts(constant(SHAPE, [0.0, 5.0]), images, [1, 1, 1], Patch(2))
    require(
        bool(certified.all()),
        f"a network with constant logits 0 and 5 is not certified: {certified.tolist()}",
    )


def larger_threats_certify_no_more(certifier: CertifierUnderTest) -> None:
    """An image certified against a threat is certified against every threat inside it."""
    pairs = (
        (Patch(1), Patch(2)),
        (Patch(2, "corners"), Patch(2)),
        (Patch(2, [(0, 1)]), Patch(2, [(0, 1), (2, 2)])),
        (Patch(shapes.diamond(5)), Patch(3)),
    )
    images = torch.rand(8, *SHAPE, generator=seeded())
    for small, large in pairs:
        for name, model in random_networks(SHAPE, 2, seed=7).items():
            labels = model(images).argmax(dim=1)
            inner = certifier.verdicts(model, images, labels, small)
            outer = certifier.verdicts(model, images, labels, large)
            odd = (outer & ~inner).nonzero().flatten().tolist()
            require(
                not odd,
                f"{name} network: images {odd} are certified against {large} but not {small}, inside it",
            )


def results_keep_the_order_of_the_images(certifier: CertifierUnderTest) -> None:
    """Shuffling the images shuffles the verdicts alike."""
    model, images, labels = _graded_images()
    order = torch.randperm(len(images), generator=seeded(1))
    straight = certifier.verdicts(model, images, labels, Patch(2))
    shuffled = certifier.verdicts(model, images[order], labels[order], Patch(2))
    require(
        torch.equal(straight[order], shuffled), "verdicts do not follow their images when these are shuffled"
    )


def batches_and_variants_do_not_change_verdicts(certifier: CertifierUnderTest) -> None:
    """One image at a time, a few, all at once, and every given variant: the verdicts are the same."""
    model, images, labels = _graded_images()
    patch = Patch(2)
    together = certifier.verdicts(model, images, labels, patch)
    for size in (1, 7):
        parts = zip(images.split(size), labels.split(size), strict=True)
        found = torch.cat([certifier.verdicts(model, part, label, patch) for part, label in parts])
        require(torch.equal(together, found), f"verdicts in batches of {size} differ from those of one batch")
    for index, variant in enumerate(certifier.variants):
        found = certifier.outcome(model, images, labels, patch, variant).certified
        require(torch.equal(together, found), f"variant {index} gives other verdicts than the certifier")


def margins_bound_what_brute_force_reaches(certifier: CertifierUnderTest) -> None:
    """Margins are 0 at the label, below every reachable logit difference, and positive where certified."""
    if not certifier.bounds_margins:
        return
    images = torch.rand(4, *SHAPE, generator=seeded())
    patch = Patch(2)
    for name, model in random_networks(SHAPE, 3, seed=11).items():
        labels = model(images).argmax(dim=1)
        try:
            outcome = certifier.outcome(model, images, labels, patch)
        except certifier.refusals:
            continue
        require(
            outcome.margins.shape == (4, 3),
            f"margins must be (n, classes), got {tuple(outcome.margins.shape)}",
        )
        for image, label, margins, certified in zip(
            images, labels.tolist(), outcome.margins.double(), outcome.certified.tolist(), strict=True
        ):
            reached = reached_margins(model, members(patch, image, seeded()), label).amin(dim=0)
            excess = float((margins - reached).max())
            require(
                float(margins[label]) == 0,
                f"{name} network: the margin at the label is {margins[label]}, not 0",
            )
            require(
                excess < 1e-5, f"{name} network: a margin is {excess:.3g} above a reachable logit difference"
            )
            least = float(other_classes(margins, label).min())
            require(
                not certified or least > 0, f"{name} network: certified with a least margin of {least:.3g}"
            )


def the_worst_placement_is_the_weakest_allowed_one(certifier: CertifierUnderTest) -> None:
    """The named placement is allowed and, where only one placement changes the prediction, it is that one."""
    if not certifier.bounds_margins:
        return
    image = torch.zeros(2, *SHAPE)
    for patch in (Patch((1, 2)), Patch(2, [(0, 3), (2, 1)]), Patch(shapes.diamond(5))):
        placements = patch.placements(*SHAPE[1:])
        masks = placements.masks(patch.stamp)
        for corner, mask in zip(placements.corners.tolist(), masks, strict=True):
            named = certifier.outcome(stamp_probe(SHAPE, mask), image, [0, 0], patch).worst_placement
            require(
                named.tolist() == [corner, corner],
                f"{patch}: the worst placements are {named.tolist()}, but only {corner} changes anything",
            )


def networks_in_training_mode_are_refused(certifier: CertifierUnderTest) -> None:
    """Batch norm and dropout in training mode are an error: their output is no function of the image."""
    features = SHAPE[0] * SHAPE[1] * SHAPE[2]
    models = {
        "batch norm": nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(features, 2)),
        "dropout": nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(features, 2)),
    }
    for name, model in models.items():
        refused = certifier.refuses(
            model.train(), torch.rand(2, *SHAPE, generator=seeded()), [0, 0], Patch(1)
        )
        require(refused, f"{name} in training mode was accepted")


def patches_that_do_not_fit_are_refused(certifier: CertifierUnderTest) -> None:
    """A patch larger than the image is an error, not a certificate over no placements."""
    for patch in (Patch(5), Patch((1, 6)), Patch(2, [(3, 4)])):
        refused = certifier.refuses(constant(SHAPE, [5.0, 0.0]), torch.zeros(1, *SHAPE), [0], patch)
        require(refused, f"{patch} on images of {SHAPE[1]}x{SHAPE[2]} was accepted")


def nothing_but_the_result_is_changed(certifier: CertifierUnderTest) -> None:
    """Weights, modes, gradients, images and the switches of torch are as they were before."""
    model = random_networks(SHAPE, 2, seed=5)["normalised"]
    images = torch.rand(3, *SHAPE, generator=seeded())
    before, kept = state_around(model), images.clone()
    weights = copy.deepcopy(model.state_dict())
    certifier.verdicts(model, images, [0, 1, 0], Patch(2))
    changed = changed_state(before, state_around(model))
    require(not changed, f"the call left these changed: {', '.join(changed)}")
    require(torch.equal(images, kept), "the images were changed")
    same = all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    require(same, "the weights were changed")


MANNERS = (
    insensitive_networks_are_certified,
    larger_threats_certify_no_more,
    results_keep_the_order_of_the_images,
    batches_and_variants_do_not_change_verdicts,
    margins_bound_what_brute_force_reaches,
    the_worst_placement_is_the_weakest_allowed_one,
    networks_in_training_mode_are_refused,
    patches_that_do_not_fit_are_refused,
    nothing_but_the_result_is_changed,
)


def _graded_images() -> tuple[nn.Module, Tensor, Tensor]:
    """Images from dark to bright, of which the middle ones are within a 2x2 patch of the other class."""
    brightness = torch.rand(20, 1, 1, 1, generator=seeded())
    images = brightness.expand(-1, *SHAPE).clone()
    model = brightness_probe(SHAPE)
    return model, images, model(images).argmax(dim=1)
