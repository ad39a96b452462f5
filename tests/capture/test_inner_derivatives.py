"""Models that differentiate inside of their forward pass: forces, residuals of differential equations, Jacobians."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround.errors import CaptureError

# Small integers: every step is exact, so that each policy below has the bits of the formulas.
EXACT = ("identity", "reproducible", "stochastic", "bfloat16")


class Energy(nn.Module):
    """The energy sum(w p^3) of positions p, and the forces -3 w p^2."""

    def __init__(self, within: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0, -1.0]))
        self.within = within

    def forward(self, p: Tensor) -> tuple[Tensor, Tensor]:
        if not self.within:
            return self.both(p)
        with torch.enable_grad():
            return self.both(p)

    def both(self, p: Tensor) -> tuple[Tensor, Tensor]:
        energy = (self.weight * (p * p * p)).sum()
        (slope,) = torch.autograd.grad(energy, p, create_graph=True)
        return energy, -slope


def positions() -> Tensor:
    return torch.tensor([[1.0, -2.0, 3.0], [0.0, 1.0, 2.0]]).requires_grad_()


@pytest.mark.part("stochastic-False", "reproducible-False", "identity-True")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("policy", EXACT)
def test_forces_are_the_formulas_and_train(policy: str, training: bool) -> None:
    model, p = Energy().train(training), positions()
    compiled = fxround.compile(model, policy)
    energy, forces = compiled(p)
    # stock: small integers, exact in any order
    assert torch.equal(energy, (model.weight * p**3).sum()) and torch.equal(forces, -3 * model.weight * p**2)
    (forces.sum() + 2 * energy).backward()
    assert torch.equal(model.weight.grad, (-3 * p**2 + 2 * p**3).sum(0))  # stock: as above
    assert torch.equal(p.grad, model.weight * (6 * p**2 - 6 * p))
    assert compiled.coverage().unrounded == () or policy == "identity"


@pytest.mark.part(3)
@pytest.mark.parametrize("within", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_studies_read_derivatives_without_gradients(training: bool, within: bool) -> None:
    model, p = Energy(within).train(training), positions()
    compiled = fxround.compile(model, "reproducible")
    energy, forces = compiled.evaluate(p)
    # stock: small integers, exact in any order
    assert torch.equal(energy, (model.weight * p**3).sum()) and torch.equal(forces, -3 * model.weight * p**2)
    assert not (energy.requires_grad or forces.requires_grad)
    assert dict(compiled.observe(p))["output"][1].equal(forces)
    fxround.check_invariance(model, (p,), ("threads",), "reproducible").check()
    assert fxround.variability(model, (p,), samples=10).outputs


class UnderGradients(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return x * 2


def test_a_model_that_enables_gradients_can_be_evaluated() -> None:
    model = nn.Sequential(nn.Linear(2, 2), UnderGradients())
    x = torch.ones(3, 2)
    compiled = fxround.compile(model, "reproducible")
    assert torch.equal(compiled.evaluate(x), compiled(x))


def cube(x: Tensor) -> Tensor:
    return (x * x * x).sum()


TRANSFORMS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Tensor]]] = {
    "grad": (torch.func.vmap(torch.func.grad(cube)), lambda x: 3 * x**2),
    "grad of grad": (
        torch.func.vmap(torch.func.grad(lambda x: torch.func.grad(cube)(x).sum())),
        lambda x: 6 * x,
    ),
    "jacrev": (torch.func.jacrev(lambda x: x * x), lambda x: torch.diag(2 * x.view(-1)).view(2, 3, 2, 3)),
    "jacfwd": (torch.func.jacfwd(lambda x: x * x), lambda x: torch.diag(2 * x.view(-1)).view(2, 3, 2, 3)),
    "jvp": (lambda x: torch.func.jvp(cube, (x,), (torch.ones_like(x),))[1], lambda x: (3 * x**2).sum()),
    "vjp": (lambda x: torch.func.vjp(cube, x)[1](torch.tensor(2.0))[0], lambda x: 6 * x**2),
    # The derivative of a parameter along itself is a zero without memory.
    "jvp of a layer": (
        lambda x: torch.func.jvp(lambda v: nn.functional.linear(v, torch.eye(3), torch.ones(3)), (x,), (x * 2,))[1],
        lambda x: 2 * x,
    ),
}


@pytest.mark.part(2)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_inside_are_the_formulas(name: str) -> None:
    transformed, formula = TRANSFORMS[name]
    x = positions().detach()
    assert torch.equal(fxround.compile(transformed, "reproducible")(x), formula(x))


def test_what_pytorch_cannot_trace_is_refused_with_a_remedy() -> None:
    class Inside(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            return torch.autograd.grad(cube(x), x, create_graph=True)[0]

    x = torch.ones(3)
    with pytest.raises(CaptureError, match="pass the tensor as an argument that requires gradients"):
        fxround.compile(Inside(), "reproducible")(x)

    class Consumed(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            energy = cube(x)
            return energy, torch.autograd.grad(energy, x)[0]

    for training in (True, False):
        with pytest.raises(CaptureError, match=r"consumed.*\n.*\.detach\(\)"):
            fxround.compile(Consumed().train(training), "reproducible")(x.requires_grad_())
    with pytest.raises(RuntimeError, match="does not require grad"):
        fxround.compile(Energy(), "reproducible")(torch.ones(3))


def test_a_gradient_of_the_graph_is_differentiated_again() -> None:
    compiled, x = fxround.compile(cube, "reproducible"), torch.ones(3, requires_grad=True)
    (slope,) = torch.autograd.grad(compiled(x), x, create_graph=True)
    slope.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [6, 6, 6]
