"""pow(a, b) = exp(b log|a|), with a logarithm good to 2^-65.

What is true here. log(1 + f) = 2 (s + s z (1/3 + z P(z))), s = f / (2 + f), z = s^2, all but the tail P in pairs.
The product b log|a| is a pair, good to 2^-55 absolute where the result neither over- nor underflows, so that the
result is good to a fraction of an ulp before its last rounding; a result that is a binary64 number, as 3^5 or
9^0.5, comes out exact.

Why it is safe. The special cases are those of C23, annex F.10.4.4, in the order in which they override each other.

    before   exp(b * log(a))                       # relative error b log(a) 2^-53
    after    exp(pair product of b and a pair logarithm), sign and edges by cases
"""

from __future__ import annotations

import math
from typing import Final

from fxround.numerics.elementary.approximation import Approximation, Case, clamped
from fxround.numerics.elementary.exponential import LN2, exponential, is_infinite
from fxround.numerics.elementary.logarithm import split
from fxround.numerics.elementary.pairs import (
    Pair,
    add,
    divide,
    f64,
    fast_two_sum,
    multiply,
    polynomial,
    scaled,
    two_product,
    with_sign_of,
)
from fxround.numerics.elementary.tables import COEFFICIENTS
from fxround.numerics.scalar import Expr, absolute, fma, select

THIRD: Final = (0.3333333333333333, 1.850371707708594e-17)


def accurate_log(x: Expr) -> Pair:
    """log(x) for positive finite x, to 2^-65 relative."""
    parts = split(x)
    f = parts.f
    s = divide(Pair(f, f64(0.0)), fast_two_sum(f64(2.0), f))
    z = multiply(s, s)
    bend = fast_two_sum(f64(THIRD[0]), z.hi * polynomial(z.hi, COEFFICIENTS["log_tail"]))
    curve = multiply(multiply(s, z), Pair(bend.hi, bend.lo + THIRD[1]))
    fraction = scaled(add(s, curve), 2.0)
    return add(fast_two_sum(parts.k * LN2[0], parts.k * LN2[1]), fraction)


def _is_integer(size: Expr) -> Expr:
    """bool, for size >= 0."""
    return ((size + 2.0**52) - 2.0**52).equals(size) | (size >= 2.0**52)


def power(a: Expr, b: Expr) -> Approximation:
    """a to the power b."""
    size, exponent = absolute(a), absolute(b)
    logarithm = accurate_log(size)
    product = two_product(b, logarithm.hi)
    ordinary = absolute(product.hi) < 800.0
    low = select(ordinary, fma(b, logarithm.lo, product.lo), 0.0)
    value, k = exponential(Pair(clamped(product.hi, -800.0, 800.0), low))

    integer = _is_integer(exponent)
    odd = integer & ~_is_integer(exponent * 0.5)
    sign = select(odd, a, absolute(a))
    hi, lo = with_sign_of(sign, value)
    # Next to 1 the noise of an exact result and a true remainder look alike; but there only a = 1 is exact.
    near_one = absolute(product.hi) < 2.0**-54
    remainder = with_sign_of(sign, with_sign_of(product.hi, Pair(f64(2.0**-55), f64(0.0)))).hi
    return Approximation(
        hi, lo, k, cases=_edges(a, b, integer, sign), residue=(near_one, remainder), noise=2.0**-56
    )  # fmt: skip


def _edges(a: Expr, b: Expr, integer: Expr, sign: Expr) -> tuple[Case, ...]:
    size = absolute(a)
    extreme = size.equals(0.0) | is_infinite(a) | is_infinite(b)
    grows = (size > 1.0) ^ (b > 0.0)
    limit = with_sign_of(sign, Pair(select(grows, f64(0.0), f64(math.inf)), f64(0.0))).hi
    unit = with_sign_of(sign, Pair(f64(1.0), f64(0.0))).hi
    undefined = (a < 0.0) & (a > -math.inf) & ~integer
    unknown = ~a.equals(a) | ~b.equals(b)
    return (
        (undefined, math.nan),
        (extreme, limit),
        (size.equals(1.0) & (integer | is_infinite(b) | (a > 0.0)), unit),
        (unknown, math.nan),
        (a.equals(1.0) | b.equals(0.0), 1.0),
    )
