"""The ImageNet table from end to end, with a small network and synthetic images in the real formats."""

import inspect
import json
import sys
from dataclasses import replace
from itertools import groupby
from threading import Event

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from forged_evidence import forge
from other_processes import interrupted
from patchcert.attacks import AttackJob, FastCopy, PatchAttack
from patchcert.cli.app import run
from patchcert.data import load_dataset
from patchcert.defenses import Defended, DigitalWatermarking, LocalGradientSmoothing
from patchcert.errors import DataError, RunError
from patchcert.evidence import EvidenceFolder, Selection
from patchcert.models import imagenet
from patchcert.papers.chiang2020 import recipes, runner
from patchcert.papers.chiang2020.answering import defense_from
from patchcert.papers.chiang2020.imagenet import (
    CornerExperiment,
    Material,
    answer_corners,
    plan_networks,
    planned_experiment,
)
from patchcert.papers.chiang2020.networks import (
    NetworkResult,
    collect_network,
    initially_correct,
    network_results,
)
from patchcert.papers.chiang2020.recipes import recipe
from patchcert.papers.chiang2020.runner import Runner, Workshop
from patchcert.papers.chiang2020.tables import find_table
from patchcert.testing.conformance import seeded
from patchcert.threats import Patch

TABLE = find_table("break-imagenet")
IMAGES, STEPS = 6, 4
SELECTION = Selection("imagenet", drawn=IMAGES)
CPU = torch.device("cpu")


def small_network():
    return nn.Sequential(
        nn.Conv2d(3, 4, 8, stride=8),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(3),
        nn.Flatten(),
        nn.Linear(36, 5),
    )


WORKER = f"""
import sys
from torch import nn
from patchcert.models import imagenet
from patchcert.papers.chiang2020.worker import main

{inspect.getsource(small_network)}
imagenet._BUILDERS["resnet50"] = small_network
sys.exit(main())
"""


def make_folder(folder):
    """Images that the network gets right, except the first."""
    generator = torch.Generator().manual_seed(0)
    network = small_network().eval()
    weights = {name: value for name, value in network.state_dict().items() if value.is_floating_point()}
    for name, value in weights.items():
        drawn = torch.randn(value.shape, generator=generator) * 0.5
        value.copy_(drawn.abs() + 0.5 if name.endswith("var") else drawn)
    (folder / "images").mkdir(parents=True)
    save_file(weights, folder / "resnet50.safetensors")
    names = [f"{number}.png" for number in range(IMAGES + 2)]
    for name in names:
        coarse = (255 * torch.rand(4, 4, 3, generator=generator)).byte().numpy()
        Image.fromarray(coarse).resize((224, 224)).save(folder / "images" / name)
    write_labels(folder, names, [0] * len(names))
    with torch.no_grad():
        labels = network(load_dataset(f"folder:{folder}").test.floats()).argmax(dim=1).tolist()
    labels[0] = (labels[0] + 1) % 5
    write_labels(folder, names, labels)


def write_labels(folder, names, labels):
    lines = ["file,label", *(f"{name},{label}" for name, label in zip(names, labels, strict=True))]
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    place = tmp_path_factory.mktemp("data")
    make_folder(place / "imagenet")
    return place


@pytest.fixture(autouse=True)
def _small(monkeypatch, tmp_path):
    """A small network here and in the processes that attack, and few images and steps in what they are asked."""
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    monkeypatch.setitem(imagenet._BUILDERS, "resnet50", small_network)
    monkeypatch.setattr(recipes, "CORNER_IMAGES", IMAGES)
    monkeypatch.setattr(recipes, "CORNER_STEPS", STEPS)
    monkeypatch.setattr(runner, "WORKER", (sys.executable, str(worker)))


def asked(text):
    return tuple(recipe(entry).attack for entry in TABLE.chosen([text]))


def silent(words):
    """For nobody who wants to hear."""


