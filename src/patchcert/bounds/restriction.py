"""What pixels reach of a network: the values that some pixels can move, as a network of matrices.

Whatever the rest of an image shows, a patch at one placement moves the same values, by the same weights. All that stays
as it is enters by offsets, one set for each image. So linear bounds of many images with the patch at one placement are
products of a few small matrices, however large the network is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from patchcert.bounds.mixture import Mixture
from patchcert.bounds.network import Network, Step
from patchcert.bounds.operations import (
    Add,
    Affine,
    Interval,
    Linear,
    Monotone,
    Moved,
    Reshape,
    Softplus,
    Valley,
)
from patchcert.bounds.rounding import Rounding
from patchcert.tensors import Images

Places = Annotated[Tensor, "moving"]
"""Numbers of elements of a flattened value, in order."""

_MOST_WEIGHTS = 2**24
"""With more of them, the matrices of one placement would take more memory than whole images do."""
_WITHOUT_WEIGHTS = (Add, Moved, Reshape)
"""Operations that are linear all the same."""
_BY_ELEMENT = (Monotone, Softplus, Valley)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """By which weights the moving elements of a value, by its number, move those of another."""

    source: int
    weight: Annotated[Tensor, "u v"]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A value that moves, by matrices whose weights were rounded a few times, or else as its input does."""

    step: Step
    number: int
    places: Places
    matrices: tuple[_Matrix, ...]
    roundings: int


@dataclass(frozen=True, slots=True)
class Restriction:
    """The values that some pixels move, in order."""

    pixels: Places
    pieces: tuple[_Piece, ...]

    @staticmethod
    def of(network: Network, like: Images, pixels: Places) -> "Restriction | None":
        """What these pixels of images like the given one move, and all logits.

        None where an operation is neither linear nor one of each element, or where matrices are too large.
        """
        made = _Making(network.values(like[:1]), {0: pixels})
        for number, step in enumerate(network.steps, start=1):
            if not made.add(step, number, is_last=number == len(network.steps)):
                return None
        return Restriction(pixels, tuple(made.pieces))

    @property
    def size(self) -> int:
        """How many weights there are."""
        return sum(matrix.weight.numel() for piece in self.pieces for matrix in piece.matrices)

    def box(self, box: Interval) -> Annotated[Interval, "n pixels"]:
        """What a box of images leaves to the pixels."""
        return box.map(lambda part: part.flatten(1)[:, self.pixels])

    def filled(self, images: Images, values: Annotated[Tensor, "n pixels"]) -> Images:
        """The images with other values of the pixels."""
        return images.flatten(1).index_copy(1, self.pixels, values).reshape(images.shape)

    def network(self, clean: Sequence[Interval], rounding: Rounding) -> Network:
        """The network from the pixels to the logits, for images of which all values lie in these intervals.

        They are those of the clean images. What moves is first of all the clean value: y = z + W (x' - x).
        """
        steps, numbers, moving = list[Step](), {0: 0}, {0: self.pixels}
        for piece in self.pieces:
            moving[piece.number] = piece.places
            if not piece.matrices and isinstance(piece.step.operation, Reshape):
                numbers[piece.number] = numbers[piece.step.inputs[0]]
                continue
            operation, sources = piece.step.operation, piece.step.inputs
            if piece.matrices:
                operation = _mixture(piece, clean, moving, rounding)
                sources = tuple(matrix.source for matrix in piece.matrices)
            steps.append(Step(piece.step.name, operation, tuple(numbers[source] for source in sources)))
            numbers[piece.number] = len(steps)
        return Network(tuple(steps))


