"""Formulas of special functions against mpmath, in ulps: in binary32 and binary64, values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from torch.nn import functional as F

import fxround
from fxround.operators.formulas import bessel, special

M = Any
PRECISION = 200
BITS = {torch.float32: (24, -126), torch.float64: (53, -1022)}


def ndtr(x: M) -> M:
    return mpmath.erfc(-x / mpmath.sqrt(2)) / 2


def sinc_slope(x: M) -> M:
    return (mpmath.cospi(x) - mpmath.sincpi(x)) / x


def decayed(order: int) -> Callable[[M], M]:
    return lambda x: mpmath.besseli(order, x) * mpmath.exp(-abs(x))


@dataclass(frozen=True)
class Case:
    """A function, its value and derivative, where, and the greatest errors in ulps of the larger of value and scale.

    The values have no zero without a scale but at 0, where they are accurate too.
    """

    function: Callable[[torch.Tensor], torch.Tensor]
    value: Callable[[M], M]
    slope: Callable[[M], M] | None
    low: float
    high: float
    bound: float
    slope_bound: float = 0.0
    scale: Callable[[M], M] = lambda x: 0


CASES = {
    "sinc": Case(torch.sinc, mpmath.sincpi, sinc_slope, -40, 40, 3, 4, lambda x: 1 / abs(x) if abs(x) > 0.75 else 0),
    "sinc near 0": Case(lambda x: x.sinc(), mpmath.sincpi, sinc_slope, -0.75, 0.75, 3, 6),
    "logit": Case(torch.logit, lambda x: mpmath.log(x / (1 - x)), lambda x: 1 / (x * (1 - x)), 0, 1, 2.5, 2.5),
    "ndtr": Case(torch.special.ndtr, ndtr, lambda x: mpmath.npdf(x), -12.5, 8, 3, 3.5),
    "tanhshrink": Case(F.tanhshrink, lambda x: x - mpmath.tanh(x), lambda x: mpmath.tanh(x) ** 2, -12, 12, 4, 2.5),
    "softsign": Case(F.softsign, lambda x: x / (1 + abs(x)), lambda x: 1 / (1 + abs(x)) ** 2, -50, 50, 1.5, 3.5),
    "polygamma 1": Case(lambda x: torch.polygamma(1, x), lambda x: mpmath.psi(1, x), None, -8, 40, 5),
    "polygamma 2": Case(
        lambda x: torch.polygamma(2, x), lambda x: mpmath.psi(2, x), lambda x: mpmath.psi(3, x), 0.01, 40, 5, 5
    ),
    "digamma": Case(torch.digamma, lambda x: mpmath.psi(0, x), lambda x: mpmath.psi(1, x), 1.6, 40, 0.6, 5),
    "i0": Case(torch.i0, lambda x: mpmath.besseli(0, x), lambda x: mpmath.besseli(1, x), -40, 40, 14, 16),
    "i0e": Case(torch.special.i0e, decayed(0), None, -300, 300, 14),
    "i1": Case(torch.special.i1, lambda x: mpmath.besseli(1, x), None, -40, 40, 16),
    "i1e": Case(torch.special.i1e, decayed(1), None, -300, 300, 16),
}


def arguments(case: Case, dtype: torch.dtype) -> torch.Tensor:
    """Uniform numbers, numbers of all sizes next to 0, and numbers next to multiples of 1/2."""
    rng = np.random.default_rng(11)
    uniform = rng.uniform(case.low, case.high, 80)
    tiny = np.exp2(rng.uniform(-30, 3, 80)) * rng.choice([-1.0, 1.0], 80)
    beside = rng.integers(-12, 12, 80) / 2 + np.exp2(rng.uniform(-23, -3, 80)) * rng.choice([-1.0, 1.0], 80)
    x = torch.from_numpy(np.concatenate([uniform, tiny, beside])).to(dtype)
    return x[(x > case.low) & (x < case.high) & (x != x.round())]


def worst(got: torch.Tensor, x: torch.Tensor, exact: Callable[[M], M], case: Case, dtype: torch.dtype) -> float:
    """The greatest error in ulps of the dtype."""
    precision, least = BITS[dtype]
    found = 0.0
    with mpmath.workprec(PRECISION):
        for g, v in zip(got.tolist(), x.tolist(), strict=True):
            argument = mpmath.mpf(v)
            want = exact(argument)
            size = max(abs(want), case.scale(argument))
            exponent = max(mpmath.mag(size) - 1, least)
            if exponent > 120:
                continue
            found = max(found, float(abs(mpmath.mpf(g) - want) / mpmath.mpf(2) ** (exponent - precision + 1)))
    return found


@pytest.mark.part(
    "sinc-torch.float32",
    "sinc near 0-torch.float64",
    "logit-torch.float64",
    "ndtr-torch.float32",
    "tanhshrink-torch.float64",
    "softsign-torch.float32",
    "polygamma 1-torch.float64",
    "digamma-torch.float32",
    "i0-torch.float32",
    "i0e-torch.float32",
    "i1-torch.float64",
    "i1e-torch.float32",
)
@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_within_the_stated_ulps(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    x = arguments(case, dtype).requires_grad_()
    assert len(x) > 80
    y = fxround.compile(case.function, "reproducible")(x)
    assert worst(y, x, case.value, case, dtype) <= case.bound
    if case.slope is not None:
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert worst(gradient, x, case.slope, case, dtype) <= case.slope_bound


@pytest.mark.part(2)
@pytest.mark.parametrize(
    "function, args",
    [
        (torch.sinc, [0.0, -0.0, 1.0, -7.0, 2.0**60, 1e-45]),
        (torch.logit, [0.0, 1.0, 0.5, -0.1, 1.1]),
        (lambda x: torch.logit(x, 0.25), [0.0, 1.0, 0.5]),
        (torch.special.ndtr, [0.0, -float("inf"), float("inf"), -200.0, 50.0]),
        (F.tanhshrink, [0.0, float("inf"), -float("inf"), 1e30]),
        (F.softsign, [0.0, 1e30]),
        (lambda x: torch.polygamma(1, x), [0.0, 1.0, 40.0]),
        (torch.special.i0e, [0.0, 8.0, 1e30]),
        (torch.i0, [0.0, 100.0]),
        (torch.special.i1e, [0.0, -8.0]),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_special_arguments_have_stock_s_values(function: Any, args: list[float]) -> None:
    x = torch.tensor([*args, float("nan")])
    found = fxround.compile(function, "reproducible")(x)
    # A tolerance: stock's kernels are within a few ulps; what is compared are infinities, NaNs and zeros.
    torch.testing.assert_close(found, function(x), rtol=1e-5, atol=1e-6, equal_nan=True)


def test_models_of_16_bits_round_once() -> None:
    x = torch.linspace(-3, 3, 101).bfloat16()
    for function in (torch.sinc, F.tanhshrink, F.softsign, torch.special.ndtr, torch.special.i0e):
        found = fxround.compile(function, "reproducible")(x)
        assert torch.equal(found, fxround.compile(function, "reproducible")(x.float()).bfloat16())


def chebyshev(function: Callable[[M], M], count: int) -> list[M]:
    """The coefficients of the interpolant at the Chebyshev points of (-1, 1)."""
    angles = [mpmath.pi * (2 * i + 1) / (2 * count) for i in range(count)]
    values = [function(mpmath.cos(a)) for a in angles]
    return [
        (2 if k else 1) * sum(v * mpmath.cos(k * a) for v, a in zip(values, angles, strict=True)) / count
        for k in range(count)
    ]


@pytest.mark.parametrize("order", [0, 1])
def test_coefficients_are_derived(order: int) -> None:
    near, far = ((bessel.I0_NEAR, bessel.I0_FAR), (bessel.I1_NEAR, bessel.I1_FAR))[order]
    value = decayed(order)
    with mpmath.workprec(PRECISION):
        inside = chebyshev(lambda t: value(4 * (t + 1)) / (4 * (t + 1)) ** order, len(near))
        beyond = chebyshev(lambda t: value(16 / (t + 1)) * mpmath.sqrt(16 / (t + 1)), len(far))
    assert list(map(float, inside)) == list(near) and list(map(float, beyond)) == list(far)


def test_the_polynomial_of_tanhshrink_is_good_to_59_bits() -> None:
    with mpmath.workprec(PRECISION):
        for i in range(1, 101):
            x = mpmath.mpf(3) / 4 * i / 100
            exact = (x - mpmath.tanh(x)) / x**3
            assert abs(mpmath.polyval(special.TANHSHRINK[::-1], x * x) / exact - 1) < mpmath.mpf(2) ** -53


def test_a_number_as_the_factor_of_xlogy_is_a_constant() -> None:
    x = torch.linspace(0.1, 3, 50)
    found = fxround.compile(lambda x: torch.xlogy(2.0, x), "reproducible")(x)
    assert torch.equal(found, 2 * fxround.compile(torch.log, "reproducible")(x))
