"""A rounded multiply-add in binary32 under a hardware rounding direction: a faster form of the general step.

Rounding twice in one direction is rounding once: a value that the hardware rounded towards zero to 24 bits, truncated
to fewer bits, is the exact value truncated. Nearest also has to distinguish a midpoint from a little more than one,
which is only needed in the rare case that the truncated value is a midpoint. up_down steps from the nearest value,
which the hardware computes, by one more multiply-add.

Binary32 has fewer exponents than the general step computes with. The caller therefore flushes subnormal results to zero
and afterwards checks the hardware's flags (overflow, underflow, subnormal operand) and the result (infinite or NaN). If
any is raised, the caller runs the chain again by the general step. If none is, no value left binary32's normal numbers,
for which the two give the same bits.
"""

from __future__ import annotations

from typing import Final, Literal

from fxround.numerics.arithmetic.scalar import Expr, bits, const, fma, from_bits, rarely, select, widen
from fxround.numerics.formats.carriers import CARRIERS
from fxround.numerics.modes import Rounding

Direction = Literal["nearest", "zero", "up", "down"]
_DIRECTIONS: Final[dict[str, Direction]] = {
    "toward_zero": "zero",
    "toward_positive": "up",
    "toward_negative": "down",
    "nearest_even": "zero",
    "nearest_away": "zero",
    "nearest_zero": "zero",
    "nearest_odd": "zero",
}
# The operators of the IR that a rounding direction reaches.
HARDWARE_ROUNDED: Final = frozenset(
    {"fadd", "fsub", "fmul", "fdiv", "sqrt", "fma", "narrow", "signed_to_f64", "signed_to_f32"}
)


def directed_step(rounding: Rounding, a: Expr, b: Expr, acc: Expr, random: Expr) -> tuple[Direction, Expr] | None:
    """Return R(a * b + acc) of binary32 values, and the direction in which the hardware must round.

    None if there is no such direction. rounding: of a format with binary32's exponents and subnormals that overflows to
    infinity.
    """
    carrier = CARRIERS["f32"]
    drop = carrier.format.precision - rounding.format.precision
    mode = rounding.mode.name
    if rounding.mode.jitter and not drop:
        return "nearest", neighbour(fma(a, b, acc), random)
    nearest = mode.startswith("nearest_")
    if mode not in _DIRECTIONS or rounding.format.precision < 2 or drop < int(nearest):
        return None
    direction, rounded = _DIRECTIONS[mode], fma(a, b, acc)
    if not drop:
        return direction, rounded
    code, unit = bits(rounded), 1 << drop
    if nearest:
        return direction, _nearest(mode, unit, a, b, acc, rounded)
    outward = {"zero": None, "up": code < (1 << 31), "down": code >= (1 << 31)}[direction]
    if outward is not None:
        code = code + select(outward, unit - 1, code ^ code)
    return direction, from_bits(code & (1 << 32) - unit)


def neighbour(x: Expr, random: Expr) -> Expr:
    """Return the next binary32 value away from zero, or towards it: x + x c to nearest, |c| = 5/4 2^-24. Zeros stay.

    Let x = m 2^e with 2^23 <= m < 2^24, so that the term is between 0.62 and 1.25 quanta of 2^e. Away from zero the
    nearest value is m + 1, also where that is 2^24: the next one is 2 further. Towards zero it is m - 1, if m > 2^23;
    and from 2^23, below which values are half a quantum apart, 2^23 - 0.625 is nearest to 2^23 - 1/2.
    """
    sign = (random & (1 << 31)) ^ (1 << 31)
    return fma(x, from_bits(sign | _STEP), x)


# The encoding of 5/4 2^-24.
_STEP: Final = 127 - 24 << 23 | 1 << 21


def _nearest(mode: str, unit: int, a: Expr, b: Expr, acc: Expr, cut: Expr) -> Expr:
    """Return the nearest value, from the exact one truncated to 24 bits."""
    half_up = bits(cut) + (unit >> 1)
    away = half_up & (1 << 32) - unit
    if mode == "nearest_away":
        return from_bits(away)
    # ``cut`` is a midpoint; the exact value is that midpoint, or a little more.
    tie = (half_up & (unit - 1)).equals(0)
    down = {
        "nearest_even": away & (1 << 32) - 2 * unit,
        "nearest_zero": away - unit,
        "nearest_odd": (away - unit) | unit,
    }[mode]
    return rarely(tie, from_bits(select(_is_exact(a, b, acc, cut), down, away)), from_bits(away))


def _is_exact(a: Expr, b: Expr, acc: Expr, cut: Expr) -> Expr:
    """Whether a * b + acc = cut, where ``cut`` is that sum truncated, and every operator rounds towards zero.

    The product p is exact in binary64. Suppose d = p + acc - cut is not zero; it has cut's sign, say positive. p or acc
    is positive. If p is, cut - acc = p - d < p, and if acc is, cut - p = acc - d < acc. Rounding towards zero never
    rounds a number up to a larger positive one, so one of the two equations below fails.
    """
    product, total, addend = widen(a) * widen(b), widen(cut), widen(acc)
    return (total - addend).equals(product) & (total - product).equals(addend)


def up_or_down(t: Expr, precision: int, random: Expr) -> Expr:
    """Return up_down of a binary64 value to ``precision`` bits with binary64's exponents, far from their ends.

    t: zero, not finite, or of a magnitude from 2^-900 to 2^900. Sums of a chain of up to 2^30 steps over binary32
    factors are, if precision is 24: a step moves a sum by a part 2^-22 of it at most, hence products of less than 2^256
    give less than 2^(256 + 30) e^(2^8) < 2^656. Products are multiples of 2^-298, so that a sum is below 2^-323 only by
    such steps.

    With c the power of two 2^drop above t's own, t + c is rounded to nearest even at the last bit that is kept, and
    what is left without c is exact.
    """
    carrier = CARRIERS["f64"]
    drop = carrier.format.precision - precision
    power = from_bits(bits(t) & (1 << 64) - (1 << carrier.trailing))
    shifted = fma(power, 2.0**drop, t)
    kept = bits(fma(power, -(2.0**drop), shifted))
    coin = widen(random & (1 << 31))
    # Twice the unit, or nothing.
    moved = (kept - (1 << drop)) + (coin >> 30 - drop if drop < 31 else coin << drop - 30)
    ordinary = (bits(t) & (1 << 63) - 1) - 1 < const("u64", carrier.infinity - 1)
    return from_bits(select(ordinary, moved, bits(t)))
