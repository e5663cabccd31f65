"""What each row of the paper's tables asks to be trained and measured."""

import json
from fractions import Fraction
from pathlib import Path

import pytest

from patchcert.errors import InvalidInput
from patchcert.evidence.results import Results
from patchcert.papers.chiang2020.recipes import TUNED, Scale, parse_scale, recipe, strategy_changes
from patchcert.papers.chiang2020.tables import AVERAGED, find_table, paper_tables
from patchcert.threats import Patch, SparsePixels

RESULTS = Path(__file__).parents[3] / "results"
TABLES = tuple(table.name for table in paper_tables())


def find(table, text):
    (entry,) = find_table(table).chosen([text])
    return entry


def threats(made):
    return tuple(question.threat for question in made.proofs)


def specs(table):
    recipes = [recipe(entry) for entry in find_table(table).entries]
    return [spec for made in recipes for spec in made.specs]


def test_all_tables_together_need_the_paper_s_number_of_runs():
    assert (
        len({spec.fingerprint() for table in TABLES for spec in specs(table)})
        == 60 + 8 + 2 + 10 + 14 + 2 + 6 + 2
    )


def test_a_row_becomes_the_run_that_it_describes():
    made = recipe(find("strategy-detail-5x5", "cifar guided(10) cnn2"))
    (spec,) = made.specs
    assert (spec.data.name, spec.data.flip, spec.model.name) == ("cifar10", True, "cnn2")
    assert (spec.strategy.kind, spec.strategy.per_class) == ("guided", 1)
    assert (spec.schedule.epochs, spec.schedule.epsilon.ramp_epochs, spec.seed) == (200, 120, 2019)
    assert spec.select == "last"
    assert spec.threat == Patch(5)
    assert threats(made) == (Patch(5),)


