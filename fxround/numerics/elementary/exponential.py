"""exp, exp2 and expm1: 2^k exp(r), |r| <= log(2)/2, with one polynomial of degree 12.

k is the nearest integer to x / log 2. r = x - k log 2 is kept as a head and a tail: log 2 has two parts, the first of
42 bits, so that k times it is exact. exp(r) - 1 = r + rest with |rest| < 0.2 |r|, and rest is good to 2^-56 of the
result, so that the functions lose little more than their last rounding. x is clamped to values where the result has
over- or underflowed.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from fxround.numerics.arithmetic.scalar import Expr, absolute, fma, maximum, minimum, negate
from fxround.numerics.elementary import quick, single
from fxround.numerics.elementary.approximation import Approximation, clamped, power_of_two, round_to_integer
from fxround.numerics.elementary.coefficients import COEFFICIENTS
from fxround.numerics.elementary.function import Elementary
from fxround.numerics.elementary.pairs import Pair, f64, fast_two_sum, polynomial, two_product, two_sum

LN2: Final = (0.6931471805598903, 5.497923018708371e-14)
"""log 2: the first part has 42 significant bits."""
LN2_FULL: Final = (0.6931471805599453, 2.3190468138462996e-17)
LOG2_E: Final = 1.4426950408889634


class Reduced(NamedTuple):
    """The parts of a reduced exponential: exp of the argument = 2^k * (1 + r + rest)."""

    k: Expr
    r: Expr
    rest: Expr

    def exponential(self) -> Pair:
        """Return 1 + r + rest."""
        hi, lo = fast_two_sum(f64(1.0), self.r)
        return fast_two_sum(hi, lo + self.rest)

    def minus_one(self) -> Pair:
        """Return (2^k exp(r) - 1) * 2^-k with relative accuracy near 0. k > -1000; any k above 200 counts as 200."""
        unit = power_of_two(0 - at_most(self.k, 200))
        one, lost = two_sum(f64(1.0), negate(unit))
        hi, lo = two_sum(one, self.r)
        return fast_two_sum(hi, (lo + lost) + self.rest)


def at_most(k: Expr, limit: int) -> Expr:
    """Return the smaller of two integers in two's complement, |k| < 4096."""
    return minimum(k + 4096, limit + 4096) - 4096


def at_least(k: Expr, limit: int) -> Expr:
    """Return the larger of two integers in two's complement, |k| < 4096."""
    return maximum(k + 4096, limit + 4096) - 4096


def remainder(x: Expr, tail: Expr | None = None) -> tuple[Expr, Pair]:
    """Return k (u64) and the pair x + tail - k log 2, for |x| < 1500 and |tail| at most about an ulp of x."""
    k, k_integer = round_to_integer(x, LOG2_E)
    head = fma(k, -LN2[0], x)
    r = fma(k, -LN2[1], head)
    low = fma(k, -LN2[1], head - r)
    return k_integer, Pair(r, low if tail is None else low + tail)


def reduced(x: Expr, tail: Expr | None = None) -> Reduced:
    """Return the reduction of exp(x + tail)."""
    k, r = remainder(x, tail)
    return Reduced(k, r.hi, rest(r.hi, r.lo))


def rest(r: Expr, tail: Expr) -> Expr:
    """Return exp(r + tail) - 1 - r for a tiny tail."""
    square = r * r
    curve = square * polynomial(r, COEFFICIENTS["exp"])
    return fma(tail, (r + curve) + 1.0, curve)


def exponential(x: Pair) -> tuple[Pair, Expr]:
    """Return exp(x) as a pair in [0.7, 1.42] and an exponent, |x| < 1100."""
    parts = reduced(x.hi, x.lo)
    return parts.exponential(), parts.k


def exp(x: Expr) -> Approximation:
    """exp(x)."""
    parts = reduced(clamped(x, -800.0, 800.0))
    hi, lo = parts.exponential()
    return Approximation(hi, lo, parts.k, exact=is_infinite(x))


def exp2(x: Expr) -> Approximation:
    """2^x, exact at the integers."""
    clipped = clamped(x, -1200.0, 1200.0)
    k, k_integer = round_to_integer(clipped)
    r = two_product(clipped - k, LN2_FULL[0])
    low = fma(clipped - k, LN2_FULL[1], r.lo)
    hi, lo = Reduced(k_integer, r.hi, rest(r.hi, low)).exponential()
    return Approximation(hi, lo, k_integer, exact=is_infinite(x))


def expm1(x: Expr) -> Approximation:
    """exp(x) - 1, with relative accuracy near 0."""
    parts = reduced(clamped(x, -60.0, 800.0))
    hi, lo = parts.minus_one()
    return Approximation(hi, lo, parts.k, cases=((x.equals(0.0), x),), exact=is_infinite(x))


def is_infinite(x: Expr) -> Expr:
    """bool: x is an infinity."""
    return absolute(x).equals(float("inf"))


FUNCTIONS: Final = (
    Elementary("exp", 1, exp, 0.65, "exp(-inf) = +0", "exp(x)", "Tang 1989", quick.exp, single.exp),
    Elementary("exp2", 1, exp2, 0.65, "exact at the integers", "2**x", "Tang 1989"),
    Elementary("expm1", 1, expm1, 1.1, "expm1(+-0) = +-0, expm1(-inf) = -1", "expm1(x)", "Tang 1992"),
)
