"""Operations that join, pick, move or repeat values and compute nothing."""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchcert.bounds.forms import Forms, Pulled, Slopes, shifted
from patchcert.bounds.geometry import FeatureMap, Geometry, NotCovered, Places
from patchcert.bounds.lowering import BATCH_SIZE, function_rule, layer_rule, pair, refuse, splitting_rule
from patchcert.bounds.operations.base import ANY_NUMBER, Exact, Interval, Operation, check_maps, check_terms
from patchcert.bounds.rounding import Rounding
from patchcert.errors import ModelError, UnsupportedLayer


class Moved(Exact):
    """An operation that computes nothing: each output is one of the inputs, the same one for all images, or 0."""

    def backward(self, forms: Forms, *inputs: Interval, slope: Slopes, rounding: Rounding) -> Pulled | None:
        """Coefficients go to where the values were taken from; those of a value that was taken twice are added."""
        shapes = [box.shape[1:] for box in inputs]
        sizes = [math.prod(shape) for shape in shapes]
        numbers = torch.arange(1, sum(sizes) + 1, device=forms.device, dtype=torch.float64).split(sizes)
        given = [number.reshape(1, *shape) for number, shape in zip(numbers, shapes, strict=True)]
        taken = self.forward(*given).flatten().long()  # 0 for what comes from nowhere
        moved = forms.new_zeros(*forms.shape[:2], sum(sizes) + 1).index_add(2, taken, forms.flatten(2))
        parts = moved[..., 1:].split(sizes, dim=2)
        pulled = Pulled.exactly(
            forms, *(part.unflatten(2, shape) for part, shape in zip(parts, shapes, strict=True))
        )
        most = int(taken[taken > 0].bincount().max()) if rounding.is_outward and bool(taken.any()) else 1
        if most == 1:
            return pulled
        reached = self.forward(*(box.magnitude for box in inputs))
        return replace(pulled, error=shifted(forms, reached, most, rounding))


@dataclass(frozen=True, slots=True)
class Concatenate(Moved):
    """Results one after the other along a dimension that is not the batch."""

    dim: int
    arity: ClassVar[int] = ANY_NUMBER

    def forward(self, *inputs: Tensor) -> Tensor:
        if self.dim % inputs[0].dim() == 0:
            raise UnsupportedLayer(
                f"results of shape {tuple(inputs[0].shape)} are joined along the batch",
                hint="join along dim=1",
            )
        return torch.cat(inputs, self.dim)

    def places(self, area: FeatureMap) -> Places:
        if self.dim not in (1, -3) or area.is_flat:
            raise NotCovered("results are joined along another dimension than their channels")
        return Places.KEPT


@function_rule(torch.cat, torch.concat, torch.concatenate)
def _concatenate(dim: int = 0) -> Operation:
    if dim == 0:
        refuse("dim is 0: it joins the images of a batch", hint="join channels or features by dim=1")
    return Concatenate(dim)


@dataclass(frozen=True, slots=True)
class Part(Moved):
    """Some of the values of each image; `is_by_channel` says that they are all places of some channels of a map."""

    take: Callable[[Tensor], Tensor]
    is_by_channel: bool
    may_share_memory: ClassVar[bool] = True

    def forward(self, *inputs: Tensor) -> Annotated[Tensor, "n ..."]:
        return self.take(inputs[0])

    def places(self, area: FeatureMap) -> Places:
        if not self.is_by_channel or area.is_flat:
            raise NotCovered("values are picked by another dimension than their channels")
        return Places.KEPT


def _piece(pieces: Callable[[Tensor], Sequence[Tensor]], dim: int, index: object) -> Operation:
    if not isinstance(index, int):
        refuse(f"its pieces are picked by {index}, bounds exist for single ones, by whole numbers")

    def take(value: Tensor) -> Tensor:
        if dim % value.dim() == 0:
            refuse(
                f"results of shape {tuple(value.shape)} are split along the batch", hint="split along dim=1"
            )
        return pieces(value)[index]

    return Part(take, is_by_channel=dim in (1, -3))


