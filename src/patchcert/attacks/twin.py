"""Looking for adversarial images with a quicker twin of the attacked network, which is never believed."""

import copy
from collections import Counter
from dataclasses import dataclass, replace
from typing import Self, final

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from patchcert.attacks.base import Attack, Findings, Task
from patchcert.attacks.campaign import Campaign, noise
from patchcert.attacks.climbing import Climb, Record
from patchcert.attacks.patch import PatchAttack
from patchcert.attacks.placement_search import random_order
from patchcert.attacks.views import View, put, stamp_cells
from patchcert.errors import InvalidInput
from patchcert.threats import Patch


@final
class Twin(nn.Module):
    """Nearly the same logits sooner: batch norms folded in, channels last, on a GPU products in bfloat16.

    Takes and gives float32, and gradients pass. What it says differs from the network by rounding, so that it
    serves to climb by, but not to decide whether an attack has succeeded.
    """

    def __init__(self, model: nn.Module, reduced: bool | None = None) -> None:
        super().__init__()
        self.model = without_batch_norms(model).to(memory_format=torch.channels_last)  # pyright: ignore
        self.reduced = next(model.parameters()).is_cuda if reduced is None else reduced
        self.train(model.training)

    @property
    def dtype(self) -> str:
        """The type in which products are formed."""
        return "bfloat16" if self.reduced else "float32"

    def forward(self, images: Tensor) -> Tensor:
        """Logits in float32."""
        images = images.contiguous(memory_format=torch.channels_last)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.reduced):
            logits = self.model(images)
        return logits.float()


class _LeafTracer(fx.Tracer):
    """Goes down to the modules that hold no others."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not any(m.children())


def without_batch_norms(model: nn.Module) -> nn.Module:
    """A copy of a network in eval mode with each batch norm put into the convolution before it."""
    root = copy.deepcopy(model).requires_grad_(False)
    traced = fx.GraphModule(root, _LeafTracer().trace(root))
    modules = dict(traced.named_modules())
    calls = Counter(node.target for node in traced.graph.nodes if node.op == "call_module")
    for node in list(traced.graph.nodes):
        if node.op != "call_module" or not isinstance(norm := modules[node.target], nn.BatchNorm2d):
            continue
        before = node.args[0]
        convolution = modules.get(before.target) if before.op == "call_module" else None
        if isinstance(convolution, nn.Conv2d) and calls[before.target] == 1 and len(before.users) == 1:
            traced.set_submodule(before.target, fuse_conv_bn_eval(convolution, norm))
            node.replace_all_uses_with(before)
            traced.graph.erase_node(node)
    traced.delete_all_unused_submodules()
    traced.recompile()
    return traced.requires_grad_(False)


@final
@dataclass(frozen=True, eq=False)
class TwinView(View):
    """Whole images, shown to the twin."""

    twin: nn.Module
    clean: Tensor
    cells: Tensor

    @property
    def is_exact(self) -> bool:
        return False

    def logits(self, values: Tensor) -> Tensor:
        return self.twin(put(self.clean, self.cells, values))

    def keep(self, index: Tensor) -> "TwinView":
        return TwinView(self.twin, self.clean[index], self.cells[index])


@final
@dataclass(frozen=True, eq=False)
class TwinViews:
    """What the twin says of images with a patch."""

    twin: nn.Module
    images: Tensor
    patch: Patch

    def at(self, owner: Tensor, corners: Tensor) -> TwinView:
        """The images of these ascents, with a patch at the corners."""
        cells = stamp_cells(self.patch, corners, self.images.shape[1:])
        return TwinView(self.twin, self.images[owner], cells)


@final
@dataclass(frozen=True)
class TwinAttack(Attack):
    """The inner attack with the twin's gradients, and the attacked model's word on every success.

    An image is given up only once the model itself gets it wrong. Where it does not, though the twin does,
    the ascents on that image go on, and the model is asked again after the next `check_every` steps.
    """

    attack: PatchAttack
    twin: nn.Module

    @property
    def batch_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """That of the inner attack."""
        return self.attack.batch_size

    def exhaustive(self) -> Self:
        """The same attack, which does not stop at the first success but goes on to the largest margin."""
        return replace(self, attack=self.attack.exhaustive())

    def propose(self, model: nn.Module, task: Task) -> Findings:
        """The strongest patched image met, by the model's own margin."""
        patch, inner = task.threat, self.attack
        if not isinstance(patch, Patch) or inner.search != "random":
            raise InvalidInput(
                f"a twin climbs at random placements of a Patch, got {patch} and search {inner.search!r}",
                hint="use PatchAttack or SparseAttack by themselves",
            )
        climb = Climb(inner.loss, inner.step_size, inner.early_stop)
        views = TwinViews(self.twin, task.images, patch)
        record = Record(model, task.images, task.labels)
        campaign = Campaign(model, task, patch, views, climb, inner.batch_size, inner.check_every, record)
        order = random_order(len(task.images), len(campaign.corners), task.generator).to(task.images.device)
        campaign.spend(order, lambda: noise(task.images, patch, task.generator), inner.restarts, inner.steps)
        return campaign.findings()


@final
class InParts(nn.Module):
    """The same model, which looks at no more than so many images at once."""

    def __init__(self, model: nn.Module, at_once: int) -> None:
        super().__init__()
        self.model = model
        self.at_once = at_once
        self.train(model.training)

    def forward(self, images: Tensor) -> Tensor:
        """The logits of all images."""
        return torch.cat([self.model(part) for part in images.split(self.at_once)])