@dataclass(frozen=True, slots=True)
class _Making:
    """The pieces so far; examples of all values, and which places of them move."""

    values: Sequence[Annotated[Tensor, "1 ..."]]
    moving: dict[int, Places]
    pieces: list[_Piece] = field(default_factory=list)

    def add(self, step: Step, number: int, is_last: bool) -> bool:
        """Adds a step, unless nothing moves its result; False where there is no matrix of it."""
        operation, given = step.operation, self.values[step.inputs[0]]
        sources = [source for source in dict.fromkeys(step.inputs) if source in self.moving]
        if isinstance(operation, (*_BY_ELEMENT, Reshape)) and not is_last:
            if sources:
                self._append(_Piece(step, number, self.moving[sources[0]], (), 0))
            return True
        if not isinstance(operation, (Affine, *_WITHOUT_WEIGHTS)):
            return False
        outputs = self.values[number].numel()
        if outputs * sum(len(self.moving[source]) for source in sources) > _MOST_WEIGHTS:
            return False
        tables = {source: self._table(step, source, outputs) for source in sources or [0]}
        if not all(torch.equal(sizes, weights.abs()) for weights, sizes in tables.values()):
            return False  # weights so small that their rounding is not in proportion to them
        reached = torch.stack([(sizes != 0).any(dim=0) for _, sizes in tables.values()]).any(dim=0)
        places = (reached | is_last).nonzero().flatten()
        if len(places):
            matrices = tuple(_Matrix(source, weights.T[places]) for source, (weights, _) in tables.items())
            roundings = operation.roundings(given) if isinstance(operation, Affine) else 0
            self._append(_Piece(step, number, places, matrices, roundings))
        return True

    def _append(self, piece: _Piece) -> None:
        self.pieces.append(piece)
        self.moving[piece.number] = piece.places

    def _table(
        self, step: Step, source: int, outputs: int
    ) -> tuple[Annotated[Tensor, "v outputs"], Annotated[Tensor, "v outputs"]]:
        """What each moving element of a value gives to all outputs of a step, and a bound of how much, rounded too."""
        places, like = self.moving[source], self.values[source]
        if source not in step.inputs:
            nothing = like.new_zeros(len(places), outputs)
            return nothing, nothing
        if isinstance(step.operation, Linear) and like.dim() == 2:
            weights = step.operation.weight()[:, places].T
            return weights, weights.abs()
        basis = like.new_zeros(len(places), like.numel())
        basis[torch.arange(len(places), device=places.device), places] = 1
        basis = basis.reshape(-1, *like.shape[1:])
        if isinstance(step.operation, Affine):
            weights, sizes = (
                step.operation.map(basis, precise=True),
                step.operation.absolute_map(basis, precise=True),
            )
            return weights.flatten(1), sizes.flatten(1)
        given = [basis if each == source else torch.zeros_like(self.values[each]) for each in step.inputs]
        given = [value.expand(len(basis), *value.shape[1:]) for value in given]
        moved = step.operation.forward(*given).flatten(1)
        return moved, moved


def _mixture(
    piece: _Piece, clean: Sequence[Interval], moving: Mapping[int, Places], rounding: Rounding
) -> Mixture:
    """y = W x' + (z - W x): the clean values z and x are known up to their intervals.

    With centre c and radius r, rounded, a value is within r (1 + 2u) + 2u |c| of c. The offset sums products of centres
    and weights, which may be rounded: each term is off by gamma. The error is at least half of all that.
    """

    def at(number: int) -> Interval:
        return clean[number].map(lambda part: part.flatten(1)[:, moving[number]])

    result = at(piece.number)
    offset, error, size = result.centre, result.radius, result.centre.abs()
    for matrix in piece.matrices:
        given, weight = at(matrix.source), matrix.weight.T
        offset = offset - given.centre @ weight
        error = error + given.radius @ weight.abs()
        size = size + given.centre.abs() @ weight.abs()
    if rounding.is_outward:
        terms = sum(matrix.weight.shape[1] + 1 for matrix in piece.matrices)
        error = error + rounding.gamma(piece.roundings + terms + 4) * size + rounding.tiny / rounding.unit
    weights = tuple(matrix.weight.unsqueeze(0) for matrix in piece.matrices)
    return Mixture(weights, offset, error, piece.roundings)
