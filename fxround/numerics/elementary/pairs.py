"""Pairs of binary64 numbers: an unevaluated sum hi + lo, for values that need more than 53 bits.

``two_sum``, ``fast_two_sum`` and ``two_product`` are exact (Knuth 1969, Dekker 1971; the product needs one fma): hi is
the rounded result and lo its error, unless something over- or underflows. The other operations lose a few units of
2^-104 relatively, unless their docstring says otherwise. All of them are IEEE operations rounded to nearest, none of
which a target may contract.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fxround.numerics.arithmetic.scalar import Expr, bits, const, fma, from_bits, negate, select, sqrt


class Pair(NamedTuple):
    """The number hi + lo, with |lo| at most about an ulp of hi."""

    hi: Expr
    lo: Expr


def f64(value: float) -> Expr:
    """Return a binary64 constant."""
    return const("f64", value)


def two_sum(a: Expr, b: Expr) -> Pair:
    """Return a + b exactly, in six additions."""
    hi = a + b
    part = hi - a
    return Pair(hi, (a - (hi - part)) + (b - part))


def fast_two_sum(a: Expr, b: Expr) -> Pair:
    """Return a + b exactly, in three additions; needs |a| >= |b| or a = 0."""
    hi = a + b
    return Pair(hi, b - (hi - a))


def two_product(a: Expr, b: Expr | float) -> Pair:
    """Return a * b exactly."""
    hi = a * b
    return Pair(hi, fma(a, b, negate(hi)))


def add(a: Pair, b: Pair) -> Pair:
    """Return a + b; the error is relative to |a| + |b|."""
    hi, lo = two_sum(a.hi, b.hi)
    return fast_two_sum(hi, lo + (a.lo + b.lo))


def multiply(a: Pair, b: Pair) -> Pair:
    """Return a * b."""
    hi, lo = two_product(a.hi, b.hi)
    return fast_two_sum(hi, lo + fma(a.hi, b.lo, a.lo * b.hi))


def divide(a: Pair, b: Pair) -> Pair:
    """Return a / b with one division: the quotient of the heads, corrected by its remainder."""
    inverse = 1.0 / b.hi
    hi = a.hi * inverse
    return fast_two_sum(hi, _remainder(a, hi, b) * inverse)


def divide_exactly(a: Pair, b: Pair) -> Pair:
    """Return a / b. The low part is zero where the quotient is a binary64 number, and has the right sign elsewhere."""
    inverse = 1.0 / b.hi
    hi = a.hi * inverse
    rounded = hi + _remainder(a, hi, b) * inverse
    return Pair(rounded, _remainder(a, rounded, b) * inverse)


def _remainder(a: Pair, quotient: Expr, b: Pair) -> Expr:
    return fma(negate(quotient), b.hi, a.hi) + fma(negate(quotient), b.lo, a.lo)


def square_root(a: Pair) -> Pair:
    """Return sqrt(a) for a >= 0."""
    hi = sqrt(a.hi)
    double = select(hi.equals(0.0), 1.0, hi + hi)
    return fast_two_sum(hi, (fma(negate(hi), hi, a.hi) + a.lo) / double)


def scaled(a: Pair, power: Expr | float) -> Pair:
    """Return a times a power of two."""
    return Pair(a.hi * power, a.lo * power)


def negated(a: Pair) -> Pair:
    """Return -a."""
    return Pair(negate(a.hi), negate(a.lo))


def polynomial(x: Expr, coefficients: Sequence[float]) -> Expr:
    """Evaluate a polynomial by Horner's rule with fma. coefficients: lowest power first."""
    value = f64(coefficients[-1])
    for c in reversed(coefficients[:-1]):
        value = fma(value, x, c)
    return value


def with_sign_of(x: Expr, a: Pair) -> Pair:
    """Return a, negated where x's sign bit is set: this makes an odd function from its value at |x|."""
    sign = bits(x) & (1 << 63)
    return Pair(from_bits(bits(a.hi) ^ sign), from_bits(bits(a.lo) ^ sign))


def choose(condition: Expr, yes: Pair, no: Pair) -> Pair:
    """Return ``yes`` where the condition holds, else ``no``."""
    return Pair(select(condition, yes.hi, no.hi), select(condition, yes.lo, no.lo))
