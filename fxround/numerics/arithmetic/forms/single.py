"""A multiply-add or a sum in binary32 alone, rounded to 24 bits at random: for devices whose binary64 is slow.

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

**Sums.** In S = acc + x, h = t and r = d (Dekker), so that z is off by less. A chain of sums goes on in binary64 where
a sum leaves the range, and comes back: its accumulator is a binary64 value, or one of binary32 as an encoding whose
high half is zero (``held``). No accumulator but +0 has such an encoding as a value of its own, which would be less than
2^-1042: elements are multiples of 2^-149. Of an element that is not zero and an accumulator, one is at least 2^-150,
and has a quantum of 2^-173 at least; their sum is as large, or zero. Sums of two accumulators lose 48 bits each, and a
chain has six at most; 2^30 steps in one direction change less than 2^8 bits. That is more than 2^-720.

**Values of maps** are sums and products of any binary32 values. What a product of the range loses is a binary32 value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fxround.numerics.arithmetic.forms.truncation import neighbour
from fxround.numerics.arithmetic.scalar import (
    BITS_OF,
    Expr,
    absolute,
    bits,
    const,
    fma,
    from_bits,
    narrow,
    negate,
    rarely,
    select,
    widen,
)
from fxround.numerics.formats import FORMATS
from fxround.numerics.formats.carriers import CARRIERS
from fxround.numerics.modes import Rounding

# Sums of this range are normal, and so is everything that a step makes of them.
_RANGE: Final = 2.0**-90, 2.0**126
_DOUBT: Final = 2.0**-20
# Added to a small number, it leaves the nearest integer.
_TO_INTEGER: Final = 1.5 * 2.0**23


@dataclass(frozen=True)
class SingleStep:
    """The value of a step, and whether it is one that binary32 decides and can go on from."""

    value: Expr
    inside: Expr


def has_single_steps(rounding: Rounding) -> bool:
    """Whether there are steps in binary32 for this rounding, to 24 bits and binary64's exponents."""
    return rounding.format.precision == 24 and str(rounding.mode) in ("stochastic", "up_down")


def single_step(rounding: Rounding, a: Expr, b: Expr, acc: Expr, random: Expr, general: Expr) -> SingleStep | None:
    """Return R(a * b + acc) of binary32 values, where acc is zero or inside of the range; None if there is no such way.

    rounding: to 24 bits and binary64's exponents. general: the same step in binary64, narrowed.
    """
    if not has_single_steps(rounding):
        return None
    nearest, product = fma(a, b, acc), a * b
    error = fma(a, b, negate(product))
    # A zero is right if a factor is zero, or if a product within the range cancels.
    exact = nearest.equals(0.0) & (product + acc).equals(0.0) & error.equals(0.0)
    of_zeros = a.equals(0.0) | b.equals(0.0) | (acc < 0.0) | (acc > 0.0)
    outside = ~_in_range(nearest)
    inside = rarely(outside, exact & of_zeros, const("bool", 1))
    if rounding.mode.jitter:
        return SingleStep(neighbour(nearest, random), inside)
    total, part = _fast_two_sum(product, acc)
    drawn = _stochastic(nearest, (total - nearest) + (part + error), random)
    return SingleStep(rarely(outside, nearest, rarely(~drawn.inside, general, drawn.value)), inside)


def _stochastic(nearest: Expr, lost: Expr, random: Expr) -> SingleStep:
    """Return the stochastic step from the nearest value, which is inside of the range, and whether it is proved."""
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
    return SingleStep(from_bits(code + steps - 1), ~doubtful)


def _in_range(x: Expr) -> Expr:
    """Whether a value is inside of the range."""
    least, past = map(CARRIERS[x.type].ordinal, _RANGE)
    return bits(absolute(x)) - least < const(BITS_OF[x.type], past - least)


# ---- values of maps ----


def has_single_value(operator: str, rounding: Rounding) -> bool:
    """Whether there is a way in binary32 for a pointwise operator of binary32 operands and this rounding."""
    return operator in ("add", "sub", "mul") and rounding.format == FORMATS["binary32"] and has_single_steps(rounding)


def single_value(operator: str, operands: tuple[Expr, ...], rounding: Rounding, random: Expr, general: Expr) -> Expr:
    """Return R(f(x, y)) of any two binary32 values, where ``has_single_value``. general: the same, in binary64."""
    x, y = operands
    if operator == "mul":
        nearest = x * y
        lost, zero = fma(x, y, negate(nearest)), x.equals(0.0) | y.equals(0.0)
    else:
        nearest, lost = _fast_two_sum(x, negate(y) if operator == "sub" else y)
        zero = const("bool", 1)
    if rounding.mode.jitter:
        drawn = SingleStep(neighbour(nearest, random), const("bool", 1))
    else:
        drawn = _stochastic(nearest, lost, random)
    # An exact zero has the sign that IEEE 754 gives it. A sum of zero is exact.
    zero = zero & nearest.equals(0.0)
    inside = zero | (_in_range(nearest) & drawn.inside)
    return rarely(~inside, general, select(zero, nearest, drawn.value))


# ---- sums ----


def single_sum(rounding: Rounding, acc: Expr, x: Expr, random: Expr, general: Expr) -> Expr:
    """Return R(acc + x), held, for a rounding that ``has_single_steps``.

    acc: held. x: a binary32 value, or held. general: the sum of the values of both in binary64.
    """
    both = is_single(acc)
    if x.type == "f64":
        both, x = both & is_single(x), single_of(x)
    total, lost = _fast_two_sum(single_of(acc), x)
    drawn = SingleStep(neighbour(total, random), both) if rounding.mode.jitter else _stochastic(total, lost, random)
    # A sum of +0 stays.
    inside = both & (_in_range(total) | bits(total).equals(0)) & drawn.inside
    return rarely(~inside, held(general), _hold(drawn.value))


def _fast_two_sum(a: Expr, b: Expr) -> tuple[Expr, Expr]:
    """Return the nearest value of a + b, and what it lost, or next to it where that is no binary32 value."""
    a_is_larger = absolute(b) < absolute(a)
    large, small = select(a_is_larger, a, b), select(a_is_larger, b, a)
    total = large + small
    return total, (large - total) + small


def held(x: Expr) -> Expr:
    """Return a value of 24 bits as the accumulator of a sum."""
    wide, single = (widen(x), x) if x.type == "f32" else (x, narrow(x))
    return rarely(~(_in_range(x) | bits(x).equals(0)), wide, _hold(single))


def _hold(x: Expr) -> Expr:
    return from_bits(widen(bits(x)))


def is_single(acc: Expr) -> Expr:
    """Whether an accumulator holds a binary32 value."""
    return narrow(bits(acc) >> 32).equals(0)


def single_of(acc: Expr) -> Expr:
    """Return the binary32 value that an accumulator holds."""
    return from_bits(narrow(bits(acc)))


def value_of(acc: Expr) -> Expr:
    """Return an accumulator's value."""
    return select(is_single(acc), widen(single_of(acc)), acc)
