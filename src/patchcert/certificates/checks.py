"""What a certificate asks of its inputs; each check says what was expected, what came and what to do."""

import copy
from functools import reduce

import torch
from torch import Tensor, nn

from patchcert.bounds import Interval, Network, Rounding
from patchcert.bounds.network import Step
from patchcert.errors import InvalidInput, InvalidThreat, ModelError, PatchcertError
from patchcert.threats import AnyThreat, Patch, Patches, SparsePixels


def bound_dtype(model: nn.Module, images: Tensor, wanted: torch.dtype | None) -> torch.dtype:
    """The type of the bounds: the wanted one, or at least float32; it holds weights and images exactly."""
    own = weight_dtype(model, images.dtype)
    if own in (torch.float16, torch.bfloat16):
        raise InvalidInput(
            f"the model computes in {own}, whose rounding can change what it says, and bounds do not hold that",
            hint="certify model.float(), and predict with it; masks and votes take models of 16 bits",
        )
    dtype = wanted if wanted is not None else torch.promote_types(own, torch.float32)
    if dtype not in (torch.float32, torch.float64):
        raise InvalidInput(
            f"bounds are computed in float32 or float64, got dtype={dtype}", hint="use torch.float64"
        )
    for name, source in (("model", own), ("images", images.dtype)):
        if torch.promote_types(dtype, source) != dtype:
            raise InvalidInput(
                f"the {name} of {source} cannot be held exactly in dtype={dtype}",
                hint=f"use dtype={source}; on the command line --dtype {str(source).removeprefix('torch.')}",
            )
    return dtype


_HELD = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Types of real numbers that float64 holds and that PyTorch computes with."""


def check_inputs(model: nn.Module, images: Tensor, labels: Tensor, progress: object = None) -> None:
    """The model takes the images, which have one label each on the same device."""
    _check_dense("labels", labels)
    check_images(model, images, progress)
    if labels.shape != images.shape[:1] or labels.dtype != torch.long:
        raise InvalidInput(
            f"labels must be a long tensor ({len(images)},), got {labels.dtype} {tuple(labels.shape)}",
            hint="give one class index per image",
        )
    if labels.device != images.device:
        raise InvalidInput(
            f"images are on {images.device}, labels on {labels.device}", hint="put both on one device"
        )


def check_images(model: nn.Module, images: Tensor, progress: object = None) -> None:
    """The model is a module, and images are dense floats (n, c, h, w) in [0, 1] on its device.

    Tensors are made on a device that computes, and whoever wants to hear of progress can be called.
    """
    _check_call(progress)
    check_module(model)
    _check_dense("images", images)
    whole = [name for name, value in model.named_parameters() if not value.is_floating_point()]
    if whole:
        raise InvalidInput(
            f"the parameter {whole[0]!r} holds {model.get_parameter(whole[0]).dtype}; weights must be floats",
            hint="convert the model with .float()",
        )
    floats = {value.dtype for value in (*float_weights(model), images) if value.is_floating_point()}
    if strange := floats - {*_HELD}:
        raise InvalidInput(
            f"weights and images must be floats of 16, 32 or 64 bits, got {', '.join(map(str, strange))}",
            hint="convert them with .float()",
        )
    if images.dim() != 4 or not images.is_floating_point():
        raise InvalidInput(
            f"images must be floats (n, channels, height, width), got {images.dtype} {tuple(images.shape)}",
            hint="divide 8-bit images by 255 and add a batch dimension",
        )
    if images.numel() and not bool(((images >= 0) & (images <= 1)).all()):
        raise InvalidInput(
            f"images must lie in [0, 1], got values from {float(images.min())} to {float(images.max())}",
            hint="threats are in raw pixels: put normalisation into the model as a patchcert.Normalize layer",
        )
    own = next(iter(float_weights(model)), images)
    if own.device != images.device:
        raise InvalidInput(
            f"the model is on {own.device}, images on {images.device}", hint="put both on one device"
        )


def check_module(model: object) -> None:
    """The model is a module."""
    if not isinstance(model, nn.Module):
        raise InvalidInput(
            f"the model must be a torch.nn.Module, got {type(model).__name__}",
            hint="write the function as the forward method of a module",
        )


def check_some(images: Tensor) -> None:
    """There is an image to vote on."""
    if not len(images):
        raise InvalidInput("votes need one image at least, got none")


def _check_dense(name: str, value: object) -> None:
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        kind = value.layout if isinstance(value, Tensor) else type(value).__name__
        raise InvalidInput(
            f"{name} must be a dense torch.Tensor, got {kind}", hint="convert them with torch.as_tensor"
        )


def check_independence(model: nn.Module) -> None:
    """No layer lets the answer for one image depend on the other images of its batch, or on chance."""
    for name, layer in model.named_modules():
        where = f"layer {name!r} ({type(layer).__name__})" if name else f"the model {type(layer).__name__}"
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and (
            layer.training or layer.running_mean is None
        ):
            raise ModelError(
                f"{where} normalises by the statistics of the batch, so that images depend on each other",
                hint="call model.eval(), and keep running statistics (track_running_stats=True)",
            )
        if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.training and layer.p > 0:
            raise ModelError(f"{where} drops values at random (training mode)", hint="call model.eval()")


def _check_call(progress: object) -> None:
    if torch.get_default_device().type == "meta":
        raise InvalidInput(
            "the default device is 'meta', on which nothing is computed",
            hint="call torch.set_default_device('cpu') first",
        )
    if progress is not None and not callable(progress):
        raise InvalidInput(
            f"progress must be a function of (done, total), got {type(progress).__name__}",
            hint="give progress=lambda done, total: ..., or leave it out",
        )


def usable_device(name: torch.device | str) -> torch.device:
    """The device of that name, if it is there."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidInput(
            f"the device {str(name)!r} cannot be used: {reason}", hint="the device cpu is always there"
        ) from error
    return device


