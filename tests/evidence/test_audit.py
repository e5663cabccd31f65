"""Every forgery of evidence is noticed, and the file is named; where the manifest is forged too, by what else."""

import hashlib
import json
import shutil
import subprocess
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forged_evidence import forge, restate
from patchcert.cli.audit import Checkout
from patchcert.errors import RunError
from patchcert.evidence import Evidence, EvidenceFolder
from patchcert.evidence.audit import CONTESTED, _tells_apart, audit_evidence, audit_results, same_predictions
from patchcert.evidence.manifest import MANIFEST, ListedFile, ListedRun, Manifest
from patchcert.evidence.results import collect
from patchcert.files import sha256
from patchcert.threats import Patch

RESULTS = Path(__file__).parents[2] / "results"
PROVEN, ATTACKED, CHANCE = "916ad3aa4be7e44e", "3120080f84d8cee9", "02fe3563fc47b749"


class Folder:
    """A copy of some results with a manifest of its own, to be forged."""

    def __init__(self, path: Path, *runs: str):
        self.path = path
        for run in runs:
            shutil.copytree(RESULTS / run, path / run)
        self.relist()

    def relist(self):
        """What a forger does who knows of the manifest: every line is made to say what lies there."""
        before = Manifest.read(self.path)
        if not before.files:
            Manifest().now(self.path).write(self.path)
            return
        there = [entry for entry in before.files if (self.path / entry.path).is_file()]
        files = tuple(self._relisted(entry) for entry in there)
        runs = tuple(ListedRun.of(self.path / run.run) for run in before.runs)
        replace(before, files=files, runs=runs).write(self.path)

    def _relisted(self, entry: ListedFile) -> ListedFile:
        file = self.path / entry.path
        with suppress(RunError):
            return ListedFile.of(file, self.path)
        return replace(entry, sha256=sha256(file))

    def file(self, run: str, words: str) -> Path:
        """The only file of a run with these words in its name."""
        (file,) = self.path.glob(f"{run}/*{words}*.npz")
        return file

    def edit(self, run: str, **facts):
        """Changes facts of a summary."""
        file = self.path / run / "summary.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | facts, indent=2) + "\n")

    def found_in(self, file: Path) -> str:
        """What the audit says of a file."""
        return self.found[file.relative_to(self.path).as_posix()]

    @property
    def found(self) -> dict[str, str]:
        """What the audit says, by file."""
        findings = audit_results(self.path).findings
        return {each.path.relative_to(self.path).as_posix(): each.what for each in reversed(findings)}


@pytest.fixture
def copied(tmp_path):
    return lambda *runs: Folder(tmp_path / "results", *runs)


def flip(columns, count=100):
    refused = np.flatnonzero(~columns["certified"] & (columns["prediction"] == columns["label"]))[:count]
    columns["certified"][refused] = True


def demote(columns, count=100):
    columns["certified"][np.flatnonzero(columns["certified"])[:count]] = False


def swap(columns, count=100):
    before = columns["certified"].copy()
    flip(columns, count)
    columns["certified"][np.flatnonzero(before)[:count]] = False


def shuffle(columns):
    order = np.random.default_rng(0).permutation(len(columns["label"]))
    for name in columns.keys() - {"index"}:
        columns[name] = columns[name][order]


def shift(columns):
    for name in ("label", "prediction"):
        columns[name] = (columns[name] + 1) % 10


def test_the_committed_results_are_what_they_say():
    found = audit_results(RESULTS, Checkout(RESULTS).beside)
    assert found.findings == ()
    assert found.files > 800
    assert found.superseded >= 106
    listed = {run.run: run for run in Manifest.read(RESULTS).runs}
    assert {name for name, run in listed.items() if not run.has_curve} == set(found.without_curve)


def test_untouched_copies_pass(copied):
    assert copied(PROVEN, ATTACKED).found == {}


@pytest.mark.parametrize(
    ("change", "without_manifest"),
    [
        (flip, "contradicts itself: row 18 is certified with a margin of -0.09"),
        (demote, "100 verdicts do not follow from their margin: image 0 is the first"),
        (swap, "contradicts itself: row 18 is certified with a margin of -0.09"),
        (shuffle, "labels are not those of mnist"),
        (shift, "10000 labels are not those of mnist: image 0 is a 7, not a 8"),
    ],
)
def test_forged_rows_are_noticed_whether_or_not_the_manifest_is_forged_too(copied, change, without_manifest):
    folder = copied(PROVEN)
    file = folder.file(PROVEN, "certify")
    forge(file, change)
    assert folder.found_in(file) == "does not have the SHA-256 sum that the manifest lists"
    folder.relist()
    assert without_manifest in folder.found_in(file)


