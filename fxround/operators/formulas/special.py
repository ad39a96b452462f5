"""Formulas of special functions whose plain formula loses most bits somewhere.

The plain formulas round a number and then take its difference with one nearby, or multiply an argument by an irrational
number before a function that magnifies the error: sin(pi x) of a large x, log(x / (1 - x)) next to 1/2, 1 + erf(x) of a
negative x, x - tanh(x) next to 0. The formulas here subtract first, where that is exact, and use polynomials next to a
zero. Derivatives that cancel have formulas too; they belong to the functions that models call, before differentiation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from fxround.operators.formulas.table import formula, widened

aten = torch.ops.aten

# (x - tanh x) / x^3 as a polynomial in x^2 <= 9/16, to 2^-59: the interpolant at the Chebyshev points.
TANHSHRINK: Final = (
    0.3333333333333333,
    -0.13333333333333294,
    0.0539682539682076,
    -0.021869488534033452,
    0.008863235479105364,
    -0.003592127305771337,
    0.0014558275482916571,
    -0.0005899837682081133,
    0.0002389332673687292,
    -9.628953316427487e-05,
    3.784864316675998e-05,
    -1.3601729022897116e-05,
    3.833589294501544e-06,
    -5.985399672039163e-07,
)
# sinc'(x) / x as a polynomial in x^2 <= 1/4: Taylor's.
SINC_SLOPE: Final = tuple(
    float(Fraction((-1) ** n * 2 * n, math.factorial(2 * n + 1)) * Fraction(math.pi) ** (2 * n)) for n in range(1, 15)
)
_NEAR: Final = 0.75
_SQRT_HALF: Final = math.sqrt(0.5)
_SQRT_HALF_HEAD: Final = 181 / 256
_SQRT_HALF_TAIL: Final = 7.553118654752440084436210485e-5


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Return c0 + x * (c1 + x * (...))."""
    value = x * coefficients[-1] + coefficients[-2]
    for c in reversed(coefficients[:-2]):
        value = value * x + c
    return value


