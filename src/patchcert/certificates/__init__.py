"""Every kind of proof, all of one shape: `predict(images)` and `certify(images, labels, threat) -> Certificates`."""

import importlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from patchcert.certificates.checks import check_weights, float_weights, usable_device
from patchcert.certificates.classifier import ABSTAINED as ABSTAINED
from patchcert.certificates.classifier import AnyThreat as AnyThreat
from patchcert.certificates.classifier import Ballots as Ballots
from patchcert.certificates.classifier import Certificates as Certificates
from patchcert.certificates.classifier import Classifier as Classifier
from patchcert.certificates.classifier import Guarantee as Guarantee
from patchcert.certificates.intervals import IntervalBounds as IntervalBounds
from patchcert.errors import InvalidInput
from patchcert.progress import Progress
from patchcert.tensors import Images, Labels, PlacementMargins
from patchcert.threats import Patch

_HOMES = {
    "BandVotes": "band_votes",
    "BlockVotes": "band_votes",
    "DoubleMasking": "masking",
    "IntervalBounds": "intervals",
    "LocalVotes": "local_votes",
    "MaskedDetection": "masking",
    "RandomAblation": "ablation",
}


def method_named(name: str) -> type[Classifier] | None:
    """The kind of proof that evidence calls by this name, loaded on use; None where there is none."""
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name) if name in _HOMES else None


def certify(
    model: nn.Module | Classifier,
    images: Images,
    labels: Labels,
    threat: AnyThreat,
    *,
    dtype: torch.dtype | None = None,
    memory_budget: int | None = None,
    verdicts_only: bool = False,
    progress: Progress | None = None,
) -> Certificates:
    """Proves, image by image, that no member of the threat changes the prediction away from the label.

    A plain model takes images (n, c, h, w) in [0, 1] to logits and is bounded by intervals: the keywords are those of
    `IntervalBounds`. Any other kind of proof is a classifier with settings of its own. `progress` is called with the
    number of images done and the number of all images. Weights that are NaN or infinite are an error.
    """
    return _classifier_of(model, dtype, memory_budget, verdicts_only).certify(
        images, labels, threat, progress
    )


def certify_loader(
    model: nn.Module | Classifier,
    loader: Iterable[tuple[Images, Labels]],
    threat: AnyThreat,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    memory_budget: int | None = None,
    verdicts_only: bool = False,
    progress: Progress | None = None,
) -> Certificates:
    """The certificates, on the CPU, of all (images, labels) that a `DataLoader` gives, in its order.

    With a device, the model is moved to it; batches go to where the model is. `progress` is called with the number of
    images done and of all images, 0 where the loader does not say.
    """
    classifier = _classifier_of(model, dtype, memory_budget, verdicts_only)
    if device is not None:
        classifier.model.to(usable_device(device))
    place = next(iter(float_weights(classifier.model)), torch.empty(0)).device
    if not isinstance(loader, Iterable):
        raise InvalidInput(
            f"the loader is a {type(loader).__name__}; expected batches of images and labels",
            hint="give a torch.utils.data.DataLoader, or a list of pairs",
        )
    total, done, parts = len(getattr(loader, "dataset", ())), 0, list[Certificates]()
    for batch in loader:
        is_pair = isinstance(batch, Sequence) and len(batch) == 2
        if not is_pair or not all(isinstance(part, Tensor) for part in batch):
            raise InvalidInput(
                f"the loader gave a {type(batch).__name__}, expected a pair of tensors (images, labels)",
                hint="let the data set return an image in [0, 1] and its label",
            )
        images, labels = (part.to(place) for part in batch)
        found = classifier.certify(images, labels, threat)
        columns = {name: column.cpu() for name, column in found.to_tensors().items()}
        parts.append(Certificates.from_tensors(columns, found.guarantee))
        done += len(labels)
        if progress is not None:
            progress(done, total)
    if not parts:
        raise InvalidInput("the loader gave no images", hint="give one with a batch at least")
    return Certificates.concatenated(parts)


def _classifier_of(
    model: nn.Module | Classifier, dtype: torch.dtype | None, memory_budget: int | None, verdicts_only: bool
) -> Classifier:
    if isinstance(model, Classifier | nn.Module):
        check_weights(model.model if isinstance(model, Classifier) else model)
    if not isinstance(model, Classifier):
        return IntervalBounds(model, dtype, memory_budget, verdicts_only)
    if dtype is not None or memory_budget is not None or verdicts_only:
        raise InvalidInput(
            "dtype, memory_budget and verdicts_only are settings of interval bounds of a plain model, but the model "
            f"is a {type(model).__name__}",
            hint="give the settings where the classifier is made",
        )
    return model


def placement_margins(
    model: nn.Module,
    images: Images,
    labels: Labels,
    threat: Patch,
    *,
    dtype: torch.dtype | None = None,
    memory_budget: int | None = None,
    progress: Progress | None = None,
) -> PlacementMargins:
    """Proven margins with the patch at each of its placements, by interval bounds."""
    return IntervalBounds(model, dtype, memory_budget).placement_margins(images, labels, threat, progress)
