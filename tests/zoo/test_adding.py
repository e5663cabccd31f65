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
from patchcert.evidence import EvidenceFolder, Question
from patchcert.evidence.results import TRIMMED, Circumstances
from patchcert.files import sha256
from patchcert.train.run_folder import Run, trim_run
from patchcert.train.spec import read_spec
from patchcert.zoo import Zoo
from patchcert.zoo.adding import add_run, copy_to_run, entry_name, make_card

NAME = "mnist-mini-2x2-mlp"


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the trained run, to be changed."""
    return Run.open(shutil.copytree(trained, tmp_path / "copy"))


@pytest.fixture
def proven(run, proof_of):
    """The proof of the copy."""
    return proof_of(run)


@pytest.fixture
def write_attack(run, proven):
    """Leaves evidence of an attack in the folder of the copy; attacks of other seeds are other attacks."""

    def write(index, succeeded, seed=0, threat=None, certified_only=False, classifier=None, **facts):
        label = proven.columns["label"][index]
        nothing = np.zeros(len(index), np.int64)
        columns = {
            "index": index,
            "label": label,
            "prediction": proven.columns["prediction"][index],
            "prediction_after": np.where(succeeded, (label + 1) % 10, label),
            "succeeded": succeeded,
            "top": nothing,
            "left": nothing,
            "steps": nothing,
        }
        question = Question(
            "attack",
            threat or proven.threat,
            replace(proven.selection, drawn=None if certified_only else len(index)),
            classifier or {"name": "Model"},
            {"name": "PatchAttack", "restarts": 3, "seed": seed},
            certified_only,
        )
        data = {**proven.meta["data"], **question.to_dict()["data"], "sha256": {}}
        meta = {**proven.meta, **question.to_dict(), "data": data, **facts}
        file = EvidenceFolder(run.path / "evidence").file(question)
        return replace(proven, columns=columns, meta=meta).write(file)

    return write


def test_every_number_of_a_card_is_that_of_the_run(run, proven):
    card, rows = make_card(run), proven.columns
    assert card.name == NAME
    assert card.proof.images == 1000
    assert card.proof.right == np.count_nonzero(rows["label"] == rows["prediction"])
    assert card.proof.certified == np.count_nonzero(rows["certified"])
    assert np.array_equal(card.proof.certified_marks, rows["certified"])
    assert card.proof.classifier == {"name": "IntervalBounds", "dtype": "float32"}
    assert card.proof.evidence == sha256(proven.path)
    assert card.weights_sha256 == sha256(run.weights)
    assert card.data_sha256 == run.environment()["data"]["checksums"]
    assert card.parameters == 28 * 28 * 16 + 16 + 16 * 10 + 10
    assert card.attacks == ()
    assert card.training.run == run.spec.fingerprint(card.data_sha256)
    assert card.training.seconds == round(run.training_seconds, 1) > 0
    assert "the weights of the last of 3 epochs" in card.note
    assert "as it ended" in card.note
    assert card.command == f"patchcert certify zoo:{NAME}"


def test_a_card_may_be_of_any_kind_of_proof(run, proven):
    """Such as one by votes, whose classifier abstains from some images."""
    prediction = np.where(proven.columns["certified"], proven.columns["prediction"], -1)
    columns = {name: proven.columns[name] for name in ("index", "label", "certified")}
    kind = {"name": "Votes", "error_rate": 0.05}
    replace(
        proven, columns={**columns, "prediction": prediction}, meta={**proven.meta, "classifier": kind}
    ).write(proven.path)
    proof = make_card(run).proof
    assert proof.classifier == kind
    assert proof.right == proof.certified == np.count_nonzero(columns["certified"])


def test_the_specification_of_a_card_asks_for_the_same_weights(run, tmp_path):
    file = tmp_path / "spec.toml"
    file.write_text(make_card(run).training.spec)
    assert read_spec(file) == run.spec


def test_weights_chosen_on_held_out_images_are_said_to_be_so(run):
    data = replace(run.spec.data, validation=100)
    chosen = replace(run, spec=replace(run.spec, select="best-validation", data=data))
    assert "best on 100 held-out training images" in make_card(chosen).note


def test_attacks_are_counted_and_their_commands_name_the_zoo(run, proven, write_attack):
    verdict = proven.columns["certified"]
    index = np.arange(40)
    given = "patchcert attack /there/run --restarts 3 --data-dir /there --device cuda --out=x.npz --seed 1"
    write_attack(index, ~verdict[index], seed=1, command=given)
    few = np.flatnonzero(verdict)[:7]
    write_attack(few, np.zeros(7, bool), certified_only=True)
    write_attack(index, np.ones(40, bool), threat=pc.Patch(3))
    write_attack(index, np.ones(40, bool), classifier={"name": "Defended", "defense": "any"})
    first, second = sorted(make_card(run).attacks, key=lambda attack: attack.certified_only)
    assert (first.images, first.withstood) == (40, np.count_nonzero(verdict[:40]))
    assert first.command == f"patchcert attack zoo:{NAME} --restarts 3 --seed 1"
    assert first.settings == {"name": "PatchAttack", "restarts": 3, "seed": 1}
    assert first.certified == np.count_nonzero(verdict[:40])
    assert (second.images, second.withstood, second.certified, second.certified_only) == (7, 7, 7, True)


def test_a_run_whose_proofs_were_broken_is_refused(run, proven, write_attack):
    broken = np.flatnonzero(proven.columns["certified"])[:1]
    write_attack(broken, np.ones(1, bool))
    with pytest.raises(RunError, match=f"image {broken[0]} is certified, but the attack changed"):
        make_card(run)


@pytest.fixture
def collected(run, tmp_path):
    """The folder where results of the copy are collected."""
    return tmp_path / "results" / run.spec.fingerprint(run.environment()["data"]["checksums"])


def test_evidence_that_was_collected_too_counts_once(run, proven, write_attack, collected):
    few = np.flatnonzero(proven.columns["certified"])[:5]
    write_attack(few, np.zeros(5, bool), certified_only=True, seconds=1.0)
    shutil.copytree(run.path / "evidence", collected)
    assert make_card(run, collected.parent) == make_card(run)
    write_attack(few, np.zeros(5, bool), certified_only=True, seconds=2.0)
    assert len(make_card(run, collected.parent).attacks) == 1


def test_evidence_may_lie_in_the_folder_of_results(run, collected):
    expected = make_card(run)
    shutil.move(run.path / "evidence", collected)
    with pytest.raises(RunError, match="no certificates of all test images against Patch") as caught:
        make_card(run)
    assert "--results" in caught.value.hint
    assert make_card(run, collected.parent) == expected


def test_how_many_runs_shared_the_device_is_read_from_collected_results(run, collected):
    collected.mkdir(parents=True)
    assert make_card(run, collected.parent).training.runs_at_once == 1
    (collected / "summary.json").write_text(json.dumps({"jobs": 15}))
    assert make_card(run).training.runs_at_once == 1
    Circumstances(jobs=4).write(run.path)
    assert make_card(run).training.runs_at_once == 4
    assert make_card(run, collected.parent).training.runs_at_once == 15


def test_certificates_of_a_few_images_do_not_count(run, proven):
    columns = {key: column[:10] for key, column in proven.columns.items()}
    meta = {**proven.meta, "data": {**proven.meta["data"], "limit": 10}}
    replace(proven, columns=columns, meta=meta).write(proven.path)
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


def test_new_evidence_of_the_same_weights_updates_the_card(zoo, run, proven, write_attack):
    index = np.arange(5)
    write_attack(index, ~proven.columns["certified"][index])
    assert add_run(zoo, run).status == "updated"
    assert len(zoo.card(NAME).attacks) == 1


def test_runs_on_other_images_are_not_compared(zoo, another, proof_of):
    run = another(0.5)
    rows = proof_of(run)
    data = {**rows.meta["data"], "sha256": {"file": "0" * 64}}
    replace(rows, meta={**rows.meta, "data": data}).write(rows.path)
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
    assert EvidenceFolder(made.path / "evidence").files() == ()
    with pytest.raises(RunError, match="is not empty"):
        copy_to_run(zoo, NAME, tmp_path / "new")


def test_the_card_of_a_trimmed_model_says_how_it_was_made(run, certified, collected, tmp_path):
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
    assert EvidenceFolder(trimmed.path / "evidence").files() == ()
    for folder in (tmp_path / "trimmed", run.path / "new" / ".."):
        with pytest.raises(RunError, match="is not empty"):
            trim_run(run, folder, images, half=False)
    run.weights.unlink()
    with pytest.raises(RunError, match="has not finished training"):
        trim_run(run, tmp_path / "other", images, half=False)
    assert not (tmp_path / "other").exists()
