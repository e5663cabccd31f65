"""Specifications are read strictly, name what is wrong with them, and survive writing and reading."""

import dataclasses
import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchcert.data import ImageShape
from patchcert.errors import SpecError
from patchcert.threats import Patch, SparsePixels, shapes
from patchcert.train.recipe import BoundSettings
from patchcert.train.schedules import EpsilonSchedule, LearningRateSchedule, Schedule
from patchcert.train.spec import (
    DataSettings,
    ModelSettings,
    OptimiserSettings,
    RunSettings,
    Spec,
    preset_names,
    read_spec,
    write_spec,
)
from patchcert.train.strategies import (
    AllPlacements,
    AnyStrategy,
    GuidedPlacements,
    Masked,
    Natural,
    PooledPlacements,
    RandomPlacements,
    SparseChanges,
)
from patchcert.train.toml import Place, decode, without_defaults

MINIMAL = """
[data]
name = "mnist"
[model]
name = "mlp"
[threat]
stamp = "5x5"
[strategy]
kind = "all"
"""


def spec_of(tmp_path, text, *changes):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return read_spec(path, changes)


def test_a_minimal_file_gets_the_stated_defaults(tmp_path):
    spec = spec_of(tmp_path, MINIMAL)
    assert spec == Spec(DataSettings("mnist"), ModelSettings("mlp"), Patch(5), AllPlacements())
    assert spec.select == "last"
    assert spec.data.validation == 0


NAME, STAMP, KIND = 'name = "mnist"', 'stamp = "5x5"', 'kind = "all"'
FIRST = ""


@pytest.mark.parametrize(
    ("old", "new", "message", "hint"),
    [
        ('name = "mlp"', 'nam = "mlp"', "model.nam is not a known key", "did you mean 'name'?"),
        ("[data]", "[dat]", "dat is not a known key", "did you mean 'data'?"),
        (KIND, 'kind = "alll"', "strategy.kind is 'alll'; expected one of", "did you mean 'all'?"),
        (KIND, f"{KIND}\nplacements = 3", "strategy.placements is not a known key", "known: kind"),
        (KIND, 'kind = "random"\nplacements = "3"', "strategy.placements is '3'; expected a whole", ""),
        (KIND, 'kind = "random"\nplacements = true', "strategy.placements is True; expected a whole", ""),
        (KIND, 'kind = "random"\nplacements = 0', "placements is 0; expected at least 1", ""),
        (KIND, 'kind = "pooled"\nblocks = 2', "strategy.blocks is 2; expected a list", "write [2]"),
        (KIND, 'kind = "pooled"\nblocks = ["a"]', "strategy.blocks.0 is 'a'; expected a whole", ""),
        (KIND, 'kind = "masked"\nsize = 6', "strategy.size is 6; expected text in quotes", ""),
        (KIND, "", "strategy.kind is missing", "choose one of natural, all"),
        (f"[strategy]\n{KIND}", "", "strategy is missing", "add a section [strategy]"),
        (NAME, f"{NAME}\nrotation = nan", "rotation is nan; expected at least 0", ""),
        (NAME, f"{NAME}\nflip = 1", "data.flip is 1; expected true or false", ""),
        (
            NAME,
            f'{NAME}\nsize = "32x32"',
            "the images of mnist have a size of their own",
            "leave data.size out",
        ),
        (NAME, 'name = "folder:a"\nsize = "32"', "expected height x width", 'write data.size = "32x32"'),
        (STAMP, 'stmp = "5x5"', "threat.stmp is not a known key", "did you mean 'stamp'?"),
        (STAMP, "", "threat is not a valid threat", ""),
        (STAMP, 'kind = "sparse"\npixels = 4', "'all' cannot train against", "kind = 'patch'"),
        (FIRST, "[schedule]\nepochs = 0", "schedule does not hold together: epochs is 0", ""),
        (FIRST, "[schedule.epsilon]\nramp = 'steep'", "schedule.epsilon.ramp is 'steep'", ""),
        (
            FIRST,
            "[schedule.learning_rate]\none_cycle = 0.3\ndecay_from = 2",
            "one_cycle is set, but so are decays",
            "leave decay_factor",
        ),
        (FIRST, "select = 'best-validation'", "no training images are held out", "data.validation"),
        (FIRST, "[optimiser]\nnesterov = true", "there is no momentum", "momentum = 0.9"),
        (FIRST, "[optimiser]\nlabel_smoothing = 1.0", "label_smoothing is 1.0; expected", ""),
        (FIRST, "[optimiser]\nfocus = 1.5", "focus is 1.5; expected a number from 0 to 1", ""),
        (
            FIRST,
            "[optimiser]\nfocus = 0.5\nlabel_smoothing = 0.1",
            "focus is 0.5 and label_smoothing 0.1",
            "leave one of them out",
        ),
        (FIRST, "[optimiser]\naverage_decay = 1.0", "average_decay is 1.0; expected", ""),
        (FIRST, "[optimiser]\nweight_decay = -0.1", "weight_decay is -0.1; expected at least 0", ""),
        (FIRST, "[optimiser]\nclip_norm = 0.0", "clip_norm is 0.0; expected a number above 0", ""),
        (FIRST, "[run]\ncheckpoint_seconds = nan", "checkpoint_seconds is nan; expected at least 0", ""),
        (FIRST, "model = 3", "", ""),
    ],
)
def test_mistakes_are_named_with_key_file_and_nearest_key(tmp_path, old, new, message, hint):
    with pytest.raises(SpecError) as caught:
        spec_of(tmp_path, MINIMAL.replace(old, new, 1))
    assert "mine.toml" in caught.value.message
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_changes_go_through_the_same_decoder_and_are_named_in_errors(tmp_path):
    spec = spec_of(
        tmp_path, MINIMAL, "threat.stamp=2x8", "strategy.kind=random", "strategy.placements=5", "seed=7"
    )
    assert (spec.threat, spec.strategy, spec.seed) == (Patch((2, 8)), RandomPlacements(placements=5), 7)
    with pytest.raises(SpecError, match=r"^--set model.nme=cnn2: model.nme is not a known key") as caught:
        spec_of(tmp_path, MINIMAL, "model.nme=cnn2")
    assert caught.value.hint == "did you mean 'name'?"
    with pytest.raises(SpecError, match=r"--set seed=x: seed is 'x'; expected a whole number"):
        spec_of(tmp_path, MINIMAL, "seed=x")
    with pytest.raises(SpecError, match="--set seed is not of the form key=value"):
        spec_of(tmp_path, MINIMAL, "seed")
    with pytest.raises(SpecError, match=r"--set seed.x=1: seed is not a table"):
        spec_of(tmp_path, "seed = 3\n" + MINIMAL, "seed.x=1")


