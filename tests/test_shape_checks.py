import importlib
import sys
from typing import Annotated

import pytest
import torch
from torch import Tensor, nn

from patchcert.tensors import Images, Labels, Logits
from patchcert.threats.shapes import sums_under
from shape_checks import ShapeError, check_shapes_on_import, checked, shape_matches

MODULE = """
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

RULES = {}

def rule(function):
    RULES[function.__name__] = function
    return function

@rule
def same(x: Annotated[Tensor, "n c"]) -> Annotated[Tensor, "n c"]:
    return x[:, :1]

@contextmanager
def opened(x: Annotated[Tensor, "n"]) -> Iterator[int]:
    yield len(x)

@dataclass(frozen=True, slots=True)
class Pair:
    first: Annotated[Tensor, "n"]
    second: Annotated[Tensor, "n k"] | None = None

class Kinds:
    @staticmethod
    def static(x: Annotated[Tensor, "n"]) -> int:
        return 1

    @classmethod
    def of(cls, x: Annotated[Tensor, "n"]) -> str:
        return cls.__name__

    @property
    def wrong(self) -> Annotated[Tensor, "2 2"]:
        return torch.zeros(3)

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Annotated[Tensor, "n"]) -> Annotated[Tensor, "n"]:
        return 2 * x

    @staticmethod
    def backward(ctx, gradient: Annotated[Tensor, "n"]) -> Annotated[Tensor, "n"]:
        return 2 * gradient

class Layer(nn.Module):
    def forward(self, x: Annotated[Tensor, "n c"]) -> Annotated[Tensor, "n c"]:
        return x + 1
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module imported with checks."""
    folder = tmp_path / "shaped"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "parts.py").write_text(MODULE)
    (folder / "user.py").write_text("# Tensor\nfrom shaped.parts import same\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    check_shapes_on_import("shaped")
    yield importlib.import_module("shaped.parts")
    for name in ("shaped", "shaped.parts", "shaped.user"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("notation", "shape", "matches"),
    [
        ("n c h w", (2, 3, 4, 5), True),
        ("n c h w", (3, 4, 5), False),
        ("", (), True),
        ("", (1,), False),
        ("n n", (2, 2), True),
        ("n n", (2, 3), False),
        ("p 2", (7, 2), True),
        ("p 2", (7, 3), False),
        ("_ _", (2, 3), True),
        ("_", (2, 3), False),
        ("...", (), True),
        ("n ... 2", (5, 2), True),
        ("n ... 2", (5, 6, 7, 2), True),
        ("n ... 2", (5, 6, 7, 3), False),
        ("n ... n", (5,), False),
        ("... n n", (1, 4, 4), True),
    ],
)
def test_a_shape_is_a_row_of_words(notation, shape, matches):
    assert shape_matches(notation, shape, {}) is matches


def test_a_name_stands_for_one_number_in_a_call_and_mismatches_bind_nothing():
    sizes = {}
    assert shape_matches("n c", (2, 3), sizes)
    assert not shape_matches("k n", (9, 4), sizes)
    assert sizes == {"n": 2, "c": 3}


@pytest.mark.parametrize("notation", ["n*p", "n -1", "... n ...", "h+1"])
def test_what_is_no_notation_is_refused_where_the_function_is_defined(notation):
    def function(x: Annotated[Tensor, notation]) -> None: ...

    with pytest.raises(ValueError, match="states no shape"):
        checked(function)


def test_arguments_and_results_are_checked_together():
    @checked
    def logits(images: Images, labels: Labels | None = None, *, classes: int = 2) -> Logits:
        return torch.zeros(len(images) + classes - 2, classes)

    assert logits(torch.zeros(3, 1, 2, 2)).shape == (3, 2)
    assert logits(torch.zeros(3, 1, 2, 2), labels=torch.zeros(3)).shape == (3, 2)
    with pytest.raises(ShapeError, match=r"argument 'images' has shape \(3, 4\); .* states 'n c h w'"):
        logits(torch.zeros(3, 4))
    with pytest.raises(ShapeError, match=r"argument 'labels' has shape \(4,\).* where n = 3"):
        logits(torch.zeros(3, 1, 2, 2), torch.zeros(4))
    with pytest.raises(ShapeError, match=r"returned value has shape \(4, 3\); .* 'n k', where n = 3"):
        logits(torch.zeros(3, 1, 2, 2), classes=3)


def test_alternatives_and_collections_are_checked():
    @checked
    def corners(given: Annotated[Tensor, "p 2"] | Annotated[Tensor, "n p 2"], n: Labels) -> list[Labels]:
        return [n, n[:0]]

    with pytest.raises(ShapeError, match="returned value has shape list"):
        corners(torch.zeros(5, 2), torch.zeros(3))
    with pytest.raises(ShapeError, match="'given'"):
        corners(torch.zeros(5, 3), torch.zeros(3))

    @checked
    def pair() -> tuple[Annotated[Tensor, "n"], Annotated[Tensor, "n"]]:
        return torch.zeros(2), torch.zeros(3)

    with pytest.raises(ShapeError):
        pair()


def test_a_refusal_stays_visible():
    @checked
    def picky(images: Images) -> None:
        raise ValueError("images must have four dimensions")

    with pytest.raises(ValueError, match="four dimensions"):
        picky(torch.zeros(1))


def test_functions_without_shapes_are_left_as_they_are():
    def function(x: Tensor, name: Annotated[str, "n c"], call: "Images") -> None: ...

    assert checked(function) is function


def test_imported_functions_are_checked_wherever_they_are_kept(module):
    user = importlib.import_module("shaped.user")
    for function in (module.same, module.RULES["same"], user.same):
        assert function(torch.zeros(3, 1)).shape == (3, 1)
        with pytest.raises(ShapeError, match=r"shaped.parts.same: the returned value"):
            function(torch.zeros(3, 2))


def test_methods_of_every_kind_are_checked(module):
    assert module.Kinds.static(torch.zeros(2)) == 1
    assert module.Kinds.of(torch.zeros(2)) == "Kinds"
    for call in (module.Kinds.static, module.Kinds().of):
        with pytest.raises(ShapeError, match="argument 'x'"):
            call(torch.zeros(2, 2))
    with pytest.raises(ShapeError, match="Kinds.wrong: the returned value"):
        _ = module.Kinds().wrong
    with module.opened(torch.zeros(4)) as count:
        assert count == 4
    with pytest.raises(ShapeError):
        module.opened(torch.zeros(4, 1))


def test_fields_of_a_dataclass_are_checked(module):
    assert module.Pair(torch.zeros(2)).second is None
    with pytest.raises(ShapeError, match=r"Pair: field 'second' has shape \(3, 2\).* where n = 2"):
        module.Pair(torch.zeros(2), torch.zeros(3, 2))


def test_gradients_and_tracing_survive(module):
    x = torch.ones(3, requires_grad=True)
    module.Double.apply(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 2]
    traced = torch.fx.symbolic_trace(nn.Sequential(module.Layer()))
    assert torch.equal(traced(torch.zeros(2, 3)), torch.ones(2, 3))
    with pytest.raises(ShapeError):
        module.Layer()(torch.zeros(3))


def test_what_is_compiled_is_not_checked(module):
    fused = torch.compile(module.Layer(), backend="eager", fullgraph=True)
    assert torch.equal(fused(torch.zeros(2, 3)), torch.ones(2, 3))


def test_calls_of_this_package_are_checked_in_tests():
    with pytest.raises(ShapeError, match="sums_under: argument 'values'"):
        sums_under(torch.ones(2, 2, dtype=torch.bool), torch.zeros(3, 4, 4, 1))
