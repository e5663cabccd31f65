import json
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import patchcert as pc
from patchcert.attacks import AdaptiveAttack, TransferAttack, smoothing_grid, tune_defense
from patchcert.certificates import Certificates
from patchcert.cli.app import run
from patchcert.cli.attack import AttackOptions
from patchcert.cli.options import parse_settings
from patchcert.data import load_dataset
from patchcert.defenses import Defended, DigitalWatermarking, LocalGradientSmoothing
from patchcert.errors import InvalidInput
from patchcert.evidence import Certification, Evidence, EvidenceFolder, Selection, Subject, measuring
from patchcert.evidence.measuring import certificate_columns
from patchcert.files import sha256
from patchcert.models import ModelSpec, build, load, save

QUICK = ["--steps", "4", "--restarts", "2", "--images", "25"]


@pytest.fixture(autouse=True)
def _one_block(monkeypatch):
    """All images are attacked at once, as a call of the library does."""
    monkeypatch.setattr(measuring, "ATTACKED_ON_CPU", 25)


def attack(*arguments):
    return run(["attack", *map(str, arguments), "--device", "cpu"])


@pytest.fixture(scope="module")
def trained_file(tmp_path_factory):
    """A linear classifier of the embedded digits, good enough to be right and weak enough to break."""
    spec = ModelSpec("mlp", 1, 28, 28, hidden=16)
    model = build(spec, torch.Generator().manual_seed(0))
    images = load_dataset("mnist-mini").train.take(2000)
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(60):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(images.floats()), images.labels).backward()
        optimiser.step()
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    save(model, spec, path)
    return path


@pytest.fixture
def run_folder(trained_file, run_of):
    return run_of(trained_file, pc.Patch(2))


def evidence(folder):
    return EvidenceFolder(folder.evidence_folder).all()


def lie(folder):
    """Evidence that every image which the run's model gets right is proven, without margins that would tell."""
    dataset = load_dataset("mnist-mini")
    bounds = pc.IntervalBounds(folder.model(), verdicts_only=True)
    subject = Subject(bounds, sha256(folder.weights), dataset, Selection("mnist-mini"), torch.device("cpu"))
    labels, predictions = dataset.test.labels, bounds.predict(dataset.test.floats())
    claim = Certificates(predictions == labels, predictions, labels)
    work = Certification(subject, pc.Patch(5)).into(EvidenceFolder(folder.evidence_folder))
    columns = certificate_columns(claim, subject.positions())
    subject.evidence(work.question, columns, {}).write(work.file)


def test_the_summary_and_the_rows_are_what_the_library_says(answered, trained_file, tmp_path):
    out = tmp_path / "evidence.npz"
    summary = answered(
        attack(trained_file, "--data", "mnist-mini", "--patch", 3, *QUICK, "--out", out, "--save-images")
    )
    index = Selection("mnist-mini", drawn=25).positions(1000)
    images = load_dataset("mnist-mini").test[index]
    model = load(trained_file)[0]
    choice = pc.PatchAttack(steps=4, step_size=0.05, restarts=2)
    expected = choice.run(
        model, images.floats(), images.labels, pc.Patch(3), torch.Generator().manual_seed(0)
    )
    assert summary["images"] == 25
    assert summary["correct"] > 15
    assert 0 < summary["broken"] == summary["correct"] - summary["withstood"]
    assert summary["attacked_accuracy"] == expected.accuracy
    assert summary["clean_accuracy"] == expected.clean_accuracy
    low, high = summary["attacked_interval"]
    assert low < summary["attacked_accuracy"] < high
    assert summary["weights_sha256"] == sha256(trained_file)
    assert summary["kind"] == "attack"
    assert summary["attack"]["restarts"] == 2
    with np.load(out, allow_pickle=False) as rows:
        assert np.array_equal(rows["index"], index)
        assert np.array_equal(rows["label"], images.labels)
        assert np.array_equal(rows["prediction_after"], expected.predictions)
        assert np.array_equal(rows["succeeded"], expected.succeeded)
        assert np.array_equal(rows["top"], expected.placement[:, 0])
        assert np.array_equal(rows["left"], expected.placement[:, 1])
        meta = json.loads(str(rows["meta"]))
        broken = torch.from_numpy(rows["adversarial"])
        owners = torch.from_numpy(rows["adversarial_row"])
    assert meta["threat"] == pc.Patch(3).to_dict()
    assert len(broken) == summary["broken"]
    assert (model(broken).argmax(dim=1) != images.labels[owners]).all()
    assert pc.Patch(3).contains(images.floats()[owners], broken).all()


