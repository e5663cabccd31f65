"""The ImageNet table from end to end, with a small network and synthetic images in the real formats."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from patchcert.papers.chiang2020.imagenet_attack import Material, planned_experiment
from patchcert.papers.chiang2020.imagenet_plan import CornerPlan, Piece, corner_plan, pieces_of
from patchcert.papers.chiang2020.imagenet_results import CornerResult, corner_results, initially_correct
from patchcert.papers.chiang2020.imagenet_runner import PieceRunner
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import patchcert
from patchcert.cli.app import run
from patchcert.data import load_dataset
from patchcert.errors import DataError, RunError
from patchcert.models import imagenet
from patchcert.papers.chiang2020 import imagenet_plan
from patchcert.papers.chiang2020.runner import StopOrder, Workshop
from patchcert.papers.chiang2020.tables import find_table

TABLE = find_table("break-imagenet")
IMAGES, STEPS = 6, 4


def small_network():
    return nn.Sequential(
        nn.Conv2d(3, 4, 8, stride=8),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(3),
        nn.Flatten(),
        nn.Linear(36, 5),
    )


def make_folder(folder):
    """Images that the network gets right, but for the first."""
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
def _small(monkeypatch):
    monkeypatch.setitem(imagenet._BUILDERS, "resnet50", small_network)
    monkeypatch.setattr(imagenet_plan, "IMAGES", IMAGES)
    monkeypatch.setattr(imagenet_plan, "STEPS", STEPS)


class Listener:
    """Writes down what it hears, and orders a stop at a certain pass of a certain piece."""

    def __init__(self, stop=None, at=None, words=""):
        self.said, self.passes, self.stop, self.at, self.words = [], [], stop, at, words

    def piece_changed(self, piece, state, note):
        self.said.append((piece.plan.patch, state, note))

    def piece_passed(self, piece, words):
        self.passes.append((piece.plan.patch, words))
        if self.stop is not None and piece.plan.patch == self.at and self.words in words:
            self.stop.is_given = True

    def states(self):
        return [(patch, state) for patch, state, _ in self.said]


def run_pieces(shop, texts, stop_at=None, words=""):
    stop = StopOrder()
    listener = Listener(stop, stop_at, words)
    states = PieceRunner(shop, listener, stop).run(pieces_of(TABLE.chosen(texts)))
    return list(states.values()), listener


def test_rows_share_pieces_and_name_our_network():
    assert all(corner_plan(entry).network == "resnet50" for entry in TABLE.entries)
    pieces = pieces_of(TABLE.entries)
    assert [(piece.plan.patch, piece.defenses) for piece in pieces] == [
        (42, ("lgs", "dw")),
        (52, ("lgs", "dw")),
        (60, ("lgs", "dw")),
    ]
    assert pieces_of(TABLE.chosen(["52x52 dw"])) == (Piece(pieces[1].plan, ("dw",)),)
    assert [piece.plan.seed for piece in pieces_of(TABLE.chosen(["42x42"]), seeds=2)] == [0, 1]
    assert pieces_of(find_table("compare-defenses").entries) == ()


def test_the_plan_is_that_of_the_paper_s_attack_in_the_corners(monkeypatch):
    monkeypatch.undo()
    plan = corner_plan(TABLE.entries[0])
    assert plan == CornerPlan("resnet50", 42)
    assert (plan.images, plan.steps, plan.step_size, plan.restarts) == (400, 150, 0.05, 4)
    assert len(plan.threat.placements(224, 224)) == 4
    attack = planned_experiment(plan, torch.device("cpu")).attack
    assert (attack.steps, attack.step_size, attack.restarts, attack.early_stop) == (150, 0.05, 4, True)


def test_a_piece_leaves_evidence_of_all_cells_with_all_that_identifies_them(data_dir, tmp_path):
    shop = Workshop(tmp_path / "runs", tmp_path / "results", data_dir=data_dir)
    states, listener = run_pieces(shop, ["42x42"])
    assert (states, listener.states()) == (["done"], [(42, "running"), (42, "done")])
    assert {words for _, words in listener.passes} >= {"weak attack"}
    (result,) = corner_results(tmp_path / "results", corner_plan(TABLE.entries[0])).values()
    assert sorted(file.name for file in result.path.iterdir()) == [
        "attack-dw-adaptive.npz",
        "attack-dw-plain.npz",
        "attack-lgs-adaptive.npz",
        "attack-lgs-plain.npz",
        "environment.json",
        "summary.json",
    ]
    for (name, adaptive), rows in result.cells.items():
        assert rows.total == IMAGES
        meta = rows.meta
        assert (meta["network"], meta["data"]["images"], meta["settings"]["judged"]) == (
            "resnet50",
            6,
            "float32",
        )
        assert set(meta["data"]["sha256"]) == {"labels.csv", "images"}
        assert len(meta["weights_sha256"]) == 64
        assert meta["seconds"] > 0
        assert ("window=15" in meta["defense"]) == (name == "lgs")
        assert len(meta["stages"]) == (1 + (3 if name == "lgs" else 2) if adaptive else 1)
        right = rows.columns["undefended"] == rows.columns["label"]
        kept = int((right & ~rows.columns["succeeded"]).sum())
        assert initially_correct(rows) == (kept, int(right.sum()))
    for name in ("lgs", "dw"):
        plain, adaptive = (result.cells[name, known].columns for known in (False, True))
        assert (plain["prediction"] == adaptive["prediction"]).all()
        assert (adaptive["succeeded"] >= (plain["succeeded"] & (plain["prediction"] == plain["label"]))).all()
    summary = json.loads((result.path / "summary.json").read_text())
    assert summary["cells"]["attack-lgs-plain"]["accuracy"] == result.cells["lgs", False].withstood / IMAGES


def test_a_stop_keeps_finished_pieces_and_the_rest_is_done_next_time(data_dir, tmp_path):
    shop = Workshop(tmp_path / "runs", tmp_path / "results", data_dir=data_dir)
    states, _ = run_pieces(shop, ["lgs"], stop_at=52)
    assert states == ["done", "interrupted", "waiting"]
    assert len(list((tmp_path / "results").iterdir())) == 1
    states, listener = run_pieces(shop, ["lgs"])
    assert states == ["already done", "done", "done"]
    assert {patch for patch, _ in listener.passes} == {52, 60}
    late = replace(shop, deadline=time.monotonic() - 1)
    assert run_pieces(late, ["dw"])[0] == ["waiting"] * 3


def test_a_finished_defense_outlives_a_stop_in_the_next(data_dir, tmp_path):
    shop = Workshop(tmp_path / "runs", tmp_path / "results", data_dir=data_dir)
    states, _ = run_pieces(shop, ["42x42"], stop_at=42, words="on dw")
    assert states == ["interrupted"]
    (result,) = corner_results(tmp_path / "results", corner_plan(TABLE.entries[0])).values()
    assert set(result.cells) == {("lgs", False), ("lgs", True)}
    states, listener = run_pieces(shop, ["42x42"])
    assert states == ["done"]
    assert "adaptive attack on lgs" not in {words for _, words in listener.passes}
    whole = Workshop(tmp_path / "runs", tmp_path / "whole", data_dir=data_dir)
    run_pieces(whole, ["42x42"])
    (once,) = corner_results(tmp_path / "whole", corner_plan(TABLE.entries[0])).values()
    (result,) = corner_results(tmp_path / "results", corner_plan(TABLE.entries[0])).values()
    for cell, rows in once.cells.items():
        assert np.array_equal(rows.columns["margin"], result.cells[cell].columns["margin"])


def test_a_deadline_stops_within_a_piece(data_dir, tmp_path):
    shop = Workshop(tmp_path / "runs", tmp_path / "results", data_dir=data_dir)

    class Slow(Listener):
        def piece_passed(self, piece, words):
            super().piece_passed(piece, words)
            time.sleep(0.5)

    listener = Slow()
    soon = replace(shop, deadline=time.monotonic() + 0.4)
    states = PieceRunner(soon, listener, StopOrder()).run(pieces_of(TABLE.chosen(["42x42"])))
    assert list(states.values()) == ["interrupted"]
    assert len(listener.passes) < STEPS
    assert not (tmp_path / "results").exists()


def test_a_defense_asked_for_later_is_added_to_the_same_results(data_dir, tmp_path):
    shop = Workshop(tmp_path / "runs", tmp_path / "results", data_dir=data_dir)
    run_pieces(shop, ["42x42 dw"])
    (result,) = corner_results(tmp_path / "results", corner_plan(TABLE.entries[0])).values()
    before = {rows.path: rows.path.stat() for rows in result.cells.values()}
    assert set(result.cells) == {("dw", False), ("dw", True)}
    states, listener = run_pieces(shop, ["42x42"])
    assert states == ["done"]
    assert {words for _, words in listener.passes} == {"weak attack", "adaptive attack on lgs"}
    assert all(path.stat() == stat for path, stat in before.items())
    (result,) = corner_results(tmp_path / "results", corner_plan(TABLE.entries[0])).values()
    assert len(result.cells) == 4


def test_missing_files_are_named(data_dir, tmp_path):
    plan = CornerPlan("resnet50", 42, images=1000)
    with pytest.raises(DataError, match="holds 8 images, but 1000 are to be attacked"):
        Material.of(plan, data_dir)
    with pytest.raises(DataError, match="efficientnet_lite2.safetensors are missing"):
        Material.of(CornerPlan("efficientnet_lite2", 42, images=2), data_dir)
    shop = Workshop(tmp_path / "runs", tmp_path / "results", data_dir=tmp_path)
    states, listener = run_pieces(shop, ["42x42"])
    assert states == ["failed"]
    assert "no ImageNet folder" in listener.said[-1][2]


def test_other_images_labels_or_weights_are_other_results(data_dir, tmp_path):
    plan = CornerPlan("resnet50", 42, images=IMAGES)
    names = {Material.of(plan, data_dir).fingerprint(plan)}
    other = tmp_path / "imagenet"
    make_folder(other)
    assert Material.of(plan, tmp_path).fingerprint(plan) in names
    for file in (other / "images").iterdir():
        Image.new("RGB", (224, 224)).save(file)
    names.add(Material.of(plan, tmp_path).fingerprint(plan))
    write_labels(other, [f"{number}.png" for number in range(IMAGES + 2)], range(IMAGES + 2))
    names.add(Material.of(plan, tmp_path).fingerprint(plan))
    save_file({"strange": torch.zeros(1)}, other / "resnet50.safetensors")
    names.add(Material.of(plan, tmp_path).fingerprint(plan))
    assert len(names) == 4


@pytest.fixture
def made(data_dir, tmp_path):
    run_pieces(Workshop(tmp_path / "runs", tmp_path / "results", data_dir=data_dir), ["42x42 lgs"])
    (path,) = (tmp_path / "results").iterdir()
    return path


def test_evidence_in_the_wrong_place_is_refused(made):
    moved = made.rename(made.with_name(made.name[:-8] + "0" * 8))
    with pytest.raises(RunError, match="is not evidence of what its folder and name say"):
        assert CornerResult(moved).cells


def test_cells_that_changed_places_are_refused(made):
    (made / "attack-lgs-plain.npz").rename(made / "attack-dw-plain.npz")
    with pytest.raises(RunError, match="attack-dw-plain.npz is not evidence of what"):
        assert CornerResult(made).cells


@pytest.mark.parametrize(
    ("column", "message"), [("succeeded", "contradicts itself"), ("undefended", "lacks the column")]
)
def test_rows_that_were_changed_are_refused(made, column, message):
    file = made / "attack-lgs-plain.npz"
    with np.load(file) as stored:
        arrays = dict(stored)
    changed = ~arrays.pop(column)
    np.savez_compressed(file, **arrays, **({column: changed} if column == "succeeded" else {}))
    with pytest.raises(RunError, match=message):
        assert CornerResult(made).cells


def reproduce(data_dir, place, *arguments):
    where = ["--data-dir", str(data_dir), "--runs", str(place / "runs"), "--results", str(place / "results")]
    return run(["reproduce", *arguments, "--device", "cpu", *where])


def test_the_whole_table_from_the_command_line_and_back_from_its_evidence(data_dir, tmp_path, capsys):
    packed = str(tmp_path / "all.tar.gz")
    assert reproduce(data_dir, tmp_path, "break-imagenet", "--pack", packed, "--format", "json") == 0
    captured = capsys.readouterr()
    assert "12 rows need 0 runs and 3 attacks on ImageNet" in captured.err
    assert "running: imagenet resnet50 42x42" in captured.err
    assert "imagenet resnet50 60x60: weak attack" in captured.err
    assert "packed 3 results" in captured.err
    (table,) = json.loads(captured.out)["tables"]
    assert [row["status"] for row in table["rows"]] == ["measured"] * 12
    for row in table["rows"]:
        (each,) = row["runs"]
        assert (each["model"], each["attacked"], each["seed"]) == ("resnet50", IMAGES, 0)
        assert row["empirical"] == pytest.approx(100 * each["withstood"] / IMAGES)
        share = 100 * each["withstood_of_them"] / each["initially_correct"]
        assert row["empirical_of_initially_correct"] == pytest.approx(share)
        assert row["seconds"] is None

    there = tmp_path / "there"
    again = ["--from", str(there), "--unpack", packed]
    assert run(["reproduce", "break-imagenet", *again, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["tables"] == [table]
    assert run(["reproduce", "all", "--from", str(there), "--write", str(tmp_path / "page.md")]) == 0
    page = (tmp_path / "page.md").read_text()
    assert "| break-imagenet | 12 | 12 | 12 |" in page
    assert page.count("inception_v3 (ours: resnet50)") == 6
    assert page.count("under attack, of those right at first") == 1
    assert page.count("full; 6 random test images") == 12
    assert run(["reproduce", "all", "--from", str(there), "--page", str(tmp_path / "page.html")]) == 0
    assert "vgg19 (ours: resnet50)" in (tmp_path / "page.html").read_text()
    capsys.readouterr()
    assert reproduce(data_dir, tmp_path, "break-imagenet") == 0
    assert "3 already done" in capsys.readouterr().err


def test_time_that_is_up_leaves_the_rest_for_the_next_call(data_dir, tmp_path, capsys):
    assert reproduce(data_dir, tmp_path, "break-imagenet", "--rows", "42x42", "--time-limit", "0") == 3
    assert "the time limit is reached" in capsys.readouterr().err


def test_other_rows_do_without_imagenet_but_its_own_do_not(tmp_path, capsys):
    assert reproduce(tmp_path, tmp_path, "break-imagenet") == 2
    assert "no ImageNet folder with labels.csv found" in capsys.readouterr().err
    assert reproduce(tmp_path, tmp_path, "break-imagenet", "--scale", "quick") == 2
    assert "have no quick look" in capsys.readouterr().err
    rows = ["--rows", "ImageNet 42x42", "--rows", "mnist 5x5 all mlp"]
    assert reproduce(tmp_path, tmp_path, "all", *rows, "--time-limit", "0") == 2
    captured = capsys.readouterr().err
    assert "left out the attacks on ImageNet: no ImageNet folder" in captured
    assert "mnist" in captured


def test_ctrl_c_keeps_finished_pieces_and_the_same_command_goes_on(data_dir, tmp_path, capsys):
    script = tmp_path / "run.py"
    script.write_text(
        f"""
import sys
from torch import nn
from patchcert.cli.app import run
from patchcert.papers.chiang2020 import imagenet_plan
from patchcert.models import imagenet

def small_network():
    return nn.Sequential(
        nn.Conv2d(3, 4, 8, stride=8), nn.BatchNorm2d(4), nn.ReLU(),
        nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(36, 5),
    )

imagenet._BUILDERS["resnet50"] = small_network
imagenet_plan.IMAGES, imagenet_plan.STEPS = {IMAGES}, {STEPS}
sys.exit(run(sys.argv[1:]))
"""
    )
    rows = ["break-imagenet", "--rows", "LGS"]
    where = ["--data-dir", str(data_dir), "--results", str(tmp_path / "results"), "--device", "cpu"]
    command = [sys.executable, str(script), "reproduce", *rows, *where]
    source = str(Path(patchcert.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stderr=pipe, stdout=pipe, text=True, env=environment) as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if line.startswith("running: imagenet resnet50 52x52"):
                process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, said
    assert len(list((tmp_path / "results").iterdir())) == 1
    assert any("1 done, 1 interrupted, 1 waiting" in line for line in said), said
    assert reproduce(data_dir, tmp_path, *rows) == 0
    assert "1 already done, 2 done" in capsys.readouterr().err
