"""Submodules that a method of the model calls are compiled by themselves, under the rules for their paths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxround

X = torch.linspace(-1, 1, 8).reshape(2, 4)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


class Stacked(nn.Module):
    """Methods that call submodules of every depth, hand them around, and change the list of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.encode(x))
        return result

    def encode(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def later(self, x: Tensor) -> Tensor:
        for layer in self.layers[1:]:
            x = layer(x)
        return x

    def inner(self, x: Tensor) -> Tensor:
        first: Any = self.layers[0]
        result: Tensor = first[0](x)
        return result

    def get_encoder(self) -> nn.Module:
        return self.layers[0]

    def modules_of(self) -> dict[str, Any]:
        return {"head": self.head, "all": [self, self.head]}

    def prune(self) -> None:
        self.layers = self.layers[:2]
        self.spare = self.head

    def encode_first(self, x: Tensor) -> Tensor:
        result: Tensor = self.get_encoder()(x)
        return result


@pytest.mark.parametrize("policy", ["bfloat16", "reproducible"])
def test_submodules_that_a_method_calls_are_compiled_by_themselves(policy: str) -> None:
    torch.manual_seed(0)
    model = Stacked().eval()
    compiled = fxround.compile(model, policy, strict=True)
    alone = [fxround.compile(layer, policy) for layer in model.layers]
    with torch.no_grad():
        y = alone[0](X)
        assert same(compiled.encode_first(X), y) and same(compiled.encode(X), alone[2](alone[1](y)))
        assert same(compiled.later(y), alone[2](alone[1](y)))
        assert same(compiled.inner(X), fxround.compile(model.layers[0][0], policy)(X))
        compiled(X)
    paths = ["layers.0", "layers.1", "layers.2", "layers.0.0"]
    assert [row["module"] for row in compiled.captures()] == [*paths, ""]
    assert list(compiled.called_submodules) == paths
    part = compiled.called_submodules["layers.1"]
    assert part.coverage().unrounded == ()
    assert {"layers.1.0", "layers.1.1"} <= {row["module"] for row in part.summary()}


def test_rules_name_a_submodule_that_a_method_calls_by_its_path() -> None:
    torch.manual_seed(0)
    model = Stacked().eval()
    everywhere = fxround.Rule(rounding="binary32")
    policy = fxround.Policy("first", (everywhere, fxround.Rule("layers.0*", rounding="bfloat16")))
    narrow, wide = (fxround.Policy("one", (rule,)) for rule in (fxround.Rule(rounding="bfloat16"), everywhere))
    compiled = fxround.compile(model, policy)
    with torch.no_grad():
        first = fxround.compile(model.layers[0], narrow)(X)
        assert same(compiled.encode_first(X), first)
        # The rule for layers.0 matches nothing in the others, which is no error for a submodule.
        assert same(compiled.encode(X), fxround.compile(nn.Sequential(*list(model.layers)[1:]), wide)(first))
    model.layers = nn.ModuleList(list(model.layers)[1:])
    stray = fxround.compile(model, policy.with_rules(fxround.Rule("stray", rounding="bfloat16")))
    with torch.no_grad():
        stray.encode_first(X)
        with pytest.raises(fxround.PolicyError, match=r"stray.* matches no operation"):
            stray(X)


def test_modules_leave_a_method_as_themselves() -> None:
    model = Stacked().eval()
    compiled = fxround.compile(model, "bfloat16")
    assert compiled.get_encoder() is model.layers[0]
    found = compiled.modules_of()
    assert found["head"] is model.head and found["all"][0] is compiled and found["all"][1] is model.head
    kept = list(model.layers)[:2]
    compiled.prune()
    assert type(model.layers) is nn.ModuleList and list(model.layers) == kept and model.spare is model.head
    assert {type(m) for m in model.modules()} == {Stacked, nn.ModuleList, nn.Sequential, nn.Linear, nn.Tanh}
    with torch.no_grad():
        assert same(compiled.encode(X), fxround.compile(nn.Sequential(*kept), "bfloat16")(X))


def test_submodules_draw_their_own_random_bits_and_train() -> None:
    torch.manual_seed(0)
    model = Stacked()
    compiled = fxround.compile(model.eval(), "stochastic", seed=1)
    with torch.no_grad():
        once = compiled.encode(X)
        assert same(compiled.encode(X), once) and not same(compiled.reseed(1, sample=1).encode(X), once)
        # Layers of equal weights, applied to one argument: other layers, other bits.
        model.layers[1].load_state_dict(model.layers[0].state_dict())
        first, second = (compiled.call_submodule(model.layers[i], (X,), {}) for i in (0, 1))
        assert not same(first, second)
    compiled.reseed(1).train()
    y = compiled.encode(X)
    assert compiled.rng.tolist() == [1, 3]  # three calls that train
    y.sum().backward()
    assert model.layers[0][0].weight.grad is not None and model.head.weight.grad is None
    with torch.no_grad():
        compiled.advance = True
        compiled.encode_first(X)
    assert compiled.rng.tolist() == [1, 4]
