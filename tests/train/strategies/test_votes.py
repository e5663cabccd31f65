"""Parts of images are drawn as votes see them, and local scores are trained at the weakest of all placements."""

import itertools
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patchcert.certificates.band_votes import encode_visible
from patchcert.certificates.local_votes import LocalVotes
from patchcert.certificates.votes import (
    UNITS,
    Scores,
    doubly_masked_margins,
    masked_margins,
    masked_totals,
    sum_margins,
    sum_totals,
)
from patchcert.cli.app import run
from patchcert.errors import PatchcertError
from patchcert.models import ModelSpec, build
from patchcert.testing.conformance import seeded
from patchcert.threats import Patch
from patchcert.train.spec import read_spec
from patchcert.train.strategies import Bands, Blocks, LocalMargins
from patchcert.train.strategies.votes import trained_scores, unions_of_two, weakest_margins
from patchcert.train.strategy import Batch, Subject, logit_margins

PARTS = ModelSpec("resnet18_parts", 1, 8, 8, 3, filters=2)
LOCAL = ModelSpec("bagnet", 1, 8, 8, 3, filters=4, depth=2, receptive_field=5)


def subject(spec, threat=None):
    return Subject(build(spec, seeded()), spec, threat or Patch(2))


def make_batch(rows=slice(None)):
    images = torch.rand(6, 1, 8, 8, generator=seeded(1))
    return Batch(images, torch.tensor([0, 1, 2, 0, 1, 2]), rows)


@pytest.mark.parametrize(
    "strategy", [Bands(width=3), Bands(width=2, orientation="both", wrap=False), Blocks(size=3)]
)
def test_each_image_is_trained_on_a_part_that_votes_see(strategy):
    bound, batch = subject(PARTS), make_batch()
    found = strategy.bind(bound).worst_case(batch, 1.0, seeded(3)).margins
    views = strategy.views(8, 8)
    drawn = torch.randint(len(views), (6,), generator=seeded(3))
    bound.model.load_state_dict(build(PARTS, seeded()).state_dict())
    logits = bound.model.train()(encode_visible(batch.images, views[drawn]))
    assert torch.allclose(found, logit_margins(logits, batch.labels), atol=1e-5)
    assert len(drawn.unique()) > 1


def test_a_batch_may_share_one_band():
    strategy = Bands(width=3, draw="batch")
    bound, batch = subject(PARTS), make_batch()
    found = strategy.bind(bound).worst_case(batch, 1.0, seeded(3)).margins
    view = strategy.views(8, 8)[torch.randint(8, (1,), generator=seeded(3))]
    bound.model.load_state_dict(build(PARTS, seeded()).state_dict())
    logits = bound.model.train()(encode_visible(batch.images, view))
    assert torch.allclose(found, logit_margins(logits, batch.labels), atol=1e-5)


def test_draws_do_not_depend_on_how_many_processes_share_a_batch(monkeypatch):
    shown = []
    monkeypatch.setattr(
        "patchcert.train.strategies.votes.encode_visible",
        lambda images, views: shown.append(views) or encode_visible(images, views),
    )
    objective = Bands(width=3).bind(subject(PARTS))
    for rows in (slice(None), slice(0, 2), slice(2, 6)):
        objective.worst_case(make_batch(rows), 1.0, seeded(3))
    assert torch.equal(shown[0], torch.cat(shown[1:]))


@pytest.mark.parametrize(
    ("strategy", "spec", "message"),
    [
        (Bands(width=8), PARTS, "width=8 in images of 8 columns"),
        (Blocks(size=9), PARTS, "size=9 in images of 8 rows"),
        (Bands(), ModelSpec("resnet18", 1, 8, 8, 3, filters=2), "'resnet18' does not take parts of images"),
        (
            LocalMargins(),
            ModelSpec("resnet18", 1, 8, 8, 3, filters=2),
            "'resnet18' has no local scores: .*everything",
        ),
        (
            LocalMargins(),
            ModelSpec("bagnet", 1, 8, 8, 3, filters=2, receptive_field=15),
            "has no local scores: a local score sees all of the 8x8 image",
        ),
    ],
)
def test_models_and_parts_that_do_not_fit_are_refused(strategy, spec, message):
    with pytest.raises(PatchcertError, match=message):
        strategy.bind(subject(spec))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Bands(width=0), "width is 0; expected at least 1"),
        (lambda: Blocks(size=0), "size is 0"),
        (lambda: LocalMargins(scale=0.0), "scale is 0.0; expected above 0"),
        (lambda: LocalMargins(alone=-0.5), "alone is -0.5; expected a weight of at least 0"),
        (lambda: LocalMargins(alone=float("inf")), "alone is inf"),
        (lambda: LocalMargins(scores="positive"), "without upper limit"),
    ],
)
def test_settings_out_of_range_are_refused(make, message):
    with pytest.raises(PatchcertError, match=message):
        make()