def test_rows_in_another_order_are_noticed(copied):
    folder = copied(PROVEN)
    file = folder.file(PROVEN, "certify")
    forge(file, lambda columns: columns.update({name: each[::-1] for name, each in columns.items()}))
    assert folder.found_in(file) == "does not have the SHA-256 sum that the manifest lists"
    assert any("every image once, in order" in str(each) for each in audit_results(folder.path).findings)


def test_leads_of_another_network_are_noticed_and_attacks_of_which_all_margins_are_alike_are_not(copied):
    run = "3d0c3e70adf90ed2"
    folder = copied(run)
    assert folder.found == {}
    whole = Evidence.read(folder.file(run, "certify-patch-5x5-square-everywhere-3111"))
    file = folder.file(f"{run}/trimmed", "certify-patch-5x5-square")
    forge(file, lambda columns: columns.update(whole.columns))
    folder.relist()
    assert folder.found_in(file).startswith("has every lead of ")


def test_a_verdict_without_margins_is_held_by_the_manifest_alone(copied):
    """Only --reprove, and the history of the manifest, notice it where the manifest is forged too."""
    folder = copied("449d8e0ae656cfa7")
    file = folder.file("449d8e0ae656cfa7", "certify-patch-16x1-line")
    forge(file, swap)
    assert list(folder.found) == [file.relative_to(folder.path).as_posix()]
    folder.relist()
    assert folder.found == {}


def test_the_same_weights_predict_the_same(copied):
    run = "449d8e0ae656cfa7"
    folder = copied(run)
    file = folder.file(run, "certify-patch-16x1-line")

    def improve(columns):
        wrong = np.flatnonzero(columns["prediction"] != columns["label"])[:100]
        columns["prediction"][wrong] = columns["label"][wrong]

    forge(file, improve)
    folder.relist()
    assert folder.found_in(file).startswith("100 predictions are not those in ")
    evidence = Evidence.read(file)
    training = evidence.meta | {"data": evidence.meta["data"] | {"split": "train"}}
    found = (replace(evidence, meta=training), Evidence.read(folder.file(run, "certify-patch-4x4-square")))
    assert list(same_predictions(found)) == []
    assert list(same_predictions((evidence, found[1]))) != []


@pytest.mark.slow
def test_the_history_has_what_was_superseded():
    lines = [line for line in Manifest.read(RESULTS).superseded if line.commit]
    wanted = {(line.commit, line.run): set() for line in lines}
    for line in lines:
        wanted[line.commit, line.run].add(line.sha256)
    for (commit, run), sums in wanted.items():
        listed = git("ls-tree", "-r", "--name-only", commit, f"results/{run}").decode().split()
        if not listed:
            pytest.skip("the history of the repository is not here")
        assert sums <= {hashlib.sha256(git("show", f"{commit}:{name}")).hexdigest() for name in listed}


def git(*words):
    return subprocess.run(["git", "-C", str(RESULTS.parent), *words], capture_output=True, check=False).stdout


@pytest.mark.parametrize("facts", [{"counted": 10_000}, {"right": 10_000}, {"evidence_of": "certify all"}])
def test_a_line_of_the_manifest_that_counts_otherwise_than_its_file_is_noticed(copied, facts):
    folder = copied(PROVEN)
    file, before = folder.file(PROVEN, "certify"), Manifest.read(folder.path)
    name = file.relative_to(folder.path).as_posix()
    files = tuple(replace(each, **facts) if each.path == name else each for each in before.files)
    replace(before, files=files).write(folder.path)
    assert folder.found == {name: "counts otherwise than its line in the manifest"}


def test_a_line_of_the_manifest_that_says_otherwise_of_its_run_is_noticed(copied):
    folder = copied(PROVEN)
    (line,) = (before := Manifest.read(folder.path)).runs
    replace(before, runs=(replace(line, training_seconds=1.0, training_loss=None),)).write(folder.path)
    assert folder.found[f"{PROVEN}/summary.json"].startswith("training_loss is ")
    assert len(audit_results(folder.path).findings) == 2


