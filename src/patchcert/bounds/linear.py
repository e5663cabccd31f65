"""Linear bounds: a form of some result of the network, carried backwards to the image (CROWN).

Zhang et al. 2018, Efficient Neural Network Robustness Certification with General Activation Functions. Intervals forget
that all units of a layer see the same image; a form that is carried back to it does not. At each activation the form
needs the interval of its input, which may come from intervals or from linear bounds of their own.

docs/concepts/linear-bounds.md explains the rules and their rounding.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated

import torch
from torch import Tensor

from patchcert.bounds.forms import Forms, PerForm, Pulled, summed
from patchcert.bounds.network import Network, Step
from patchcert.bounds.operations import (
    STRETCHES,
    Add,
    Affine,
    Interval,
    Linear,
    Monotone,
    Moved,
    Reshape,
    is_relu,
)
from patchcert.bounds.rounding import NEAREST, Rounding
from patchcert.tensors import Labels

Slope = Callable[[Interval], Tensor]
"""The slope of a ReLU's lower line, for each element of the interval of its input."""


def flat(box: Interval) -> Tensor:
    """0: nothing is counted on."""
    return torch.zeros_like(box.lower)


def adaptive(box: Interval) -> Tensor:
    """0 or 1, whichever encloses less."""
    return (box.upper > -box.lower).to(box.lower.dtype)


def parallel(box: Interval) -> Tensor:
    """That of the upper line."""
    is_bent = (box.lower < 0) & (box.upper > 0)
    return torch.where(is_bent, box.upper / (box.upper - box.lower).where(is_bent, 1), 1.0)


SLOPES: tuple[Slope, ...] = (adaptive, flat, parallel)


@dataclass(frozen=True, slots=True)
class Carried:
    """Forms that have been carried to the image: at least image * pixels + constant - 2 error (see `forms`).

    `seen` are the coefficients with which results of the network counted on the way, by their numbers. `by_interval`
    names the steps without a linear rule, which counted by their intervals.
    """

    image: Forms
    constant: PerForm
    error: PerForm
    seen: Mapping[int, Forms]
    by_interval: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LinearBound:
    """Forms are at least `lower` on their boxes."""

    lower: PerForm
    carried: Carried

    def minimisers(self, box: Interval) -> Annotated[Tensor, "n m ..."]:
        """The corner of each box where the form in the image is least."""
        return torch.where(self.carried.image > 0, box.lower.unsqueeze(1), box.upper.unsqueeze(1))


@dataclass(frozen=True, slots=True)
class Halves:
    """Halves of the range of chosen results: `signs` is 1 where only values >= 0 count, -1 where only those <= 0.

    A form may lose `multipliers` (not negative) times the sign times the value, which is not negative there.
    """

    signs: Annotated[Tensor, "n ..."]
    multipliers: Annotated[Tensor, "n ..."]

    def weighed(self, forms: Forms) -> Forms:
        """The forms less the multiples; rounded, they are less by other multiples of the same sign, which will do."""
        return forms - (self.multipliers.clamp(min=0) * self.signs).unsqueeze(1)


