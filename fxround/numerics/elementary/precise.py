"""log and exp of pairs to some 90 bits, for results so near to a boundary that 57 bits do not decide the rounding.

Both evaluate their series (of atanh and exp) with the first terms in pairs and the others, which are below 2^-40 of the
sum, in binary64. log 2 has three parts of 42 + 53 + 53 bits, so that k log 2 is good to 2^-140. Every step is an
operation of ``pairs``, which loses a few units of 2^-104.
"""

from __future__ import annotations

from fractions import Fraction
from math import factorial
from typing import Final

from fxround.numerics.arithmetic.scalar import Expr
from fxround.numerics.elementary.approximation import round_to_integer
from fxround.numerics.elementary.exponential import LN2, LOG2_E
from fxround.numerics.elementary.logarithm import split
from fxround.numerics.elementary.pairs import Pair, add, divide, f64, multiply, negated, polynomial, scaled, two_sum

LN2_REST: Final = (5.497923018708371e-14, 1.94704509238075e-31)
"""log 2 minus the 42 bits of ``LN2``, as a pair."""


def precise_log(x: Pair) -> Pair:
    """Return log(x) to 2^-93 of max(1, |log x|), for a positive x that is not too small for its low part."""
    parts = split(x.hi)
    return add_logarithm_of_power(parts.k, log_of_fraction(two_sum(parts.f, x.lo * parts.unit)))


def log_of_fraction(f: Pair) -> Pair:
    """Return log(1 + f) to 2^-93 of it, sqrt(1/2) <= 1 + f < sqrt(2)."""
    s = divide(f, add(pair_constant((2.0, 0.0)), f))
    z = multiply(s, s)
    curve = pair_series(z, [Fraction(1, 2 * n + 1) for n in range(1, 20)], 8)
    return scaled(add(s, multiply(multiply(s, z), curve)), 2.0)


def add_logarithm_of_power(k: Expr, logarithm: Pair) -> Pair:
    """Return k log 2 + logarithm, for an integer |k| < 2048."""
    rest = multiply(Pair(k, f64(0.0)), pair_constant(LN2_REST))
    return add(Pair(k * LN2[0], f64(0.0)), add(rest, logarithm))


def _pair(value: Fraction) -> tuple[float, float]:
    """Return a rational number to 106 bits."""
    return float(value), float(value - Fraction(float(value)))


def pair_constant(value: tuple[float, float]) -> Pair:
    """Return a constant to 106 bits."""
    return Pair(f64(value[0]), f64(value[1]))


def pair_series(z: Pair, coefficients: list[Fraction], heads: int) -> Pair:
    """Return c0 + c1 z + ...: the first ``heads`` terms in pairs, the following ones in binary64."""
    tail = polynomial(z.hi, [float(c) for c in coefficients[heads:]])
    value = Pair(tail, f64(0.0))
    for c in reversed(coefficients[:heads]):
        value = add(pair_constant(_pair(c)), multiply(z, value))
    return value


def precise_exp(x: Pair) -> tuple[Pair, Expr]:
    """Return exp(x) as a pair in [0.7, 1.42] and an exponent (u64), |x| < 1000. The error is 2^-92 plus that of x."""
    q, k = precise_expm1(x)
    return add(pair_constant((1.0, 0.0)), q), k


def precise_expm1(x: Pair) -> tuple[Pair, Expr]:
    """Return q and k (u64) with exp(x) = 2^k (1 + q), |q| < 0.42; q is good to 2^-92 of it if k = 0."""
    k, k_integer = round_to_integer(x.hi, LOG2_E)
    whole = add(Pair(k * LN2[0], f64(0.0)), multiply(Pair(k, f64(0.0)), pair_constant(LN2_REST)))
    r = add(x, negated(whole))
    return exponential_series(r), k_integer


def exponential_series(r: Pair) -> Pair:
    """Return exp(r) - 1 for |r| <= log(2)/2."""
    return multiply(r, pair_series(r, [Fraction(1, factorial(n)) for n in range(1, 23)], 11))
