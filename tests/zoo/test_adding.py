"""Cards are counted from evidence; the better of two runs stays."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

import patchcert as pc
from patchcert.data import load_dataset
from patchcert.errors import RunError
from patchcert.files import sha256
from patchcert.papers.chiang2020.attack_plan import AttackPlan
from patchcert.papers.chiang2020.collecting import collect
from patchcert.papers.chiang2020.results import TRIMMED
from patchcert.train.run_folder import Run, trim_run
from patchcert.train.spec import read_spec
from patchcert.zoo import Zoo
from patchcert.zoo.adding import add_run, make_card
from patchcert.zoo.copying import copy_to_run
from patchcert.zoo.naming import entry_name

NAME = "mnist-mini-2x2-mlp"
CERTIFY = "certify-patch-2x2-square-everywhere"


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the trained run, to be changed."""
    return Run.open(shutil.copytree(trained, tmp_path / "copy"))


def attack_meta(run, **more):
    meta = run.evidence_meta(CERTIFY)
    return {**meta, "kind": "attack", "device": "cpu", **more}


def write_attack(run, name, index, succeeded, **more):
    rows = run.evidence(CERTIFY)
    label = rows["label"][index]
    after = np.where(succeeded, (label + 1) % 10, label)
    zeros = np.zeros(len(index), np.int64)
    columns = {
        "index": index,
        "label": label,
        "prediction": rows["prediction"][index],
        "prediction_after": after,
        "succeeded": succeeded,
        "top": zeros,
        "left": zeros,
    }
    run.write_evidence(name, columns, attack_meta(run, **more))


def test_every_number_of_a_card_is_that_of_the_run(run):
    card, rows = make_card(run), run.evidence(CERTIFY)
    assert card.name == NAME
    assert card.proof.images == 1000
    assert card.proof.right == np.count_nonzero(rows["label"] == rows["prediction"])
    assert card.proof.certified == np.count_nonzero(rows["verdict"])
    assert np.array_equal(card.proof.certified_marks, rows["verdict"])
    assert card.proof.evidence == sha256(run.path / "evidence" / f"{CERTIFY}.npz")
    assert card.weights_sha256 == sha256(run.weights)
    assert card.data_sha256 == run.environment()["data"]["checksums"]
    assert card.parameters == 28 * 28 * 16 + 16 + 16 * 10 + 10
    assert card.attacks == ()
    assert card.training.run == run.spec.fingerprint(card.data_sha256)
    assert card.training.seconds == round(run.training_seconds, 1) > 0
    assert "the weights of the last of 3 epochs" in card.note
    assert "as it ended" in card.note
    assert card.command == f"patchcert certify zoo:{NAME}"


def test_the_specification_of_a_card_asks_for_the_same_weights(run, tmp_path):
    file = tmp_path / "spec.toml"
    file.write_text(make_card(run).training.spec)
    assert read_spec(file) == run.spec


def test_weights_chosen_on_held_out_images_are_said_to_be_so(run):
    data = replace(run.spec.data, validation=100)
    chosen = replace(run, spec=replace(run.spec, select="best-validation", data=data))
    assert "best on 100 held-out training images" in make_card(chosen).note


def test_attacks_are_counted_and_their_commands_name_the_zoo(run):
    verdict = run.evidence(CERTIFY)["verdict"]
    index = np.arange(40)
    given = "patchcert attack /there/run --restarts 3 --data-dir /there --device cuda --out=x.npz --seed 1"
    write_attack(run, "attack-a", index, ~verdict[index], command=given, settings={"restarts": 3})
    plan = AttackPlan("2x2", images=40, restarts=2, steps=5)
    write_attack(run, "attack-b", index, ~verdict[index], plan=plan.to_dict())
    proven = np.flatnonzero(verdict)[:7]
    write_attack(run, "attack-c", proven, np.zeros(7, bool), certified_only=True)
    write_attack(run, "attack-d", index, np.ones(40, bool), threat=pc.Patch(3).to_dict())
    first, second, third = make_card(run).attacks
    assert (first.images, first.withstood) == (40, np.count_nonzero(verdict[:40]))
    assert first.command == f"patchcert attack zoo:{NAME} --restarts 3 --seed 1"
    assert first.settings == {"restarts": 3}
    planned = "--images 40 --restarts 2 --steps 5 --seed 0 --search sweep"
    assert second.command == f"patchcert attack zoo:{NAME} {planned}"
    assert first.certified == second.certified == np.count_nonzero(verdict[:40])
    assert (third.images, third.withstood, third.certified, third.certified_only) == (7, 7, 7, True)


