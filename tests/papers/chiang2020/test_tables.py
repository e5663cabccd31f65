"""The paper's numbers, and what each row of its tables asks to be trained."""

from statistics import fmean

import pytest

from patchcert.errors import InvalidInput
from patchcert.papers.chiang2020.rows import recipe, strategy_changes
from patchcert.papers.chiang2020.tables import AVERAGED, Entry, find_table, paper_tables, table_names
from patchcert.threats import Patch, SparsePixels

ROWS = {
    "training-strategies": 22,
    "strategy-detail-2x2": 30,
    "strategy-detail-5x5": 30,
    "large-models": 16,
    "bound-pooling": 30,
    "sparse-detail": 14,
    "sparse-vs-ablation": 12,
    "shape-transfer": 28,
    "compare-defenses": 18,
    "break-imagenet": 12,
}


def specs(table):
    recipes = [recipe(entry) for entry in find_table(table).entries]
    return [spec for made in recipes if made is not None for spec in made.specs]


def find(table, text):
    (entry,) = find_table(table).chosen([text])
    return entry


def test_every_table_has_all_its_rows():
    assert {table.name: len(table.entries) for table in paper_tables()} == ROWS
    assert set(table_names()) == set(ROWS) | {"ours"}


@pytest.mark.parametrize("patch", ["2x2", "5x5"])
def test_the_papers_means_are_those_of_its_single_models(patch):
    detail = find_table(f"strategy-detail-{patch}").entries
    means = [row for row in find_table("training-strategies").entries if row.model == "average"]
    for row in (row for row in means if row.patch == patch):
        same = [each for each in detail if (each.dataset, each.strategy) == (row.dataset, row.strategy)]
        assert sorted(each.model for each in same) == sorted(AVERAGED)
        for name in ("clean", "certified"):
            mean = fmean(getattr(each, name) for each in same)
            assert getattr(row, name) == pytest.approx(mean, abs=0.06), row.label


@pytest.mark.parametrize("table", ["bound-pooling", "large-models"])
def test_rows_that_tables_share_have_the_same_numbers(table):
    detail = {
        (row.dataset, row.patch, row.strategy, row.model): row
        for patch in ("2x2", "5x5")
        for row in find_table(f"strategy-detail-{patch}").entries
    }
    shared = [
        (row, detail[key])
        for row in find_table(table).entries
        if (key := (row.dataset, row.patch, row.strategy, row.model)) in detail
    ]
    assert shared
    for row, same in shared:
        assert row.certified == pytest.approx(same.certified, abs=0.051)
        assert row.clean == pytest.approx(same.clean, abs=0.061)


def test_all_tables_together_need_the_paper_s_number_of_runs():
    assert (
        len({spec.fingerprint() for table in ROWS for spec in specs(table)})
        == 60 + 8 + 2 + 10 + 14 + 2 + 6 + 2
    )


def test_a_row_becomes_the_run_that_it_describes():
    made = recipe(find("strategy-detail-5x5", "cifar guided(10) cnn2"))
    assert made is not None
    (spec,) = made.specs
    assert (spec.data.name, spec.data.flip, spec.model.name) == ("cifar10", True, "cnn2")
    assert (spec.strategy.kind, spec.strategy.per_class) == ("guided", 1)
    assert (spec.schedule.epochs, spec.schedule.epsilon.ramp_epochs, spec.seed) == (200, 120, 2019)
    assert spec.select == "last"
    assert spec.threat == Patch(5)
    assert made.threats == (Patch(5),)


def test_a_mean_is_of_three_runs():
    made = recipe(find("training-strategies", "mnist 2x2 random(5)"))
    assert made is not None
    assert tuple(spec.model.name for spec in made.specs) == AVERAGED
    assert {spec.strategy.placements for spec in made.specs} == {5}


@pytest.mark.parametrize(("model", "epochs"), [("mlp", 10), ("cnn4", 60)])
def test_sparse_networks_with_convolutions_ramp_epsilon_slowly_on_mnist(model, epochs):
    made = recipe(find("sparse-detail", f"mnist 4 pixels {model}"))
    assert [spec.schedule.epsilon.ramp_epochs for spec in made.specs] == [epochs]


