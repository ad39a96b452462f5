"""Sums that are rounded to fixed point, in the scalar IR: the steps of an accumulator in two's complement.

A step rounds the exact sum to a multiple of the quantum, as if words had any length. The multiple then saturates, or
only its low bits are kept (``wrap``). ``exact.round_to_fixed`` is the specification.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final

from fxround.numerics.arithmetic.operators import apply
from fxround.numerics.arithmetic.rounding import kept_inside, round_expr
from fxround.numerics.arithmetic.scalar import Expr, absolute, bits, const, from_bits, rarely, select
from fxround.numerics.formats import Format
from fxround.numerics.modes import MODES, Rounding

# A number of so few bits is a multiple of the quantum from 2^48 quanta on, and every mode rounds a sum below 2^51
# quanta as the nearest binary64 number, or that to odd.
_BITS: Final = 48
_SHORT_MODES: Final = ("nearest_even", "toward_negative")


def wraps(rounding: Rounding | None) -> bool:
    """Whether a rounding keeps the low bits of what does not fit."""
    return rounding is not None and rounding.overflow == "wrap"


def is_short(rounding: Rounding) -> bool:
    """Whether ``fixed_sum`` has a shorter form of this rounding than ``operators.apply``."""
    return rounding.format.span is not None and rounding.mode.name in _SHORT_MODES and _fits(rounding)


def require_wrapping(rounding: Rounding | None, precision: int) -> None:
    """Raise ValueError if a number of this precision cannot be added to an accumulator that wraps."""
    if rounding is None or not wraps(rounding):
        return
    if precision > _BITS:
        raise ValueError(
            f"{rounding}: numbers of {precision} bits cannot be added exactly to an accumulator that wraps; use "
            f"float32 operands, product= of at most {_BITS} bits, or saturate"
        )
    if not _fits(rounding):
        raise ValueError(f"{rounding}: words of at most {_BITS} bits can wrap in an accumulator; use saturate")


def _fits(rounding: Rounding) -> bool:
    return _count(rounding.format) <= math.ldexp(1.0, _BITS + rounding.format.quantum_exponent)


def fixed_sum(acc: Expr, x: Expr, rounding: Rounding, random: Expr, on_grid: bool = True) -> Expr:
    """Return R(acc + x) for f64 values, as ``require_wrapping`` or ``is_short`` allows; a NaN may have any bits.

    x: of at most 48 bits. on_grid: acc is a value of the format; False: it may be any binary32 value.
    """
    fmt, short = rounding.format, on_grid and is_short(rounding)
    if not wraps(rounding):
        return kept_inside(_multiple(acc, x, rounding), fmt) if short else _apply_sum(acc, x, rounding, random)
    near_acc, near_x = _reduced(acc, x, fmt, on_grid)
    if short:
        return _wrapped(_multiple(near_acc, near_x, rounding), fmt)
    return _wrapped(_apply_sum(near_acc, near_x, _multiples(fmt, rounding), random), fmt)


def _apply_sum(acc: Expr, x: Expr, rounding: Rounding, random: Expr) -> Expr:
    return apply("add_inside", (acc, x), rounding, "f64", random, any_nan=True)


def _count(fmt: Format) -> float:
    """The number of words times the quantum, a power of two."""
    assert fmt.span is not None
    return fmt.span[1] - fmt.span[0] + math.ldexp(1.0, fmt.quantum_exponent)


@lru_cache(maxsize=256)
def _multiples(fmt: Format, rounding: Rounding) -> Rounding:
    """The rounding to multiples of the quantum, for magnitudes below 2^51 quanta."""
    unit = fmt.quantum_exponent
    largest = math.ldexp(2.0 - 2.0**-50, unit + 60)
    row = Format.custom(precision=51, emin=unit + 50, maximum=largest, minus_zero=False)
    return Rounding(row, rounding.mode, "inf")


@lru_cache(maxsize=256)
def _whole_words(fmt: Format) -> Rounding:
    """The rounding towards zero to multiples of ``_count``, for every number of binary64."""
    emin = math.frexp(_count(fmt))[1] - 1 + 52
    largest = math.ldexp(2.0 - 2.0**-52, 1023)
    return Rounding(Format.custom(precision=53, emin=emin, maximum=largest), MODES["toward_zero"], "inf")


def _multiple(acc: Expr, x: Expr, rounding: Rounding) -> Expr:
    """Return the sum rounded to a multiple of the quantum; from 2^51 quanta on, any number beyond all words.

    Next to 1.5 * 2^52 quanta, binary64 has the multiples alone, and that number of quanta is even. The first addition
    is exact, so that the second one is the only rounding.
    """
    unit = math.ldexp(1.0, rounding.format.quantum_exponent)
    nearest = (x + (acc + 3 * 2.0**51 * unit)) - 3 * 2.0**51 * unit
    if rounding.mode.name == "nearest_even":
        return nearest
    # nearest - acc is exact.
    return nearest - select(x < nearest - acc, unit, const("f64", 0.0))


def _reduced(acc: Expr, x: Expr, fmt: Format, on_grid: bool) -> tuple[Expr, Expr]:
    """Return numbers whose sum is below 2^51 quanta, has the sign of acc + x, and differs from it by whole words.

    Beyond 2^48 quanta a number is a multiple of the quantum. Its remainder, moved away from zero by 2^49 quanta, keeps
    the sign of the sum, on which some modes depend.
    """
    limit, moved = (math.ldexp(1.0, n + fmt.quantum_exponent) for n in (_BITS, _BITS + 1))
    far_x = const("f64", limit) < absolute(x)
    total = acc + x
    away = from_bits(bits(const("f64", moved)) | (bits(total) & (1 << 63)))
    away = select(total.equals(0.0), 0.0, away)
    near_x = rarely(far_x, _remainder(x, fmt) + away, x)
    if on_grid:
        return acc, near_x
    far_acc, own = const("f64", limit) < absolute(acc), _remainder(acc, fmt)
    return rarely(far_acc, select(far_x, own, own + away), acc), near_x


def _remainder(x: Expr, fmt: Format) -> Expr:
    """Return x less whole words, with the sign of x; NaN for an infinity."""
    return x - round_expr(x, _whole_words(fmt))


def _wrapped(multiple: Expr, fmt: Format) -> Expr:
    """Return the value of the word with the low bits of a multiple below 2^51 quanta."""
    assert fmt.span is not None
    (least, most), count = fmt.span, _count(fmt)
    # The words below, from the nearest number of words, as in ``_multiple``; each other step is exact.
    offset = multiple - least
    words = (offset + 3 * 2.0**51 * count) - 3 * 2.0**51 * count
    words = words - select(offset < words, count, const("f64", 0.0))
    outside = (multiple < least) | (const("f64", most) < multiple)
    return rarely(outside, multiple - words, multiple)
