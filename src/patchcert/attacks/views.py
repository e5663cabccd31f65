"""How an attack looks at a model: whose gradient it follows, whose answer counts, which values it may change."""

import copy
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, ClassVar, Protocol, final

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from patchcert.certificates.checks import check_inputs, check_labels, logits_as_given
from patchcert.errors import InvalidInput, ModelError
from patchcert.tensors import Images, Labels, Logits
from patchcert.threats import Patch

# Sums of 10,000 terms in another order differ by about sqrt(10,000) units of rounding. No verdict rests on it: the
# model is asked again about every image that is handed out.
_ROUNDING = 100.0

PerImage = Annotated[Tensor, "n"]
"""One number, or one flag, for every image."""

_MODAL = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd)


class Predictor(Protocol):
    """Anything that says a class for every image, such as a classifier with a proof."""

    def predict(self, images: Images) -> Labels: ...


@final
@dataclass(frozen=True, eq=False)
class Verdict:
    """What the judge of a target says of images."""

    predictions: Labels
    margins: PerImage
    """By how much the best wrong class leads the label."""
    sure_margins: PerImage
    """The same less what rounding may have given it, see `sure_lead`."""


@final
@dataclass(frozen=True, eq=False)
class AttackedModel:
    """A model under attack: ascents follow the logits of `surrogate`, and only the answers of `judge` count.

    A plain model is both. So is a surrogate of a defense, which has the defended model's logits and a more useful
    gradient. A classifier that only predicts is the judge of a differentiable surrogate, and a large network the
    judge of its `FastCopy`; `judged_at_once` limits how many images the judge is shown at once.
    """

    surrogate: nn.Module
    judge: nn.Module | Predictor
    judged_at_once: int | None = None

    @classmethod
    def of(cls, model: nn.Module | Predictor) -> "AttackedModel":
        """A module is judged by its logits, anything else with a `predict` method by its predictions.

        The latter gives a differentiable module as `surrogate()`, or has one as `model`.
        """
        if isinstance(model, nn.Module):
            return cls(model, model)
        if not callable(getattr(model, "predict", None)):
            raise InvalidInput(
                f"the model must be a torch.nn.Module, got {type(model).__name__}",
                hint="give a module that returns logits, or a classifier with predict(images)",
            )
        make = getattr(model, "surrogate", None)
        surrogate = make() if callable(make) else getattr(model, "model", None)
        if not isinstance(surrogate, nn.Module):
            raise InvalidInput(
                f"{type(model).__name__} has no differentiable module that an attack could follow",
                hint="give it a method surrogate() that returns a torch.nn.Module with logits",
            )
        return cls(surrogate, model)

    @property
    def is_exact(self) -> bool:
        """Whether the logits of `surrogate` are those that decide."""
        return self.judge is self.surrogate

    @torch.no_grad()
    def evaluate(self, images: Images, labels: Labels, batch_size: int | None = None) -> Verdict:
        """The judge's verdict on every image; logits that are not finite are an error.

        The margins of a judge that only predicts are those of its surrogate, made positive exactly where the
        prediction is wrong.
        """
        at_once = batch_size or self.judged_at_once or max(len(images), 1)
        predictions = labels.new_zeros(len(images))
        margins, sure_margins = images.new_zeros(len(images)), images.new_zeros(len(images))
        finite = torch.ones((), dtype=torch.bool, device=images.device)
        for start in range(0, len(images), at_once):
            part = slice(start, start + at_once)
            logits, predictions[part] = self._answer(images[part], labels[part])
            finite &= logits.isfinite().all()
            margins[part] = wrong_lead(logits, labels[part]).to(margins.dtype)
            sure_margins[part] = sure_lead(logits, labels[part]).to(margins.dtype)
        require_finite(finite)
        if not isinstance(self.judge, nn.Module):
            wrong = predictions != labels
            margins, sure_margins = _agreeing(margins, wrong), _agreeing(sure_margins, wrong)
        return Verdict(predictions, margins, sure_margins)

    def _answer(self, images: Images, labels: Labels) -> tuple[Logits, Labels]:
        """Logits, and the classes that the judge predicts."""
        if isinstance(self.judge, nn.Module):
            logits = self.judge(images)
            check_logits(logits, labels)
            return logits, logits.argmax(dim=1)
        predictions, logits = self.judge.predict(images), self.surrogate(images)
        check_logits(logits, labels)
        if predictions.shape != labels.shape or predictions.is_floating_point():
            raise ModelError(
                f"{type(self.judge).__name__}.predict must give one class per image ({len(labels)},), "
                f"got {predictions.dtype} {tuple(predictions.shape)}",
                hint="return a long tensor of class indices",
            )
        return logits, predictions

    def check(self, images: Images, labels: Labels) -> None:
        """Refuse images, labels and models that do not fit together, before time is spent on them."""
        check_inputs(self.surrogate, images, labels)
        for name, module in self.surrogate.named_modules():
            if module.training and isinstance(module, _MODAL):
                raise ModelError(
                    f"layer {name!r} ({type(module).__name__}) is in training mode, so its answers vary",
                    hint="call model.eval() first",
                )
        if len(images):
            with torch.no_grad():
                logits = logits_as_given(self.surrogate, images[:1])
            check_logits(logits, labels[:1])
            check_labels(labels, logits.shape[1])


