"""Small networks for tests: random ones with reproducible weights, and probes that change at one known provocation.

Most probes are chains of Flatten, Linear and ReLU on images of a given (channels, height, width), with the classes
0 and 1, and say 0 unless provoked.
"""

import math

import torch
from torch import Generator, Tensor, nn

Shape = tuple[int, int, int]
"""Channels, height and width of images."""
SHAPE: Shape = (1, 4, 5)
"""Of the images on which attacks and classifiers are tried."""


class ResidualBlock(nn.Module):
    """The sum of a branch and a shortcut, either of which may be any module."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut = shortcut

    def forward(self, images: Tensor) -> Tensor:
        """Both paths see the same input."""
        return self.branch(images) + self.shortcut(images)


@torch.no_grad()
def randomise(model: nn.Module, generator: Generator, gain: float = 1.0) -> nn.Module:
    """Give every layer weights drawn from the generator, batch norms also running statistics; in eval mode.

    Weights have the scale gain / sqrt(fan in); the scales of batch norms have either sign.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            spread = gain / module.weight[0].numel() ** 0.5
            _draw(module.weight, generator, -spread * 1.7, spread * 1.7)
            if module.bias is not None:
                _draw(module.bias, generator, -0.5, 0.5)
        elif isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            _randomise_batch_norm(module, generator)
    return model.eval()


def linear(weight: Tensor, bias: list[float]) -> nn.Linear:
    """A linear layer of these weights; those of one output may have the shape of an image."""
    weight = weight.flatten(1)
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(torch.tensor(bias))
    return layer


def constant(shape: Shape, logits: list[float]) -> nn.Module:
    """Gives the same logits for every image."""
    return nn.Sequential(nn.Flatten(), linear(torch.zeros(len(logits), *shape), logits)).eval()


def pixel_probe(
    shape: Shape, channel: int, row: int, column: int, dark: bool = False, threshold: float = 0.5
) -> nn.Module:
    """Says 1 if this one value, or 1 - value for a dark probe, is above the threshold; sees nothing else."""
    weight = torch.zeros(2, *shape)
    weight[1, channel, row, column] = -1.0 if dark else 1.0
    bias = [threshold - 1.0, 0.0] if dark else [threshold, 0.0]
    return nn.Sequential(nn.Flatten(), linear(weight, bias)).eval()


def stamp_probe(shape: Shape, mask: Tensor, hidden: bool = True) -> nn.Module:
    """Says 1 only if all channels of all pixels of the mask (height, width) are white.

    On a black image no change that leaves out one pixel of the mask can reach it. With a hidden ReLU it does
    not react at all before; without, its logit is linear and has a gradient everywhere on the mask.
    """
    values = int(mask.sum()) * shape[0]
    weight = mask.float().expand(1, *shape)
    layers = [linear(torch.cat([0 * weight, weight]), [values - 0.5, 0.0])]
    if hidden:
        second = linear(torch.tensor([[0.0], [1.0]]), [0.5, 0.0])
        layers = [linear(weight, [0.75 - values]), nn.ReLU(), second]
    return nn.Sequential(nn.Flatten(), *layers).eval()


def brightness_probe(shape: Shape) -> nn.Module:
    """Says 0 for images whose mean is above 1/2, else 1: what a patch can do is a matter of counting."""
    half, white = math.prod(shape) / 2, torch.ones(shape)
    return nn.Sequential(nn.Flatten(), linear(torch.stack([white, -white]), [-half, half])).eval()


class Flip(nn.Module):
    """Turns the image by half a circle: a layer that a certifier must know or refuse, not skip."""

    def forward(self, images: Tensor) -> Tensor:
        """The last pixel comes first."""
        return images.flip(2, 3)


class HiddenOrder(nn.Module):
    """Its layers are registered in the order opposite to that of their use, with function calls between."""

    def __init__(self, shape: Shape, row: int, column: int) -> None:
        super().__init__()
        features, white = math.prod(shape), torch.ones(shape)
        weight = torch.zeros(features, *shape)
        weight[:, 0, row, column] = 1.0
        self.output = linear(torch.stack([0 * white, white]), [0.5 * features, 0.0])
        self.hidden = linear(weight, [0.0] * features)

    def forward(self, images: Tensor) -> Tensor:
        """Hidden layer before output, whatever the registration says."""
        return self.output(torch.relu(self.hidden(torch.flatten(images, 1))))


def random_networks(shape: Shape, classes: int, seed: int, gain: float = 1.0) -> dict[str, nn.Module]:
    """A handful of small random classifiers in eval mode; those of a small gain are calm."""
    channels, height, width = shape
    features = channels * height * width
    found = {
        "linear": nn.Sequential(nn.Flatten(), nn.Linear(features, classes)),
        "mlp": nn.Sequential(nn.Flatten(), nn.Linear(features, 6), nn.ReLU(), nn.Linear(6, classes)),
        "convolutional": _convolutional(shape, classes, nn.ReLU()),
        "sigmoid": _convolutional(shape, classes, nn.Sigmoid()),
        "pooled": nn.Sequential(
            nn.Conv2d(channels, 3, (3, 2), padding=1),
            nn.LeakyReLU(0.1),
            nn.MaxPool2d(2, stride=1),
            nn.AvgPool2d((2, 1), stride=1),
            nn.Flatten(),
            nn.Linear(3 * (height - 2) * width, classes),
        ),
        "normalised": nn.Sequential(
            nn.BatchNorm2d(channels), _convolutional(shape, 4, nn.ReLU()), nn.ReLU(), nn.Linear(4, classes)
        ),
        "residual": nn.Sequential(
            ResidualBlock(
                nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU()), nn.Identity()
            ),
            nn.Flatten(),
            nn.Linear(features, classes),
        ),
    }
    generator = torch.Generator().manual_seed(seed)
    return {name: randomise(model, generator, gain) for name, model in found.items()}


def _convolutional(shape: Shape, classes: int, activation: nn.Module) -> nn.Sequential:
    channels, height, width = shape
    features = 3 * (height // 2 + height % 2) * (width // 2 + width % 2)
    return nn.Sequential(
        nn.Conv2d(channels, 3, 3, stride=2, padding=1), activation, nn.Flatten(), nn.Linear(features, classes)
    )


def _randomise_batch_norm(layer: nn.BatchNorm1d | nn.BatchNorm2d, generator: Generator) -> None:
    if layer.affine:
        _draw(layer.weight, generator, -1.5, 1.5)
        _draw(layer.bias, generator, -0.5, 0.5)
    if layer.running_mean is not None and layer.running_var is not None:
        _draw(layer.running_mean, generator, -0.5, 0.5)
        _draw(layer.running_var, generator, 0.2, 2.0)


def _draw(target: Tensor, generator: Generator, low: float, high: float) -> None:
    values = torch.rand(target.shape, generator=generator, dtype=torch.float64) * (high - low) + low
    target.copy_(values)
