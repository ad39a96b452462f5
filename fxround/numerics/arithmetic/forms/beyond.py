"""Rounding to 52 and 53 bits, for which rounding to odd in binary64 is not enough, and to more than 24 at random.

Rounding to odd needs two bits more than the format has. A mode that draws with a probability needs 32 bits more.

The exact value is given as t + e: t is the nearest binary64 number and e an estimate of its error, which has the
error's sign. It lies between t and a neighbour of t. The number towards zero is t, or t's neighbour if e points
inwards; what the value has beyond it is |e| / ulp, or one minus that. The rules of the modes need nothing else. For a
product:
``round_beyond(Wide(a * b, fma(a, b, -t)), Rounding.parse("binary64/stochastic"), random)``.

``e`` is exact for sums and within a few ulps of itself otherwise, so the fraction is good to 2^-31, as for narrower
formats. Where e underflows, its sign is still right, and a mode that draws with a probability returns t.
"""

from __future__ import annotations

from fxround.numerics.arithmetic.residuals import Wide
from fxround.numerics.arithmetic.rounding import Rest, round_expr, round_with_rest
from fxround.numerics.arithmetic.scalar import Expr, bits, const, from_bits, maximum, minimum, narrow, select
from fxround.numerics.formats.carriers import CARRIERS, ordinal_of
from fxround.numerics.modes import Rounding


def is_beyond(rounding: Rounding) -> bool:
    """Whether a rounding of exact values needs more of them than a binary64 number rounded to odd."""
    fmt = rounding.format
    grid = fmt.is_grid and fmt.span is None
    return fmt.boundary_precision > 52 or (grid and rounding.mode.graded and fmt.precision > 24)


def can_round(rounding: Rounding) -> bool:
    """Whether ``round_beyond`` has the rule: where binary64's last bit is the format's, ties are known to even only."""
    fmt = rounding.format
    return fmt.is_grid and fmt.span is None and (fmt.precision < 53 or rounding.mode.ties_to_even)


def round_beyond(wide: Wide, rounding: Rounding, random: Expr | None) -> Expr:
    """Return R of the exact value, the nearest binary64 number with what it lost, for a format of up to 53 bits.

    random: 32 random bits (u32), required by the modes that draw. An infinite value that lost something of the other
    sign is a number beyond the largest, as the modes that draw say: it overflows.
    """
    if wide.error is None:
        return round_expr(wide.value, rounding, random)
    carrier = CARRIERS["f64"]
    code = bits(wide.value)
    ordinal = ordinal_of(code, carrier)
    lost = (wide.error < 0.0) | (wide.error > 0.0)
    if rounding.mode.random_bits and not rounding.mode.jitter:
        lost = lost & (ordinal < carrier.infinity)
    inward = lost & ~(((bits(wide.error) ^ code) >> 63).equals(0))
    kept = select(inward, ordinal - 1, ordinal)
    # From here on the rest is measured in the ulp above ``kept``.
    outward_fraction, whole = _fraction(wide.size or wide.error, kept)
    opposite = select(whole, const("u32", 0) - outward_fraction, ~outward_fraction)
    # A size of zero with an error: less than any fraction.
    fraction = select(inward, opposite, outward_fraction)
    rest = Rest(lost, inward, fraction, whole)
    return round_with_rest(from_bits((code ^ ordinal) | kept), rest, rounding, random)


def _fraction(error: Expr, kept: Expr) -> tuple[Expr, Expr]:
    """Return floor(2^32 |error| / ulp) as a u32, where ulp is the spacing above ``kept``, and whether nothing is cut.

    With significand s and exponent fields f of the error and g of kept, it is s * 2^(f - g + 32). A shift to the left
    loses nothing: if g - f < 53, the error is subnormal, and s * 2^(f - g) = |error| / ulp is at most 1/2.
    """
    ordinal = ordinal_of(bits(error), CARRIERS["f64"])
    field = ordinal >> 52
    significand = select(field.equals(0), ordinal, (ordinal & ((1 << 52) - 1)) | (1 << 52))
    apart = maximum(kept >> 52, 1) - maximum(field, 1)
    raised = significand << (32 - minimum(apart, 32))
    places = minimum(maximum(apart, 32) - 32, 63)
    scaled = raised >> places
    return narrow(scaled), (scaled << places).equals(raised) & (ordinal > 0)
