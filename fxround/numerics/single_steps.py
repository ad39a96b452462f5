"""A multiply-add in binary32 alone, rounded to 24 bits at random: for devices whose binary64 is slow.

The general step (``operators``) computes in binary64. Here h is the nearest binary32 value of S = a b + acc, and r is
what it lost, by error-free transformations: p + e = a b exactly, t + d = p + acc exactly, and r = (t - h) + (d + e).
The step is the general one's wherever a bound proves it; elsewhere the general step itself runs, one in 2^18 at random.
A sum that leaves a range of exponents well inside of binary32's is reported, because binary32 cannot go on from there.

**The bound.** Let q be h's quantum, |h| >= 2^-90. If p and acc cancel to less than half of the larger one, d = 0
(Sterbenz); t is zero or at least |e|, since all are multiples of half p's quantum, and (t - h) + e is exact (Dekker).
Otherwise p's quantum is 4 q at most, so that d + e is off by less than 2^-22 q; h and t are within a few quanta of each
other, t - h is exact, and its sum with d + e is off by less than 2^-24 q. Underflows of p, e and d are off by 2^-148,
less than 2^-34 q. The general step rounds S to 53 bits, 2^-30 q, and adds 29 random bits u < 1; the 23 bits here are
less by up to 2^-23. The sum z = r / q + 1 + u is rounded, 2^-23. Together z is off by less than 2^-20, and its integer
part is right unless z is as near as that to an integer. The quantum below a power of two is half as large: if h is one
and r leads below it, the general step runs too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fxround.numerics.modes import Rounding
from fxround.numerics.scalar import Expr, absolute, bits, const, fma, from_bits, negate, rarely, select
from fxround.numerics.truncation import neighbour

# 2^-90 and 2^126: sums of this range are normal, and so is everything that a step makes of them.
_LEAST: Final = 127 - 90 << 23
_PAST: Final = 127 + 126 << 23
_MAGNITUDE: Final = (1 << 31) - 1
_DOUBT: Final = 2.0**-20
# Added to a small number, it leaves the nearest integer.
_TO_INTEGER: Final = 1.5 * 2.0**23


@dataclass(frozen=True)
class SingleStep:
    """The value of a step, and whether a chain can go on from it in binary32."""

    value: Expr
    inside: Expr


def single_step(rounding: Rounding, a: Expr, b: Expr, acc: Expr, random: Expr, general: Expr) -> SingleStep | None:
    """Return R(a * b + acc) of binary32 values, where acc is zero or inside of the range; None if there is no such way.

    rounding: to 24 bits and binary64's exponents. general: the same step in binary64, narrowed.
    """
    if rounding.format.precision != 24 or str(rounding.mode) not in ("stochastic", "up_down"):
        return None
    nearest, product = fma(a, b, acc), a * b
    error = fma(a, b, negate(product))
    ordinary = (bits(nearest) & _MAGNITUDE) - _LEAST < const("u32", _PAST - _LEAST)
    # A zero is right if a factor is zero, or if a product within the range cancels.
    exact = nearest.equals(0.0) & (product + acc).equals(0.0) & error.equals(0.0)
    of_zeros = a.equals(0.0) | b.equals(0.0) | (acc < 0.0) | (acc > 0.0)
    outside = ordinary ^ 1
    inside = rarely(outside, exact & of_zeros, const("bool", 1))
    if rounding.mode.jitter:
        return SingleStep(neighbour(nearest, random), inside)
    stepped = _stochastic(nearest, product, error, acc, random, general)
    return SingleStep(rarely(outside, nearest, stepped), inside)


def _stochastic(nearest: Expr, product: Expr, error: Expr, acc: Expr, random: Expr, general: Expr) -> Expr:
    """Return the stochastic step from the nearest value, which is inside of the range."""
    product_is_larger = absolute(acc) < absolute(product)
    large, small = select(product_is_larger, product, acc), select(product_is_larger, acc, product)
    total = large + small
    lost = (total - nearest) + (((large - total) + small) + error)
    code = bits(nearest)
    # r / q towards h's own sign; the power of two is 2^23 less h's exponent.
    scale = const("u32", 254 + 23 << 23) - (code & (0xFF << 23))
    outward = from_bits(bits(lost) ^ (code & (1 << 31)))
    place = fma(outward, from_bits(scale), from_bits((random >> 9) | (127 << 23)))
    shifted = place + _TO_INTEGER
    below = place - (shifted - _TO_INTEGER)
    steps = bits(shifted) - bits(const("f32", _TO_INTEGER)) - select(below < 0.0, const("u32", 1), 0)
    power = (code & (1 << 23) - 1).equals(0) & (outward < 0.0)
    doubtful = (absolute(below) < _DOUBT) | power
    return rarely(doubtful, general, from_bits(code + steps - 1))
