"""Inside the block every call of the model is perturbed; after it the model is unchanged."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxround


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.layer(x).tanh() * scale

    def twice(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self(x), self(x)


@pytest.fixture
def net() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Net().eval()


X = torch.rand(4, 5, generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def test_calls_in_the_block_are_samples_in_turn(net: Net) -> None:
    before = net(X)
    with fxround.perturb(net, seed=7) as perturbed:
        first, second = net.twice(X)
        third = net.forward(X)
    assert isinstance(perturbed, fxround.RoundedModule) and not perturbed.coverage().unrounded
    compiled = fxround.compile(net, "stochastic")
    expected = [compiled.reseed(7, sample=i)(X) for i in range(3)]
    assert all(torch.equal(a, b) for a, b in zip((first, second, third), expected, strict=True))
    assert not torch.equal(first, second)
    assert torch.equal(net(X), before)


@torch.no_grad()
def test_hooks_act_once_as_without_the_block(net: Net) -> None:
    net.register_forward_hook(lambda module, args, result: result + 1)
    with fxround.perturb(net, "identity"):
        inside = net(X)
    assert torch.equal(inside, net(X))


def test_the_model_stays_itself(net: Net) -> None:
    state = copy.deepcopy(net.state_dict())
    with fxround.perturb(net):
        assert isinstance(net, Net) and type(net).__name__ == "Net"
        assert inspect.signature(net.forward) == inspect.signature(Net().forward)
        with pytest.raises(TypeError, match="unexpected"):
            net(X, factor=2)
        with pytest.raises(ValueError, match="perturbed already"), fxround.perturb(net):
            pass
        assert list(net.state_dict()) == list(state)
    assert type(net) is Net


def test_an_error_restores_the_model(net: Net) -> None:
    def theirs() -> None:
        with fxround.perturb(net):
            net(X, scale=2.0)
            raise RuntimeError("theirs")

    with pytest.raises(RuntimeError, match="theirs"):
        theirs()
    assert type(net) is Net and not net.training


@torch.no_grad()
def test_the_compiled_module_of_a_block_shows_the_model_itself(net: Net, tmp_path: Path) -> None:
    with fxround.perturb(net, seed=3) as compiled:
        compiled.prepare(X)
        values = dict(compiled.observe(X))
        first = net(X)
        compiled.export(tmp_path / "net.pt2", X)
    assert torch.equal(values["output"], first) and len(compiled.captures()) == 1


def test_a_wrong_policy_changes_nothing(net: Net) -> None:
    with pytest.raises(fxround.PolicyError), fxround.perturb(net, "stocastic"):
        pass
    assert type(net) is Net


@pytest.mark.parametrize(
    "model, change, message",
    [
        (None, {"sample": "a"}, "sample is a str; expected an int"),
        (lambda z: z, {}, "model is a function; expected a torch.nn.Module: write a module whose forward calls"),
        (Net, {}, "model is the class Net; expected a torch.nn.Module: pass an instance"),
    ],
)
def test_mistakes_are_reported(net: Net, model: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message), fxround.perturb(model or net, **change):
        pass
    assert type(net) is Net