def test_a_mean_is_of_three_runs():
    made = recipe(find("training-strategies", "mnist 2x2 random(5)"))
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
    (spec,) = made.specs
    assert (spec.schedule.epsilon.natural_epochs, spec.schedule.decay_from) == (natural, 131)
    assert spec.schedule.scaled(0.5).epsilon.natural_epochs == max(1, natural // 2)


def test_ten_sparse_pixels_on_mnist_have_the_authors_width():
    made = recipe(find("sparse-detail", "mnist 10 pixels"))
    assert made.specs[0].model.hidden == 512
    assert threats(made) == (SparsePixels(10, "tight"),)


def test_transfer_rows_share_one_run_and_try_every_variant():
    entries = find_table("shape-transfer").chosen(["mnist 5x5"])
    recipes = {entry.shape: recipe(entry) for entry in entries}
    assert len({made.specs[0].fingerprint() for made in recipes.values()}) == 1
    counts = {shape: len(threats(made)) for shape, made in recipes.items()}
    assert counts == {"square": 1, "rectangle": 6, "line": 2, "diamond": 1, "parallelogram": 4}


def test_threats_of_training_get_margins_and_others_verdicts_alone():
    entries = find_table("shape-transfer").chosen(["mnist 5x5 square", "mnist 5x5 line"])
    asked = {question.threat: question.classifier for entry in entries for question in recipe(entry).proofs}
    assert [threat for threat, how in asked.items() if not how.get("verdicts_only")] == [Patch(5)]
    assert len(asked) == 3


def test_imagenet_is_not_trained_here():
    made = [recipe(entry) for entry in find_table("break-imagenet").entries]
    assert {(each.specs, each.network) for each in made} == {((), "resnet50")}
    assert len({each.attack for each in made}) == 12
    first = made[0].attack
    assert first.threat == Patch(42, placements="corners")
    assert (first.selection.drawn, first.attack["kind"]) == (400, "CornerAttack")
    inner = first.attack["attack"]
    assert (inner["steps"], inner["step_size"], inner["restarts"], inner["early_stop"]) == (
        150,
        0.05,
        4,
        True,
    )


@pytest.mark.parametrize(("data", "retained", "images"), [("mnist", 45, None), ("cifar", 75, 1000)])
def test_votes_for_all_numbers_of_pixels_are_counted_once(data, retained, images):
    made = [recipe(entry) for entry in find_table("sparse-vs-ablation").chosen([f"{data} ablation"])]
    assert [each.against for each in made] == [SparsePixels(1), SparsePixels(4), SparsePixels(10)]
    ((spec,),) = {each.specs for each in made}
    ((asked,),) = {each.proofs for each in made}
    votes = asked.classifier
    assert (votes["selection_samples"], votes["estimation_samples"], votes["error_rate"]) == (
        1000,
        10_000,
        0.05,
    )
    assert (asked.selection.drawn, votes["retained"], spec.strategy.retained) == (images, retained, retained)
    schedule, optimiser = spec.schedule, spec.optimiser
    rates = [schedule.rate(epoch) for epoch in (0, 199, 200, 399)]
    assert rates == pytest.approx([0.01, 0.01, 0.001, 0.001])
    assert (schedule.epochs, optimiser.batch_size, optimiser.momentum) == (400, 128, 0.9)
    scaled = spec.scaled(0.1).schedule
    assert (scaled.epochs, scaled.rate(19), scaled.rate(20)) == (40, 0.01, 0.001)


def test_undefended_and_preprocessed_rows_share_models_that_have_seen_no_patch():
    made = [recipe(entry) for entry in find_table("compare-defenses").chosen(["cifar none", "cifar dw"])]
    assert len({each.specs for each in made}) == 1
    (spec, *_) = made[0].specs
    assert (spec.strategy.kind, spec.data.validation) == ("natural", 5000)
    asked = [each.attack for each in made]
    assert [(str(each.threat)[6:9], each.classifier["name"], each.attack["kind"]) for each in asked] == [
        ("2x2", "Model", "PatchAttack"),
        ("2x2", "Defended", "TransferAttack"),
        ("2x2", "Defended", "AdaptiveAfterTransfer"),
        ("5x5", "Model", "PatchAttack"),
        ("5x5", "Defended", "TransferAttack"),
        ("5x5", "Defended", "AdaptiveAfterTransfer"),
    ]
    assert {each.selection.drawn for each in asked} == {400}


def test_every_placement_is_tried_before_the_papers_restarts_go_to_the_most_promising():
    attack = recipe(find("compare-defenses", "mnist 2x2 none")).attack.attack
    assert (attack["search"], attack["sweep_steps"], attack["restarts"], attack["steps"]) == (
        "sweep",
        5,
        80,
        150,
    )
    assert (attack["loss"], attack["step_size"], attack["sweep_vertices"]) == ("cross-entropy", 0.05, 0)


def test_only_the_adaptive_part_of_an_attack_tries_vertices_and_follows_both_losses():
    described = recipe(find("compare-defenses", "mnist 2x2 lgs adaptive")).attack.attack
    plain = recipe(find("compare-defenses", "mnist 2x2 lgs plain")).attack.attack
    assert described["first"] == plain["attack"]
    aware = described["attack"]["attacks"]
    assert [(each["loss"], each["sweep_vertices"]) for each in aware] == [
        ("cross-entropy", 16),
        ("margin", 0),
    ]


def tried(key, model):
    """The trials of a defense's settings on one model of a row."""
    data, patch, defense = key
    entry = find("compare-defenses", f"{data.removesuffix('10')} {patch} {defense} plain")
    (spec,) = (spec for spec in recipe(entry).specs if spec.model.name == model)
    (result,) = (each for each in Results(RESULTS).of(spec) if each.spec.seed == spec.seed)
    return json.loads((result.path / f"tuning-{patch}-{defense.lower()}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("key", TUNED, ids=" ".join)
def test_the_setting_of_a_defense_is_what_its_trials_give(key):
    """Decision 5: of those whose mean clean accuracy drops little, the one with the largest mean weak accuracy."""
    trials = [tried(key, model) for model in AVERAGED]
    means = {}
    for setting, *_ in trials[0]["rows"]:
        counts = [row[1:] for each in trials for row in each["rows"] if row[0] == setting]
        if len(counts) == len(trials):
            means[setting] = tuple(Fraction(sum(column), 3 * 2000) for column in zip(*counts, strict=True))
    undefended = Fraction(sum(each["undefended_correct"] for each in trials), 3 * 2000)
    floor = undefended - Fraction("0.02" if key[1] == "2x2" else "0.16")
    allowed = [setting for setting, (clean, _) in means.items() if clean >= floor]
    assert max(allowed, key=lambda setting: means[setting][::-1]) == TUNED[key]


def test_every_row_of_a_defense_has_a_setting():
    rows = find_table("compare-defenses").entries
    assert {(row.dataset, row.patch, row.defense) for row in rows if row.defense in ("LGS", "DW")} == set(
        TUNED
    )


def test_certified_rows_of_the_comparison_are_those_of_all_patch_training():
    made = recipe(find("compare-defenses", "mnist 5x5 ibp"))
    detail = find_table("strategy-detail-5x5").chosen(["mnist all"])
    assert set(made.specs) == {spec for entry in detail for spec in recipe(entry).specs}
    assert threats(made) == (Patch(5),)


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


def test_our_settings_stand_beside_the_papers_best():
    for entry in find_table("ours").entries:
        assert entry.preset.startswith("ours-")
        assert recipe(entry).specs[0].data.name == entry.dataset
    best = {(e.dataset, e.patch): e.certified for e in find_table("ours").entries}
    assert best.get(("mnist", "5x5"), 61.97) == 61.97


def test_scales_by_name():
    assert parse_scale("paper") == Scale()
    assert parse_scale("0.1") == Scale(0.1)
    assert parse_scale("quick").quick
    assert (Scale().words, Scale(0.1).words) == ("full schedule", "schedule scaled by 0.1")


@pytest.mark.parametrize("text", ["fast", "0", "-1", "nan", "inf"])
def test_an_unknown_scale_is_refused(text):
    with pytest.raises(InvalidInput, match=f"--scale {text} is neither"):
        parse_scale(text)


def test_all_questions_of_the_tables_have_names_of_their_own():
    entries = [entry for table in TABLES for entry in find_table(table).entries]
    asked = {question for entry in entries for question in recipe(entry).questions}
    assert len({question.name for question in asked}) == len(asked)
