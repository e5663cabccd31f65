"""Random Ablation (Levine and Feizi 2020): vote over copies of which only a few random pixels are kept."""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from typing import Annotated, Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Generator, Tensor, nn

from patchcert.certificates.batches import FixedBatches, MeanVote, Precision, check_precision
from patchcert.certificates.checks import (
    check_fit,
    check_images,
    check_inputs,
    check_labels,
    check_some,
    weight_dtype,
)
from patchcert.certificates.classifier import (
    ABSTAINED,
    AnyThreat,
    Ballots,
    Certificates,
    Classifier,
    Columns,
    Guarantee,
    first_row,
)
from patchcert.errors import InvalidInput
from patchcert.progress import Progress
from patchcert.tensors import Images, Labels
from patchcert.threats import threat_from_dict

_KEYS = 2**31 - 1


def seen_probability(pixels: int, retained: int, changed: int) -> Fraction:
    """The exact chance that at least one of `changed` pixels is among the `retained` of all `pixels`."""
    if not (0 < retained <= pixels and 0 <= changed <= pixels):
        raise InvalidInput(
            f"ablation needs 0 < retained <= pixels and 0 <= changed <= pixels, got {retained} retained and "
            f"{changed} changed of {pixels}",
            hint="MNIST uses 45 of 784, CIFAR-10 75 of 1024",
        )
    unseen = Fraction(1)
    for index in range(changed):
        unseen *= Fraction(max(pixels - retained - index, 0), pixels - index)
    return 1 - unseen


def certified_radius(probability: NDArray[np.float64], pixels: int, retained: int) -> NDArray[np.int64]:
    """The largest number of changed pixels that leave a class of this probability in the lead.

    Changing r pixels moves the probability by at most `seen_probability(r)`, so the class leads while the
    probability less that exceeds 1/2. Is -1 where not even the unchanged image has a proven majority.
    """
    thresholds = []
    for changed in range(pixels + 1):
        needed = Fraction(1, 2) + seen_probability(pixels, retained, changed)
        if needed >= 1:
            break
        thresholds.append(math.nextafter(float(needed), 1.0))  # rounding must not add a pixel
    return np.searchsorted(np.asarray(thresholds), probability, side="left") - 1


def probability_lower_bound(
    votes: NDArray[np.integer], samples: int, error_rate: float
) -> NDArray[np.float64]:
    """Clopper and Pearson's one-sided bound: the probability is below it in at most `error_rate` of cases."""
    bound = stats.beta.ppf(error_rate, np.maximum(votes, 1), samples - votes + 1)
    return np.where(votes > 0, bound, 0.0)


def is_decided(
    first: NDArray[np.integer], second: NDArray[np.integer], error_rate: float
) -> NDArray[np.bool_]:
    """Whether a fair coin splits the two leading classes' votes so unevenly with a chance of at most that."""
    both = first + second
    chance = np.minimum(2 * stats.binom.sf(np.maximum(first, second) - 1, both, 0.5), 1.0)
    return chance <= error_rate


@final
@dataclass(frozen=True, slots=True)
class VoteRules:
    """What follows from votes: how many there are, how many of an image's pixels each sees, and the error rate."""

    samples: int
    pixels: int
    retained: int
    error_rate: float

    def predictions(self, votes: NDArray[np.integer]) -> NDArray[np.int64]:
        """The class that leads the votes (n, k), or ABSTAINED where that could be chance (`is_decided`)."""
        second, first = np.partition(votes.astype(np.int64), -2, axis=1)[:, -2:].T
        return np.where(is_decided(first, second, self.error_rate), votes.argmax(axis=1), ABSTAINED)

    def radii(
        self, votes: NDArray[np.integer], selected: NDArray[np.integer], labels: NDArray[np.integer]
    ) -> NDArray[np.int64]:
        """How many pixels may change; -1 where the selected class is wrong or has no proven majority."""
        agreeing = votes[np.arange(len(votes)), selected].astype(np.int64)
        lower = probability_lower_bound(agreeing, self.samples, self.error_rate)
        return np.where(selected == labels, certified_radius(lower, self.pixels, self.retained), -1)