def test_a_run_knows_its_data_and_threat_and_keeps_its_evidence(answered, run_folder):
    summary = answered(attack(run_folder.path, *QUICK))
    assert summary["threat"] == pc.Patch(2).to_dict()
    (found,) = evidence(run_folder)
    assert summary["evidence"] == str(found.path)
    assert found.kind == "attack"
    assert "adversarial" not in found.columns
    assert attack(run_folder.path, *QUICK, "--search", "sweep") == 0
    assert attack(run_folder.path, *QUICK, "--defense", "dw", "--setting", "saliency_kind=gradient") == 0
    assert [found.is_undefended for found in evidence(run_folder)].count(True) == 2
    assert len(evidence(run_folder)) == 3


def test_another_question_keeps_the_evidence_of_the_first(run_folder):
    questions = [
        [],
        ["--split", "train"],
        ["--seed", "1"],
        ["--step-size", "0.2"],
        ["--certified-only"],
        ["--certified-only", "--restarts", "1"],
        ["--certified-only", "--split", "train"],
    ]
    for options in questions:
        assert attack(run_folder.path, *QUICK, *options) == 0
        assert attack(run_folder.path, *QUICK, *options) == 0
    for options in (["--limit", "3"], ["--limit", "3", "--seed", "1"]):
        assert attack(run_folder.path, "--steps", "4", "--restarts", "2", *options) == 0
    assert len(evidence(run_folder)) == len(questions) + 2


def test_the_first_images_can_be_asked_for(answered, trained_file, tmp_path):
    out = tmp_path / "rows.npz"
    asked = ("--data", "mnist-mini", "--sparse", 2, *QUICK[:4], "--limit", 6, "--out", out)
    assert answered(attack(trained_file, *asked))["attack"]["kind"] == "SparseAttack"
    with np.load(out, allow_pickle=False) as rows:
        assert rows["index"].tolist() == list(range(6))
        assert (rows["top"] == -1).all()


@pytest.mark.parametrize("adaptive", [False, True])
def test_defended_models_are_attacked_with_and_without_knowing_the_defense(answered, trained_file, adaptive):
    options = ["--defense", "lgs", "--setting", "window=4", "--setting", "overlap=1"]
    options += ["--adaptive"] if adaptive else []
    summary = answered(attack(trained_file, "--data", "mnist-mini", "--patch", 4, *QUICK, *options))
    assert (
        summary["classifier"]["defense"]
        == "LocalGradientSmoothing(window=4, overlap=1, threshold=0.1, smoothing=2.3)"
    )
    model = Defended(LocalGradientSmoothing(4, 1, 0.1, 2.3), load(trained_file)[0])
    images = load_dataset("mnist-mini").test[Selection("mnist-mini", drawn=25).positions(1000)]
    inner = pc.PatchAttack(steps=4, restarts=2)
    whole = AdaptiveAttack(inner) if adaptive else TransferAttack(inner)
    expected = whole.run(model, images.floats(), images.labels, pc.Patch(4), torch.Generator().manual_seed(0))
    assert summary["attacked_accuracy"] == expected.accuracy
    assert summary["attack"]["kind"] == type(whole).__name__


def test_settings_are_tuned_on_training_images(answered, trained_file):
    options = ["--defense", "lgs", "--tune", "20", "--largest-drop", "1", "--images", "5"]
    quick = ("--patch", 4, "--steps", 4, "--restarts", 2)
    tuning = answered(attack(trained_file, "--data", "mnist-mini", *quick, *options))["tuning"]
    assert tuning["images"] == 20
    model, images = load(trained_file)[0], load_dataset("mnist-mini").train[5980:]
    inner = pc.PatchAttack(steps=4, restarts=2)
    result = tune_defense(
        inner, model, images.floats(), images.labels, pc.Patch(4), smoothing_grid(), largest_drop=1
    )
    assert tuning["weak_accuracy"] == max(trial.weak_accuracy for trial in result.trials)


