import pytest
import torch
from torch import nn

from patchcert.attacks import PatchAttack
from patchcert.attacks.imagenet_corners import corner_experiment, find_imagenet, imagenet_defense
from patchcert.defenses import DigitalWatermarking, LocalGradientSmoothing
from patchcert.errors import DataError


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


def test_every_cell_of_the_table_is_filled_and_adaptive_is_the_stronger_attack():
    model, images = small_model(), smooth_images(12)
    labels = model(images).argmax(dim=1).detach()
    labels[0] = (labels[0] + 1) % 5
    attack = PatchAttack(steps=8, step_size=0.1, restarts=4, loss="margin", batch_size=16)
    rows = list(corner_experiment(model, images, labels, attack, patches=(8, 12)))
    cells = [(row.patch, row.defense, row.adaptive) for row in rows]
    assert cells == [
        (patch, name, adaptive) for patch in (8, 12) for name in ("lgs", "dw") for adaptive in (False, True)
    ]
    corners = {(top, left) for side in (8, 12) for top in (0, 40 - side) for left in (0, 40 - side)}
    for weak, strong in zip(rows[::2], rows[1::2], strict=True):
        right = strong.result.clean_predictions == labels
        assert not (weak.result.succeeded & right & ~strong.result.succeeded).any()
        places = {tuple(place) for place in strong.result.placement[right].tolist()}
        assert places <= corners
        assert (strong.result.placement[~right] == -1).all()
    assert any(
        strong.result.accuracy < weak.result.accuracy
        for weak, strong in zip(rows[::2], rows[1::2], strict=True)
    )


def test_summary_counts_all_images_and_those_initially_correct():
    model, images = small_model(), smooth_images(6)
    labels = model(images).argmax(dim=1).detach()
    labels[:3] = (labels[:3] + 1) % 5
    attack = PatchAttack(steps=0, restarts=1, batch_size=4)
    row = next(corner_experiment(model, images, labels, attack, patches=(4,), defenses=("lgs",)))
    summary = row.summary()
    assert summary["images"] == 6
    assert summary["undefended_accuracy"] == 0.5
    withstood = (~row.result.succeeded).double()
    assert summary["accuracy"] == float(withstood.mean())
    assert summary["accuracy_of_initially_correct"] == float(withstood[3:].mean())


def test_defenses_have_their_imagenet_settings():
    model = small_model()
    smoothing, marking = imagenet_defense("lgs", model, 42), imagenet_defense("dw", model, 42)
    assert isinstance(smoothing, LocalGradientSmoothing)
    assert (smoothing.window, smoothing.smoothing) == (15, 2.3)
    assert isinstance(marking, DigitalWatermarking)
    assert (marking.window, marking.opening) == (50, 3)


def test_folder_is_found_beneath_the_data_folder_or_named_in_the_message(tmp_path, monkeypatch):
    monkeypatch.delenv("PATCHCERT_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"no ImageNet folder with labels.csv found; looked in .*cache"):
        find_imagenet()
    (tmp_path / "imagenet").mkdir()
    (tmp_path / "imagenet" / "labels.csv").write_text("file,label\n")
    assert find_imagenet(tmp_path) == (tmp_path / "imagenet").resolve()
    monkeypatch.setenv("PATCHCERT_DATA", str(tmp_path / "imagenet"))
    assert find_imagenet() == (tmp_path / "imagenet").resolve()
