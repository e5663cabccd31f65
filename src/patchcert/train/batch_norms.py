"""Batch norms in training on bounds: they normalise clean values and bounds alike, by the statistics of the batch.

Whose values these are is a setting: those of the clean images, or as much those of bounds. The running statistics
follow them, and they are what certificates see.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, final

import torch
from torch import Tensor, nn

from patchcert.bounds import NEAREST, Interval, Network, trace
from patchcert.bounds.network import Step
from patchcert.bounds.operations import ChannelScale
from patchcert.errors import ModelError
from patchcert.models import ModelSpec
from patchcert.tensors import Images

Norm = nn.modules.batchnorm._NormBase


def batch_norms(model: nn.Module) -> dict[str, Norm]:
    """The layers, by name, that keep statistics of the batches they have seen."""
    layers = model.named_modules()
    return {name: layer for name, layer in layers if isinstance(layer, Norm) and layer.track_running_stats}


class BatchStatistics:
    """By what a batch norm normalises: the present batch's mean and variance; before any batch, the running ones."""

    def __init__(self, layer: Norm) -> None:
        self.layer = layer
        self._present: tuple[Tensor, Tensor] | None = None

    def mean(self) -> Annotated[Tensor, "c"]:
        """Of each channel."""
        return self._running()[0] if self._present is None else self._present[0]

    def deviation(self) -> Annotated[Tensor, "c"]:
        """The root of the variance of each channel and the layer's epsilon, as in eval mode."""
        variance = self._running()[1] if self._present is None else self._present[1]
        return (variance.double() + self.layer.eps).sqrt()

    def take(self, clean: Annotated[Tensor, "n c ..."], box: Interval | None) -> None:
        """Those of clean inputs of the layer or, with a box, of both: its ends weigh together as much as they do."""
        parts = [clean] if box is None else [clean, clean, box.lower, box.upper]
        around = [dimension for dimension in range(clean.dim()) if dimension != 1]
        means = [part.mean(dim=around) for part in parts]
        mean = torch.stack(means).mean(dim=0)
        variances = [
            part.var(dim=around, correction=0) + (own - mean).square()
            for part, own in zip(parts, means, strict=True)
        ]
        self._present = mean, torch.stack(variances).mean(dim=0)
        self._follow(clean.numel() // clean.shape[1])

    @torch.no_grad()
    def _follow(self, count: int) -> None:
        """Move the running statistics as PyTorch does, by variances as if of `count` samples."""
        assert self._present is not None
        assert self.layer.num_batches_tracked is not None
        mean, variance = self._present
        running_mean, running_variance = self._running()
        self.layer.num_batches_tracked += 1
        share = self.layer.momentum
        if share is None:
            share = self.layer.num_batches_tracked.to(mean.dtype).reciprocal()
        running_mean.lerp_(mean, share)
        running_variance.lerp_(variance * (count / max(count - 1, 1)), share)

    def _running(self) -> tuple[Tensor, Tensor]:
        assert self.layer.running_mean is not None
        assert self.layer.running_var is not None
        return self.layer.running_mean, self.layer.running_var


@final
@dataclass(frozen=True, slots=True)
class NormedNetwork(Network):
    """A traced network whose batch norms, by the positions of their steps, normalise by what was observed last."""

    norms: Mapping[int, BatchStatistics]

    def observe(self, images: Images, box: Interval | None, both: bool) -> list[Interval]:
        """Take the statistics of a batch, layer by layer: those of the images, or of `both` images and bounds.

        Returns the bounds of all results, where there is a box.
        """
        values, boxes = [images], [] if box is None else [box]
        for position, step in enumerate(self.steps):
            inputs = [values[index] for index in step.inputs]
            bounds = [boxes[index] for index in step.inputs] if boxes else []
            if position in self.norms:
                self.norms[position].take(inputs[0], bounds[0] if bounds and both else None)
            values.append(step.operation.forward(*inputs))
            if boxes:
                boxes.append(step.operation.interval(*bounds, rounding=NEAREST))
        return boxes


def trainable_network(model: nn.Module, spec: ModelSpec) -> Network:
    """The traced model, for training on its bounds; with batch norms it is a `NormedNetwork`.

    The model must be in eval mode, and stays in it: its batch norms see of a batch what `observe` is given. Each must
    be one step of the forward pass, as the statistics of a batch are those of one place.
    """
    network, layers = trace(model, spec.image_shape), batch_norms(model)
    names = [step.name for step in network.steps]
    for name, layer in layers.items():
        if names.count(name) != 1:
            raise ModelError(
                f"layer '{name}' is a {type(layer).__name__} that a forward pass uses {names.count(name)} times; its "
                "statistics in training on bounds are those of one place",
                hint="give each place a batch norm of its own, and leave out what is not used",
            )
    norms = {names.index(name): BatchStatistics(layer) for name, layer in layers.items()}
    steps = [_normed(step, norms.get(position)) for position, step in enumerate(network.steps)]
    return NormedNetwork(tuple(steps), norms) if norms else network


def _normed(step: Step, statistics: BatchStatistics | None) -> Step:
    if statistics is None:
        return step
    assert isinstance(step.operation, ChannelScale)
    scale = replace(step.operation, mean=statistics.mean, deviation=statistics.deviation)
    return replace(step, operation=scale)
