"""Random rounding to binary64 itself, where no wider carrier holds the exact value.

The exact value is given as t + e: t is the nearest binary64 number and e an estimate of its error. It lies between t
and a neighbour of t. The kept value, the one nearer to zero, is t, or t's neighbour towards zero if e points inwards;
the lost fraction is |e| / ulp, or one minus that. The modes that draw need nothing else. For a product:
``round_beyond(a * b, fma(a, b, -t), Rounding.parse("binary64/stochastic"), random)``.

``e`` is exact for sums and within a few ulps of itself otherwise, so the fraction is good to 2^-32, as for narrower
formats. Where e underflows (results below 2^-960) it is zero and the result is t.
"""

from __future__ import annotations

from fxround.numerics.arithmetic.scalar import Expr, bits, const, from_bits, maximum, minimum, narrow, select
from fxround.numerics.formats.carriers import CARRIERS, one_nan, ordinal_of
from fxround.numerics.modes import Lost, Rounding

MODES_BEYOND = ("stochastic", "stochastic_equal")
"""The modes that draw and need no more than binary64 of the exact value; up_down steps from the nearest."""


def round_beyond(t: Expr, error: Expr, rounding: Rounding, random: Expr) -> Expr:
    """Return R(t + error) for R = binary64 in one of ``MODES_BEYOND``.

    t: the nearest binary64 number to the exact value (f64). error: the exact value minus t (f64), at most half an ulp.
    random: 32 random bits (u32).
    """
    carrier = CARRIERS["f64"]
    code = bits(t)
    ordinal = ordinal_of(code, carrier)
    sign = code ^ ordinal
    inexact = (error < 0.0) | (error > 0.0)
    inward = inexact & ~(((bits(error) ^ code) >> 63).equals(0))
    kept = select(inward, ordinal - 1, ordinal)
    # From here on ``kept`` is the neighbour towards zero, and the fraction is measured in the ulp above it.
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
    """Return floor(2^32 |error| / ulp) as a u32, where ulp is the spacing above ``kept``.

    With significand s and exponent fields f of the error and g of kept, it is s * 2^(f - g + 32): a shift to the right,
    since |error| <= ulp / 2 makes g - f at least 53.
    """
    ordinal = ordinal_of(bits(error), CARRIERS["f64"])
    field = ordinal >> 52
    significand = select(field.equals(0), ordinal, (ordinal & ((1 << 52) - 1)) | (1 << 52))
    places = (maximum(kept >> 52, 1) - 32) - maximum(field, 1)
    return narrow(significand >> minimum(places, 63))
