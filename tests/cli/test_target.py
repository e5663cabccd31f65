"""What commands work on: images come at the model's size, and labels that mean something else are spoken of."""

import pytest
import torch
from PIL import Image

from patchcert.cli.app import run
from patchcert.cli.target import Target, learned_method, open_data, open_target, select_images
from patchcert.errors import InvalidInput
from patchcert.models import ModelSpec, build


def make_folder(path, classes):
    for name in classes:
        (path / name).mkdir(parents=True)
        Image.new("RGB", (50, 40)).save(path / name / "a.png")
    return f"folder:{path}"


def warning(capsys, target, data):
    """What is said on stderr when images of the data are chosen for the target."""
    dataset = open_data(target, data, None)
    assert len(select_images(target, dataset, "test", 2).positions(len(dataset.test))) == min(
        2, len(dataset.test)
    )
    return capsys.readouterr().err


@pytest.fixture(scope="module")
def cifar():
    return open_target("zoo:cifar10-2x2-cnn2")


def test_a_folders_images_come_at_the_models_size(tmp_path, cifar):
    dataset = open_data(cifar, make_folder(tmp_path / "photos", ["cat"]), None)
    assert dataset.test.image_size == (3, 32, 32)


def test_fewer_classes_are_spoken_of_with_both_names(tmp_path, capsys, cifar):
    shown = warning(capsys, cifar, make_folder(tmp_path / "photos", ["cat", "dog"]))
    assert "cifar10-2x2-cnn2.safetensors is a model for 10 classes: airplane, automobile, bird, cat" in shown
    assert "photos has 2 classes: cat, dog." in shown


def test_as_many_classes_of_other_names_are_spoken_of(tmp_path, capsys, cifar):
    shown = warning(capsys, cifar, make_folder(tmp_path / "photos", "abcdefghij"))
    assert shown.startswith("warning: ")
    assert "has 10 classes: a, b, c" in shown


@pytest.mark.parametrize(
    "classes",
    [
        ["Airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"],
        list("0123456789"),
    ],
)
def test_the_same_names_and_bare_numbers_are_not(tmp_path, capsys, cifar, classes):
    assert warning(capsys, cifar, make_folder(tmp_path / "photos", classes)) == ""


def test_a_file_that_names_no_data_is_compared_by_the_number_of_classes(tmp_path, capsys):
    spec = ModelSpec("mlp", 1, 28, 28, classes=3, hidden=4)
    target = Target(build(spec, torch.Generator().manual_seed(0)), spec, tmp_path / "mine.safetensors")
    assert warning(capsys, target, make_folder(tmp_path / "three", "abc")) == ""
    shown = warning(capsys, target, make_folder(tmp_path / "two", "ab"))
    assert "mine.safetensors is a model for 3 classes; " in shown
    with pytest.raises(InvalidInput, match="images of 3 classes, but those of mnist-mini are 1x28x28 of 10"):
        select_images(target, open_data(target, "mnist-mini", None), "test", 1)


def test_a_models_own_data_are_not_spoken_of(capsys):
    mnist = open_target("zoo:mnist-2x2-mlp")
    assert warning(capsys, mnist, "mnist-mini") == ""


def test_a_model_of_the_zoo_is_the_classifier_of_its_card(answered):
    name, mini = "zoo:mnist-5x5-placed-strips", ("--data", "mnist-mini")
    stated = open_target(name).card.proof.classifier
    assert stated["name"] == "LocalVotes"
    assert answered(run(["certify", name, *mini, "--limit", "5"]))["classifier"] == stated
    attack = ["attack", name, *mini, "--images", "2", "--restarts", "1", "--steps", "1"]
    assert answered(run(attack))["classifier"] == stated
    clipped = answered(run(["certify", name, *mini, "--limit", "5", "--setting", "scores=clipped"]))
    assert clipped["classifier"] == stated | {"scores": "clipped"}
    assert learned_method(open_target("zoo:mnist-2x2-mlp")) == ("interval", {})
