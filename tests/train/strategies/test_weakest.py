"""Training on linear bounds: its margins are those that certify, with the right gradient, at placements it claims."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, nn

from patchcert.bounds import trace
from patchcert.bounds.linear import adaptive, reference_margin
from patchcert.certificates import IntervalBounds
from patchcert.errors import SpecError, UnsupportedLayer
from patchcert.models import ModelSpec
from patchcert.threats import Patch
from patchcert.train.spec import read_spec
from patchcert.train.strategies import AllPlacements, Weakest
from patchcert.train.strategies.placements import PlacedPatch, other_classes
from patchcert.train.strategies.weakest import WeakestTraining, attacked_margins, hardest
from patchcert.train.strategy import Batch, Subject
from patchcert.windows.dense import dense_linear_margins, dense_margins
from small_trainings import gradient, make_batch, make_model, worst_margins

CLASSES, PATCH = 4, Patch((3, 2))


def training(strategy, model, threat=PATCH):
    subject = Subject(model, ModelSpec("m", 1, 8, 8, CLASSES), threat)
    return WeakestTraining(strategy, PlacedPatch.of(subject), CLASSES)


def everywhere(model, batch, threat=PATCH):
    """The better of interval and linear bounds (n, p, classes) at every placement, as certificates have them."""
    network, corners = trace(model), threat.placements(8, 8).corners
    given = (network, batch.images, batch.labels, threat, corners)
    return torch.maximum(dense_margins(*given), dense_linear_margins(*given))


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_the_margin_at_a_placement_is_the_linear_bound_of_certificates_there(kind):
    model, batch = make_model(kind), make_batch(5)
    margins = everywhere(model, batch)
    by_class, by_image = (training(Weakest(placements=kind), model) for kind in ("class", "image"))
    ranked = by_class.ranked(batch.images, batch.labels, 1.0)
    weakest = ranked.argmin(dim=1)
    found = by_class.worst_case(batch, 1.0, Generator()).margins
    torch.testing.assert_close(found, margins.gather(1, weakest.unsqueeze(1))[:, 0], rtol=1e-4, atol=1e-5)
    placement = hardest(ranked, 1)[:, 0]
    found = by_image.worst_case(batch, 1.0, Generator()).margins
    torch.testing.assert_close(found, margins[torch.arange(5), placement], rtol=1e-4, atol=1e-5)


def test_margins_are_those_that_refinement_proves():
    model, batch = make_model("mlp").double(), make_batch(6, dtype=torch.float64)
    one_place = Patch((3, 2), placements=[(2, 3)])
    found = training(Weakest(), model, one_place).worst_case(batch, 1.0, Generator()).margins
    images = batch.images.float().double()
    proven = IntervalBounds(model, refine="linear", dtype=torch.float64).certify(
        images, batch.labels, one_place
    )
    others = found.scatter(1, batch.labels[:, None], torch.inf).amin(dim=1)
    assert torch.equal(proven.certified, others > 0)


def test_no_point_of_the_box_is_below_its_margin():
    for kind, epsilon in itertools.product(("mlp", "cnn"), (0.3, 1.0)):
        model, batch = make_model(kind), make_batch(4)
        at_work = training(Weakest(placements="image"), model)
        chosen = at_work.choose(
            batch.images, batch.labels, at_work.ranked(batch.images, batch.labels, epsilon), epsilon
        )
        bounds = at_work.bounded(batch.images, batch.labels, chosen, epsilon)
        box = at_work.patch.boxes(batch.images, chosen, epsilon)
        for seed in range(40):
            share = torch.rand(box.lower.shape, generator=Generator().manual_seed(seed))
            share = share.round() if seed % 2 else share
            logits = model(torch.lerp(box.lower, box.upper, share))
            margins = logits.gather(1, batch.labels[:, None]) - logits
            assert (margins >= bounds - 1e-5).all()


def test_the_gradient_is_that_of_differences():
    model, batch = make_model("mlp").double(), make_batch(3, dtype=torch.float64)
    at_work = training(Weakest(slopes="parallel"), model)
    weight = model[1].weight

    def total():
        chosen = at_work.choose(
            batch.images, batch.labels, at_work.ranked(batch.images, batch.labels, 0.8), 0.8
        )
        return at_work.bounded(batch.images, batch.labels, chosen, 0.8).sum()

    (gradient,) = torch.autograd.grad(total(), weight)
    for row, column in ((0, 5), (3, 20), (7, 33), (11, 40)):
        with torch.no_grad():
            weight[row, column] += 1e-6
            above = total()
            weight[row, column] -= 2e-6
            below = total()
            weight[row, column] += 1e-6
        assert float(above - below) / 2e-6 == pytest.approx(float(gradient[row, column]), rel=1e-4, abs=1e-6)


@torch.no_grad()
def test_a_single_slope_is_that_of_the_slow_twin():
    model, batch = make_model("cnn").double(), make_batch(1, dtype=torch.float64)
    at_work = training(Weakest(slopes="adaptive"), model)
    chosen, label = torch.tensor([[7]]), int(batch.labels)
    targets = torch.arange(CLASSES)[None, None]
    found = at_work.linear(batch.images, batch.labels, chosen, targets, 1.0)[0, 0]
    box = at_work.patch.boxes(batch.images, chosen, 1.0)
    interval = trace(model).margins(box, batch.labels)[0]
    for target in range(CLASSES):
        slow = reference_margin(trace(model), box, label, target, adaptive)
        wanted = max(slow, float(interval[target]))
        assert float(found[target]) == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_intervals_at_the_weakest_placement_of_each_class_are_all_placements(kind):
    model, batch = make_model(kind), make_batch(4)
    ours = worst_margins(Weakest(bound="interval"), model, PATCH, batch, 0.6)
    theirs = worst_margins(AllPlacements(), model, PATCH, batch, 0.6)
    assert torch.equal(ours, theirs)
    assert torch.equal(gradient(model, ours, batch.labels)[1], gradient(model, theirs, batch.labels)[1])


@pytest.mark.parametrize("placements", ["class", "image"])
def test_enough_candidates_find_the_placement_that_is_weakest_by_linear_bounds(placements):
    model, batch = make_model("cnn"), make_batch(6)
    margins = everywhere(model, batch)
    at_work = training(Weakest(placements=placements, candidates=1000), model)
    found = at_work.worst_case(batch, 1.0, Generator()).margins
    if placements == "class":
        wanted = margins.amin(dim=1)
    else:
        others = margins.gather(
            2, other_classes(batch.labels, CLASSES)[:, None].expand(-1, margins.shape[1], -1)
        )
        losses = torch.logsumexp(-others, dim=2)
        wanted = margins[torch.arange(6), losses.argmax(dim=1)]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_search_by_linear_bounds_finds_the_weakest_placement():
    model, batch = make_model("mlp").double(), make_batch(6, dtype=torch.float64)
    found = training(Weakest(search="linear", slopes="parallel"), model)
    few = training(Weakest(candidates=1000, slopes="parallel"), model)
    torch.testing.assert_close(
        found.worst_case(batch, 0.7, Generator()).margins, few.worst_case(batch, 0.7, Generator()).margins
    )
    with pytest.raises(UnsupportedLayer, match="exist for networks of one hidden layer"):
        Weakest(search="linear").bind(Subject(make_model("cnn"), ModelSpec("m", 1, 8, 8, CLASSES), PATCH))


@pytest.mark.parametrize("placements", ["class", "image"])
def test_parallel_lines_of_one_hidden_layer_give_the_margins_of_whole_images(placements):
    model, batch = make_model("mlp").double(), make_batch(6, dtype=torch.float64)
    at_work = training(Weakest(slopes="parallel", placements=placements), model)
    others = other_classes(batch.labels, CLASSES)
    chosen = torch.randint(42, (6, 3 if placements == "class" else 1), generator=Generator().manual_seed(0))
    targets = others.unsqueeze(2 if placements == "class" else 1)
    given = (batch.images, batch.labels, chosen, targets, 0.8)
    found, wanted = at_work.linear(*given), at_work.linear_on_images(*given)
    torch.testing.assert_close(found, wanted)
    ours, theirs = (torch.autograd.grad(each.sum(), model[1].weight)[0] for each in (found, wanted))
    torch.testing.assert_close(ours, theirs)


def test_as_many_placements_are_searched_as_asked_for_and_all_have_their_turn():
    model, batch = make_model("mlp"), make_batch(6)
    some = training(Weakest(search="linear", searched=5), model)
    generator, seen = Generator().manual_seed(0), set()
    for _ in range(200):
        numbers = some.searched(batch.images, generator)
        assert len(set(numbers.tolist())) == 5
        assert set(numbers.diff().tolist()) <= {8, 9}
        seen |= set(numbers.tolist())
    assert seen == set(range(42))
    assert training(Weakest(search="linear", searched=42), model).searched(batch.images, generator) is None


@pytest.mark.parametrize("placements", ["class", "image"])
@pytest.mark.parametrize("candidates", [1, 2])
def test_the_weakest_of_the_searched_placements_is_trained_on(placements, candidates):
    model, batch = make_model("mlp").double(), make_batch(6, dtype=torch.float64)
    settings = Weakest(
        search="linear", slopes="parallel", searched=7, placements=placements, candidates=candidates
    )
    at_work = training(settings, model)
    numbers = at_work.searched(batch.images, Generator().manual_seed(5))
    everything = at_work.ranked(batch.images, batch.labels, 0.9)
    ranked = at_work.ranked(batch.images, batch.labels, 0.9, numbers=numbers)
    torch.testing.assert_close(ranked, everything[:, numbers])
    chosen = at_work.choose(batch.images, batch.labels, ranked, 0.9, numbers)
    assert set(chosen.flatten().tolist()) <= set(numbers.tolist())
    found = at_work.worst_case(batch, 0.9, Generator().manual_seed(5)).margins
    torch.testing.assert_close(found, at_work.bounded(batch.images, batch.labels, chosen, 0.9))


def test_a_search_by_attack_ranks_placements_as_whole_images_do_whatever_the_network():
    batch = make_batch(6, dtype=torch.float64)
    for kind in ("mlp", "cnn"):
        model = make_model(kind).double()
        at_work = training(Weakest(search="attack", placements="image", bound="interval"), model)
        numbers = torch.tensor([41, 0, 7])
        found = at_work.ranked(batch.images, batch.labels, 0.8, numbers=numbers)
        slow = at_work.attacked_on_images(batch.images, batch.labels, 0.8, numbers)
        torch.testing.assert_close(found, slow)
        everywhere = at_work.attacked_on_images(batch.images, batch.labels, 0.8)
        torch.testing.assert_close(everywhere[:, numbers], slow)
        for number in numbers:
            box = at_work.patch.boxes(batch.images, number.expand(6, 1), 0.8)
            middle = box.centre.requires_grad_()
            F.cross_entropy(model(middle), batch.labels, reduction="sum").backward()
            logits = model(box.centre + middle.grad.sign() * box.radius)
            wanted = logits.gather(1, batch.labels[:, None]) - logits
            torch.testing.assert_close(everywhere[:, number], wanted)


def test_the_placement_of_the_strongest_attack_is_bounded():
    model, batch = make_model("cnn").double(), make_batch(6, dtype=torch.float64)
    settings = Weakest(search="attack", searched=9, placements="image", bound="interval", mixture=1.0)
    at_work = training(settings, model)
    numbers = at_work.searched(batch.images, Generator().manual_seed(5))
    losses = torch.logsumexp(-at_work.attacked_on_images(batch.images, batch.labels, 0.9, numbers), dim=2)
    chosen = numbers[losses.argmax(dim=1)]
    margins = at_work.patch.dense_margins(batch.images, batch.labels, chosen[:, None], 0.9)[:, 0]
    found = at_work.worst_case(batch, 0.9, Generator().manual_seed(5)).margins
    torch.testing.assert_close(found, margins)


def test_an_attack_lies_in_the_box_and_is_worse_than_where_it_began():
    model, batch = make_model("cnn"), make_batch(6)
    at_work = training(Weakest(mixture=0.0), model)
    box = at_work.patch.boxes(batch.images, torch.full((6, 1), 9), 1.0)
    seen = []
    network = trace(nn.Sequential(model))

    class Spy:
        def values(self, images):
            seen.append(images.detach())
            return network.values(images)

    noise = torch.rand(batch.images.shape, generator=Generator().manual_seed(0))
    margins = attacked_margins(Spy(), box, noise, batch.labels, 4)
    assert len(seen) == 5
    assert all(((box.lower <= images) & (images <= box.upper)).all() for images in seen)
    assert torch.equal(seen[-1][:, 0, 0, 0], batch.images[:, 0, 0, 0])
    worst = [F.cross_entropy(model(images), batch.labels, reduction="none") for images in (seen[0], seen[-1])]
    assert (worst[1] >= worst[0] - 1e-5).float().mean() > 0.8
    logits = model(seen[-1])
    torch.testing.assert_close(margins, logits.gather(1, batch.labels[:, None]) - logits)


def test_a_mixture_lies_between_attack_and_bound_and_counts_what_the_bound_proves():
    model, batch = make_model("mlp"), make_batch(6)
    ends = {}
    for mixture in (0.0, 0.25, 1.0):
        at_work = training(Weakest(mixture=mixture, placements="image"), model)
        ends[mixture] = at_work.worst_case(batch, 1.0, Generator().manual_seed(0))
    torch.testing.assert_close(
        ends[0.25].margins, 0.75 * ends[0.0].margins + 0.25 * ends[1.0].margins, rtol=1e-5, atol=1e-6
    )
    assert (ends[0.0].margins >= ends[1.0].margins - 1e-5).all()
    assert torch.equal(ends[0.25].bounded, ends[1.0].margins)


def test_what_is_drawn_does_not_depend_on_who_shares_the_batch():
    model, batch = make_model("mlp"), make_batch(6)
    at_work = training(Weakest(mixture=0.5), model)
    whole = at_work.worst_case(batch, 1.0, Generator().manual_seed(0)).margins
    part = at_work.worst_case(
        Batch(batch.images, batch.labels, slice(2, 5)), 1.0, Generator().manual_seed(0)
    ).margins
    torch.testing.assert_close(whole[2:5], part)


def test_intervals_of_all_placements_are_trained_on_until_linear_bounds_start():
    model, batch = make_model("mlp"), make_batch(6)
    subject = Subject(model, ModelSpec("m", 1, 8, 8, CLASSES), PATCH)
    early, always = (Weakest(starts_at=share).bind(subject) for share in (0.6, 0.0))
    intervals = AllPlacements().bind(subject)

    def margins(objective):
        return objective.worst_case(batch, 1.0, Generator()).margins

    assert torch.equal(margins(early.at(0.59)), margins(intervals))
    assert torch.equal(margins(early.at(0.6)), margins(always))
    assert not torch.equal(margins(always), margins(intervals))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["starts_at=1.5"], "starts_at is 1.5; expected a share of the epochs, from 0 to 1"),
        (["mixture=1.5"], "mixture is 1.5; expected a share of the bound, from 0 to 1"),
        (["candidates=0"], "candidates"),
        (["attack_steps=0"], "attack_steps"),
        (["bound=interval", "candidates=4"], "intervals are trained on"),
        (["bound=interval", "search=linear"], "intervals are trained on"),
        (["searched=0", "search=linear"], "searched"),
        (["search=attack"], 'search is "attack", which looks for one placement of an image'),
        (["searched=64"], "searched is 64, but intervals look at all placements"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes, message):
    with pytest.raises(SpecError, match=message):
        read_spec("paper-mnist", ["strategy.kind=weakest", *(f"strategy.{change}" for change in changes)])