def _turned(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x - n, n the integer nearest to x, and whether n is odd. Numbers from 2^53 on are even."""
    n = x.round()
    return x - n, (n.to(torch.int64) & 1) != 0


@formula(aten.sinc.default)
def sinc(x: Tensor) -> Tensor:
    """sinc(x) = where(x = 0, 1, (-1)^n sin((x - n) * pi) / (x * pi)), n the integer nearest to x"""
    w = widened(x)
    r, odd = _turned(w)
    sine = (r * math.pi).sin()
    return torch.where(w == 0, 1.0, torch.where(odd, -sine, sine) / (w * math.pi)).to(x.dtype)


class _Sinc(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.aten.sinc(x)
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, result = map(widened, ctx.saved_tensors)
        r, odd = _turned(x)
        size = r.abs()
        cosine = torch.where(size > 0.25, ((0.5 - size) * math.pi).sin(), (r * math.pi).cos())
        far = (torch.where(odd, -cosine, cosine) - result) / x
        slope = torch.where(x.abs() < 0.5, x * _polynomial(x * x, SINC_SLOPE), far)
        return (widened(gradients[0]) * slope).to(gradients[0].dtype)


@formula(torch.sinc, torch.special.sinc, torch.Tensor.sinc)
def differentiated_sinc(x: Tensor, **options: Any) -> Any:
    """sinc_backward(g) = g * where(|x| < 1/2, x * p(x * x), ((-1)^n c - y) / x); c = cos((x - n) * pi), y = sinc(x)"""
    return NotImplemented if options else _Sinc.apply(x)  # type: ignore[no-untyped-call]


@formula(aten.logit.default)
def logit(x: Tensor, eps: Any = None) -> Tensor:
    """logit(x) = where(|d| <= 1/4, log1p(2 d / (1 - x)), log(x / (1 - x))), d = x - 1/2; x within eps and 1 - eps"""
    w = widened(x)
    w = w if eps is None else w.clamp(eps, 1 - eps)
    d, rest = w - 0.5, 1 - w
    return torch.where(d.abs() <= 0.25, ((d + d) / rest).log1p(), (w / rest).log()).to(x.dtype)


def _ndtr(x: Tensor) -> Tensor:
    """Return the normal distribution function."""
    # 181/256 and x rounded to a multiple of 1/64 have 8 and at most 12 bits, so that their product is exact.
    w = widened(x)
    z = w * _SQRT_HALF
    short = (w * 64).round() * 0.015625
    lost = ((z - short * _SQRT_HALF_HEAD) - short * _SQRT_HALF_TAIL) - (w - short) * _SQRT_HALF
    value = torch.erfc(-z) * 0.5
    magnified = torch.where((w > -64) & (w < -1), (z + z) * lost, 0.0)
    return (value + value * magnified).to(x.dtype)


class _Ndtr(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _ndtr(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = map(widened, ctx.saved_tensors)
        h = torch.where(x.abs() < 64, (x * 16).round() * 0.0625, 0.0)
        decay = ((h * h) * -0.5).exp() * (((h - x) * (h + x)) * 0.5).exp()
        return (widened(gradients[0]) * (decay * (1 / math.sqrt(2 * math.pi)))).to(gradients[0].dtype)


@formula(torch.special.ndtr)
def ndtr(x: Tensor, **options: Any) -> Any:
    """ndtr(x) = e + e * where(-64 < x < -1, 2 z l, 0), e = erfc(-z) * 0.5, z = x * sqrt(1/2), l what z lost"""
    return NotImplemented if options else _Ndtr.apply(x)  # type: ignore[no-untyped-call]


class _Tanhshrink(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        w = widened(x)
        square = w * w
        near = (w * square) * _polynomial(square, TANHSHRINK)
        return torch.where(w.abs() < _NEAR, near, w - w.tanh()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        t = widened(x).tanh()
        return (widened(gradients[0]) * (t * t)).to(x.dtype)


@formula(F.tanhshrink)
def tanhshrink(x: Tensor) -> Any:
    """tanhshrink(x) = where(|x| < 3/4, (x * z) * p(z), x - tanh(x)), z = x * x; tanhshrink_backward(g) = g * (t * t)"""
    return _Tanhshrink.apply(x)  # type: ignore[no-untyped-call]


class _Softsign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        w = widened(x)
        return (w / (w.abs() + 1)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        d = widened(x).abs() + 1
        return (widened(gradients[0]) / (d * d)).to(x.dtype)


@formula(F.softsign)
def softsign(x: Tensor) -> Any:
    """softsign(x) = x / d, d = |x| + 1; softsign_backward(g) = g / (d * d)"""
    return _Softsign.apply(x)  # type: ignore[no-untyped-call]


# ---- polygamma ----

_TERMS: Final = 12


def _bernoulli(count: int) -> list[Fraction]:
    numbers = [Fraction(1)]
    for m in range(1, count + 1):
        numbers.append(-sum((math.comb(m + 1, k) * b for k, b in enumerate(numbers)), Fraction()) / (m + 1))
    return numbers


def _zeta(s: int, a: Tensor) -> Tensor:
    """Return the sum of (a + k)^-s over k >= 0, for a > 0: 10 + s terms and the Euler-Maclaurin formula for the rest.

    The rest, then the terms from the last to the first, are added in this order. Source: DLMF 25.2.9.
    """
    count, numbers = 10 + s, _bernoulli(2 * _TERMS)
    far = a + count
    inverse = 1 / far
    square = inverse * inverse
    rising, factors = Fraction(1), []
    for j in range(1, _TERMS + 1):
        # B_2j / (2j)! s (s + 1) ... (s + 2j - 2)
        rising *= s if j == 1 else (s + 2 * j - 3) * (s + 2 * j - 2)
        factors.append(float(numbers[2 * j] * rising / math.factorial(2 * j)))
    tail = (square * _polynomial(square, factors) + inverse * 0.5 + 1 / (s - 1)) * far.pow(1 - s)
    for k in reversed(range(1, count)):
        tail = tail + (a + k).pow(-s)
    return tail + a.pow(-s)


@formula(aten.polygamma.default)
def polygamma(n: int, x: Tensor) -> Any:
    """polygamma(n, x) = zeta(n + 1, x) * (-1)^(n + 1) n!, zeta the sum of (x + k)^(-n - 1) in a fixed order"""
    if n == 0:
        return torch.digamma(x)
    w, s = widened(x), n + 1
    g = w - w.round()
    low, whole = torch.where(g < 0, g + 1, g), torch.where(g < 0, -g, 1 - g)
    # With f = x - floor(x): the terms of x + k < 0 are, mirrored, those of 1 - f without those of 1 - x.
    mirrored = _zeta(s, whole) - _zeta(s, 1 - w)
    negative = _zeta(s, low) + (mirrored if s % 2 == 0 else -mirrored)
    value = torch.where(w > 0, _zeta(s, w), torch.where(g == 0, math.inf, negative))
    return (value * float((-1) ** s * math.factorial(n))).to(x.dtype)
