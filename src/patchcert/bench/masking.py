"""How fast masked copies of images are classified, against the bare network on whole images and against arithmetic."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Generator, Tensor, nn

from patchcert.bench.floor import seconds
from patchcert.bench.measure import TEST_IMAGES, Machine
from patchcert.certificates.batches import FixedBatches, Precision
from patchcert.certificates.masked_copies import MaskedCopies
from patchcert.certificates.masking import DoubleMasking
from patchcert.models import ModelSpec, build
from patchcert.models.imagenet import ResNet50
from patchcert.threats import Patch
from patchcert.work import multiply_adds

IMAGES = 64


@dataclass(frozen=True, slots=True)
class MaskedCase:
    """A network of random weights, the side of square images and of the patch, and the masks per axis."""

    network: str
    size: int
    patch: int
    masks: int

    @property
    def name(self) -> str:
        """How the case is called."""
        return f"{self.network} {self.size}px {self.patch}x{self.patch}, {self.masks} x {self.masks} masks"

    def build(self, filters: int) -> nn.Module:
        """The network; ResNet-50 has its own width."""
        if self.network == "resnet50":
            return ResNet50().eval()
        spec = ModelSpec(self.network, 3, self.size, self.size, filters=filters)
        return build(spec, Generator().manual_seed(0)).eval()


MASKED_CASES = (
    MaskedCase("resnet18", 32, 5, 6),
    MaskedCase("resnet18", 32, 5, 14),
    MaskedCase("resnet50", 224, 32, 6),
)


def run_masked_case(case: MaskedCase, machine: Machine) -> dict[str, Any]:
    """Passes per second of the bare network and behind masks, in half precision on a GPU and float32 on a CPU.

    On a CPU ResNet-18 has an eighth of the channels (`filters`). `bare`, `masked` and, on a GPU, `compiled` are of one
    run, precision and batch size. `hours` is how long certificates of 10,000 images take if none of them leaves early.
    """
    on_gpu = machine.device.type == "cuda"
    precision: Precision = "bfloat16" if on_gpu else "float32"
    filters = 64 if on_gpu else 8
    model = case.build(filters).to(machine.device)
    shape, generator = (IMAGES, 3, case.size, case.size), Generator().manual_seed(1)
    images = torch.rand(shape, generator=generator).to(machine.device)
    # No verdict is asked for, so that rounding of random weights in half precision does not matter.
    masking = DoubleMasking(model, Patch(case.patch), masks=case.masks, precision=precision, slack=0.99)
    with masking.copies(images) as copies:
        bare = copies.size / seconds(_bare(copies.base, images), machine.device, machine.spend)
        masked, count = _rate(copies, machine), len(copies.masks)
    compiled = None
    if on_gpu:
        with replace(masking, compiled=True).copies(images) as fused:
            compiled = _rate(fused, machine)
    passes = count * (count + 1) // 2
    operations, best = 2.0 * multiply_adds(model, images[:1]), max(masked, compiled or 0.0)
    return {
        "case": case.name,
        "filters": filters,
        "precision": precision,
        "batch": copies.size,
        "passes": passes,
        "bare": bare,
        "masked": masked,
        "compiled": compiled,
        "ratio": masked / bare,
        "gigaflops": operations / 1e9,
        "fraction_of_floor": best * operations / _ceiling(machine, precision),
        "hours": passes * TEST_IMAGES / best / 3600,
    }


def _rate(copies: MaskedCopies, machine: Machine) -> float:
    rounds = 4 if machine.device.type == "cuda" else 1
    return rounds * copies.size / seconds(_masked(copies, rounds), machine.device, machine.spend)


def _bare(base: FixedBatches, images: Tensor) -> Callable[[], object]:
    batch = images[torch.arange(base.size, device=images.device) % len(images)]
    return lambda: base.logits(batch)


def _masked(copies: MaskedCopies, rounds: int) -> Callable[[], object]:
    generator = Generator().manual_seed(2)
    total = rounds * copies.size
    owner = torch.randint(IMAGES, (total,), generator=generator).to(copies.images.device)
    first, second = torch.randint(len(copies.masks), (2, total), generator=generator).to(owner)
    labels = torch.zeros(IMAGES, dtype=torch.long, device=owner.device)
    return lambda: list(copies.look(owner, first, second, labels))


def _ceiling(machine: Machine, precision: Precision) -> float:
    """Operations per second of a large square product in this precision."""
    if precision == "float32":
        return machine.ceilings.float32
    left, right = torch.randn(2, 8192, 8192, device=machine.device, dtype=torch.bfloat16).unbind()
    return 2.0 * 8192**3 / seconds(lambda: left @ right, machine.device, 0.3)
