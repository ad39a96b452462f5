"""Random rounding of what lies beyond binary64: a value, and the size of what it lost.

What is true here. A binary64 result t and an estimate e of its error say where the exact value t + e lies
between two neighbouring binary64 numbers: the kept one is t, or t's neighbour towards zero where e points
inwards; the lost fraction is |e| / ulp, or one minus it. The rule of a mode that draws needs no more.

Why it is safe. ``e`` is exact for sums and a few ulps of itself off elsewhere, so the fraction is good to 2^-32
as that of narrower formats is; where e underflows (results below 2^-960) it is zero, and the result is t.

    before   t = a * b                          # the end of the carrier: nothing left to round
    after    round_beyond(a * b, fma(a, b, -t), Rounding.parse("binary64/stochastic"), random)
"""

from __future__ import annotations

from fxround.numerics.carriers import CARRIERS, one_nan, ordinal_of
from fxround.numerics.modes import Lost, Rounding
from fxround.numerics.scalar import Expr, bits, const, from_bits, maximum, minimum, narrow, select

MODES_BEYOND = ("stochastic", "stochastic_equal")
"""The modes that draw and need no more than binary64 of the exact value; up_down steps from the nearest."""


def round_beyond(t: Expr, error: Expr, rounding: Rounding, random: Expr) -> Expr:
    """R(t + error) for R = binary64 in one of ``MODES_BEYOND``: t the nearest binary64, |error| at most half an ulp."""
    carrier = CARRIERS["f64"]
    code = bits(t)
    ordinal = ordinal_of(code, carrier)
    sign = code ^ ordinal
    inexact = (error < 0.0) | (error > 0.0)
    inward = inexact & ~(((bits(error) ^ code) >> 63).equals(0))
    kept = select(inward, ordinal - 1, ordinal)
    outward_fraction = _fraction(error, kept)
    fraction = select(inward, ~outward_fraction, outward_fraction)
    unused = 32 - rounding.mode.random_bits
    never = const("bool", 0)
    negative = ~sign.equals(0)
    odd = (kept & 1).equals(1)
    seen = Lost(
        negative=negative,
        positive=~negative,
        odd=odd,
        even=~odd,
        inexact=inexact,
        half=never,
        above=never,
        drawn=inexact & (fraction > ~((random >> unused) << unused)),
        coin=(random >> 31).equals(1),
        never=never,
    )
    stepped = select(rounding.mode.away(seen), kept + 1, kept)
    finite = ordinal < carrier.infinity
    return one_nan(from_bits(select(finite, sign | stepped, code)))


def _fraction(error: Expr, kept: Expr) -> Expr:
    """u32: floor(2^32 |error| / ulp), ulp the spacing above ``kept``.

    With significand s and exponent fields f of the error and g of kept, it is s * 2^(f - g + 32): a shift to
    the right, since |error| <= ulp / 2 makes g - f at least 53.
    """
    ordinal = ordinal_of(bits(error), CARRIERS["f64"])
    field = ordinal >> 52
    significand = select(field.equals(0), ordinal, (ordinal & ((1 << 52) - 1)) | (1 << 52))
    places = (maximum(kept >> 52, 1) - 32) - maximum(field, 1)
    return narrow(significand >> minimum(places, 63))