@pytest.mark.parametrize(
    ("row", "natural"),
    [("5x5 random(20) cnn5w", 1), ("2x2 all cnn5w", 1), ("2x2 random(20) cnn5w", 10), ("5x5 all cnn4", 10)],
)
def test_the_wide_network_sees_plain_images_for_one_epoch_where_more_would_shut_it(row, natural):
    made = recipe(find("large-models", row))
    assert made is not None
    (spec,) = made.specs
    assert (spec.schedule.epsilon.natural_epochs, spec.schedule.decay_from) == (natural, 131)
    assert spec.schedule.scaled(0.5).epsilon.natural_epochs == max(1, natural // 2)


def test_ten_sparse_pixels_on_mnist_have_the_authors_width():
    made = recipe(find("sparse-detail", "mnist 10 pixels"))
    assert made is not None
    assert made.specs[0].model.hidden == 512
    assert made.threats == (SparsePixels(10, "tight"),)


def test_transfer_rows_share_one_run_and_try_every_variant():
    entries = find_table("shape-transfer").chosen(["mnist 5x5"])
    recipes = {entry.shape: recipe(entry) for entry in entries}
    assert len({made.specs[0].fingerprint() for made in recipes.values() if made}) == 1
    counts = {shape: len(made.threats) for shape, made in recipes.items() if made}
    assert counts == {"square": 1, "rectangle": 6, "line": 2, "diamond": 1, "parallelogram": 4}


def test_imagenet_is_not_trained_here():
    assert all(recipe(entry) is None for entry in find_table("break-imagenet").entries)


@pytest.mark.parametrize(("data", "retained", "images"), [("mnist", 45, None), ("cifar", 75, 1000)])
def test_votes_for_all_numbers_of_pixels_are_counted_once(data, retained, images):
    made = [recipe(entry) for entry in find_table("sparse-vs-ablation").chosen([f"{data} ablation"])]
    assert [each.pixels for each in made] == [1, 4, 10]
    ((spec,),) = {each.specs for each in made}
    (plan,) = {each.votes for each in made}
    assert (plan.selection, plan.estimation, plan.error_rate, plan.images) == (1000, 10_000, 0.05, images)
    assert spec.strategy.retained == retained
    schedule, optimiser = spec.schedule, spec.optimiser
    rates = [schedule.rate(epoch) for epoch in (0, 199, 200, 399)]
    assert rates == pytest.approx([0.01, 0.01, 0.001, 0.001])
    assert (schedule.epochs, optimiser.batch_size, optimiser.momentum) == (400, 128, 0.9)


def test_undefended_and_preprocessed_rows_share_models_that_have_seen_no_patch():
    made = [recipe(entry) for entry in find_table("compare-defenses").chosen(["cifar none", "cifar dw"])]
    assert len({each.specs for each in made if each}) == 1
    (spec, *_) = made[0].specs
    assert (spec.strategy.kind, spec.data.validation) == ("natural", 5000)
    plans = [each.attack for each in made if each]
    assert [(plan.patch, plan.defense, plan.adaptive, plan.largest_drop) for plan in plans] == [
        ("2x2", "", False, 0.02),
        ("2x2", "dw", False, 0.02),
        ("2x2", "dw", True, 0.02),
        ("5x5", "", False, 0.02),
        ("5x5", "dw", False, 0.16),
        ("5x5", "dw", True, 0.16),
    ]
    assert {(plan.images, plan.restarts, plan.steps) for plan in plans} == {(400, 80, 150)}


def test_certified_rows_of_the_comparison_are_those_of_all_patch_training():
    made = recipe(find("compare-defenses", "mnist 5x5 ibp"))
    detail = find_table("strategy-detail-5x5").chosen(["mnist all"])
    assert made is not None
    assert set(made.specs) == {spec for entry in detail for spec in recipe(entry).specs}
    assert made.threats == (Patch(5),)


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("All Patch", ["strategy.kind=all"]),
        ("Random(20)", ["strategy.kind=random", "strategy.placements=20"]),
        ("Guided(20)", ["strategy.kind=guided", "strategy.per_class=2"]),
        ("Pool 4", ["strategy.kind=pooled", "strategy.blocks=[4]"]),
        ("Pool 2-2", ["strategy.kind=pooled", "strategy.blocks=[2, 2]"]),
    ],
)
def test_strategies_by_name(words, changes):
    assert strategy_changes(words) == changes


def test_an_unknown_strategy_is_named():
    with pytest.raises(InvalidInput, match=r"unknown strategy 'Some\(3\)'"):
        strategy_changes("Some(3)")


def test_rows_on_request_are_left_out_unless_asked_for():
    table = find_table("large-models")
    assert len(table.chosen([])) == 14
    assert len(table.chosen(["all cnn5w"])) == 2


def test_rows_are_found_by_all_words_of_any_text():
    table = find_table("strategy-detail-5x5")
    assert len(table.chosen(["MNIST"])) == 15
    assert [entry.model for entry in table.chosen(["mnist all mlp", "cifar random(1) cnn4"])] == [
        "mlp",
        "cnn4",
    ]


def test_words_between_quotes_belong_together():
    table = find_table("bound-pooling")
    assert {entry.strategy for entry in table.chosen(['5x5 "Pool 2 cnn4"'])} == {"Pool 2"}
    assert {entry.strategy for entry in table.chosen(["5x5 pool 2 cnn4"])} == {"Pool 2", "Pool 2-2"}


def test_words_without_rows_get_an_example():
    with pytest.raises(InvalidInput, match="no row of large-models has the words 'svhn'") as caught:
        find_table("large-models").chosen(["svhn"])
    assert "CIFAR-10 2x2 All Patch mlp" in caught.value.hint


def test_an_unknown_table_gets_the_nearest():
    with pytest.raises(InvalidInput, match="no table named 'large-model'") as caught:
        find_table("large-model")
    assert caught.value.hint == "did you mean large-models?"


def test_our_settings_stand_beside_the_papers_best():
    for entry in find_table("ours").entries:
        assert entry.preset.startswith("ours-")
        made = recipe(entry)
        assert made is not None
        assert made.specs[0].data.name == entry.dataset
    best = {(e.dataset, e.patch): e.certified for e in find_table("ours").entries}
    assert best.get(("mnist", "5x5"), 61.97) == 61.97


def test_labels_tell_rows_apart():
    for table in paper_tables():
        labels = [entry.label for entry in table.entries]
        assert len(set(labels)) == len(labels), table.name
    assert Entry("mnist", "mlp", "All Patch", "5x5").label == "MNIST 5x5 All Patch mlp"
