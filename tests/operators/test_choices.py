"""Maxima and minima: the sign of a zero depends on the numbers alone, not on their positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from layers import Calls
from torch import Tensor
from torch.nn import functional as F

import fxround
from fxround.operators.formulas import FORMULAS, choices

aten = torch.ops.aten
LENGTHS = (1, 2, 3, 8, 9, 16, 17, 31, 33, 64, 100)


def signed_zeros(*shape: int) -> Tensor:
    """Zeros of either sign; a few negative numbers in some of the rows."""
    generator = torch.Generator().manual_seed(1)
    signs = torch.randint(0, 2, shape, generator=generator) * 2.0 - 1
    x = torch.zeros(shape).copysign(signs)
    return torch.where(torch.rand(shape, generator=generator) < 0.2, torch.tensor(-1.5), x)


def same(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape and torch.equal(got.view(torch.int32), want.view(torch.int32))


def ordered(x: Tensor) -> Tensor:
    """Integers in the order of the numbers, -0 below +0."""
    bits = x.view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@pytest.mark.parametrize("n", LENGTHS)
def test_a_largest_zero_is_positive_if_any_is(n: int) -> None:
    x = signed_zeros(40, n)
    for reduced in ((x, [1]), (x.t().contiguous().t(), [1]), (x.t().contiguous(), [0])):
        dim = reduced[1][0]
        same(choices.amax(*reduced), _back(ordered(reduced[0]).amax(dim)))
        same(choices.amin(*reduced), _back(ordered(reduced[0]).amin(dim)))
    both = choices.aminmax(x)
    same(torch.stack(both), torch.stack([choices.min_of_all(x), choices.max_of_all(x)]))
    same(both[1], _back(ordered(x).max()))


def _back(order: Tensor) -> Tensor:
    return torch.where(order < 0, order ^ 0x7FFFFFFF, order).view(torch.float32)


@pytest.mark.parametrize("n", LENGTHS)
def test_the_larger_of_two_zeros_is_positive_wherever_they_lie(n: int) -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf])
    x, y = (v.repeat_interleave(n) for v in torch.cartesian_prod(values, values).t().contiguous())
    same(choices.maximum(x, y), _back(torch.maximum(ordered(x), ordered(y))))
    same(choices.minimum(x, y), _back(torch.minimum(ordered(x), ordered(y))))
    same(choices.clamp(x, y), choices.maximum(x, y))
    nan = torch.full((n,), torch.nan)
    for function in (choices.maximum, choices.minimum):
        assert function(nan, x[:n]).isnan().all() and function(x[:n], nan).isnan().all()
    assert choices.amax(torch.stack([x[:n], nan]), [0]).isnan().all()


@pytest.mark.parametrize(
    "op", [aten.maximum.default, aten.amax.default, aten.clamp.Tensor, aten.aminmax.default], ids=str
)
def test_compiled_graphs_have_the_formulas(op: Any) -> None:
    """A row has the same bits alone, among others, and at another position; with PyTorch's kernels it does not."""
    other = signed_zeros(37, 33).flip(1)
    functions: dict[Any, Callable[[Tensor, Tensor], Any]] = {
        aten.maximum.default: torch.maximum,
        aten.amax.default: lambda x, y: x.amax(1),
        aten.clamp.Tensor: lambda x, y: x.clamp(y),
        aten.aminmax.default: lambda x, y: torch.aminmax(x, dim=1)[1],
    }
    x = signed_zeros(37, 33)
    compiled = fxround.compile(functions[op], "reproducible")
    whole = compiled(x, other)
    assert op in FORMULAS
    for row in (0, 5, 36):
        same(compiled(x[row : row + 1], other[row : row + 1])[0], whole[row])


@pytest.mark.parametrize("policy", ["reproducible", "stochastic", "up_down", "identity"])
def test_no_sign_of_zero_reaches_a_softmax(policy: str) -> None:
    """The maximum inside is PyTorch's, with a zero of either sign: with positive zeros the result is the same."""

    def functions(x: Tensor) -> tuple[Tensor, ...]:
        return F.softmax(x, 1), F.log_softmax(x, 1), torch.logsumexp(x, 1), torch.linalg.vector_norm(x, torch.inf, 1)

    compiled = fxround.compile(functions, policy)
    x = signed_zeros(60, 33)
    x[:, 0], x[:, 20] = -0.0, 0.0
    for got, want in zip(compiled(x), compiled(x + 0.0), strict=True):
        same(got, want)


def test_gradients_of_the_larger_one_are_pytorchs() -> None:
    x, y = torch.randn(5, 7, requires_grad=True), torch.randn(5, 7)

    def total(x: Tensor, y: Tensor) -> Tensor:
        return (torch.maximum(x, y) * x.amax(1, keepdim=True)).sum() + x.max()

    (want,) = torch.autograd.grad(total(x, y), x)
    (got,) = torch.autograd.grad(fxround.compile(total, "reproducible")(x, y), x)
    # The two add gradients in another order.
    torch.testing.assert_close(got, want)


NANS = [0x7FC00000, -0x400000, 0x7F800001, -0x3FFF00, 0x7FC12345]
"""Quiet and signalling ones, of either sign, with and without a payload."""


@pytest.mark.parametrize("shape, dim", [((100, 40), 0), ((3, 100), 1), ((5, 40, 7), 1), ((40,), 0)])
def test_of_many_every_nan_is_the_one_quiet_nan(shape: tuple[int, ...], dim: int) -> None:
    def all_of(x: Tensor) -> list[Tensor]:
        norms = [FORMULAS[aten.linalg_vector_norm.default](x, p, [dim]) for p in (torch.inf, -torch.inf)]
        both = choices.aminmax(x, dim=dim)
        return [choices.amax(x, [dim]), choices.amin(x, [dim]), choices.max_of_all(x), *both, *norms]

    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    for place in range(0, shape[dim], 7):
        for code in NANS:
            y = x.clone()
            y.view(torch.int32).select(dim, place).fill_(code)
            for laid_out in (y, y.transpose(0, -1).contiguous().transpose(0, -1), y.flip(dim)):
                for result in all_of(laid_out):
                    assert (result.view(torch.int32) == 0x7FC00000).all(), (place, hex(code))


def test_what_selects_keeps_the_bits_of_a_nan_wherever_it_lies() -> None:
    def forward(x: Tensor) -> list[Tensor]:
        wide = torch.zeros_like(x)
        chosen = [torch.where(x == 0, wide, x), torch.maximum(wide, x), torch.minimum(x, wide)]
        return [x.relu(), x.clamp(-1, 1), x.clamp(min=0), F.relu6(x), *chosen, x.abs(), -x]

    x = torch.tensor(NANS, dtype=torch.int32).repeat(9).view(torch.float32)
    *kept, magnitude, negated = fxround.compile(Calls(forward), "reproducible")(x)
    for result in kept:
        assert torch.equal(result.view(torch.int32), x.view(torch.int32))
    assert torch.equal(magnitude.view(torch.int32), x.view(torch.int32) & 0x7FFFFFFF)
    assert torch.equal(negated.view(torch.int32), x.view(torch.int32) ^ -(2**31))
