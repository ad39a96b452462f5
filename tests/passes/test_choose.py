"""Choices as programs have the bits of the operators that they replace, also for special values."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround.module.rounded_module import RoundedModule

SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 3.0]
X = torch.tensor([a for a in SPECIAL for _ in SPECIAL] * 3).reshape(11, 33)
Y = torch.tensor([b for _ in SPECIAL for b in SPECIAL] * 3).reshape(11, 33)

CHOICES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "lt": lambda x, y: torch.where(x < y, x, y),
    "le": lambda x, y: torch.where(x <= 0, y, x),
    "gt": lambda x, y: torch.where(x > y, y, 7.0),
    "ge": lambda x, y: torch.where(x >= 0.5, torch.zeros_like(x), y),
    "eq": lambda x, y: torch.where(x == y, x, torch.full_like(x, -0.0)),
    "ne": lambda x, y: torch.where(x != y, x, torch.ones([], dtype=x.dtype)),
    "mask": lambda x, y: torch.where((x < y) & (y < 1), x, y),
    "row": lambda x, y: torch.where((x < y).any(0), x, y),
    "third": lambda x, y: torch.where(x < 1 / 3, x, y),
    "cast": lambda x, y: (x < y).to(x.dtype) * y,
    "fused": lambda x, y: torch.where(x < y, x * 2, y + 1) + torch.where(x < 0, x, -y).relu(),
}


class Applied(nn.Module):
    """Every choice of the table."""

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return [choice(x, y) for choice in CHOICES.values()]


def run(policy: str, fuse: bool, *args: Tensor) -> tuple[RoundedModule, list[Tensor]]:
    compiled = fxround.compile(Applied(), policy, seed=3, fuse=fuse)
    with torch.no_grad():
        return compiled, compiled(*args)


def targets(compiled: RoundedModule) -> list[str]:
    return [str(node.target) for node in compiled._called().fused.graph.nodes]


@pytest.mark.part("dtype0")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_choice_keeps_its_bits(dtype: torch.dtype) -> None:
    x, y = X.to(dtype), Y.to(dtype).t().contiguous().t()
    compiled, chosen = run("stochastic", True, x, y)
    _, plain = run("stochastic", False, x, y)
    for name, a, b in zip(CHOICES, chosen, plain, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name
    left = targets(compiled)
    assert left.count("aten.where.self") == (0 if dtype != torch.bfloat16 else len(CHOICES))
    # What makes a mask, and the one comparison with a number that the dtype lacks.
    assert left.count("aten.le.Scalar") == left.count("aten.ge.Scalar") == (0 if dtype != torch.bfloat16 else 1)
    assert left.count("aten.lt.Scalar") == (2 if dtype == torch.float32 else 1 if dtype == torch.float64 else 3)


def test_relus_backward_is_one_kernel() -> None:
    model = nn.Sequential(nn.Linear(9, 33), nn.ReLU(), nn.Linear(33, 5))
    x = X[:, :9].nan_to_num(0.25, 1.0, -1.0)
    found = []
    for fuse in (True, False):
        compiled = fxround.compile(model, "stochastic", seed=3, fuse=fuse)
        found.append(torch.autograd.grad(compiled(x).sum(), list(model.parameters())))
        assert compiled._called().step is not None
        names = {getattr(n.target, "__name__", "") for n in compiled._called().step.backward.graph.nodes}
        assert ("where.self" in names) != fuse and ("le.Scalar" in names) != fuse
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("kept", [lambda x: torch.where(x > 0, x, 0.5), torch.clone, lambda x: x.clone()[:2]])
def test_operators_of_pytorch_read_the_layout_that_they_read_without_fusion(kept: Callable[[Tensor], Tensor]) -> None:
    """A graph captured with a row-major argument, called with a channels-last one."""
    rows = torch.randn(4, 8, 12, 12, generator=torch.Generator().manual_seed(1))
    found = []
    for fuse in (True, False):
        compiled = fxround.compile(lambda x: kept(x).sum((0, 2, 3)), "identity", fuse=fuse)
        layouts = rows, rows.contiguous(memory_format=torch.channels_last)
        found.append([compiled(x) for x in layouts for _ in range(3)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
