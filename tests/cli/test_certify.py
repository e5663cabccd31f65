import json
import subprocess
import sys

import numpy as np
import pytest
import torch

import patchcert as pc
from patchcert.certificates import IntervalBounds
from patchcert.certificates.refinement import Limits
from patchcert.cli.app import run
from patchcert.data import load_dataset
from patchcert.errors import RunError
from patchcert.evidence import Evidence, EvidenceFolder, measuring
from patchcert.files import sha256
from patchcert.models import ModelSpec, build, load, save


def certify(*arguments):
    return run(["certify", *map(str, arguments), "--device", "cpu"])


def test_the_summary_is_what_the_library_says(answered, model_file, tmp_path):
    out = tmp_path / "evidence.npz"
    summary = answered(
        certify(model_file, "--data", "mnist-mini", "--patch", "2x3", "--limit", 30, "--out", out)
    )
    images = load_dataset("mnist-mini").test.take(30)
    expected = pc.certify(load(model_file)[0], images.floats(), images.labels, pc.Patch((2, 3)))
    assert summary["images"] == 30
    assert summary["correct"] == int((expected.predictions == images.labels).sum())
    assert summary["certified"] == int(expected.certified.sum())
    assert summary["clean_accuracy"] == expected.clean_accuracy
    low, high = summary["clean_interval"]
    assert low < summary["clean_accuracy"] < high
    assert summary["threat"] == pc.Patch((2, 3)).to_dict()
    assert summary["weights_sha256"] == sha256(model_file)
    assert summary["versions"]["patchcert"] == pc.__version__
    assert summary["evidence"] == str(out)


def test_evidence_names_the_weights_that_were_read_even_if_the_file_is_replaced(
    answered, model_file, monkeypatch
):
    expected, honest = sha256(model_file), IntervalBounds.certify

    def replacing(*arguments):
        model_file.write_bytes(b"newer weights")
        return honest(*arguments)

    monkeypatch.setattr(IntervalBounds, "certify", replacing)
    found = answered(certify(model_file, "--data", "mnist-mini", "--patch", 2, "--limit", 3))
    assert model_file.read_bytes() == b"newer weights"
    assert found["weights_sha256"] == expected


def test_an_interrupted_command_resumes_when_it_is_given_again(capsys, model_file, tmp_path, monkeypatch):
    asked = (model_file, "--data", "mnist-mini", "--patch", 2, "--limit", 20, "--out")
    assert certify(*asked, tmp_path / "whole.npz") == 0
    monkeypatch.setattr(measuring, "FIRST_BLOCK", 8)
    with monkeypatch.context() as patched:
        patched.setattr(measuring, "_next_size", interrupt)
        assert certify(*asked, tmp_path / "parts.npz") == 130
    assert "8 of 20 images are kept: the same command resumes from there" in capsys.readouterr().err
    assert not (tmp_path / "parts.npz").exists()
    assert certify(*asked, tmp_path / "parts.npz") == 0
    captured = capsys.readouterr()
    assert "resuming after 8 images" in captured.err
    whole, parts = (np.load(tmp_path / f"{name}.npz") for name in ("whole", "parts"))
    assert all(np.array_equal(whole[name], parts[name]) for name in whole.files if name != "meta")
    assert {file.name for file in tmp_path.glob("*.npz*")} == {"whole.npz", "parts.npz"}


def test_what_an_interruption_has_kept_is_not_lost_to_other_settings(
    answered, refused, model_file, tmp_path, monkeypatch
):
    asked = (model_file, "--data", "mnist-mini", "--patch", 2, "--limit", 6, "--method", "masking")
    out = ("--out", tmp_path / "parts.npz")
    monkeypatch.setattr(pc.DoubleMasking, "images_per_block", lambda *_: 2)
    with monkeypatch.context() as patched:
        patched.setattr(measuring, "_shifted", lambda _, start, total: interrupt() if start == 4 else None)
        assert certify(*asked, "--masks", 3, *out) == 130
    for other in (("--masks", 4), ("--masks", 3, "--limit", 5), ("--masks", 3, "--setting", "fill=0")):
        said = refused(certify(*asked, *other, *out))
        assert "parts.npz.partial holds what is done of other work, which was interrupted" in said
        assert "name another file, give the command of that work again, or delete it first" in said
    assert certify(*asked, "--masks", 3, *out) == 0
    assert [file.name for file in tmp_path.glob("*.npz*")] == ["parts.npz"]


