"""Random Ablation (Levine and Feizi 2020): vote over copies of which only a few random pixels are kept."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, final, get_args

import torch
from torch import Generator, Tensor, nn

from patchcert.bounds.rounding import fast_arithmetic, precise_arithmetic
from patchcert.certify.ablation_statistics import certified_radius, decided_class, probability_lower_bound
from patchcert.certify.checks import check_inputs, check_labels
from patchcert.errors import InvalidInput
from patchcert.progress import Progress

Precision = Literal["float32", "tf32", "bfloat16"]
_KEYS = 2**31 - 1


def encode_ablated(images: Tensor, retained: Tensor) -> Tensor:
    """Channels (v, 1 - v) on retained pixels, (0, 0) on the others, which no colour is encoded by.

    Lies channels-last in memory, the layout in which a GPU convolves fastest.
    """
    encoded = torch.cat([images, 1 - images], dim=1) * retained[:, None]
    return encoded.contiguous(memory_format=torch.channels_last)


def draw_retained(count: int, height: int, width: int, retained: int, generator: Generator) -> Tensor:
    """Masks (count, height, width) with exactly `retained` ones, each set of pixels equally likely.

    The pixels with the largest of random 32-bit keys are retained: ties, which the order of pixels would break,
    come up in one mask of millions.
    """
    shape, device = (count, height * width), generator.device
    keys = torch.randint(-_KEYS, _KEYS, shape, generator=generator, device=device, dtype=torch.int32)
    masks = torch.zeros(shape, device=device)
    masks.scatter_(1, keys.topk(retained, dim=1, sorted=False).indices, 1.0)
    return masks.unflatten(1, (height, width))


@final
@dataclass(frozen=True, slots=True)
class Ballots:
    """How often each class was voted for (n, classes): once to choose a class, and in a fresh count."""

    selection: Tensor
    estimation: Tensor

    @property
    def selected(self) -> Tensor:
        """The class that leads the first count; a certificate is about this one."""
        return self.selection.argmax(dim=1)


@final
@dataclass(frozen=True, slots=True)
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
        if pixels < 0:
            raise InvalidInput(f"{pixels} pixels cannot change", hint="ask for 0 or more")
        return self.radius >= pixels

    def certified_accuracy(self, pixels: int) -> float:
        """The share of images whose radius is at least `pixels`."""
        return float(self.certified(pixels).double().mean())


@final
@dataclass(frozen=True)
class RandomAblation:
    """Classifies by the majority of a base model's votes on randomly ablated copies.

    The base model takes twice the channels of the image (`encode_ablated`). What is voted on and certified is
    the model as it is carried out here: in `precision`, and always in batches of the same shape, so that the
    votes of both counts come from the same arithmetic. Pass generators that live on the images' device.
    """

    model: nn.Module
    retained: int
    selection_samples: int = 1_000
    estimation_samples: int = 10_000
    error_rate: float = 0.05
    batch_size: int = 1_100
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        whole = (self.retained, self.selection_samples, self.estimation_samples, self.batch_size)
        if min(whole) < 1 or not 0 < self.error_rate < 1:
            raise InvalidInput(
                "random ablation needs retained, samples and batch_size of at least 1 and an error rate "
                f"between 0 and 1, got {whole} and {self.error_rate}",
                hint="MNIST uses retained=45, CIFAR-10 retained=75; 1,000 and 10,000 samples at 0.05",
            )
        if self.precision not in get_args(Precision):
            raise InvalidInput(
                f"precision is {self.precision!r}; expected one of {', '.join(get_args(Precision))}"
            )

    def votes(
        self, images: Tensor, samples: int, generator: Generator, progress: Progress | None = None
    ) -> Tensor:
        """How often the base model says each class (n, classes) on fresh random copies."""
        return self._count(images, (samples,), generator, progress)[:, 0]

    def ballots(self, images: Tensor, generator: Generator, progress: Progress | None = None) -> Ballots:
        """Both counts of votes; nothing waits for the device."""
        counts = self._count(images, (self.selection_samples, self.estimation_samples), generator, progress)
        return Ballots(counts[:, 0], counts[:, 1])

    def predict(self, images: Tensor, generator: Generator, progress: Progress | None = None) -> Tensor:
        """The majority's class, or ABSTAINED where the two leading classes cannot be told apart."""
        votes = self.votes(images, self.estimation_samples, generator, progress)
        return torch.from_numpy(decided_class(votes.cpu().numpy(), self.error_rate)).to(images.device)

    def certify(
        self, images: Tensor, labels: Tensor, generator: Generator, progress: Progress | None = None
    ) -> AblationCertificates:
        """A radius per image: the class comes from some samples, its probability from fresh ones."""
        check_inputs(self.model, images, labels)
        ballots = self.ballots(images, generator, progress)
        check_labels(labels, ballots.selection.shape[1])
        predictions = ballots.selected
        agreeing = ballots.estimation.gather(1, predictions[:, None])[:, 0].cpu().numpy()
        lower = probability_lower_bound(agreeing, self.estimation_samples, self.error_rate)
        radius = certified_radius(lower, images.shape[2] * images.shape[3], self.retained)
        proven = torch.from_numpy(radius).to(images.device)
        proven = torch.where(predictions == labels, proven, -1)
        return AblationCertificates(proven, predictions, labels, torch.from_numpy(lower).to(images.device))

    @torch.no_grad()
    def _count(
        self, images: Tensor, parts: tuple[int, ...], generator: Generator, progress: Progress | None
    ) -> Tensor:
        """Votes by image, part and class.

        The last batch is filled up with votes that do not count. Nor do logits that are NaN or infinite, so that they
        never help to prove anything.
        """
        self._check(images)
        device, each, total = images.device, sum(parts), len(images) * sum(parts)
        ends = torch.tensor(parts).cumsum(0).to(device)
        counts = torch.zeros(0, dtype=torch.int64, device=device)
        for start in range(0, total, self.batch_size):
            position = torch.arange(start, start + self.batch_size, device=device)
            owner = (position // each).clamp(max=len(images) - 1)
            logits = self._logits(images.index_select(0, owner), generator)
            if start == 0:
                counts = counts.new_zeros(len(images) * len(parts) * logits.shape[1])
            part = torch.bucketize(position % each, ends, right=True)
            bins = (owner * len(parts) + part) * logits.shape[1] + logits.argmax(dim=1)
            counts.scatter_add_(0, bins, ((position < total) & logits.isfinite().all(dim=1)).long())
            if progress is not None:
                progress(min(start + self.batch_size, total), total)
        return counts.reshape(len(images), len(parts), -1)

    def _check(self, images: Tensor) -> None:
        if images.dim() != 4 or not len(images):
            raise InvalidInput(
                f"votes need images (n, channels, height, width) and one at least, got {tuple(images.shape)}"
            )
        if self.retained > images.shape[2] * images.shape[3]:
            raise InvalidInput(
                f"{self.retained} pixels cannot be retained in images of {images.shape[2]}x{images.shape[3]}",
                hint="retain fewer pixels",
            )
        if self.model.training:
            raise InvalidInput(
                "the base model is in training mode, where votes may depend on each other",
                hint="call model.eval()",
            )

    def _logits(self, images: Tensor, generator: Generator) -> Tensor:
        masks = draw_retained(len(images), images.shape[2], images.shape[3], self.retained, generator)
        with _arithmetic(self.precision, images.device):
            return self.model(encode_ablated(images, masks.to(images)))


@contextmanager
def _arithmetic(precision: Precision, device: torch.device) -> Iterator[None]:
    """The precision whatever is set outside; TF32 exists on CUDA alone."""
    with precise_arithmetic():
        if precision == "tf32":
            with fast_arithmetic():
                yield
        elif precision == "bfloat16":
            with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
                yield
        else:
            yield
