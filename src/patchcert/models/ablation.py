"""The networks that Random Ablation votes with; they take the doubled channels of its encoded images."""

from collections import OrderedDict
from typing import NoReturn

from torch import Tensor, nn

from patchcert.bounds import layer_rule
from patchcert.errors import ModelError, UnsupportedLayer
from patchcert.models.registry import architecture
from patchcert.models.spec import ModelSpec

_VOTE_HINT = "its votes certify it: patchcert.RandomAblation"


class AblatedImages(nn.Module):
    """Lets encoded images of twice the channels through, and refuses images as they are."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = 2 * channels

    def forward(self, encoded: Tensor) -> Tensor:
        """The encoded images, unchanged."""
        if encoded.shape[1] != self.channels:
            raise ModelError(
                f"the network takes ablated images, encoded in {self.channels} channels, "
                f"got {encoded.shape[1]} channels",
                hint=_VOTE_HINT,
            )
        return encoded


@layer_rule(AblatedImages)
def _ablated_images(layer: AblatedImages) -> NoReturn:
    raise UnsupportedLayer("its network votes on ablated images, so it has no bounds", hint=_VOTE_HINT)


@architecture("cnn2_ablation")
def cnn2_ablation(spec: ModelSpec) -> nn.Sequential:
    """Two convolutions and three linear layers, used for MNIST; 3,320,922 parameters there."""
    hidden = spec.hidden or 500
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        ablated=AblatedImages(spec.channels),
        conv1=nn.Conv2d(2 * spec.channels, 64, 4, 2, 1),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(64, 128, 4, 2, 1),
        relu2=nn.ReLU(),
        flatten=nn.Flatten(),
        linear1=nn.Linear(128 * (spec.height // 4) * (spec.width // 4), hidden),
        relu3=nn.ReLU(),
        linear2=nn.Linear(hidden, 100),
        relu4=nn.ReLU(),
        logits=nn.Linear(100, spec.classes),
    )
    return nn.Sequential(layers)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Identity()
        if stride != 1 or channels != width:
            projection = nn.Conv2d(channels, width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(width))
        self.relu2 = nn.ReLU()

    def forward(self, images: Tensor) -> Tensor:
        """The block's features, rectified."""
        inner = self.relu1(self.bn1(self.conv1(images)))
        return self.relu2(self.bn2(self.conv2(inner)) + self.shortcut(images))


@architecture("resnet18_ablation")
def resnet18_ablation(spec: ModelSpec) -> nn.Sequential:
    """ResNet-18 with the 3x3 stem for small images, used for CIFAR-10; 11,175,690 parameters there."""
    blocks = []
    before = 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        blocks += [BasicBlock(before, width, stride), BasicBlock(width, width, 1)]
        before = width
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        ablated=AblatedImages(spec.channels),
        conv=nn.Conv2d(2 * spec.channels, 64, 3, 1, 1, bias=False),
        bn=nn.BatchNorm2d(64),
        relu=nn.ReLU(),
        blocks=nn.Sequential(*blocks),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        logits=nn.Linear(512, spec.classes),
    )
    return nn.Sequential(layers)