def test_an_interruption_without_a_file_says_that_nothing_is_kept(capsys, model_file, monkeypatch):
    monkeypatch.setattr(measuring, "_next_size", interrupt)
    assert certify(model_file, "--data", "mnist-mini", "--patch", 2, "--limit", 20) == 130
    assert "nothing is kept: that needs --out" in capsys.readouterr().err


def interrupt(*_):
    raise KeyboardInterrupt


def test_evidence_has_one_row_per_image(model_file, tmp_path):
    out = tmp_path / "evidence.npz"
    assert certify(model_file, "--data", "mnist-mini", "--patch", 3, "--limit", 12, "--out", out) == 0
    images = load_dataset("mnist-mini").test.take(12)
    expected = pc.certify(load(model_file)[0], images.floats(), images.labels, pc.Patch(3))
    found = Evidence.read(out)
    rows = found.columns
    assert found.threat == pc.Patch(3)
    assert rows["index"].tolist() == list(range(12))
    assert np.array_equal(rows["label"], images.labels)
    assert np.array_equal(rows["prediction"], expected.predictions)
    assert np.array_equal(rows["certified"], expected.certified)
    assert np.array_equal(rows["worst_top"], expected.worst_placement[:, 0])
    assert np.array_equal(rows["worst_left"], expected.worst_placement[:, 1])
    others = expected.margins.scatter(1, images.labels[:, None], torch.inf)
    assert np.array_equal(rows["margin"], others.amin(dim=1))


def test_an_easy_model_is_certified(answered, tmp_path):
    """All weights zero but one bias: the answer is always 7, whatever the patch does."""
    spec = ModelSpec("mlp", 1, 28, 28, hidden=2)
    model = build(spec)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    model.logits.bias.data[7] = 1.0
    save(model, spec, tmp_path / "seven.safetensors")
    for threat in (
        ["--patch", "9x9"],
        ["--shape", "diamond:25"],
        ["--sparse", 4],
        ["--patch", "5", "--placements", "corners"],
    ):
        summary = answered(certify(tmp_path / "seven.safetensors", "--data", "mnist-mini", *threat))
        assert summary["certified"] == summary["correct"] == 100
        assert summary["images"] == 1000


