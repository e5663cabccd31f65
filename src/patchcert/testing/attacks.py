"""What every attack promises: it stays inside the threat, reaches all of it, and says truly what it did."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from patchcert.attacks import Attack
from patchcert.testing.conformance import ConformanceReport, everything_unchanged, require, run_checks, seeded
from patchcert.testing.networks import SHAPE, constant, pixel_probe, random_networks, stamp_probe
from patchcert.threats import Patch, SparsePixels, shapes

COPIES = 32


@dataclass(frozen=True)
class AttackUnderTest:
    """An attack, and whether it is one on sparse pixels instead of patches."""

    attack: Attack
    sparse: bool = False
    device: str = "cpu"

    def run(
        self, model: nn.Module, images: Tensor, labels: list[int], threat: Patch | SparsePixels, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Adversarial images and successes on the CPU, after a look at shapes and types."""
        model = copy.deepcopy(model).to(self.device)
        result = self.attack.run(
            model,
            images.to(self.device),
            torch.tensor(labels, device=self.device),
            threat,
            generator=torch.Generator(device=self.device).manual_seed(seed),
        )
        adversarial, succeeded = result.adversarial.detach().cpu(), result.succeeded.cpu()
        require(
            adversarial.shape == images.shape, f"adversarial images have shape {tuple(adversarial.shape)}"
        )
        require(
            succeeded.dtype == torch.bool and succeeded.shape == (len(images),),
            f"succeeded must be bool ({len(images)},), got {succeeded.dtype} {tuple(succeeded.shape)}",
        )
        return adversarial, succeeded

    def threats(self) -> tuple[Patch | SparsePixels, ...]:
        """Threats of every kind, on images of 4x5."""
        if self.sparse:
            return SparsePixels(1), SparsePixels(3)
        return Patch(2), Patch((1, 3), "corners"), Patch(shapes.diamond(5)), Patch((2, 1), [(0, 4), (2, 0)])


def results_belong_to_the_threat(subject: AttackUnderTest) -> None:
    """Every returned image, successful or not, is a member of the threat around its clean image."""
    for threat, name, model, images, labels in _random_cases(subject):
        adversarial, _ = subject.run(model, images, labels, threat)
        inside = threat.contains(images, adversarial)
        require(inside.all(), f"{threat} on the {name} network: {int((~inside).sum())} images lie outside")


def success_agrees_with_the_model(subject: AttackUnderTest) -> None:
    """`succeeded` is true exactly where the model gives the returned image another class than the label."""
    for threat, name, model, images, labels in _random_cases(subject):
        adversarial, succeeded = subject.run(model, images, labels, threat)
        with torch.no_grad():
            wrong = model(adversarial).argmax(dim=1) != torch.tensor(labels)
        require(
            torch.equal(wrong, succeeded),
            f"{threat} on the {name} network: succeeded is {succeeded.tolist()}, wrong is {wrong.tolist()}",
        )


def images_already_wrong_count_as_successes(subject: AttackUnderTest) -> None:
    """Where the clean image is misclassified, the attack has nothing left to do."""
    model, images = constant(SHAPE, [0.0, 5.0]), torch.full((3, *SHAPE), 0.5)
    _, succeeded = subject.run(model, images, [0, 1, 0], subject.threats()[0])
    require(
        succeeded.tolist() == [True, False, True],
        f"labels 0, 1, 0 on a network that says 1: {succeeded.tolist()}",
    )


def the_corners_of_the_image_are_reached(subject: AttackUnderTest) -> None:
    """On a network that only the placement in one corner can change, some of many tries find it."""
    images = torch.zeros(COPIES, *SHAPE)
    rows, columns = SHAPE[1:]
    for row in (0, rows - 1):
        for column in (0, columns - 1):
            model, threat = _corner_case(subject, row, column)
            _, succeeded = subject.run(model, images, [0] * COPIES, threat)
            require(
                succeeded.any(),
                f"{threat}: {COPIES} tries never reached the placement at pixel ({row}, {column})",
            )