def attack(data_dir, folder, text, tell=silent):
    """The evidence that answers rows, by whether the attack knows the defense, and its defense."""
    kept = EvidenceFolder(folder / "evidence")
    answer_corners("resnet50", asked(text), kept, CPU, data_dir, tell)
    return {
        (each.meta["attack"]["adaptive"], each.meta["classifier"]["defense"][:5]): each for each in kept.all()
    }


def test_rows_share_assignments(data_dir):
    planned = plan_networks(TABLE.entries, 1, data_dir)
    assert [(each.label, len(each.questions)) for each in planned] == [
        (f"imagenet resnet50 {side}x{side}", 4) for side in (42, 52, 60)
    ]
    (some,) = plan_networks(TABLE.chosen(["52x52 dw"]), 1, data_dir)
    assert (some.name, len(some.questions)) == (planned[1].name, 2)
    twice = plan_networks(TABLE.chosen(["42x42"]), 2, data_dir)
    assert [each.label for each in twice] == ["imagenet resnet50 42x42", "imagenet resnet50 42x42 seed 1"]


def test_the_attack_is_that_of_the_paper_in_the_corners(monkeypatch):
    monkeypatch.undo()
    question = recipe(TABLE.entries[0]).attack
    assert len(question.threat.placements(224, 224)) == 4
    made = planned_experiment(question, CPU).attack
    assert (made.steps, made.step_size, made.restarts, made.early_stop) == (150, 0.05, 4, True)


def test_evidence_of_all_cells_has_all_that_identifies_them(data_dir, tmp_path):
    heard = []
    found = attack(data_dir, tmp_path, "42x42", heard.append)
    assert "weak attack" in heard
    assert {each.question for each in found.values()} == set(asked("42x42"))
    for each in found.values():
        meta = each.meta
        assert (each.total, meta["network"], meta["data"]["drawn"]) == (IMAGES, "resnet50", IMAGES)
        assert (meta["settings"]["judged"], set(meta["data"]["sha256"])) == (
            "float32",
            {"labels.csv", "images"},
        )
        assert len(each.weights) == 64
        assert meta["seconds"] > 0
        right = each.columns["undefended"] == each.columns["label"]
        kept = int((right & ~each.columns["succeeded"]).sum())
        assert initially_correct(each) == (kept, int(right.sum()))
    for defense in ("Local", "Digit"):
        plain, adaptive = (found[known, defense].columns for known in (False, True))
        assert (plain["prediction"] == adaptive["prediction"]).all()
        assert (adaptive["succeeded"] >= (plain["succeeded"] & (plain["prediction"] == plain["label"]))).all()


def test_a_finished_defense_outlives_an_interruption_in_the_next(data_dir, tmp_path):
    def interrupt(words):
        if "on DigitalWatermarking" in words:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attack(data_dir, tmp_path / "broken", "42x42", interrupt)
    heard = []
    resumed = attack(data_dir, tmp_path / "broken", "42x42", heard.append)
    assert set(heard) == {"weak attack", "adaptive attack on DigitalWatermarking"}
    whole = attack(data_dir, tmp_path / "whole", "42x42")
    assert len(whole) == 4
    for cell, each in whole.items():
        assert np.array_equal(each.columns["margin"], resumed[cell].columns["margin"])


def test_missing_files_are_named(data_dir, tmp_path):
    with pytest.raises(DataError, match="holds 8 images, but 1000 are to be attacked"):
        Material.of("resnet50", replace(SELECTION, drawn=1000), data_dir)
    with pytest.raises(DataError, match="efficientnet_lite2.safetensors are missing"):
        Material.of("efficientnet_lite2", SELECTION, data_dir)
    with pytest.raises(DataError, match="no ImageNet folder"):
        Material.of("resnet50", SELECTION, tmp_path)


