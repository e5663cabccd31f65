"""What the model says of images, and whether an attack kept to its threat. Nothing here trusts an attack."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from patchcert.certificates.checks import check_inputs, check_labels, logits_as_given
from patchcert.errors import ModelError, PatchcertError
from patchcert.threats import Threat

_MODAL = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd)


class AttackLeftThreat(PatchcertError):
    """An attack returned an image that its threat does not allow; its successes would mean nothing."""


@final
@dataclass(frozen=True, eq=False)
class Verdict:
    """What the model says: the predicted class and by how much the best wrong class leads the label."""

    predictions: Tensor
    margins: Tensor


def wrong_lead(logits: Tensor, labels: Tensor) -> Tensor:
    """The largest logit of another class less the label's (n,): positive exactly where the label has lost."""
    label = labels[:, None]
    others = logits.scatter(1, label, -torch.inf).amax(dim=1)
    return others - logits.gather(1, label)[:, 0]


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor, batch_size: int) -> Verdict:
    """The model's verdict on every image; logits that are not finite are an error."""
    predictions = labels.new_zeros(len(images))
    margins = images.new_zeros(len(images))
    sound = torch.ones((), dtype=torch.bool, device=images.device)
    for start in range(0, len(images), batch_size):
        part = slice(start, start + batch_size)
        logits = model(images[part])
        check_logits(logits, labels[part])
        sound &= logits.isfinite().all()
        predictions[part] = logits.argmax(dim=1)
        margins[part] = wrong_lead(logits, labels[part]).to(margins.dtype)
    require_finite(sound)
    return Verdict(predictions, margins)


def require_finite(sound: Tensor) -> None:
    """Refuse to go on where a model has given NaN or infinity; this is where the device is waited for."""
    if not bool(sound):
        raise ModelError(
            "the model gave NaN or infinite logits, which neither break nor withstand an attack",
            hint="check the weights and the normalisation of the model",
        )


def require_contained(threat: Threat, clean: Tensor, changed: Tensor) -> None:
    """Refuse images that the threat does not allow, whatever attack made them."""
    in_range = ((changed >= 0) & (changed <= 1)).flatten(1).all(dim=1)
    inside = threat.contains(clean, changed) & in_range
    if not bool(inside.all()):
        outside = (~inside).nonzero().flatten().tolist()
        raise AttackLeftThreat(
            f"the attack left its threat {threat} on {len(outside)} of {len(clean)} images, "
            f"first on image {outside[0]}",
            hint="the fault is the attack's: only the allowed pixels may change, within [0, 1]",
        )


def check_logits(logits: Tensor, labels: Tensor) -> None:
    """Refuse what is no table of at least two classes, one row per image."""
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


def check_batch(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Refuse images, labels and models that do not fit together, before time is spent on them."""
    check_inputs(model, images, labels)
    for name, module in model.named_modules():
        if module.training and isinstance(module, _MODAL):
            raise ModelError(
                f"layer {name!r} ({type(module).__name__}) is in training mode, so its answers vary",
                hint="call model.eval() first",
            )
    if len(images):
        with torch.no_grad():
            logits = logits_as_given(model, images[:1])
        check_logits(logits, labels[:1])
        check_labels(labels, logits.shape[1])