def test_the_other_settings_are_passed_on(answered, model_file):
    common = (model_file, "--data", "mnist-mini", "--patch", "2", "--limit", 5, "--split", "train")
    settings = ("--dtype", "float64", "--memory-budget", "50MB", "--placements", "0,0;3,4")
    summary = answered(certify(*common, *settings))
    assert summary["classifier"] == {
        "name": "IntervalBounds",
        "dtype": "float64",
        "memory_budget": 50_000_000,
    }
    assert summary["data"]["split"] == "train"
    assert summary["evidence"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "mnist-mini"], "no threat is given"),
        (["--data", "mnist-mini", "--patch", "5x5", "--sparse", "4"], "name two threats"),
        (["--data", "mnist-mini", "--patch", "40x40"], "40x40"),
        (["--patch", "5x5"], "does not say which images it is for"),
        (["--patch", "5x5", "--data", "mnist"], "the files of mnist are not there"),
        (["--patch", "5x5", "--data", "mnist-mini", "--split", "dev"], "no split named 'dev'"),
        (["--patch", "5x5", "--data", "mnist-mini", "--dtype", "half"], "--dtype half is unknown"),
        (
            ["--patch", "5x5", "--data", "mnist-mini", "--out", "evidence.csv"],
            "is no name of an evidence file",
        ),
        (["--patch", "5x5", "--data", "mnist-mini", "--memory-budget", "lots"], "is not a size in bytes"),
        (
            ["--patch", "5x5", "--data", "mnist-mini", "--memory-budget", "2"],
            "2 is 2 bytes, too few to work in",
        ),
    ],
)
def test_mistakes_get_one_message_and_exit_code_2(capsys, model_file, arguments, message):
    assert certify(model_file, *arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err
    assert shown.err.startswith("error: ") or "\nerror: " in shown.err


def test_images_of_another_size_are_refused(capsys, tmp_path):
    spec = ModelSpec("mlp", 3, 32, 32, hidden=2)
    save(build(spec), spec, tmp_path / "model.safetensors")
    assert certify(tmp_path / "model.safetensors", "--patch", "2", "--data", "mnist-mini") == 2
    assert (
        "is for 3x32x32 images of 10 classes, but those of mnist-mini are 1x28x28" in capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ["absent.safetensors", "absent"])
def test_a_missing_target_is_named(refused, tmp_path, name):
    assert f"there is no {tmp_path / name}" in refused(certify(tmp_path / name, "--patch", "2"))


def test_a_model_of_the_zoo_is_pointed_to(capsys, tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    assert "the model of the zoo is zoo:mnist-5x5-cnn2" in refused(run(["certify", "mnist-5x5-cnn2"]))
    assert run(["trim", "zoo:mnist-5x5-cnn2", "--out", str(tmp_path / "trimmed")]) == 2
    assert "patchcert zoo copy mnist-5x5-cnn2 --out runs/mnist-5x5-cnn2" in capsys.readouterr().err


@pytest.fixture
def run_folder(model_file, run_of):
    return run_of(model_file, pc.Patch(3))


def test_a_run_knows_its_data_and_threat_and_keeps_its_evidence(answered, run_folder):
    summary = answered(certify(run_folder.path, "--limit", 8))
    assert summary["threat"] == pc.Patch(3).to_dict()
    assert summary["data"]["name"] == "mnist-mini"
    (found,) = EvidenceFolder(run_folder.evidence_folder).all()
    assert summary["evidence"] == str(found.path)
    assert found.total == 8
    assert found.threat == pc.Patch(3)


def test_a_method_and_its_settings_can_be_chosen(answered, refused, tmp_path):
    spec = ModelSpec("cnn2_ablation", 1, 28, 28, hidden=4)
    save(build(spec, torch.Generator().manual_seed(0)), spec, tmp_path / "votes.safetensors")
    settings = ["retained=60", "selection_samples=5", "estimation_samples=20", "batch_size=25"]
    words = [word for setting in settings for word in ("--setting", setting)]
    asked = (tmp_path / "votes.safetensors", "--data", "mnist-mini", "--sparse", 1, "--limit", 3)
    summary = answered(certify(*asked, "--method", "ablation", *words))
    assert summary["classifier"]["name"] == "RandomAblation"
    assert summary["classifier"]["retained"] == 60
    assert summary["guarantee"] == {"promise": "recovery", "confidence": 0.95}
    for options, message in (
        (["--method", "magic"], "--method magic is unknown"),
        (
            ["--method", "ablation", "--dtype", "float64"],
            "--dtype is a setting of interval bounds, not of ablation",
        ),
        (["--method", "ablation", "--setting", "size=3"], "ablation has no setting 'size'"),
        (["--setting", "retained=3"], "interval has no setting 'retained'"),
    ):
        assert message in refused(certify(*asked, *options))


def test_different_questions_to_a_run_are_kept_apart(run_folder, tmp_path):
    for name, drawing in (("angle", "#.\n##"), ("corner", "##\n#.")):
        (tmp_path / name).write_text(drawing)
    questions = [
        [],
        ["--patch", "2"],
        ["--placements", "corners"],
        ["--dtype", "float64"],
        ["--split", "train"],
        ["--shape", str(tmp_path / "angle")],
        ["--shape", str(tmp_path / "corner")],
        ["--placements", "0,0;0,1;0,2;0,3"],
        ["--placements", "0,0;0,1;0,2;0,4"],
    ]
    for question in questions * 2:
        assert certify(run_folder.path, "--limit", 2, *question) == 0
    assert len(EvidenceFolder(run_folder.evidence_folder).files()) == len(questions)


def test_an_unfinished_run_is_refused(refused, run_folder):
    run_folder.weights.unlink()
    assert "has not finished training" in refused(certify(run_folder.path))


def test_a_proof_by_masks_goes_through_the_same_command(answered, model_file, tmp_path):
    out = tmp_path / "evidence.npz"
    common = (model_file, "--data", "mnist-mini", "--patch", 2, "--limit", 8)
    summary = answered(
        certify(*common, "--method", "masking", "--masks", 3, "--setting", "fill=0.2", "--out", out)
    )
    images = load_dataset("mnist-mini").test.take(8)
    masking = pc.DoubleMasking(load(model_file)[0], pc.Patch(2), masks=3, fill=0.2)
    expected = masking.certify(images.floats(), images.labels, pc.Patch(2))
    assert summary["certified"] == int(expected.certified.sum())
    assert summary["correct"] == int((expected.predictions == images.labels).sum())
    assert summary["classifier"] == masking.describe()
    stored = Evidence.read(out)
    assert stored.columns["lead"].tolist() == expected.lead.tolist()
    assert stored.columns["first_mask"].tolist() == expected.weakest_masks[:, 0].tolist()
    found = answered(
        certify(*common, "--method", "detection", "--masks", "3,2", "--setting", "mirrored=true")
    )
    assert found["guarantee"]["promise"] == "detection"


def test_evidence_by_masks_that_contradicts_itself_is_refused(model_file, tmp_path):
    out = tmp_path / "evidence.npz"
    common = (model_file, "--data", "mnist-mini", "--patch", 2, "--limit", 8, "--out", out)
    assert certify(*common, "--method", "masking", "--masks", 3) == 0
    stored = Evidence.read(out)
    forged = {**stored.columns, "certified": stored.columns["label"] == stored.columns["prediction"]}
    forged["lead"] = np.full(8, -0.5, np.float32)
    with pytest.raises(RunError, match="certified with a lead of -0.5"):
        Evidence(forged, stored.meta).check()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--masks", 0), "masks is 0"),
        (("--masks", 1), "hides the whole image"),
        (("--masks", "six"), "--masks six is neither one whole number of masks nor two"),
        (("--masks", "6,"), "write K for K x K masks, like 6, or ROWS,COLUMNS, like 6,4."),
        (("--masks", "6,4,2"), "--masks 6,4,2 is neither"),
        (("--masks", "2.5"), "--masks 2.5 is neither"),
        (("--setting", "masks=six"), "--setting masks=six is not a number"),
        (
            ("--masks", 3, "--method", "interval"),
            "masks are a setting of masking and detection, not of interval",
        ),
        (("--setting", "fill=0.1,0.2"), "fill has 2 values"),
        (("--setting", "mirrored=maybe"), "neither true nor false"),
        (("--patches", 2, "--masks", 20), "forward pass per image"),
        (("--sparse", 4), "masks hide patches"),
        (("--patch", 29), "does not fit"),
    ],
)
def test_mistakes_with_masks_are_one_message_and_leave_nothing(
    refused, model_file, tmp_path, arguments, message
):
    threat = () if "--sparse" in arguments or "--patch" in arguments else ("--patch", 2)
    out = tmp_path / "evidence.npz"
    common = ("--data", "mnist-mini", "--limit", 3, "--method", "masking", "--out", out)
    assert message in refused(certify(model_file, *threat, *common, *arguments))
    assert not list(tmp_path.glob("*.npz*"))


