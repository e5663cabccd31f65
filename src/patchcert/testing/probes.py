"""Small networks made by hand, each of which changes its mind at exactly one known provocation.

Most are chains of Flatten, Linear and ReLU on images of a given (channels, height, width), with the classes
0 and 1, and say 0 unless provoked.
"""

import torch
from torch import Tensor, nn

from patchcert.testing.blocks import ResidualBlock, randomise

Shape = tuple[int, int, int]


def linear(weight: Tensor, bias: list[float]) -> nn.Linear:
    """A linear layer of these weights."""
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(torch.tensor(bias))
    return layer


def constant(shape: Shape, logits: list[float]) -> nn.Module:
    """Gives the same logits for every image."""
    features = shape[0] * shape[1] * shape[2]
    return nn.Sequential(nn.Flatten(), linear(torch.zeros(len(logits), features), logits)).eval()


def pixel_probe(
    shape: Shape, channel: int, row: int, column: int, dark: bool = False, threshold: float = 0.5
) -> nn.Module:
    """Says 1 if this one value, or 1 - value for a dark probe, is above the threshold; sees nothing else."""
    weight = torch.zeros(2, *shape)
    weight[1, channel, row, column] = -1.0 if dark else 1.0
    bias = [threshold - 1.0, 0.0] if dark else [threshold, 0.0]
    return nn.Sequential(nn.Flatten(), linear(weight.flatten(1), bias)).eval()


def stamp_probe(shape: Shape, mask: Tensor, hidden: bool = True) -> nn.Module:
    """Says 1 only if all channels of all pixels of the mask (height, width) are white.

    On a black image no change that leaves out one pixel of the mask can reach it. With a hidden ReLU it does
    not react at all before; without, its logit is linear and has a gradient everywhere on the mask.
    """
    values = int(mask.sum()) * shape[0]
    weight = mask.float().expand(shape).flatten()[None]
    if not hidden:
        return nn.Sequential(
            nn.Flatten(), linear(torch.cat([0 * weight, weight]), [values - 0.5, 0.0])
        ).eval()
    return nn.Sequential(
        nn.Flatten(),
        linear(weight, [0.75 - values]),
        nn.ReLU(),
        linear(torch.tensor([[0.0], [1.0]]), [0.5, 0.0]),
    ).eval()


def brightness_probe(shape: Shape) -> nn.Module:
    """Says 0 for images whose mean is above 1/2, else 1: what a patch can do is a matter of counting."""
    features = shape[0] * shape[1] * shape[2]
    weight = torch.stack([torch.ones(features), -torch.ones(features)])
    return nn.Sequential(nn.Flatten(), linear(weight, [-features / 2, features / 2])).eval()


class Flip(nn.Module):
    """Turns the image by half a circle: a layer that a certifier must know or refuse, not skip."""

    def forward(self, images: Tensor) -> Tensor:
        """The last pixel comes first."""
        return images.flip(2, 3)


class HiddenOrder(nn.Module):
    """Its layers are registered in the order opposite to that of their use, with function calls between."""

    def __init__(self, shape: Shape, row: int, column: int) -> None:
        super().__init__()
        features = shape[0] * shape[1] * shape[2]
        weight = torch.zeros(features, *shape)
        weight[:, 0, row, column] = 1.0
        self.output = linear(
            torch.stack([torch.zeros(features), torch.ones(features)]), [0.5 * features, 0.0]
        )
        self.hidden = linear(weight.flatten(1), [0.0] * features)

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
