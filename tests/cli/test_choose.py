import pytest

from patchcert.cli.app import run
from patchcert.evidence import EvidenceFolder
from patchcert.train.run_folder import Run

TRIALS = """
spec = "masked-mnist-5x5"
method = "masking"
settings = ["masks=3,2"]
held_out = 500
images = 20
set = ["data.name=mnist-mini", "data.limit=400", "schedule.epochs=1", "model.filters=2", "strategy.worst_of=1"]
[[trials]]
name = "base"
[[trials]]
name = "clean"
set = ["strategy.clean_share=0.5"]
"""


@pytest.fixture
def trials(tmp_path):
    file = tmp_path / "trials.toml"
    file.write_text(TRIALS)
    return file


def choose(trials, out, *more):
    return run(["choose", str(trials), "--out", str(out), "--device", "cpu", *more])


def test_trials_are_ranked_by_proofs_of_images_that_they_were_not_trained_on(answered, trials, tmp_path):
    out = tmp_path / "runs"
    assert [row["trial"] for row in answered(choose(trials, out, "--only", "clean"))["trials"]] == ["clean"]
    ranked = answered(choose(trials, out))["trials"]
    assert {row["trial"] for row in ranked} == {"base", "clean"}
    assert ranked[0]["certified"] >= ranked[1]["certified"]
    run_of_trial = Run.open(out / "base")
    assert run_of_trial.spec.data.validation == 500
    (evidence,) = EvidenceFolder(run_of_trial.evidence_folder).all()
    assert evidence.selection.split == "validation:500"
    assert evidence.total == 20
    assert evidence.meta["classifier"]["masks"] == [3, 2]
    assert evidence.question.threat == run_of_trial.spec.threat


def test_what_is_done_is_not_done_again(capsys, trials, tmp_path, answered):
    out = tmp_path / "runs"
    assert choose(trials, out, "--only", "base") == 0
    before = {
        file: file.stat().st_mtime_ns for file in out.rglob("*") if file.suffix in (".npz", ".safetensors")
    }
    assert choose(trials, out, "--only", "base") == 0
    assert before == {file: file.stat().st_mtime_ns for file in before}
    capsys.readouterr()
    (out / "base" / "weights.safetensors").unlink()
    assert [row["trial"] for row in answered(choose(trials, out, "--rank-only"))["trials"]] == ["base"]


def test_trials_of_several_seeds_are_ranked_by_their_mean(answered, refused, trials, tmp_path):
    trials.write_text("seeds = [1, 2]\n" + TRIALS.replace("data.limit=400", "data.limit=64"))
    out = tmp_path / "runs"
    (row,) = answered(choose(trials, out, "--only", "base"))["trials"]
    assert [each["seed"] for each in row["seeds"]] == [1, 2]
    assert row["certified"] == sum(each["certified"] for each in row["seeds"]) / 2
    assert row["correct"] == sum(each["correct"] for each in row["seeds"]) / 2
    assert [Run.open(out / "base" / f"seed-{seed}").spec.seed for seed in (1, 2)] == [1, 2]
    assert row["seeds"][0]["fingerprint"] != row["seeds"][1]["fingerprint"]
    trials.write_text("seeds = [1, 1]\n" + TRIALS)
    assert "expected each of them once" in refused(choose(trials, out))


def test_a_trial_may_have_settings_of_its_proof_beside_those_of_all(answered, trials, tmp_path):
    trials.write_text(TRIALS + 'settings = ["mirrored=true", "slack=0.25"]\n')
    ranked = answered(choose(trials, tmp_path / "runs"))["trials"]
    shown = {row["trial"]: row["set"] for row in ranked}
    assert shown == {"base": [], "clean": ["strategy.clean_share=0.5", "mirrored=true", "slack=0.25"]}
    (proof,) = EvidenceFolder(Run.open(tmp_path / "runs" / "clean").evidence_folder).all()
    assert proof.meta["classifier"]["mirrored"] is True
    assert proof.meta["classifier"]["masks"] == [3, 2]


def test_mistakes_are_named(refused, trials, tmp_path):
    assert "--only bsae is no trial" in refused(choose(trials, tmp_path / "runs", "--only", "bsae"))
    trials.write_text(TRIALS.replace('name = "clean"', 'name = "base"'))
    assert "each of a name of its own" in refused(choose(trials, tmp_path / "runs"))
    for name in ("../clean", "", ".."):
        trials.write_text(TRIALS.replace('name = "clean"', f'name = "{name}"'))
        assert "expected a name that a folder can have" in refused(choose(trials, tmp_path / "runs"))
    trials.write_text(TRIALS.replace("images = 20", "images = 501"))
    assert "expected 1 to held_out = 500" in refused(choose(trials, tmp_path / "runs"))


def test_only_a_run_that_held_out_images_can_be_certified_on_them(capsys, model_file):
    assert (
        run(["certify", str(model_file), "--data", "mnist-mini", "--patch", "2", "--split", "validation"])
        == 2
    )
    assert "held out training images" in capsys.readouterr().err
