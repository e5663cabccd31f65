"""Checks of the settings that all ascents share."""

import math

import torch

from patchcert.attacks.climbing import LOSSES
from patchcert.errors import InvalidInput


def check_ascent(steps: int, step_size: float, restarts: int, loss: str, batch_size: int) -> None:
    """Refuse settings with which no ascent can run."""
    if steps < 0:
        raise InvalidInput(f"an attack needs 0 steps or more, got steps={steps}", hint="150 is usual")
    if not 0 < step_size < math.inf:
        raise InvalidInput(
            f"an attack needs a positive step size, got step_size={step_size}", hint="0.05 is usual"
        )
    if restarts < 1:
        raise InvalidInput(
            f"an attack needs at least one restart, got restarts={restarts}",
            hint="the first start counts as one",
        )
    if batch_size < 1:
        raise InvalidInput(
            f"an attack needs a batch of at least one image, got batch_size={batch_size}",
            hint="use as many as the memory holds",
        )
    check_choice("loss", loss, tuple(LOSSES))


def default_batch_size(device: torch.device, is_imagenet: bool = False) -> int:
    """Images and restarts at once: enough to keep the device busy, few enough for its memory."""
    if device.type == "cpu":
        return 16 if is_imagenet else 512
    return 256 if is_imagenet else 16384


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a word that is none of the choices."""
    if value not in choices:
        raise InvalidInput(
            f"unknown {name} {value!r} of an attack", hint=f"choose one of {', '.join(choices)}"
        )
