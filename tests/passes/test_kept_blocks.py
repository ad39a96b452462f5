"""Values that rules round in blocks: leaks() proves that they are read with their blocks, and finds what is planted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround import Policy, Rule
from fxround.graph.dialect import read_map
from fxround.graph.values import module_of
from fxround.passes.analyses.leaks import edges

ROLES = (None, "weight", "input", "error", "gradient")


def blocks(text: str) -> Policy:
    """Every value in a scaled format, those that enter included."""
    return Policy(
        "blocks", tuple(Rule(role=r, rounding=text, accumulate=None if r else "binary32", optional=True) for r in ROLES)
    )


def moved(function: Callable[[Tensor], Tensor], text: str) -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(64, 64, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(function(self.fc(x)))

    x = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(0))
    policy = blocks(text)
    return fxround.compile(Net().eval(), policy, example_inputs=x), x


KEPT: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "relu": ("mxfp8", torch.relu),
    "transpose": ("mxfp8", lambda y: y.transpose(1, 2)),
    "heads": ("mxfp8", lambda y: y.view(3, 4, 2, 32).transpose(1, 2)),
    "joined": ("mxfp8", lambda y: y.reshape(3, 256)),
    "rows": ("mxfp8", lambda y: y[:, 1:]),
    "cut between blocks": ("mxfp8", lambda y: y[..., 32:]),
    "masked": ("mxfp8", lambda y: torch.where(y[:1] > 0, y, 0.0)),
    "one scale": ("int8", lambda y: y.reshape(-1, 7, 3)[..., 1] if y.numel() % 21 == 0 else y.view(-1, 6)),
    "fixed": ("fixed(16,8)", lambda y: y.reshape(-1, 6)[:, 1:]),
}
REGROUPED: dict[str, tuple[str, Callable[[Tensor], Tensor], str]] = {
    "cut inside": ("mxfp8", lambda y: y[..., 8:], "slice"),
    "small rows": ("mxfp8:48", lambda y: y.view(3, 4, 4, 16).transpose(2, 3).reshape(3, 4, 64), "reshape"),
    "joined rows": ("mxfp8:48", lambda y: y.view(3, 256), "reshape"),
    "joined tensors": ("mxfp8", lambda y: torch.cat([y, y.flip(-1)], -1), "cat"),
    "opposites": ("fixed(16,8)", torch.neg, "neg"),
}


@pytest.mark.part(2)
@pytest.mark.parametrize("name", KEPT)
def test_views_between_blocks_keep_them(name: str) -> None:
    text, function = KEPT[name]
    net, x = moved(function, text)
    assert not net.leaks() and net.leaks().proved > 3
    assert not net.leaks(x)  # values of a call are on the grid of their blocks


@pytest.mark.parametrize("name", REGROUPED)
def test_an_operation_that_regroups_blocks_is_named(name: str) -> None:
    text, function, operator = REGROUPED[name]
    net, x = moved(function, text)
    (leak,) = net.leaks().leaks
    assert operator in leak.value and leak.consumer == "tanh" and leak.declared.startswith("scaled(")
    assert leak.rule == "none: it regroups elements that share scales"
    assert net.leaks(x).leaks[0].elements > 0


@pytest.mark.parametrize("text", ["mxfp8", "nvfp4/stochastic", "fixed(16,8)"])
def test_every_rounding_in_blocks_that_is_taken_away_is_a_leak(text: str) -> None:
    net, x = moved(torch.relu, text)
    net.train()(x).sum().backward()
    graph, policy = net.lowered, blocks(text)
    assert all(e.proved for e in edges(graph, policy))
    names = [n.name for n in graph.graph.nodes if n.name.endswith("_rounded")]
    assert len(names) >= 3
    for name in names:
        other = module_of(graph, copy.deepcopy(graph.graph))
        node = next(n for n in other.graph.nodes if n.name == name)
        call = read_map(node)
        assert call is not None
        node.replace_all_uses_with(call.xs[0])
        found = [e for e in edges(other, policy) if not e.proved]
        assert {e.producer.name for e in found} == {name.removesuffix("_rounded")}, name
        assert all(str(e.declared).startswith("scaled(") for e in found)


def test_the_scales_of_another_value_prove_nothing() -> None:
    net, _ = moved(torch.relu, "mxfp8")
    graph = module_of(net.lowered, copy.deepcopy(net.lowered.graph))
    first, second = [n for n in graph.graph.nodes if n.name.endswith("_rounded")][:2]
    first.update_arg(0, [first.args[0][0], second.args[0][1]])
    (found,) = [e for e in edges(graph, blocks("mxfp8")) if not e.proved]
    assert found.producer is first


@pytest.mark.parametrize("text", ["mxfp8", "int8:channel/stochastic", "fixed(8,4)"])
def test_what_enters_beside_blocks_is_a_leak_until_its_rule_is_there(text: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return torch.dropout(torch.tanh(self.fc(x)), 0.5, True) + torch.full((64,), 0.5)

    policy = Policy("results", (Rule(rounding=text, accumulate="binary32"),))
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    net = fxround.compile(Net(), policy)
    net(x).sum().backward()
    found = net.leaks(x, tangents={0: torch.rand(4, 64)})
    assert {leak.value for leak in found.leaks} == {
        *("input 0", "weight fc.weight", "weight fc.bias", "gradient of result 0")
    }
    assert all(leak.declared.startswith("scaled(") for leak in found.leaks)
    weight = next(leak for leak in found.leaks if leak.value == "weight fc.weight")
    assert weight.outside and weight.outside > 2000  # of 4096
    assert {rule.role for rule in found.rules} == {"input", "weight", "error"}
    closed = net.with_policy(policy.with_rules(*found.rules))
    closed(x).sum().backward()
    assert not closed.leaks()
    said = policy.with_rules(*(Rule(role=rule.role, rounding="identity") for rule in found.rules))
    assert not fxround.compile(Net().eval(), Policy("said", said.rules[:3]), example_inputs=x).leaks()


@pytest.mark.parametrize("value, leaks", [(0.5, 0), (1 / 3, 1)])
def test_constants_are_compared_with_their_blocks(value: float, leaks: int) -> None:
    policy = Policy("blocks", (Rule(rounding="mxfp8"), Rule(role="input", rounding="mxfp8")))
    net = fxround.compile(lambda x: x * torch.full((64,), value), policy, example_inputs=torch.rand(2, 64))
    assert len(net.leaks().leaks) == leaks