def test_other_images_labels_or_weights_are_other_results(data_dir, tmp_path):
    def name(place):
        return Material.of("resnet50", SELECTION, place).name(asked("42x42")[0])

    names = {name(data_dir)}
    other = tmp_path / "imagenet"
    make_folder(other)
    assert name(tmp_path) in names
    for file in (other / "images").iterdir():
        Image.new("RGB", (224, 224)).save(file)
    names.add(name(tmp_path))
    write_labels(other, [f"{number}.png" for number in range(IMAGES + 2)], range(IMAGES + 2))
    names.add(name(tmp_path))
    save_file({"strange": torch.zeros(1)}, other / "resnet50.safetensors")
    names.add(name(tmp_path))
    assert len(names) == 4


class Quiet:
    def changed(self, assignment, state, note):
        self.note = note

    def passed(self, states, running):
        pass


def run_rows(data_dir, place, text):
    shop = Workshop(place / "runs", place / "results", data_dir=data_dir)
    watcher = Quiet()
    states = Runner(shop, watcher, Event()).run(plan_networks(TABLE.chosen([text]), 1, data_dir))
    return list(states.values()), watcher.note


@pytest.mark.slow
def test_a_defense_asked_for_later_is_added_to_the_same_results(data_dir, tmp_path):
    assert run_rows(data_dir, tmp_path, "42x42 dw")[0] == ["done"]
    (result,) = network_results(tmp_path / "results", "resnet50")
    before = {each.path: each.path.stat() for each in result.evidence}
    assert len(before) == 2
    states, note = run_rows(data_dir, tmp_path, "42x42")
    assert (states, note.count("withstood")) == (["done"], 4)
    (result,) = network_results(tmp_path / "results", "resnet50")
    assert len(result.evidence) == 4
    assert {file.name for file in result.path.iterdir() if file.suffix == ".json"} == {
        "environment.json",
        "summary.json",
    }
    for each in result.evidence:
        cell = result.summary()["cells"][each.question.name]
        assert cell["accuracy"] == each.withstood / IMAGES
        kept, right = initially_correct(each)
        assert cell["accuracy_of_initially_correct"] == kept / right
    assert run_rows(data_dir, tmp_path, "42x42")[0] == ["already done"]


@pytest.fixture
def made(data_dir, tmp_path):
    """The folder of results of one defense."""
    (planned,) = plan_networks(TABLE.chosen(["42x42 lgs"]), 1, data_dir)
    found = attack(data_dir, tmp_path / planned.name, "42x42 lgs")
    weights = next(iter(found.values())).weights
    return collect_network(tmp_path / planned.name, tmp_path / "results", weights).path


def test_evidence_in_the_wrong_place_is_refused(made):
    moved = made.rename(made.with_name(made.name[:-8] + "0" * 8))
    with pytest.raises(RunError, match="is not evidence of what its folder says"):
        assert NetworkResult(moved).evidence


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda columns: columns.update(succeeded=~columns["succeeded"]), "contradicts itself"),
        (lambda columns: columns.pop("undefended"), "lacks the column"),
    ],
)
def test_rows_that_were_changed_are_refused(made, change, message):
    forge(next(made.glob("*.npz")), change)
    with pytest.raises(RunError, match=message):
        assert NetworkResult(made).evidence


def reproduce(data_dir, place, *arguments):
    where = ["--data-dir", str(data_dir), "--runs", str(place / "runs"), "--results", str(place / "results")]
    return run(["reproduce", *arguments, "--device", "cpu", *where])