def test_a_new_kind_starts_its_table_afresh():
    changes = ("threat.kind=sparse", "threat.pixels=4", "strategy.kind=sparse")
    spec = read_spec("paper-mnist", changes)
    assert spec.threat == SparsePixels(4)
    assert spec.strategy == SparseChanges()


def test_an_unknown_source_lists_the_presets():
    with pytest.raises(SpecError, match="paper-mnis is neither a file nor a preset") as caught:
        read_spec("paper-mnis")
    assert caught.value.hint.startswith("did you mean 'paper-mnist")


def test_a_broken_file_is_named(tmp_path):
    with pytest.raises(SpecError, match=r"mine.toml is not valid TOML"):
        spec_of(tmp_path, "[data\n")


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_decodes_and_keeps_the_rules_of_fair_choice(name):
    spec = read_spec(name)
    assert spec.select == "last"
    assert spec.data.validation == 0
    assert decode(Spec, tomllib.loads(write_spec(spec)), Place("again")) == spec


def test_the_presets_hold_the_papers_settings():
    assert {"paper-mnist", "paper-cifar10", "paper-mnist-sparse", "paper-cifar10-sparse"} <= set(
        preset_names()
    )
    mnist, cifar = read_spec("paper-mnist"), read_spec("paper-cifar10")
    assert mnist.schedule == Schedule(100, EpsilonSchedule(1, 60), LearningRateSchedule(5e-4))
    assert cifar.schedule == Schedule(200, EpsilonSchedule(10, 120), LearningRateSchedule(1e-3))
    assert read_spec("paper-mnist-sparse").schedule.epsilon == EpsilonSchedule(1, 10)
    assert (mnist.data.flip, mnist.data.crop_padding) == (False, 0)
    assert (cifar.data.flip, cifar.data.crop_padding) == (True, 4)
    assert mnist.optimiser == OptimiserSettings(batch_size=256)


trainings = st.one_of(
    st.just(AllPlacements()),
    st.just(Natural()),
    st.builds(RandomPlacements, placements=st.integers(1, 50)),
    st.builds(
        GuidedPlacements,
        per_class=st.integers(1, 3),
        width=st.none() | st.integers(1, 9),
        inverse_temperature=st.floats(-1e3, 1e3),
    ),
    st.builds(
        Masked,
        size=st.sampled_from(["6x6", "3x12"]),
        clean_share=st.floats(0, 0.5),
        single_share=st.floats(0, 0.5),
        worst_of=st.integers(1, 9),
        worst_from=st.floats(0, 1),
        fill=st.lists(st.floats(0, 1), min_size=1, max_size=3).map(tuple),
        bfloat16=st.booleans(),
    ),
    st.builds(PooledPlacements, blocks=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)),
)
threats = st.one_of(
    st.builds(Patch, st.tuples(st.integers(1, 9), st.integers(1, 9))),
    st.just(Patch(shapes.diamond(25), placements=[(0, 1), (2, 3)])),
    st.just(Patch(3, placements="corners")),
)
schedules = st.builds(
    Schedule,
    epochs=st.integers(1, 500),
    epsilon=st.builds(
        EpsilonSchedule, st.integers(0, 9), st.integers(0, 99), st.sampled_from(["linear", "smooth"])
    ),
    learning_rate=st.builds(
        LearningRateSchedule, st.floats(1e-9, 1.0), st.floats(0.01, 1.0), st.integers(1, 30)
    )
    | st.builds(LearningRateSchedule, st.floats(1e-9, 1.0), one_cycle=st.floats(0.01, 0.99)),
)
specs = st.builds(
    Spec,
    data=st.builds(DataSettings, name=st.text(max_size=9), validation=st.integers(0, 9), flip=st.booleans()),
    model=st.builds(
        ModelSettings,
        name=st.text(max_size=9),
        hidden=st.none() | st.integers(1, 99),
        filters=st.none() | st.integers(1, 99),
    ),
    threat=threats,
    strategy=trainings,
    schedule=schedules,
    optimiser=st.builds(
        OptimiserSettings,
        clip_norm=st.none() | st.floats(0.1, 9),
        decay_biases=st.booleans(),
        average_decay=st.none() | st.floats(0, 0.9999),
    ),
    seed=st.integers(0, 2**31),
    run=st.builds(RunSettings, cuda_graph=st.sampled_from(["auto", "on", "off"])),
)


