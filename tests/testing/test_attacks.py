from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from patchcert.testing import ATTACK_CHECKS, ConformanceError, check_attack
from patchcert.threats import Patch


@dataclass(frozen=True)
class Result:
    adversarial: Tensor
    succeeded: Tensor


class Reference:
    """Random starts, then signed steps on the values that the start changed; keeps what is wrong."""

    restarts = 8
    steps = 8

    def run(self, model, images, labels, threat, *, generator=None):
        best, succeeded = images.clone(), self.wrong(model, images, labels)
        for _ in range(self.restarts):
            current = self.start(images, threat, generator)
            support = (current != images).any(dim=1, keepdim=True)
            for _ in range(self.steps):
                gradient = self.gradient(model, current, labels)
                current = torch.where(support, (current + 0.3 * gradient.sign()).clamp(0, 1), images)
                wrong = self.wrong(model, current, labels)
                best = torch.where((wrong & ~succeeded)[:, None, None, None], current, best)
                succeeded = succeeded | wrong
        return self.result(model, images, labels, best, succeeded)

    def start(self, images, threat, generator):
        return threat.sample(images, generator)

    def gradient(self, model, current, labels):
        current = current.detach().requires_grad_()
        loss = F.cross_entropy(model(current), labels, reduction="sum")
        return torch.autograd.grad(loss, current)[0]

    @torch.no_grad()
    def wrong(self, model, images, labels):
        return model(images).argmax(dim=1) != labels

    def result(self, model, images, labels, best, succeeded):
        return Result(best, succeeded)


class LeavesTheThreat(Reference):
    def result(self, model, images, labels, best, succeeded):
        return Result((best + 0.05).clamp(0, 1), self.wrong(model, (best + 0.05).clamp(0, 1), labels))


class ClaimsSuccess(Reference):
    def result(self, model, images, labels, best, succeeded):
        return Result(best, torch.ones_like(succeeded))


class CountsOnlyChangedPredictions(Reference):
    def result(self, model, images, labels, best, succeeded):
        return Result(best, succeeded & ~self.wrong(model, images, labels))


class NeverTriesTheLastRowAndColumn(Reference):
    def start(self, images, threat, generator):
        if threat == Patch(2):
            height, width = images.shape[2:]
            threat = Patch(2, [(top, left) for top in range(height - 2) for left in range(width - 2)])
        return threat.sample(images, generator)


class OnlyBrightens(Reference):
    def gradient(self, model, current, labels):
        return torch.ones_like(current)


class DividesByTheGradient(Reference):
    def gradient(self, model, current, labels):
        gradient = super().gradient(model, current, labels)
        return gradient / gradient.flatten(1).norm(dim=1)[:, None, None, None]

    def result(self, model, images, labels, best, succeeded):
        gradient = self.gradient(model, images, labels)
        return Result(torch.where(gradient.isnan(), torch.nan, best), succeeded)


class IgnoresTheGenerator(Reference):
    calls = 0

    def start(self, images, threat, generator):
        self.calls += 1
        return threat.sample(images, torch.Generator().manual_seed(self.calls))


class LeavesGradients(Reference):
    def gradient(self, model, current, labels):
        current = current.detach().requires_grad_()
        F.cross_entropy(model(current), labels, reduction="sum").backward()
        return current.grad


BROKEN = {
    LeavesTheThreat: "results_belong_to_the_threat",
    ClaimsSuccess: "success_agrees_with_the_model",
    CountsOnlyChangedPredictions: "images_already_wrong_count_as_successes",
    NeverTriesTheLastRowAndColumn: "the_corners_of_the_image_are_reached",
    OnlyBrightens: "both_extremes_are_reached",
    DividesByTheGradient: "constant_images_and_networks_give_finite_members",
    IgnoresTheGenerator: "results_follow_the_generator",
    LeavesGradients: "model_and_images_are_left_as_they_were",
}


@pytest.mark.parametrize("sparse", [False, True])
def test_a_correct_attack_passes_every_check(sparse):
    report = check_attack(Reference(), sparse=sparse)
    assert report.names == tuple(check.__name__ for check in ATTACK_CHECKS)
    assert not report.failures


@pytest.mark.parametrize(("broken", "check"), BROKEN.items())
def test_a_broken_attack_is_caught_by_the_check_that_is_about_it(broken, check):
    the_check = [known for known in ATTACK_CHECKS if known.__name__ == check]
    with pytest.raises(ConformanceError, match=f"FAILS  {check}"):
        check_attack(broken(), checks=the_check)


def test_every_check_catches_some_broken_attack():
    assert {check.__name__ for check in ATTACK_CHECKS} == set(BROKEN.values())
