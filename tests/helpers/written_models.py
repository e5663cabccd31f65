"""Models that tests write as functions, and images and boxes for them."""

import torch
from torch import nn

from patchcert.bounds import Interval
from patchcert.testing.networks import randomise


class Written(nn.Module):
    """A model whose forward pass is the given function of (module, images), over some layers."""

    def __init__(self, forward, **layers):
        super().__init__()
        self.written = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, images):
        return self.written(self, images)


def model_of(forward, **layers):
    return randomise(Written(forward, **layers), torch.Generator().manual_seed(0)).double()


def images(count=3, channels=2, height=6, width=5):
    generator = torch.Generator().manual_seed(1)
    return torch.rand(count, channels, height, width, generator=generator, dtype=torch.float64)


def unit_box(*shape):
    """All images of this shape with pixels from 0 to 1."""
    return Interval(torch.zeros(shape, dtype=torch.float64), torch.ones(shape, dtype=torch.float64))


def per_pixel(slopes=(-1.0, 1.0), offsets=(1.0, 0.0)):
    """Class 0 scores how dark a pixel is, class 1 how bright: all that scores can be, pixels can be."""
    model = nn.Conv2d(1, 2, 1).eval()
    with torch.no_grad():
        model.weight.copy_(torch.tensor(slopes).view(2, 1, 1, 1))
        model.bias.copy_(torch.tensor(offsets))
    return model
