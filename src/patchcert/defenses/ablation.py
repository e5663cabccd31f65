"""Random Ablation (Levine and Feizi 2020): vote over copies of which only a few random pixels are kept."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Generator, Tensor, nn

from patchcert.defenses.ablation_statistics import certified_radius, is_decided, probability_lower_bound
from patchcert.errors import InvalidInput

ABSTAINED = -1

Progress = Callable[[int, int], None]


def encode_ablated(images: Tensor, retained: Tensor) -> Tensor:
    """Channels (v, 1 - v) on retained pixels, (0, 0) on the others, which no colour is encoded by."""
    return torch.cat([images, 1 - images], dim=1) * retained[:, None]


def draw_retained(count: int, height: int, width: int, retained: int, generator: Generator) -> Tensor:
    """Masks (count, height, width) with exactly `retained` ones, each set of pixels equally likely."""
    keys = torch.rand(count, height * width, generator=generator, device=generator.device)
    masks = torch.zeros_like(keys)
    masks.scatter_(1, keys.topk(retained, dim=1).indices, 1.0)
    return masks.unflatten(1, (height, width))


@final
@dataclass(frozen=True)
class AblationCertificates:
    """What the votes prove, image by image; true with the confidence of `RandomAblation`, not for certain."""

    radius: Tensor
    """How many pixels may change without changing the vote; -1 where the vote is wrong or has no majority."""
    predictions: Tensor
    labels: Tensor
    probability: Tensor
    """The lower bound of the share of votes for the predicted class."""

    def certified(self, pixels: int) -> Tensor:
        """True (n,) where the vote stays right whichever `pixels` pixels change."""
        return self.radius >= pixels

    def certified_accuracy(self, pixels: int) -> float:
        """The share of images whose radius is at least `pixels`."""
        return float(self.certified(pixels).double().mean())


@final
@dataclass(frozen=True)
class RandomAblation:
    """Classifies by the majority of a base model's votes on randomly ablated copies.

    The base model takes twice the channels of the image (`encode_ablated`). Pass generators that live on the
    images' device: a mask is drawn for every vote.
    """

    model: nn.Module
    retained: int
    selection_samples: int = 1_000
    estimation_samples: int = 10_000
    error_rate: float = 0.05
    batch_size: int = 4_096

    def __post_init__(self) -> None:
        whole = (self.retained, self.selection_samples, self.estimation_samples, self.batch_size)
        if min(whole) < 1 or not 0 < self.error_rate < 1:
            raise InvalidInput(
                "random ablation needs retained, samples and batch_size of at least 1 and an error rate "
                f"between 0 and 1, got {whole} and {self.error_rate}",
                hint="MNIST uses retained=45, CIFAR-10 retained=75; 1,000 and 10,000 samples at 0.05",
            )

    def votes(
        self, images: Tensor, samples: int, generator: Generator, progress: Progress | None = None
    ) -> Tensor:
        """How often the base model says each class (n, classes) on fresh random copies."""
        if self.retained > images.shape[2] * images.shape[3]:
            raise InvalidInput(
                f"{self.retained} pixels cannot be retained in images of {images.shape[2]}x{images.shape[3]}",
                hint="retain fewer pixels",
            )
        counts = torch.zeros(len(images), 0, dtype=torch.long, device=images.device)
        total = len(images) * samples
        for start in range(0, total, self.batch_size):
            end = min(start + self.batch_size, total)
            owners = torch.arange(start, end, device=images.device) // samples
            logits = self._logits(images[owners], generator)
            if start == 0:
                counts = counts.new_zeros(len(images), logits.shape[1])
            counts.index_put_((owners, logits.argmax(dim=1)), counts.new_ones(()), accumulate=True)
            if progress is not None:
                progress(end, total)
        return counts

    def predict(self, images: Tensor, generator: Generator, progress: Progress | None = None) -> Tensor:
        """The majority's class, or ABSTAINED where the two leading classes cannot be told apart."""
        votes = self.votes(images, self.estimation_samples, generator, progress)
        leading = votes.topk(2, dim=1)
        first, second = leading.values.cpu().numpy().T
        decided = torch.from_numpy(is_decided(first, second, self.error_rate)).to(images.device)
        return torch.where(decided, leading.indices[:, 0], ABSTAINED)

    def certify(
        self, images: Tensor, labels: Tensor, generator: Generator, progress: Progress | None = None
    ) -> AblationCertificates:
        """A radius per image: the class comes from some samples, its probability from fresh ones."""
        predictions = self.votes(images, self.selection_samples, generator).argmax(dim=1)
        votes = self.votes(images, self.estimation_samples, generator, progress)
        agreeing = votes.gather(1, predictions[:, None])[:, 0].cpu().numpy()
        lower = probability_lower_bound(agreeing, self.estimation_samples, self.error_rate)
        radius = certified_radius(lower, images.shape[2] * images.shape[3], self.retained)
        proven = torch.from_numpy(radius).to(images.device)
        proven = torch.where(predictions == labels, proven, -1)
        return AblationCertificates(proven, predictions, labels, torch.from_numpy(lower).to(images.device))

    @torch.no_grad()
    def _logits(self, images: Tensor, generator: Generator) -> Tensor:
        masks = draw_retained(len(images), images.shape[2], images.shape[3], self.retained, generator)
        return self.model(encode_ablated(images, masks.to(images)))