@pytest.mark.slow
def test_processes_share_the_images_and_come_to_the_same_verdicts(model_file, tmp_path):
    asked = ["-m", "patchcert", "certify", str(model_file), "--data", "mnist-mini", "--patch", "2"]
    common = [*asked, *["--limit", "99", "--method", "masking", "--masks", "4", "--device", "cpu", "--out"]]
    starter = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    shared = subprocess.run(
        [*starter, *common, str(tmp_path / "two.npz")], capture_output=True, text=True, check=False
    )
    assert shared.returncode == 0, shared.stderr
    assert json.loads(shared.stdout)["images"] == 99
    subprocess.run([sys.executable, *common, str(tmp_path / "one.npz")], capture_output=True, check=True)
    two, one = Evidence.read(tmp_path / "two.npz"), Evidence.read(tmp_path / "one.npz")
    assert two.columns.keys() == one.columns.keys()
    assert all(np.array_equal(two.columns[name], one.columns[name]) for name in one.columns)
    assert sorted(file.name for file in tmp_path.glob("*.npz*")) == ["one.npz", "two.npz"]


def test_refinement_counts_proven_broken_and_open_images(answered, tmp_path):
    out = tmp_path / "refined.npz"
    asked = ("zoo:mnist-5x5-cnn2", "--data", "mnist-mini", "--limit", 9, "--refine", "split", "--out", out)
    summary = answered(certify(*asked, "--setting", "budget=50"))
    assert summary["certified"] + summary["broken"] + summary["open"] == summary["correct"]
    assert summary["broken"] > 0
    assert summary["classifier"]["refine"] == "split"
    assert summary["classifier"]["budget"] == 50
    assert summary["refinement"] == {"by_interval": [], "unsplit": []}
    found = Evidence.read(out)
    model, digits = pc.load("mnist-5x5-cnn2"), load_dataset("mnist-mini").test
    assert len(found.adversarial()) == found.broken == summary["broken"]
    for index, image in found.adversarial().items():
        changed = torch.from_numpy(image)[None]
        assert pc.Patch(5).contains(digits.take(9).floats()[index : index + 1], changed).all()
        assert model(changed).argmax() != digits.labels[index]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--refine", "exact"), "refine is 'exact'; expected 'linear', 'split' or None"),
        (("--refine", "linear", "--setting", "budget=5"), "budget is a setting of refine='split'"),
        (("--refine", "linear", "--sparse", 1), "linear bounds exist for one patch"),
        (("--refine", "linear", "--method", "ablation", "--setting", "retained=3"), "--refine is a setting"),
    ],
)
def test_refinements_that_mean_nothing_are_mistakes(refused, model_file, words, message):
    threat = () if "--sparse" in words else ("--patch", 2)
    assert message in refused(certify(model_file, "--data", "mnist-mini", "--limit", 2, *threat, *words))


