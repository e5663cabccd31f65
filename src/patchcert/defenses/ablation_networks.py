"""The base networks of Random Ablation. Both take the doubled channels of `encode_ablated`."""

from collections import OrderedDict

from torch import Tensor, nn


def ablation_convnet(channels: int = 1, size: int = 28, classes: int = 10) -> nn.Sequential:
    """The convolutional network used for MNIST; 3,320,922 parameters there."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(2 * channels, 64, 4, 2, 1),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(64, 128, 4, 2, 1),
        relu2=nn.ReLU(),
        flatten=nn.Flatten(),
        fc1=nn.Linear(128 * (size // 4) ** 2, 500),
        relu3=nn.ReLU(),
        fc2=nn.Linear(500, 100),
        relu4=nn.ReLU(),
        fc3=nn.Linear(100, classes),
    )
    return nn.Sequential(layers).eval()


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


def ablation_resnet18(channels: int = 3, classes: int = 10) -> nn.Sequential:
    """ResNet-18 with the 3x3 stem for small images, used for CIFAR-10; 11,175,690 parameters there."""
    blocks = []
    before = 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        blocks += [BasicBlock(before, width, stride), BasicBlock(width, width, 1)]
        before = width
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv=nn.Conv2d(2 * channels, 64, 3, 1, 1, bias=False),
        bn=nn.BatchNorm2d(64),
        relu=nn.ReLU(),
        blocks=nn.Sequential(*blocks),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        fc=nn.Linear(512, classes),
    )
    return nn.Sequential(layers).eval()
