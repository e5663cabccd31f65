"""What is measured is what the library says, and an interruption loses no block that was done."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import fx, nn

import patchcert as pc
from patchcert.attacks import PatchesInTurn
from patchcert.bounds.lowering import LAYER_RULES
from patchcert.certificates import Ballots, Certificates
from patchcert.defenses import Defended, LocalGradientSmoothing
from patchcert.evidence import Attacking, Certification, Evidence, EvidenceFolder, Selection, measuring
from patchcert.evidence.measuring import architecture, certificate_columns, has_foreign_code

THREAT = pc.Patch(2)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(measuring, "FIRST_BLOCK", 3)
    monkeypatch.setattr(measuring, "LARGEST_BLOCK", 7)


class Interrupt:
    """Stops like Ctrl-C once that many images are done."""

    def __init__(self, after):
        self.after, self.calls = after, []

    def __call__(self, done, total):
        self.calls.append((done, total))
        if done >= self.after:
            raise KeyboardInterrupt


def same_rows(first, second):
    assert first.columns.keys() == second.columns.keys()
    return all(np.array_equal(first.columns[name], second.columns[name]) for name in first.columns)


def interrupted(certification):
    with pytest.raises(KeyboardInterrupt):
        certification.run(Interrupt(11))
    return certification


@pytest.mark.parametrize("verdicts_only", [False, True])
def test_blocks_give_the_certificates_of_one_call(subject, model, verdicts_only):
    bounds = pc.IntervalBounds(model, verdicts_only=verdicts_only)
    calls = []
    found = Certification(replace(subject, classifier=bounds), THREAT).run(
        lambda *counts: calls.append(counts)
    )
    images = subject.images(subject.positions())
    whole = bounds.certify(images.floats(), images.labels, THREAT)
    assert np.array_equal(found.columns["certified"], whole.certified)
    assert np.array_equal(found.columns["prediction"], whole.predictions)
    assert ("margin" in found.columns) is not verdicts_only
    if not verdicts_only:
        assert np.array_equal(found.columns["margin"], whole.least_margin)
        assert np.array_equal(found.columns["worst_top"], whole.worst_placement[:, 0])
    assert calls[-1] == (20, 20)
    assert calls == sorted(calls)
    assert found.meta["guarantee"] == {"promise": "recovery", "confidence": 1.0}


def test_an_interrupted_certification_resumes_after_its_last_block(subject, tmp_path):
    work = interrupted(Certification(subject, THREAT, tmp_path / "proof.npz"))
    left = work.kept
    assert 3 <= left < 20
    progress = Interrupt(100)
    found = work.run(progress)
    assert same_rows(found, Certification(subject, THREAT).run())
    assert same_rows(found, Evidence.read(tmp_path / "proof.npz"))
    assert progress.calls[0][0] == left
    assert [file.name for file in tmp_path.iterdir()] == ["proof.npz"]


def test_blocks_of_another_claim_or_other_code_are_not_used(subject, model, tmp_path, monkeypatch):
    work = interrupted(Certification(subject, THREAT, tmp_path / "proof.npz"))
    assert work.kept
    others = [
        replace(subject, weights="0" * 64),
        replace(subject, classifier=pc.IntervalBounds(model, torch.float64)),
        replace(subject, classifier=pc.IntervalBounds(model, verdicts_only=True)),
        replace(subject, selection=Selection("toy", limit=19)),
        replace(subject, dataset=replace(subject.dataset, checksums={"toy.bin": "2" * 64})),
    ]
    asked = [Certification(other, THREAT, tmp_path / "proof.npz") for other in others]
    for other in (*asked, Certification(subject, pc.Patch(1), tmp_path / "proof.npz")):
        assert not other.kept
        assert other.in_the_way == tmp_path / "proof.npz.partial"
    assert Certification(subject, THREAT, tmp_path / "another.npz").in_the_way is None
    for code in ("other code", ""):
        monkeypatch.setattr(measuring, "source_sha256", lambda code=code: code)
        again = Certification(subject, THREAT, tmp_path / "proof.npz")
        assert not again.kept
        assert again.in_the_way is None


def test_a_broken_file_of_blocks_is_as_good_as_none(subject, tmp_path):
    (tmp_path / "proof.npz.partial").write_bytes(b"no tensors")
    work = Certification(subject, THREAT, tmp_path / "proof.npz")
    assert not work.kept
    assert work.in_the_way is None
    assert same_rows(work.run(), Certification(subject, THREAT).run())


def test_the_clock_has_no_part_in_blocks_whose_sums_depend_on_their_size(model):
    cpu = torch.device("cpu")
    assert pc.IntervalBounds(model).images_per_block(cpu) is None
    assert pc.IntervalBounds(model, torch.float64).images_per_block(cpu) == 256
    assert pc.IntervalBounds(copy.deepcopy(model).double()).images_per_block(cpu) == 256
    assert pc.IntervalBounds(model).images_per_block(torch.device("cuda")) == 2048
    assert pc.RandomAblation(model, 5).images_per_block(cpu) == 40


def test_layers_rules_and_classifiers_of_others_are_seen(model, monkeypatch):
    class Mine(nn.ReLU):
        pass

    assert not has_foreign_code(pc.IntervalBounds(model))
    assert has_foreign_code(pc.IntervalBounds(nn.Sequential(model, Mine())))
    monkeypatch.setitem(LAYER_RULES, nn.ReLU, lambda layer: None)
    assert has_foreign_code(pc.IntervalBounds(model))


def test_nothing_is_kept_of_foreign_code_or_without_a_file(subject, tmp_path):
    foreign = nn.Sequential(type("Mine", (nn.ReLU,), {"__module__": "mine"})())
    asked = replace(subject, classifier=pc.IntervalBounds(foreign))
    assert not Certification(asked, THREAT, tmp_path / "proof.npz").can_resume
    assert not Certification(subject, THREAT).can_resume
    assert Certification(subject, THREAT, tmp_path / "proof.npz").can_resume


def test_nothing_is_kept_of_data_without_sums(subject, tmp_path):
    unknown = replace(subject, dataset=replace(subject.dataset, checksums={}))
    assert not Certification(unknown, THREAT, tmp_path / "proof.npz").can_resume


def hooked(model):
    model[-1].register_forward_hook(lambda layer, inputs, logits: -logits)
    return model


def overwritten(model):
    model.forward = lambda images: -nn.Sequential.forward(model, images)
    return model


@pytest.mark.parametrize(
    "changed", [hooked, overwritten, fx.symbolic_trace], ids=["hooked", "overwritten", "a graph"]
)
def test_nothing_is_kept_of_models_that_compute_otherwise_than_their_layers_say(
    subject, model, tmp_path, changed
):
    asked = replace(subject, classifier=pc.IntervalBounds(changed(copy.deepcopy(model))))
    assert not Certification(asked, THREAT, tmp_path / "proof.npz").can_resume


def test_weights_that_changed_in_memory_do_not_resume(subject, model, tmp_path):
    interrupted(Certification(subject, THREAT, tmp_path / "proof.npz"))
    assert Certification(subject, THREAT, tmp_path / "proof.npz").kept
    with torch.no_grad():
        model[-1].weight += 1
    assert not Certification(subject, THREAT, tmp_path / "proof.npz").kept


@pytest.mark.parametrize(
    ("layer", "other"),
    [
        (nn.ReLU(), nn.LeakyReLU(0.5)),
        (nn.AvgPool2d(3, 2), nn.AvgPool2d(3, 2, ceil_mode=True)),
        (nn.AvgPool2d(3, 2, 1), nn.AvgPool2d(3, 2, 1, count_include_pad=False)),
        (nn.AvgPool2d(3), nn.AvgPool2d(3, divisor_override=5)),
        (nn.AvgPool2d([2, 1]), nn.AvgPool2d([1, 2])),
    ],
)
def test_another_network_of_the_same_weights_does_not_resume(model, layer, other):
    """As when the code that builds an architecture is changed between two calls; some settings are not printed."""
    assert architecture(nn.Sequential(model, layer)) == architecture(
        nn.Sequential(copy.deepcopy(model), layer)
    )
    assert architecture(nn.Sequential(model, layer)) != architecture(nn.Sequential(model, other))


def test_votes_resume_too(subject, tmp_path, monkeypatch):
    base = nn.Sequential(nn.Flatten(), nn.Linear(72, 4)).eval()
    ablation = pc.RandomAblation(base, 20, 10, 50, batch_size=64)
    monkeypatch.setattr(pc.RandomAblation, "images_per_block", lambda self, device: 6)
    asked = replace(subject, classifier=ablation)
    work = interrupted(Certification(asked, pc.SparsePixels(1), tmp_path / "votes.npz"))
    assert 6 <= work.kept < 20
    found = work.run()
    assert same_rows(found, Certification(asked, pc.SparsePixels(1)).run())
    assert found.meta["guarantee"]["confidence"] == 0.95
    assert (found.columns["votes"].sum(axis=1) == 50).all()
    stricter = found.certified_against(pc.SparsePixels(2))
    assert not (stricter & ~found.columns["certified"]).any()


def test_a_class_that_no_prediction_names_is_written_down_as_it_is():
    """Where a classifier abstains, the class that its votes selected may be the only large number."""
    votes = torch.nn.functional.one_hot(torch.tensor([150]), 200)
    found = Certificates(
        certified=torch.tensor([False]),
        predictions=torch.tensor([-1]),
        labels=torch.tensor([3]),
        ballots=Ballots(votes, votes),
    )
    assert certificate_columns(found, torch.tensor([0]))["selected"].tolist() == [150]


@pytest.mark.parametrize("largest", [127, 128, 32767, 32768, 161_699])
def test_numbers_of_classes_and_masks_are_never_wrapped(largest):
    found = Certificates(
        certified=torch.tensor([False]),
        predictions=torch.tensor([-1]),
        labels=torch.tensor([largest]),
        lead=torch.zeros(1),
        weakest_masks=torch.tensor([[0, largest]]),
    )
    columns = certificate_columns(found, torch.tensor([0]))
    assert columns["label"].tolist() == columns["second_mask"].tolist() == [largest]
    assert columns["prediction"].tolist() == [-1]


def test_an_attack_is_written_down_as_the_library_says(subject, model, tmp_path):
    attack, generator = pc.PatchAttack(steps=3, restarts=2), torch.Generator().manual_seed(5)
    drawn = replace(subject, classifier=model, selection=Selection("toy", drawn=8, seed=5))
    work = Attacking(drawn, attack, pc.Patch(3), seed=5, save_images=True).into(EvidenceFolder(tmp_path))
    found = work.run()
    positions = drawn.positions()
    images = drawn.images(positions)
    expected = attack.run(model, images.floats(), images.labels, pc.Patch(3), generator)
    assert found.columns["index"].tolist() == positions.tolist()
    assert np.array_equal(found.columns["succeeded"], expected.succeeded)
    assert found.withstood == int((~expected.succeeded).sum())
    assert found.path == EvidenceFolder(tmp_path).file(work.question)
    broken = found.adversarial()
    assert sorted(broken) == positions[expected.succeeded].tolist()
    assert EvidenceFolder(tmp_path).find(work.question, "f" * 64) is not None
    assert EvidenceFolder(tmp_path).find(work.question, "0" * 64) is None
    assert EvidenceFolder(tmp_path).find(work.question, "f" * 64, {"toy.bin": "1" * 64}) is not None
    assert EvidenceFolder(tmp_path).find(work.question, "f" * 64, {"toy.bin": "2" * 64}) is None


def attacking(subject, model, tmp_path, **changes):
    settings = {"seed": 3, "file": tmp_path / "attack.npz", "save_images": True, **changes}
    return Attacking(
        replace(subject, classifier=model), pc.PatchAttack(steps=3, restarts=2), pc.Patch(3), **settings
    )


def test_an_attack_interrupted_in_its_first_block_leaves_nothing(subject, model, tmp_path):
    work = attacking(subject, model, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        work.run(Interrupt(1))
    assert work.can_resume
    assert not work.kept
    assert not any(tmp_path.rglob("*"))


@pytest.mark.parametrize("defended", [False, True])
def test_an_interrupted_attack_ends_with_the_rows_of_one_that_was_not(
    subject, model, tmp_path, monkeypatch, defended
):
    monkeypatch.setattr(measuring, "ATTACKED_ON_CPU", 6)
    attacked = Defended(LocalGradientSmoothing(3, 1), model) if defended else model
    work = attacking(subject, attacked, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        work.run(Interrupt(13))
    assert work.kept == 12
    calls = []
    found = work.run(lambda *counts: calls.append(counts))
    assert (calls[0], calls[-1]) == ((12, 20), (20, 20))
    whole = attacking(subject, attacked, tmp_path, file=None).run()
    assert same_rows(found, whole)
    assert found.adversarial().keys() == whole.adversarial().keys()
    assert [file.name for file in tmp_path.iterdir()] == ["attack.npz"]


def test_blocks_of_another_attack_are_not_used(subject, model, tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "ATTACKED_ON_CPU", 6)
    work = attacking(subject, model, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        work.run(Interrupt(13))
    assert work.kept == 12
    for changes in ({"seed": 4}, {"save_images": False}, {"among": torch.arange(15)}):
        assert not attacking(subject, model, tmp_path, **changes).kept
    assert not replace(work, attack=pc.PatchAttack(steps=4, restarts=2)).kept
    assert not replace(work, threat=pc.Patch(2)).kept
    assert not replace(work, subject=replace(work.subject, weights="0" * 64)).kept
    monkeypatch.setattr(measuring, "source_sha256", lambda: "other code")
    assert not attacking(subject, model, tmp_path).kept


def test_an_attack_on_code_of_others_keeps_nothing(subject, model, tmp_path):
    class Mine(nn.ReLU):
        pass

    assert not attacking(subject, nn.Sequential(model, Mine()), tmp_path).can_resume


def test_nothing_is_kept_of_attacks_of_others(subject, model, tmp_path):
    mine = type("Mine", (pc.PatchAttack,), {"__module__": "mine"})(steps=1)
    asked = replace(subject, classifier=model)
    assert Attacking(asked, pc.PatchAttack(steps=1), THREAT, file=tmp_path / "a.npz").can_resume
    for attack in (mine, PatchesInTurn(mine)):
        assert not Attacking(asked, attack, THREAT, file=tmp_path / "a.npz").can_resume


def test_attacks_on_a_defense_on_a_classifier_and_on_the_model_are_three_questions(subject, model):
    attack, asked = pc.PatchAttack(steps=1, restarts=1), []
    defended = Defended(LocalGradientSmoothing(3, 1), model)
    for classifier in (model, pc.IntervalBounds(model), defended):
        asked.append(Attacking(replace(subject, classifier=classifier), attack, THREAT).question)
    assert len({question.name for question in asked}) == 3
    assert "LocalGradientSmoothing(window=3" in asked[2].classifier["defense"]


def test_the_time_of_predictions_is_kept(subject, tmp_path):
    file = tmp_path / "proof.npz"
    found = Certification(subject, THREAT, file).run()
    measured = found.meta["prediction"]
    assert measured["images"] == 20
    assert measured["seconds"] > 0
    assert Evidence.read(file).prediction_milliseconds == 1000 * measured["seconds"] / 20


def test_slow_predictions_are_measured_on_few_images(monkeypatch):
    calls = []

    class Slow:
        def __init__(self, batch=1):
            self.batch = batch

        def images_at_once(self):
            return self.batch

        def predict(self, images):
            calls.append(len(images))
            return torch.zeros(len(images))

    monkeypatch.setattr(measuring, "PREDICTED_SECONDS", 0.0)
    assert measuring.prediction_time(Slow(), torch.zeros(100, 1, 2, 2))["images"] == 1
    assert measuring.prediction_time(Slow(16), torch.zeros(100, 1, 2, 2))["images"] == 16
    monkeypatch.setattr(measuring, "PREDICTED_SECONDS", 1e9)
    calls.clear()
    assert measuring.prediction_time(Slow(), torch.zeros(100, 1, 2, 2))["images"] == 100
    assert calls == [1, 8, 64, 100]


def test_an_attack_whose_findings_serve_all_images_takes_them_at_once(subject, model, monkeypatch):
    monkeypatch.setattr(measuring, "ATTACKED_ON_CPU", 6)
    sizes = []

    class Shared(pc.PatchAttack):
        needs_all_images = True

        def propose(self, target, job):
            sizes.append(len(job.images))
            return super().propose(target, job)

    for attack in (pc.PatchAttack(steps=1, restarts=1), Shared(steps=1, restarts=1)):
        Attacking(replace(subject, classifier=model), attack, THREAT).run()
    assert len(sizes) == 1