def check_fit(threat: AnyThreat, images: Tensor) -> None:
    """Raises the threat's own error where it does not fit images of this shape."""
    patch = threat.patch if isinstance(threat, Patches) else threat
    if isinstance(patch, Patch):
        patch.placements(images.shape[2], images.shape[3])
    elif not isinstance(threat, SparsePixels):
        raise InvalidThreat(
            f"certificates exist for patches and sparse pixels, got {threat!r}",
            hint="give patchcert.Patch(5) or patchcert.SparsePixels(4)",
        )
    else:
        blank = images.new_zeros(1, *images.shape[1:])
        threat.contains(blank, blank)


def model_of_type(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model itself where all its weights have this type, else a copy of this type."""
    if all(value.dtype == dtype for value in float_weights(model)):
        return model
    return copy_of_type(model, dtype)


def copy_of_type(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of this type, which must have the weights of the model: classes may say themselves how they are copied."""
    try:
        copied = copy.deepcopy(model)
    except Exception as error:
        raise ModelError(
            f"the model {type(model).__name__} cannot be copied: {str(error).splitlines()[0]}",
            hint="keep nothing in its attributes that copy.deepcopy refuses: locks, generators, tensors with a history",
        ) from error
    if {id(value) for value in copied.parameters()} & {id(value) for value in model.parameters()}:
        raise ModelError(
            f"a copy of the model {type(model).__name__} shares its weights",
            hint="let copy.deepcopy copy it as it is",
        )
    copied = copied.to(dtype)
    before, after = ({**dict(one.named_parameters()), **dict(one.named_buffers())} for one in (model, copied))
    changed = [
        name for name in before.keys() | after.keys() if not _is_same(before.get(name), after.get(name))
    ]
    if changed:
        raise ModelError(
            f"a copy of the model {type(model).__name__} has other weights: {', '.join(sorted(changed))}",
            hint="let copy.deepcopy copy it as it is",
        )
    return copied


def _is_same(before: Tensor | None, after: Tensor | None) -> bool:
    if before is None or after is None or before.shape != after.shape:
        return False
    return bool(((before == after) | (before.isnan() & after.isnan())).all())


_PROBED = 4


def check_trace(twin: nn.Module, audit: Network, network: Network, images: Tensor, threat: AnyThreat) -> None:
    """The traced operations must give what the model's float64 twin gives: on a few images, their negatives, and
    random members of the threat. So must those of the model itself, in the type of the images.

    They differ where the forward pass looks at more than its input, at a counter or at whether it is traced, or
    goes another way for some inputs; and where a copy of the model is another function.
    """
    few = images[:_PROBED] if len(images) else images.new_full((1, *images.shape[1:]), 0.25)
    probes = torch.cat([few, 1 - few, threat.sample(few, torch.Generator().manual_seed(0))])
    try:
        bounds = audit.bounds(Interval.point(probes.double()), rounding=Rounding.outward(torch.float64))
        logits = torch.cat([twin(probe) for probe in probes.double().split(1)])
    except RuntimeError as error:
        raise ModelError(
            f"the model does not run in float64: {str(error).splitlines()[0]}",
            hint="keep all weights in parameters or buffers, and cast nothing to a fixed type",
        ) from error
    own = network.bounds(Interval.point(probes), rounding=Rounding.outward(probes.dtype))
    if bool(((own.lower.double() > bounds.upper) | (own.upper.double() < bounds.lower)).any()):
        raise ModelError(
            f"a copy of the model {type(twin).__name__} in float64 is another function",
            hint="let copy.deepcopy copy it as it is, and let it compute the same in every type",
        )
    leeway = (bounds.upper - bounds.lower) + 1e-6 * logits.abs().amax(dim=1, keepdim=True)
    apart = torch.maximum(bounds.lower - logits, logits - bounds.upper)
    if bool((apart > leeway).any()):
        worst = int((apart - leeway).amax(dim=1).argmax())
        raise ModelError(
            f"the model gives {logits[worst].tolist()}, its traced operations {bounds.centre[worst].tolist()}",
            hint="the forward pass must be a function of the images alone, the same in every call",
        )


def check_foreign_rules(network: Network, images: Tensor, threat: AnyThreat) -> None:
    """Operations whose rules come from elsewhere hold what they make of points in a few boxes: those between images and
    random members of the threat, and between images and their negatives.

    A function that is said to never fall, and does, is caught where it falls between such values.
    """
    if not any(step.is_foreign for step in network.steps):
        return
    few, generator = images[:_PROBED].double(), torch.Generator().manual_seed(0)
    for other in (threat.sample(few, generator), 1 - few):
        box = Interval(torch.minimum(few, other), torch.maximum(few, other))
        intervals = network.intervals(box, Rounding.outward(torch.float64))
        for position, step in enumerate(network.steps):
            if step.is_foreign:
                _check_rule(
                    step, [intervals[index] for index in step.inputs], intervals[position + 1], generator
                )


def _check_rule(step: Step, boxes: list[Interval], bounds: Interval, generator: torch.Generator) -> None:
    for _ in range(_POINTS):
        points = [
            torch.lerp(box.lower, box.upper, torch.rand(box.shape, generator=generator, dtype=torch.float64))
            for box in (box.map(Tensor.cpu) for box in boxes)
        ]
        value = step.operation.forward(*(point.to(bounds.lower.device) for point in points))
        outside = torch.maximum(bounds.lower - value, value - bounds.upper)
        # Values are rounded as well as bounds: as much as a million roundings of the largest bound is let pass.
        if bool((outside > 1e-10 * (1 + bounds.lower.abs() + bounds.upper.abs())).any()):
            worst = int(outside.argmax())
            raise ModelError(
                f"the rule for layer '{step.name}' is wrong: it bounds a value of {float(value.flatten()[worst])} by "
                f"{float(bounds.lower.flatten()[worst])} and {float(bounds.upper.flatten()[worst])}",
                hint="mend the rule that was registered for it; a Monotone must never fall",
            )


_POINTS = 8
"""Random points of each box at which a rule from elsewhere is tried."""


def check_rounding(network: Network, logits: Tensor, images: Tensor, own: torch.dtype) -> None:
    """What a model says of images in their batch is what its traced operations give, up to rounding in its own type.

    It is not where the forward pass depends on the batch, or computes in another type than that of the weights. In very
    long sums the worst rounding of float32 can hide a coarser type. Images whose logits are not finite are left out, as
    they are not certified: bounds in a wider type may be finite.
    """
    bounds = network.bounds(Interval.point(images), rounding=Rounding.outward(own))
    # The bounds hold the exact logits and are as wide as the worst rounding. Logits of the zoo's models lie inside;
    # under bfloat16 autocast they are 1.6 (cnn5w) to 18 (cnn2) widths outside, in the median over images.
    leeway = bounds.upper - bounds.lower
    apart = torch.maximum(bounds.lower - logits.to(leeway), logits.to(leeway) - bounds.upper)
    outside = (apart > leeway).any(dim=1) & logits.isfinite().all(dim=1)
    if bool(outside.any()):
        first = int(outside.int().argmax())
        raise ModelError(
            f"the model gives {logits[first].tolist()} for an image in its batch, its traced operations "
            f"{bounds.centre[first].tolist()}",
            hint="the forward pass must treat each image alone, and use no autocast or casts of its own",
        )


def stays_finite(network: Network, blank: Tensor) -> bool:
    """Whether no image of the type and shape of a blank one can make a number that the type does not hold.

    Bounds in a wider type do not see where a model overflows, and says NaN; in its own they end at infinity there.
    """
    bounds = network.bounds(Interval(blank, blank + 1), rounding=Rounding.outward(blank.dtype))
    return bool((bounds.lower.isfinite() & bounds.upper.isfinite()).all())


def logits_as_given(model: nn.Module, images: Tensor) -> Tensor:
    """What the model says of images in their own type, which it must take as they are."""
    try:
        return _answer(model, images)
    except PatchcertError:
        raise
    except REFUSALS as error:
        logits_of(model, images)  # says what is wrong, unless it is their type alone
        own = next(iter(float_weights(model)), images).dtype
        raise InvalidInput(
            f"the model of {own} does not take images of {images.dtype}",
            hint=f"convert the images with .to({own})",
        ) from error


def logits_of(model: nn.Module, images: Tensor) -> Tensor:
    """What the model says as it is, in its own type."""
    own = next(iter(float_weights(model)), images)
    batches = _batches(images.to(own.dtype))
    try:  # the answers of a model that torch.compile records as a graph last until it is asked again
        return torch.cat([_answer(model, batch).clone() for batch in batches])
    except PatchcertError:
        raise
    except REFUSALS as error:
        hint = "check channels, height and width against the model's first layers"
        raise does_not_take(images, error, hint) from error


REFUSALS = (RuntimeError, AssertionError, ValueError)
"""What layers raise where images do not fit; transformers assert the size of theirs, or say it with a ValueError."""


def does_not_take(images: Tensor, error: Exception, hint: str) -> ModelError:
    """What to say where a model raised one of the refusals."""
    first = next(iter(str(error).splitlines()), type(error).__name__)
    return ModelError(f"the model does not take images of {tuple(images.shape[1:])}: {first}", hint=hint)


def _batches(images: Tensor) -> tuple[Tensor, ...]:
    return images.split(2048 if images.is_cuda else 256) if len(images) else (images,)


def _answer(model: nn.Module, images: Tensor) -> Tensor:
    """Logits of images that stay as they are."""
    given = images.clone()
    logits = model(given)
    if not torch.equal(given, images):
        raise ModelError(
            "the model changes the images it is given in place", hint="use inplace=False, or copy them first"
        )
    check_logits(logits, images)
    return logits


def check_logits(logits: Tensor, images: Tensor) -> None:
    """There is one row of logits for each image, of two classes at least."""
    if not isinstance(logits, Tensor):
        raise ModelError(
            f"the model must return one tensor of logits, got {type(logits).__name__}",
            hint="wrap it in a module that returns the logits alone",
        )
    if not logits.is_floating_point():
        raise ModelError(
            f"the model must return logits that are floats, got {logits.dtype}",
            hint="return the scores before they are rounded or compared",
        )
    if logits.dim() != 2 or len(logits) != len(images):
        raise ModelError(
            f"the model must return logits ({len(images)}, classes), got {tuple(logits.shape)}",
            hint="end the model with one score per class",
        )
    if logits.shape[1] < 2:
        raise ModelError(
            f"the model gives {logits.shape[1]} logit for each image; a certificate compares at least two classes",
            hint="give a binary model two logits: torch.cat([-z, z], dim=1) / 2 for its one logit z",
        )


def check_labels(labels: Tensor, classes: int) -> None:
    """Every label names a class of the model."""
    if len(labels) and not bool(((labels >= 0) & (labels < classes)).all()):
        lowest, highest = int(labels.min()), int(labels.max())
        counted = "count classes from 0, and leave out images without a label"
        raise InvalidInput(
            f"labels must lie in 0..{classes - 1}, got {lowest} to {highest}",
            hint=counted
            if lowest < 0
            else f"the model has {classes} classes, fewer than the labels speak of",
        )


def weight_dtype(model: nn.Module, otherwise: torch.dtype) -> torch.dtype:
    """The type that holds all weights exactly; the other one where there are none."""
    types = [value.dtype for value in float_weights(model)]
    return reduce(torch.promote_types, types) if types else otherwise


def check_weights(model: nn.Module, owner: str = "the model") -> None:
    """Of a model with NaN or infinities nothing is proven, and what it says means nothing: the weight is named."""
    for name, value in model.state_dict().items():
        if value.is_floating_point() and not value.is_meta and not bool(value.isfinite().all()):
            raise ModelError(
                f"{name} of {owner} holds NaN or infinities",
                hint="the training has diverged, or the file is damaged: give weights that are finite",
            )


def has_finite_weights(model: nn.Module) -> bool:
    """Whether no parameter or buffer holds NaN or infinity."""
    flags = [value.isfinite().all() for value in float_weights(model)]
    return bool(torch.stack(flags).all()) if flags else True


def float_weights(model: nn.Module) -> list[Tensor]:
    """All parameters and buffers that hold real numbers."""
    return [value for value in (*model.parameters(), *model.buffers()) if value.is_floating_point()]
