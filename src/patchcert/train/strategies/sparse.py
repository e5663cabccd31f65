"""Training against a few changed pixels: by bounds over every choice of them, or for the vote of Random Ablation."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

from torch import Generator, Tensor

from patchcert.bounds.sparse import SparseBound, sparse_margins
from patchcert.certificates.ablation import draw_retained, encode_ablated
from patchcert.errors import InvalidThreat, SpecError, at_least
from patchcert.tensors import Images
from patchcert.threats import SparsePixels
from patchcert.train.batch_norms import trainable_network
from patchcert.train.strategy import (
    Batch,
    Forward,
    Objective,
    Strategy,
    Subject,
    TrainedThreat,
    WorstCase,
    check_takes,
    logit_margins,
)


@final
@dataclass(frozen=True, slots=True)
class SparseChanges(Strategy):
    """All choices of a few pixels at once, bounded in the first layer; `bound` overrides the threat's own."""

    threats: ClassVar = (SparsePixels,)
    kind: Literal["sparse"] = "sparse"
    bound: SparseBound | None = None

    def bind(self, subject: Subject) -> Objective:
        """The margins that are left whichever pixels change."""
        threat, network = subject.threat, trainable_network(subject.model, subject.model_spec)
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
        hint = "set model.name to cnn2_ablation or resnet18_ablation"
        check_takes(subject, 2 * spec.channels, "ablated images", hint)
        forward = Forward.of(subject, self.bfloat16, compiled=False)

        def worst_case(batch: Batch, epsilon: float | Tensor, generator: Generator) -> WorstCase:
            logits = forward.logits(self.ablate(batch, generator))
            return WorstCase(logit_margins(logits, batch.own_labels))

        return Objective(forward.network, worst_case)

    def learned_method(self, threat: TrainedThreat) -> tuple[str, dict[str, Any]]:
        return "ablation", {"retained": self.retained}

    def ablate(self, batch: Batch, generator: Generator) -> Images:
        """This process's images in their encoding, of which masks that were drawn for the whole batch retain pixels."""
        height, width = batch.images.shape[2:]
        if self.masks == "batch":
            mask = draw_retained(1, height, width, self.retained, generator)
            return encode_ablated(batch.own_images, mask)
        masks = draw_retained(len(batch), height, width, self.retained, generator)
        return encode_ablated(batch.own_images, masks[batch.rows])