def test_certified_images_withstand_everything(capsys, run_folder):
    options = ["--steps", "5", "--restarts", "1", "--images", "40", "--patch", "1", "--certified-only"]
    assert attack(run_folder.path, *options) == 0
    printed = capsys.readouterr()
    summary = json.loads(printed.out)
    assert summary["withstood"] == summary["images"] > 0
    assert f"all {summary['images']} certified images withstood everything" in printed.err


def test_a_false_proof_is_shouted_about(capsys, run_folder):
    lie(run_folder)
    options = ["--steps", "5", "--restarts", "1", "--images", "8", "--patch", "5", "--certified-only"]
    assert attack(run_folder.path, *options) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["broken"] > 0
    assert "FALSE PROOF" in printed.err
    assert "certifying" not in printed.err


def test_several_targets_are_summed_up_and_each_keeps_its_own_evidence(
    answered, run_folder, trained_file, monkeypatch
):
    options = ["--steps", "5", "--restarts", "1", "--images", "20", "--patch", "1", "--certified-only"]
    words = [str(run_folder.path), str(trained_file), "--data", "mnist-mini", *options]
    monkeypatch.setattr("sys.argv", ["patchcert", "attack", *words])
    summary = answered(attack(*words))
    first, second = summary["targets"]
    assert [first["target"], second["target"]] == [str(run_folder.path), str(trained_file)]
    assert summary["images"] == first["images"] + second["images"] == 2 * first["images"] > 0
    assert summary["withstood"] == summary["images"]
    assert summary["broken"] == 0
    assert first["evidence"] is not None
    assert first["command"].split()[:4] == ["patchcert", "attack", str(run_folder.path), "--data"]


def test_one_false_proof_among_several_targets_is_enough(capsys, run_folder, trained_file):
    lie(run_folder)
    options = ["--steps", "5", "--restarts", "1", "--images", "8", "--patch", "5", "--certified-only"]
    assert attack(run_folder.path, trained_file, "--data", "mnist-mini", *options) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["broken"] > 0
    assert f"certified images of {run_folder.path} were broken" in "".join(printed.err.split("\n"))


def test_several_targets_are_opened_before_any_is_attacked(capsys, run_folder, tmp_path):
    assert attack(run_folder.path, tmp_path / "missing", *QUICK) == 2
    assert evidence(run_folder) == ()
    assert attack(run_folder.path, run_folder.path, *QUICK, "--out", tmp_path / "rows.npz") == 2
    assert "is for one target, not for 2" in " ".join(capsys.readouterr().err.split())


def test_nothing_certified_is_said(capsys, run_folder):
    assert attack(run_folder.path, *QUICK, "--patch", "28", "--certified-only") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["attacked_accuracy"] is None
    assert "none of the images is certified, so nothing was attacked" in printed.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--adaptive"], "--adaptive needs a defense"),
        (["--setting", "window=3"], "--setting and --masks need a defense or a kind of proof"),
        (["--masks", 3], "--setting and --masks need a defense or a kind of proof"),
        (["--tune", "5"], "--tune needs a defense"),
        (["--defense", "lgs", "--tune", "5", "--setting", "window=3"], "--tune chooses what --setting sets"),
        (["--defense", "lgs", "--tune", "7000"], "--tune 7000: mnist-mini has 6000 training images"),
        (["--defense", "magic"], "--defense magic is unknown"),
        (["--defense", "lgs", "--setting", "size=3"], "lgs has no setting 'size'"),
        (["--defense", "lgs", "--setting", "window=big"], "--setting window=big is not a number"),
        (["--defense", "lgs", "--certified-only"], "is about the model itself"),
        (["--certified-only", "--loss", "margin"], "tries every placement with every loss"),
        (["--restarts", "0"], "restarts is 0; expected a whole number of at least 1"),
        (["--steps", "-1"], "steps is -1; expected a whole number of at least 0"),
        (["--loss", "hinge"], "unknown loss 'hinge'"),
        (["--search", "grid"], "unknown search 'grid'"),
        (["--out", "rows.txt"], "--out rows.txt is no name of an evidence file"),
        (["--limit", "3"], "--images draws at random, --limit takes the first"),
    ],
)
def test_mistakes_are_named(capsys, trained_file, options, message):
    assert attack(trained_file, "--data", "mnist-mini", "--patch", 2, "--images", 2, *options) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in " ".join(printed.err.split())