def encode_ablated(images: Images, retained: Annotated[Tensor, "_ h w"]) -> Annotated[Tensor, "n _ h w"]:
    """Channels (v, 1 - v) on retained pixels, (0, 0) on the others, which no colour is encoded by.

    Lies channels-last in memory, the layout in which a GPU convolves fastest.
    """
    encoded = torch.cat([images, 1 - images], dim=1) * retained[:, None]
    return encoded.contiguous(memory_format=torch.channels_last)


def draw_retained(
    count: int, height: int, width: int, retained: int, generator: Generator
) -> Annotated[Tensor, "count h w"]:
    """Masks with exactly `retained` ones, each set of pixels equally likely.

    The pixels with the largest of random 32-bit keys are retained: ties, which the order of pixels would break,
    come up in one mask of millions.
    """
    shape, device = (count, height * width), generator.device
    keys = torch.randint(-_KEYS, _KEYS, shape, generator=generator, device=device, dtype=torch.int32)
    masks = torch.zeros(shape, device=device)
    masks.scatter_(1, keys.topk(retained, dim=1, sorted=False).indices, 1.0)
    return masks.unflatten(1, (height, width))


@final
@dataclass(frozen=True)
class RandomAblation(Classifier):
    """Classifies by the majority of a base model's votes on randomly ablated copies, and abstains from close votes.

    The base model takes twice the channels of the image (`encode_ablated`). What is voted on and certified is
    the model as it is carried out here: in `precision`, and always in batches of the same shape, so that the
    votes of both counts come from the same arithmetic. Certificates hold against any K changed pixels, and so against
    any patch of K pixels, each with a confidence of 1 - `error_rate`. They are about the majority of all copies, of
    which `predict` draws some: it abstains where the majority of these is too close to be sure, also on images that a
    member of the threat brought there, and names another class with a probability of at most `error_rate`.

    Which pixels are kept follows from the `seed` and the images, so that predictions and certificates of the same batch
    come from the same votes. Who knows the seed can look for images that are unlucky with it: deploy with
    `seed=None`, which draws afresh in every call.
    """

    model: nn.Module
    retained: int = 45
    selection_samples: int = 1_000
    estimation_samples: int = 10_000
    error_rate: float = 0.05
    batch_size: int = 1_100
    precision: Precision = "float32"
    seed: int | None = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = (self.retained, self.selection_samples, self.estimation_samples, self.batch_size)
        is_share = isinstance(self.error_rate, Real) and 0 < self.error_rate < 1
        if not all(type(value) is int for value in whole) or min(whole) < 1 or not is_share:
            raise InvalidInput(
                "random ablation needs whole numbers retained, samples and batch_size of at least 1 and an error rate "
                f"between 0 and 1, got {whole} and {self.error_rate}",
                hint="MNIST uses retained=45, CIFAR-10 retained=75; 1,000 and 10,000 samples at 0.05",
            )
        check_precision(self.precision)

    def predict(self, images: Images, progress: Progress | None = None) -> Labels:
        """The majority's class, or ABSTAINED where the two leading classes cannot be told apart."""
        votes = self.ballots(images, progress).estimation.cpu().numpy()
        return torch.from_numpy(self._rules(images).predictions(votes)).to(images.device)

    def certify(
        self, images: Images, labels: Labels, threat: AnyThreat, progress: Progress | None = None
    ) -> Certificates:
        """The class comes from some samples, its probability and with it the radius from fresh ones."""
        check_inputs(self.model, images, labels)
        check_fit(threat, images)
        ballots = self.ballots(images, progress)
        check_labels(labels, ballots.selection.shape[1])
        rules = self._rules(images)
        votes, selected = ballots.estimation.cpu().numpy(), ballots.selected.cpu().numpy()
        predictions = torch.from_numpy(rules.predictions(votes)).to(images.device)
        radius = torch.from_numpy(rules.radii(votes, selected, labels.cpu().numpy())).to(images.device)
        return Certificates(
            certified=(radius >= threat.pixels) & (predictions == labels),
            predictions=predictions,
            labels=labels,
            guarantee=Guarantee(confidence=1 - self.error_rate),
            radius=radius,
            ballots=ballots,
        )

    def images_per_block(self, device: torch.device) -> int | None:
        """Draws follow from the whole block, which has a fixed size for that reason."""
        return 40

    def passes(self, height: int, width: int) -> int | None:
        """One for each copy of both counts."""
        return self.selection_samples + self.estimation_samples

    @classmethod
    def contradiction(cls, columns: Columns, meta: Mapping[str, Any]) -> str:
        """Predictions and radii follow from the votes, and verdicts from the radii."""
        settings = meta["classifier"]
        _, height, width = meta["data"]["image"]
        rules = VoteRules(
            settings["estimation_samples"], height * width, settings["retained"], settings["error_rate"]
        )
        votes = columns["votes"].astype(np.int64)
        radii = rules.radii(votes, columns["selected"], columns["label"])
        row = first_row(
            (votes < 0).any(axis=1)
            | (votes.sum(axis=1) > rules.samples)
            | (rules.predictions(votes) != columns["prediction"])
            | (radii != columns["radius"])
            | (columns["certified"] & (radii < threat_from_dict(meta["threat"]).pixels))
        )
        return (
            "" if row is None else f"prediction, radius or verdict of row {row} do not follow from its votes"
        )

    def surrogate(self) -> nn.Module:
        """The mean of the base model's softmax over a few fixed random copies, in logarithms."""

        def copies(images: Images) -> Iterator[Tensor]:
            generator = Generator().manual_seed(self.seed or 0)
            for mask in draw_retained(8, images.shape[2], images.shape[3], self.retained, generator):
                yield encode_ablated(images, mask[None].to(images))

        return MeanVote(self.model, copies)

    def _generator(self, images: Images) -> Generator:
        generator = Generator(images.device)
        if self.seed is None:
            generator.seed()
            return generator
        content = hashlib.sha256(str(self.seed).encode())
        content.update(images.detach().float().cpu().contiguous().numpy().tobytes())
        return generator.manual_seed(int.from_bytes(content.digest()[:7], "big"))

    def _rules(self, images: Images) -> VoteRules:
        pixels = images.shape[2] * images.shape[3]
        return VoteRules(self.estimation_samples, pixels, self.retained, self.error_rate)

    @torch.no_grad()
    def ballots(self, images: Images, progress: Progress | None = None) -> Ballots:
        """Both counts of votes.

        The last batch is filled up with votes that do not count. Nor do logits that are NaN or infinite, so that they
        never help to prove anything.
        """
        self._check(images, progress)
        images = images.to(weight_dtype(self.model, images.dtype))
        base = self._base(images)
        device, each = images.device, self.selection_samples + self.estimation_samples
        total, generator = len(images) * each, self._generator(images)
        counts = torch.zeros(len(images) * 2 * base.classes, dtype=torch.int64, device=device)
        for start in range(0, total, self.batch_size):
            position = torch.arange(start, start + self.batch_size, device=device)
            owner = (position // each).clamp(max=len(images) - 1)
            logits = base.logits(self._copies(images.index_select(0, owner), generator))
            count = (position % each >= self.selection_samples).long()
            bins = (owner * 2 + count) * base.classes + logits.argmax(dim=1)
            counts.scatter_add_(0, bins, ((position < total) & logits.isfinite().all(dim=1)).long())
            if progress is not None:
                progress(min(start + self.batch_size, total) / each, len(images))
        counts = counts.reshape(len(images), 2, -1)
        return Ballots(counts[:, 0], counts[:, 1])

    def _check(self, images: Tensor, progress: Progress | None) -> None:
        check_images(self.model, images, progress)
        check_some(images)
        if self.retained > images.shape[2] * images.shape[3]:
            raise InvalidInput(
                f"{self.retained} pixels cannot be retained in images of {images.shape[2]}x{images.shape[3]}",
                hint="retain fewer pixels",
            )

    def _base(self, images: Images) -> FixedBatches:
        """The base model as it votes, after a look at whether votes in a batch depend on each other."""
        sample = images[torch.arange(self.batch_size, device=images.device) % len(images)]
        encoded = self._copies(sample, Generator(images.device).manual_seed(0))
        base = FixedBatches(self.model, encoded, self.batch_size, self.precision)
        # Rows of equal batches pass through the same kernels: what differs is the order of some sums, in at most the
        # eight bits of bfloat16, 2^-8 of the largest logit.
        base.check_company(encoded, 2**-7)
        return base

    def _copies(self, images: Images, generator: Generator) -> Annotated[Tensor, "n _ h w"]:
        masks = draw_retained(len(images), images.shape[2], images.shape[3], self.retained, generator)
        return encode_ablated(images, masks.to(images))
