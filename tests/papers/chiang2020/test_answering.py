"""Planned attacks: settings chosen on held-out images only, and the adaptive attack goes on from the weak one."""

from dataclasses import replace

import pytest
import torch
from patchcert.papers.chiang2020.attack_plan import AttackPlan
from patchcert.papers.chiang2020.attacking import attack_run, planned_attack
from patchcert.papers.chiang2020.candidates import candidates, describe
from patchcert.papers.chiang2020.scales import QUICK_DATA, QUICK_HELD_OUT, QUICK_SCHEDULE
from patchcert.papers.chiang2020.siblings import Archive
from patchcert.papers.chiang2020.tuning import try_settings

from patchcert.attacks import PatchAttack, smoothing_grid
from patchcert.data import load_dataset
from patchcert.errors import InvalidInput, RunError
from patchcert.papers.chiang2020 import tuning
from patchcert.train.spec import DataSettings, ModelSettings, RunSettings, read_spec
from patchcert.train.training import Workplace, train_run

CPU = torch.device("cpu")
PLAN = AttackPlan("3x3", images=40, restarts=3, steps=30, tuned_on=40, largest_drop=0.1, settings=6)


@pytest.fixture(scope="module")
def dataset():
    return load_dataset(QUICK_DATA, None)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    spec = replace(
        read_spec("paper-mnist", ["strategy.kind=natural"]),
        data=DataSettings(QUICK_DATA, limit=800, validation=QUICK_HELD_OUT),
        model=ModelSettings("cnn2", hidden=32),
        schedule=QUICK_SCHEDULE,
        run=RunSettings(check_every=0),
    )
    return train_run(spec, tmp_path_factory.mktemp("run") / "natural", Workplace(CPU, None))


def defended(kind, adaptive=False, **changes):
    return replace(PLAN, defense=kind, adaptive=adaptive, **changes)


def test_an_undefended_model_is_attacked_on_drawn_test_images(run, dataset):
    accuracy = attack_run(run, dataset, PLAN, CPU)
    rows, meta = run.evidence(PLAN.name), run.evidence_meta(PLAN.name)
    right = rows["label"] == rows["prediction"]
    assert right.mean() > 0.7
    assert accuracy == pytest.approx(1 - rows["succeeded"].mean())
    assert accuracy < right.mean() - 0.2
    assert len(set(rows["index"].tolist())) == 40
    assert (rows["label"] == dataset.test.labels[rows["index"]].numpy()).all()
    assert meta["defense"] is None


def chosen(run, dataset, plan):
    """The setting by this run's own trials, which are made where they are missing."""
    archive = Archive(run.path.parent)
    if archive.trials(run.path.name, plan.tuning) is None:
        try_settings(run, dataset, plan.tuning, CPU)
    return archive.choice([run.path.name], plan)


@pytest.mark.parametrize("kind", ["lgs", "dw"])
def test_no_image_that_the_weak_attack_broke_withstands_the_adaptive_one(run, dataset, kind):
    plain, adaptive = defended(kind), defended(kind, adaptive=True, sweep_vertices=1)
    for plan in (plain, adaptive):
        attack_run(run, dataset, plan, CPU, chosen(run, dataset, plan))
    weak, strong = run.evidence(plain.name), run.evidence(adaptive.name)
    assert (weak["prediction"] == strong["prediction"]).all()
    assert not (weak["succeeded"] & ~strong["succeeded"]).any()
    assert (strong["succeeded"] | (strong["prediction"] == strong["label"])).all()
    assert strong["succeeded"].sum() > weak["succeeded"].sum()
    for key in ("defense", "tuning"):
        assert run.evidence_meta(plain.name)[key] == run.evidence_meta(adaptive.name)[key]


def test_trials_have_a_row_for_every_setting(run, dataset):
    plan = defended("lgs").tuning
    assert try_settings(run, dataset, plan, CPU) == 6
    trials = Archive(run.path.parent).trials(run.path.name, plan)
    assert trials is not None
    assert trials.settings == tuple(
        f"LocalGradientSmoothing({defense.extra_repr()})"
        for defense, _ in zip(smoothing_grid(), range(6), strict=False)
    )
    assert trials.total == 40
    assert trials.meta["kind"] == "tune"
    assert trials.meta["data"]["split"] == "validation"
    held_out = dataset.train[len(dataset.train) - 40 :]
    model, last = run.model(), list(candidates(plan, run.model(), dataset, CPU))[-1]
    for images, count in (
        (held_out.floats(), trials.undefended * 40),
        (last(held_out.floats()), trials.columns["clean"][-1]),
    ):
        assert int((model(images).argmax(1) == held_out.labels).sum()) == count
    assert trials.columns["weak"].max() < trials.undefended * 40


