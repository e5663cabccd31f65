"""A defense that pre-processes images, and a classifier that stands behind one."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import final

from torch import Tensor, nn

from patchcert.tensors import Images, Logits

Surrogate = Callable[[Tensor], Tensor]
"""Images as the classifier sees them, with a gradient of its own."""


class Defense(nn.Module, ABC):
    """Changes images before the classifier sees them, and states what an adaptive attacker differentiates.

    Every surrogate equals `forward` in value, bit for bit, and differs from it only in its gradient. An
    attack on a surrogate therefore always sees the true logits of the defended model.
    """

    @abstractmethod
    def forward(self, images: Images) -> Images:
        """The images as the classifier sees them."""

    @abstractmethod
    def surrogates(self) -> tuple[Surrogate, ...]:
        """What an adaptive attacker differentiates in place of `forward`; each gets its own restarts."""


@final
class Defended(nn.Module):
    """A classifier behind a defense; to everyone else an ordinary model.

    With a surrogate of the defense it has the same logits, and the gradients that an adaptive attacker uses.
    """

    def __init__(self, defense: Defense, model: nn.Module, surrogate: Surrogate | None = None) -> None:
        super().__init__()
        self.defense = defense
        self.model = model
        self.surrogate = surrogate or defense
        self.train(model.training)

    def forward(self, images: Images) -> Logits:
        """The logits of the model on the images that the defense lets through."""
        return self.model(self.surrogate(images))

    def surrogates(self) -> "tuple[Defended, ...]":
        """The defended model once per surrogate."""
        return tuple(Defended(self.defense, self.model, each) for each in self.defense.surrogates())


def straight_through(value: Tensor, source: Tensor) -> Tensor:
    """Exactly `value`, with the gradient of `source`."""
    return value.detach() + (source - source.detach())
