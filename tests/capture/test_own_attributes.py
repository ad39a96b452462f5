"""A ``forward`` that was set on the model itself, and attributes that were set on tensors among the arguments."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxround
from fxround.errors import FxroundError


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 4)


def _rounded(function: Any, x: Tensor) -> Tensor:
    result: Tensor = fxround.compile(function, "reproducible")(x)
    return result


class Scaling:
    """An object with a method, and one that is called."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def times(self, x: Tensor) -> Tensor:
        return x * self.factor

    __call__ = times


def test_a_function_that_is_set_as_forward_is_what_calls_compute(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    compiled = fxround.compile(model, "reproducible")
    before = compiled(x)
    gain = [2.0]

    def forward(x: Tensor, scale: float = 1.0) -> Tensor:
        result: Tensor = model[0](x) * gain[0] * scale
        return result

    model.forward = forward  # type: ignore[method-assign,assignment]
    layer = copy.deepcopy(model[0])
    assert torch.equal(compiled(x), _rounded(lambda x: layer(x) * 2.0 * 1.0, x))
    rows = len(compiled.captures().rows)
    compiled(x + 1)
    assert len(compiled.captures().rows) == rows
    gain[0] = 4.0
    assert torch.equal(compiled(x), _rounded(lambda x: layer(x) * 4.0 * 1.0, x))
    assert torch.equal(compiled(x, scale=0.5), _rounded(lambda x: layer(x) * 4.0 * 0.5, x))
    with torch.no_grad():
        model[0].weight.mul_(2)
        layer.weight.mul_(2)
    assert torch.equal(compiled(x), _rounded(lambda x: layer(x) * 4.0 * 1.0, x))
    model.forward = lambda x: model[1](x)  # type: ignore[method-assign,assignment]
    assert torch.equal(compiled(x), _rounded(nn.Tanh(), x))
    del model.forward
    with torch.no_grad():
        model[0].weight.div_(2)
    assert torch.equal(compiled(x), before)


def test_a_forward_that_is_set_is_trained_and_exported(x: Tensor, tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    usual = model.forward
    model.forward = lambda x: usual(x).tanh()  # type: ignore[method-assign,assignment]
    compiled = fxround.compile(model, "reproducible")
    compiled(x).sum().backward()
    assert model.weight.grad is not None and "weight" in compiled.graph_text().split("\n")[0]
    assert torch.equal(fxround.load(compiled.eval().export(tmp_path / "model.pt2", x))(x), compiled(x))
    assert vars(model)["forward"](x).shape == (3, 4) and type(model) is nn.Linear


def test_any_callable_object_is_a_forward(x: Tensor) -> None:
    scaling, model = Scaling(2.0), nn.Linear(4, 4)
    model.forward = scaling.times  # type: ignore[method-assign]
    compiled = fxround.compile(model, "reproducible")
    assert torch.equal(compiled(x), x * 2.0)
    scaling.factor = 3.0
    assert torch.equal(compiled(x), x * 3.0)
    model.forward = Scaling(4.0)  # type: ignore[method-assign,assignment]
    assert torch.equal(compiled(x), x * 4.0)
    usual = copy.deepcopy(model)
    del usual.forward
    model.forward = functools.partial(nn.Linear.forward, model)  # type: ignore[method-assign,assignment]
    assert torch.equal(compiled(x), _rounded(usual, x))


def test_a_graph_module_whose_forward_is_set(x: Tensor) -> None:
    model = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    compiled = fxround.compile(model, "reproducible")
    compiled(x)
    model.forward = lambda x: model.get_submodule("1")(x)  # type: ignore[method-assign,assignment]
    assert torch.equal(compiled(x), _rounded(nn.Tanh(), x))


class Reading(nn.Module):
    """Multiplies by a number that the argument has, 1 without one."""

    def forward(self, x: Tensor) -> Tensor:
        return x * getattr(x, "scale", 1.0)


def _scaled(x: Tensor, scale: Any) -> Tensor:
    y = x.clone()
    y.scale = scale  # type: ignore[attr-defined]
    return y


def test_an_attribute_of_an_argument_is_that_of_the_call(x: Tensor) -> None:
    compiled = fxround.compile(Reading(), "reproducible")
    for scale in (2.0, 2.0, 3.0, 2.0, -0.0, 0.0):
        assert torch.equal(compiled(_scaled(x, scale)).view(torch.int32), (x * scale).view(torch.int32)), scale
        assert torch.equal(compiled(x), x)
    assert {row[5] for row in compiled.captures().rows} >= {"first call", "x.scale has changed"}
    assert len(compiled.captures().rows) == 5


def test_an_attribute_that_is_a_tensor_is_read_at_every_call(x: Tensor) -> None:
    compiled = fxround.compile(Reading(), "reproducible")
    for batch in (1, 3):
        for _ in range(2):
            scale = torch.rand(batch, 4)
            assert torch.equal(compiled(_scaled(x[:batch], scale)), x[:batch] * scale)


def test_an_attribute_of_an_argument_enters_no_file(x: Tensor, tmp_path: Path) -> None:
    compiled = fxround.compile(Reading(), "reproducible")
    with pytest.raises(FxroundError, match="the model reads scale of a tensor among its arguments"):
        compiled.export(tmp_path / "model.pt2", _scaled(x, 2.0))
    assert torch.equal(fxround.load(compiled.export(tmp_path / "model.pt2", x))(x), x)