def test_settings_are_tried_on_held_out_training_images_alone(run, dataset, monkeypatch):
    seen = {}
    honest = tuning.tune_defense

    def watched(attack, model, images, labels, *others, **options):
        seen.update(images=images, labels=labels)
        return honest(attack, model, images, labels, *others, **options)

    monkeypatch.setattr(tuning, "tune_defense", watched)
    try_settings(run, dataset, defended("lgs", tuned_on=30).tuning, CPU)
    held_out = dataset.train[len(dataset.train) - 30 :]
    assert torch.equal(seen["labels"], held_out.labels)
    assert torch.equal(seen["images"], held_out.floats())
    with pytest.raises(InvalidInput, match="chosen on 60 images, but 50 were held out"):
        try_settings(run, dataset, defended("lgs", tuned_on=60).tuning, CPU)


def test_where_every_setting_costs_too_much_evidence_says_so(run, dataset):
    plan = defended("dw", largest_drop=-1.0)
    attack_run(run, dataset, plan, CPU, chosen(run, dataset, plan))
    found = run.evidence_meta(plan.name)["tuning"]
    assert found["is_within_drop"] is False
    assert found["clean_accuracy"] <= found["undefended_accuracy"] + 1.0


def test_a_defense_is_attacked_only_with_a_setting_that_was_chosen_and_still_exists(run, dataset):
    plan = defended("lgs")
    with pytest.raises(InvalidInput, match="needs a setting of the defense"):
        attack_run(run, dataset, plan, CPU)
    gone = replace(chosen(run, dataset, plan), setting="LocalGradientSmoothing(window=1)")
    with pytest.raises(RunError, match="is none of those that lgs is tried with now"):
        attack_run(run, dataset, plan, CPU, gone)


def test_a_model_without_relu_modules_is_not_tried_with_guided_saliency(dataset):
    plan = replace(PLAN, defense="dw", settings=None).tuning
    whole, part = (
        {describe(defense) for defense in candidates(plan, model, dataset, CPU)}
        for model in (torch.nn.ReLU(), torch.nn.Tanh())
    )
    assert part == {setting for setting in whole if "'guided'" not in setting}
    assert len(whole) == 144


def test_only_the_adaptive_part_of_an_attack_tries_vertices(run, dataset, monkeypatch):
    tried = []
    honest = PatchAttack.propose

    def watched(attack, model, task):
        tried.append(attack.sweep_vertices)
        return honest(attack, model, task)

    monkeypatch.setattr(PatchAttack, "propose", watched)
    plan = defended("lgs", adaptive=True, images=8, sweep_vertices=2)
    choice = chosen(run, dataset, plan)
    tried.clear()
    attack_run(run, dataset, plan, CPU, choice)
    assert tried[0] == 0
    assert set(tried[1:]) == {2}


def test_an_attack_by_both_losses_follows_the_margin_after_the_cross_entropy(run, dataset, monkeypatch):
    followed = []
    honest = PatchAttack.propose

    def watched(attack, model, task):
        followed.append((attack.loss, attack.sweep_vertices))
        return honest(attack, model, task)

    monkeypatch.setattr(PatchAttack, "propose", watched)
    one, both = (
        defended("lgs", adaptive=True, images=20, steps=2, restarts=1, sweep_vertices=1, both_losses=both)
        for both in (False, True)
    )
    attack_run(run, dataset, one, CPU, chosen(run, dataset, one))
    followed.clear()
    attack_run(run, dataset, both, CPU, chosen(run, dataset, both))
    assert followed[:3] == [("cross-entropy", 0), ("cross-entropy", 1), ("margin", 0)]
    assert one.name != both.name
    assert run.evidence(both.name)["succeeded"].sum() >= run.evidence(one.name)["succeeded"].sum()
    assert AttackPlan.from_dict(both.to_dict()) == both


def test_the_planned_attack_tries_every_placement_before_the_papers_restarts():
    attack = planned_attack(AttackPlan("2x2"), CPU)
    assert (attack.search, attack.sweep_steps, attack.restarts, attack.steps) == ("sweep", 5, 80, 150)
    assert (attack.loss, attack.step_size) == ("cross-entropy", 0.05)
    assert attack.sweep_vertices == 0
    assert planned_attack(AttackPlan("2x2", search="random"), CPU).search == "random"
    assert (
        planned_attack(AttackPlan("2x2", "lgs", adaptive=True, sweep_vertices=16), CPU).sweep_vertices == 16
    )


def test_names_of_plans_without_vertices_are_those_that_evidence_has():
    assert AttackPlan("2x2").name == "attack-2x2-plain-f06ba7b3"
    assert AttackPlan("2x2", "lgs", adaptive=True).name == "attack-2x2-lgs-adaptive-776e5b23"
    tougher = AttackPlan("2x2", "lgs", adaptive=True, sweep_vertices=16)
    assert tougher.name != AttackPlan("2x2", "lgs", adaptive=True).name
    assert AttackPlan.from_dict(tougher.to_dict()) == tougher
    assert tougher.tuning == AttackPlan("2x2", "lgs").tuning
