"""Remainders and integer quotients of divisions whose quotient may have 2100 bits: fmod, remainder, truncdiv, floordiv.

|x| = m 2^e and |y| = n 2^f, 1 <= m, n < 2. r = m 2^(e-f) mod n is computed 48 bits at a time: r <- r 2^48 - q n, with q
the integer nearest to the approximate quotient. Every r is a multiple of 2^-52 below 2, so that one fma gives it
exactly; fmod is exact. |q| < 2^50 is off by one at most, |r| stays below 3/4 n, and one addition at the end makes r
positive. The number of steps follows from the exponents that the arguments' type has.

The integer quotient is exact where it is below 2^52. Above, it is (m - r 2^(f-e)) / n 2^(e-f) with this exact
remainder, as a head and a tail that is zero where the head is exact.
"""

from __future__ import annotations

import math
from typing import Final

from fxround.numerics.arithmetic.scalar import (
    Expr,
    absolute,
    bits,
    const,
    fma,
    from_bits,
    maximum,
    minimum,
    negate,
    select,
)
from fxround.numerics.elementary.approximation import (
    SIGN,
    Approximation,
    Case,
    power_of_two,
    round_to_integer,
    significand,
)
from fxround.numerics.elementary.exponential import is_infinite
from fxround.numerics.elementary.function import Elementary
from fxround.numerics.elementary.pairs import Pair, choose, f64, fast_two_sum, with_sign_of

STEP_BITS: Final = 48