def weakest(margins, labels):
    return margins.amin(dim=1).scatter(1, labels[:, None], 0.0)


@pytest.mark.parametrize("patch", [Patch(2), Patch((1, 3))])
@pytest.mark.parametrize("scores", ["one-hot", "heaviside", "softmax"])
def test_sums_are_trained_on_the_certified_margins_at_the_weakest_placement(patch, scores):
    strategy, bound, batch = LocalMargins(scores=scores), subject(LOCAL, patch), make_batch()
    windows = strategy.windows(bound, patch)
    values = trained_scores(bound.model(batch.images), strategy.scores).detach()
    found = weakest_margins(strategy, values, batch.labels, windows)
    touched = LocalVotes(bound.model).touched(patch, batch.images)
    certified = sum_margins(Scores(values, values, values, 1), batch.labels, touched)
    assert torch.allclose(found, weakest(certified, batch.labels), atol=1e-5)


@given(st.integers(0, 999))
def test_masked_sums_are_trained_on_no_more_than_the_certified_margins(seed):
    strategy, windows = (
        LocalMargins(aggregation="masked-sum", scores="positive"),
        torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]),
    )
    values = torch.randint(0, 9, (5, 3, 4), generator=seeded(seed)).double()
    labels = torch.randint(0, 3, (5,), generator=seeded(seed))
    found = weakest_margins(strategy, values, labels, windows.bool())
    certified = masked_margins(Scores(values, values, values, 10**6), labels, windows.bool(), windows.bool())
    assert (found <= weakest(certified, labels)).all()


def test_double_masking_is_trained_on_the_certified_margins_at_the_weakest_pair():
    strategy = LocalMargins(aggregation="double-masked", scores="logits")
    bound, batch = subject(LOCAL), make_batch()
    windows = strategy.windows(bound, bound.threat)
    values = trained_scores(bound.model(batch.images), strategy.scores).detach()
    found = weakest_margins(strategy, values, batch.labels, unions_of_two(windows))
    scores = Scores(values, values, values, 10**6)
    behind_each = doubly_masked_margins(scores, batch.labels, windows, windows, "lowest")
    assert torch.allclose(found, weakest(behind_each, batch.labels), atol=1e-5)


@pytest.mark.parametrize("aggregation", ["sum", "masked-sum", "double-masked"])
def test_epsilon_leads_from_clean_margins_to_those_of_the_weakest_placement(aggregation):
    strategy, bound, batch = LocalMargins(aggregation=aggregation), subject(LOCAL), make_batch()
    windows = strategy.windows(bound, bound.threat)
    scores = trained_scores(bound.model(batch.images), strategy.scores).detach()
    found = [weakest_margins(strategy, scores, batch.labels, windows, share) for share in (0.0, 0.5, 1.0)]
    totals = masked_totals(scores, windows) if aggregation == "masked-sum" else sum_totals(scores)
    assert torch.allclose(found[0], logit_margins(totals, batch.labels), atol=1e-5)
    if aggregation != "double-masked":  # where leads are negative, fewer cells are fewer of those
        assert (found[0] >= found[1]).all()
        assert (found[1] >= found[2]).all()
    assert torch.equal(found[2], weakest_margins(strategy, scores, batch.labels, windows))
    held = weakest_margins(strategy, scores, batch.labels, windows, torch.tensor(0.5))
    assert torch.allclose(held, found[1])


@pytest.mark.parametrize(
    ("aggregation", "scores"),
    [
        *itertools.product(("sum", "masked-sum"), ("one-hot", "heaviside", "clipped", "softmax")),
        ("double-masked", "softmax"),
        ("double-masked", "logits"),
    ],
)
def test_margins_have_a_gradient_and_scores_are_those_that_are_deployed(aggregation, scores):
    strategy, bound, batch = (
        LocalMargins(aggregation=aggregation, scores=scores),
        subject(LOCAL),
        make_batch(),
    )
    objective = strategy.bind(bound)
    objective.worst_case(batch, 1.0, seeded()).margins.sum().backward()
    assert sum(float(each.grad.abs().sum()) for each in bound.model.parameters() if each.grad is not None) > 0
    votes = LocalVotes(bound.model.eval(), aggregation, scores, None if aggregation == "sum" else 2)
    deployed = votes.local_scores(batch.images)
    trained = trained_scores(bound.model(batch.images), strategy.scores).detach()
    unit = UNITS if scores == "logits" else deployed.most
    assert torch.allclose(trained.double(), deployed.values / unit, atol=1e-4)


