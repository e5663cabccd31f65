"""The classifiers of Chiang et al. (2020), residual networks for small images, and networks that vote: on ablated or
parts of images, which are encoded in more channels, or at every place of a map."""

from collections import OrderedDict
from dataclasses import dataclass, replace

import torch
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


_FIVE = ((1, 1), (1, 1), (2, 2), (2, 1), (2, 1))
_SEVEN = (*_FIVE, (4, 2), (4, 1))
"""Convolutions of 3x3, each as its channels, in those of the first, and its stride."""


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
    return _network(spec, _convolutions(64, _FIVE), widths=(spec.hidden or 512,))


@architecture("mlp_bn")
def mlp_bn(spec: ModelSpec) -> nn.Sequential:
    """`depth` hidden layers (1) of `hidden` units (1,024), a batch norm in each."""
    _check_keys(spec, "hidden", "depth")
    return _network(spec, (), widths=(spec.hidden or 1024,) * (spec.depth or 1), normed=True)


@architecture("cnn2_bn")
def cnn2_bn(spec: ModelSpec) -> nn.Sequential:
    """`cnn2` with batch norms and wider: `filters` channels (32), then twice as many, and 512 hidden units."""
    _check_keys(spec, "hidden", "filters")
    filters = spec.filters or 32
    convolutions = (_Convolution(filters, 4, 2, 1), _Convolution(2 * filters, 4, 2, 1))
    return _network(spec, convolutions, widths=(spec.hidden or 512,), normed=True)


@architecture("cnn5_bn")
def cnn5_bn(spec: ModelSpec) -> nn.Sequential:
    """`cnn5w` with batch norms: two convolutions of `filters` channels (64), three of twice as many, 512 units."""
    _check_keys(spec, "hidden", "filters")
    convolutions = _convolutions(spec.filters or 64, _FIVE)
    return _network(spec, convolutions, widths=(spec.hidden or 512,), normed=True)


@architecture("cnn7_bn")
def cnn7_bn(spec: ModelSpec) -> nn.Sequential:
    """`cnn5_bn` with two more convolutions, the first of them strided, of four times `filters` channels (64)."""
    _check_keys(spec, "hidden", "filters")
    convolutions = _convolutions(spec.filters or 64, _SEVEN)
    return _network(spec, convolutions, widths=(spec.hidden or 512,), normed=True)


@architecture("cnn2_ablation")
def cnn2_ablation(spec: ModelSpec) -> nn.Sequential:
    """Two convolutions and three linear layers, used for MNIST; 3,320,922 parameters there."""
    _check_keys(spec, "hidden")
    encoded = replace(spec, channels=2 * spec.channels, mean=(), std=())
    convolutions = (_Convolution(64, 4, 2, 1), _Convolution(128, 4, 2, 1))
    network = _network(encoded, convolutions, widths=(spec.hidden or 500, 100))
    return _named(ablated=AblatedImages(spec.channels), **dict(network.named_children()))


Size = int | tuple[int, int]
"""The same for both axes, or height and width."""