def both_extremes_are_reached(subject: AttackUnderTest) -> None:
    """A network that changes only at a nearly black or nearly white value is broken, in any channel."""
    shape, threat = (3, 3, 3), SparsePixels(1) if subject.sparse else Patch(3)
    for channel in range(3):
        for dark in (False, True):
            images = torch.full((COPIES, *shape), 0.9 if dark else 0.1)
            model = pixel_probe(shape, channel, 1, 1, dark, threshold=0.98)
            _, succeeded = subject.run(model, images, [0] * COPIES, threat)
            require(succeeded.any(), f"channel {channel} was never made {'black' if dark else 'white'}")


def constant_images_and_networks_give_finite_members(subject: AttackUnderTest) -> None:
    """Without any gradient the attack still returns members without NaN, and claims no success."""
    for value in (0.0, 0.5, 1.0):
        images = torch.full((2, *SHAPE), value)
        for threat in subject.threats():
            adversarial, succeeded = subject.run(constant(SHAPE, [3.0, 0.0]), images, [0, 0], threat)
            require(torch.isfinite(adversarial).all(), f"{threat} on images of {value}: not finite")
            require(threat.contains(images, adversarial).all(), f"{threat} on images of {value}: outside")
            require(not succeeded.any(), f"{threat}: success claimed on a constant network")


def results_follow_the_generator(subject: AttackUnderTest) -> None:
    """The same seed gives the same result."""
    for threat, name, model, images, labels in _random_cases(subject):
        first, _ = subject.run(model, images, labels, threat, seed=1)
        again, _ = subject.run(model, images, labels, threat, seed=1)
        require(torch.equal(first, again), f"{threat} on the {name} network: runs with the same seed differ")


def model_and_images_are_left_as_they_were(subject: AttackUnderTest) -> None:
    """Weights, modes, gradients and the clean images do not change."""
    model = random_networks(SHAPE, 2, seed=5)["normalised"].to(subject.device)
    images = torch.rand(3, *SHAPE, generator=seeded()).to(subject.device)
    labels = torch.zeros(3, dtype=torch.long, device=subject.device)
    generator = torch.Generator(device=subject.device).manual_seed(0)
    with everything_unchanged(model, images):
        subject.attack.run(model, images, labels, subject.threats()[0], generator=generator)


ATTACK_CHECKS = (
    results_belong_to_the_threat,
    success_agrees_with_the_model,
    images_already_wrong_count_as_successes,
    the_corners_of_the_image_are_reached,
    both_extremes_are_reached,
    constant_images_and_networks_give_finite_members,
    results_follow_the_generator,
    model_and_images_are_left_as_they_were,
)


def check_attack(
    attack: Attack,
    *,
    sparse: bool = False,
    device: str = "cpu",
    checks: Sequence[Callable[[AttackUnderTest], None]] = ATTACK_CHECKS,
) -> ConformanceReport:
    """Raise a ConformanceError unless the attack keeps its promises; `sparse` if it attacks SparsePixels.

    A few steps and restarts are enough to pass, and keep the suite fast.
    """
    return run_checks(f"attack {attack}", AttackUnderTest(attack, sparse, device), checks)


def _corner_case(subject: AttackUnderTest, row: int, column: int) -> tuple[nn.Module, Patch | SparsePixels]:
    """A network that must see the whole patch in this corner, and the threat that can show it."""
    if subject.sparse:
        return pixel_probe(SHAPE, 0, row, column), SparsePixels(1)
    patch = Patch(2)
    corner = min(row, SHAPE[1] - patch.height), min(column, SHAPE[2] - patch.width)
    (mask,) = Patch(2, [corner]).placements(*SHAPE[1:]).masks(patch.stamp)
    return stamp_probe(SHAPE, mask, hidden=False), patch


def _random_cases(
    subject: AttackUnderTest,
) -> Iterator[tuple[Patch | SparsePixels, str, nn.Module, Tensor, list[int]]]:
    for seed, threat in enumerate(subject.threats()):
        generator = seeded(seed)
        images = torch.rand(6, *SHAPE, generator=generator)
        images[3:] = images[3:].round()
        networks = random_networks(SHAPE, 2, seed)
        for name in ("mlp", "convolutional"):
            labels = networks[name](images).argmax(dim=1).tolist()
            labels[-1] = 1 - labels[-1]
            yield threat, name, networks[name], images, labels
