"""Hypothesis strategies for soundness tests: small random networks, images and threats that fit together."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor, nn

from patchcert.testing.networks import ResidualBlock, Shape, randomise
from patchcert.threats import Patch, SparsePixels

ACTIVATIONS: tuple[Callable[[], nn.Module], ...] = (
    nn.ReLU,
    lambda: nn.LeakyReLU(0.2),
    nn.Sigmoid,
    nn.Tanh,
    nn.ELU,
    nn.Hardtanh,
    nn.GELU,
    nn.Softplus,
    nn.Identity,
)


class Joined(nn.Module):
    """The channels of two branches, one after the other."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.second = second

    def forward(self, images: Tensor) -> Tensor:
        """Both branches see the same input."""
        return torch.cat([self.first(images), self.second(images)], dim=1)


class Rescaled(nn.Module):
    """Constants of every shape and kind, by all the signs for them."""

    def __init__(self, size: Shape, kind: str, seed: int) -> None:
        super().__init__()
        channels, height, width = size
        shapes = {"numbers": (), "channels": (channels, 1, 1), "places": (1, channels, height, width)}
        generator = torch.Generator().manual_seed(seed)
        factor, shift = torch.randn(2, *shapes[kind], generator=generator)
        self.register_buffer("factor", factor)
        self.shift = nn.Parameter(shift)

    def forward(self, maps: Tensor) -> Tensor:
        """Each operator once with a number, the products with what was drawn."""
        return (1 - (0.5 + maps * self.factor) / 3 - self.shift) * 2


