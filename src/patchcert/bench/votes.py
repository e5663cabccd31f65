"""How fast local votes are certified: the one pass, and the sums over all placements after it."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Generator

from patchcert.bench.floor import seconds
from patchcert.bench.measure import TEST_IMAGES, Machine
from patchcert.certificates.local_votes import Aggregation, LocalScores, LocalVotes
from patchcert.certificates.votes import proven_placements
from patchcert.models import ModelSpec, build
from patchcert.threats import Patch

SIZE = 32


@dataclass(frozen=True, slots=True)
class VotesCase:
    """A network of random weights on 32x32 images, how many pixels or columns a score sees, the side of the patch, and
    how its local scores are summed."""

    network: str
    sees: int
    patch: int
    aggregation: Aggregation
    scores: LocalScores

    @property
    def name(self) -> str:
        """How the case is called."""
        return (
            f"{self.network} {self.patch}x{self.patch}, {self.scores}, {self.aggregation.replace('-', ' ')}"
        )

    def classifier(self, filters: int) -> LocalVotes:
        """The votes of the network."""
        spec = ModelSpec(self.network, 3, SIZE, SIZE, filters=filters, receptive_field=self.sees)
        model = build(spec, Generator().manual_seed(0))
        masked = None if self.aggregation == "sum" else self.patch
        return LocalVotes(model.eval(), self.aggregation, self.scores, masked)


VOTES_CASES = (
    VotesCase("stripnet", 3, 5, "sum", "softmax"),
    VotesCase("bagnet_half", 9, 5, "sum", "softmax"),
    VotesCase("bagnet_half", 9, 5, "masked-sum", "positive"),
    VotesCase("stripnet", 3, 5, "double-masked", "logits"),
)
_FILTERS = {"stripnet": 64, "bagnet_half": 256}


def run_votes_case(case: VotesCase, machine: Machine) -> dict[str, Any]:
    """Seconds of the pass, of the sums at all placements, and of whole certificates, for as many images as the machine
    certifies, random ones always; on a CPU with an eighth of the channels (`filters`). `sums` is for 10,000 images."""
    filters = _FILTERS[case.network] // (1 if machine.device.type == "cuda" else 8)
    votes, patch, count = case.classifier(filters), Patch(case.patch), machine.certified_images
    votes.model.to(machine.device)
    drawn = torch.rand(count, 3, SIZE, SIZE, generator=Generator().manual_seed(1))
    images, labels = drawn.to(machine.device), torch.zeros(count, dtype=torch.long, device=machine.device)
    scores, touched = votes.local_scores(images), votes.touched(patch, images)
    margins_of = votes.margins_of(images)

    def measured(call: partial[object]) -> float:
        return seconds(call, machine.device, machine.spend)

    summed = measured(partial(proven_placements, margins_of, scores, labels, touched, votes.ties))
    return {
        "case": case.name,
        "filters": filters,
        "images": count,
        "placements": len(touched),
        "pass_seconds": measured(partial(votes.local_scores, images)),
        "sum_seconds": summed,
        "certify_seconds": measured(partial(votes.certify, images, labels, patch)),
        "sums": summed * TEST_IMAGES / count,
    }