def test_the_whole_table_from_the_command_line_and_back_from_its_evidence(data_dir, tmp_path, capsys):
    assert reproduce(data_dir, tmp_path, "break-imagenet", "--format", "json") == 0
    captured = capsys.readouterr()
    assert "12 rows need 0 runs and 3 attacks on ImageNet" in captured.err
    assert "running: imagenet resnet50 42x42" in captured.err
    (table,) = json.loads(captured.out)["tables"]
    assert [row["status"] for row in table["rows"]] == ["measured"] * 12
    for row in table["rows"]:
        (each,) = row["runs"]
        assert (each["model"], each["attacked"], each["seed"]) == ("resnet50", IMAGES, 0)
        assert row["empirical"] == pytest.approx(100 * each["withstood"] / IMAGES)
        share = 100 * each["withstood_of_them"] / each["initially_correct"]
        assert row["empirical_of_initially_correct"] == pytest.approx(share)
        assert row["seconds"] is None

    there = str(tmp_path / "results")
    assert run(["reproduce", "break-imagenet", "--from", there, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["tables"] == [table]
    assert run(["reproduce", "all", "--from", there, "--write", str(tmp_path / "page.md")]) == 0
    page = (tmp_path / "page.md").read_text()
    assert "| break-imagenet | 12 | 12 | 12 |" in page
    assert page.count("inception_v3 (ours: resnet50)") == 6
    assert page.count("under attack, of those right at first") == 1
    assert page.count("full; 6 random test images") == 12
    assert run(["reproduce", "all", "--from", there, "--page", str(tmp_path / "page.html")]) == 0
    assert "vgg19 (ours: resnet50)" in (tmp_path / "page.html").read_text()
    capsys.readouterr()
    assert reproduce(data_dir, tmp_path, "break-imagenet") == 0
    assert "3 already done" in capsys.readouterr().err


def test_other_rows_do_without_imagenet_but_its_own_do_not(tmp_path, capsys):
    assert reproduce(tmp_path, tmp_path, "break-imagenet") == 2
    assert "no ImageNet folder with labels.csv found" in capsys.readouterr().err
    assert reproduce(tmp_path, tmp_path, "break-imagenet", "--scale", "quick") == 2
    assert "have no quick look" in capsys.readouterr().err
    rows = ["--rows", "ImageNet 42x42", "--rows", "mnist 5x5 all mlp"]
    assert reproduce(tmp_path, tmp_path, "all", *rows) == 2
    captured = capsys.readouterr().err
    assert "left out the attacks on ImageNet: no ImageNet folder" in captured
    assert "mnist" in captured


@pytest.mark.slow
def test_ctrl_c_keeps_finished_attacks_and_the_same_command_resumes(data_dir, tmp_path, capsys):
    script = tmp_path / "run.py"
    script.write_text(
        f"""
import sys
from patchcert.cli.app import run
from patchcert.papers.chiang2020 import recipes, runner

recipes.CORNER_IMAGES, recipes.CORNER_STEPS = {IMAGES}, {STEPS}
runner.WORKER = {runner.WORKER!r}
sys.exit(run(sys.argv[1:]))
"""
    )
    rows = ["break-imagenet", "--rows", "LGS"]
    where = ["--data-dir", str(data_dir), "--results", str(tmp_path / "results"), "--device", "cpu"]
    command = [sys.executable, str(script), "reproduce", *rows, *where, "--runs", str(tmp_path / "runs")]
    said = interrupted(command, at="running: imagenet resnet50 52x52")
    assert len(list((tmp_path / "results").iterdir())) == 1
    assert any("1 done, 1 interrupted, 1 waiting" in line for line in said), said
    assert reproduce(data_dir, tmp_path, *rows) == 0
    assert "1 already done, 2 done" in capsys.readouterr().err


def small_model() -> nn.Sequential:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 5, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64, 5)
    )
    generator = seeded(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def smooth_images(count: int) -> torch.Tensor:
    coarse = torch.rand(count, 3, 4, 4, generator=seeded(1))
    return nn.functional.interpolate(coarse, 40, mode="bilinear", align_corners=False)


def described(name, patch):
    marking = DigitalWatermarking.imagenet(nn.Identity(), patch)
    defense = LocalGradientSmoothing.imagenet() if name == "lgs" else marking
    return f"{type(defense).__name__}({defense.extra_repr()})"


def attacked(model, images, labels, patch, experiment, defenses=("lgs", "dw"), tell=None):
    """The weak and the adaptive attack on each defense."""
    job = AttackJob(images, labels, Patch(patch, placements="corners"), seeded(0))
    transferred = experiment.transferred(model, job, tell)
    return {name: experiment.rows(described(name, patch), model, job, transferred, tell) for name in defenses}


@pytest.mark.parametrize("reduced", [False, True])
def test_every_cell_of_the_table_is_filled_and_adaptive_is_the_stronger_attack(reduced):
    model, images = small_model(), smooth_images(12)
    labels = model(images).argmax(dim=1).detach()
    labels[0] = (labels[0] + 1) % 5
    attack = PatchAttack(steps=8, step_size=0.1, restarts=4, loss="margin", batch_size=16)
    experiment = CornerExperiment(attack, judged_at_once=5, reduced=reduced)
    pairs = [
        pair for patch in (8, 12) for pair in attacked(model, images, labels, patch, experiment).values()
    ]
    assert [(weak.adaptive, strong.adaptive) for weak, strong in pairs] == [(False, True)] * 4
    corners = {(top, left) for side in (8, 12) for top in (0, 40 - side) for left in (0, 40 - side)}
    for weak, strong in pairs:
        right = strong.result.clean_predictions == labels
        assert not (weak.result.succeeded & right & ~strong.result.succeeded).any()
        places = {tuple(place) for place in strong.result.placement[right].tolist()}
        assert places <= corners
        assert (strong.result.placement[~right] == -1).all()
        assert torch.equal(strong.undefended, model(images).argmax(dim=1))
        assert torch.equal(weak.undefended_after, model(weak.result.adversarial).argmax(dim=1))
    assert any(strong.result.accuracy < weak.result.accuracy for weak, strong in pairs)


def test_results_are_what_the_defended_network_itself_says():
    model, images = small_model(), smooth_images(8)
    labels = model(images).argmax(dim=1).detach()
    attack = PatchAttack(steps=6, step_size=0.1, restarts=2, batch_size=16)
    found = attacked(model, images, labels, 12, CornerExperiment(attack, 64, reduced=True))
    for name, row in ((name, row) for name, rows in found.items() for row in rows):
        defended = Defended(defense_from(described(name, 12), model), model)
        with torch.no_grad():
            predictions = defended(row.result.adversarial).argmax(dim=1)
        assert torch.equal(row.result.predictions, predictions)
        assert torch.equal(row.result.succeeded, predictions != labels)


def test_the_surrogate_past_the_clip_comes_first_and_again_by_the_margin():
    model, experiment = small_model(), CornerExperiment(PatchAttack(restarts=4), 64, reduced=False)
    copy = FastCopy(model)
    smoothing = LocalGradientSmoothing.imagenet()
    attacks = experiment.attacks(Defended(smoothing, copy))
    assert [surrogate.surrogate for _, surrogate in attacks] == [
        smoothing.forward_past_clip,
        smoothing.forward,
        smoothing.forward_past_clip,
    ]
    assert [attack.loss for attack, _ in attacks] == ["cross-entropy", "cross-entropy", "margin"]
    assert len(experiment.attacks(Defended(DigitalWatermarking.imagenet(copy, 12), copy))) == 2


def test_every_pass_is_told_of_and_may_be_the_last():
    model, images = small_model(), smooth_images(2)
    labels = model(images).argmax(dim=1).detach()
    attack = PatchAttack(steps=3, restarts=4, batch_size=16)
    said = []
    experiment = CornerExperiment(attack, 64, reduced=False)
    attacked(model, images, labels, 8, experiment, ("lgs",), tell=said.append)
    assert [words for words, _ in groupby(said)] == [
        "weak attack",
        "adaptive attack on LocalGradientSmoothing",
    ]
    assert said.count("weak attack") > attack.steps

    class EnoughError(Exception):
        pass

    def stop(words):
        raise EnoughError

    with pytest.raises(EnoughError):
        attacked(model, images, labels, 8, experiment, tell=stop)


def test_defenses_have_their_imagenet_settings():
    found = {question.classifier["defense"] for question in asked("42x42")}
    assert found == {described("lgs", 42), described("dw", 42)}
    assert "window=15, overlap=5, threshold=0.1, smoothing=2.3" in described("lgs", 42)
    assert "window=50, quantile=0.95, opening=3" in described("dw", 42)