class HalfChanged(nn.Module):
    """Some of the channels go through a layer, as in ShuffleNet V2; the others are picked by an index."""

    def __init__(self, channels: int, by: str) -> None:
        super().__init__()
        self.by, self.sizes = by, [channels - channels // 2, channels // 2]
        self.layer = nn.Conv2d(self.sizes[0], 2, 3, padding=1)

    def forward(self, maps: Tensor) -> Tensor:
        """Three ways to pick the same channels."""
        match self.by:
            case "chunk":
                return torch.cat([torch.relu(self.layer(maps.chunk(2, dim=1)[0])), maps], dim=1)
            case "split":
                changed, kept = maps.split(self.sizes, dim=1)
                return torch.cat([torch.relu(self.layer(changed)), kept], dim=1)
        return torch.cat([torch.relu(self.layer(maps[:, : self.sizes[0]])), maps[:, -1:]], dim=1)


class FunctionalHead(nn.Module):
    """A head whose flattening and activation are function calls, invisible in a list of its submodules."""

    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(features, hidden)
        self.output = nn.Linear(hidden, classes)

    def forward(self, features: Tensor) -> Tensor:
        """Flatten, one hidden layer, logits."""
        return self.output(torch.relu(self.hidden(torch.flatten(features, 1))))


@dataclass(frozen=True)
class Case:
    """A model in eval mode with images, labels and a threat of fitting shapes and one dtype."""

    model: nn.Module
    images: Tensor
    labels: Tensor
    threat: Patch | SparsePixels

    def __repr__(self) -> str:
        labels, images = self.labels.tolist(), f"{tuple(self.images.shape)} {self.images.dtype}"
        return f"Case(threat={self.threat}, images={images}, labels={labels}, model={self.model})"


def seeds() -> SearchStrategy[int]:
    """Seeds of generators, for everything that need not shrink."""
    return st.integers(0, 2**16)


def dtypes() -> SearchStrategy[torch.dtype]:
    """Single or double precision."""
    return st.sampled_from((torch.float64, torch.float32))


def image_shapes(largest: int = 9) -> SearchStrategy[Shape]:
    """(channels, height, width) of small images, seldom square."""
    return st.tuples(st.integers(1, 3), st.integers(3, largest), st.integers(3, largest))


@st.composite
def image_batches(
    draw: DrawFn, shape: Shape | None = None, dtype: torch.dtype = torch.float64, most: int = 4
) -> Tensor:
    """Images in [0, 1]: uniform, at the extremes, in steps of 1/255, or constant."""
    shape = shape if shape is not None else draw(image_shapes())
    generator = torch.Generator().manual_seed(draw(seeds()))
    uniform = torch.rand(draw(st.integers(1, most)), *shape, generator=generator, dtype=dtype)
    kind = draw(st.sampled_from(("uniform", "extreme", "bytes", "constant")))
    match kind:
        case "extreme":
            return uniform.round()
        case "bytes":
            return (uniform * 255).round() / 255
        case "constant":
            return uniform[:, :1, :1, :1].expand_as(uniform).clone()
    return uniform


@st.composite
def stamps(draw: DrawFn, height: int, width: int, largest: int = 4) -> Tensor:
    """Solid rectangles and ragged masks that fit into the image and touch all sides of their box."""
    rows, columns = draw(st.integers(1, min(height, largest))), draw(st.integers(1, min(width, largest)))
    stamp = torch.ones(rows, columns, dtype=torch.bool)
    if draw(st.booleans()):
        generator = torch.Generator().manual_seed(draw(seeds()))
        stamp = torch.rand(rows, columns, generator=generator) < 0.5
        stamp[0, -1] = stamp[-1, 0] = True
    return stamp


@st.composite
def threats(draw: DrawFn, height: int, width: int) -> Patch:
    """Patches of any stamp with every kind of placement set."""
    stamp = draw(stamps(height, width))
    rows, columns = height - stamp.shape[0] + 1, width - stamp.shape[1] + 1
    kind = draw(st.sampled_from(("everywhere", "corners", "list", "map")))
    if kind in ("everywhere", "corners"):
        return Patch(stamp, kind)
    every = [(top, left) for top in range(rows) for left in range(columns)]
    chosen = draw(st.lists(st.sampled_from(every), min_size=1, max_size=12, unique=True))
    if kind == "list":
        return Patch(stamp, chosen)
    size = (rows, columns) if draw(st.booleans()) else (height, width)
    allowed = torch.zeros(size, dtype=torch.bool)
    allowed[tuple(zip(*chosen, strict=True))] = True
    return Patch(stamp, allowed)


def sparse_threats(height: int, width: int) -> SearchStrategy[SparsePixels]:
    """A few pixels anywhere, with either bound that covers pixels."""
    bounds = st.sampled_from(("tight", "per-pixel"))
    return st.builds(SparsePixels, st.integers(1, min(4, height * width)), bounds)


@st.composite
def networks(
    draw: DrawFn,
    shape: Shape | None = None,
    classes: int | None = None,
    dtype: torch.dtype = torch.float64,
    residual: bool = True,
    affine_first: bool = False,
) -> nn.Module:
    """Small classifiers in eval mode: oddly set convolutions, pools, norms and activations, then a head.

    Without `residual` they are a plain chain of layers; with `affine_first` the image goes into a Conv2d or
    Linear layer, as sparse bounds need.
    """
    channels, height, width = shape if shape is not None else draw(image_shapes())
    classes = classes if classes is not None else draw(st.integers(2, 4))
    layers: list[nn.Module] = []
    size = (channels, height, width)
    for index in range(draw(st.integers(0, 3))):
        stage = draw(_convolution_stages(size) if affine_first and not index else _stages(size, residual))
        layers.append(stage)
        size = _output_shape(stage, size)
    features = size[0] * size[1] * size[2]
    layers.extend(draw(_heads(features, classes, residual)))
    generator = torch.Generator().manual_seed(draw(seeds()))
    return randomise(nn.Sequential(*layers), generator, draw(st.sampled_from((1.0, 0.5, 2.0)))).to(dtype)


@st.composite
def cases(
    draw: DrawFn, dtype: torch.dtype | None = None, residual: bool = True, sparse: bool = False
) -> Case:
    """A whole case; most labels are what the model predicts, so that there is something to certify."""
    dtype = dtype if dtype is not None else draw(dtypes())
    shape = draw(image_shapes())
    model = draw(networks(shape, dtype=dtype, residual=residual, affine_first=sparse))
    images = draw(image_batches(shape, dtype))
    threat = draw((sparse_threats if sparse else threats)(*shape[1:]))
    with torch.no_grad():
        logits = model(images)
    generator = torch.Generator().manual_seed(draw(seeds()))
    other = torch.randint(logits.shape[1], (len(images),), generator=generator)
    keeps = torch.rand(len(images), generator=generator) < 0.8
    return Case(model, images, torch.where(keeps, logits.argmax(dim=1), other), threat)


BRANCHED = ("residual", "residual", "joined", "rescaled", "split")
"""Stages that are more than one layer after another."""


@st.composite
def _stages(draw: DrawFn, size: Shape, residual: bool) -> nn.Module:
    kinds = ["convolution", "convolution", "activation", "norm", "max", "average", "adaptive"]
    match draw(st.sampled_from([*kinds, *BRANCHED] if residual else kinds)):
        case "activation":
            return draw(st.sampled_from(ACTIVATIONS))()
        case "norm":
            return nn.BatchNorm2d(size[0], affine=draw(st.booleans()))
        case "max":
            return draw(_max_pools(size))
        case "average":
            return draw(_average_pools(size))
        case "adaptive":
            outputs = draw(st.integers(1, min(3, size[1]))), draw(st.integers(1, min(3, size[2])))
            return nn.AdaptiveAvgPool2d(outputs)
        case "residual":
            return draw(_residual_blocks(size))
        case "rescaled":
            return Rescaled(size, draw(st.sampled_from(("numbers", "channels", "places"))), draw(seeds()))
        case "split":
            return HalfChanged(size[0], draw(st.sampled_from(("chunk", "split", "index"))))
        case "joined":
            block = draw(_residual_blocks(size))
            return Joined(block.branch, block.shortcut)
    return draw(_convolution_stages(size))


@st.composite
def _convolution_stages(draw: DrawFn, size: Shape) -> nn.Module:
    return nn.Sequential(draw(_convolutions(size)), draw(st.sampled_from(ACTIVATIONS))())


@st.composite
def _convolutions(draw: DrawFn, size: Shape) -> nn.Conv2d:
    channels, *sides = size
    padding = [draw(st.integers(0, 2)) for _ in sides]
    room = [side + 2 * pad for side, pad in zip(sides, padding, strict=True)]
    kernel = [draw(st.integers(1, min(3, space))) for space in room]
    spacing = [
        2 if 2 * k - 1 <= space and draw(st.booleans()) else 1 for k, space in zip(kernel, room, strict=True)
    ]
    stride = [draw(st.integers(1, 3)) for _ in sides]
    groups = channels if draw(st.integers(0, 3)) == 3 else 1
    outputs = groups * draw(st.integers(1, 2)) if groups > 1 else draw(st.integers(1, 4))
    return nn.Conv2d(
        channels,
        outputs,
        (kernel[0], kernel[1]),
        (stride[0], stride[1]),
        (padding[0], padding[1]),
        (spacing[0], spacing[1]),
        groups,
        bias=draw(st.booleans()),
    )


@st.composite
def _max_pools(draw: DrawFn, size: Shape) -> nn.MaxPool2d:
    height, width = (draw(st.integers(1, min(3, side))) for side in size[1:])
    stride = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    padding = draw(st.integers(0, height // 2)), draw(st.integers(0, width // 2))
    return nn.MaxPool2d((height, width), stride, padding, ceil_mode=draw(st.booleans()))


@st.composite
def _average_pools(draw: DrawFn, size: Shape) -> nn.AvgPool2d:
    height, width = (draw(st.integers(1, min(3, side))) for side in size[1:])
    stride = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    padding = draw(st.integers(0, height // 2)), draw(st.integers(0, width // 2))
    return nn.AvgPool2d((height, width), stride, padding, draw(st.booleans()), draw(st.booleans()))


@st.composite
def _residual_blocks(draw: DrawFn, size: Shape) -> ResidualBlock:
    channels = size[0]
    kernel, hidden = draw(st.sampled_from((1, 3))), draw(st.integers(1, 3))
    stride, outputs = draw(st.integers(1, 2)), draw(st.sampled_from((channels, 2)))
    branch = nn.Sequential(
        nn.Conv2d(channels, hidden, kernel, padding=kernel // 2),
        draw(st.sampled_from(ACTIVATIONS))(),
        nn.Conv2d(hidden, outputs, 3, stride=stride, padding=1),
    )
    if draw(st.booleans()):
        branch.append(nn.BatchNorm2d(outputs))
    plain = stride == 1 and outputs == channels
    shortcut = nn.Identity() if plain else nn.Conv2d(channels, outputs, 1, stride=stride, bias=False)
    return ResidualBlock(branch, shortcut)


@st.composite
def _heads(draw: DrawFn, features: int, classes: int, residual: bool) -> list[nn.Module]:
    hidden = draw(st.integers(1, 8))
    kind = draw(st.sampled_from(("linear", "hidden", "norm", *(["functional"] if residual else []))))
    match kind:
        case "linear":
            return [nn.Flatten(), nn.Linear(features, classes)]
        case "functional":
            return [FunctionalHead(features, hidden, classes)]
    norm = [nn.BatchNorm1d(hidden), nn.Dropout(0.5)] if kind == "norm" else []
    activation = draw(st.sampled_from(ACTIVATIONS))()
    return [nn.Flatten(), nn.Linear(features, hidden), *norm, activation, nn.Linear(hidden, classes)]


def _output_shape(layer: nn.Module, size: Shape) -> Shape:
    with torch.no_grad():
        outputs = layer.eval()(torch.zeros(1, *size))
    return outputs.shape[1], outputs.shape[2], outputs.shape[3]
