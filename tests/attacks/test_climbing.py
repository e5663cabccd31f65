import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import patchcert as pc
from patchcert.attacks import AttackedModel
from patchcert.attacks.base import AttackJob
from patchcert.attacks.climbing import (
    FEWEST_AT_ONCE,
    WORK_AT_ONCE,
    Climbers,
    Effort,
    Record,
    ascents_at_once,
    fitting_at_once,
    segments_of,
)
from patchcert.attacks.views import View, patch_views, put
from patchcert.models import ModelSpec, build
from patchcert.testing.conformance import seeded
from patchcert.threats import Patch
from patchcert.threats.patch import stamp_cells
from patchcert.work import bytes_made


@dataclasses.dataclass(frozen=True, eq=False)
class Boaster(View):
    """Sees every image broken."""

    is_exact = False

    cells: torch.Tensor

    def logits(self, values):
        return torch.tensor([[0.0, 9.0]]).repeat(len(values), 1) + 0 * values.sum(dim=1, keepdim=True)

    def keep(self, index):
        return Boaster(self.cells[index])


def test_the_model_itself_is_asked_before_anything_is_recorded():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[0.0, 0, 0, 0], [1.0, 1, 1, 1]]))
        model[1].bias.copy_(torch.tensor([2.5, 0.0]))
    images, labels = torch.zeros(2, 1, 2, 2), torch.tensor([0, 0])
    record = Record(AttackedModel.of(model), images, labels)
    owner = torch.tensor([0, 1])
    cells = stamp_cells(Patch((1, 2)), torch.tensor([[0, 0], [1, 0]]), images.shape[1:])
    climbers = Climbers.at(owner, owner, Boaster(cells), torch.ones(2, 2))
    climbers = record.update(dataclasses.replace(climbers, lead=torch.tensor([9.0, 9.0])))
    torch.testing.assert_close(record.lead, torch.tensor([-0.5, -0.5]), atol=1e-4, rtol=0)
    assert torch.equal(climbers.lead, record.lead)
    assert torch.equal(record.images, put(images, cells, torch.ones(2, 2)))
    assert (record.lead <= 0).all()


def test_segments_add_up_to_all_steps():
    assert segments_of(12, 5) == [5, 5, 2]
    assert segments_of(10, 5) == [5, 5]
    assert segments_of(0, 5) == []


@given(st.integers(0, 40), st.integers(1, 16), st.integers(1, 2**14))
def test_what_runs_at_once_is_a_step_of_limited_work_or_a_whole_batch(doublings, outputs, batch_size):
    inputs = torch.zeros(1, 1).expand(1, 2 ** (doublings // 2))
    factors = torch.zeros(1, 1).expand(2 ** (doublings // 2), outputs)

    def look(point):
        for _ in range(2 ** (doublings % 2)):
            logits = torch.mm(point.to("meta"), factors.to("meta"))
        return logits

    work = inputs.shape[1] * outputs * 2 ** (doublings % 2)
    found = ascents_at_once(look, inputs, batch_size)
    assert found == ascents_at_once(look, inputs, batch_size)
    assert min(FEWEST_AT_ONCE, batch_size) <= found <= batch_size
    assert found * work <= WORK_AT_ONCE or found <= FEWEST_AT_ONCE
    assert found == batch_size or (found + 1) * work > WORK_AT_ONCE


@pytest.mark.parametrize(
    "name", ["mnist-5x5-cnn2", "mnist-5x5-mlp", "cifar10-2x2-cnn5w", "cifar10-5x5-cnn5w"]
)
def test_networks_that_are_followed_on_windows_fill_their_batches(name):
    model = pc.load(name)
    channels, size = (1, 28) if name.startswith("mnist") else (3, 32)
    images = torch.zeros(1, channels, size, size)
    view = patch_views(model, images, Patch(5)).at(torch.tensor([0]), torch.tensor([[9, 9]]))
    assert ascents_at_once(view.logits, torch.zeros(view.cells.shape), 1024) == 1024


def test_of_a_network_of_three_hundred_million_multiply_adds_some_dozens_run_at_once():
    spec = ModelSpec("bagnet_clipped", 3, 32, 32, hidden=40, filters=256, depth=2, receptive_field=9)
    model, image = build(spec).eval(), torch.zeros(1, 3, 32, 32)
    assert [ascents_at_once(model, image, batch_size) for batch_size in (1024, 512, 16, 1)] == [54, 54, 16, 1]


def test_work_is_not_counted_where_batches_are_as_small_as_can_be():
    def never(point):
        raise AssertionError("nobody needs to know")

    assert ascents_at_once(never, torch.zeros(1, 2), FEWEST_AT_ONCE) == FEWEST_AT_ONCE


@pytest.mark.parametrize("copies", [1, 16])
def test_on_a_gpu_a_step_keeps_what_fits_into_memory(copies):
    model, image = build(ModelSpec("resnet8", 3, 16, 16)).eval(), torch.zeros(1, 3, 16, 16)

    def look(point):
        return torch.stack([model(point) for _ in range(copies)]).mean(dim=0)

    memory = 10 * copies * bytes_made(model, image)
    assert fitting_at_once(look, image, 1024, memory) in (9, 10)  # the mean is made too
    assert fitting_at_once(look, image, 4, memory) == 4
    assert fitting_at_once(look, image, 1024, 1) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_networks_too_large_for_a_whole_batch_are_attacked_in_parts():
    model = build(ModelSpec("resnet18_parts", 3, 32, 32)).eval().cuda()
    surrogate, image = pc.BandVotes(model).surrogate(), torch.zeros(1, 3, 32, 32).cuda()
    count = ascents_at_once(surrogate, image, 16384)
    assert 8 <= count < 16384
    images = image.repeat(count, 1, 1, 1).requires_grad_()
    (gradient,) = torch.autograd.grad(surrogate(images).sum(), images)
    assert gradient.isfinite().all()


def effort_of(images: int, looks: int) -> tuple[Effort, list[float]]:
    shares = list[float]()
    job = AttackJob(
        torch.zeros(images, 1, 2, 2),
        torch.zeros(images, dtype=torch.long),
        Patch(1),
        seeded(0),
        lambda done, total: shares.append(done / total),
    )
    record = Record(AttackedModel.of(nn.Flatten()), job.images, job.labels)
    return Effort(job, record, looks), shares


def test_broken_images_are_spared_and_what_is_left_is_that_of_open_ones():
    effort, shares = effort_of(images=4, looks=10)
    effort.begin(10, 1.0)
    for _ in range(5):
        effort.look(4)
    assert shares == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    effort.settle(1)
    assert shares[-1] == pytest.approx(20 / (20 + 5))  # one image has five looks ahead of it
    effort.settle(0)
    assert shares[-1] == 1.0


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=20))
def test_the_share_that_is_done_never_falls(history):
    effort, shares = effort_of(images=9, looks=sum(looks for looks, _ in history))
    for looks, broken in history:
        effort.begin(effort.ahead, 1.0)
        for _ in range(looks):
            effort.look(max(effort.open, 1))
        effort.settle(max(effort.open - broken, 0))
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)
