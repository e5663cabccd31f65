import pytest
import torch
from torch import nn

from patchcert.attacks import AttackJob, FastCopy, PatchAttack
from patchcert.defenses import Defended, DigitalWatermarking, LocalGradientSmoothing
from patchcert.papers.chiang2020.imagenet_corners import CornerExperiment, imagenet_defense
from patchcert.threats import Patch


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def small_model() -> nn.Sequential:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 5, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64, 5)
    )
    generator = seeded(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def smooth_images(count: int) -> torch.Tensor:
    coarse = torch.rand(count, 3, 4, 4, generator=seeded(1))
    return nn.functional.interpolate(coarse, 40, mode="bilinear", align_corners=False)


def attacked(model, images, labels, patch, experiment, defenses=("lgs", "dw"), tell=None):
    """The weak and the adaptive attack on each defense."""
    job = AttackJob(images, labels, Patch(patch, placements="corners"), seeded(0))
    transferred = experiment.transferred(model, job, tell)
    return {name: experiment.rows(name, model, job, transferred, tell) for name in defenses}


@pytest.mark.parametrize("reduced", [False, True])
def test_every_cell_of_the_table_is_filled_and_adaptive_is_the_stronger_attack(reduced):
    model, images = small_model(), smooth_images(12)
    labels = model(images).argmax(dim=1).detach()
    labels[0] = (labels[0] + 1) % 5
    attack = PatchAttack(steps=8, step_size=0.1, restarts=4, loss="margin", batch_size=16)
    experiment = CornerExperiment(attack, judged_at_once=5, reduced=reduced)
    pairs = [
        pair for patch in (8, 12) for pair in attacked(model, images, labels, patch, experiment).values()
    ]
    assert [(weak.adaptive, strong.adaptive) for weak, strong in pairs] == [(False, True)] * 4
    corners = {(top, left) for side in (8, 12) for top in (0, 40 - side) for left in (0, 40 - side)}
    for weak, strong in pairs:
        right = strong.result.clean_predictions == labels
        assert not (weak.result.succeeded & right & ~strong.result.succeeded).any()
        places = {tuple(place) for place in strong.result.placement[right].tolist()}
        assert places <= corners
        assert (strong.result.placement[~right] == -1).all()
        assert torch.equal(strong.undefended, model(images).argmax(dim=1))
        assert torch.equal(weak.undefended_after, model(weak.result.adversarial).argmax(dim=1))
    assert any(strong.result.accuracy < weak.result.accuracy for weak, strong in pairs)


def test_results_are_what_the_defended_network_itself_says():
    model, images = small_model(), smooth_images(8)
    labels = model(images).argmax(dim=1).detach()
    attack = PatchAttack(steps=6, step_size=0.1, restarts=2, batch_size=16)
    found = attacked(model, images, labels, 12, CornerExperiment(attack, 64, reduced=True))
    for name, row in ((name, row) for name, rows in found.items() for row in rows):
        defended = Defended(imagenet_defense(name, model, 12), model)
        with torch.no_grad():
            predictions = defended(row.result.adversarial).argmax(dim=1)
        assert torch.equal(row.result.predictions, predictions)
        assert torch.equal(row.result.succeeded, predictions != labels)


def test_the_surrogate_past_the_clip_comes_first_and_again_by_the_margin():
    model, experiment = small_model(), CornerExperiment(PatchAttack(restarts=4), 64, reduced=False)
    copy = FastCopy(model)
    smoothing = LocalGradientSmoothing.imagenet()
    attacks = experiment.attacks(Defended(smoothing, copy))
    assert [surrogate.surrogate for _, surrogate in attacks] == [
        smoothing.forward_past_clip,
        smoothing.forward,
        smoothing.forward_past_clip,
    ]
    assert [attack.loss for attack, _ in attacks] == ["cross-entropy", "cross-entropy", "margin"]
    assert len(experiment.attacks(Defended(imagenet_defense("dw", copy, 12), copy))) == 2


def test_every_pass_is_told_of_and_may_be_the_last():
    model, images = small_model(), smooth_images(2)
    labels = model(images).argmax(dim=1).detach()
    attack = PatchAttack(steps=3, restarts=4, batch_size=16)
    said = []
    experiment = CornerExperiment(attack, 64, reduced=False)
    attacked(model, images, labels, 8, experiment, ("lgs",), tell=said.append)
    assert said[:4] == ["weak attack"] * 4
    assert set(said[4:]) == {"adaptive attack on lgs"}

    class EnoughError(Exception):
        pass

    def stop(words):
        raise EnoughError

    with pytest.raises(EnoughError):
        attacked(model, images, labels, 8, experiment, tell=stop)


def test_defenses_have_their_imagenet_settings():
    model = small_model()
    smoothing, marking = imagenet_defense("lgs", model, 42), imagenet_defense("dw", model, 42)
    assert isinstance(smoothing, LocalGradientSmoothing)
    assert (smoothing.window, smoothing.smoothing) == (15, 2.3)
    assert isinstance(marking, DigitalWatermarking)
    assert (marking.window, marking.opening) == (50, 3)
