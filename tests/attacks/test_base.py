import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from patchcert.attacks import (
    AdaptiveAttack,
    Attack,
    AttackLeftThreat,
    AttackSeries,
    AttackWithin,
    Findings,
    PatchAttack,
    SparseAttack,
    TransferAttack,
)
from patchcert.certificates import certify, placement_margins
from patchcert.errors import InvalidInput, ModelError
from patchcert.models import Normalize
from patchcert.testing import check_attack
from patchcert.threats import Patch


class PixelModel(nn.Module):
    """Says 1 where the mean over channels of one pixel exceeds a threshold."""

    def __init__(self, row: int, column: int, threshold: float = 0.9) -> None:
        super().__init__()
        self.row, self.column, self.threshold = row, column, threshold

    def forward(self, images):
        value = images[:, :, self.row, self.column].mean(dim=1)
        return torch.stack([torch.full_like(value, self.threshold), value], dim=1)


@pytest.mark.parametrize(
    "attack",
    [
        PatchAttack(steps=30, restarts=12),
        PatchAttack(steps=30, restarts=2, loss="margin", search="sweep"),
        PatchAttack(steps=30, restarts=2, loss="margin", search="certificate"),
        PatchAttack(steps=25, restarts=10, early_stop=False, batch_size=50),
        AttackSeries((PatchAttack(steps=0, restarts=1), PatchAttack(steps=30, restarts=12))),
    ],
    ids=["random", "sweep", "certificate", "exhaustive", "series"],
)
def test_patch_attacks_keep_every_promise(attack):
    check_attack(attack)


def test_sparse_attack_keeps_every_promise():
    check_attack(SparseAttack(steps=20, restarts=3), sparse=True)


@dataclasses.dataclass(frozen=True)
class Cheat(Attack):
    """Claims to have changed what it may not."""

    value: float
    batch_size: int = 8

    def propose(self, target, job):
        found = Findings.unchanged(job.images)
        return dataclasses.replace(found, images=torch.full_like(job.images, self.value))

    def exhaustive(self):
        return self


@pytest.mark.parametrize("value", [1.0, 1.5, -0.5, math.nan])
def test_the_framework_refuses_images_outside_the_threat(value):
    images, labels = torch.zeros(3, 1, 4, 4), torch.zeros(3, dtype=torch.long)
    with pytest.raises(AttackLeftThreat, match=r"left its threat Patch.* on 3 of 3 images, first on image 0"):
        Cheat(value).run(PixelModel(0, 0), images, labels, Patch(1))


def test_the_framework_decides_success_by_itself():
    images, labels = torch.zeros(3, 1, 4, 4), torch.zeros(3, dtype=torch.long)
    result = Cheat(0.0).run(PixelModel(0, 0), images, labels, Patch(1))
    assert not result.succeeded.any()
    assert Cheat(1.0).run(PixelModel(0, 0), images, labels, Patch(4)).succeeded.all()


class NanAfterChange(nn.Module):
    def forward(self, images):
        value = images.sum(dim=(1, 2, 3))
        return torch.stack([1 + 0 * value, torch.where(value > 0, math.nan, 0 * value)], dim=1)


def test_models_that_give_nan_are_refused():
    images, labels = torch.zeros(2, 1, 3, 3), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ModelError, match="the model gave NaN or infinite logits"):
        PatchAttack(2, 0.1, 1).run(NanAfterChange(), images, labels, Patch(1))
    with pytest.raises(ModelError, match="the model gave NaN or infinite logits"):
        PatchAttack(2, 0.1, 1).run(NanAfterChange(), images + 0.5, labels, Patch(1))


@pytest.mark.parametrize("layer", [nn.Dropout(), nn.BatchNorm2d(1)])
def test_models_in_training_mode_are_refused(layer):
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(9, 2))
    with pytest.raises(ModelError, match=rf"layer '0' \({type(layer).__name__}\) is in training mode"):
        PatchAttack(1, 0.1, 1).run(model, torch.rand(2, 1, 3, 3), torch.zeros(2, dtype=torch.long), Patch(1))


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.zeros(2, 3, 3), torch.zeros(2, dtype=torch.long), r"floats \(n, channels, height, width\)"),
        (torch.zeros(2, 1, 3, 3, dtype=torch.uint8), torch.zeros(2, dtype=torch.long), "got torch.uint8"),
        (
            torch.full((2, 1, 3, 3), 1.5),
            torch.zeros(2, dtype=torch.long),
            r"must lie in \[0, 1\], got values",
        ),
        (torch.full((2, 1, 3, 3), math.nan), torch.zeros(2, dtype=torch.long), "got values from nan"),
        (
            torch.zeros(2, 1, 3, 3),
            torch.zeros(3, dtype=torch.long),
            r"labels must be a long tensor \(2,\), got",
        ),
        (torch.zeros(2, 1, 3, 3), torch.zeros(2), "got torch.float32"),
        (torch.zeros(2, 1, 3, 3), [0, 1], "labels must be a dense torch.Tensor, got list"),
        (torch.zeros(2, 1, 3, 3), np.zeros(2, np.int64), "labels must be a dense torch.Tensor, got ndarray"),
        (np.zeros((2, 1, 3, 3)), torch.zeros(2).long(), "images must be a dense torch.Tensor, got ndarray"),
        (torch.zeros(2, 1, 3, 3), torch.tensor([0, 2]), r"labels must lie in 0..1, got 0 to 2"),
        (torch.zeros(2, 1, 3, 3), torch.tensor([-1, 0]), r"labels must lie in 0..1, got -1 to 0"),
    ],
)
def test_images_and_labels_that_do_not_fit_are_refused(images, labels, message):
    with pytest.raises(InvalidInput, match=message):
        PatchAttack(1, 0.1, 1).run(PixelModel(0, 0), images, labels, Patch(1))