@pytest.mark.parametrize("times", [0, 2])
def test_every_run_has_one_line_in_the_manifest(copied, times):
    """The mean over seeds is taken over these lines."""
    folder = copied(PROVEN, CHANCE)
    before = Manifest.read(folder.path)
    first, second = before.runs
    replace(before, runs=(first, *(second,) * times)).write(folder.path)
    assert folder.found == {second.run: f"has {times} lines among the runs of the manifest"}


def test_nothing_that_a_manifest_in_the_history_lists_is_forgotten():
    now = Manifest.read(RESULTS)
    kept = {line.sha256 for line in (*now.files, *now.beside, *now.superseded)}
    for commit in git("log", "--format=%H", "--", "results/manifest.json").decode().split():
        plain = json.loads(git("show", f"{commit}:results/manifest.json"))
        lines = [line for part in ("files", "beside", "superseded") for line in plain[part]]
        gone = [line for line in lines if line["images"] is not None and line["sha256"] not in kept]
        assert not gone, f"{commit} lists {gone[0]}"


def test_an_edited_training_loss_is_noticed(copied):
    folder = copied(CHANCE)
    folder.edit(CHANCE, training_loss=0.1)
    assert set(folder.found) == {f"{CHANCE}/summary.json"}
    with pytest.raises(RunError, match="training_loss is 0.1, the manifest has 2.30"):
        Manifest.read(folder.path).updated(folder.path)


def test_an_edited_training_loss_is_noticed_by_the_curve_where_there_is_one(copied):
    run = "065510321976aa3c"
    folder = copied(run)
    folder.edit(run, training_loss=0.1)
    folder.relist()
    assert "the curve ends at" in folder.found[f"{run}/summary.json"]


@pytest.mark.parametrize(
    ("facts", "noticed"),
    [
        ({"clean_accuracy": 0.999}, "states clean_accuracy as 0.999; what lies beside it gives 0."),
        ({"device": "a slow one"}, "states device as a slow one; what lies beside it gives NVIDIA"),
        ({"versions": {}}, "states versions as {}; what lies beside it gives"),
        ({"training_seconds": 1.0}, "than the epochs of its curve took together"),
    ],
)
def test_a_summary_has_the_circumstances_that_lie_beside_it(copied, facts, noticed):
    run = "065510321976aa3c"
    folder = copied(run)
    folder.edit(run, **facts)
    folder.relist()
    assert noticed in folder.found[f"{run}/summary.json"]


@pytest.mark.parametrize(
    ("name", "noticed"),
    [
        ("summary.json", "summary.json is damaged: it is no JSON"),
        ("environment.json", "environment.json is damaged: it is no JSON"),
        ("metrics.jsonl", "does not have one row for each of the"),
    ],
)
def test_a_file_that_is_cut_short_is_noticed(copied, name, noticed):
    run = "065510321976aa3c"
    folder = copied(run)
    file = folder.path / run / name
    file.write_bytes(file.read_bytes()[:-30])
    found = [each.what for each in audit_results(folder.path).findings]
    assert any(noticed in what for what in found)
    assert "does not have the SHA-256 sum that the manifest lists" in found


def test_a_deleted_seed_is_noticed_and_stays_in_the_manifest(copied):
    folder = copied(PROVEN, CHANCE)
    shutil.rmtree(folder.path / CHANCE)
    assert {path.partition("/")[0] for path in folder.found} == {CHANCE}
    with pytest.raises(RunError, match=f"{CHANCE}.*is listed, but missing"):
        Manifest.read(folder.path).updated(folder.path)


def test_erased_successes_of_an_adaptive_attack_are_noticed(copied):
    folder = copied(ATTACKED)
    plain, adaptive = (
        folder.file(ATTACKED, f"attack-patch-2x2*localgradient*{words}") for words in ("986dae79", "701e8e54")
    )

    def erase(columns):
        columns["succeeded"][:] = columns["prediction"] != columns["label"]
        columns["prediction_after"] = columns["prediction"].copy()
        columns["margin"] = np.where(columns["succeeded"], 1.0, -1.0).astype(np.float32)
        columns["steps"].fill(columns["steps"].max())

    assert (Evidence.read(plain).withstood, Evidence.read(adaptive).withstood) == (210, 65)
    forge(adaptive, erase)
    assert folder.found_in(adaptive)
    folder.relist()
    assert "withstood the adaptive attack, but not the plain one" in folder.found_in(adaptive)
    assert "its rows count" in folder.found[f"{ATTACKED}/summary.json"]


