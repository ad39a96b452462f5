"""Named tuples among arguments and results, and arguments that ``**kwargs`` and ``*args`` take, in exported files."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

import fxround
from fxround import new_process
from fxround.errors import FxroundError

USERS = """
from typing import NamedTuple
import torch

class Both(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor
"""
LOADS = """
import sys, torch, fxround
path = sys.argv[1]
try:
    fxround.load(path)
except ImportError as error:
    assert "have types of the module 'users_results', which is not imported" in str(error), error
else:
    raise AssertionError("a module was imported that the file names")
result = fxround.load(path, imports=["users_results"])(torch.ones(2, 4))
import users_results
assert type(result) is users_results.Both, result
"""


class Halves(NamedTuple):
    """A named tuple at the top level of a module."""

    first: Tensor
    second: Tensor


class Returning(nn.Module):
    """A layer, and what a function makes of its result."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(4, 6), make

    def forward(self, x: Tensor, **scales: Tensor) -> Any:
        y = self.layer(x)
        for scale in scales.values():
            y = y * scale
        return self.make(y)


class Summing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, *xs: Tensor, **named: Any) -> Tensor:
        result: Tensor = self.layer(sum(xs)) + named["bias"] * named.get("factor", 2.0)
        return result


def _assert_loaded_alike(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], path: Path) -> Any:
    compiled = fxround.compile(model.eval(), "bfloat16")
    want = compiled(*args, **kwargs)
    result = fxround.load(compiled.export(path, (args, kwargs)))(*args, **kwargs)
    (leaves, spec), (others, other) = pytree.tree_flatten(want), pytree.tree_flatten(result)
    assert spec == other and all(map(torch.equal, leaves, others))
    return result


@pytest.mark.parametrize(
    "make",
    [
        lambda y: y.topk(2),
        lambda y: torch.sort(y, dim=-1),
        lambda y: y.cummax(0),
        lambda y: y.max(1),
        lambda y: y.median(1),
        lambda y: {"best": y.topk(2), "parts": [y.min(0), y]},
    ],
    ids=["topk", "sort", "cummax", "max", "median", "nested"],
)
def test_named_tuples_of_operators_come_back_as_they_are(make: Any, tmp_path: Path) -> None:
    result = _assert_loaded_alike(Returning(make), (torch.randn(3, 4),), {}, tmp_path / "model.pt2")
    assert type(result) is type(make(torch.randn(3, 6)))


def test_a_named_tuple_of_the_users_comes_back_as_it_is(tmp_path: Path) -> None:
    model = Returning(lambda y: Halves(y[:, :3], y[:, 3:]))
    result = _assert_loaded_alike(model, (torch.randn(3, 4),), {}, tmp_path / "model.pt2")
    assert type(result) is Halves


def test_another_process_imports_the_module_of_a_named_tuple_where_the_caller_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "users_results.py").write_text(USERS)
    monkeypatch.syspath_prepend(tmp_path)
    import users_results  # type: ignore[import-not-found]

    model = Returning(lambda y: users_results.Both(y[:, :3], y[:, 3:]))
    path = fxround.compile(model.eval(), "bfloat16").export(tmp_path / "model.pt2", torch.ones(2, 4))
    ran = new_process.run(LOADS, str(path))
    assert ran.returncode == 0, ran.stderr


def test_a_named_tuple_that_no_module_has_is_refused(tmp_path: Path) -> None:
    local: Any = collections.namedtuple("local", "first second")
    compiled = fxround.compile(Returning(lambda y: local(y, y)).eval(), "bfloat16")
    with pytest.raises(FxroundError, match="has no named tuple 'local', or another one: a file has the name alone"):
        compiled.export(tmp_path / "model.pt2", torch.ones(2, 4))
    assert not any(tmp_path.iterdir())


def test_keywords_of_the_example_are_parameters_of_the_program(tmp_path: Path) -> None:
    x, path = torch.randn(3, 4), tmp_path / "model.pt2"
    _assert_loaded_alike(Returning(torch.tanh), (x,), {"one": torch.rand(6), "two": torch.rand(3, 6)}, path)
    with pytest.raises((TypeError, ValueError), match=r"two|one"):
        fxround.load(path)(x, one=torch.rand(6))


def test_positional_arguments_of_any_number_and_keywords(tmp_path: Path) -> None:
    xs = torch.randn(3, 4), torch.randn(3, 4)
    bias = torch.randn(6)
    _assert_loaded_alike(Summing(), xs, {"bias": bias}, tmp_path / "one.pt2")
    _assert_loaded_alike(Summing(), xs, {"bias": bias, "factor": torch.rand(6)}, tmp_path / "two.pt2")
