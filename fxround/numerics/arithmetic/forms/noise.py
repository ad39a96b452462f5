"""Monte Carlo arithmetic: an exact value, as a binary64 number and what it lost, plus noise.

Source: Parker, Monte Carlo Arithmetic: exploiting randomness in floating-point arithmetic, UCLA CSD-970002, 1997.
"""

from __future__ import annotations

import math

from fxround.numerics.arithmetic.residuals import Wide, to_odd, two_sum
from fxround.numerics.arithmetic.scalar import Expr, absolute, bits, const, from_bits, maximum, negate, select, widen
from fxround.numerics.formats.carriers import CARRIERS, ordinal_of
from fxround.numerics.modes import LEAST_NOISY, Rounding

_SIGN = 1 << 63


def with_noise(wide: Wide, rounding: Rounding, random: Expr) -> Wide:
    """Return the exact value plus the noise of the rounding's mode.

    random: 32 random bits (u32). The noise has 33 bits, and the part of the exact value below binary64's last bit is
    rounded to odd with what the sum loses, so that a rounding to nearest finds the same side of each tie.
    """
    value, code = wide.value, bits(wide.value)
    ordinal = ordinal_of(code, CARRIERS["f64"])
    error = const("f64", 0.0) if wide.error is None else wide.error
    lost = (error < 0.0) | (error > 0.0)
    inward = lost & ~(((bits(error) ^ code) >> 63).equals(0))
    kept = select(inward, ordinal - 1, ordinal)
    precision = rounding.virtual_precision
    # r - 2^31 + 1/2, then times 2^(E + 1 - t - 32); the field is that of a number that gets noise.
    integer = from_bits(widen(random) | (1075 << 52)) - (2.0**52 + 2.0**31)
    power = from_bits((maximum(kept >> 52, 200) - (precision + 31)) << 52)
    noise = from_bits(bits((integer + 0.5) * power) ^ (code & _SIGN))
    total = two_sum(value, noise)
    assert total.error is not None
    rest = total.error if wide.error is None else to_odd(two_sum(total.error, wide.size or error))
    result = two_sum(total.value, rest)
    assert result.error is not None
    # An infinite sum has lost something of the other sign, as in ``exact_sum``; its error would be NaN.
    reached = select(absolute(total.value).equals(math.inf), total.value, result.value)
    left = select(absolute(reached).equals(math.inf), negate(reached), result.error)
    size = absolute(value)
    noisy = (size >= LEAST_NOISY) & (size < math.inf)
    if rounding.mode.sparing:
        below = 53 - precision
        noisy = noisy & (lost | ~((code & ((1 << below) - 1)).equals(0)))
    return Wide(select(noisy, reached, value), select(noisy, left, error))