def test_sparse_attacks_have_no_search_and_no_defense(refused, trained_file):
    common = [trained_file, "--data", "mnist-mini", "--sparse", 2, "--images", 2]
    assert "--search is about patches" in refused(attack(*common, "--search", "sweep"))
    assert "--defense lgs is for patches" in refused(attack(*common, "--defense", "lgs"))


def test_imagenet_targets_name_what_is_missing(capsys, tmp_path):
    assert attack("imagenet:resnet50", "--patch", 42, "--data-dir", tmp_path) == 2
    assert "no ImageNet folder with labels.csv found" in capsys.readouterr().err
    (tmp_path / "imagenet").mkdir()
    (tmp_path / "imagenet" / "labels.csv").write_text("file,label\n")
    assert attack("imagenet:vgg19", "--patch", 42, "--data-dir", tmp_path) == 2
    assert "no ImageNet network is called 'vgg19'" in capsys.readouterr().err
    save_file({"strange": torch.zeros(1)}, tmp_path / "imagenet" / "resnet50.safetensors")
    assert attack("imagenet:resnet50", "--patch", 42, "--data-dir", tmp_path) == 2
    assert "does not hold a resnet50" in capsys.readouterr().err


def test_settings_are_read_as_the_defense_takes_them():
    parsed = parse_settings(
        "dw", DigitalWatermarking, ["window=7", "quantile=0.9", "saliency_kind=gradient", "fill=0.1,0.2,0.3"]
    )
    assert parsed == {"window": 7, "quantile": 0.9, "saliency_kind": "gradient", "fill": (0.1, 0.2, 0.3)}
    assert parse_settings("dw", DigitalWatermarking, ["fill=ring"]) == {"fill": "ring"}
    assert parse_settings("interval", pc.IntervalBounds, ["dtype=float64"]) == {"dtype": torch.float64}
    with pytest.raises(InvalidInput, match="--setting dtype half is unknown"):
        parse_settings("interval", pc.IntervalBounds, ["dtype=half"])
    with pytest.raises(InvalidInput, match="dw has no setting 'model'"):
        parse_settings("dw", DigitalWatermarking, ["model=x"])


def test_defaults_depend_on_threat_and_images():
    asked = AttackOptions(
        given={"steps": 150},
        search=None,
        universal=None,
        transform=(),
        method=None,
        defense="none",
        settings=(),
        adaptive=False,
        tune=None,
        largest_drop=0.02,
        certified_only=False,
        seed=0,
        save_images=False,
        device=torch.device("cpu"),
        out=None,
    )
    patch, sparse = asked.build(pc.Patch(5), False), asked.build(pc.SparsePixels(4), False)
    corners = asked.build(pc.Patch(42, placements="corners"), True)
    assert patch == pc.PatchAttack(batch_size=512)
    assert sparse == pc.SparseAttack(steps=150, batch_size=512)
    assert corners.describe()["restarts"] == 4