def test_successes_follow_from_margins(copied):
    folder = copied(ATTACKED)
    file = folder.file(ATTACKED, "701e8e54")

    def erase(columns):
        columns["prediction_after"] = columns["label"].copy()
        columns["succeeded"][:] = False

    forge(file, erase)
    folder.relist()
    assert "successes do not follow from their margins" in folder.found_in(file)


def test_an_image_that_is_wrong_by_itself_cannot_withstand_an_attack(copied):
    run = "a1366e524c75c512"
    folder = copied(run)
    file = folder.file(run, "attack-patch-5x5")

    def mend(columns):
        row = np.flatnonzero(columns["prediction"] != columns["label"])[0]
        columns["succeeded"][row], columns["margin"][row] = False, -1.0
        columns["prediction_after"][row] = columns["label"][row]

    forge(file, mend)
    folder.relist()
    assert "but is wrong without one" in folder.found_in(file)


def test_erased_successes_of_a_plain_attack_are_noticed_by_their_steps(copied):
    """Margins and classes are forged too: the image was given up after fewer steps than those that withstood."""
    run = "2525661c0a94d1e5"
    folder = copied(run)
    file = next(folder.path.glob(f"{run}/attack-patch-2x2-square-everywhere-0*.npz"))

    def erase(columns):
        rows = np.flatnonzero(columns["succeeded"] & (columns["prediction"] == columns["label"]))[:5]
        columns["succeeded"][rows] = False
        columns["prediction_after"][rows] = columns["label"][rows]
        columns["margin"][rows] = -1.0

    forge(file, erase)
    folder.relist()
    assert folder.found_in(file).startswith("5 images withstood fewer steps than others were tried with")


def test_an_attack_on_certified_images_leaves_none_out(copied):
    run = "23b3b04c36f0fa7e"
    folder = copied(run)
    file = next(folder.path.glob(f"{run}/attack-*certified-only*.npz"))
    forge(file, lambda columns: columns.update({name: column[3:] for name, column in columns.items()}))
    folder.relist()
    assert folder.found_in(file) == "leaves out 3 images that are certified, and were asked for"


@pytest.mark.parametrize(
    ("words", "name"), [("certify-patch-5x5", "worst_top"), ("attack-patch-2x2", "left")]
)
def test_patches_are_where_the_threat_can_be(copied, words, name):
    folder = copied(ATTACKED)
    file = next(folder.path.glob(f"{ATTACKED}/{words}*.npz"))
    file = file if name in Evidence.read(file).columns else folder.file(ATTACKED, "certify-patch-2x2")
    forge(file, lambda columns: columns[name].fill(99))
    folder.relist()
    assert "rows have no place of Patch" in folder.found_in(file)


def test_a_certified_image_that_is_marked_as_broken_is_named(copied):
    run = "a1366e524c75c512"
    folder = copied(run)
    proof, attack = folder.file(run, "certify-patch-5x5"), folder.file(run, "attack-patch-5x5")
    proven = Evidence.read(proof).columns["certified"]

    def break_one(columns):
        row = np.flatnonzero(proven[columns["index"]])[0]
        columns["succeeded"][row], columns["margin"][row] = True, 1.0
        columns["prediction_after"][row] = (columns["label"][row] + 1) % 10

    forge(attack, break_one)
    folder.relist()
    assert "is certified, but" in folder.found[run]


def test_files_that_nobody_listed_are_noticed(copied):
    folder = copied(PROVEN)
    shutil.copy(folder.file(PROVEN, "certify"), folder.path / PROVEN / "certify-more-0000000000000000.npz")
    assert folder.found[f"{PROVEN}/certify-more-0000000000000000.npz"] == "is not listed in the manifest"


def test_a_curve_that_was_kept_must_stay(copied):
    run = "065510321976aa3c"
    folder = copied(run)
    (folder.path / run / "metrics.jsonl").unlink()
    folder.relist()
    assert folder.found[f"{run}/metrics.jsonl"] == "is missing: every run keeps its training curve"


