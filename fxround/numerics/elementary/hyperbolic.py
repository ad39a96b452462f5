"""sinh, cosh, tanh and their inverses.

With x = k log 2 + r and w = 2^-2k, 2 sinh(x) 2^-k = (1 - w) cosh(r) + (1 + w) sinh(r), and cosh has the signs of w
exchanged. At worst a factor of 2 cancels (k = 1), relative accuracy holds near 0, and nothing overflows early. tanh
comes from exp(-2|x|) - 1, the inverses from log(1 + f) with f a pair. |x| is clamped where the functions have over- or
underflowed (22 for tanh). Above 2^60, where the root is |x| itself, asinh and acosh are log(2|x|), so that no square
overflows.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from fxround.numerics.arithmetic.scalar import Expr, absolute, fma, negate, select
from fxround.numerics.elementary import quick, single
from fxround.numerics.elementary.approximation import TINY, Approximation, power_of_two
from fxround.numerics.elementary.coefficients import COEFFICIENTS
from fxround.numerics.elementary.exponential import at_most, is_infinite, reduced, remainder
from fxround.numerics.elementary.function import Elementary
from fxround.numerics.elementary.logarithm import log1p_pair
from fxround.numerics.elementary.pairs import (
    Pair,
    add,
    choose,
    divide,
    f64,
    fast_two_sum,
    negated,
    polynomial,
    scaled,
    square_root,
    two_product,
    two_sum,
    with_sign_of,
)


class Halves(NamedTuple):
    """The parts of sinh and cosh: cosh(r) = 1 + even, sinh(r) = r + odd; ``plus`` and ``minus`` are 1 + w and 1 - w."""

    k: Expr
    r: Expr
    even: Expr
    odd: Expr
    plus: Pair
    minus: Pair

    def combine(self, a: Pair, b: Pair) -> Pair:
        """Return a cosh(r) + b sinh(r), for |a| >= |b r| or a = 0."""
        product = two_product(b.hi, self.r)
        hi, lo = fast_two_sum(a.hi, product.hi)
        low = fma(b.lo, self.r, (lo + a.lo) + product.lo)
        return fast_two_sum(hi, fma(a.hi, self.even, fma(b.hi, self.odd, low)))


def _halves(size: Expr) -> Halves:
    """Return the parts of sinh and cosh, for size >= 0."""
    k, r = remainder(select(size > 720.0, 720.0, size))
    z = r.hi * r.hi
    odd = fma(r.hi * z, polynomial(z, COEFFICIENTS["sinh"]), fma(r.lo, z * 0.5, r.lo))
    even = fma(z * z, polynomial(z, COEFFICIENTS["cosh"]), fma(r.hi, r.lo, z * 0.5))
    w = power_of_two(0 - at_most(k + k, 200))
    return Halves(k, r.hi, even, odd, fast_two_sum(f64(1.0), w), fast_two_sum(f64(1.0), negate(w)))


def sinh(x: Expr) -> Approximation:
    """The hyperbolic sine."""
    parts = _halves(absolute(x))
    value = with_sign_of(x, parts.combine(parts.minus, parts.plus))
    return Approximation(*value, parts.k - 1, exact=is_infinite(x))


def cosh(x: Expr) -> Approximation:
    """The hyperbolic cosine."""
    parts = _halves(absolute(x))
    return Approximation(*parts.combine(parts.plus, parts.minus), parts.k - 1, exact=is_infinite(x))


def tanh(x: Expr) -> Approximation:
    """The hyperbolic tangent."""
    size = absolute(x)
    parts = reduced(select(size > 22.0, f64(22.0), size) * -2.0)
    numerator = parts.minus_one()
    head = fast_two_sum(power_of_two(1 - parts.k), numerator.hi)
    quotient = divide(negated(numerator), Pair(head.hi, head.lo + numerator.lo))
    residue = (size < TINY, x * (x * x * -0.3))
    return Approximation(*with_sign_of(x, quotient), cases=((x.equals(0.0), x),), exact=is_infinite(x), residue=residue)


def square_plus(size: Expr, one: float) -> Pair:
    """Return size^2 + one."""
    square = two_product(size, size)
    hi, lo = two_sum(square.hi, f64(one))
    return fast_two_sum(hi, lo + square.lo)


def _doubled(large: Expr, size: Expr, f: Pair) -> Approximation:
    """Return log(1 + f), or log(2 size) where ``large``."""
    value = log1p_pair(choose(large, Pair(size, f64(0.0)), f))
    shifted = add(value, Pair(f64(math.log(2.0)), f64(2.3190468138462996e-17)))
    return Approximation(*choose(large, shifted, value))


def asinh(x: Expr) -> Approximation:
    """The inverse hyperbolic sine: log(1 + f), f = |x| + x^2 / (1 + sqrt(1 + x^2))."""
    size = absolute(x)
    large = size > 2.0**60
    a = select(large, f64(1.0), size)
    root = square_root(square_plus(a, 1.0))
    bend = divide(two_product(a, a), add(Pair(f64(1.0), f64(0.0)), root))
    value = _doubled(large, size, add(Pair(a, f64(0.0)), bend))
    hi, lo = with_sign_of(x, Pair(value.hi, value.lo))
    residue = (size < TINY, x * (x * x * -0.1))
    return Approximation(hi, lo, cases=((x.equals(0.0) | ~(size < math.inf), x),), residue=residue)


def acosh(x: Expr) -> Approximation:
    """The inverse hyperbolic cosine: log(1 + f), f = (x - 1) + sqrt(x^2 - 1)."""
    large = x > 2.0**60
    a = select(large, f64(1.0), x)
    value = _doubled(large, x, add(square_root(square_plus(a, -1.0)), two_sum(a, f64(-1.0))))
    outside = select(x < 1.0, math.nan, x)
    return Approximation(value.hi, value.lo, cases=((~((x >= 1.0) & (x < math.inf)), outside),))


def atanh(x: Expr) -> Approximation:
    """The inverse hyperbolic tangent: the logarithm's own series near 0, log((1 + x) / (1 - x)) / 2 beyond."""
    size = absolute(x)
    z = size * size
    near = fast_two_sum(size, size * (z * (polynomial(z, COEFFICIENTS["log"]) * 0.5)))
    a = select(size < 1.0, size, 0.5)
    f = divide(Pair(a + a, f64(0.0)), fast_two_sum(f64(1.0), negate(a)))
    far = scaled(log1p_pair(f), 0.5)
    hi, lo = with_sign_of(x, choose(size < 0.171, near, far))
    pole = with_sign_of(x, Pair(f64(math.inf), f64(0.0))).hi
    return Approximation(hi, lo, cases=((size.equals(1.0), pole), (~(size <= 1.0), math.nan)))


FUNCTIONS: Final = (
    Elementary("sinh", 1, sinh, 0.8, "sinh(+-0) = +-0", "sinh(x)", "as exp, even and odd parts"),
    Elementary("cosh", 1, cosh, 0.8, "cosh(0) = 1", "cosh(x)", "as exp, even and odd parts"),
    Elementary(
        "tanh", 1, tanh, 0.9, "tanh(+-0) = +-0, tanh(+-inf) = +-1", "tanh(x)", "from expm1", quick.tanh, single.tanh
    ),
    Elementary("asinh", 1, asinh, 0.8, "asinh(+-0) = +-0", "asinh(x)", "from log1p"),
    Elementary("acosh", 1, acosh, 0.8, "acosh(1) = +0, acosh(x < 1) = NaN", "acosh(x)", "from log1p"),
    Elementary("atanh", 1, atanh, 0.8, "atanh(+-1) = +-inf, atanh(|x| > 1) = NaN", "atanh(x)", "from log1p"),
)