@dataclass(frozen=True, slots=True)
class BackwardPass:
    """Forms on their way to the image, through intervals of every result.

    `slopes` are the slopes of lower lines, by the number of the activation's input: (n, ...), or (n, m, ...) where each
    form has its own. What `kept` marks of a result is not carried on: its coefficients are those in `seen`.
    """

    network: Network
    intervals: Sequence[Interval]
    slopes: Slope | Mapping[int, Tensor] = adaptive
    rounding: Rounding = NEAREST
    halves: Mapping[int, Halves] = field(default_factory=dict)
    kept: Mapping[int, Annotated[Tensor, "n ..."]] = field(default_factory=dict)

    def bound(self, forms: Forms, index: int) -> LinearBound:
        """The bound of forms of value `index`."""
        carried = self.carry(forms, index)
        added = least(carried.image, self.intervals[0], self.rounding)
        constant, error = self._added(carried.constant, carried.error, *added)
        return LinearBound(self._lowered(constant, error), carried)

    def carry(self, forms: Forms, index: int) -> Carried:
        """Forms of value `index`, carried to the image."""
        waiting, seen, missing = {index: forms}, {}, []
        constant, error = (forms.new_zeros(forms.shape[:2]) for _ in range(2))
        for number in range(index, 0, -1):
            if number not in waiting:
                continue
            step, current = self.network.steps[number - 1], waiting.pop(number)
            if number in self.halves:
                current = self.halves[number].weighed(current)
            seen[number] = current
            if number in self.kept:
                current = current.masked_fill(self.kept[number].unsqueeze(1), 0.0)
            inputs = [self.intervals[each] for each in step.inputs]
            pulled = step.operation.backward(
                current, *inputs, slope=self._slope(step), rounding=self.rounding
            )
            if pulled is None:
                missing.append(step.name)
                pulled = Pulled((), *least(current, self.intervals[number], self.rounding))
            constant, error = self._added(constant, error, pulled.constant, pulled.error)
            for each, coefficients in zip(step.inputs, pulled.coefficients, strict=False):
                waiting[each], lost = self._joined(waiting.get(each), coefficients, each)
                error = error + lost
        box = self.intervals[0].lower
        image = waiting.get(0, box.new_zeros(1)).expand(*forms.shape[:2], *box.shape[1:])
        return Carried(image, constant, error, seen, tuple(missing))

    def _slope(self, step: Step) -> Tensor | None:
        if not is_relu(step.operation):
            return None
        index, box = step.inputs[0], self.intervals[step.inputs[0]]
        slope = self.slopes.get(index) if isinstance(self.slopes, Mapping) else self.slopes(box)
        return slope if slope is None or slope.dim() > box.lower.dim() else slope.unsqueeze(1)

    def _added(
        self, constant: PerForm, error: PerForm, more: PerForm, lost: PerForm
    ) -> tuple[PerForm, PerForm]:
        """Both sums; adding a constant is off by a unit of the sum, which is less than twice a unit as computed."""
        total = constant + more
        return total, error + lost + total.abs() * (2 * self.rounding.unit)

    def _joined(self, first: Forms | None, second: Forms, index: int) -> tuple[Forms, PerForm | float]:
        """The coefficients of a value that several steps take, and the error of their sum, off by a unit of it."""
        if first is None:
            return second, 0.0
        total = first + second
        if not self.rounding.is_outward:
            return total, 0.0
        sizes = (total.abs() * self.intervals[index].magnitude.unsqueeze(1)).flatten(2).sum(dim=2)
        return total, sizes * (2 * self.rounding.unit) + self.rounding.tiny / self.rounding.unit

    def _lowered(self, constant: PerForm, error: PerForm) -> PerForm:
        """Twice the error pays for its own rounding (see `forms`)."""
        if not self.rounding.is_outward:
            return constant
        lower = constant - 2 * error
        # Both differences are off by a unit of themselves.
        return lower - (lower.abs() * (4 * self.rounding.unit) + self.rounding.tiny)


def linear_interval(look: BackwardPass, index: int) -> Interval:
    """Linear bounds of all features of value `index`, from below and from above."""
    like = look.intervals[index].lower
    rows, size = like.shape
    forms = torch.eye(size, dtype=like.dtype, device=like.device)
    lower = look.bound(torch.cat([forms, -forms]).expand(rows, -1, -1), index).lower
    return Interval(lower[:, :size], -lower[:, size:])


def least(forms: Forms, box: Interval, rounding: Rounding) -> tuple[PerForm, PerForm]:
    """The least value of the forms in the box, and its error: a product, added to one that is 0."""
    lower, upper = box.lower.unsqueeze(1), box.upper.unsqueeze(1)
    return summed(forms.clamp(min=0) * lower + forms.clamp(max=0) * upper, 1, rounding)


def margin_forms(
    labels: Labels, targets: Annotated[Tensor, "n m"], classes: int, dtype: torch.dtype
) -> Annotated[Tensor, "n m k"]:
    """The forms logit[label] - logit[target]; 0 where the target is the label."""
    numbers = torch.arange(classes, device=labels.device)
    own, other = (part.unsqueeze(2) == numbers for part in (labels.unsqueeze(1), targets))
    return own.to(dtype) - other.to(dtype)


def linear_margins(
    network: Network,
    box: Interval,
    labels: Labels,
    targets: Annotated[Tensor, "n m"],
    classes: int,
    rounding: Rounding = NEAREST,
    slopes: Sequence[Slope] = SLOPES,
) -> Annotated[Tensor, "n m"]:
    """Lower bounds of logit[label] - logit[target] on each box, the best over the choices of slopes."""
    intervals = network.intervals(box, rounding)
    forms = margin_forms(labels, targets, classes, box.lower.dtype)
    return best_bound(network, intervals, forms, rounding, slopes)


def best_bound(
    network: Network,
    intervals: Sequence[Interval],
    forms: Forms,
    rounding: Rounding = NEAREST,
    slopes: Sequence[Slope] = SLOPES,
) -> PerForm:
    """Lower bounds of forms of the logits, the best over the choices of slopes."""
    found = [
        BackwardPass(network, intervals, slope, rounding).bound(forms, len(network.steps)).lower
        for slope in slopes
    ]
    return found[0] if len(found) == 1 else torch.stack(found).amax(dim=0)


