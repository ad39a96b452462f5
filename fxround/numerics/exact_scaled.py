"""The specification of scaled roundings, over rational numbers.

``round_block`` defines what fxround returns for elements that share a scale. Each step is one rounding of ``exact``:
the scale, the quotient by it, and the product with it. It shares the rows of formats and scalings with the programs of
``kernels.scaled``, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from fxround.numerics.exact import round_exact, round_float
from fxround.numerics.formats import Format
from fxround.numerics.modes import MODES, Rounding
from fxround.numerics.scaled import ScaledRounding, Scaling


def largest(values: Sequence[float]) -> Fraction:
    """Return the largest finite magnitude, 0 if there is none."""
    return max((Fraction(abs(v)) for v in values if math.isfinite(v)), default=Fraction(0))


def round_block(
    values: Sequence[float],
    rounding: ScaledRounding,
    stored: Format,
    randoms: Sequence[int] = (),
    whole: Fraction | None = None,
) -> list[float]:
    """Return the elements of one block after a scaled rounding.

    values: the elements, in ``stored``, the format of their tensor. randoms: 32 random bits for each element, needed by
    the modes that draw. whole: the largest finite magnitude of the tensor; None: that of the block.
    """
    bits = list(randoms) or [0] * len(values)
    scaling, element = rounding.format.scaling, rounding.element
    own = Rounding(stored, MODES["nearest_even"], stored.default_overflow)
    if scaling is None:
        found = [round_float(v, element, r) for v, r in zip(values, bits, strict=True)]
        return [round_float(_at_least(v, rounding), own) for v in found]
    most = largest(values)
    scale = scale_of(most, most if whole is None else whole, scaling, element.format)
    return [_element(v, scale, element, own, r) for v, r in zip(values, bits, strict=True)]


def scale_of(most: Fraction, whole: Fraction, scaling: Scaling, element: Format) -> Fraction:
    """Return the scale of a block with this largest magnitude, in a tensor with the largest magnitude ``whole``."""
    divisor = Fraction(scaling.divisor(element))
    if scaling.how == "even":
        unbounded = Format.custom(precision=element.precision, emin=-1022, maximum=2.0**1023)
        most = Fraction(round_exact(most, False, Rounding(unbounded, MODES["nearest_away"], "inf")))
    if scaling.whole is None:
        return _positive(most / divisor, scaling.rounding)
    wide = Rounding(scaling.whole, MODES["nearest_even"], "saturate")
    outer = _positive(whole / (divisor * Fraction(scaling.format.maximum)), wide)
    inner = Fraction(round_exact(most / outer, False, wide))
    return _positive(_positive(inner / divisor, scaling.rounding) * outer, wide)


def _positive(value: Fraction, rounding: Rounding) -> Fraction:
    """Return R(value), or the smallest positive value of the format for a zero."""
    found = Fraction(round_exact(value, False, rounding))
    return found or Fraction(2) ** rounding.format.quantum_exponent


def _element(value: float, scale: Fraction, element: Rounding, own: Rounding, random: int) -> float:
    if not math.isfinite(value):
        quotient = round_float(value, element, random)
    else:
        quotient = round_exact(Fraction(value) / scale, math.copysign(1.0, value) < 0, element, random)
    if not math.isfinite(quotient):
        return quotient
    return round_exact(Fraction(quotient) * scale, math.copysign(1.0, quotient) < 0, own)


def _at_least(value: float, rounding: ScaledRounding) -> float:
    """Return the value within the bounds of two's complement, which has one value more below zero than above."""
    least = rounding.format.lowest
    if least is None or math.isnan(value):
        return value
    return min(max(value, least), -least - math.ldexp(1.0, rounding.format.element.quantum_exponent))