def wrong_lead(logits: Logits, labels: Labels) -> PerImage:
    """The largest logit of another class less the label's: positive exactly where the label has lost."""
    label = labels[:, None]
    others = logits.scatter(1, label, -torch.inf).amax(dim=1)
    return others - logits.gather(1, label)[:, 0]


def sure_lead(logits: Logits, labels: Labels) -> PerImage:
    """The wrong class's lead less what rounding may have given it.

    The same image in a batch of another size has slightly different logits. A success beyond that survives the
    framework's own check.
    """
    scale = 1 + logits.abs().amax(dim=1)
    return wrong_lead(logits, labels) - _ROUNDING * torch.finfo(logits.dtype).eps * scale


def _agreeing(margins: PerImage, wrong: PerImage) -> PerImage:
    """The margins, cut so that they are positive exactly where a prediction is wrong."""
    least = torch.finfo(margins.dtype).tiny
    return torch.where(wrong, margins.clamp(min=least), margins.clamp(max=0))


def require_finite(is_finite: Tensor) -> None:
    """Refuse NaN and infinite logits; this is where the device is waited for."""
    if not bool(is_finite):
        raise ModelError(
            "the model gave NaN or infinite logits, which neither break nor withstand an attack",
            hint="check the weights and the normalisation of the model",
        )


def check_logits(logits: Tensor, labels: Tensor) -> None:
    """Refuse anything but a table of at least two classes with one row per image."""
    if not isinstance(logits, Tensor):
        raise ModelError(
            f"a model must give one tensor of logits, got {type(logits).__name__}",
            hint="return the logits alone from the forward pass",
        )
    if logits.ndim != 2 or len(logits) != len(labels) or logits.shape[1] < 2:
        raise ModelError(
            f"a model must give logits of shape ({len(labels)}, classes) with two classes or more, "
            f"got {tuple(logits.shape)}",
            hint="end the model with a linear layer of as many outputs as there are classes",
        )


class View(ABC):
    """Ascents (m) seen through the values (m, v) of the cells that each may change, all within [0, 1]."""

    cells: Annotated[Tensor, "m v"]
    """Where the values lie in the flattened image."""

    is_exact: ClassVar[bool]
    """Whether `logits` are bit for bit those of the module looked at; otherwise they differ by rounding."""

    @abstractmethod
    def logits(self, values: Annotated[Tensor, "m v"]) -> Annotated[Tensor, "m k"]:
        """The logits of the images with these values, with a gradient."""

    @abstractmethod
    def keep(self, index: Annotated[Tensor, "i"]) -> "View":
        """The view of the ascents of these indices."""