@splitting_rule(torch.chunk, "chunk")
def _chunk(index: object, chunks: int, dim: int = 0) -> Operation:
    return _piece(lambda value: value.chunk(chunks, dim), dim, index)


@splitting_rule(torch.split, "split")
def _split(index: object, split_size: int | tuple[int, ...], dim: int = 0) -> Operation:
    sizes = split_size if isinstance(split_size, int) else list(split_size)
    return _piece(lambda value: value.split(sizes, dim), dim, index)


@function_rule(operator.getitem)
def _getitem(index: object) -> Operation:
    chosen = index if isinstance(index, tuple) else (index,)
    picked = tuple(each for each in chosen if _is_plain(each))
    if len(picked) < len(chosen) or chosen[0] != slice(None):
        refuse(f"it picks {list(chosen)}: the first must be all of the batch, the others numbers or slices")
    is_by_channel = isinstance(chosen[-1], slice) and all(each == slice(None) for each in chosen[2:])
    return Part(lambda value: value[picked], is_by_channel)


def _is_plain(index: object) -> TypeGuard[int | slice]:
    """Whether it is a number, or a slice from and to numbers."""
    if isinstance(index, slice):
        return all(isinstance(end, int | None) for end in (index.start, index.stop, index.step))
    return isinstance(index, int) and not isinstance(index, bool)


@dataclass(frozen=True, slots=True)
class Permute(Moved):
    """The same values with their dimensions in another order; the first, the batch, stays."""

    reorder: Callable[[Tensor], Tensor]
    may_share_memory: ClassVar[bool] = True

    def forward(self, *inputs: Tensor) -> Annotated[Tensor, "n ..."]:
        return self.reorder(inputs[0])


@function_rule(torch.permute, "permute")
def _permute(*dims: object) -> Operation:
    order = dims[0] if len(dims) == 1 and isinstance(dims[0], tuple) else dims
    numbers = [dim for dim in order if isinstance(dim, int)]
    if len(numbers) != len(order) or not numbers or numbers[0] != 0:
        refuse(f"it permutes to {order}: the first dimension, the batch, must stay")
    return Permute(lambda value: value.permute(numbers))


@function_rule(torch.transpose, "transpose")
def _transpose(dim0: int, dim1: int) -> Operation:
    def reorder(value: Tensor) -> Tensor:
        if 0 in (dim0 % value.dim(), dim1 % value.dim()):
            refuse(f"dimensions {dim0} and {dim1} are exchanged: the batch must stay the first")
        return value.transpose(dim0, dim1)

    return Permute(reorder)


@dataclass(frozen=True, slots=True)
class ExpandAs(Moved):
    """A result repeated to the shape of another."""

    arity: ClassVar[int] = 2
    may_share_memory: ClassVar[bool] = True

    def forward(self, *inputs: Tensor) -> Tensor:
        check_terms(inputs[0], inputs[1], "pair")
        return inputs[0].expand_as(inputs[1])


@function_rule("expand_as")
def _expand_as() -> Operation:
    return ExpandAs()


@dataclass(frozen=True, slots=True)
class Reshape(Exact):
    """The same values in another shape; the first dimension, the batch, stays."""

    reshape: Callable[[Tensor], Tensor]
    may_share_memory: ClassVar[bool] = True

    def forward(self, *inputs: Tensor) -> Annotated[Tensor, "n ..."]:
        return self.reshape(inputs[0])

    def backward(self, forms: Forms, *inputs: Interval, slope: Slopes, rounding: Rounding) -> Pulled | None:
        return Pulled.exactly(forms, forms.reshape(*forms.shape[:2], *inputs[0].shape[1:]))

    def places(self, area: FeatureMap) -> Places:
        return Places.KEPT


@function_rule(torch.flatten, "flatten", layers=(nn.Flatten,))
def _flatten(start_dim: int = 0, end_dim: int = -1) -> Operation:
    if start_dim < 1:
        refuse(
            f"start_dim is {start_dim}: the batch dimension must stay", hint="start flattening at dimension 1"
        )
    return Reshape(lambda value: value.flatten(start_dim, end_dim))