def test_a_run_whose_proofs_were_broken_is_refused(run):
    proven = np.flatnonzero(run.evidence(CERTIFY)["verdict"])[:1]
    write_attack(run, "attack-a", proven, np.ones(1, bool))
    with pytest.raises(RunError, match=f"image {proven[0]} is certified, but the attack changed"):
        make_card(run)


def test_evidence_that_was_collected_too_counts_once(run, tmp_path):
    proven = np.flatnonzero(run.evidence(CERTIFY)["verdict"])[:5]
    write_attack(run, "attack-a", proven, np.zeros(5, bool), certified_only=True)
    collect(run, make_card(run).training.run, tmp_path)
    assert len(list(tmp_path.glob("*/challenge-*.npz"))) == 1
    assert make_card(run, tmp_path) == make_card(run)


def test_evidence_may_lie_in_the_folder_of_results(run, tmp_path):
    name = run.spec.fingerprint(run.environment()["data"]["checksums"])
    collect(run, name, tmp_path / "results")
    expected = make_card(run)
    shutil.rmtree(run.path / "evidence")
    with pytest.raises(RunError, match="no certificates of all test images against Patch") as caught:
        make_card(run)
    assert "--results" in caught.value.hint
    assert make_card(run, tmp_path / "results") == expected


def test_an_attack_that_was_collected_and_repeated_counts_once(run, tmp_path):
    index = np.arange(10)
    broken = ~run.evidence(CERTIFY)["verdict"][index]
    write_attack(run, "attack-a", index, broken, seconds=1.0)
    collect(run, run.spec.fingerprint(run.environment()["data"]["checksums"]), tmp_path / "results")
    write_attack(run, "attack-a", index, broken, seconds=2.0)
    assert len(make_card(run, tmp_path / "results").attacks) == 1


def test_how_many_runs_shared_the_device_is_read_from_collected_results(run, tmp_path):
    name = make_card(run).training.run
    collect(run, name, tmp_path)
    summary = tmp_path / name / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"jobs": 15}))
    assert make_card(run).training.runs_at_once == 1
    assert make_card(run, tmp_path).training.runs_at_once == 15


def test_certificates_of_a_few_images_do_not_count(run):
    rows = run.evidence(CERTIFY)
    meta = json.loads(str(rows.pop("meta")))
    meta["data"]["limit"] = 10
    run.write_evidence(CERTIFY, {key: column[:10] for key, column in rows.items()}, meta)
    with pytest.raises(RunError, match="no certificates of all test images"):
        make_card(run)


def test_an_unfinished_run_is_refused(run, tmp_path):
    run.weights.unlink()
    with pytest.raises(RunError, match="has not finished training"):
        add_run(Zoo(tmp_path / "zoo"), run)


def test_the_run_with_more_certified_images_stays(trained, another, tmp_path):
    zoo, first = Zoo(tmp_path / "zoo"), Run.open(trained)
    worse = another(0.05)
    assert make_card(worse).proof.certified < make_card(first).proof.certified
    assert add_run(zoo, worse).status == "added"
    assert add_run(zoo, first).status == "replaced"
    kept = add_run(zoo, worse)
    assert kept.status == "kept"
    assert "certified images against" in kept.reason
    assert zoo.card(NAME).weights_sha256 == sha256(first.weights)
    assert add_run(zoo, worse, replace=True).status == "replaced"
    assert zoo.card(NAME).weights_sha256 == sha256(worse.weights) == sha256(zoo.weights(NAME))


def test_new_evidence_of_the_same_weights_updates_the_card(zoo, run):
    index = np.arange(5)
    write_attack(run, "attack-a", index, ~run.evidence(CERTIFY)["verdict"][index])
    assert add_run(zoo, run).status == "updated"
    assert len(zoo.card(NAME).attacks) == 1