def _steps(x: Expr, y: Expr) -> int:
    """Return how many steps of 48 bits the exponents of x and y can be apart."""
    span = 127 + 149 if x.op == "widen" and y.op == "widen" else 1023 + 1074
    return -(-(span + 1) // STEP_BITS)


def _remainder(x: Expr, y: Expr) -> tuple[Expr, Expr, Expr]:
    """Return r, n and f (u64 in two's complement): |x| mod |y| = r 2^f, 0 <= r < n, for |x| >= |y|."""
    (m, e), (n, f) = significand(absolute(x)), significand(absolute(y))
    distance = maximum(e, f) - f
    inverse = 1.0 / n
    r = m
    for step in reversed(range(_steps(x, y))):
        left = maximum(distance, STEP_BITS * step) - STEP_BITS * step
        r = r * power_of_two(minimum(left, STEP_BITS))
        distance = minimum(distance, STEP_BITS * step)
        quotient, _ = round_to_integer(r * inverse)
        r = fma(negate(quotient), n, r)
    return select(r < 0.0, r + n, r), n, f - 2048


def _undefined(x: Expr, y: Expr) -> Case:
    return y.equals(0.0) | is_infinite(x) | ~x.equals(x) | ~y.equals(y), math.nan


def fmod(x: Expr, y: Expr) -> Approximation:
    """x - trunc(x / y) y: exact, with the sign of x."""
    r, _, f = _remainder(x, y)
    value = with_sign_of(x, Pair(r, f64(0.0)))
    return Approximation(*value, f, cases=((absolute(x) < absolute(y), x), _undefined(x, y)))


def remainder(x: Expr, y: Expr) -> Approximation:
    """x - floor(x / y) y, as in PyTorch: fmod, plus y where that is nonzero and has the other sign."""
    r, n, f = _remainder(x, y)
    size, divisor = absolute(x), absolute(y)
    small = size < divisor
    r, n, f = select(small, size, r), select(small, divisor, n), select(small, const("u64", 0), f)
    moved = ((bits(x) ^ bits(y)) >= SIGN) & ~r.equals(0.0)
    value = choose(moved, fast_two_sum(n, negate(r)), Pair(r, f64(0.0)))
    hi, lo = with_sign_of(select(moved, y, x), value)
    return Approximation(hi, lo, f, cases=((moved & is_infinite(y), y), _undefined(x, y)))


_WHOLE: Final = 52
"""Below 2^52 the quotient of the significands, rounded, is less than 1/2 above the integer part of the exact one."""


def _quotient(x: Expr, y: Expr, floored: bool) -> tuple[Pair, Expr, Expr]:
    """Return the integer quotient of |x| and |y| as a pair and an exponent (u64), and whether x / y is below 0.

    It is the integer part of |x| / |y|; with ``floored``, where x / y is negative, the next integer from there on.
    """
    (m, e), (n, f) = significand(absolute(x)), significand(absolute(y))
    distance, negative = maximum(e, f) - f, (bits(x) ^ bits(y)) >= SIGN
    # |x| / |y| = q + s / n with q an integer and |s| < n: the fma is exact, and s below 0 means one less.
    scaled = m * power_of_two(minimum(distance, _WHOLE - 1))
    near = (scaled / n + 2.0**_WHOLE) - 2.0**_WHOLE
    rest = fma(negate(near), n, scaled)
    below = select(rest < 0.0, near - 1.0, near)
    # m / n = ratio + left / n, exactly, and r / 2^distance is what the integer part leaves out.
    ratio = m / n
    left = fma(negate(ratio), n, m)
    r, _, _ = _remainder(x, y)
    if floored:
        below = select(negative & ~rest.equals(0.0), below + 1.0, below)
        r = select(negative & ~r.equals(0.0), r - n, r)
    # Beyond 2^1000 times smaller than n, r only has a sign.
    tail = (left - r * power_of_two(0 - minimum(distance, 1000))) / n
    small = distance < const("u64", _WHOLE)
    value = choose(small, Pair(below, f64(0.0)), Pair(ratio, tail))
    return value, select(small, const("u64", 0), minimum(distance, 2000)), negative


def truncdiv(x: Expr, y: Expr) -> Approximation:
    """trunc(x / y) of the exact quotient; x / 0 and inf / y are as in a division."""
    value, exponent, _ = _quotient(x, y, False)
    sign = from_bits(bits(x) ^ bits(y))
    zero, endless = _signed(sign, 0.0), _signed(sign, math.inf)
    cases: tuple[Case, ...] = ((absolute(x) < absolute(y), zero), (y.equals(0.0) | is_infinite(x), endless))
    return Approximation(*with_sign_of(sign, value), exponent, cases=(*cases, _no_quotient(x, y)))


def floordiv(x: Expr, y: Expr) -> Approximation:
    """floor(x / y) of the exact quotient; x / 0 is as in a division, and inf / y is NaN, as in PyTorch and Python."""
    value, exponent, negative = _quotient(x, y, True)
    sign = from_bits(bits(x) ^ bits(y))
    less = select(negative & ~x.equals(0.0), -1.0, _signed(sign, 0.0))
    cases: tuple[Case, ...] = ((absolute(x) < absolute(y), less), (is_infinite(x), math.nan))
    endless = y.equals(0.0), _signed(sign, math.inf)
    return Approximation(*with_sign_of(sign, value), exponent, cases=(*cases, endless, _no_quotient(x, y)))


def _signed(sign: Expr, size: float) -> Expr:
    return with_sign_of(sign, Pair(f64(size), f64(0.0))).hi


def _no_quotient(x: Expr, y: Expr) -> Case:
    both = (x.equals(0.0) & y.equals(0.0)) | (is_infinite(x) & is_infinite(y))
    return both | ~x.equals(x) | ~y.equals(y), math.nan


FUNCTIONS: Final = (
    Elementary(
        "fmod", 2, fmod, 0.0, "fmod(x, 0) = fmod(inf, y) = NaN", "sign(x)*fmod(abs(x), abs(y))", "long division"
    ),
    Elementary("remainder", 2, remainder, 0.5, "floored; a zero has the sign of x", "fmod(x, y)", "long division"),
    Elementary(
        "floordiv", 2, floordiv, 0.5, "floordiv(x, 0) = x / 0, floordiv(inf, y) = NaN", "floor(x/y)", "long division"
    ),
    Elementary(
        "truncdiv",
        2,
        truncdiv,
        0.5,
        "truncdiv(x, 0) = x / 0, truncdiv(inf, y) = inf / y",
        "sign(x)*sign(y)*floor(abs(x/y))",
        "long division",
    ),
)