@final
@dataclass(frozen=True, eq=False)
class ImageView(View):
    """Whole images with the values in them: for any model whatever."""

    is_exact: ClassVar[bool] = True

    model: nn.Module
    clean: Annotated[Tensor, "m c h w"]
    cells: Annotated[Tensor, "m v"]

    def logits(self, values: Annotated[Tensor, "m v"]) -> Annotated[Tensor, "m k"]:
        return self.model(put(self.clean, self.cells, values))

    def keep(self, index: Annotated[Tensor, "i"]) -> "ImageView":
        return ImageView(self.model, self.clean[index], self.cells[index])


@final
@dataclass(frozen=True, eq=False)
class ImageViews:
    """Whole images for every ascent."""

    model: nn.Module
    images: Images
    patch: Patch

    def at(self, owner: Annotated[Tensor, "m"], corners: Annotated[Tensor, "m 2"]) -> ImageView:
        """The images of these ascents, with a patch at the corners."""
        cells = stamp_cells(self.patch, corners, self.images.shape[1:])
        return ImageView(self.model, self.images[owner], cells)


def put(
    images: Annotated[Tensor, "m c h w"], cells: Annotated[Tensor, "m v"], values: Annotated[Tensor, "m v"]
) -> Annotated[Tensor, "m c h w"]:
    """The images with the given values at the cells, every other value bit for bit as it was."""
    return images.flatten(1).scatter(1, cells, values).view_as(images)


def stamp_offsets(
    patch: Patch, device: torch.device
) -> tuple[Annotated[Tensor, "pixels"], Annotated[Tensor, "pixels"]]:
    """Rows and columns of the patch's pixels within its bounding box."""
    rows, columns = patch.stamp.nonzero().to(device).unbind(dim=1)
    return rows, columns


def stamp_cells(
    patch: Patch, corners: Annotated[Tensor, "m 2"], shape: torch.Size
) -> Annotated[Tensor, "m v"]:
    """The cells under the patch at the corners of images of the shape (c, h, w), channel by channel."""
    channels, height, width = shape
    rows, columns = stamp_offsets(patch, corners.device)
    pixels = (corners[:, :1] + rows) * width + corners[:, 1:] + columns
    starts = torch.arange(channels, device=corners.device) * (height * width)
    return (starts[:, None] + pixels[:, None]).flatten(1)


@final
class FastCopy(nn.Module):
    """Nearly the same logits sooner: batch norms folded in, channels last, on a GPU products in bfloat16.

    Takes and returns float32, and gradients pass. Its logits differ from the network's by rounding, so it serves as
    a surrogate that the network itself judges.
    """

    def __init__(self, model: nn.Module, reduced: bool | None = None) -> None:
        super().__init__()
        self.model = without_batch_norms(model).to(memory_format=torch.channels_last)  # pyright: ignore
        self.reduced = next(model.parameters()).is_cuda if reduced is None else reduced
        self.train(model.training)

    def forward(self, images: Images) -> Logits:
        """Logits in float32."""
        images = images.contiguous(memory_format=torch.channels_last)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.reduced):
            logits = self.model(images)
        return logits.float()


class _LeafTracer(fx.Tracer):
    """Descends to the modules that contain no others."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not any(m.children())


def without_batch_norms(model: nn.Module) -> nn.Module:
    """A copy of a network in eval mode with each batch norm folded into the convolution before it."""
    root = copy.deepcopy(model).requires_grad_(False)
    traced = fx.GraphModule(root, _LeafTracer().trace(root))
    modules = dict(traced.named_modules())
    calls = Counter(node.target for node in traced.graph.nodes if node.op == "call_module")
    for node in list(traced.graph.nodes):
        if node.op != "call_module" or not isinstance(norm := modules[node.target], nn.BatchNorm2d):
            continue
        before = node.args[0]
        convolution = modules.get(before.target) if before.op == "call_module" else None
        if isinstance(convolution, nn.Conv2d) and calls[before.target] == 1 and len(before.users) == 1:
            traced.set_submodule(before.target, fuse_conv_bn_eval(convolution, norm))
            node.replace_all_uses_with(before)
            traced.graph.erase_node(node)
    traced.delete_all_unused_submodules()
    traced.recompile()
    return traced.requires_grad_(False)
