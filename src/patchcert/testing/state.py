"""Seeds, and everything that a call could leave changed behind it."""

import torch
from torch import Generator, nn


def seeded(seed: int = 0) -> Generator:
    """A generator on the CPU."""
    return torch.Generator().manual_seed(seed)


def state_around(model: nn.Module) -> dict[str, object]:
    """The modes, flags and hooks of a model and the switches of torch, to compare before and after a call."""
    return {
        "training": [module.training for module in model.modules()],
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
        "gradients": [parameter.grad is not None for parameter in model.parameters()],
        "hooks": [len(module._forward_hooks) for module in model.modules()],
        "grad mode": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "tf32 convolutions": torch.backends.cudnn.allow_tf32,
        "global random state": torch.get_rng_state().tolist(),
    }


def changed_state(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """The names of what differs."""
    return [name for name, value in before.items() if value != after[name]]