def test_layers_that_stop_the_refinement_are_named(capsys, model_file, monkeypatch):
    monkeypatch.setattr(IntervalBounds, "limits", lambda *_: Limits(("tanh",), ("tanh", "pool")))
    assert certify(model_file, "--data", "mnist-mini", "--patch", 2, "--limit", 2, "--refine", "split") == 0
    shown = capsys.readouterr()
    assert "without a linear rule, bounded by intervals: tanh" in shown.err
    assert "no branch and bound: tanh, pool bend otherwise than a ReLU" in shown.err
    assert json.loads(shown.out)["refinement"] == {"by_interval": ["tanh"], "unsplit": ["tanh", "pool"]}


def test_where_little_is_proven_the_reasons_and_the_next_steps_are_told(capsys):
    assert certify("zoo:mnist-2x2-mlp", "--data", "mnist-mini", "--patch", 14, "--limit", 8) == 0
    told = capsys.readouterr().err
    assert "little is proven: 0 of 8 right images, by interval bounds" in told
    assert "  before 'relu1': 100% reached" in told
    assert "  bounds stay wide from here on: the logits" in told
    assert "patchcert.worst_case_margins" in told
    assert "--method masking" in told
    assert certify("zoo:mnist-2x2-cnn2", "--data", "mnist-mini", "--sparse", 200, "--limit", 8) == 0
    assert "--method ablation" in capsys.readouterr().err