def test_a_folder_without_a_manifest_says_how_to_write_one(tmp_path):
    (finding,) = audit_results(tmp_path).findings
    assert "audit --write" in finding.what


def test_what_a_later_training_replaces_stays_in_the_manifest(finished, mlp):
    first = finished.collect(mlp, {Patch(5): (94, 62), Patch(2): (94, 80)}, loss=0.5)
    folder = first.path.parent
    Manifest.read(folder).updated(folder).write(folder)
    finished.collect(mlp, {Patch(5): (95, 63)}, weights_seed=1, loss=0.4)
    kept = Manifest.read(folder)
    assert sorted((line.counted, line.training_loss) for line in kept.superseded) == [(62, 0.5), (80, 0.5)]
    assert {line.why for line in kept.superseded} == {
        "trained again: the same specification gave other weights"
    }
    again = kept.updated(folder)
    assert [line.counted for line in again.superseded] == [line.counted for line in kept.superseded]
    assert len([entry for entry in again.files if entry.counted is not None]) == 1


def test_an_answer_that_is_measured_again_supersedes_the_earlier_one_unless_its_rows_are_the_same(
    finished, mlp, tmp_path
):
    run = finished.run(mlp, {Patch(5): (94, 62)})
    folder = collect(run, tmp_path / "results").path.parent
    collect(finished.run(mlp, {Patch(5): (94, 62)}), folder)
    assert Manifest.read(folder).superseded == ()
    collect(finished.run(mlp, {Patch(5): (94, 61)}), folder)
    (line,) = Manifest.read(folder).superseded
    assert (line.counted, line.why) == (62, "measured again: the same weights gave other rows")


def test_a_manifest_is_read_as_it_was_written_and_refused_where_it_is_none(finished, mlp):
    folder = finished.collect(mlp, {Patch(5): (94, 62)}).path.parent
    made = Manifest().updated(folder)
    made.write(folder)
    assert Manifest.read(folder) == made
    lists = '"runs": [{"run": "x"}], "files": [], "beside": [], "superseded": []'
    for version, message in ((1, "a line of the manifest has the keys"), (2, "its version is 2, expected 1")):
        (folder / MANIFEST).write_text(f'{{"version": {version}, {lists}}}')
        with pytest.raises(RunError, match=message):
            Manifest.read(folder)


def test_labels_of_trials_on_held_out_images_are_checked(tmp_path):
    trials = RESULTS.parent / "trials" / "results"
    source = next((trials / "masked-cifar10-5x5").rglob("certify-*.npz"))
    assert audit_evidence(source) == ()
    found = Evidence.read(source)
    columns = {name: column.copy() for name, column in found.columns.items()}
    shift(columns)
    forged = Evidence(columns, found.meta).write(tmp_path / "forged.npz")
    (finding,) = audit_evidence(forged.path)
    assert "labels are not those of cifar10" in finding.what


def drop_half_of_what_is_not_certified(columns, meta):
    kept = columns["certified"] | (columns["index"] % 2 == 0)
    columns.update({name: column[kept] for name, column in columns.items()})


def lower_the_slack(columns, meta):
    meta["classifier"]["slack"] = -9.0
    columns["certified"] = (columns["prediction"] == columns["label"]) & (columns["lead"] > -9)


def forget_margins(columns, meta):
    for name in ("margin", "worst_top", "worst_left"):
        del columns[name]
    columns["certified"] = (columns["prediction"] == columns["label"]) & ~columns["broken"]


def forget_counterexamples(columns, meta):
    for name in ("adversarial", "adversarial_row", "broken"):
        del columns[name]


def open_what_is_broken(columns, meta):
    columns["broken"][:] = False


def invent_broken(columns, meta):
    columns["broken"] |= columns["prediction"] != columns["label"]
    columns["adversarial_row"] = np.flatnonzero(columns["broken"])
    columns["adversarial"] = np.zeros((len(columns["adversarial_row"]), 1, 28, 28), np.float32)


def leave_the_range(columns, meta):
    columns["adversarial"][0] = 7.0


MEASURED = RESULTS.parent / "docs" / "measurements"
MASKED, DETECTED, REFINED = (
    MEASURED / f"{name}.npz"
    for name in ("imagenet-resnet50-masking-6", "imagenet-resnet50-detection-6", "refined-mnist-2x2-cnn2")
)


