"""Training against a few changed pixels: by bounds over every choice of them, or for the vote of Random Ablation."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

import torch
from torch import Generator, Tensor, nn

from patchcert.bounds.sparse import sparse_margins
from patchcert.certificates.ablation import draw_retained, encode_ablated
from patchcert.errors import InvalidThreat, SpecError
from patchcert.models import ModelSpec
from patchcert.tensors import Images
from patchcert.threats import SparsePixels
from patchcert.threats.sparse import SparseBound
from patchcert.train.strategy import (
    Batch,
    Objective,
    Strategy,
    Subject,
    Threat,
    WorstCase,
    bounded_model,
    logit_margins,
    whole_model,
)
from patchcert.train.toml import at_least


@final
@dataclass(frozen=True, slots=True)
class SparseChanges(Strategy):
    """All choices of a few pixels at once, bounded in the first layer; `bound` overrides the threat's own."""

    threats: ClassVar = (SparsePixels,)
    kind: Literal["sparse"] = "sparse"
    bound: SparseBound | None = None

    def bind(self, subject: Subject) -> Objective:
        """The margins that are left whichever pixels change."""
        threat, network = subject.threat, bounded_model(subject)
        if not isinstance(threat, SparsePixels):
            raise InvalidThreat(f"changes of single pixels are trained against, but the threat is {threat}")
        pixels, bound = threat.pixels, self.bound or threat.bound

        def worst_case(batch: Batch, epsilon: float | Tensor, generator: Generator) -> WorstCase:
            return WorstCase(
                sparse_margins(network, batch.own_images, batch.own_labels, pixels, bound, epsilon)
            )

        return Objective(network, worst_case)


@final
@dataclass(frozen=True, slots=True)
class Ablated(Strategy):
    """Plain cross entropy on images of which all but `retained` random pixels are ablated, whatever epsilon is.

    Every image has a mask of its own, or a batch shares one. With `bfloat16` the products of the network are rounded
    to it, those of the loss are not.
    """

    threats: ClassVar = (SparsePixels,)
    has_bounds: ClassVar = False
    has_epsilon: ClassVar = False
    kind: Literal["ablated"] = "ablated"
    retained: int = 45
    masks: Literal["image", "batch"] = "image"
    bfloat16: bool = False

    def __post_init__(self) -> None:
        at_least(1, "retained", self.retained)

    def bind(self, subject: Subject) -> Objective:
        """The margins of one ablated copy of each image, by the model in training mode."""
        spec = subject.model_spec
        if self.retained > spec.height * spec.width:
            raise SpecError(
                f"{self.retained} pixels cannot be retained in images of {spec.height}x{spec.width}",
                hint="set strategy.retained to fewer",
            )
        _check_takes_ablated(subject.model, spec)
        network = whole_model(subject.model)

        def worst_case(batch: Batch, epsilon: float | Tensor, generator: Generator) -> WorstCase:
            encoded = self.ablate(batch, generator)
            device = encoded.device.type
            with torch.autocast(device, torch.bfloat16, enabled=self.bfloat16, cache_enabled=False):
                logits = network.values(encoded)[-1]
            return WorstCase(logit_margins(logits.float(), batch.own_labels))

        return Objective(network, worst_case)

    def learned_method(self, threat: Threat) -> tuple[str, dict[str, Any]]:
        return "ablation", {"retained": self.retained}

    def ablate(self, batch: Batch, generator: Generator) -> Images:
        """This process's images in their encoding, of which masks that were drawn for the whole batch retain pixels."""
        height, width = batch.images.shape[2:]
        if self.masks == "batch":
            mask = draw_retained(1, height, width, self.retained, generator)
            return encode_ablated(batch.own_images, mask)
        masks = draw_retained(len(batch), height, width, self.retained, generator)
        return encode_ablated(batch.own_images, masks[batch.rows])


def _check_takes_ablated(model: nn.Module, spec: ModelSpec) -> None:
    """Refuse a model that does not take images in their encoding of twice the channels."""
    blank = torch.zeros(1, 2 * spec.channels, spec.height, spec.width)
    try:
        with torch.no_grad():
            model(blank.to(next(model.parameters()).device))
    except RuntimeError as error:
        raise SpecError(
            f"the model {spec.name!r} does not take ablated images, encoded in {2 * spec.channels} channels",
            hint="set model.name to cnn2_ablation or resnet18_ablation",
        ) from error
