"""The specification of rounding, over rational numbers.

``round_exact`` defines what every kernel of fxround must return:
``round_exact(Fraction(7, 16), False, Rounding.parse("e2m1fn")) == 0.5``. It shares the rule of a mode and the row of a
format with the kernels, and nothing else: it computes quantum, parity, lost fraction, overflow and signs with
``fractions.Fraction``. The renderings of one algorithm for different targets share the algorithm's mistakes, so tests
compare each of them with this file, which is short enough to be checked by reading.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from fxround.numerics.formats import Format
from fxround.numerics.formats.posit_codes import posit_value
from fxround.numerics.modes import LEAST_NOISY, Lost, Mode, Rounding


def floor_log2(x: Fraction) -> int:
    """Return the exponent e with 2^e <= x < 2^(e+1), for x > 0."""
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if Fraction(2) ** e <= x else e - 1


def quantum(magnitude: Fraction, fmt: Format) -> Fraction:
    """Return the spacing of the format's values at this magnitude, as if its exponents had no upper bound."""
    if fmt.span is not None:
        return Fraction(2) ** fmt.quantum_exponent
    if magnitude < Fraction(2) ** fmt.emin:
        return Fraction(2) ** fmt.quantum_exponent
    return Fraction(2) ** (floor_log2(magnitude) - fmt.precision + 1)


def cut_to_integer(x: Fraction, mode: Mode) -> int:
    """Return the integer that the mode makes of lost * 2^n."""
    if mode.cut == "half_even":
        return round(x)
    return math.floor(x + Fraction(1, 2) if mode.cut == "half_up" else x)


def step_away(magnitude: Fraction, negative: bool, fmt: Format, mode: Mode, random: int) -> Fraction:
    """Return the neighbour of ``magnitude`` that the mode's rule picks, as if exponents had no upper bound."""
    q = quantum(magnitude, fmt)
    kept = magnitude // q
    lost = magnitude / q - kept
    n = mode.random_bits
    drawn = n > 0 and (random >> (32 - n)) + cut_to_integer(lost * 2**n, mode) >= 2**n
    odd = kept % 2 == 1
    if fmt.even_codes and kept:
        # The quantum is the kept value, whose code is 1 for 2^emin.
        odd = (floor_log2(q) - fmt.emin) % 2 == 0
    half = Fraction(1, 2)
    seen = Lost(
        negative, not negative, odd, not odd, lost > 0, lost == half, lost > half, drawn, random >= 2**31, never=False
    )
    return (kept + 1 if mode.away(seen) else kept) * q


def one_ulp(magnitude: Fraction, fmt: Format, up: bool) -> Fraction:
    """Return the next value above or below a positive value of the format. The maximum steps down only."""
    q = quantum(magnitude, fmt)
    if up and magnitude + q <= Fraction(fmt.maximum):
        return magnitude + q
    return magnitude - quantum(magnitude - q / 2, fmt)


def round_exact(value: Fraction, negative: bool, rounding: Rounding, random: int = 0) -> float:
    """Return R(value) as a Python float: a value of the format, a signed zero, an infinity or a NaN.

    value: any rational. negative: the sign, which is separate because a zero has one too. random: 32 random bits;
    stochastic:n uses the highest n of them, stochastic_equal and up_down the highest one.
    """
    fmt, mode = rounding.format, rounding.mode
    if fmt.values:
        return round_to_table(value, fmt.values, mode, random)
    if fmt.posit:
        return round_to_posit(value, fmt, mode, random)
    if fmt.span is not None:
        return round_to_fixed(value, negative, rounding, random)
    if negative and not fmt.signed and value != 0:
        return (0.0 if fmt.zero else math.ldexp(1.0, fmt.emin)) if rounding.overflow == "saturate" else math.nan
    if mode.noise is not None:
        value = with_noise(value, rounding.virtual_precision, mode.sparing, random)
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
    signed = fmt.signed if magnitude else fmt.has_minus_zero
    return math.copysign(float(magnitude), -1.0 if negative and signed else 1.0)


def with_noise(value: Fraction, precision: int, sparing: bool, random: int) -> Fraction:
    """Return the value with the noise of Monte Carlo arithmetic, inexact(x, t, xi) in Parker 1997."""
    if abs(value) < Fraction(LEAST_NOISY):
        return value
    unit = Fraction(2) ** (floor_log2(abs(value)) + 1 - precision)
    if sparing and value % unit == 0:
        return value
    xi = (random + Fraction(1, 2)) / 2**32 - Fraction(1, 2)
    return value + (unit * xi if value > 0 else -unit * xi)


def round_to_table(value: Fraction, values: Sequence[float], mode: Mode, random: int) -> float:
    """Return the listed value that the mode chooses. The neighbour of the smaller magnitude is the one that is kept.

    It is the positive one of a number and its opposite. The lost fraction is that of the way from the kept neighbour to
    the other; for the modes that draw, both differences and their quotient are rounded to binary64.
    """
    if mode.jitter:
        return next_listed(round_to_table(value, values, replace(mode, jitter=False), random), values, random >= 2**31)
    if value <= values[0]:
        return values[0]
    if value >= values[-1]:
        return values[-1]
    above = bisect_right(values, value)
    low, high = values[above - 1], values[above]
    if low == value:
        return low
    rises = abs(low) < abs(high)
    kept, other = (low, high) if rises else (high, low)
    odd = (above - 1 if rises else above) % 2 == 1
    passed, gap = abs(value - Fraction(kept)), abs(Fraction(other) - Fraction(kept))
    seen = Lost(
        negative=not rises,
        positive=rises,
        odd=odd,
        even=not odd,
        inexact=True,
        half=2 * passed == gap,
        above=2 * passed > gap,
        drawn=is_drawn(passed, gap, mode, random),
        coin=random >= 2**31,
        never=False,
    )
    return other if mode.away(seen) else kept


