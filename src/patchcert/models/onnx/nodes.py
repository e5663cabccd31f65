"""Nodes of an ONNX graph with what is known of their inputs, and what rules make modules of them with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from patchcert.errors import UnsupportedLayer

Array = NDArray[Any]
FLOATS = {1: torch.float32, 11: torch.float64}
"""Types by their numbers in ONNX."""

Made = nn.Module | list[nn.Module]
"""What the rule of an operator returns, which takes the node's inputs that are results; a list has a module for each
output."""


@dataclass
class Node:
    """A node with what is known of its inputs: constants as arrays, results by an example, that of a black image.

    Examples have the shape that ONNX gives them for one image. Settings and constants are counted as they are read, so
    that those that a rule does not know are refused. `why_unbounded` is the reason why there are no bounds, and a hint.
    """

    proto: Any
    where: str
    opset: int
    inputs: list[Array | Tensor | None]
    attributes: dict[str, Any]
    producers: Mapping[str, Any] = field(default_factory=dict)
    read: set[str | int] = field(default_factory=set)
    why_unbounded: tuple[str, str] = "", ""

    def refuse(self, reason: str, hint: str = "") -> NoReturn:
        raise UnsupportedLayer(f"{self.where}: {reason}", hint)

    def attribute(self, name: str, default: Any = None) -> Any:  # noqa: ANN401
        self.read.add(name)
        return self.attributes.get(name, default)

    def constant(self, position: int) -> Array | None:
        """The constant at an input; None where it is left out."""
        self.read.add(position)
        value = self.inputs[position] if position < len(self.inputs) else None
        if isinstance(value, Tensor):
            self.refuse(f"input {position} is computed from the image; bounds exist for constants there")
        return value

    def needed(self, position: int) -> Array:
        value = self.constant(position)
        assert value is not None, "the checker has seen to it that inputs are there"
        return value

    def result(self, position: int = 0) -> Tensor:
        """The example of a result at an input."""
        self.read.add(position)
        value = self.inputs[position]
        if not isinstance(value, Tensor):
            self.refuse(f"input {position} is a constant; bounds exist for results of the network there")
        return value

    def batch(self) -> Tensor:
        """The example of the first input, a result whose first dimension is the batch."""
        value = self.result()
        if len(value) != 1:
            self._refuse_moved_batch(value)
        return value

    def map(self) -> Tensor:
        """The example of the first input, a map (1, channels, height, width)."""
        value = self.batch()
        if value.dim() != 4:
            self.refuse(
                f"its input has shape {tuple(value.shape)}; bounds exist for maps, of four dimensions"
            )
        return value

    def inner_axis(self, axis: int) -> int:
        """An axis of the first result, counted from the end; that of the batch is refused."""
        value = next(value for value in self.inputs if isinstance(value, Tensor))
        place = range(value.dim())[axis]
        if place == 0 and len(value) == 1:
            self.refuse(f"its axis is {axis}, the batch; what is said of an image must not depend on others")
        return place - value.dim()

    def every_input(self) -> list[Array | Tensor]:
        """All inputs that are given."""
        self.read |= set(range(len(self.inputs)))
        return [value for value in self.inputs if value is not None]

    def fitting(self) -> list[Array | Tensor]:
        """All inputs; refused where they broadcast in such a way that, in a batch, images would meet one another."""
        values = self.every_input()
        results = [value for value in values if isinstance(value, Tensor)]
        ranks = {value.dim() for value in results}
        firsts = {len(value) for value in results}
        if 1 in firsts:  # the batch, of which constants must not make more either
            firsts |= {value.shape[0] for value in values if value.ndim == max(ranks)}
        if (
            len(ranks) > 1
            or max(value.ndim for value in values) > max(ranks)
            or (1 in firsts and len(firsts) > 1)
        ):
            shapes = ", ".join(str(tuple(value.shape)) for value in values)
            self.refuse(
                f"its inputs of shapes {shapes} broadcast over the batch; expected results of as many dimensions, and "
                "constants that are the same for all images",
                hint="export it with an open batch size, or with images one by one.",
            )
        return values

    def takes_results_alone(self) -> bool:
        """Whether no input is a constant; refused where the first dimension of a result is not the batch."""
        values = self.fitting()
        results = [value for value in values if isinstance(value, Tensor)]
        if len(results[0]) != 1:
            self._refuse_moved_batch(results[0])
        return len(results) == len(values)

    def setting(self, name: str, position: int, since: int) -> Array | None:
        """A setting that is an attribute before some opset, and a constant input from it on."""
        if self.opset >= since:
            return self.constant(position)
        value = self.attribute(name)
        return None if value is None else np.asarray(value)

    def refuse_unread(self) -> None:
        unread = [name for name in self.attributes if name not in self.read]
        unread += [
            f"input {place}"
            for place, value in enumerate(self.inputs)
            if value is not None and place not in self.read
        ]
        if unread:
            self.refuse(f"{unread[0]} is set, and nothing is known of that setting")

    def _refuse_moved_batch(self, value: Tensor) -> NoReturn:
        self.refuse(
            f"its input has shape {tuple(value.shape)} for one image; bounds exist where the first dimension is the "
            "batch"
        )


Rule = Callable[[Node], Made]


def reads(table: dict[str, Rule], *names: str) -> Callable[[Rule], Rule]:
    """Registers how operators become modules."""

    def register(rule: Rule) -> Rule:
        table.update(dict.fromkeys(names, rule))
        return rule

    return register


def tensor_of(array: Array) -> Tensor:
    """A copy of its own."""
    return torch.from_numpy(np.array(array))


def weighted(layer: nn.Module, weight: Array, bias: Array | None) -> nn.Module:
    """The layer with these weights, as they are."""
    layer.weight = nn.Parameter(tensor_of(weight))
    layer.register_parameter("bias", None if bias is None else nn.Parameter(tensor_of(bias)))
    return layer


def held(example: Tensor) -> Tensor:
    """What ONNX has of one image, as networks hold it: with the images in front, in place of a first dimension of 1.

    A result of shape (1, tokens, width) is held as (images, tokens, width), and one of shape (tokens, 1, width) as
    (images, tokens, 1, width): wherever a graph moves its batch to, images do not meet.
    """
    return example if len(example) == 1 else example[None]
