"""The classifiers of Chiang et al., "Certified Defenses for Adversarial Patches" (ICLR 2020)."""

from collections import OrderedDict
from dataclasses import dataclass, replace

from torch import nn

from patchcert.errors import ModelError
from patchcert.models.registry import architecture
from patchcert.models.spec import ModelSpec


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


def _cnn4(spec: ModelSpec, first: _Convolution) -> nn.Sequential:
    rest = (_Convolution(4, 4, 2, 1), _Convolution(8, 3, 1, 1), _Convolution(8, 4, 2, 1))
    hidden = spec.hidden or 256
    return _network(spec, (first, *rest), widths=(hidden, hidden))


def _network(
    spec: ModelSpec, convolutions: tuple[_Convolution, ...], widths: tuple[int, ...]
) -> nn.Sequential:
    """Convolutions, then fully connected layers, a ReLU after each but the last, which is called `logits`."""
    if spec.widths:
        convolutions, widths = _with_widths(spec, convolutions, widths)
    layers = OrderedDict[str, nn.Module]()
    channels, height, width = spec.channels, spec.height, spec.width
    for index, shape in enumerate(convolutions, start=1):
        layers[f"conv{index}"] = nn.Conv2d(
            channels, shape.channels, shape.kernel, shape.stride, shape.padding
        )
        layers[f"relu{index}"] = nn.ReLU()
        channels, height, width = shape.channels, shape.output_size(height), shape.output_size(width)
    if min(height, width) < 1:
        raise ModelError(
            f"{spec.name} needs larger images than {spec.height}x{spec.width}: nothing is left of them"
        )
    layers["flatten"] = nn.Flatten()
    features = channels * height * width
    for index, units in enumerate(widths, start=1):
        layers[f"linear{index}"] = nn.Linear(features, units)
        layers[f"relu{len(convolutions) + index}"] = nn.ReLU()
        features = units
    layers["logits"] = nn.Linear(features, spec.classes)
    return nn.Sequential(layers)


def _with_widths(
    spec: ModelSpec, convolutions: tuple[_Convolution, ...], widths: tuple[int, ...]
) -> tuple[tuple[_Convolution, ...], tuple[int, ...]]:
    """The same layers with the channels and units that the description asks for."""
    many = len(convolutions)
    if len(spec.widths) != many + len(widths):
        raise ModelError(
            f"{spec.name} has {many + len(widths)} layers before the last, but ModelSpec.widths has "
            f"{len(spec.widths)} numbers: {spec.widths}"
        )
    narrowed = [
        replace(shape, channels=channels)
        for shape, channels in zip(convolutions, spec.widths[:many], strict=True)
    ]
    return tuple(narrowed), spec.widths[many:]
