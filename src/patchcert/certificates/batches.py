"""A model as it is deployed on many copies of images: in one arithmetic, and always in batches of one shape."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields
from functools import cached_property, partial
from numbers import Real
from typing import Annotated, Any, ClassVar, Literal, final, get_args

import torch
from torch import Tensor, nn

from patchcert.bounds.rounding import fast_arithmetic, place_by_place, precise_arithmetic
from patchcert.certificates.checks import (
    REFUSALS,
    check_independence,
    check_logits,
    check_module,
    does_not_take,
    float_weights,
)
from patchcert.certificates.classifier import Classifier
from patchcert.errors import InvalidInput, ModelError, PatchcertError
from patchcert.tensors import Images, Logits
from patchcert.work import count_at_once

Precision = Literal["float32", "tf32", "bfloat16", "float16"]
SLACK: dict[Precision, float] = {"float32": 2**-14, "tf32": 2**-8, "float16": 2**-8, "bfloat16": 2**-6}
"""By how much a class must lead to count, as a share of the largest logit of its copy."""
_HALF: dict[Precision, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# A copy of a ResNet-18 takes 2^29 multiply-adds, and a CPU takes 1.4 times as long for it among 128 as among 8 to 32.
# 2^33 are 16 such copies, which one thread sees in a fifth of a second.
_WORK_AT_ONCE = 2**33
_FEWEST_AT_ONCE = 16


def check_precision(precision: str) -> None:
    """Refuses what is no name of an arithmetic."""
    if precision not in get_args(Precision):
        raise InvalidInput(f"precision is {precision!r}; expected one of {', '.join(get_args(Precision))}")


def check_counts(**counts: object) -> None:
    """Refuses what is no whole number of at least 1."""
    for name, value in counts.items():
        if type(value) is not int or value < 1:
            raise InvalidInput(f"{name} is {value!r}; expected a whole number of at least 1")


class BatchedClassifier(Classifier):
    """A classifier that shows its model copies of images, in batches of one shape and in one arithmetic (`precision`).

    Libraries may still sum in another order when other copies are in a batch: what is said of a copy counts towards a
    proof only as far as it holds with a `slack`, a share of the largest logit. A probe refuses models that move half as
    far as is paid for; what is assumed beyond that is that no answer ever moves further.
    """

    precision: Precision
    slack: float | None
    of_proofs_alone: ClassVar[tuple[str, ...]] = ("slack",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_module(self.model)
        check_precision(self.precision)
        # With 0 a proof would rest on answers that never move by a single bit.
        if self.slack is not None and not (isinstance(self.slack, Real) and 0 < self.slack < 1):
            raise InvalidInput(
                f"slack is {self.slack!r}; expected a share of the largest logit, above 0 and below 1",
                hint="None is a few times what the precision, or weights of 16 bits, round",
            )

    @property
    def needed_lead(self) -> float:
        """The lead that a class must exceed to count for a proof, as a share of the largest logit.

        Unless it is given, that of the shortest type that is computed in: the precision's, or that of weights.
        """
        if self.slack is not None:
            return self.slack
        held = {weight.dtype for weight in float_weights(self.model)}
        return max(SLACK[name] for name in SLACK if name == self.precision or _HALF.get(name) in held)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"slack": self.needed_lead}

    @contextmanager
    def prepared(
        self, images: Images, make: "Callable[[], FixedBatches]", for_proof: bool
    ) -> "Iterator[tuple[FixedBatches, bool]]":
        """Batches for images like these, and whether they are new: those of an earlier call, if the model is as it was.

        Nobody else has them meanwhile: a call from another thread makes its own. For a proof they are always new, since
        nothing tells of a change of what a model reads from elsewhere, such as a global.
        """
        asked, batches = (*_kind_of(images), _state_of(self.model)), None
        with suppress(IndexError):
            known, there = self._prepared.pop()
            batches = there if known == asked and not for_proof else None
            del there  # and the memory of what does not fit, before more is asked for
        is_new = batches is None
        batches = make() if batches is None else batches
        yield batches, is_new
        self._prepared[:] = [(asked, batches)]

    @cached_property
    def _prepared(self) -> "list[tuple[object, FixedBatches]]":
        return []

    def __getstate__(self) -> dict[str, Any]:
        """Copies begin with nothing prepared."""
        return {each.name: getattr(self, each.name) for each in fields(self)}  # pyright: ignore[reportArgumentType]


@final
class FixedBatches:
    """The logits of a model on copies of images, in batches that all have `size` rows.

    Libraries choose by the shape of a batch in which order they sum. With one shape and one arithmetic, what is said of
    a copy does not hang on how many other copies there are; `check_company` tries whether it hangs on which ones. On a
    GPU the forward pass is captured once and replayed, if the model allows it: the same kernels on the same numbers.
    Where the same model is given as torch.compile makes it, that is what runs. Kernels are `by_place` for maps of which
    each place must hang on what it sees alone: those of cuDNN where they spread nothing further than PyTorch's own do,
    which are slower, and else those.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Images,
        size: int,
        precision: Precision,
        compiled: nn.Module | None = None,
        by_place: bool = False,
    ) -> None:
        if model.training:
            raise InvalidInput(
                "the base model is in training mode, where its answers may depend on each other",
                hint="call model.eval()",
            )
        check_independence(model)
        self.model, self.size = model if compiled is None else compiled, size
        self.precision: Precision = precision
        self._kernels = nullcontext if compiled is None else _with_its_hooks
        if by_place:
            self._kernels = place_by_place
        self._input = _blanks(example, size)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output = self._first_answer()
        check_logits(self._output, self._input)
        if example.is_cuda:
            if by_place and self.spreads_further():
                self._kernels = partial(place_by_place, cudnn=False)
                self._output = self._forward()
            self._capture()

    @property
    def classes(self) -> int:
        """How many classes the model tells apart."""
        return self._output.shape[1]

    @torch.no_grad()
    def logits(self, copies: Images) -> Logits:
        """The logits of at most `size` copies; the other rows of the batch are what they were before."""
        self._input[: len(copies)] = copies
        if self._graph is None:
            self._output = self._forward()
        else:
            self._graph.replay()
        return self._output[: len(copies)].to(torch.float32, copy=True)

    def check_company(
        self,
        copies: Images,
        tolerance: float,
        owner: Annotated[Tensor, "n"] | None = None,
        asked: Callable[[Images], Logits] | None = None,
    ) -> None:
        """Raises where logits of the same copies differ by more than this share of the largest, when others are in
        their batch or they stand elsewhere in it.

        A few copies are asked among strangers, images of black and white pixels, and no others: what all in a batch
        share, such as its range, is then different. The largest is that of a copy's own logits, or of all copies of the
        same image, where `owner` says whose they are. Logits are those that are `asked` for, which may come from more
        than one batch.
        """
        asked = asked or self.logits
        copies = copies[: self.size]
        half = (len(copies) + 1) // 2
        there = asked(copies)[:half]
        most = largest(there)
        if owner is not None:
            own = owner[:half]
            most = torch.zeros_like(most).scatter_reduce(0, own, most, "amax")[own]
        few, blanks = min(_AMONG_STRANGERS, half), torch.zeros_like(copies[half:])
        strangers = _black_and_white(copies[few:])
        among_strangers = asked(torch.cat([copies[:few], strangers]))[:few]
        elsewhere = asked(torch.cat([blanks, copies[:half]]))[len(blanks) :]
        apart = distances(there, elsewhere).amax(dim=1)
        apart[:few] = torch.maximum(apart[:few], distances(there[:few], among_strangers).amax(dim=1))
        if bool((apart > tolerance * most).any()):
            raise ModelError(
                "the base model says something else of the same images when others are in their batch",
                hint="what it says of an image must not depend on the batch; half precision may be too coarse for it",
            )

    def spreads_further(self) -> bool:
        """Whether NaN at a pixel reaches other numbers than without cuDNN; no, where nothing runs without it."""
        blank, height, width = self._input, *self._input.shape[2:]
        self._input = blank.clone()
        for row, pixel in enumerate(neighbours(height, width)[: self.size].tolist()):
            self._input[row, :, pixel // width, pixel % width] = torch.nan
        try:
            spread = self._forward().isnan()
            with place_by_place(cudnn=False):
                return not torch.equal(spread, self._forward().isnan())
        except RuntimeError:
            return False
        finally:
            self._input = blank

    @torch.no_grad()
    def _forward(self) -> Annotated[Tensor, "b ..."]:
        with _arithmetic(self.precision, self._input.device), self._kernels():
            return self.model(self._input)

    def _first_answer(self) -> Annotated[Tensor, "b ..."]:
        """Of blanks; channels-last, the layout in which a GPU convolves fastest, where the model takes it."""
        if self._input.is_cuda:
            given, self._input = self._input, self._input.contiguous(memory_format=torch.channels_last)
            try:
                return self._forward()
            except REFUSALS:  # a view of a map may exist in the other layout only
                self._input = given
        try:
            return self._forward()
        except torch.OutOfMemoryError as error:
            raise _too_many(self._input, self.size) from error
        except PatchcertError:
            raise
        except REFUSALS as error:
            hint = (
                "check channels, height and width against the model's first layers; models that vote on bands or "
                "blocks take one channel more than images have, those that vote on ablated images twice as many"
            )
            held = sorted({str(weight.dtype) for weight in float_weights(self.model)})
            if len(held) > 1:
                hint = (
                    f"weights and buffers are of {' and '.join(held)}, and images are given to the model in "
                    f"{self._input.dtype}, which holds all: bring them to one type, with model.float()"
                )
            raise does_not_take(self._input, error, hint) from error

    def _capture(self) -> None:
        """Record the forward pass; a model that looks at values on the host cannot be recorded, and runs as it is."""
        graph, aside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(aside):
                self._forward()
            torch.cuda.current_stream().wait_stream(aside)
            with torch.cuda.graph(graph):
                self._output = self._forward()
        except RuntimeError:
            torch.cuda.synchronize()
            return
        self._graph = graph


def _with_its_hooks() -> AbstractContextManager[object]:
    """What is compiled here is compiled again where hooks of the model have changed, which is not looked at else."""
    return torch._dynamo.config.patch(skip_nnmodule_hook_guards=False)


def _kind_of(images: Images) -> tuple[object, ...]:
    """What images must share to go through the same batches: work on another stream does not wait for theirs, and what
    is made in inference mode cannot be changed outside of it. Of no images nothing is tried in other company."""
    stream = torch.cuda.current_stream(images.device).cuda_stream if images.is_cuda else 0
    shape, mode = (len(images) > 0, *images.shape[1:]), torch.is_inference_mode_enabled()
    return shape, images.dtype, images.device, stream, mode


def _state_of(model: nn.Module) -> object:
    """What a recorded forward pass hangs on beside the numbers in its weights, which it reads anew: the layers, their
    settings and hooks, and where tensors are. Of a model whose tensors are nowhere yet, equal to no other."""
    try:
        tensors = [_place_of(each) for each in (*model.parameters(), *model.buffers())]
        # Scripted layers keep their mode elsewhere.
        layers = [
            (_Same(layer), type(layer), layer.training, _setting(vars(layer))) for layer in model.modules()
        ]
    except (RuntimeError, ValueError):
        return object()
    return tensors, layers


def _place_of(tensor: Tensor) -> tuple[object, ...]:
    version = 0 if tensor.is_inference() else tensor._version
    return id(tensor), tensor.data_ptr(), version, tensor.shape, tensor.stride(), tensor.dtype


def _setting(value: object) -> object:
    """A plain value itself, where a tensor is, all that lists and dicts hold, and of anything else which one it is."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, dict):
        return [*map(_setting, value), *map(_setting, value.values())] if value else ()
    if isinstance(value, list | tuple):
        return [*map(_setting, value)]
    if isinstance(value, Tensor):
        return _place_of(value)
    return _Same(value)


_PLAIN = (int, float, str, type(None))


@final
@dataclass(frozen=True, eq=False, slots=True)
class _Same:
    """Equal to what holds the same object, which is kept: no other one gets its id meanwhile."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


def neighbours(height: int, width: int) -> Annotated[Tensor, "_"]:
    """Pixels next to each other near the middle, in rows and columns, by their numbers: tiles of transforms are no
    larger."""
    rows, columns = (
        (length // 2 + torch.arange(_NEIGHBOURS)).clamp(max=length - 1) for length in (height, width)
    )
    return (rows[:, None] * width + columns).flatten()


_NEIGHBOURS = 8


def _blanks(example: Images, size: int) -> Annotated[Tensor, "b c h w"]:
    try:
        return example.new_zeros(size, *example.shape[1:])
    except RuntimeError as error:  # CPUs raise no error of their own for want of memory
        raise _too_many(example, size) from error


def _too_many(example: Images, size: int) -> InvalidInput:
    return InvalidInput(
        f"a batch of {size:,} copies of {tuple(example.shape[1:])} does not fit into memory",
        hint="set a smaller batch_size",
    )


@torch.no_grad()
def copies_at_once(model: nn.Module, example: Images, most: int, precision: Precision) -> int:
    """How many copies make a batch, the same in every prediction and proof of a model: `most`, on a CPU fewer where the
    model takes much work for each."""
    if example.device.type != "cpu" or most <= _FEWEST_AT_ONCE or not len(example):
        return most
    alone = FixedBatches(model, example, 1, precision)
    # Of a blank: a model that takes more work for some images would let these choose the shape of their batch.
    return count_at_once(alone.logits, torch.zeros_like(example[:1]), most, _WORK_AT_ONCE, _FEWEST_AT_ONCE)


def largest(logits: Logits) -> Annotated[Tensor, "n"]:
    """The largest absolute value of each row, of those that are finite."""
    return logits.nan_to_num(0.0, 0.0, 0.0).abs().amax(dim=1)


def distances(one: Logits, other: Logits) -> Logits:
    """How far logits are apart: a number and what is none without limit, two that are none not at all."""
    is_number = one.isfinite(), other.isfinite()
    apart = (one - other).abs().where(is_number[0] & is_number[1], torch.inf)
    return apart.where(is_number[0] | is_number[1], 0.0)


_AMONG_STRANGERS, _STRANGERS = 4, 16
"""Copies that are asked among strangers, and how many different strangers there are."""


def _black_and_white(like: Images) -> Images:
    """As many images of random black and white pixels, the same at every call; after a few they repeat."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    drawn = torch.rand(_STRANGERS, *like.shape[1:], generator=generator, device="cpu").round().to(like)
    return drawn[torch.arange(len(like), device=like.device) % _STRANGERS]


@final
class MeanVote(nn.Module):
    """What an attack differentiates in place of votes or masks: the mean of a model's softmax over copies of images.

    Where the classifier computes in 16 bits on a GPU, the model does so here: in bfloat16, for the small gradients of
    single pixels could be zero in float16.
    """

    def __init__(
        self,
        model: nn.Module,
        copies: Callable[[Images], Iterable[Tensor]],
        precision: Precision = "float32",
    ) -> None:
        super().__init__()
        self.model, self.copies, self.in_16_bits = model, copies, precision in _HALF
        self.training = model.training

    def forward(self, images: Images) -> Logits:
        """Logarithms of mean probabilities."""
        mean = torch.stack([self._probabilities(copy) for copy in self.copies(images)]).mean(dim=0)
        return mean.clamp(min=torch.finfo(mean.dtype).tiny).log()

    def _probabilities(self, copies: Images) -> Logits:
        if not (self.in_16_bits and copies.is_cuda):
            return self.model(copies).softmax(dim=1)
        with torch.autocast("cuda", torch.bfloat16):
            try:
                logits = self.model(copies.contiguous(memory_format=torch.channels_last))
            except RuntimeError:  # a view of a map may exist in the other layout only
                logits = self.model(copies)
        return logits.float().softmax(dim=1)


@contextmanager
def _arithmetic(precision: Precision, device: torch.device) -> Iterator[None]:
    """The precision whatever is set outside; TF32 exists on CUDA alone."""
    with precise_arithmetic():
        if precision == "tf32":
            with fast_arithmetic():
                yield
        elif precision in _HALF:
            with torch.autocast(device.type, _HALF[precision], cache_enabled=False):
                yield
        else:
            yield
