"""Worst-case margins for a training loop of one's own."""

from torch import Tensor, nn

from patchcert.bounds import trace
from patchcert.bounds.sparse import sparse_margins
from patchcert.certificates import AnyThreat
from patchcert.certificates.checks import check_fit, check_inputs
from patchcert.errors import InvalidThreat
from patchcert.tensors import Images, Labels, Margins
from patchcert.threats import Patches, SparsePixels
from patchcert.train.strategies.placements import PlacedPatch, least_margins
from patchcert.windows.training import WeakestPlacements


def worst_case_margins(
    model: nn.Module, images: Images, labels: Labels, threat: AnyThreat, epsilon: float | Tensor = 1.0
) -> Margins:
    """Lower bounds of logit[label] - logit[class] over all members of the threat, 0 at the label, with a gradient.

    Pixels of the threat move by at most `epsilon`, which training may let grow from 0 to 1. Bounds are rounded to
    nearest, as training needs no more: `certify` is what proves. The gradient of a patch is that of its placement
    with the least margin against each class. Cross entropy of the negated margins trains for certificates.
    """
    check_inputs(model, images, labels)
    check_fit(threat, images)
    network = trace(model, images.shape[1:])
    if isinstance(threat, Patches):
        raise InvalidThreat(
            f"margins to train on exist for one patch and for sparse pixels, got {threat}",
            hint="train on one patch; patchcert.certify proves several",
        )
    if isinstance(threat, SparsePixels):
        return sparse_margins(network, images, labels, threat.pixels, threat.bound, epsilon)
    return least_margins(PlacedPatch(network, threat), WeakestPlacements(threat), images, labels, epsilon)
