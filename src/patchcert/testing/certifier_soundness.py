"""Checks that a certifier never certifies what an attacker can break, where the truth is known."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from patchcert.testing.brute_force import members, other_classes, reached_margins
from patchcert.testing.certifier import CertifierUnderTest
from patchcert.testing.probes import (
    Flip,
    HiddenOrder,
    Shape,
    constant,
    linear,
    pixel_probe,
    random_networks,
    stamp_probe,
)
from patchcert.testing.report import require
from patchcert.testing.state import seeded
from patchcert.threats import Patch, SparsePixels, shapes

SHAPE: Shape = (1, 4, 5)


def patches() -> tuple[Patch, ...]:
    """Every kind of stamp and of placement set, on images of 4x5."""
    allowed = torch.zeros(3, 4, dtype=torch.bool)
    allowed[0, 3] = allowed[2, 1] = True
    return (
        Patch(2),
        Patch((1, 3)),
        Patch(shapes.diamond(5)),
        Patch(shapes.diamond(4)),
        Patch(2, "corners"),
        Patch((2, 1), [(0, 4), (2, 0), (1, 3)]),
        Patch(2, allowed),
    )


def every_placement_counts(certifier: CertifierUnderTest) -> None:
    """A network that only the full patch at one placement can change is not certified, wherever it is."""
    image = torch.zeros(1, *SHAPE)
    for patch in patches():
        placements = patch.placements(*SHAPE[1:])
        masks = placements.masks(patch.stamp)
        for corner, mask in zip(placements.corners.tolist(), masks, strict=True):
            certified = certifier.verdicts(stamp_probe(SHAPE, mask), image, [0], patch)
            require(
                not certified.any(),
                f"{patch}: certified, although a white patch at {tuple(corner)} changes the prediction",
            )


def every_pixel_and_channel_counts(certifier: CertifierUnderTest) -> None:
    """A network that looks at one value alone is not certified where some placement covers that value."""
    for patch, shape in (
        (Patch(2), (2, 3, 4)),
        (Patch(shapes.diamond(5)), (1, 3, 3)),
        (Patch((1, 2)), (1, 3, 3)),
    ):
        covered = patch.placements(*shape[1:]).masks(patch.stamp).any(dim=0).expand(shape)
        for channel, row, column in covered.nonzero().tolist():
            for dark in (False, True):
                model = pixel_probe(shape, channel, row, column, dark)
                image = torch.full((1, *shape), 1.0 if dark else 0.0)
                certified = certifier.verdicts(model, image, [0], patch)
                value = f"{'black' if dark else 'white'} at channel {channel}, row {row}, column {column}"
                require(not certified.any(), f"{patch} on {shape}: certified, although {value} changes it")


def certified_images_survive_brute_force(certifier: CertifierUnderTest) -> None:
    """No extreme or random member of the threat changes the prediction of a certified image."""
    for threat, name, model, images in _random_cases(certifier, classes=3, gain=0.5):
        _raise_bias(model, 0, 0.75)
        labels = _predictions(model, images)
        certified = certifier.verdicts(model, images, labels, threat)
        for index in certified.nonzero().flatten().tolist():
            least = _least_margins(model, images[index], int(labels[index]), threat)
            reached = float(other_classes(least, int(labels[index])).min())
            require(
                reached > 0,
                f"{threat} on the {name} network: image {index} is certified, a member reaches {reached:.3g}",
            )


def certificates_barely_too_strong_are_refused(certifier: CertifierUnderTest) -> None:
    """When the bias is moved so that the best known attack just succeeds, the image is not certified."""
    for threat, name, model, images in _random_cases(certifier, classes=2, gain=1.0):
        for image in images[:2]:
            label = int(_predictions(model, image[None])[0])
            clean = float(reached_margins(model, image[None], label)[0, 1 - label])
            least = float(_least_margins(model, image, label, threat)[1 - label])
            if clean - least < 1e-3:
                continue
            success = 0.01 * (clean - least)
            _raise_bias(model, label, -least - success)
            certified = certifier.verdicts(model, image[None], [label], threat)
            _raise_bias(model, label, least + success)
            require(
                not certified.any(),
                f"{threat} on the {name} network: certified, although a member has margin {-success:.3g} "
                f"(clean margin {clean - least - success:.3g})",
            )


def ties_are_not_certified(certifier: CertifierUnderTest) -> None:
    """Two equal logits are no proof, whether always or only under a patch."""
    image, patch = torch.zeros(1, *SHAPE), Patch(2)
    only_under_patch = pixel_probe(SHAPE, 0, 3, 4)
    _raise_bias(only_under_patch, 0, 0.5)
    tied = {
        "all logits 0": constant(SHAPE, [0.0, 0.0]),
        "logits 2, 1, 2": constant(SHAPE, [2.0, 1.0, 2.0]),
        "a tie that only a patch reaches": only_under_patch,
    }
    for name, model in tied.items():
        require(not certifier.verdicts(model, image, [0], patch).any(), f"{name}: a tie was certified")


def wrong_predictions_are_not_certified(certifier: CertifierUnderTest) -> None:
    """An image that is misclassified without any patch is not certified, however constant the network."""
    images = torch.rand(4, *SHAPE, generator=seeded())
    models = {"constant": constant(SHAPE, [0.0, 9.0, 0.0]), **random_networks(SHAPE, 3, seed=3)}
    for name, model in models.items():
        labels = (_predictions(model, images) + 1) % 3
        certified = certifier.verdicts(model, images, labels, Patch(1))
        require(not certified.any(), f"{name} network: a wrong prediction was certified")


def nothing_without_finite_numbers_is_certified(certifier: CertifierUnderTest) -> None:
    """NaN or infinity in weights, logits or images is never certified."""
    images, patch = torch.full((2, *SHAPE), 0.5), Patch(2)
    for name, model in _broken_networks().items():
        certified = certifier.verdicts(model, images, [0, 1], patch)
        require(not certified.any(), f"{name}: certified as label {certified.int().argmax()}")
    for value in (torch.nan, torch.inf):
        images = torch.full((1, *SHAPE), 0.5)
        images[0, 0, 3, 4] = value
        certified = certifier.verdicts(constant(SHAPE, [5.0, 0.0]), images, [0], patch)
        require(not certified.any(), f"an image with a pixel of {value} was certified")


def layers_are_known_or_refused(certifier: CertifierUnderTest) -> None:
    """A layer is not skipped, nor is the order of layers guessed from their registration."""
    image, patch = torch.zeros(1, *SHAPE), Patch(1, [(0, 0)])
    turned = nn.Sequential(Flip(), pixel_probe(SHAPE, 0, 3, 4))
    models = {
        "a layer that turns the image": turned,
        "layers registered in reverse": HiddenOrder(SHAPE, 0, 0).eval(),
    }
    for name, model in models.items():
        certified = certifier.verdicts(model, image, [0], patch)
        require(
            not certified.any(), f"{name}: certified, although the pixel at (0, 0) changes the prediction"
        )


SOUNDNESS = (
    every_placement_counts,
    every_pixel_and_channel_counts,
    certified_images_survive_brute_force,
    certificates_barely_too_strong_are_refused,
    ties_are_not_certified,
    wrong_predictions_are_not_certified,
    nothing_without_finite_numbers_is_certified,
    layers_are_known_or_refused,
)


def _random_cases(
    certifier: CertifierUnderTest, classes: int, gain: float
) -> Iterator[tuple[Patch | SparsePixels, str, nn.Module, Tensor]]:
    threats: list[Patch | SparsePixels] = [Patch(2), Patch(shapes.diamond(5)), Patch((1, 3), "corners")]
    if certifier.sparse:
        threats += [SparsePixels(1), SparsePixels(2)]
    for seed, threat in enumerate(threats):
        images = torch.rand(6, *SHAPE, generator=seeded(seed))
        images[3:] = images[3:].round()
        for name, model in random_networks(SHAPE, classes, seed, gain).items():
            yield threat, name, model, images


def _least_margins(model: nn.Module, image: Tensor, label: int, threat: Patch | SparsePixels) -> Tensor:
    """The least margin (classes,) over the members that brute force visits."""
    return reached_margins(model, members(threat, image, seeded()), label).amin(dim=0)


def _broken_networks() -> dict[str, nn.Module]:
    nan, infinity = float("nan"), float("inf")
    features = SHAPE[0] * SHAPE[1] * SHAPE[2]
    overflow = linear(torch.full((2, features), 3e38), [0.0, 0.0])
    one_weight = pixel_probe(SHAPE, 0, 1, 1)
    with torch.no_grad():
        next(one_weight.parameters())[0, 7] = nan
    return {
        "a NaN logit": constant(SHAPE, [5.0, nan]),
        "all logits NaN": constant(SHAPE, [nan, nan]),
        "an infinite logit": constant(SHAPE, [infinity, 0.0]),
        "an infinitely negative logit": constant(SHAPE, [0.0, -infinity]),
        "a NaN weight": one_weight,
        "sums that overflow": nn.Sequential(
            nn.Flatten(), overflow, nn.ReLU(), linear(torch.eye(2), [9.0, 0.0])
        ).eval(),
    }


@torch.no_grad()
def _raise_bias(model: nn.Module, label: int, amount: float) -> None:
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    last.bias[label] += amount


def _predictions(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        return model(images).argmax(dim=1)
