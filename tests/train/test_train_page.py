"""The guide to training names every key of a specification, and its example is one."""

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from patchcert.train.schedules import EpsilonSchedule, LearningRateSchedule
from patchcert.train.spec import DataSettings, ModelSettings, OptimiserSettings, RunSettings, read_spec
from patchcert.train.strategies import (
    Ablated,
    AllPlacements,
    GuidedPlacements,
    Natural,
    PooledPlacements,
    RandomPlacements,
    SparseChanges,
)

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "train.md"
PARTS = {
    "data": DataSettings,
    "model": ModelSettings,
    "optimiser": OptimiserSettings,
    "run": RunSettings,
    "schedule.epsilon": EpsilonSchedule,
    "schedule.learning_rate": LearningRateSchedule,
}
STRATEGIES = [
    Natural, AllPlacements, RandomPlacements, GuidedPlacements, PooledPlacements, SparseChanges, Ablated,
]  # fmt: skip


@pytest.fixture(scope="module")
def page():
    return PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def example(page):
    return re.search(r"```toml\n(.*?)```", page, re.DOTALL).group(1)


def test_the_example_is_the_papers_training(example, tmp_path):
    file = tmp_path / "spec.toml"
    file.write_text(example, encoding="utf-8")
    assert read_spec(str(file)) == read_spec("paper-mnist")


@pytest.mark.parametrize("part", PARTS)
def test_every_key_is_named(part, page, example):
    shown = tomllib.loads(example)
    for name in part.split("."):
        shown = shown.get(name, {})
    for field in dataclasses.fields(PARTS[part]):
        assert field.name in shown or f"| `{part}.{field.name}` |" in page, f"{part}.{field.name}"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_has_its_row_with_its_keys(strategy, page):
    kind, *others = dataclasses.fields(strategy)
    row = next(line for line in page.splitlines() if line.startswith(f"| `{kind.default}` |"))
    assert all(f"`{field.name}`" in row for field in others)
