"""The classifiers of Chiang et al. (2020), residual networks for small images, and networks that vote: on ablated or
parts of images, which are encoded in more channels, or at every place of a map."""

from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor, nn

from patchcert.errors import ModelError
from patchcert.models.layers import AblatedImages, PartImages
from patchcert.models.registry import ModelSpec, architecture


@dataclass(frozen=True, slots=True)
class _Convolution:
    channels: int
    kernel: int
    stride: int
    padding: int

    def output_size(self, size: int) -> int:
        return (size + 2 * self.padding - self.kernel) // self.stride + 1


@architecture("mlp")
def mlp(spec: ModelSpec) -> nn.Sequential:
    """One hidden layer of 255 units."""
    return _network(spec, convolutions=(), widths=(spec.hidden or 255,))


@architecture("cnn2")
def cnn2(spec: ModelSpec) -> nn.Sequential:
    """Two strided convolutions and a hidden layer of 256 units: the paper's small network."""
    convolutions = (_Convolution(4, 4, 2, 1), _Convolution(8, 4, 2, 1))
    return _network(spec, convolutions, widths=(spec.hidden or 256,))


@architecture("cnn4")
def cnn4(spec: ModelSpec) -> nn.Sequential:
    """Four convolutions and two hidden layers of 256 units: the paper's large network."""
    return _cnn4(spec, _Convolution(4, 3, 1, 1))


@architecture("cnn4_c11")
def cnn4_c11(spec: ModelSpec) -> nn.Sequential:
    """`cnn4` with an 11 x 11 first convolution, for sparse attacks."""
    return _cnn4(spec, _Convolution(4, 11, 1, 5))


@architecture("cnn4_c13")
def cnn4_c13(spec: ModelSpec) -> nn.Sequential:
    """`cnn4` with a 13 x 13 first convolution, for sparse attacks."""
    return _cnn4(spec, _Convolution(4, 13, 1, 6))


@architecture("cnn5w")
def cnn5w(spec: ModelSpec) -> nn.Sequential:
    """Five wide convolutions and a hidden layer of 512 units."""
    convolutions = (
        _Convolution(64, 3, 1, 1),
        _Convolution(64, 3, 1, 1),
        _Convolution(128, 3, 2, 1),
        _Convolution(128, 3, 1, 1),
        _Convolution(128, 3, 1, 1),
    )
    return _network(spec, convolutions, widths=(spec.hidden or 512,))


@architecture("mlp_bn")
def mlp_bn(spec: ModelSpec) -> nn.Sequential:
    """`depth` hidden layers (1) of `hidden` units (1,024), a batch norm in each."""
    _refuse_keys(spec, "filters")
    return _network(spec, (), widths=(spec.hidden or 1024,) * (spec.depth or 1), normed=True)


@architecture("cnn2_bn")
def cnn2_bn(spec: ModelSpec) -> nn.Sequential:
    """`cnn2` with batch norms and wider: `filters` channels (32), then twice as many, and 512 hidden units."""
    _refuse_keys(spec, "depth")
    filters = spec.filters or 32
    convolutions = (_Convolution(filters, 4, 2, 1), _Convolution(2 * filters, 4, 2, 1))
    return _network(spec, convolutions, widths=(spec.hidden or 512,), normed=True)


@architecture("cnn5_bn")
def cnn5_bn(spec: ModelSpec) -> nn.Sequential:
    """`cnn5w` with batch norms: two convolutions of `filters` channels (64), three of twice as many, 512 units."""
    _refuse_keys(spec, "depth")
    filters = spec.filters or 64
    widths = ((filters, 1), (filters, 1), (2 * filters, 2), (2 * filters, 1), (2 * filters, 1))
    convolutions = tuple(_Convolution(width, 3, stride, 1) for width, stride in widths)
    return _network(spec, convolutions, widths=(spec.hidden or 512,), normed=True)


@architecture("cnn7_bn")
def cnn7_bn(spec: ModelSpec) -> nn.Sequential:
    """`cnn5_bn` with two more convolutions, the first of them strided, of four times `filters` channels (64)."""
    _refuse_keys(spec, "depth")
    filters = spec.filters or 64
    factors = ((1, 1), (1, 1), (2, 2), (2, 1), (2, 1), (4, 2), (4, 1))
    convolutions = tuple(_Convolution(factor * filters, 3, stride, 1) for factor, stride in factors)
    return _network(spec, convolutions, widths=(spec.hidden or 512,), normed=True)


@architecture("cnn2_ablation")
def cnn2_ablation(spec: ModelSpec) -> nn.Sequential:
    """Two convolutions and three linear layers, used for MNIST; 3,320,922 parameters there."""
    _refuse_keys(spec, "filters", "depth", "receptive_field")
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


