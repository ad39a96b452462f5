"""No graph is used after a change of what it depends on, none is captured for nothing, and looking changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import state_changes
import torch
from layers import LAYERS
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fxround
from fxround.errors import CaptureError, FxroundError

X = torch.linspace(-1, 2, 12).reshape(3, 4)
SAMPLE = state_changes.drawn(40, seed=0)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_changed_value_is_never_stale(name: str) -> None:
    assert state_changes.fault_of(SAMPLE[name]) == ""


@pytest.mark.parametrize("name", [name for name in state_changes.OTHERS if name != "grad mode"])
def test_no_other_change_is_stale(name: str) -> None:
    assert state_changes.fault_of(state_changes.OTHERS[name]) == ""


def test_a_value_that_is_not_read_may_change() -> None:
    model: Any = state_changes.Reading(2.0)
    compiled = fxround.compile(model, "reproducible")
    compiled(X)
    model.other, model.held = 5, 1.0 + 1.0
    compiled(X)
    assert len(compiled.captures().rows) == 1


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


def test_distributions_are_captured_once() -> None:
    def density(x: Tensor) -> Tensor:
        return torch.distributions.Normal(torch.zeros(4), torch.ones(4)).log_prob(x)

    compiled = fxround.compile(density, "reproducible", strict=False)
    for _ in range(3):
        compiled(X)
    assert len(compiled.captures().rows) == 1


def test_a_number_that_changes_at_each_call_meets_the_limit_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxround.compiler.capture_table.GRAPHS", 3)
    model = state_changes.Reading(0.0)
    compiled = fxround.compile(model, "reproducible")
    for step in range(3):
        model.held = float(step)
        compiled(X)
    model.held = 3.0
    with pytest.raises(CaptureError, match=r"3 graphs already.*self\.held has changed.*pass it as a tensor"):
        compiled(X)


@pytest.mark.parametrize("name", sorted(LAYERS)[::9])
def test_equal_calls_are_captured_once(name: str) -> None:
    layer, args = LAYERS[name]
    compiled = fxround.compile(layer.eval(), "reproducible", strict=False)
    with torch.no_grad():
        compiled(*args)
        captures = len(compiled.captures().rows)
        compiled(*args)
    assert len(compiled.captures().rows) == captures


class Counting(nn.Module):
    """Counts in a buffer how often a property is read, by eager calls and by whoever evaluates it."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(4))
        self.register_buffer("reads", torch.zeros(()))

    @property
    def weight(self) -> Tensor:
        self.reads.add_(1)
        return self.factor * 2

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Averaging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.5).add_(0.5 * x.detach().mean(0))
        return x - self.mean


def averaged() -> nn.Module:
    inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    return torch.optim.swa_utils.AveragedModel(inner, multi_avg_fn=average)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "spectral norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.ReLU()),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "counting property": Counting,
    "averaging": Averaging,
    "averaged model": averaged,
    "batch norm and dropout": lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Dropout()),
}


def state_of(model: nn.Module) -> list[tuple[str, Any]]:
    attributes = [(f"{n}.{k}", repr(v)) for n, m in model.named_modules() for k, v in vars(m).items() if k[0] != "_"]
    return [*((n, t.clone()) for n, t in model.state_dict().items()), *attributes, ("rng", torch.get_rng_state())]


def same_state(a: list[tuple[str, Any]], b: list[tuple[str, Any]]) -> bool:
    pairs = zip(a, b, strict=True)
    return all(n == m and (torch.equal(x, y) if isinstance(x, Tensor) else x == y) for (n, x), (m, y) in pairs)


@pytest.mark.parametrize("name", MODELS)
def test_looking_changes_nothing(name: str, tmp_path: Path) -> None:
    model = MODELS[name]().train()
    before = state_of(model)
    compiled = fxround.compile(model, "identity", strict=False, example_inputs=X)
    compiled.prepare(X)
    compiled.summary()
    compiled.export(tmp_path / "model.pt2", X)
    fxround.variability(model, X, samples=3)
    assert same_state(state_of(model), before)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "batch norm and dropout"])
def test_training_calls_change_state_as_often_as_eager_ones(name: str) -> None:
    model = MODELS[name]().train()
    eager, compiled = copy.deepcopy(model), fxround.compile(model, "identity", strict=False)
    for _ in range(2):
        compiled(X)
        eager(X)
    for (key, ours), theirs in zip(model.state_dict().items(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=key)  # stock kernels by other paths: sums in another order
    assert len(compiled.captures().rows) == 1


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