def test_the_next_steps_are_commands_that_run(capsys, model_file, tmp_path, monkeypatch):
    out, shared = tmp_path / "kept.npz", ("--data", "mnist-mini", "--patch", "14", "--limit", "8")
    of_intervals = (
        "--dtype=float64",
        "--method",
        "interval",
        "--memory-budget",
        "1GiB",
        "--setting",
        "budget=9",
    )
    asked = (str(model_file), *of_intervals, *shared, "--refine", "split", "--out", str(out))
    monkeypatch.setattr(sys, "argv", ["patchcert", "certify", *asked])
    assert certify(*asked) == 0
    told = capsys.readouterr().err
    command = f"patchcert certify {model_file} {' '.join(shared)} --method masking"
    assert f"prove the model by masks: {command}\n" in told
    assert certify(model_file, *shared, "--method", "masking") == 0


def test_where_nothing_is_right_behind_masks_weights_are_asked_about_first(capsys, model_file):
    shared = (model_file, "--data", "mnist-mini", "--limit", 1, "--patch", 2)
    assert certify(*shared, "--method", "masking", "--setting", "fill=100") == 0
    told = capsys.readouterr().err
    assert "nothing is proven, because nothing is right: do weights, --normalise and classes fit" in told
    assert "  if they do: DoubleMasking shows the model parts of images" in told
    assert "little is proven" not in told


def test_where_masks_prove_little_it_is_told(capsys):
    shared = ("zoo:mnist-2x2-cnn2", "--data", "mnist-mini", "--limit", 5)
    assert certify(*shared, "--patches", 2, "--method", "masking") == 0
    assert (
        "right images, by DoubleMasking: models are seldom proven unless trained for it"
        in capsys.readouterr().err
    )


def test_where_nothing_is_right_it_is_asked_whether_the_weights_fit_the_data(capsys, model_file):
    few = load_dataset("mnist-mini").test.take(100)
    model, _ = load(model_file)
    wrong = int((model(few.floats()).argmax(dim=1) != few.labels).nonzero()[0])
    assert wrong == 0
    assert certify(model_file, "--data", "mnist-mini", "--patch", 2, "--limit", 1) == 0
    assert "nothing is proven, because nothing is right" in capsys.readouterr().err


def test_where_much_is_proven_nothing_is_explained(capsys):
    assert certify("zoo:mnist-2x2-mlp", "--data", "mnist-mini", "--limit", 8) == 0
    assert "little is proven" not in capsys.readouterr().err


def test_of_many_layers_a_few_are_told():
    from patchcert.certificates.explaining import Width
    from patchcert.cli.certify import SHOWN, _some

    found = [Width(str(number), 1.0, 1.0, 1.0) for number in range(50)]
    chosen = _some(found)
    assert len(chosen) == SHOWN
    assert (chosen[0], chosen[-1]) == (found[0], found[-1])
    assert _some(found[:3]) == found[:3]


def test_other_evidence_is_not_overwritten(answered, refused, model_file, tmp_path):
    asked = (model_file, "--data", "mnist-mini", "--patch", "2", "--out", tmp_path / "kept.npz")
    answered(certify(*asked, "--limit", 3))
    answered(certify(*asked, "--limit", 3))
    said = refused(certify(*asked, "--limit", 2))
    assert "kept.npz holds other evidence, certify" in said
    assert "name another file" in said
    (tmp_path / "kept.npz").write_bytes(b"something of mine")
    assert "kept.npz holds no evidence" in refused(certify(*asked, "--limit", 2))
    assert (tmp_path / "kept.npz").read_bytes() == b"something of mine"


def test_evidence_of_weights_that_a_run_no_longer_has_is_replaced(answered, run_folder):
    first = build(run_folder.spec.model.for_images((1, 28, 28), 10), torch.Generator().manual_seed(1))
    second = build(run_folder.spec.model.for_images((1, 28, 28), 10), torch.Generator().manual_seed(2))
    weights = []
    for model in (first, second):
        save(model, run_folder.spec.model.for_images((1, 28, 28), 10), run_folder.weights)
        answered(certify(run_folder.path, "--data", "mnist-mini", "--limit", 2))
        (file,) = run_folder.evidence_folder.glob("*.npz")
        weights.append(Evidence.read(file).weights)
    assert weights[0] != weights[1] == sha256(run_folder.weights)
