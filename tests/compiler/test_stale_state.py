"""No graph is used after a change of what it depends on, and none is captured for nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import state_changes
import state_verdicts
import torch
from layers import LAYERS
from state_verdicts import Verdicts
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fxround
from fxround.errors import CaptureError, FxroundError

X = torch.linspace(-1, 2, 12).reshape(3, 4)
CASES = state_changes.drawn(25, seed=0) | state_changes.OTHERS | state_verdicts.STATE | state_verdicts.drawn(10, seed=0)


@pytest.mark.part(13)
@pytest.mark.parametrize("name", CASES)
def test_a_graph_is_used_exactly_where_key_and_guards_allow_it_and_it_is_right(name: str) -> None:
    """See the first lines of ``state_verdicts``, whose command tries all changes and more drawn ones."""
    assert state_verdicts.fault_of(name, CASES[name]) == ""


@pytest.mark.parametrize(
    "verdicts, fault",
    [
        (Verdicts(key=True, guards=True, dynamo=True, used=True, right=True), ""),
        (Verdicts(key=True, guards=True, dynamo=False, used=True, right=False), "stale"),
        (Verdicts(key=True, guards=False, dynamo=False, used=True, right=True), "was used"),
        (Verdicts(key=True, guards=True, dynamo=True, used=False, right=True), "was not used"),
        (Verdicts(key=True, guards=True, dynamo=False, used=True, right=True), "Dynamo traces again"),
        (Verdicts(key=False, guards=True, dynamo=True, used=False, right=True), "for nothing (key)"),
        (Verdicts(key=True, guards=False, dynamo=True, used=False, right=True), "for nothing (guards)"),
        (Verdicts(key=True, guards=False, dynamo=True, used=False, right=False), ""),
    ],
)
def test_the_judge_of_verdicts_sees_a_fault(verdicts: Verdicts, fault: str) -> None:
    found = verdicts.fault("another case")
    assert fault in found and bool(fault) == bool(found)


def test_a_value_that_is_not_read_may_change() -> None:
    model: Any = state_changes.Reading(2.0)
    compiled = fxround.compile(model, "reproducible")
    compiled(X)
    model.other, model.held = 5, 1.0 + 1.0
    compiled(X)
    assert len(compiled.captures().rows) == 1


@pytest.mark.parametrize(
    "name, reason",
    [
        ("rows of a tensor", "self.held[0] has changed"),
        ("order of a parameter", "the order of a parameter or buffer in memory has changed"),
        # torch 2.15 names the class.
        (
            "attribute of a class before its base",
            "the class of self.held has changed"
            if torch.__version__ >= "2.15"
            else "a method or an attribute of a class has changed",
        ),
        ("parameter under one of two names", "Reading has parameters or buffers of other names"),
    ],
)
def test_a_capture_says_what_has_changed(name: str, reason: str) -> None:
    model, change = state_changes.OTHERS[name]()
    compiled = fxround.compile(model, "reproducible")
    compiled(X)
    change()
    compiled(X)
    assert reason in str(compiled.captures())


class Asking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (2 if torch.is_grad_enabled() else 3)


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_a_model_sees_the_grad_mode_of_the_caller(training: bool, wanted: bool) -> None:
    model, x = Asking().train(training), X.clone().requires_grad_(wanted)
    compiled = fxround.compile(model, "reproducible")
    for enabled in (True, False, True):
        with torch.set_grad_enabled(enabled):
            result = compiled(x)
        assert torch.equal(result, model.forward(X) if enabled else X * 3)
        assert result.requires_grad == (enabled and wanted)


def test_strides_that_a_model_reads_are_those_of_the_call() -> None:
    def asking(x: Tensor) -> Tensor:
        return x * (2 if x.is_contiguous() else 3)

    compiled = fxround.compile(asking, "reproducible")
    turned = X.t().contiguous().t()
    assert torch.equal(compiled(X), X * 2) and torch.equal(compiled(turned), X * 3) and torch.equal(compiled(X), X * 2)
    with pytest.raises(CaptureError, match=r"order of an argument in memory.*\.contiguous\(\)"):
        compiled(torch.ones(3, 8)[:, ::2])


def test_a_graph_depends_on_the_environment_that_it_was_made_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo guards what it reads of ``os.environ``, and nothing of ``os.getenv``."""

    def reading(x: Tensor) -> Tensor:
        return x * float(os.getenv("OF_A_TEST", "1"))

    monkeypatch.delenv("OF_A_TEST", raising=False)
    compiled: Any = fxround.compile(reading, "reproducible")
    assert torch.equal(compiled(X), X)
    guards = compiled._called().captured.guards
    assert guards.hold((X,), {})
    monkeypatch.setenv("OF_A_TEST", "5")
    assert not guards.hold((X,), {}) and guards.changed((X,), {}) == ["os.environ"]


class Fivefold(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] * 5 if function is torch.relu else function(*args, **(kwargs or {}))


