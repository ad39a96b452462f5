"""What a compiled function or model reads from outside: modules, tensors, numbers, and objects that hold them."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxround
from fxround.errors import CaptureError

RATE = 2.0
NAMES = ["a"]


def net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 2))


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)


class Loss(nn.Module):
    """The loss as a module that holds the model: what a function of the same model must equal."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.model(x), y)


def helper(model: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = model(x)
    return result


def in_closure(model: nn.Module) -> Callable[..., Tensor]:
    return lambda x, y: F.mse_loss(model(x), y)


def by_helper(model: nn.Module) -> Callable[..., Tensor]:
    return lambda x, y: F.mse_loss(helper(model, x), y)


def by_object(model: nn.Module) -> Callable[..., Tensor]:
    held = SimpleNamespace(parts={"model": [model]})
    return lambda x, y: F.mse_loss(held.parts["model"][0](x), y)


def by_default(model: nn.Module) -> Callable[..., Tensor]:
    def loss(x: Tensor, y: Tensor, *, model: nn.Module = model) -> Tensor:
        return F.mse_loss(model(x), y)

    return loss


def by_method(model: nn.Module) -> Callable[..., Tensor]:
    class Trainer:
        def __init__(self) -> None:
            self.model = model

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(self.model(x), y)

    return Trainer().loss


def by_partial(model: nn.Module) -> Callable[..., Tensor]:
    return functools.partial(lambda own, x, y: F.mse_loss(own(x), y), model)


WAYS = (in_closure, by_helper, by_object, by_default, by_method, by_partial)


@pytest.mark.part(3)
@pytest.mark.parametrize("way, policy", [*zip(WAYS, cycle(["reproducible", "stochastic"]), strict=False)])
def test_a_function_trains_the_model_that_it_reads(way: Callable[..., Any], policy: str) -> None:
    """Three steps: losses, parameters, and statistics of the batch norm are those of a module that holds the model."""
    models = net(), net()
    losses = fxround.compile(Loss(models[0]), policy, seed=1), fxround.compile(way(models[1]), policy, seed=1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(3):
        found = []
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            found.append(loss(*batch(step)))
            found[-1].backward()
            optimizer.step()
        assert torch.equal(*found)
    for a, b in zip(models[0].state_dict().values(), models[1].state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert len(losses[1].captures()) == 1
    # One graph for evaluation, which has gradients too.
    models[0].eval(), models[1].eval()
    found = [loss(*batch(9)) for loss in losses]
    assert torch.equal(*found) and not losses[1].training
    gradients = [torch.autograd.grad(y, list(m.parameters())) for y, m in zip(found, models, strict=True)]
    assert all(map(torch.equal, *gradients))


def test_a_function_has_the_parameters_of_its_model() -> None:
    model = net()
    compiled = fxround.compile(in_closure(model), "reproducible")
    assert {id(p) for p in compiled.parameters()} == {id(p) for p in model.parameters()}
    compiled.eval()
    assert not model.training and not compiled.training
    compiled.train()
    assert model[3].training


def test_another_model_under_the_same_name_is_read() -> None:
    models = [net().eval(), nn.Linear(4, 2)]
    model: nn.Module = models[0]
    compiled = fxround.compile(lambda x: model(x), "reproducible")
    x = batch()[0]
    for model in (*models, models[0]):
        assert torch.equal(compiled(x), fxround.compile(model, "reproducible")(x))
    model[0].weight = nn.Parameter(torch.zeros(6, 4))
    assert torch.equal(compiled(x), fxround.compile(model, "reproducible")(x))


def test_a_tensor_from_outside_has_its_current_value_and_a_gradient() -> None:
    scale, shift = torch.ones(3, requires_grad=True), torch.zeros(3)
    compiled = fxround.compile(lambda x: x * scale + shift, "reproducible")
    x = torch.arange(3.0)
    for _ in range(3):
        compiled(x).sum().backward()
        assert torch.equal(scale.grad, x)
        scale.grad = None
        with torch.no_grad():
            scale.mul_(2)
            shift.add_(1)
        assert torch.equal(compiled(x), x * scale + shift)
    assert len(compiled.captures()) == 1
    # A result of other operations passes its gradient on.
    source = torch.ones(3, requires_grad=True)
    made = source * 3
    fxround.compile(lambda x: x * made, "reproducible")(x).sum().backward()
    assert torch.equal(source.grad, 3 * x)


def test_numbers_from_outside_are_those_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A global, a variable of a closure, an attribute of an object, an item, a length."""
    settings, inner = SimpleNamespace(shift=1.0, parts=[1.0, 2.0]), 3.0
    compiled = fxround.compile(
        lambda x: x * RATE + settings.shift + inner + settings.parts[1] + len(NAMES), "reproducible"
    )
    x = torch.ones(2)

    def check() -> None:
        expected = x * RATE + settings.shift + inner + settings.parts[1] + len(NAMES)
        assert torch.equal(compiled(x), expected)

    check()
    monkeypatch.setitem(globals(), "RATE", 5.0)
    check()
    settings.shift = -0.0
    check()
    inner = 7.0
    check()
    settings.parts[1] = 4.0
    check()
    monkeypatch.setitem(globals(), "NAMES", ["a", "b"])
    check()
    reasons = [row["reason"] for row in compiled.captures()]
    assert reasons[1:] == [
        *("RATE has changed", "settings.shift has changed", "inner has changed"),
        *("settings.parts[1] has changed", "NAMES has changed"),
    ]
    count = len(reasons)
    settings.shift, inner = 1.0, 3.0  # no combination of before
    check()
    check()
    assert len(compiled.captures()) == count + 1


def test_a_model_reads_the_current_numbers_of_its_objects_and_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    class Config:
        rate = 2.0

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = Config()

        def forward(model, x: Tensor) -> Tensor:  # noqa: N805 (a first parameter of another name)
            return x * model.config.rate + RATE

    model = Model()
    compiled, x = fxround.compile(model, "reproducible"), torch.ones(3)
    assert torch.equal(compiled(x), x * 4)
    model.config.rate = 5.0
    assert torch.equal(compiled(x), x * 7)
    monkeypatch.setitem(globals(), "RATE", 1.0)
    assert torch.equal(compiled(x), x * 6)
    del model.config.rate
    monkeypatch.setattr(Config, "rate", 9.0)
    assert torch.equal(compiled(x), x * 10)


def test_a_number_that_changes_with_every_call_is_refused() -> None:
    state = SimpleNamespace(count=0)
    compiled = fxround.compile(lambda x: x + state.count, "reproducible")
    for state.count in range(64):
        assert torch.equal(compiled(torch.zeros(1)), torch.full((1,), float(state.count)))
    state.count = 64
    with pytest.raises(CaptureError, match=r"64 graphs already.*state\.count.*pass it as a tensor"):
        compiled(torch.zeros(1))


def test_copies_read_the_same_model() -> None:
    model = net().eval()
    compiled = fxround.compile(in_closure(model), "reproducible")
    want = compiled(*batch())
    twin = copy.deepcopy(compiled)
    with torch.no_grad():
        model[4].bias += 1
    assert torch.equal(twin(*batch()), compiled(*batch())) and not torch.equal(compiled(*batch()), want)


def module_level(x: Tensor) -> Tensor:
    return x * RATE


def test_a_function_without_state_is_pickled() -> None:
    compiled = fxround.compile(module_level, "reproducible")
    again = pickle.loads(pickle.dumps(compiled))
    assert torch.equal(again(torch.ones(2)), compiled(torch.ones(2)))


def test_a_model_that_is_defined_later_is_found() -> None:
    compiled = fxround.compile(lambda x: later(x), "reproducible")
    later = nn.Linear(3, 2)
    compiled(torch.ones(1, 3)).sum().backward()
    assert torch.equal(later.weight.grad, torch.ones(2, 3))


def test_an_exported_function_holds_its_model(tmp_path: Any) -> None:
    model = net().eval()
    compiled = fxround.compile(lambda x: model(x) * 2, "stochastic").reseed(3)
    x = batch()[0]
    compiled.export(tmp_path / "f.pt2", x)
    assert torch.equal(fxround.load(tmp_path / "f.pt2").reseed(3)(x), compiled.reseed(3)(x))


@pytest.mark.parametrize("study", [fxround.variability, functools.partial(fxround.localize, check=0.0)])
def test_a_study_of_a_function_is_refused_before_it_runs(study: Callable[..., Any]) -> None:
    model = net().eval()
    with pytest.raises(TypeError, match=r"model is a function; expected a torch\.nn\.Module: write a module"):
        study(lambda x: model(x), batch()[0])
