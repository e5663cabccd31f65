"""The page on models of one's own lists exactly what has bounds, and shows what its example prints."""

import contextlib
import io
import re
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import nn

from patchcert.bounds import Interval, Rounding, trace
from patchcert.bounds.lowering import FUNCTION_RULES, LAYER_RULES, always_refuses, kind_of, public_name
from patchcert.models import Normalize

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "your-own-model.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)


def listed(column):
    """What the cells of one column of the table name."""
    table = PAGE.split("## What has bounds")[1].partition("| Family |")[0]
    rows = re.findall(r"^\| [A-Z].*\|$", table, re.M)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[column])]


@pytest.mark.parametrize(("column", "kind"), [(2, "layer"), (3, "function"), (4, "method")])
def test_the_table_names_everything_that_has_bounds_once(column, kind):
    """Rules that other tests have registered, for layers and functions of their own, are not ours."""
    rules = {**LAYER_RULES, **FUNCTION_RULES}
    known = [target for target, rule in rules.items() if kind_of(target) == kind and not always_refuses(rule)]
    homes = ("torch", "patchcert", "_operator")
    ours = [target for target in known if kind == "method" or target.__module__.startswith(homes)]
    names = sorted(public_name(target) for target in ours)
    assert sorted(listed(column)) == names
    assert kind != "layer" or Normalize.__name__ in names


def numbers(text):
    return [int(number) for number in re.findall(r"\d+", text)]


def test_the_whole_example_prints_what_the_page_says():
    (code,) = [code for code in EXAMPLES if "images were broken" in code]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "example", "exec"), {"__name__": "example"})
    shown = re.findall(r"^```text\n(.*?)^```", PAGE, re.M | re.S)[0]
    assert re.sub(r"\d+", "#", printed.getvalue()) == re.sub(r"\d+", "#", shown)
    assert all(abs(a - b) <= 4 for a, b in zip(numbers(printed.getvalue()), numbers(shown), strict=True))
    assert printed.getvalue().splitlines()[-1] == shown.splitlines()[-1] == "0 proven images were broken"


def test_the_rule_that_the_page_shows_is_sound():
    names = {"__name__": "example"}
    (code,) = [code for code in EXAMPLES if "@layer_rule" in code]
    exec(compile(code, "example", "exec"), names)
    points = torch.randn(1, 4000, generator=torch.Generator().manual_seed(0)).mul(100)
    points = torch.cat([points, points * 1e-12, points * 1e9], dim=1)
    for dtype in (torch.float32, torch.float64):
        bounds = trace(nn.Sequential(names["Cube"]())).bounds(
            Interval.point(points.to(dtype)), rounding=Rounding.outward(dtype)
        )
        for lower, point, upper in zip(
            bounds.lower[0].tolist(), points[0].tolist(), bounds.upper[0].tolist(), strict=True
        ):
            assert lower <= Fraction(point) ** 3 <= upper