def interval_bound(network: Network, intervals: Sequence[Interval], forms: Forms) -> PerForm:
    """Lower bounds of forms of the logits by intervals, rounded to nearest; a last linear layer is merged with them."""
    step, constant, index = network.steps[-1], 0.0, len(network.steps)
    if isinstance(step.operation, Linear):
        pulled = step.operation.backward(forms, intervals[step.inputs[0]], slope=None, rounding=NEAREST)
        assert pulled is not None
        (forms,), constant, index = pulled.coefficients, pulled.constant, step.inputs[0]
    return constant + least(forms, intervals[index], NEAREST)[0]


@torch.no_grad()
def reference_margin(network: Network, box: Interval, label: int, target: int, slope: Slope) -> float:
    """The linear bound of one class on one box in float64, nothing batched and nothing clever.

    Affine layers are written out as matrices, ReLUs are passed unit by unit, what is neither counts by its interval,
    and rounding is to nearest. `BackwardPass` is held equal to it, and is better where it has more rules.
    """
    intervals = network.intervals(box)
    forms = [torch.zeros(value.lower[0].numel(), dtype=torch.float64) for value in intervals]
    forms[-1][label] += 1
    forms[-1][target] -= 1
    constant = 0.0
    for number in range(len(network.steps), 0, -1):
        step, form = network.steps[number - 1], forms[number]
        inputs = [intervals[index] for index in step.inputs]
        if isinstance(step.operation, Affine):
            matrix, offset = written_out(step.operation, inputs[0].lower)
            forms[step.inputs[0]] += form @ matrix
            constant += float(form @ offset)
        elif is_relu(step.operation):
            lower, upper = (part.flatten().tolist() for part in (inputs[0].lower, inputs[0].upper))
            lines = slope(inputs[0]).flatten().tolist()
            for unit, coefficient in enumerate(form.tolist()):
                line, intercept = _line(coefficient, lower[unit], upper[unit], lines[unit])
                forms[step.inputs[0]][unit] += coefficient * line
                constant += coefficient * intercept
        elif isinstance(step.operation, Add | Reshape):
            for index in step.inputs:
                forms[index] += form
        elif isinstance(step.operation, Monotone):
            for unit, coefficient in enumerate(form.tolist()):
                box = inputs[0].map(lambda part, unit=unit: part.flatten()[unit])
                line, low, high = _lines_around(step.operation, box)
                forms[step.inputs[0]][unit] += coefficient * line
                constant += coefficient * (low if coefficient > 0 else high)
        elif isinstance(step.operation, Moved):
            for place, index in enumerate(step.inputs):
                for unit in range(inputs[place].lower.numel()):
                    given = [torch.zeros_like(each.lower) for each in inputs]
                    given[place].view(-1)[unit] = 1
                    forms[index][unit] += float(step.operation.forward(*given).flatten() @ form)
        else:
            constant += _least_of(form, intervals[number])
    return constant + _least_of(forms[0], intervals[0])


def _line(coefficient: float, lower: float, upper: float, slope: float) -> tuple[float, float]:
    """Slope and intercept of the line that bounds max(z, 0) from the side on which the coefficient needs it."""
    if lower >= 0:
        return 1.0, 0.0
    if upper <= 0:
        return 0.0, 0.0
    if coefficient > 0:
        return slope, 0.0
    chord = upper / (upper - lower)
    return chord, -chord * lower


def _lines_around(operation: Monotone, box: Interval) -> tuple[float, float, float]:
    """The chord's slope, and the intercepts of the lines below and above; those of a curve do not quite touch it."""
    lower, upper = float(box.lower), float(box.upper)

    def value(point: float) -> float:
        return float(operation.forward(torch.tensor(point, dtype=torch.float64)))

    slope = (value(upper) - value(lower)) / (upper - lower) if upper > lower else 0.0
    if operation.kinks is not None:
        points = [lower, *(min(max(kink, lower), upper) for kink in operation.kinks), upper]
        ends = list(zip(points, points, strict=True))
    else:
        points = [lower + (upper - lower) * part / STRETCHES for part in range(STRETCHES + 1)]
        ends = list(pairwise(points))
    low = min(value(start) - slope * end for start, end in ends)
    return slope, low, max(value(end) - slope * start for start, end in ends)


def written_out(
    operation: Affine, like: Annotated[Tensor, "1 ..."]
) -> tuple[Annotated[Tensor, "outputs inputs"], Annotated[Tensor, "outputs"]]:
    """The matrix and the offset of an affine operation on inputs like the given one."""
    basis = torch.eye(like[0].numel(), dtype=like.dtype).reshape(-1, *like.shape[1:])
    offset = operation.forward(torch.zeros_like(like)).flatten()
    return operation.map(basis, precise=False).flatten(1).T, offset


def _least_of(form: Tensor, box: Interval) -> float:
    return float((form.clamp(min=0) @ box.lower.flatten()) + (form.clamp(max=0) @ box.upper.flatten()))
