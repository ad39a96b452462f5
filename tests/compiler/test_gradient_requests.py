"""What autograd may ask of a compiled module's gradients: rows of tangents at once, and forward-mode derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian

import fxround
from fxround.errors import FxroundError


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def points(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_rows_of_tangents_have_the_bits_of_one_call_each(train: bool) -> None:
    compiled = fxround.compile(network(), "stochastic", seed=2).train(train)
    x = points(5, 4).requires_grad_()
    y, rows = compiled(x), points(4, 5, 3)
    inputs = [x, *compiled.parameters()]
    together = torch.autograd.grad(y, inputs, rows, is_grads_batched=True, retain_graph=True)
    mapped = torch.func.vmap(lambda row: torch.autograd.grad(y, inputs, row, retain_graph=True), in_dims=1, out_dims=1)(
        rows.transpose(0, 1)
    )
    single = [torch.autograd.grad(y, inputs, row, retain_graph=True) for row in rows]
    for found, other, *wanted in zip(together, mapped, *single, strict=True):
        assert torch.equal(found, torch.stack(wanted)) and torch.equal(other, torch.stack(wanted, 1))


def test_a_vectorized_jacobian_has_the_bits_of_one_row_after_another() -> None:
    compiled, x = fxround.compile(network(), "stochastic", seed=2).eval(), points(2, 4)
    wanted: Any = jacobian(compiled, x)
    found: Any = jacobian(compiled, x, vectorize=True)
    assert wanted.shape == (2, 3, 2, 4) and torch.equal(found, wanted)


@pytest.mark.parametrize("policy", ["reproducible", "identity"])
@pytest.mark.parametrize("where", ["argument", "parameter"])
def test_a_forward_derivative_is_not_dropped(policy: str, where: str) -> None:
    model, x = network().requires_grad_(False), points(5, 4)
    compiled = fxround.compile(model, policy)
    loaded_as = torch.compile(model, backend="fxround", options={"policy": policy}, fullgraph=True)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        if where == "parameter":
            dual, first = x, model[0]
            weight = first.weight
            del first.weight
            first.weight = forward_ad.make_dual(weight, weight)
        with pytest.raises(FxroundError, match="forward-mode differentiation"):
            compiled(dual)
        # Since torch 2.14 Dynamo refuses a tangent before it calls a backend.
        with pytest.raises((FxroundError, Unsupported), match=r"forward-mode (differentiation|AD tangent)"):
            loaded_as(dual)
        if where == "argument":
            with fxround.perturb(model, policy), pytest.raises(FxroundError, match="forward-mode differentiation"):
                model(dual)