def stored(folder, pattern):
    """The file of this name; a path without a file in a checkout whose results were left out."""
    return next(folder.glob(pattern), folder / pattern)


TRIAL = stored(RESULTS.parent / "trials" / "results" / "masked-cifar10-5x5" / "base", "evidence/*.npz")
VOTED = stored(RESULTS / "5d80627705ab1ae2", "certify-patch-5x5*.npz")
ABLATED = stored(RESULTS / "ffbe393382a6b744", "certify-sparse*.npz")


@pytest.mark.parametrize(
    ("source", "change", "noticed"),
    [
        (MASKED, drop_half_of_what_is_not_certified, "expected one for each of the 400 images"),
        (TRIAL, drop_half_of_what_is_not_certified, "expected one for each of the 1000 images"),
        (TRIAL, lambda _, meta: meta["data"].update(sha256={}), "of other files than those published"),
        (DETECTED, lambda _, meta: meta["guarantee"].update(promise="recovery"), "MaskedDetection promises"),
        (ABLATED, lambda _, meta: meta["guarantee"].update(confidence=1.0), "RandomAblation promises"),
        (MASKED, lambda _, meta: meta["threat"].update(stamp="60x60"), "none of them hides Patch"),
        (MASKED, lower_the_slack, "slack is -9.0"),
        (MASKED, lambda columns, _: columns.pop("lead"), "are not those of DoubleMasking: 'lead'"),
        (MASKED, lambda columns, _: columns["first_mask"].fill(36), "row 0 names a mask that is none of 36"),
        (DETECTED, lambda columns, _: columns["certified"].fill(False), "do not follow from their lead"),
        (ABLATED, lambda columns, _: columns.pop("votes"), "are not those of RandomAblation: 'votes'"),
        (VOTED, lambda columns, _: flip(columns), "of 32 parts and a lead of 1"),
        (
            VOTED,
            lambda columns, _: columns.update(votes=9 * columns["votes"].astype(int)),
            "has 288 votes of 32 parts",
        ),
        (REFINED, forget_margins, "it has no margins"),
        (REFINED, forget_counterexamples, "it does not say which images are broken"),
        (REFINED, lambda columns, _: columns.pop("adversarial"), "images are not kept of exactly the rows"),
        (REFINED, open_what_is_broken, "images are not kept of exactly the rows"),
        (REFINED, invent_broken, "is broken, but predicted wrongly without a patch"),
        (REFINED, leave_the_range, "its pixels leave [0, 1]"),
        (DETECTED, lambda _, meta: meta.update(prediction={"images": 10**9, "seconds": 1}), "400 images"),
        (DETECTED, lambda _, meta: meta.update(prediction={"images": 9, "seconds": -1}), "how many seconds"),
        (DETECTED, lambda _, meta: meta.update(seconds=float("nan")), "how many seconds"),
        (DETECTED, lambda _, meta: meta.pop("seconds"), "how many seconds"),
    ],
)
def test_forged_files_of_newer_kinds_of_evidence_are_noticed_by_themselves(tmp_path, source, change, noticed):
    file = Path(shutil.copy(source, tmp_path))
    assert audit_evidence(file) == ()
    restate(file, change)
    (finding,) = audit_evidence(file)
    assert noticed in finding.what


def test_a_refined_proof_is_held_to_attacks_and_proofs_of_the_same_weights(tmp_path):
    """Margins are forged with the verdicts: among the results an attack breaks what is now certified."""
    run, beside = "dbac2be16ce840df", tmp_path / "docs" / REFINED.name
    beside.parent.mkdir()
    shutil.copy(REFINED, beside)
    folder = Folder(tmp_path / "results", run)

    def prove_all(columns):
        right = columns["prediction"] == columns["label"]
        columns["margin"][right & ~columns["certified"]] = 1.0
        columns.update(certified=right, broken=np.zeros_like(right))
        columns.update(adversarial=columns["adversarial"][:0], adversarial_row=columns["adversarial_row"][:0])

    assert not any(each.path == beside for each in audit_evidence(beside))
    forge(beside, prove_all)
    assert audit_evidence(beside) == ()
    found = [each.what for each in audit_results(folder.path, [beside]).findings if each.path == beside]
    assert any("is certified in" in what and "and broken in" in what for what in found)


