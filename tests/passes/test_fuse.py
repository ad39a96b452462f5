"""Fusion keeps the bits of any graph; and which operations are fused."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround.module.rounded_module import RoundedModule
from fxround.passes.optimizations.fuse import BUDGET


class Graph(nn.Module):
    """Operations on earlier values, by a list of (operation, operand, operand); the last ones are returned."""

    def __init__(self, steps: list[tuple[int, int, int]], results: int) -> None:
        super().__init__()
        self.steps, self.results = steps, results

    def forward(self, x: Tensor, row: Tensor) -> list[Tensor]:
        values = [x, row, x.t().contiguous().t()]
        for operation, a, b in self.steps:
            left, right = values[a % len(values)], values[b % len(values)]
            values.append(OPERATIONS[operation % len(OPERATIONS)](left, right))
        return values[-self.results :]


OPERATIONS: list[Any] = [
    lambda a, b: a + b,
    lambda a, b: a * b,
    lambda a, b: a - 0.1 * b,
    lambda a, b: torch.relu(a),
    lambda a, b: torch.tanh(a) * b,
    lambda a, b: a.clamp(-0.5, 2.0),
    lambda a, b: -a,
    lambda a, b: a.abs() + 1,
    lambda a, b: a.sum(-1, keepdim=True),
    lambda a, b: a.max(),
    lambda a, b: torch.nn.functional.hardtanh(a),
]


def run(model: nn.Module, policy: str, fuse: bool, *args: Tensor) -> tuple[RoundedModule, Any]:
    compiled = fxround.compile(model, policy, seed=5, fuse=fuse, strict=False)
    with torch.no_grad():
        return compiled, compiled(*args)


def nodes(compiled: RoundedModule, name: str) -> int:
    return sum(str(node.target) == name for node in compiled._called().fused.graph.nodes)


X = torch.randn(5, 77, generator=torch.Generator().manual_seed(0))
ROW = torch.randn(77, generator=torch.Generator().manual_seed(1))


@pytest.mark.part(3)
@pytest.mark.parametrize("policy", ["stochastic", "up_down", "bfloat16", "e5m2"])
@pytest.mark.parametrize("seed", range(2))
def test_any_graph_keeps_its_bits(seed: int, policy: str) -> None:
    chosen = random.Random(f"{seed} {policy}")
    steps = [(chosen.randrange(99), chosen.randrange(99), chosen.randrange(99)) for _ in range(20)]
    results = chosen.randrange(1, 5)
    model = Graph(steps, results)
    _, plain = run(model, policy, False, X, ROW)
    _, fused = run(model, policy, True, X, ROW)
    for want, got in zip(plain, fused, strict=True):
        assert torch.equal(want.view(torch.int32), got.view(torch.int32))


class Chain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(torch.tanh(x * 2 + 1)) - x


class Diamond(nn.Module):
    """The sum is between two pointwise operations of one shape: fusing them would make a cycle."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        return y + y.sum(-1, keepdim=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_a_chain_is_one_node(dtype: torch.dtype) -> None:
    compiled, fused = run(Chain(), "stochastic", True, X.to(dtype))
    plain_module, plain = run(Chain(), "stochastic", False, X.to(dtype))
    assert torch.equal(fused, plain)
    assert nodes(compiled, "fxround.fused.default") == 1 and nodes(compiled, "fxround.pointwise.default") == 0
    assert nodes(plain_module, "fxround.pointwise.default") == 4


def test_a_circle_is_not_made() -> None:
    compiled, fused = run(Diamond(), "stochastic", True, X)
    assert torch.equal(fused, run(Diamond(), "stochastic", False, X)[1])
    assert nodes(compiled, "fxround.fused.default") == 0


def test_nan_inf_and_zeros_pass_as_they_do_one_by_one() -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, -1e-45, 3e38] * 9)
    for policy in ("stochastic", "up_down", "bfloat16", "binary16"):
        want, got = (run(Chain(), policy, fuse, x)[1] for fuse in (False, True))
        assert torch.equal(want.view(torch.int32), got.view(torch.int32))


def test_the_graph_that_can_be_read_stays_one_node_an_operation() -> None:
    compiled, _ = run(Chain(), "stochastic", True, X)
    assert "fused" not in compiled.graph_text() and compiled.coverage().unrounded == ()


def test_an_exported_fused_graph_gives_the_same_bits(tmp_path: Any) -> None:
    compiled, fused = run(Chain(), "stochastic", True, X)
    path = compiled.export(tmp_path / "chain.pt2", (X,))
    assert torch.equal(fxround.load(path).reseed(5)(X), fused)


class Unrolled(nn.Module):
    """A loop in which every iteration is another program, because its numbers differ."""

    def forward(self, x: Tensor) -> Tensor:
        for turn in range(90):
            x = (x * (1 + turn) + 0.25).sum(-1, keepdim=True) + x * turn
        return x


def test_an_unrolled_loop_does_not_compile_for_ever() -> None:
    compiled = fxround.compile(Unrolled(), "reproducible", example_inputs=X)
    texts = {str(n.args[1]) for n in compiled._called().fused.graph.nodes if str(n.target) == "fxround.fused.default"}
    assert texts and sum(text.count("=") for text in texts) <= BUDGET
    assert nodes(compiled, "fxround.pointwise.default") > 90
