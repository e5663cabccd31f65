"""Rows are what the evidence counts, and what the network and the settings of the proof come to."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import patchcert as pc
from patchcert.comparison.counting import (
    best,
    count,
    method_words,
    network_size,
    prediction_passes,
    proofs_of_results,
    proofs_of_run,
    proofs_of_zoo,
)
from patchcert.evidence import Evidence, Question, Selection
from patchcert.evidence.results import Results
from patchcert.files import sha256
from patchcert.models import ModelSpec, build
from patchcert.train.spec import read_spec
from patchcert.zoo import shipped

PATCH = pc.Patch(5)


def rows_of(finished):
    return count(proofs_of_results(Results(finished.folder / "results")))


def test_the_seed_of_least_loss_counts_and_all_are_averaged(finished, mlp):
    finished.collect(mlp, {PATCH: (90, 60)}, loss=2.0, seconds=100.0)
    finished.collect(replace(mlp, seed=7), {PATCH: (80, 50)}, loss=1.0, weights_seed=1, seconds=60.0)
    finished.collect(replace(mlp, seed=8), {PATCH: (85, 58)}, loss=3.0, weights_seed=2)
    (row,) = rows_of(finished)
    assert (row.clean, row.certified, row.images) == (80.0, 50.0, 100)
    assert (row.seeds.count, row.seeds.counted, row.seeds.mean) == (3, 7, 56.0)
    assert row.seeds.spread == pytest.approx(5.2915, abs=1e-4)
    assert (row.data, row.patch, row.method, row.promise) == ("mnist", "5x5", "intervals", "recovery")
    assert (row.cost.training_seconds, row.cost.certificate_seconds) == (60.0, 100.0)
    assert row.recounted


def test_a_row_names_the_file_it_was_counted_from(finished, mlp):
    result = finished.collect(mlp, {PATCH: (90, 60)})
    (row,) = rows_of(finished)
    (file,) = result.path.glob("certify-*.npz")
    assert row.evidence.sha256 == sha256(file)
    assert (row.evidence.correct, row.evidence.certified) == (90, 60)
    assert not list(row.contradictions())


def test_the_best_of_several_trainings_says_of_how_many(finished, mlp):
    finished.collect(mlp, {PATCH: (90, 60)})
    wide = replace(mlp, model=replace(mlp.model, hidden=512))
    finished.collect(wide, {PATCH: (95, 70)}, weights_seed=1)
    (row,) = best(rows_of(finished))
    assert (row.certified, row.network) == (70.0, "mlp, 512 hidden units")
    assert row.source.note == "the best of 2 trainings"


def test_schedules_are_different_trainings(finished, mlp):
    finished.collect(mlp, {PATCH: (90, 60)})
    short = replace(mlp, schedule=replace(mlp.schedule, epochs=50))
    finished.collect(short, {PATCH: (90, 61)}, weights_seed=1)
    assert [row.seeds.count for row in rows_of(finished)] == [1, 1]


def test_only_proofs_of_all_test_images_against_squares_or_the_trained_patch_count(finished, mlp):
    finished.collect(mlp, {pc.Patch((2, 3)): (90, 80), pc.Patch(2, placements="corners"): (90, 85)})
    assert rows_of(finished) == ()
    finished.collect(replace(mlp, seed=3), {PATCH: (90, 80)}, limit=100, weights_seed=1)
    assert rows_of(finished) == ()


def test_a_run_folder_gives_a_row_for_each_of_its_proofs(finished, mlp):
    run = finished.run(mlp, {PATCH: (90, 60), pc.Patch(2): (90, 80)})
    question = Question("certify", PATCH, Selection("mnist"), {"name": "Own", "setting": 1})
    columns = dict(Evidence.read(next((run.path / "evidence").glob("*5x5*.npz"))).columns)
    finished.write(run, question, columns, prediction={"images": 50, "seconds": 0.1})
    rows = count(proofs_of_run(run))
    assert sorted((row.patch, row.method) for row in rows) == [
        ("2x2", "intervals"),
        ("5x5", "Own"),
        ("5x5", "intervals"),
    ]
    own = next(row for row in rows if row.method == "Own")
    assert own.cost.milliseconds == pytest.approx(2.0)
    assert own.cost.passes is None
    assert own.cost.multiply_adds is None


def test_of_a_run_without_metrics_the_time_of_training_is_not_known(finished, mlp):
    run = finished.run(mlp, {PATCH: (90, 60)})
    assert count(proofs_of_run(run))[0].cost.training_seconds == run.training_seconds > 0
    run.truncate_metrics(0)
    assert count(proofs_of_run(run))[0].cost.training_seconds is None


def test_proofs_against_other_shapes_count_where_they_are_not_by_bounds(finished, mlp):
    proofs = {PATCH: (90, 60), pc.Patch((2, 3)): (90, 70), pc.Patch(5, "corners"): (90, 80)}
    finished.collect(mlp, proofs)
    assert [row.placements for row in rows_of(finished)] == ["everywhere"]
    finished.collect(read_spec("bands-mnist"), proofs, weights_seed=1, classifier={"name": "OfYourOwn"})
    found = sorted((row.patch, row.placements) for row in rows_of(finished) if row.method != "intervals")
    assert found == [("2x3", "everywhere"), ("5x5", "corners"), ("5x5", "everywhere")]


def test_refined_proofs_are_found_by_the_weights_of_the_zoo(tmp_path):
    assert proofs_of_zoo(shipped(), tmp_path.glob("*.npz")) == ()


@pytest.mark.parametrize(
    ("classifier", "passes", "words"),
    [
        (pc.IntervalBounds(nn.Identity()), 1, "intervals"),
        (pc.IntervalBounds(nn.Identity(), refine="split"), 1, "intervals, refined"),
        (pc.DoubleMasking(nn.Identity(), PATCH, masks=6), 36, "masking, 6x6 masks"),
        (
            pc.DoubleMasking(nn.Identity(), PATCH, masks=(3, 2), precision="bfloat16", mirrored=True),
            12,
            "masking, 3x2 masks, mirrored, bfloat16",
        ),
        (pc.MaskedDetection(nn.Identity(), PATCH, masks=6), 37, "detection, 6x6 masks"),
        (pc.BandVotes(nn.Identity()), 32, "bands of 4 columns"),
        (
            pc.BandVotes(nn.Identity(), orientation="both", wrap=False),
            58,
            "bands of 4 columns and of as many rows",
        ),
        (pc.BandVotes(nn.Identity(), width=8, stride=4), 8, "bands of 8 columns at every 4"),
        (pc.BlockVotes(nn.Identity()), 1024, "blocks of 12x12"),
        (
            pc.BandVotes(nn.Identity(), aggregation="double-masked", masked=5),
            32,
            "bands of 4 columns, double masked",
        ),
        (pc.LocalVotes(nn.Identity()), 1, "local votes, sum"),
        (
            pc.LocalVotes(nn.Identity(), aggregation="masked-sum", scores="positive", masked=5),
            1,
            "local votes, masked sum",
        ),
        (pc.RandomAblation(nn.Identity()), 11_000, "random ablation, 45 pixels kept"),
    ],
)
def test_passes_follow_from_what_evidence_says_of_the_classifier(classifier, passes, words):
    described = classifier.describe()
    assert classifier.passes(32, 32) == passes
    evidence = Evidence({}, {"classifier": described, "data": {"image": [3, 32, 32]}})
    assert prediction_passes(evidence) == passes
    assert method_words(described) == words


@pytest.mark.parametrize(
    "classifier_of",
    [
        pc.IntervalBounds,
        lambda model: pc.DoubleMasking(model, pc.Patch(2), masks=3, batch_size=1),
        lambda model: pc.MaskedDetection(model, pc.Patch(2), masks=3, batch_size=1),
        lambda model: pc.BandVotes(model, batch_size=1),
        lambda model: pc.BlockVotes(model, size=4, batch_size=1),
        lambda model: pc.RandomAblation(model, 5, 2, 3, batch_size=1),
    ],
)
def test_passes_are_those_that_one_more_prediction_makes(classifier_of):
    class Constant(nn.Module):
        def forward(self, images):
            seen.append(len(images))
            return torch.tensor([1.0, 0.0]).expand(len(images), 2)

    seen, classifier = [], classifier_of(Constant().eval())
    classifier.predict(torch.rand(1, 1, 8, 8))  # prepares what is prepared once
    counts = []
    for images in (1, 2):
        seen.clear()
        classifier.predict(torch.rand(images, 1, 8, 8))
        counts.append(sum(seen))
    assert counts[1] - counts[0] == classifier.passes(8, 8)


def test_the_size_of_a_network_is_counted_on_it():
    spec = ModelSpec("mlp", 1, 4, 4, hidden=8)
    parameters = sum(each.numel() for each in build(spec).parameters())
    weights = sum(each.numel() for each in build(spec).parameters() if each.dim() > 1)
    assert network_size(spec) == (parameters, weights)  # of a linear layer each weight is one multiply-add


@pytest.mark.parametrize("name", ["resnet18_parts", "cnn2_parts", "bagnet", "wideresnet"])
def test_networks_of_parts_and_of_maps_have_a_size(name):
    settings = {"bagnet": {"receptive_field": 5}, "wideresnet": {"depth": 10}}.get(name, {})
    parameters, multiply_adds = network_size(ModelSpec(name, 3, 8, 8, filters=4, **settings))
    assert parameters > 0
    assert multiply_adds > parameters


def test_training_that_began_with_other_weights_has_no_time_of_its_own(finished, mlp):
    begun = replace(mlp, model=replace(mlp.model, weights="other.safetensors", weights_sha256="0" * 64))
    finished.collect(begun, {PATCH: (90, 60)}, seconds=60.0)
    (row,) = rows_of(finished)
    assert row.cost.training_seconds is None