@function_rule("view", "reshape", torch.reshape)
def _reshape(*shape: object) -> Operation:
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
    batch, *others = sizes
    rest = [size for size in others if isinstance(size, int)]
    if not (batch is BATCH_SIZE or batch == -1) or rest != others:
        refuse(
            f"it reshapes to {sizes}: the first size must be the batch, the others numbers",
            hint="use nn.Flatten",
        )
    return Reshape(partial(_reshape_each, rest))


def _reshape_each(sizes: Sequence[int], value: Annotated[Tensor, "n ..."]) -> Annotated[Tensor, "n ..."]:
    """The results of each image in another shape; it must hold all of them and nothing of other images."""
    whole, part = math.prod(value.shape[1:]), math.prod(size for size in sizes if size != -1)
    if part == 0 or whole % part or (whole != part and -1 not in sizes):
        raise UnsupportedLayer(
            f"a reshape to (batch, {', '.join(map(str, sizes))}) of {tuple(value.shape[1:])} mixes images",
            hint="use nn.Flatten",
        )
    return value.reshape(value.shape[0], *sizes)


@function_rule(F.dropout, F.dropout2d, layers=(nn.Dropout, nn.Dropout2d))
def _dropout(p: float = 0.5, training: bool = True, inplace: bool = False) -> None:
    if training and p > 0:
        raise ModelError("it drops values at random (training mode)", hint="call model.eval()")


@function_rule("contiguous", layers=(nn.Identity,))
def _identity() -> None:
    return None


@dataclass(frozen=True, slots=True)
class ZeroPad(Moved):
    """Zeros around a map, on the sides (top, bottom, left, right); negative numbers cut."""

    sides: tuple[int, int, int, int]

    def forward(self, *inputs: Tensor) -> Tensor:
        if inputs[0].dim() < 3 and any(self.sides[:2]):
            refuse(f"results of shape {tuple(inputs[0].shape)} are padded along the batch", hint="pad maps")
        return Geometry((1, 1), padding=self.sides).pad(inputs[0])

    def places(self, area: FeatureMap) -> Geometry:
        return Geometry(kernel=(1, 1), padding=self.sides)

    def unpadded(self) -> "ZeroPad":
        return ZeroPad((0, 0, 0, 0))


@layer_rule(nn.ZeroPad2d)
def _zero_pad(layer: nn.ZeroPad2d) -> Operation:
    left, right, top, bottom = layer.padding
    return ZeroPad((top, bottom, left, right))


@function_rule(F.pad)
def _pad(pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Operation:
    if mode != "constant" or value or len(pad) not in (2, 4):
        refuse(f"it pads by {pad} with mode {mode!r} and value {value}, bounds exist for zeros around a map")
    left, right, top, bottom = (*pad, 0, 0)[:4]
    return ZeroPad((top, bottom, left, right))


@dataclass(frozen=True, slots=True)
class NearestUpsample(Moved):
    """Each value of a larger map is one of the given map: non-decreasing in every input, and exact."""

    size: tuple[int, int] | None
    scale: tuple[float, float] | None

    def forward(self, *inputs: Tensor) -> Annotated[Tensor, "n _ _ _"]:
        check_maps(inputs[0])
        return F.interpolate(inputs[0], self.size, self.scale)  # pyright: ignore[reportArgumentType]


@function_rule(F.interpolate)
def _interpolate(
    size: int | tuple[int, ...] | None = None,
    scale_factor: float | tuple[float, ...] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Operation:
    if mode != "nearest" or recompute_scale_factor:
        refuse(f"mode is {mode!r}, bounds exist for 'nearest', and without recompute_scale_factor")
    scale = (scale_factor, scale_factor) if isinstance(scale_factor, int | float) else scale_factor
    return NearestUpsample(None if size is None else pair(size), scale)  # pyright: ignore[reportArgumentType]


@layer_rule(nn.Upsample, nn.UpsamplingNearest2d)
def _upsample(layer: nn.Upsample) -> Operation:
    return _interpolate(
        layer.size, layer.scale_factor, layer.mode, recompute_scale_factor=layer.recompute_scale_factor
    )
