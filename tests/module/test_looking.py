"""Looking at a model changes nothing of it, and calls change its state as often as its own calls do."""

from __future__ import annotations

import copy

import looking
import pytest
import torch
from looking import CHANGING, X
from torch import nn

import fxround

MODELS = looking.sample()


@pytest.mark.part(without=("layers",))
@pytest.mark.parametrize("name", MODELS)
def test_looking_changes_nothing(name: str) -> None:
    """``python tests/support/looking.py`` looks at every model of the suite."""
    for look, changed, refusal in looking.changes(MODELS[name]):
        assert not changed, f"{look} changes {changed}"
        assert bool(refusal) == (look in looking.REFUSED.get(name, ())), f"{look}: {refusal}"


@pytest.mark.parametrize("name", ["state", "attribute", "gradient", "hook", "property", "random numbers"])
def test_a_change_is_seen(name: str) -> None:
    def look(model: nn.Module, args: object, kwargs: object) -> None:
        layer = model.inner[0]
        if name == "state":
            layer.weight.data.view(-1)[0] += 1  # two facts: a parameter of the layer, and the state
        elif name == "attribute":
            layer.dims = list(layer.dims)
        elif name == "gradient":
            layer.weight.grad = layer.weight.grad.clone()
        elif name == "hook":
            layer.register_forward_hook(print)
        elif name == "property":
            assert hasattr(model, "peeked")
        else:
            torch.rand(1)

    def made() -> looking.Model:
        layer = nn.Linear(4, 4)
        layer.dims = [4]
        return nn.Sequential(layer), (X,), {}

    ((_, changed, _),) = looking.changes(made, {"look": look})
    assert len(changed) == (2 if name == "state" else 1)


@pytest.mark.parametrize("name", [name for name in CHANGING if name != "batch norm and dropout"])
def test_training_calls_change_state_as_often_as_eager_ones(name: str) -> None:
    model = CHANGING[name]().train()
    eager, compiled = copy.deepcopy(model), fxround.compile(model, "identity", strict=False)
    for _ in range(2):
        compiled(X)
        eager(X)
    for (key, ours), theirs in zip(model.state_dict().items(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=key)  # stock kernels by other paths: sums in another order
    assert len(compiled.captures().rows) == 1
