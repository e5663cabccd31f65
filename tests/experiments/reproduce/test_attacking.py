"""Planned attacks: settings chosen on held-out images only, and the adaptive attack goes on from the weak one."""

from dataclasses import replace

import pytest
import torch

from patchcert.data import load_dataset
from patchcert.errors import InvalidInput
from patchcert.experiments.read import read_spec
from patchcert.experiments.reproduce import attacking
from patchcert.experiments.reproduce.attack_plan import AttackPlan
from patchcert.experiments.reproduce.attacking import attack_run, planned_attack
from patchcert.experiments.reproduce.scales import QUICK_DATA, QUICK_HELD_OUT, QUICK_SCHEDULE
from patchcert.experiments.spec import DataChoice, ModelChoice, RunSettings
from patchcert.experiments.training import Workplace, train_run

CPU = torch.device("cpu")
PLAN = AttackPlan("3x3", images=40, restarts=3, steps=30, tuned_on=40, largest_drop=0.1, settings=6)


@pytest.fixture(scope="module")
def dataset():
    return load_dataset(QUICK_DATA, None)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    spec = replace(
        read_spec("paper-mnist", ["strategy.kind=natural"]),
        data=DataChoice(QUICK_DATA, limit=800, validation=QUICK_HELD_OUT),
        model=ModelChoice("cnn2", hidden=32),
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


@pytest.mark.parametrize("kind", ["lgs", "dw"])
def test_no_image_that_the_weak_attack_broke_withstands_the_adaptive_one(run, dataset, kind):
    plain, adaptive = defended(kind), defended(kind, adaptive=True)
    for plan in (plain, adaptive):
        attack_run(run, dataset, plan, CPU)
    weak, strong = run.evidence(plain.name), run.evidence(adaptive.name)
    assert (weak["prediction"] == strong["prediction"]).all()
    assert not (weak["succeeded"] & ~strong["succeeded"]).any()
    assert (strong["succeeded"] | (strong["prediction"] == strong["label"])).all()
    assert strong["succeeded"].sum() > weak["succeeded"].sum()
    choices = [run.evidence_meta(plan.name)["tuning"] for plan in (plain, adaptive)]
    assert choices[0] == choices[1]


def test_settings_are_chosen_on_held_out_training_images_alone(run, dataset, monkeypatch):
    seen = {}
    honest = attacking.tune_defense

    def watched(attack, model, images, labels, *others, **options):
        seen.update(images=images, labels=labels)
        return honest(attack, model, images, labels, *others, **options)

    monkeypatch.setattr(attacking, "tune_defense", watched)
    attack_run(run, dataset, defended("lgs", tuned_on=30), CPU)
    held_out = dataset.train[len(dataset.train) - 30 :]
    assert torch.equal(seen["labels"], held_out.labels)
    assert torch.equal(seen["images"], held_out.floats())
    with pytest.raises(InvalidInput, match="chosen on 60 images, but 50 were held out"):
        attack_run(run, dataset, defended("lgs", tuned_on=60), CPU)


def test_where_every_setting_costs_too_much_the_cheapest_is_taken_and_said_to_be(run, dataset):
    plan = defended("dw", largest_drop=-1.0)
    attack_run(run, dataset, plan, CPU)
    tuning = run.evidence_meta(plan.name)["tuning"]
    assert tuning["is_within_drop"] is False
    assert tuning["clean_accuracy"] <= tuning["undefended_accuracy"] + 1.0


def test_the_planned_attack_tries_every_placement_before_the_papers_restarts():
    attack = planned_attack(AttackPlan("2x2"), CPU)
    assert (attack.search, attack.sweep_steps, attack.restarts, attack.steps) == ("sweep", 5, 80, 150)
    assert (attack.loss, attack.step_size) == ("cross-entropy", 0.05)
    assert planned_attack(AttackPlan("2x2", search="random"), CPU).search == "random"
