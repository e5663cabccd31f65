"""Parts of small random networks: modules that are no chain of layers, and reproducible weights for all."""

import torch
from torch import Generator, Tensor, nn


class ResidualBlock(nn.Module):
    """The sum of a branch and a shortcut, either of which may be any module."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut = shortcut

    def forward(self, images: Tensor) -> Tensor:
        """Both paths see the same input."""
        return self.branch(images) + self.shortcut(images)


class FunctionalHead(nn.Module):
    """A head whose flattening and activation are function calls, invisible in a list of its submodules."""

    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(features, hidden)
        self.output = nn.Linear(hidden, classes)

    def forward(self, features: Tensor) -> Tensor:
        """Flatten, one hidden layer, logits."""
        return self.output(torch.relu(self.hidden(torch.flatten(features, 1))))


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