@given(specs)
def test_a_written_spec_reads_back_equal(spec):
    again = decode(Spec, tomllib.loads(write_spec(spec)), Place("again"))
    assert again == spec
    assert again.fingerprint() == spec.fingerprint()


def test_the_fingerprint_sees_what_decides_the_weights_and_nothing_else():
    spec = read_spec("paper-mnist")
    assert spec.fingerprint() == replace(spec, run=RunSettings(cuda_graph="off", check_every=1)).fingerprint()
    assert spec.fingerprint() != replace(spec, seed=1).fingerprint()
    assert spec.fingerprint() != spec.fingerprint({"train": "abc"})
    assert spec.scaled(0.1).schedule.epochs == 10
    assert len(spec.fingerprint()) == 16


def test_the_size_of_a_folders_images_can_be_chosen(tmp_path):
    spec = spec_of(tmp_path, MINIMAL, "data.name=folder:photos", "data.size=32x48")
    assert spec.data.image_shape == ImageShape(3, 32, 48)
    assert decode(Spec, tomllib.loads(write_spec(spec)), Place("again")) == spec
    usual = replace(spec, data=replace(spec.data, size=None))
    assert usual.data.image_shape is None
    assert usual.fingerprint() != spec.fingerprint()


def test_a_size_that_is_not_chosen_is_no_part_of_the_fingerprint():
    assert without_defaults(DataSettings("folder:photos")) == {"name": "folder:photos"}
    assert "\nsize" not in write_spec(read_spec("paper-mnist"))


RESULTS = Path(__file__).parents[2] / "results"


def test_published_results_keep_their_fingerprints_and_specifications():
    folders = [file.parent for file in RESULTS.glob("*/spec.toml")]
    assert len(folders) >= 148
    for folder in folders:
        spec = read_spec(folder / "spec.toml")
        environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
        assert spec.fingerprint(environment["data"]["checksums"]) == folder.name
        assert decode(Spec, tomllib.loads(write_spec(spec)), Place("again")) == spec


PAGE = Path(__file__).parents[2] / "docs" / "guides" / "train.md"
PARTS = {
    "data": DataSettings,
    "model": ModelSettings,
    "optimiser": OptimiserSettings,
    "run": RunSettings,
    "schedule.epsilon": EpsilonSchedule,
    "schedule.learning_rate": LearningRateSchedule,
    "bounds": BoundSettings,
}


@pytest.fixture(scope="module")
def page():
    return PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def examples(page):
    return re.findall(r"```toml\n(.*?)```", page, re.DOTALL)


@pytest.fixture(scope="module")
def example(examples):
    return examples[0]


def test_the_guides_example_is_the_papers_training(example, tmp_path):
    file = tmp_path / "spec.toml"
    file.write_text(example, encoding="utf-8")
    assert read_spec(str(file)) == read_spec("paper-mnist")


def test_the_guides_training_for_masks_is_that_of_the_preset_but_narrower(examples, tmp_path):
    file = tmp_path / "spec.toml"
    file.write_text(examples[1], encoding="utf-8")
    changes = ("data.validation=5000", "model.filters=32", "optimiser.tf32=false")
    assert read_spec(file) == read_spec("masked-cifar10-5x5", changes)


@pytest.mark.parametrize("part", PARTS)
def test_the_guide_names_every_key(part, page, example):
    shown = tomllib.loads(example)
    for name in part.split("."):
        shown = shown.get(name, {})
    for field in dataclasses.fields(PARTS[part]):
        assert field.name in shown or f"| `{part}.{field.name}` |" in page, f"{part}.{field.name}"


@pytest.mark.parametrize("strategy", get_args(AnyStrategy))
def test_every_strategy_has_its_row_in_the_guide_with_its_keys(strategy, page):
    kind, *others = dataclasses.fields(strategy)
    row = next(line for line in page.splitlines() if line.startswith(f"| `{kind.default}` |"))
    assert all(f"`{field.name}`" in row for field in others)
