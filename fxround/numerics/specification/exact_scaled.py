"""The specification of scaled roundings, over rational numbers.

``round_block`` defines what fxround returns for elements that share a scale. Each step is one rounding of ``exact``:
the scale, the quotient by it, and the product with it. It shares the rows of formats and scalings with the programs of
``kernels.scaled``, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from fxround.numerics.formats import FORMATS, Format
from fxround.numerics.formats.fixed_point import fixed_point
from fxround.numerics.formats.scaled import ScaledRounding, Scaling
from fxround.numerics.modes import MODES, Rounding
from fxround.numerics.specification.exact import round_exact, round_float


def largest(values: Sequence[float], percentile: float | None = None) -> Fraction:
    """Return the largest finite magnitude, or the least that ``percentile`` percent do not exceed; 0 for none."""
    finite = sorted(Fraction(abs(v)) for v in values if math.isfinite(v))
    if not finite:
        return Fraction(0)
    rank = len(finite) if percentile is None else math.ceil(Fraction(percentile) * len(finite) / 100)
    return finite[rank - 1]


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
    if scaling is None:
        return [_unscaled(v, rounding, stored, r) for v, r in zip(values, bits, strict=True)]
    carrier = FORMATS["binary64" if stored == FORMATS["binary64"] else "binary32"]
    if scaling.how == "affine":
        return _affine(values, rounding, stored, carrier, bits)
    most = largest(values, scaling.percentile)
    if scaling.how == "inverse":
        return multiplied(values, next_multiplier(most, Fraction(1), rounding), rounding, stored, bits)
    scale = best_scale(values, most, most if whole is None else whole, rounding, carrier)
    return [_element(v, scale, scale, element, stored, r) for v, r in zip(values, bits, strict=True)]


def multiplied(
    values: Sequence[float], multiplier: Fraction, rounding: ScaledRounding, stored: Format, bits: Sequence[int]
) -> list[float]:
    """Return the elements R(x r) times 1 / r, which is rounded to nearest, with the multiplier r."""
    carrier = FORMATS["binary64" if stored == FORMATS["binary64"] else "binary32"]
    own, scale = Fraction(_nearest(1 / multiplier, carrier)), 1 / multiplier
    return [_element(v, scale, own, rounding.element, stored, r) for v, r in zip(values, bits, strict=True)]


def next_multiplier(most: Fraction, former: Fraction, rounding: ScaledRounding) -> Fraction:
    """Return the multiplier M / most / 2^margin, rounded as the scaling says; the former one if ``most`` is zero.

    most: the largest magnitude of a block, or of the steps in the history of a delayed scale.
    """
    scaling = rounding.format.scaling
    assert scaling is not None
    if not most:
        return former
    return _positive(Fraction(rounding.format.element.maximum) / Fraction(2) ** scaling.margin / most, scaling.rounding)


def best_scale(
    values: Sequence[float], most: Fraction, whole: Fraction, rounding: ScaledRounding, carrier: Format
) -> Fraction:
    """Return the scale of a block; where it is fitted, the first of those with the least error."""
    scaling, element = rounding.format.scaling, rounding.format.element
    assert scaling is not None
    if not scaling.fit:
        return scale_of(most, whole, scaling, element)
    scales = [scale_of(most, whole, scaling, element, target) for target in scaling.fit]
    errors = [_error(values, scale, most, rounding, carrier) for scale in scales]
    return scales[errors.index(min(errors))]


def _error(
    values: Sequence[float], scale: Fraction, most: Fraction, rounding: ScaledRounding, carrier: Format
) -> float:
    """Return the sum of squared errors relative to ``most``: each step rounded to the carrier, the exact sum once."""
    nearest = replace(rounding.element, mode=MODES["nearest_even"])
    unit = most or Fraction(2) ** carrier.quantum_exponent
    total = Fraction(0)
    for value in (Fraction(v) for v in values if math.isfinite(v)):
        kept = round_exact(value / scale, value < 0, nearest)
        if not math.isfinite(kept):
            return math.inf
        back = _nearest(Fraction(kept) * scale, carrier)
        lost = _nearest(value - Fraction(back), carrier) if math.isfinite(back) else math.inf
        ratio = _nearest(Fraction(lost) / unit, carrier) if math.isfinite(lost) else math.inf
        squared = _nearest(Fraction(ratio) ** 2, carrier) if math.isfinite(ratio) else math.inf
        if not math.isfinite(squared):
            return math.inf
        total += Fraction(squared)
    return _nearest(total, carrier)


def _affine(
    values: Sequence[float], rounding: ScaledRounding, stored: Format, carrier: Format, bits: Sequence[int]
) -> list[float]:
    """Return the elements of a block of integers with a zero point, 0 to M: (R(x / s) + z, within 0 and M, - z) s."""
    scaling, element = rounding.format.scaling, rounding.element
    assert scaling is not None
    most = int(element.format.maximum)
    above, below = (largest([max(0.0, sign * v) for v in values if math.isfinite(v)]) for sign in (1, -1))
    half = _nearest(sum(Fraction(_nearest(side / 2, carrier)) for side in (above, below)) + Fraction(0), carrier)
    scale = _positive(Fraction(half) * 2 / most, scaling.rounding)
    nearest = Rounding(element.format, MODES["nearest_even"], "saturate")
    zero = int(round_exact(below / scale, False, nearest))
    wide = replace(element, format=fixed_point(element.format.precision + 2, 0))
    results = []
    for value, random in zip(values, bits, strict=True):
        if math.isfinite(value):
            kept = round_exact(Fraction(value) / scale, math.copysign(1.0, value) < 0, wide, random)
        else:
            kept = round_float(value, wide, random)
        if math.isnan(kept):
            results.append(kept)
        else:
            integer = min(max(int(kept) + zero, 0), most) - zero
            results.append(round_exact(integer * scale, integer < 0, _own(stored)))
    return results


def scale_of(
    most: Fraction, whole: Fraction, scaling: Scaling, element: Format, target: float | None = None
) -> Fraction:
    """Return the scale of a block with this largest magnitude, in a tensor with the largest magnitude ``whole``.

    target: the element value to which ``most`` is mapped; None for the scaling's own.
    """
    divisor = Fraction(scaling.divisor(element))
    mapped = divisor if target is None else Fraction(target)
    if scaling.how == "even":
        unbounded = Format.custom(precision=element.precision, emin=-1022, maximum=2.0**1023)
        most = Fraction(round_exact(most, False, Rounding(unbounded, MODES["nearest_away"], "inf")))
    if scaling.whole is None:
        return _positive(most / mapped, scaling.rounding)
    wide = Rounding(scaling.whole, MODES["nearest_even"], "saturate")
    outer = _positive(whole / (divisor * Fraction(scaling.format.maximum)), wide)
    inner = Fraction(round_exact(most / outer, False, wide))
    return _positive(_positive(inner / mapped, scaling.rounding) * outer, wide)


def _positive(value: Fraction, rounding: Rounding) -> Fraction:
    """Return R(value), or the smallest positive value of the format for a zero."""
    rounded = Fraction(round_exact(value, False, rounding))
    return rounded or Fraction(2) ** rounding.format.quantum_exponent


def _nearest(value: Fraction, fmt: Format) -> float:
    return round_exact(value, value < 0, _own(fmt))


def _own(stored: Format) -> Rounding:
    """The rounding of a result to the format of its tensor."""
    return Rounding(stored, MODES["nearest_even"], stored.default_overflow)


def _element(value: float, scale: Fraction, back: Fraction, element: Rounding, stored: Format, random: int) -> float:
    """Return R(value / scale) times ``back``."""
    if not math.isfinite(value):
        quotient = round_float(value, element, random)
    else:
        quotient = round_exact(Fraction(value) / scale, math.copysign(1.0, value) < 0, element, random)
    if not math.isfinite(quotient):
        return quotient
    return round_exact(Fraction(quotient) * back, math.copysign(1.0, quotient) < 0, _own(stored))


def _unscaled(value: float, rounding: ScaledRounding, stored: Format, random: int) -> float:
    """Return an element of fixed point, or one with a scale that is given."""
    unit = Fraction(1 if rounding.format.unit is None else rounding.format.unit)
    if rounding.overflow == "wrap":
        return _wrapped(value, unit, rounding, stored, random)
    if math.isfinite(value):
        kept = round_exact(Fraction(value) / unit, math.copysign(1.0, value) < 0, rounding.element, random)
    else:
        kept = round_float(value, rounding.element, random)
    if rounding.format.span is not None and not math.isnan(kept):
        kept = min(max(kept, rounding.format.span[0]), rounding.format.span[1])
    if not math.isfinite(kept):
        return kept
    return round_exact(Fraction(kept) * unit, math.copysign(1.0, kept) < 0, _own(stored))


def _wrapped(value: float, unit: Fraction, rounding: ScaledRounding, stored: Format, random: int) -> float:
    """Return the element that equals R(value / unit) modulo the number of elements; NaN for an infinity."""
    assert rounding.format.span is not None
    if not math.isfinite(value):
        return math.nan
    carrier = FORMATS["binary64" if stored == FORMATS["binary64"] else "binary32"]
    multiple = round_exact(Fraction(value) / unit, value < 0, rounding.multiples(carrier), random)
    if not math.isfinite(multiple):
        return math.nan
    least, most = map(Fraction, rounding.format.span)
    count = most - least + Fraction(2) ** rounding.format.element.quantum_exponent
    kept = (Fraction(multiple) - least) % count + least
    return round_exact(kept * unit, kept < 0, _own(stored))