class BasicBlock(nn.Module):
    """Two convolutions, of 3x3 unless their odd `kernels` are given, beside a shortcut.

    The shortcut is a projection where channels or the stride change anything, or axes have strides of their own.
    """

    def __init__(
        self, channels: int, width: int, stride: Size = 1, kernels: tuple[Size, Size] = (3, 3)
    ) -> None:
        super().__init__()
        self.conv1 = _same_size(channels, width, kernels[0], stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU()
        self.conv2 = _same_size(width, width, kernels[1])
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


def _same_size(channels: int, width: int, kernel: Size, stride: Size = 1) -> nn.Conv2d:
    """A convolution of an odd kernel that leaves a map as large as it is, but for its stride."""
    tall, wide = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    return nn.Conv2d(channels, width, kernel, stride, (tall // 2, wide // 2), bias=False)


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
    _check_keys(spec, "filters")
    return _named(**_resnet18(spec.channels, spec.filters or 64, spec.classes))


@architecture("resnet8")
def resnet8(spec: ModelSpec) -> nn.Sequential:
    """A narrow residual network: three blocks of `filters` channels (16) and twice and four times as many.

    With `depth` (6 n + 2) there are n blocks of each width. The last map is not averaged: a linear layer sees it whole.
    """
    _check_keys(spec, "filters", "depth")
    filters, count = spec.filters or 16, _blocks_per_stage(spec, spec.depth or 8, others=2)
    height, width = ((size + 3) // 4 for size in (spec.height, spec.width))
    return _named(
        **_stem(spec.channels, filters),
        blocks=_stages(BasicBlock, filters, filters, (1, 2, 4), count),
        flatten=nn.Flatten(),
        logits=nn.Linear(4 * filters * height * width, spec.classes),
    )


@architecture("resnet18_ablation")
def resnet18_ablation(spec: ModelSpec) -> nn.Sequential:
    """`resnet18` on encoded images, used for CIFAR-10; 11,175,690 parameters there."""
    _check_keys(spec)
    return _named(ablated=AblatedImages(spec.channels), **_resnet18(2 * spec.channels, 64, spec.classes))


@architecture("resnet18_parts")
def resnet18_parts(spec: ModelSpec) -> nn.Sequential:
    """`resnet18` on parts of images, such as bands, which have one channel more that says what is seen."""
    _check_keys(spec, "filters")
    network = _resnet18(_encoded_parts(spec).channels, spec.filters or 64, spec.classes)
    return _named(parts=PartImages(spec.channels), **network)


@architecture("cnn2_parts")
def cnn2_parts(spec: ModelSpec) -> nn.Sequential:
    """`cnn2_bn` on parts of images: small enough to be trained on a CPU in minutes."""
    network = cnn2_bn(_encoded_parts(spec))
    return _named(parts=PartImages(spec.channels), **dict(network.named_children()))


def _encoded_parts(spec: ModelSpec) -> ModelSpec:
    """The description of what comes after the encoding, which has one channel more."""
    if spec.normalises:
        raise ModelError(
            f"{spec.name} takes parts of images as they are encoded, without normalisation",
            hint="set model.normalise = false",
        )
    return replace(spec, channels=spec.channels + 1)


@architecture("bagnet")
def bagnet(spec: ModelSpec) -> nn.Sequential:
    """A residual network without strides that gives a map of scores, one for each class at each pixel.

    A score sees `receptive_field` pixels (9 x 9 unless given): 3 from the first convolution, and 2 more for each of
    those of its `depth` blocks (8) that have a 3x3 kernel, which are spread evenly over it. All have `filters` (128).
    """
    _check_keys(spec, "filters", "depth", "receptive_field")
    field, width, depth = spec.receptive_field or 9, spec.filters or 128, spec.depth or 8
    wide, rest = divmod(field - 3, 2)
    if wide < 0 or rest or wide > depth:
        raise ModelError(
            f"the receptive field of a bagnet with {depth} blocks is {field}; expected an odd number from 3 to "
            f"{3 + 2 * depth}",
            hint="set model.receptive_field to another, or model.depth to more blocks",
        )
    return _named(
        **_stem(spec.channels, width),
        blocks=_local_blocks(width, depth, wide),
        scores=nn.Conv2d(width, spec.classes, 1),
    )


@architecture("bagnet_half")
def bagnet_half(spec: ModelSpec) -> nn.Sequential:
    """A `bagnet` whose map has half the rows and columns of the image: a quarter of the work, for one that is wider.

    A score sees `receptive_field` pixels (9 x 9): 3 or 5 from the first convolution, 2 more from the one that halves
    the map, and 4 more for each of those of its `depth` blocks (6) that have a 3x3 kernel. All blocks have `filters`
    (256), what comes before the halving has half as many.
    """
    _check_keys(spec, "filters", "depth", "receptive_field")
    return _named(**_half_size_map(spec, spec.classes))


@architecture("stripnet")
def stripnet(spec: ModelSpec) -> nn.Sequential:
    """A residual network that gives a row of scores, of which each sees a strip of columns from top to bottom.

    It is a `resnet18` whose kernels are one column wide and which halves no row: as many strips as an image has columns
    vote in one pass. A strip has `receptive_field` columns (5): 3 from the first convolution, and 2 more for each of
    its first blocks with a 3x3 kernel. There are `filters` channels (64), doubled in each of the three later stages;
    every shortcut is a projection.
    """
    _check_keys(spec, "filters", "receptive_field")
    return _strips(spec, spec.height)


@architecture("crossnet")
def crossnet(spec: ModelSpec) -> nn.Sequential:
    """Two networks as `stripnet`, of which one sees strips of columns and the other strips of rows, as scores side by
    side: those of all columns, then those of all rows."""
    _check_keys(spec, "filters", "receptive_field")
    return _named(strips=_Crossed(_strips(spec, spec.height), _strips(spec, spec.width)))


@architecture("placed_strips")
def placed_strips(spec: ModelSpec) -> nn.Sequential:
    """A small network that gives a row of scores, of which each sees a strip of columns and knows where it is.

    One convolution sees a strip of `receptive_field` columns (3) from top to bottom, an offset tells its place, and
    `depth` hidden layers (2) of `filters` channels (128) look at nothing else. It suits images whose objects stay in
    their place, and a CPU trains it in minutes.
    """
    _check_keys(spec, "filters", "depth", "receptive_field")
    filters, columns = spec.filters or 128, spec.receptive_field or 3
    if columns % 2 == 0 or not 1 <= columns <= spec.width:
        raise ModelError(
            f"the strips of a {spec.name} are {columns} pixels wide; expected an odd number of columns of the image",
            hint="set model.receptive_field to another",
        )
    hidden = [layer for _ in range(spec.depth or 2) for layer in _normed_cells(filters)]
    return _named(
        conv=nn.Conv2d(spec.channels, filters, (spec.height, columns), padding=(0, columns // 2), bias=False),
        bn=nn.BatchNorm2d(filters),
        place=_Place(filters, spec.width),
        relu=nn.ReLU(),
        hidden=nn.Sequential(*hidden),
        scores=nn.Conv2d(filters, spec.classes, 1),
    )


def _normed_cells(filters: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(filters, filters, 1, bias=False), nn.BatchNorm2d(filters), nn.ReLU()


class _Place(nn.Module):
    """Adds to each channel of a row what tells its columns apart."""

    def __init__(self, channels: int, columns: int) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.randn(channels, 1, columns))

    def forward(self, features: Tensor) -> Tensor:
        return features + self.offset


class _Crossed(nn.Module):
    def __init__(self, columns: nn.Module, rows: nn.Module) -> None:
        super().__init__()
        self.columns, self.rows = columns, rows

    def forward(self, images: Tensor) -> Tensor:
        """The scores of columns and, from the image with its axes exchanged, of rows."""
        return torch.cat([self.columns(images), self.rows(images.transpose(2, 3))], dim=3)


def _strips(spec: ModelSpec, height: int) -> nn.Sequential:
    """The network of a `stripnet` on images of this height."""
    filters, (wide, rest) = spec.filters or 64, divmod((spec.receptive_field or 5) - 3, 2)
    if wide < 0 or rest or wide > 8:
        raise ModelError(
            f"the strips of a {spec.name} are {spec.receptive_field} pixels wide; expected an odd number from 3 to 19",
            hint="set model.receptive_field to another",
        )
    blocks, channels = list[nn.Module](), filters
    for index in range(8):
        width, stride = filters << index // 2, (2 if index in (2, 4, 6) else 1, 1)
        blocks.append(BasicBlock(channels, width, stride, ((3, 3 if index < wide else 1), (3, 1))))
        channels, height = width, -(-height // stride[0])
    return _named(
        **_stem(spec.channels, filters),
        blocks=nn.Sequential(*blocks),
        pool=nn.AvgPool2d((height, 1)),
        scores=nn.Conv2d(channels, spec.classes, 1),
    )


@architecture("bagnet_clipped")
def bagnet_clipped(spec: ModelSpec) -> nn.Sequential:
    """A plain classifier in which a patch moves little: `hidden` local features (one for each class) in each cell of
    the map of a `bagnet_half`, clipped to [0, 1], and one linear layer. Other keys are those of `bagnet_half`.

    The linear layer first gives a class ten times the mean of the features of its own.
    """
    _check_keys(spec, "filters", "depth", "receptive_field", "hidden")
    features, cells = spec.hidden or spec.classes, ((spec.height + 1) // 2) * ((spec.width + 1) // 2)
    local, logits = _half_size_map(spec, features), nn.Linear(features * cells, spec.classes)
    with torch.no_grad():
        own = torch.arange(features)[None, :] % spec.classes == torch.arange(spec.classes)[:, None]
        shares = 10 * own / (own.sum(dim=1, keepdim=True).clamp(min=1) * cells)
        logits.weight.copy_(shares.repeat_interleave(cells, dim=1))
        logits.bias.zero_()
    return _named(**local, clip=nn.Hardtanh(0, 1), flatten=nn.Flatten(), logits=logits)


def _half_size_map(spec: ModelSpec, outputs: int) -> dict[str, nn.Module]:
    field, width, depth = spec.receptive_field or 9, spec.filters or 256, spec.depth or 6
    wide, rest = divmod(field - 5, 4)
    if wide < 0 or rest % 2 or wide > depth or width % 2:
        raise ModelError(
            f"the receptive field of a {spec.name} with {depth} blocks of {width} filters is {field}; expected an odd "
            f"number from 5 to {7 + 4 * depth}, and an even number of filters",
            hint="set model.receptive_field or model.filters to another, or model.depth to more blocks",
        )
    return {
        **_stem(spec.channels, width // 2, kernel=3 + rest),
        "before": BasicBlock(width // 2, width // 2, kernels=(1, 1)),
        "halve": nn.Conv2d(width // 2, width, 3, 2, 1, bias=False),
        "halve_bn": nn.BatchNorm2d(width),
        "halve_relu": nn.ReLU(),
        "blocks": _local_blocks(width, depth, wide),
        "scores": nn.Conv2d(width, outputs, 1),
    }


def _local_blocks(width: int, depth: int, wide: int) -> nn.Sequential:
    """Residual blocks of which some, spread evenly, have a 3x3 kernel, and the others look at one place alone."""
    kernels = [3 if (index + 1) * wide // depth > index * wide // depth else 1 for index in range(depth)]
    return nn.Sequential(*(BasicBlock(width, width, kernels=(kernel, 1)) for kernel in kernels))


@architecture("wideresnet")
def wideresnet(spec: ModelSpec) -> nn.Sequential:
    """A wide residual network of three stages: WRN-16-8, or the one of `depth` (6 n + 4) and `filters` (16 k)."""
    _check_keys(spec, "filters", "depth")
    filters, count = spec.filters or 128, _blocks_per_stage(spec, spec.depth or 16, others=4)
    return _named(
        conv=nn.Conv2d(spec.channels, 16, 3, 1, 1, bias=False),
        blocks=_stages(PreActivationBlock, 16, filters, (1, 2, 4), count),
        bn=nn.BatchNorm2d(4 * filters),
        relu=nn.ReLU(),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        logits=nn.Linear(4 * filters, spec.classes),
    )


def _named(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))


def _stem(channels: int, filters: int, kernel: int = 3) -> dict[str, nn.Module]:
    convolution = nn.Conv2d(channels, filters, kernel, 1, kernel // 2, bias=False)
    return {"conv": convolution, "bn": nn.BatchNorm2d(filters), "relu": nn.ReLU()}


def _resnet18(channels: int, filters: int, classes: int) -> dict[str, nn.Module]:
    blocks = _stages(BasicBlock, filters, filters, (1, 2, 4, 8), 2)
    return {
        **_stem(channels, filters),
        "blocks": blocks,
        "pool": nn.AdaptiveAvgPool2d(1),
        "flatten": nn.Flatten(),
        "logits": nn.Linear(8 * filters, classes),
    }


def _stages(
    block: type[BasicBlock | PreActivationBlock],
    channels: int,
    filters: int,
    factors: tuple[int, ...],
    count: int,
) -> nn.Sequential:
    """`count` blocks of `filters` channels times each factor; every stage but the first halves its map."""
    blocks = []
    for factor in factors:
        width, stride = factor * filters, 1 if factor == 1 else 2
        blocks += [block(channels, width, stride), *(block(width, width, 1) for _ in range(count - 1))]
        channels = width
    return nn.Sequential(*blocks)


def _blocks_per_stage(spec: ModelSpec, depth: int, others: int) -> int:
    """In three stages of blocks of two layers; the depth counts `others` outside of them too."""
    count, rest = divmod(depth - others, 6)
    if count < 1 or rest:
        raise ModelError(
            f"the depth of a {spec.name} is {depth}; expected {others} layers and 6 for each block of a stage",
            hint=f"set model.depth to {others + 6}, {others + 12} or {others + 18}",
        )
    return count


def _check_keys(spec: ModelSpec, *read: str) -> None:
    """Raise for a key of the description that the architecture would not look at."""
    for key in ("hidden", "widths", "filters", "depth", "receptive_field"):
        if key not in read and getattr(spec, key):
            raise ModelError(
                f"the architecture {spec.name!r} has no {key}, but it is {getattr(spec, key)}",
                hint=f"leave model.{key} out",
            )


def _convolutions(filters: int, factors: tuple[tuple[int, int], ...]) -> tuple[_Convolution, ...]:
    return tuple(_Convolution(factor * filters, 3, stride, 1) for factor, stride in factors)


def _cnn4(spec: ModelSpec, first: _Convolution) -> nn.Sequential:
    rest = (_Convolution(4, 4, 2, 1), _Convolution(8, 3, 1, 1), _Convolution(8, 4, 2, 1))
    return _network(spec, (first, *rest), widths=(spec.hidden or 256,) * 2)


def _network(
    spec: ModelSpec, convolutions: tuple[_Convolution, ...], widths: tuple[int, ...], normed: bool = False
) -> nn.Sequential:
    """Convolutions, then fully connected layers, a ReLU after each but the last, which is called `logits`.

    Where they are `normed`, a batch norm stands before each ReLU.
    """
    if not normed:
        _check_keys(spec, "hidden", "widths")
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
