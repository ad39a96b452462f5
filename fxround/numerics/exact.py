"""The specification of rounding, over rational numbers: no bits, no algorithm, nothing to optimize.

What is true here. ``round_exact`` says what every kernel of fxround must return. It shares with them the
rule of a mode and the row of a format, and nothing else: quantum, parity, lost fraction, overflow and
signs are computed here again, with ``fractions.Fraction``.

Why it is safe. Independence: three renderings of one algorithm agree on a wrong answer as easily
as on a right one, and only this file objects. It is short enough to be checked by eye.

    before   trust the kernel
    after    round_exact(Fraction(7, 16), False, Rounding.parse("e2m1fn")) == 0.5
"""

from __future__ import annotations

import math
from fractions import Fraction

from fxround.numerics.formats import Format
from fxround.numerics.modes import Lost, Mode, Rounding


def floor_log2(x: Fraction) -> int:
    """The exponent e with 2^e <= x < 2^(e+1), for x > 0."""
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if Fraction(2) ** e <= x else e - 1


def quantum(magnitude: Fraction, fmt: Format) -> Fraction:
    """The spacing of the format's values at this magnitude, as if its exponents had no upper bound."""
    if magnitude < Fraction(2) ** fmt.emin:
        return Fraction(2) ** fmt.quantum_exponent
    return Fraction(2) ** (floor_log2(magnitude) - fmt.precision + 1)


def step_away(magnitude: Fraction, negative: bool, fmt: Format, mode: Mode, random: int) -> Fraction:
    """The neighbour of ``magnitude`` that the mode's rule picks, exponents unbounded."""
    q = quantum(magnitude, fmt)
    kept = magnitude // q
    lost = magnitude / q - kept
    n = mode.random_bits
    drawn = n > 0 and (random >> (32 - n)) + math.floor(lost * 2**n) >= 2**n
    odd = kept % 2 == 1
    half = Fraction(1, 2)
    seen = Lost(
        negative, not negative, odd, not odd, lost > 0, lost == half, lost > half, drawn, random >= 2**31, never=False
    )
    return (kept + 1 if mode.away(seen) else kept) * q


def one_ulp(magnitude: Fraction, fmt: Format, up: bool) -> Fraction:
    """The next value above or below a positive value of the format; the maximum steps down only."""
    q = quantum(magnitude, fmt)
    if up and magnitude + q <= Fraction(fmt.maximum):
        return magnitude + q
    return magnitude - quantum(magnitude - q / 2, fmt)


def round_exact(value: Fraction, negative: bool, rounding: Rounding, random: int = 0) -> float:
    """R(value): the value of the format, a signed zero, an infinity or a NaN, as a Python float.

    value: any rational. negative: the sign, which matters alone for a zero. random: 32 random bits,
    of which stochastic:n uses the highest n, the coin of stochastic_equal and up_down the highest.
    """
    fmt, mode = rounding.format, rounding.mode
    if negative and not fmt.signed and value != 0:
        return (0.0 if fmt.zero else math.ldexp(1.0, fmt.emin)) if rounding.overflow == "saturate" else math.nan
    magnitude = step_away(abs(value), negative, fmt, mode, random)
    maximum = Fraction(fmt.maximum)
    if magnitude > maximum:
        if rounding.overflow != "saturate" and mode.overflows(negative):
            return out_of_range(rounding, negative)
        magnitude = maximum
    if mode.jitter and magnitude != 0:
        magnitude = one_ulp(magnitude, fmt, up=random >= 2**31)
    if not fmt.zero and magnitude < Fraction(2) ** fmt.emin:
        if value == 0 and rounding.overflow == "nan":
            return math.nan
        magnitude = Fraction(2) ** fmt.emin
    return math.copysign(float(magnitude), -1.0 if negative and fmt.signed else 1.0)


def out_of_range(rounding: Rounding, negative: bool) -> float:
    """What an infinity becomes, and a finite value that the mode lets leave the range."""
    if rounding.overflow == "nan":
        return math.nan
    sign = -1.0 if negative else 1.0
    return math.copysign(rounding.format.maximum if rounding.overflow == "saturate" else math.inf, sign)


def round_float(x: float, rounding: Rounding, random: int = 0) -> float:
    """R(x) for a value x of a carrier: NaN stays NaN, an infinity overflows, the rest is exact."""
    if math.isnan(x):
        return math.nan
    negative = math.copysign(1.0, x) < 0
    if math.isinf(x):
        if negative and not rounding.format.signed:
            return round_exact(Fraction(-1), True, rounding, random)
        return out_of_range(rounding, negative)
    return round_exact(Fraction(x), negative, rounding, random)