def test_runs_on_other_images_are_not_compared(zoo, another):
    run = another(0.5)
    rows = run.evidence(CERTIFY)
    meta = json.loads(str(rows.pop("meta")))
    meta["data"]["sha256"] = {"file": "0" * 64}
    run.write_evidence(CERTIFY, rows, meta)
    added = add_run(zoo, run)
    assert (added.status, "cannot be compared" in added.reason) == ("kept", True)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ([], "mnist-5x5-mlp"),
        (["model.name=cnn4_c11", "threat.stamp=2x8"], "mnist-2x8-cnn4-c11"),
        (["threat.placements=corners", "model.hidden=9"], "mnist-5x5-corners-mlp"),
        (["data.name=cifar10", "seed=1"], "cifar10-5x5-mlp"),
    ],
)
def test_names_say_data_threat_and_architecture(changes, name):
    assert entry_name(read_spec("paper-mnist", changes)) == name


def test_sparse_and_shaped_threats_have_names_of_their_own():
    sparse = read_spec("paper-mnist-sparse", ["threat.pixels=4"])
    assert entry_name(sparse) == "mnist-4-pixels-mlp"
    loose = replace(sparse, threat=pc.SparsePixels(4, "per-pixel"))
    assert entry_name(loose) == "mnist-4-pixels-per-pixel-mlp"
    stamps = [pc.shapes.parallelogram(16, mirrored=mirrored) for mirrored in (False, True)]
    names = {entry_name(replace(read_spec("paper-mnist"), threat=pc.Patch(stamp))) for stamp in stamps}
    assert len(names) == 2
    assert all(name.startswith("mnist-parallelogram-of-16-pixels-") for name in names)


def test_a_model_can_be_copied_to_a_run_folder(zoo, run, tmp_path):
    made = copy_to_run(zoo, NAME, tmp_path / "new")
    assert made.spec == run.spec
    assert sha256(made.weights) == sha256(run.weights)
    assert made.evidence_names() == ()
    with pytest.raises(RunError, match="is not empty"):
        copy_to_run(zoo, NAME, tmp_path / "new")


def test_the_card_of_a_trimmed_model_says_how_it_was_made(run, certified, tmp_path):
    images = load_dataset("mnist-mini").train.take(600).floats()
    trimmed = certified(trim_run(run, tmp_path / "trimmed", images, half=True))
    card = make_card(trimmed)
    assert card.name == NAME
    assert card.model.widths == trimmed.model_spec().widths
    assert card.training.command.endswith(f" && patchcert trim runs/{NAME} --half --out runs/{NAME}-trimmed")
    assert "without channels and units that no training image opens, rounded to half precision" in card.note
    assert card.training.run == make_card(run).training.run
    assert card.weights_sha256 == sha256(trimmed.weights) != sha256(run.weights)
    zoo = Zoo(tmp_path / "zoo")
    collected = tmp_path / "results" / card.training.run
    shutil.copytree(run.path / "evidence", collected)
    assert add_run(zoo, trimmed, collected.parent).card == card
    shutil.move(trimmed.path / "evidence", collected / TRIMMED)
    assert make_card(trimmed, collected.parent) == card
    assert zoo.load(NAME).linear1.weight.dtype == torch.float32


def test_a_trimmed_run_keeps_the_history_but_no_evidence(run, tmp_path):
    images = load_dataset("mnist-mini").train.take(600).floats()
    trimmed = trim_run(run, tmp_path / "trimmed", images, half=False)
    assert (trimmed.spec, trimmed.metrics()) == (run.spec, run.metrics())
    assert trimmed.environment() == run.environment()
    assert trimmed.evidence_names() == ()
    for folder in (tmp_path / "trimmed", run.path / "new" / ".."):
        with pytest.raises(RunError, match="is not empty"):
            trim_run(run, folder, images, half=False)
    run.weights.unlink()
    with pytest.raises(RunError, match="has not finished training"):
        trim_run(run, tmp_path / "other", images, half=False)
    assert not (tmp_path / "other").exists()
