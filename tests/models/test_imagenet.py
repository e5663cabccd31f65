from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from patchcert.errors import ModelError
from patchcert.models.imagenet import CaffeInput, SameConv2d, load_imagenet


@pytest.fixture
def imagenet(real_data):
    if not (real_data / "imagenet" / "resnet50.safetensors").is_file():
        pytest.skip(
            "no ImageNet weights and images here; set PATCHCERT_DATA to the folder that holds imagenet/"
        )
    return real_data / "imagenet"


def centre_crops(folder: Path, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [line.split(",") for line in (folder / "labels.csv").read_text().splitlines()[1 : count + 1]]
    crops = []
    for name, *_ in rows:
        with Image.open(folder / "images" / name) as picture:
            left, top = (picture.width - 224) // 2, (picture.height - 224) // 2
            crop = picture.convert("RGB").crop((left, top, left + 224, top + 224))
            crops.append(torch.from_numpy(np.array(crop)).permute(2, 0, 1))
    return torch.stack(crops).float() / 255, torch.tensor([int(row[1]) for row in rows])


def right_answers(name: str, folder: Path, count: int) -> int:
    images, labels = centre_crops(folder, count)
    model = load_imagenet(name, folder)
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    with torch.no_grad():
        predicted = torch.cat([model(batch).argmax(dim=1) for batch in images.split(20)])
    return int((predicted == labels).sum())


@pytest.mark.parametrize("name", ["resnet50", "efficientnet_lite2"])
def test_networks_recognise_most_of_a_few_real_images(name, imagenet):
    assert right_answers(name, imagenet, 20) > 10


@pytest.mark.slow
@pytest.mark.parametrize(("name", "right"), [("resnet50", 316), ("efficientnet_lite2", 312)])
def test_networks_reach_their_known_accuracy(name, right, imagenet):
    assert right_answers(name, imagenet, 400) == pytest.approx(right, abs=1)


def test_input_of_the_caffe_network_is_blue_first_and_centred():
    red = torch.tensor([1.0, 0.0, 0.0]).reshape(1, 3, 1, 1)
    torch.testing.assert_close(CaffeInput()(red).flatten(), torch.tensor([-103.939, -116.779, 255 - 123.68]))


def test_same_padding_gives_the_odd_pixel_to_the_bottom_and_right():
    layer = SameConv2d(1, 1, 3, 2, bias=False)
    torch.nn.init.ones_(layer.weight)
    corner = torch.zeros(1, 1, 4, 4)
    corner[0, 0, 0, 0] = 1.0
    assert layer(corner)[0, 0].tolist() == [[1.0, 0.0], [0.0, 0.0]]
    assert layer(torch.ones(1, 1, 4, 4))[0, 0].tolist() == [[9.0, 6.0], [6.0, 4.0]]
    assert layer(torch.ones(1, 1, 5, 5)).shape == (1, 1, 3, 3)


def test_unknown_names_and_missing_weights_are_refused(tmp_path):
    with pytest.raises(ModelError, match="no ImageNet network is called 'vgg19'; there are: resnet50"):
        load_imagenet("vgg19", tmp_path)
    with pytest.raises(ModelError, match=r"the weights .*resnet50.safetensors are missing"):
        load_imagenet("resnet50", tmp_path)


def test_weights_of_another_network_are_refused(tmp_path):
    path = tmp_path / "resnet50.safetensors"
    save_file({"conv1.weight": torch.zeros(64, 3, 3, 3), "strange": torch.zeros(1)}, path)
    with pytest.raises(
        ModelError,
        match=r"does not hold a resnet50: strange is not part of it; conv1.weight has shape \(64, 3, 3, 3\) "
        r"instead of \(64, 3, 7, 7\); conv1.bias is missing.*; and \d+ more",
    ):
        load_imagenet("resnet50", tmp_path)
    path.write_bytes(b"something else")
    with pytest.raises(ModelError, match="not a readable safetensors file"):
        load_imagenet("resnet50", tmp_path)