def test_a_function_is_no_model():
    with pytest.raises(InvalidInput, match=r"the model must be a torch\.nn\.Module, got function"):
        PatchAttack(1, 0.1, 1).run(lambda x: x, torch.zeros(2, 1, 3, 3), torch.zeros(2).long(), Patch(1))


def test_images_of_another_type_than_the_model_are_refused():
    model, labels = nn.Sequential(nn.Flatten(), nn.Linear(9, 2)), torch.zeros(2, dtype=torch.long)
    with pytest.raises(
        InvalidInput, match="model of torch.float32 does not take images of torch.float64"
    ) as caught:
        PatchAttack(1, 0.1, 1).run(model, torch.zeros(2, 1, 3, 3).double(), labels, Patch(1))
    assert caught.value.hint == "convert the images with .to(torch.float32)"


@pytest.mark.parametrize(("model_channels", "image_channels"), [(3, 1), (3, 2), (2, 3)])
def test_channels_that_the_normalisation_does_not_know_are_refused_as_by_certify(
    model_channels, image_channels
):
    model = nn.Sequential(
        Normalize((0.5,) * model_channels, (0.2,) * model_channels),
        nn.Conv2d(model_channels, 2, 3),
        nn.Flatten(),
    )
    images, labels = torch.zeros(2, image_channels, 3, 3), torch.zeros(2, dtype=torch.long)
    message = f"Normalize has the statistics of {model_channels} channels, got images of shape"
    for look in (PatchAttack(1, 0.1, 1).run, certify):
        with pytest.raises(ModelError, match=message):
            look(model, images, labels, Patch(1))


def test_labels_below_zero_and_too_large_have_hints_of_their_own():
    for label, hint in ((-1, "count classes from 0"), (2, "the model has 2 classes, fewer than")):
        with pytest.raises(InvalidInput) as caught:
            PatchAttack(1, 0.1, 1).run(
                PixelModel(0, 0), torch.zeros(1, 1, 3, 3), torch.tensor([label]), Patch(1)
            )
        assert caught.value.hint.startswith(hint)


def test_a_model_of_two_results_is_refused():
    class Two(nn.Module):
        def forward(self, images):
            return images.flatten(1), images

    with pytest.raises(ModelError, match="a model must give one tensor of logits, got tuple"):
        PatchAttack(1, 0.1, 1).run(Two(), torch.zeros(2, 1, 3, 3), torch.zeros(2).long(), Patch(1))


def test_a_model_without_a_row_of_logits_per_image_is_refused():
    with pytest.raises(ModelError, match=r"logits of shape \(1, classes\) .* got \(9,\)"):
        PatchAttack(1, 0.1, 1).run(
            nn.Flatten(0), torch.zeros(2, 1, 3, 3), torch.zeros(2, dtype=torch.long), Patch(1)
        )


def test_a_model_that_changes_its_images_is_refused_and_leaves_them_alone():
    class Halving(nn.Module):
        def forward(self, images):
            return images.mul_(0.5).flatten(1)[:, :2]

    images = torch.ones(2, 1, 3, 3)
    with pytest.raises(ModelError, match="changes the images it is given in place"):
        PatchAttack(1, 0.1, 1).run(Halving(), images, torch.zeros(2, dtype=torch.long), Patch(1))
    assert (images == 1).all()


def test_images_that_the_model_does_not_take_are_refused():
    with pytest.raises(ModelError, match=r"the model does not take images of \(3, 3, 3\)"):
        PatchAttack(1, 0.1, 1).run(
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()),
            torch.zeros(2, 3, 3, 3),
            torch.zeros(2, dtype=torch.long),
            Patch(1),
        )


def test_columns_have_one_row_per_image():
    images, labels = torch.zeros(3, 1, 4, 4), torch.tensor([0, 0, 1])
    result = PatchAttack(1, 1.0, 16).run(PixelModel(2, 1), images, labels, Patch(1))
    columns = result.columns(torch.tensor([7, 8, 9]))
    assert {name: column.tolist() for name, column in columns.items() if name not in ("margin", "steps")} == {
        "index": [7, 8, 9],
        "label": [0, 0, 1],
        "prediction": [0, 0, 0],
        "prediction_after": [1, 1, 0],
        "succeeded": [True, True, True],
        "top": [2, 2, -1],
        "left": [1, 1, -1],
    }
    assert np.array_equal(columns["margin"], result.margins.numpy())
    assert np.array_equal(columns["steps"], result.steps.numpy())


def test_a_description_has_the_settings_of_every_attack_within():
    inner = PatchAttack(3, search="certificate", placement_margins=placement_margins)
    series = AttackSeries((AttackWithin(PatchAttack(4), Patch(2)), SparseAttack(5)))
    described = [AdaptiveAttack(inner).describe(), TransferAttack(series).describe()]
    assert json.loads(json.dumps(described)) == described
    adaptive, transfer = described
    assert adaptive["kind"] == "AdaptiveAttack"
    assert adaptive["attack"]["placement_margins"] == "placement_margins"
    within, sparse = transfer["attack"]["attacks"]
    assert within["threat"] == str(Patch(2))
    assert within["attack"] == PatchAttack(4).describe()
    assert sparse == {
        "kind": "SparseAttack",
        "steps": 5,
        "step_size": 0.1,
        "restarts": 20,
        "loss": "margin",
        "selections": 10,
        "batch_size": 1024,
        "early_stop": True,
    }
    assert set(PatchAttack().describe()) == {"kind", *vars(PatchAttack())} - {"placement_margins"}