def prove_what_is_right(columns):
    """As far as no attack among the results contradicts it: of every other image."""
    more = (columns["prediction"] == columns["label"]) & ~columns["certified"] & (columns["index"] % 2 == 0)
    columns["certified"][more] = True
    for name in columns.keys() & {"margin", "lead"}:
        columns[name][more] = 1.0


@pytest.mark.parametrize(
    ("hard", "easy"),
    [
        ("results/3ffe99335c1f8851/certify-patch-5x5*", "results/3ffe99335c1f8851/certify-patch-2x2*"),
        (
            "docs/measurements/imagenet-resnet50-masking-6*",
            "docs/measurements/imagenet-resnet50-detection-6*",
        ),
        ("results/dbac2be16ce840df/certify-*", "docs/measurements/refined-mnist-2x2-cnn2*"),
    ],
)
def test_what_is_harder_to_prove_is_not_proven_of_more_images(tmp_path, hard, easy):
    (tmp_path / "results").mkdir()
    copies = []
    for number, pattern in enumerate((hard, easy)):
        (source,) = RESULTS.parent.glob(pattern)
        copies.append(Path(shutil.copy(source, tmp_path / f"{number}-{source.name}")))
    forged, _ = copies
    assert not any("easier" in each.what for each in audit_results(tmp_path / "results", copies).findings)
    forge(forged, prove_what_is_right)
    found = [
        each.what for each in audit_results(tmp_path / "results", copies).findings if each.path == forged
    ]
    assert any("does not, which is easier" in what for what in found)


def test_rows_of_one_seed_are_not_those_of_another(copied):
    folder = copied(PROVEN, CHANCE)
    source, file = folder.file(PROVEN, "certify"), folder.file(CHANCE, "certify")
    columns = Evidence.read(source).columns
    forge(file, lambda rows: rows.update(columns))
    folder.relist()
    found = [each.what for each in audit_results(folder.path).findings]
    assert any("has every margin of" in what for what in found)


def test_detection_is_not_restated_as_masking(tmp_path):
    (tmp_path / "results").mkdir()
    masked, detected = (Path(shutil.copy(source, tmp_path)) for source in (MASKED, DETECTED))
    rows = Evidence.read(detected).columns

    def restated(columns):
        columns.update({name: rows[name] for name in ("lead", "first_mask", "second_mask", "certified")})
        columns["prediction"] = np.where(rows["certified"], columns["label"], columns["prediction"])

    forge(masked, restated)
    assert audit_evidence(masked) == ()
    found = [each.what for each in audit_results(tmp_path / "results", [detected, masked]).findings]
    assert any("has every lead of" in what for what in found)


def test_a_file_that_is_named_after_another_question_is_noticed(copied):
    folder = copied(PROVEN)
    file = folder.file(PROVEN, "certify")
    restate(file, lambda _, meta: meta["threat"].update(stamp="1x1"))
    folder.relist()
    assert "is named otherwise than its question" in folder.found_in(file)


def test_hidden_files_are_no_evidence(copied):
    folder = copied(PROVEN)
    file = folder.file(PROVEN, "certify")
    shutil.copy(file, file.with_name(f".{file.name}"))
    assert EvidenceFolder(file.parent).files() == (file,)


def test_evidence_beside_the_results_that_is_replaced_leaves_its_counts_in_the_manifest(tmp_path):
    folder, beside = tmp_path / "results", tmp_path / TRIAL.name
    folder.mkdir()
    shutil.copy(TRIAL, beside)
    before = Manifest().updated(folder, [beside])
    assert before.updated(folder, [beside]) == before
    forge(beside, lambda columns: demote(columns, 1))
    (line,) = before.updated(folder, [beside]).superseded
    assert (line.run, line.counted) == (TRIAL.name, Evidence.read(TRIAL).certified)


@pytest.mark.parametrize(
    ("values", "tells"),
    [
        (np.zeros(50), False),
        (np.arange(50) / 50, True),
        (np.tile([26, 0], (50, 1)), False),
        (np.concatenate([np.tile([26, 0], (50, 1)), np.tile([20, 6], (CONTESTED - 1, 1))]), False),
        (np.concatenate([np.tile([26, 0], (50, 1)), np.tile([20, 6], (CONTESTED, 1))]), True),
    ],
)
def test_rows_that_two_networks_may_share_tell_nothing_apart(values, tells):
    assert _tells_apart(values) == tells
