"""How strongly each pixel drives a model's own prediction."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from patchcert.errors import ModelError

SaliencyKind = Literal["guided", "gradient", "loss-gradient"]


def saliency(model: nn.Module, images: Tensor, kind: SaliencyKind) -> Tensor:
    """Per pixel the largest absolute input gradient over the channels (n, h, w), without a graph.

    Of the predicted class's logit ("gradient"; "guided" lets ReLUs pass only positive gradients back), or of
    the cross entropy at the predicted class ("loss-gradient"). Images do not influence each other in eval
    mode, so one backward pass serves the batch. Works inside `no_grad` and `inference_mode` and leaves the
    model as it was.
    """
    with torch.inference_mode(False), torch.enable_grad():
        inputs = images.detach().clone().requires_grad_()
        if kind == "guided":
            with guided_backpropagation(model):
                gradient = _input_gradient(model, inputs, kind)
        else:
            gradient = _input_gradient(model, inputs, kind)
    return gradient.abs().amax(dim=1)


@contextmanager
def guided_backpropagation(model: nn.Module) -> Iterator[None]:
    """Inside, every ReLU module passes only positive gradients back; afterwards no trace is left."""
    rectifiers = [module for module in model.modules() if isinstance(module, nn.ReLU | nn.ReLU6)]
    if not rectifiers:
        raise ModelError(
            f"guided saliency needs ReLU modules, but {type(model).__name__} has none",
            hint="use the saliency kind 'gradient' for this model",
        )
    handles: list[RemovableHandle] = []
    try:
        handles += [module.register_forward_hook(_keep_positive) for module in rectifiers]
        yield
    finally:
        for handle in handles:
            handle.remove()


def _keep_positive(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    """The gradient that reaches a ReLU's output is cut at 0; the ReLU itself cuts it where it was off."""
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient.clamp(min=0))


def _input_gradient(model: nn.Module, inputs: Tensor, kind: SaliencyKind) -> Tensor:
    logits = model(inputs)
    predicted = logits.detach().argmax(dim=1)
    if kind == "loss-gradient":
        score = F.cross_entropy(logits, predicted, reduction="sum")
    else:
        score = logits.gather(1, predicted[:, None]).sum()
    return torch.autograd.grad(score, inputs)[0]
