"""Layers that PyTorch does not have."""

from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch
from torch import Tensor, fx, nn

from patchcert.bounds import function_rule, layer_rule
from patchcert.bounds.operations import ChannelScale, Operation
from patchcert.errors import ModelError, UnsupportedLayer


class Normalize(nn.Module):
    """(image - mean) / std per channel, as a layer: threats then stay in raw pixels of [0, 1].

    A single mean and deviation, also as plain numbers, are those of all channels.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: float | Sequence[float], std: float | Sequence[float]) -> None:
        super().__init__()
        mean, std = _statistics("mean", mean), _statistics("std", std)
        if len(mean) != len(std) or len(mean) == 0:
            raise ModelError(
                f"Normalize needs one mean and one std per channel, got {len(mean)} and {len(std)} values",
                hint="give as many numbers for each as images have channels: Normalize((0.13,), (0.31,))",
            )
        if not all(value > 0 for value in std):
            raise ModelError(f"Normalize needs positive standard deviations, got {tuple(std)}")
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.get_default_dtype())[:, None, None])
        self.register_buffer("std", torch.tensor(std, dtype=torch.get_default_dtype())[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        """The images with every channel centred and scaled."""
        if not torch.jit.is_scripting():  # pyright: ignore[reportPrivateImportUsage]
            _check_channels(images, len(self.mean))
        return (images - self.mean) / self.std

    def extra_repr(self) -> str:
        """Shows the values in `print(model)`."""
        return f"mean={_rounded(self.mean)}, std={_rounded(self.std)}"


class Mean(nn.Module):
    """The mean of what several networks say of the same images."""

    def __init__(self, networks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, or maps of them."""
        first, *others = self.networks
        total = first(images)
        for network in others:
            total = total + network(images)
        return total / len(self.networks)


def _statistics(name: str, values: float | Sequence[float]) -> list[float]:
    try:
        return torch.as_tensor(values, dtype=torch.float64, device="cpu").flatten().tolist()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"the {name} of Normalize must be a number for each channel, got {values!r}",
            hint="give a sequence of numbers, such as (0.13,) for grey images",
        ) from error


@fx.wrap
def _check_channels(images: Tensor, channels: int) -> None:
    """More statistics than channels would be broadcast, to channels that the images do not have.

    Looks at the shape alone; torch.fx keeps the call as it is, so that layers with it can be traced.
    """
    if images.dim() < 3 or channels not in (1, images.shape[-3]):
        raise ModelError(
            f"Normalize has the statistics of {channels} channels, got images of shape {tuple(images.shape)}",
            hint="give images with as many channels as the model was made for",
        )


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 6) for value in values.flatten().tolist()]


@layer_rule(Normalize)
def _normalize(layer: Normalize) -> Operation:
    return ChannelScale(lambda: layer.mean.flatten(), lambda: layer.std.flatten(), None, None)


@function_rule(_check_channels)
def _taken_apart(channels: int) -> NoReturn:
    raise UnsupportedLayer(
        "a Normalize layer has been taken apart by torch.fx",
        hint="give the model as it was before it was traced",
    )


class _Encoded(nn.Module):
    """Lets images through that are encoded in more channels, and refuses images as they are."""

    what: str
    hint: str

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, encoded: Tensor) -> Tensor:
        """The encoded images, unchanged."""
        if encoded.shape[1] != self.channels:
            raise ModelError(
                f"the network takes {self.what}, encoded in {self.channels} channels, "
                f"got {encoded.shape[1]} channels",
                hint=self.hint,
            )
        return encoded


class AblatedImages(_Encoded):
    """Takes images of which some pixels are shown, encoded in twice their channels."""

    what = "ablated images"
    hint = "its votes certify it: patchcert.RandomAblation"

    def __init__(self, channels: int) -> None:
        super().__init__(2 * channels)


class PartImages(_Encoded):
    """Takes parts of images, whose last channel says what is seen."""

    what = "parts of images"
    hint = "its votes certify it: patchcert.BandVotes or patchcert.BlockVotes"

    def __init__(self, channels: int) -> None:
        super().__init__(channels + 1)


@layer_rule(AblatedImages, PartImages)
def _encoded_images(layer: _Encoded) -> NoReturn:
    raise UnsupportedLayer(f"its network votes on {layer.what}, so it has no bounds", hint=layer.hint)
