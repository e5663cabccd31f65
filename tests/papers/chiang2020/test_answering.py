"""Questions are answered as they are described, by a small network on few images."""

import shlex
from dataclasses import replace

import numpy as np
import pytest
import torch

from patchcert.attacks import AdaptiveAfterTransfer, AttackSeries, PatchAttack, TransferAttack
from patchcert.certificates.ablation import RandomAblation
from patchcert.cli.options import parse_threat
from patchcert.data import load_dataset
from patchcert.defenses import DigitalWatermarking, LocalGradientSmoothing
from patchcert.errors import InvalidInput
from patchcert.evidence import Question, Selection
from patchcert.papers.chiang2020.answering import answer, attack_from, command_of, defense_from
from patchcert.papers.chiang2020.recipes import QUICK_DATA, QUICK_HELD_OUT, QUICK_SCHEDULE, TUNED, recipe
from patchcert.papers.chiang2020.tables import find_table, paper_tables
from patchcert.threats import Patch, SparsePixels, shapes
from patchcert.train.spec import DataSettings, ModelSettings, RunSettings, read_spec
from patchcert.train.training import Workplace, train_run

CPU = torch.device("cpu")
IMAGES = Selection(QUICK_DATA, drawn=40)
ATTACK = PatchAttack(30, restarts=3, search="sweep", sweep_steps=1)
LGS = "LocalGradientSmoothing(window=4, overlap=2, threshold=0.2, smoothing=2.0)"
DW = "DigitalWatermarking(window=4, quantile=0.9, opening=1, saliency_kind='guided', fill='ring')"


@pytest.fixture(scope="module")
def dataset():
    return load_dataset(QUICK_DATA, None)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    spec = replace(
        read_spec("paper-mnist", ["strategy.kind=natural"]),
        data=DataSettings(QUICK_DATA, limit=800, validation=QUICK_HELD_OUT),
        model=ModelSettings("cnn2", hidden=32),
        schedule=QUICK_SCHEDULE,
        run=RunSettings(check_every=0),
    )
    return train_run(spec, tmp_path_factory.mktemp("run") / "natural", Workplace(CPU, None))


def attacked(attack, defense=""):
    classifier = {"name": "Defended", "defense": defense} if defense else {"name": "Model"}
    return Question("attack", Patch(3), IMAGES, classifier, {**attack.describe(), "seed": 0})


def test_an_undefended_model_is_attacked_on_drawn_test_images(run, dataset):
    question = attacked(ATTACK)
    found = answer(question, run, dataset, CPU)
    rows = found.columns
    assert found.question == question
    assert found.correct / found.total > 0.7
    assert found.withstood < found.correct - 8
    assert len(set(rows["index"].tolist())) == 40
    assert (rows["label"] == dataset.test.labels[rows["index"]].numpy()).all()


@pytest.mark.parametrize("defense", [LGS, DW])
def test_no_image_that_the_weak_attack_broke_withstands_the_adaptive_one(run, dataset, defense):
    series = AttackSeries((replace(ATTACK, sweep_vertices=1), replace(ATTACK, loss="margin")))
    asked = [
        attacked(TransferAttack(ATTACK), defense),
        attacked(AdaptiveAfterTransfer(ATTACK, series), defense),
    ]
    weak, strong = (answer(question, run, dataset, CPU) for question in asked)
    assert [weak.question, strong.question] == asked
    before, after = weak.columns, strong.columns
    assert (before["prediction"] == after["prediction"]).all()
    assert not (before["succeeded"] & ~after["succeeded"]).any()
    assert (after["succeeded"] | (after["prediction"] == after["label"])).all()
    assert after["succeeded"].sum() > before["succeeded"].sum()
    assert not strong.is_undefended


