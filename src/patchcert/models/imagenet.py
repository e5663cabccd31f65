"""Two ImageNet classifiers on images in [0,1] (224 x 224), whose weights are read from safetensors files."""

import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchcert.errors import ModelError
from patchcert.models.storage import find_misfits, read_tensors

CLASSES = 1000
NORM_EPSILON = 1e-3


class CaffeInput(nn.Module):
    """RGB in [0,1] becomes BGR in [0,255] less the mean colour, as the Caffe networks were trained."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        mean = torch.tensor([103.939, 116.779, 123.68]).reshape(3, 1, 1)
        self.register_buffer("mean", mean, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        return images.flip(1) * 255 - self.mean


class Bottleneck(nn.Module):
    """Residual block of the first ResNet: stride in the first 1x1 convolution, biases everywhere."""

    def __init__(self, channels: int, width: int, stride: int, project: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, stride)
        self.bn1 = nn.BatchNorm2d(width, NORM_EPSILON)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(width, NORM_EPSILON)
        self.conv3 = nn.Conv2d(width, 4 * width, 1)
        self.bn3 = nn.BatchNorm2d(4 * width, NORM_EPSILON)
        self.downsample = nn.Identity()
        if project:
            projection = nn.Conv2d(channels, 4 * width, 1, stride)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(4 * width, NORM_EPSILON))
        self.relu1, self.relu2, self.relu3 = nn.ReLU(), nn.ReLU(), nn.ReLU()

    def forward(self, images: Tensor) -> Tensor:
        inner = self.relu1(self.bn1(self.conv1(images)))
        inner = self.relu2(self.bn2(self.conv2(inner)))
        return self.relu3(self.bn3(self.conv3(inner)) + self.downsample(images))


def _stage(channels: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    first = Bottleneck(channels, width, stride, project=True)
    rest = (Bottleneck(4 * width, width, stride=1, project=False) for _ in range(blocks - 1))
    return nn.Sequential(first, *rest)


class ResNet50(nn.Module):
    """The Caffe/Keras ResNet-50 v1."""

    def __init__(self) -> None:
        super().__init__()
        self.input = CaffeInput()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3)
        self.bn1 = nn.BatchNorm2d(64, NORM_EPSILON)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = _stage(64, 64, blocks=3, stride=1)
        self.layer2 = _stage(256, 128, blocks=4, stride=2)
        self.layer3 = _stage(512, 256, blocks=6, stride=2)
        self.layer4 = _stage(1024, 512, blocks=3, stride=2)
        self.fc = nn.Linear(2048, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        features = self.pool(self.relu(self.bn1(self.conv1(self.input(images)))))
        features = self.layer4(self.layer3(self.layer2(self.layer1(features))))
        return self.fc(features.mean(dim=(2, 3)))


class SameConv2d(nn.Conv2d):
    """Convolution with TensorFlow's SAME padding: the odd pixel of padding goes to the bottom and right."""

    def forward(self, input: Tensor) -> Tensor:
        vertical = _same_padding(input.shape[2], self.kernel_size[0], self.stride[0])
        horizontal = _same_padding(input.shape[3], self.kernel_size[1], self.stride[1])
        return super().forward(F.pad(input, (*horizontal, *vertical)))


def _same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    total = max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


