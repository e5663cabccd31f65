"""Training on interval bounds of all placements in closed form, for networks of local features that are clipped.

Where a patch can move a local feature as far as it likes, its bounds are those of the clipping, [0, 1]. The linear
layer behind it then loses what its weights allow, feature by feature: a few sums say how much at every placement.
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, final

import torch
from torch import Generator, Tensor, nn

from patchcert.certificates.votes import Windows
from patchcert.errors import SpecError
from patchcert.tensors import Images, Labels, Margins
from patchcert.train.strategies.votes import touched_windows, trained_scores
from patchcert.train.strategy import (
    Batch,
    Forward,
    Objective,
    Strategy,
    Subject,
    WholeModel,
    WorstCase,
    logit_margins,
)

Features = Annotated[Tensor, "n f cells"]
"""Numbers between 0 and 1, f of them in each cell of a map."""
Weights = Annotated[Tensor, "k f cells"]


@final
@dataclass(frozen=True, slots=True)
class LocalBounds(Strategy):
    """Interval bounds of all placements, for networks of local features, clipped to [0, 1], and one linear layer.

    A feature that sees the patch may become 0 or 1, whatever the layers before it do. That is what intervals find
    wherever its bounds reach so far, so that what is trained on is never above them, and costs one minimum over sums
    for all placements. Of all that features can do, a patch does the share epsilon. Clipping has the gradient of a
    smooth step. `bfloat16` and `compiled` are as for `masked`.
    """

    bounds_layers: ClassVar = False
    kind: Literal["local-bounds"] = "local-bounds"
    bfloat16: bool = False
    compiled: bool = False

    def bind(self, subject: Subject) -> Objective:
        """The margins at the weakest placement, by the model in training mode."""
        local, logits = _parts(subject.model.train())
        part = replace(subject, model=local)
        windows = touched_windows(part, subject.patch)
        network = _ClippedFeatures(Forward.of(part, self.bfloat16, self.compiled), logits)

        def worst_case(batch: Batch, epsilon: float | Tensor, generator: Generator) -> WorstCase:
            features, labels = network.features(batch.own_images), batch.own_labels
            weights = logits.weight.unflatten(1, features.shape[1:])
            biases = logit_margins(logits.bias.expand(len(labels), -1), labels)
            return WorstCase(weakest_margins(features, weights, labels, windows, epsilon) + biases)

        return Objective(WholeModel((), network), worst_case)


def weakest_margins(
    features: Features, weights: Weights, labels: Labels, windows: Windows, epsilon: float | Tensor = 1.0
) -> Margins:
    """The least margins over all placements, 0 at the label, where the patch may set all features in a window.

    A feature f with the weights w of the label and v of another class adds (w - v) f to the margin, and no less than
    min(0, w - v) wherever between 0 and 1 it is.
    """
    scores = torch.einsum("nfp,kfp->nkp", features, weights)
    leads = scores.gather(1, labels[:, None, None].expand(-1, 1, scores.shape[2])) - scores
    least = (
        (weights[:, None] - weights).clamp(max=0).sum(dim=2)
    )  # k k cells: of each label against each class
    lost = (leads - least[labels]) @ windows.to(leads).T  # n k windows
    return leads.sum(dim=2) - epsilon * lost.amax(dim=2)


def _parts(model: nn.Module) -> tuple[nn.Sequential, nn.Linear]:
    """The layers that give the local features which a model clips, and its linear layer; refused where it has none."""
    layers = list(model.children()) if isinstance(model, nn.Sequential) else []
    *local, clip, flatten, logits = layers if len(layers) > 3 else [model] * 4
    is_clip = isinstance(clip, nn.Hardtanh) and (clip.min_val, clip.max_val) == (0, 1)
    is_flat = isinstance(flatten, nn.Flatten) and (flatten.start_dim, flatten.end_dim) == (1, -1)
    if not (is_clip and is_flat and isinstance(logits, nn.Linear)) or logits.bias is None:
        raise SpecError(
            "the model does not end with local features, clipped to [0, 1] by a Hardtanh, and one linear layer with "
            "biases",
            hint='set model.name = "bagnet_clipped"',
        )
    return nn.Sequential(*local), logits


@final
class _ClippedFeatures(nn.Module):
    """The whole network, its clipping with a gradient everywhere."""

    def __init__(self, local: Forward, logits: nn.Linear) -> None:
        super().__init__()
        self.local, self.logits = local, logits

    def features(self, images: Images) -> Features:
        """The features as they are, with the gradient of a smooth step."""
        return trained_scores(self.local.logits(images), "clipped")

    def forward(self, images: Images) -> Annotated[Tensor, "n k"]:
        return self.logits(self.features(images).flatten(1))