def test_an_interrupted_attack_says_what_it_keeps_and_resumes(capsys, trained_file, tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "ATTACKED_ON_CPU", 10)

    @contextmanager
    def interrupting(label, unit):
        def report(done, total):
            if done > 20:
                raise KeyboardInterrupt

        yield report

    command = (trained_file, "--data", "mnist-mini", "--patch", 3, *QUICK)
    whole = tmp_path / "whole.npz"
    assert attack(*command, "--out", whole) == 0
    with monkeypatch.context() as interrupted:
        interrupted.setattr("patchcert.cli.measuring.progress_bar", interrupting)
        assert attack(*command) == 130
        assert "nothing is kept: that needs --out or a run folder" in capsys.readouterr().err
        assert attack(*command, "--out", tmp_path / "part.npz") == 130
        shown = capsys.readouterr().err
        assert "20 of 25 images are kept: the same command resumes from there" in shown
    assert attack(*command, "--out", tmp_path / "part.npz") == 0
    shown = capsys.readouterr()
    assert "resuming after 20 images that were done before" in shown.err
    assert "withstood the attack" in shown.err.splitlines()[-1]
    rows, expected = np.load(tmp_path / "part.npz"), np.load(whole)
    assert all(np.array_equal(rows[name], expected[name]) for name in expected.files if name != "meta")


def test_several_patches_are_certified_and_attacked_at_once(trained_file, tmp_path, answered, refused):
    one = [trained_file, "--data", "mnist-mini", "--patch", "2", "--placements", "corners"]
    file = tmp_path / "rows.npz"
    two = answered(attack(*one, *QUICK, "--patches", "2", "--search", "sweep", "--out", file))
    assert two["threat"] == {"kind": "patches", "stamp": "2x2", "placements": "corners", "count": 2}
    assert two["attack"]["kind"] == "PatchesInTurn"
    assert two["attack"]["attack"]["search"] == "sweep"
    proven = answered(run(["certify", *map(str, one), "--patches", "2", "--limit", "25", "--device", "cpu"]))
    assert proven["threat"]["count"] == 2
    assert "is not a whole number of at least 2" in refused(attack(*one, *QUICK, "--patches", "1"))


def test_one_patch_is_learned_on_training_images_and_tried_on_test_images(trained_file, answered, tmp_path):
    one, file = [trained_file, "--data", "mnist-mini", "--patch", "6"], tmp_path / "rows.npz"
    options = ["--universal", "100", "--transform", "rotation=10", "--transform", "shift=1"]
    said = answered(attack(*one, *QUICK, *options, "--save-images", "--out", file))
    assert said["attack"]["kind"] == "UniversalAttack"
    assert said["attack"]["learned_on"] == 100
    assert said["attack"]["transform"] == "Transform(rotation=10.0, scale=0.0, brightness=0.0, shift=1)"
    assert said["images"] == 25
    assert Evidence.read(file).meta["attack"] == said["attack"]


def test_patches_for_transforms_are_attacked_with_too(trained_file, answered):
    one = [trained_file, "--data", "mnist-mini", "--patch", "6"]
    found = answered(attack(*one, *QUICK, "--transform", "brightness=0.2", "--certified-only"))
    assert found["attack"]["kind"] == "TransformedAttack"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--universal", 10, "--search", "sweep"), "--universal goes to random placements"),
        (("--transform", "shift=1", "--search", "sweep"), "--transform goes to random placements"),
        (("--transform", "blur=1"), "--transform blur=1: a transform has no setting 'blur'"),
        (("--transform", "shift=much"), "--transform shift=much is not a number"),
        (("--transform", "scale=2"), "scale of a transform is 2.0"),
        (("--universal", 10, "--patches", 2), "are about one patch, not Patches"),
        (("--universal", 10, "--split", "train"), "--split train has them too"),
        (("--universal", 10**6), "--universal 1000000: mnist-mini has 6000 training images"),
    ],
)
def test_mistakes_about_printed_patches_are_said(trained_file, options, message, refused):
    assert message in refused(attack(trained_file, "--data", "mnist-mini", "--patch", "2", *QUICK, *options))


def test_masks_are_those_of_the_attacked_classifier(trained_file, answered):
    common = (trained_file, "--data", "mnist-mini", "--patch", 2, "--method", "masking")
    quick = ("--steps", 2, "--restarts", 1, "--images", 3)
    found = answered(attack(*common, *quick, "--masks", 3))
    assert found["classifier"]["masks"] == 3
    assert answered(attack(*common, *quick, "--setting", "masks=3"))["classifier"] == found["classifier"]