def next_listed(value: float, values: Sequence[float], up: bool) -> float:
    """Return the listed value after this one, away from zero (up) or towards it; at an end of the list the only one.

    Zero stays.
    """
    if value == 0:
        return value
    listed = list(values) if (value > 0) == up else list(values)[::-1]
    position = listed.index(value)
    return listed[position + 1] if position + 1 < len(listed) else listed[position - 1]


def is_drawn(passed: Fraction, gap: Fraction, mode: Mode, random: int) -> bool:
    """Whether the random bits draw the step of a table or a posit: both distances, and their quotient, in binary64."""
    lost = min(Fraction(float(Fraction(float(passed)) / Fraction(float(gap)))), 1 - Fraction(1, 2**53))
    n = mode.random_bits
    return n > 0 and (random >> (32 - n)) + cut_to_integer(lost * 2**n, mode) >= 2**n


def round_to_posit(value: Fraction, fmt: Format, mode: Mode, random: int) -> float:
    """Return the posit that the mode chooses. The middle of two posits is the posit between them with one bit more.

    Source: Standard for Posit Arithmetic (2022), section 4.1. Beyond the smallest and the largest magnitude is that
    magnitude, in every mode.
    """
    if value == 0:
        return 0.0
    assert fmt.posit is not None
    bits, exponent_bits = fmt.posit
    sign, magnitude = (-1.0, -value) if value < 0 else (1.0, value)
    codes = range(1, 2 ** (bits - 1))

    def decoded(code: int) -> Fraction:
        return Fraction(posit_value(code, bits, exponent_bits))

    if mode.jitter:
        nearest = abs(round_to_posit(value, fmt, replace(mode, jitter=False), random))
        code = bisect_right(codes, Fraction(nearest), key=decoded)
        moved = code + 1 if random >= 2**31 and code < codes[-1] else code - 1
        return sign * float(decoded(moved)) if moved else 0.0
    code = codes[max(bisect_right(codes, magnitude, key=decoded) - 1, 0)]
    low = decoded(code)
    if magnitude <= low or code == codes[-1]:
        return sign * float(low)
    high = decoded(code + 1)
    middle = Fraction(posit_value(2 * code + 1, bits + 1, exponent_bits))
    seen = Lost(
        negative=value < 0,
        positive=value > 0,
        odd=code % 2 == 1,
        even=code % 2 == 0,
        inexact=True,
        half=magnitude == middle,
        above=magnitude > middle,
        drawn=is_drawn(magnitude - low, high - low, mode, random),
        coin=random >= 2**31,
        never=False,
    )
    return sign * float(high if mode.away(seen) else low)


def round_to_fixed(value: Fraction, negative: bool, rounding: Rounding, random: int) -> float:
    """Return a value of fixed point, a multiple of the quantum: within the span, or modulo the number of words.

    up_down moves the multiple by one quantum before that. A zero is +0.
    """
    fmt, mode = rounding.format, rounding.mode
    assert fmt.span is not None
    least, most = map(Fraction, fmt.span)
    q, magnitude = quantum(abs(value), fmt), step_away(abs(value), negative, fmt, mode, random)
    if rounding.overflow == "saturate":
        magnitude = min(magnitude, Fraction(fmt.maximum))
    if mode.jitter and magnitude:
        up = random >= 2**31 and (rounding.overflow == "wrap" or magnitude < Fraction(fmt.maximum))
        magnitude += q if up else -q
    kept = -magnitude if negative else magnitude
    if rounding.overflow == "wrap":
        return float((kept - least) % (most - least + q) + least)
    return float(min(max(kept, least), most))


def out_of_range(rounding: Rounding, negative: bool) -> float:
    """Return what an infinity becomes, and what a finite value becomes that the mode lets leave the range."""
    if rounding.overflow == "nan":
        return math.nan
    sign = -1.0 if negative else 1.0
    return math.copysign(rounding.format.maximum if rounding.overflow == "saturate" else math.inf, sign)


def round_float(x: float, rounding: Rounding, random: int = 0) -> float:
    """Return R(x) for a value x of a carrier. A NaN stays a NaN, an infinity overflows, any other value is exact."""
    if math.isnan(x):
        return math.nan
    negative = math.copysign(1.0, x) < 0
    if math.isinf(x):
        if rounding.format.values:
            return rounding.format.values[0 if negative else -1]
        if rounding.format.posit or rounding.overflow == "wrap":
            return math.nan
        if rounding.format.span is not None:
            return rounding.format.span[0 if negative else 1]
        if negative and not rounding.format.signed:
            return round_exact(Fraction(-1), True, rounding, random)
        return out_of_range(rounding, negative)
    return round_exact(Fraction(x), negative, rounding, random)