class Sixfold(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 6 if function is torch.ops.aten.relu.default else result


def test_modes_are_refused_or_leave_no_trace_in_a_graph() -> None:
    compiled = fxround.compile(torch.relu, "reproducible")
    with Fivefold(), pytest.raises(FxroundError, match=r"TorchFunctionMode.*Fivefold"):
        compiled(X)
    with Sixfold():
        compiled(X)
    assert torch.equal(compiled(X), X.relu())
    with torch.device("cpu"):
        compiled(X)
        compiled(X)
    assert len(compiled.captures().rows) <= 2


class Powers(nn.Module):
    def __init__(self, exponent: float) -> None:
        super().__init__()
        self.exponent = exponent

    def forward(self, x: Tensor) -> Tensor:
        return x**self.exponent


def test_distributions_are_captured_once() -> None:
    def density(x: Tensor) -> Tensor:
        return torch.distributions.Normal(torch.zeros(4), torch.ones(4)).log_prob(x)

    compiled = fxround.compile(density, "reproducible", strict=False)
    for _ in range(3):
        compiled(X)
    assert len(compiled.captures().rows) == 1


def test_a_number_that_decides_meets_the_limit_of_graphs_if_it_changes_at_each_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fxround.compiler.capture_report.GRAPHS", 3)
    model = Powers(0.0)
    compiled = fxround.compile(model, "reproducible")
    for step in range(3):
        model.exponent = float(step)
        compiled(X)
    model.exponent = 3.0
    with pytest.raises(CaptureError, match=r"3 graphs already.*self\.exponent has changed.*pass it as a tensor"):
        compiled(X)


@pytest.mark.part(3)
@pytest.mark.parametrize("name", sorted(LAYERS)[::9])
def test_equal_calls_are_captured_once(name: str) -> None:
    layer, args = LAYERS[name]
    compiled = fxround.compile(layer.eval(), "reproducible", strict=False)
    with torch.no_grad():
        compiled(*args)
        captures = len(compiled.captures().rows)
        compiled(*args)
    assert len(compiled.captures().rows) == captures


def test_a_lazy_module_is_called_itself_first() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU())
    compiled = fxround.compile(model, "reproducible")
    with pytest.raises(CaptureError, match=r"0\.weight of Sequential has no shape yet.*model\(x\)"):
        compiled(X)
    model(X)
    assert compiled(X).shape == (3, 4)


class _Configuration:
    """A class whose attributes models read."""


_TABLE: dict[str, float] = {}


class _Absent(nn.Module):
    """A model that catches what it does not find, an attribute of its own, of a class, or a key of a dict."""

    def __init__(self, read: Callable[[Any], float], error: type[Exception]) -> None:
        super().__init__()
        self.read, self.error, self.table = read, error, {}

    def forward(self, x: Tensor) -> Tensor:
        try:
            return x * self.read(self)
        except self.error:
            return x


@pytest.mark.parametrize(
    "read, error, change",
    [
        (lambda m: m.factor, AttributeError, lambda m, patch: setattr(m, "factor", 1.5)),
        (lambda m: m.factor, AttributeError, lambda m, patch: patch.setattr(_Absent, "factor", 1.5, raising=False)),
        (
            lambda m: _Configuration.factor,
            AttributeError,
            lambda m, patch: patch.setattr(_Configuration, "factor", 1.5, raising=False),
        ),
        (lambda m: _TABLE["factor"], KeyError, lambda m, patch: patch.setitem(_TABLE, "factor", 1.5)),
        (lambda m: m.table["factor"], KeyError, lambda m, patch: m.table.update(factor=1.5)),
    ],
    ids=["attribute", "attribute of the class", "attribute elsewhere", "key elsewhere", "key of a dict"],
)
def test_what_a_model_did_not_find_may_appear_later(
    read: Any, error: type[Exception], change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = _Absent(read, error), torch.arange(3.0)
    compiled = fxround.compile(model, "reproducible")
    assert torch.equal(compiled(x), x) and torch.equal(compiled(x), x) and len(compiled.captures()) == 1
    change(model, monkeypatch)
    assert torch.equal(compiled(x), 1.5 * x)


_TENSORS: dict[str, Tensor] = {}


class _OfDicts(nn.Module):
    """A model that asks what a tensor is which it finds in a dict. counting: it changes Python state, too."""

    def __init__(self, find: Callable[[Any], Tensor], ask: Callable[[Tensor], bool], counting: bool) -> None:
        super().__init__()
        self.find, self.ask, self.counting, self.calls = find, ask, counting, 0
        self.held = torch.arange(16.0).view(4, 4)
        self.table = {"held": torch.arange(16.0).view(4, 4)}

    def forward(self, x: Tensor) -> Tensor:
        if self.counting:
            self.calls += 1
        return x * (2 if self.ask(self.find(self)) else 3)


@pytest.mark.part(5)
@pytest.mark.parametrize("counting", [False, True], ids=["captured", "replayed"])
@pytest.mark.parametrize(
    "ask, change",
    [
        (lambda w: w.is_contiguous(), lambda w: setattr(w, "data", w.detach().T.contiguous().T)),
        (lambda w: w.shape[0] == 4, lambda w: setattr(w, "data", torch.ones(5, 4))),
        (lambda w: not w.requires_grad, lambda w: w.requires_grad_()),
    ],
    ids=["layout", "shape", "requires_grad"],
)
@pytest.mark.parametrize(
    "find",
    [lambda m: m.held, lambda m: m.table["held"], lambda m: _TENSORS["held"]],
    ids=["attribute", "dict", "global dict"],
)
def test_a_tensor_in_a_dict_may_change_in_place(find: Any, ask: Any, change: Any, counting: bool) -> None:
    _TENSORS["held"], x = torch.arange(16.0).view(4, 4), torch.ones(3)
    model = _OfDicts(find, ask, counting)
    compiled = fxround.compile(model, "reproducible")
    with torch.no_grad():
        assert torch.equal(compiled(x), 2 * x) and torch.equal(compiled(x), 2 * x)
        change(find(model))
        assert torch.equal(compiled(x), 3 * x)