def test_certificates_have_margins_or_are_verdicts_alone(run, dataset):
    asked = Question(
        "certify", Patch(1), Selection(QUICK_DATA, limit=10), {"name": "IntervalBounds", "dtype": "float32"}
    )
    whole = answer(asked, run, dataset, CPU)
    bare = answer(replace(asked, classifier={**asked.classifier, "verdicts_only": True}), run, dataset, CPU)
    assert whole.question == asked == bare.question
    assert ("margin" in whole.columns, "margin" in bare.columns) == (True, False)
    assert np.array_equal(whole.columns["certified"], bare.columns["certified"])
    assert whole.meta["command"] == f"patchcert certify {run.path.name} --shape 1x1 --limit 10"


def test_votes_are_counted_and_resume_after_an_interruption(dataset, tmp_path):
    tiny = ("data.name=mnist-mini", "data.limit=40", "model.hidden=8", "strategy.retained=100")
    short = ("optimiser.batch_size=16", "schedule.epochs=2")
    spec = read_spec("paper-mnist-ablation", [*tiny, *short])
    run = train_run(spec, tmp_path / "run", Workplace(CPU))
    votes = RandomAblation(torch.nn.Identity(), 100, 10, 40).describe()
    asked = Question("certify", SparsePixels(1), Selection(QUICK_DATA, drawn=50), votes)

    def interrupt(done, total):
        if done > 40:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer(asked, run, dataset, CPU, interrupt)
    assert not list((run.path / "evidence").glob("*.npz"))
    reached = []
    found = answer(asked, run, dataset, CPU, lambda done, total: reached.append(done))
    assert found.question == asked
    assert min(reached) == 40
    assert found.columns["votes"].sum(axis=1).tolist() == [40] * 50
    assert found.meta["guarantee"] == {"promise": "recovery", "confidence": 0.95}
    assert (found.columns["label"] == dataset.test.labels[found.columns["index"]].numpy()).all()


def test_every_attack_of_the_tables_is_made_again_from_its_description():
    entries = [entry for table in paper_tables() for entry in table.entries]
    described = [made.attack.attack for entry in entries if (made := recipe(entry)).attack]
    assert described
    for plain in described:
        again = {**attack_from(plain, 7).describe(), "seed": plain["seed"]}
        asked = Question("attack", Patch(2), IMAGES, {"name": "Model"}, plain)
        assert replace(asked, attack=again) == asked
        assert '"batch_size": 7' in str(again).replace("'", '"')


def test_an_unknown_attack_is_refused_by_name():
    with pytest.raises(InvalidInput, match="no attack of the kind 'Magic'"):
        attack_from({"kind": "Magic", "seed": 0}, 7)


def test_every_setting_of_a_defense_is_made_again_from_its_description():
    model = torch.nn.Sequential(torch.nn.ReLU())
    for described in (*TUNED.values(), LGS, DW):
        defense = defense_from(described, model)
        assert isinstance(defense, LocalGradientSmoothing | DigitalWatermarking)
        assert f"{type(defense).__name__}({defense.extra_repr()})" == described


@pytest.mark.parametrize(
    ("threat", "options"),
    [
        (Patch(5), ["--shape", "5x5"]),
        (Patch(shapes.diamond(25)), ["--shape", "diamond:25"]),
        (SparsePixels(4), ["--sparse", "4", "--bound", "tight"]),
    ],
)
def test_the_command_of_a_certificate_names_its_threat_but_no_folder(run, threat, options):
    asked = Question("certify", threat, Selection(QUICK_DATA, limit=300), {"name": "IntervalBounds"})
    words = shlex.split(command_of(asked, run))
    assert words == ["patchcert", "certify", run.path.name, *options, "--limit", "300"]
    given = dict(zip(options[::2], options[1::2], strict=True))
    sparse = int(given["--sparse"]) if "--sparse" in given else None
    assert parse_threat(None, given.get("--shape"), sparse, given.get("--bound"), None, None) == threat


def test_the_command_of_an_attack_repeats_it(run):
    (entry,) = find_table("compare-defenses").chosen(["mnist 2x2 none"])
    words = command_of(recipe(entry).attack, run)
    options = "--shape 2x2 --images 400 --seed 0 --restarts 80 --steps 150 --search sweep"
    assert words == f"patchcert attack {run.path.name} {options}"