@pytest.mark.parametrize("aggregation", ["sum", "masked-sum", "double-masked"])
def test_clean_logits_are_those_of_the_classifier(aggregation):
    strategy, bound, batch = LocalMargins(aggregation=aggregation, scale=3.0), subject(LOCAL), make_batch()
    network = strategy.bind(bound).network
    bound.model.eval()
    votes = LocalVotes(bound.model, aggregation, masked=None if aggregation == "sum" else 2)
    totals = votes.totals(votes.local_scores(batch.images).values, batch.images)
    assert torch.allclose(network.values(batch.images)[-1].double(), totals * 3.0 / 64, atol=1e-5)


def test_what_a_run_has_learnt_is_how_it_is_certified():
    threat = Patch((2, 3))
    assert Bands(width=3).learned_method(threat) == (
        "bands",
        {"width": 3, "orientation": "column", "wrap": True},
    )
    assert Blocks(size=5).learned_method(threat) == ("blocks", {"size": 5, "wrap": True})
    assert LocalMargins(aggregation="masked-sum", scores="positive").learned_method(threat) == (
        "local-votes",
        {"aggregation": "masked-sum", "scores": "positive", "masked": (2, 3)},
    )


SMALL = (
    "data.name=mnist-mini",
    "data.limit=16",
    "optimiser.batch_size=16",
    "schedule.epochs=1",
    "strategy.bfloat16=false",
    "schedule.epsilon.natural_epochs=0",
    "schedule.epsilon.ramp_epochs=0",
)


@pytest.mark.parametrize(
    ("preset", "changes", "name"),
    [
        ("bands-mnist", ("model.filters=2",), "BandVotes"),
        ("strips-cifar10-2x2", ("model.filters=2", "data.flip=false"), "LocalVotes"),
        ("strips-mnist-5x5", ("model.filters=4",), "LocalVotes"),
        (
            "strips-mnist-5x5",
            ("model.filters=4", "strategy.aggregation=masked-sum", "strategy.scores=positive"),
            "LocalVotes",
        ),
        (
            "strips-mnist-5x5",
            ("model.filters=4", "strategy.aggregation=double-masked", "strategy.scores=logits"),
            "LocalVotes",
        ),
        (
            "strips-mnist-5x5",
            ("model.filters=4", "strategy.scores=one-hot", "threat.stamp=2x2"),
            "LocalVotes",
        ),
    ],
)
def test_a_run_is_trained_certified_and_attacked_by_its_votes(preset, changes, name, tmp_path, capsys):
    folder = str(tmp_path / "run")
    settings = [part for change in (*SMALL, *changes) for part in ("--set", change)]
    assert run(["train", preset, "--out", folder, *settings]) == 0
    capsys.readouterr()
    assert run(["certify", folder, "--limit", "2", "--setting", "batch_size=8"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["classifier"]["name"] == name
    assert summary["guarantee"]["confidence"] == 1.0
    method = "bands" if name == "BandVotes" else "local-votes"
    attack = [
        "attack",
        folder,
        "--images",
        "1",
        "--steps",
        "1",
        "--restarts",
        "1",
        "--setting",
        "batch_size=8",
    ]
    for by_name in (
        ["--method", method],
        [],
    ):  # by default it is the kind of proof that the run was trained for
        assert run([*attack, *by_name]) == 0
        assert json.loads(capsys.readouterr().out)["classifier"] == summary["classifier"]


@pytest.mark.parametrize(
    ("name", "kind", "height"),
    [
        ("bands-cifar10", "bands", 5),
        ("bands-mnist", "bands", 5),
        ("local-cifar10-5x5", "local-votes", 5),
        ("strips-cifar10-5x5", "local-votes", 5),
        ("strips-cifar10-2x2", "local-votes", 2),
    ],
)
def test_presets_are_specifications(name, kind, height):
    spec = read_spec(name)
    assert (spec.strategy.kind, spec.threat.height) == (kind, height)


@pytest.mark.parametrize("epsilon", [0.0, 0.25, torch.tensor(0.25), 1.0])
def test_single_cells_learn_alone_while_epsilon_grows(epsilon):
    bound, batch = subject(LOCAL), make_batch(slice(0, 4))
    objective = LocalMargins(alone=2.0).bind(bound)
    bound.model.eval()
    added = objective.worst_case(batch, epsilon, seeded()).further_loss
    if epsilon == 1:
        assert added is None
        return
    cells = bound.model(batch.own_images).permute(0, 2, 3, 1).reshape(4 * 64, 3)
    each = torch.nn.functional.cross_entropy(cells, batch.own_labels.repeat_interleave(64), reduction="none")
    # This process has four of six images: its part of the mean over all of them.
    assert torch.allclose(added, 2.0 * (1 - torch.as_tensor(epsilon)) * each.sum() / 64 / 6, atol=1e-5)


def test_cells_that_do_not_learn_alone_add_nothing():
    objective = LocalMargins().bind(subject(LOCAL))
    assert objective.worst_case(make_batch(), torch.tensor(0.5), seeded()).further_loss is None