class PreActivationBlock(nn.Module):
    """Two 3x3 convolutions, each after a batch norm and a ReLU, beside a shortcut that nothing rectifies."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu1 = nn.ReLU()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu2 = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.projects = stride != 1 or channels != width
        self.shortcut = nn.Conv2d(channels, width, 1, stride, bias=False) if self.projects else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """The block's features, not rectified; a projection sees what the first convolution sees."""
        opened = self.relu1(self.bn1(images))
        inner = self.conv2(self.relu2(self.bn2(self.conv1(opened))))
        return inner + self.shortcut(opened if self.projects else images)


@architecture("resnet18")
def resnet18(spec: ModelSpec) -> nn.Sequential:
    """ResNet-18 with the 3x3 stem for small images: 64 channels, doubled in each of the three later stages."""
    _refuse_keys(spec, "hidden", "widths", "depth", "receptive_field")
    return nn.Sequential(_resnet18(spec.channels, spec.filters or 64, spec.classes))


@architecture("resnet8")
def resnet8(spec: ModelSpec) -> nn.Sequential:
    """A narrow residual network: three blocks of `filters` channels (16) and twice and four times as many.

    With `depth` (6 n + 2) there are n blocks of each width. The last map is not averaged: a linear layer sees it whole.
    """
    _refuse_keys(spec, "hidden", "widths", "receptive_field")
    depth, filters = spec.depth or 8, spec.filters or 16
    count, rest = divmod(depth - 2, 6)
    if count < 1 or rest:
        raise ModelError(
            f"the depth of a resnet8 is {depth}; expected 2 layers and 6 for each block of a stage",
            hint="set model.depth to 8, 14 or 20",
        )
    stages = ((filters, 1), (2 * filters, 2), (4 * filters, 2))
    height, width = ((size + 3) // 4 for size in (spec.height, spec.width))
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv=nn.Conv2d(spec.channels, filters, 3, 1, 1, bias=False),
        bn=nn.BatchNorm2d(filters),
        relu=nn.ReLU(),
        blocks=_stages(BasicBlock, filters, stages, count),
        flatten=nn.Flatten(),
        logits=nn.Linear(4 * filters * height * width, spec.classes),
    )
    return nn.Sequential(layers)


@architecture("resnet18_ablation")
def resnet18_ablation(spec: ModelSpec) -> nn.Sequential:
    """`resnet18` on encoded images, used for CIFAR-10; 11,175,690 parameters there."""
    _refuse_keys(spec, "filters", "depth", "receptive_field")
    layers: OrderedDict[str, nn.Module] = OrderedDict(ablated=AblatedImages(spec.channels))
    layers.update(_resnet18(2 * spec.channels, 64, spec.classes))
    return nn.Sequential(layers)


@architecture("resnet18_parts")
def resnet18_parts(spec: ModelSpec) -> nn.Sequential:
    """`resnet18` on parts of images, such as bands, which have one channel more that says what is seen."""
    _refuse_keys(spec, "hidden", "widths", "depth", "receptive_field")
    if spec.normalises:
        raise ModelError(
            "resnet18_parts takes parts of images as they are encoded, without normalisation",
            hint="set model.normalise = false",
        )
    layers: OrderedDict[str, nn.Module] = OrderedDict(parts=PartImages(spec.channels))
    layers.update(_resnet18(spec.channels + 1, spec.filters or 64, spec.classes))
    return nn.Sequential(layers)


class LocalBlock(nn.Module):
    """A convolution of 3x3 or 1x1 and one of 1x1 beside a shortcut, on a map whose size stays."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, kernel, 1, kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu2 = nn.ReLU()

    def forward(self, features: Tensor) -> Tensor:
        """The block's features, rectified."""
        inner = self.relu1(self.bn1(self.conv1(features)))
        return self.relu2(self.bn2(self.conv2(inner)) + features)


@architecture("bagnet")
def bagnet(spec: ModelSpec) -> nn.Sequential:
    """A residual network without strides that gives a map of scores, one for each class at each pixel.

    A score sees `receptive_field` pixels (9 x 9 unless given): 3 from the first convolution, and 2 more for each of
    those of its `depth` blocks (8) that have a 3x3 kernel, which are spread evenly over it. All have `filters` (128).
    """
    _refuse_keys(spec, "hidden", "widths")
    field, width, depth = spec.receptive_field or 9, spec.filters or 128, spec.depth or 8
    wide, rest = divmod(field - 3, 2)
    if wide < 0 or rest or wide > depth:
        raise ModelError(
            f"the receptive field of a bagnet with {depth} blocks is {field}; expected an odd number from 3 to "
            f"{3 + 2 * depth}",
            hint="set model.receptive_field to another, or model.depth to more blocks",
        )
    kernels = [3 if (index + 1) * wide // depth > index * wide // depth else 1 for index in range(depth)]
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(spec.channels, width, 3, 1, 1, bias=False),
            bn=nn.BatchNorm2d(width),
            relu=nn.ReLU(),
            blocks=nn.Sequential(*(LocalBlock(width, kernel) for kernel in kernels)),
            scores=nn.Conv2d(width, spec.classes, 1),
        )
    )


