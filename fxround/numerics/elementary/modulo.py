"""fmod and remainder: the exact remainder of a division whose quotient may have 2100 bits.

|x| = m 2^e and |y| = n 2^f, 1 <= m, n < 2. r = m 2^(e-f) mod n is computed 48 bits at a time: r <- r 2^48 - q n, with q
the integer nearest to the approximate quotient. Every r is a multiple of 2^-52 below 2, so that one fma gives it
exactly; fmod is exact. |q| < 2^50 is off by one at most, |r| stays below 3/4 n, and one addition at the end makes r
positive. The number of steps follows from the exponents that the arguments' type has.
"""

from __future__ import annotations

import math
from typing import Final

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
from fxround.numerics.scalar import Expr, absolute, bits, const, fma, maximum, minimum, negate, select

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


FUNCTIONS: Final = (
    Elementary(
        "fmod", 2, fmod, 0.0, "fmod(x, 0) = fmod(inf, y) = NaN", "sign(x)*fmod(abs(x), abs(y))", "long division"
    ),
    Elementary("remainder", 2, remainder, 0.5, "floored; a zero has the sign of x", "fmod(x, y)", "long division"),
)
