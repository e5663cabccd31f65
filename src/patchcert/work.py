"""How large a model is, and how much work."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


def parameter_count(model: nn.Module) -> int:
    """How many numbers were learned."""
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def multiply_adds(function: Callable[[Tensor], object], inputs: Tensor) -> int:
    """The multiplications with an addition that one call takes in convolutions and products of matrices.

    They are counted as they are computed, whatever the function is made of; what is compiled, as it was written. No
    module gets a hook, which bounds would refuse.
    """
    counter = _Counter()
    with counter, _uncompiled():
        function(inputs)
    return counter.operations // 2  # a product and a sum are two of what is counted


@torch.no_grad()
def bytes_made(function: Callable[[Tensor], object], inputs: Tensor) -> int:
    """The bytes of all results on the way, views too: no fewer than what a gradient through the call keeps of them."""
    counter = _Counter()
    with counter, _uncompiled():
        function(inputs)
    return counter.bytes


def count_at_once(
    function: Callable[[Tensor], object], one: Tensor, most: int, work: int, fewest: int
) -> int:
    """How many inputs a function is given at once: `most`, on a CPU so few that they take `work` multiply-adds, but not
    fewer than `fewest`.

    The number follows from a count and not from a clock, so that the same work is cut the same way whenever it runs.
    """
    if one.device.type != "cpu" or most <= fewest:
        return most
    return min(most, max(fewest, work // max(multiply_adds(function, one), 1)))


def _uncompiled() -> AbstractContextManager[object]:
    """No function runs compiled in this context. Where the compiler is not loaded, none is."""
    is_loaded = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if is_loaded else nullcontext()


@final
class _Counter(TorchDispatchMode):
    """Counts the operations for which PyTorch has a formula, and the bytes of all results."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.bytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: the first count would load the compiler of PyTorch, which takes a second, only to be left out of it."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - an operator of PyTorch, which has no public type
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operator returns
        named = kwargs or {}
        result = func(*args, **named)
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.operations += formula(*args, **named, out_val=result)
        self.bytes += sum(leaf.nbytes for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result