class InvertedBottleneck(nn.Module):
    """Expand, filter each channel, project; added to its input where the shape allows."""

    def __init__(self, channels: int, output: int, kernel: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = channels * expand
        self._expand_conv = nn.Identity()
        self._bn0 = nn.Identity()
        self._relu0 = nn.Identity()
        if expand > 1:
            self._expand_conv = nn.Conv2d(channels, hidden, 1, bias=False)
            self._bn0 = nn.BatchNorm2d(hidden, NORM_EPSILON)
            self._relu0 = nn.ReLU6()
        self._depthwise_conv = SameConv2d(hidden, hidden, kernel, stride, groups=hidden, bias=False)
        self._bn1 = nn.BatchNorm2d(hidden, NORM_EPSILON)
        self._relu1 = nn.ReLU6()
        self._project_conv = nn.Conv2d(hidden, output, 1, bias=False)
        self._bn2 = nn.BatchNorm2d(output, NORM_EPSILON)
        self.adds_input = stride == 1 and channels == output

    def forward(self, images: Tensor) -> Tensor:
        inner = self._relu0(self._bn0(self._expand_conv(images)))
        inner = self._relu1(self._bn1(self._depthwise_conv(inner)))
        inner = self._bn2(self._project_conv(inner))
        return inner + images if self.adds_input else inner


# repeat, kernel, stride, expand, channels; scaled to width 1.1 (in multiples of 8) and depth 1.2
_LITE2_STAGES = (
    (1, 3, 1, 1, 16),
    (3, 3, 2, 6, 24),
    (3, 5, 2, 6, 48),
    (4, 3, 2, 6, 88),
    (4, 5, 1, 6, 120),
    (5, 5, 2, 6, 208),
    (1, 3, 1, 6, 352),
)


class EfficientNetLite2(nn.Module):
    """EfficientNet-lite2, the variant without squeeze-and-excitation and with ReLU6."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem = SameConv2d(3, 32, 3, 2, bias=False)
        self._bn0 = nn.BatchNorm2d(32, NORM_EPSILON)
        self._relu0 = nn.ReLU6()
        self._blocks = nn.ModuleList()
        channels = 32
        for repeat, kernel, stride, expand, output in _LITE2_STAGES:
            for index in range(repeat):
                step = stride if index == 0 else 1
                self._blocks.append(InvertedBottleneck(channels, output, kernel, step, expand))
                channels = output
        self._conv_head = nn.Conv2d(channels, 1280, 1, bias=False)
        self._bn1 = nn.BatchNorm2d(1280, NORM_EPSILON)
        self._relu1 = nn.ReLU6()
        self._fc = nn.Linear(1280, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        features = self._relu0(self._bn0(self._conv_stem((images * 255 - 127) / 128)))
        for block in self._blocks:
            features = block(features)
        features = self._relu1(self._bn1(self._conv_head(features)))
        return self._fc(features.mean(dim=(2, 3)))


_BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "resnet50": ResNet50,
    "efficientnet_lite2": EfficientNetLite2,
}


IMAGENET_WEIGHTS = {
    "resnet50": "4257f5d8fa0b4d8344144955f8cd78e1ee9a12feab4dbb4c4cc5a817ad00f8a5",
    "efficientnet_lite2": "f97f5aab129c5db056c74ec9a3e5989930a2e08c3e5ee79cf23fb7c9facd3613",
}
"""The SHA-256 sums of the files that evidence of ours is about."""


def build_imagenet(name: str) -> nn.Module:
    """The named network with random weights."""
    if name not in _BUILDERS:
        raise ModelError(
            f"no ImageNet network is called {name!r}; there are: {', '.join(_BUILDERS)}",
            hint="choose one of these names",
        )
    return _BUILDERS[name]()


def load_imagenet(name: str, folder: Path) -> nn.Module:
    """The named network in float32 and eval mode, all of whose weights come from the file."""
    model = build_imagenet(name)
    path = folder / f"{name}.safetensors"
    if not path.is_file():
        raise ModelError(f"the weights {path} are missing", hint=f"put {path.name} into {folder}")
    counters = {
        key: value for key, value in model.state_dict().items() if key.endswith("num_batches_tracked")
    }
    weights = counters | {key: value.float() for key, value in read_tensors(path)[0].items()}
    misfits = find_misfits(weights, model.state_dict())
    if misfits:
        raise ModelError(
            f"{path} does not hold a {name}: {misfits}", hint="use the file written for this network"
        )
    model.load_state_dict(weights)
    return model.eval().requires_grad_(False)