@architecture("wideresnet")
def wideresnet(spec: ModelSpec) -> nn.Sequential:
    """A wide residual network of three stages: WRN-16-8, or the one of `depth` (6 n + 4) and `filters` (16 k)."""
    _refuse_keys(spec, "hidden", "widths", "receptive_field")
    depth, filters = spec.depth or 16, spec.filters or 128
    count, rest = divmod(depth - 4, 6)
    if count < 1 or rest:
        raise ModelError(
            f"the depth of a wideresnet is {depth}; expected 4 layers and 6 for each block of a stage",
            hint="set model.depth to 10, 16, 22, 28 or 40",
        )
    stages = ((filters, 1), (2 * filters, 2), (4 * filters, 2))
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv=nn.Conv2d(spec.channels, 16, 3, 1, 1, bias=False),
        blocks=_stages(PreActivationBlock, 16, stages, count),
        bn=nn.BatchNorm2d(4 * filters),
        relu=nn.ReLU(),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        logits=nn.Linear(4 * filters, spec.classes),
    )
    return nn.Sequential(layers)


def _resnet18(channels: int, filters: int, classes: int) -> OrderedDict[str, nn.Module]:
    stages = tuple((filters * factor, min(factor, 2)) for factor in (1, 2, 4, 8))
    blocks = _stages(BasicBlock, filters, stages, 2)
    return OrderedDict(
        conv=nn.Conv2d(channels, filters, 3, 1, 1, bias=False),
        bn=nn.BatchNorm2d(filters),
        relu=nn.ReLU(),
        blocks=blocks,
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        logits=nn.Linear(8 * filters, classes),
    )


def _stages(
    block: type[BasicBlock | PreActivationBlock],
    channels: int,
    stages: tuple[tuple[int, int], ...],
    count: int,
) -> nn.Sequential:
    """`count` blocks for each stage, given as its channels and the stride of its first block."""
    blocks = []
    for width, stride in stages:
        blocks += [block(channels, width, stride), *(block(width, width, 1) for _ in range(count - 1))]
        channels = width
    return nn.Sequential(*blocks)


def _refuse_keys(spec: ModelSpec, *keys: str) -> None:
    """Raise for a key of the description that the architecture would not look at."""
    for key in keys:
        if getattr(spec, key):
            raise ModelError(
                f"the architecture {spec.name!r} has no {key}, but it is {getattr(spec, key)}",
                hint=f"leave model.{key} out",
            )


def _cnn4(spec: ModelSpec, first: _Convolution) -> nn.Sequential:
    rest = (_Convolution(4, 4, 2, 1), _Convolution(8, 3, 1, 1), _Convolution(8, 4, 2, 1))
    hidden = spec.hidden or 256
    return _network(spec, (first, *rest), widths=(hidden, hidden))


def _network(
    spec: ModelSpec, convolutions: tuple[_Convolution, ...], widths: tuple[int, ...], normed: bool = False
) -> nn.Sequential:
    """Convolutions, then fully connected layers, a ReLU after each but the last, which is called `logits`.

    Where they are `normed`, a batch norm stands before each ReLU.
    """
    _refuse_keys(spec, *(("widths",) if normed else ("filters", "depth")), "receptive_field")
    outputs = spec.widths or (*(shape.channels for shape in convolutions), *widths)
    count = len(convolutions) + len(widths)
    if len(outputs) != count:
        raise ModelError(
            f"{spec.name} has {count} layers before the last, but ModelSpec.widths has "
            f"{len(spec.widths)} numbers: {spec.widths}"
        )
    layers = OrderedDict[str, nn.Module]()
    channels, height, width = spec.channels, spec.height, spec.width
    for index, (shape, filters) in enumerate(zip(convolutions, outputs, strict=False), start=1):
        settings = (shape.kernel, shape.stride, shape.padding)
        layers[f"conv{index}"] = nn.Conv2d(channels, filters, *settings, bias=not normed)
        if normed:
            layers[f"bn{index}"] = nn.BatchNorm2d(filters)
        layers[f"relu{index}"] = nn.ReLU()
        channels, height, width = filters, shape.output_size(height), shape.output_size(width)
    if min(height, width) < 1:
        raise ModelError(
            f"{spec.name} needs larger images than {spec.height}x{spec.width}: nothing is left of them"
        )
    layers["flatten"] = nn.Flatten()
    features = channels * height * width
    for index, units in enumerate(outputs[len(convolutions) :], start=1):
        number = len(convolutions) + index
        layers[f"linear{index}"] = nn.Linear(features, units, bias=not normed)
        if normed:
            layers[f"bn{number}"] = nn.BatchNorm1d(units)
        layers[f"relu{number}"] = nn.ReLU()
        features = units
    layers["logits"] = nn.Linear(features, spec.classes)
    return nn.Sequential(layers)
