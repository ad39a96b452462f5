"""Rounding to a table of values, in the scalar IR.

A deterministic mode is monotone: for each pair of neighbours there is a smallest carrier value that becomes the upper
one. These bounds are computed when the kernel is made, and the kernel compares with them: all of them in a short table,
by bisection in a longer one. The modes that draw need both neighbours of a value, and how far it is between them.

``exact.round_to_table`` is the specification; it shares the rule of the mode and the list of values with this file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, Final

import numpy as np

from fxround.numerics.arithmetic.scalar import (
    DTYPES,
    Expr,
    absolute,
    bits,
    const,
    from_bits,
    lookup,
    maximum,
    minimum,
    narrow,
    select,
    widen,
)
from fxround.numerics.arithmetic.thresholds import is_drawn
from fxround.numerics.formats.carriers import CARRIERS, Carrier, is_nan_code, ordinal_of
from fxround.numerics.modes import Lost, Mode, Rounding

# Up to this number of values, comparing with each costs less than a bisection, whose steps read memory.
_SHORT: Final = 32


def round_to_table(x: Expr, rounding: Rounding, random: Expr | None) -> Expr:
    """Return R(x) in x's carrier, for the rounding to a table. random: 32 random bits, required by modes that draw."""
    carrier, values, mode = CARRIERS[x.type], rounding.format.values, rounding.mode
    if mode.jitter:
        assert random is not None
        rounded = _moved(x, values, mode, random)
    elif mode.deterministic:
        bounds = _bounds(values, mode, carrier)
        rounded = _choose(x, bounds, [values])[0]
    else:
        assert random is not None
        rounded = _by_chance(x, values, mode, random)
    # A comparison with a NaN is false.
    return select(is_nan_code(bits(x), carrier), from_bits(const(carrier.code, carrier.nan)), rounded)


def _bounds(values: Sequence[float], mode: Mode, carrier: Carrier) -> list[float]:
    """Return for each value but the first the smallest carrier value that becomes this value or a larger one."""
    bounds = []
    for number, (low, high) in enumerate(pairwise(values)):
        rises = abs(low) < abs(high)
        odd = (number if rises else number + 1) % 2 == 1

        def steps(half: bool, above: bool, rises: bool = rises, odd: bool = odd) -> bool:
            seen = Lost(not rises, rises, odd, not odd, True, half, above, False, False, False)
            return bool(mode.away(seen))

        near, tie, far = steps(False, False), steps(True, False), steps(False, True)
        ups = (near, tie, far) if rises else (not far, not tie, not near)
        middle = (Fraction(low) + Fraction(high)) / 2
        # Whether what is just above low, the middle, and what is just below high become high.
        if ups[0]:
            bounds.append(_next_above(Fraction(low), carrier))
        elif ups[1]:
            bounds.append(_at_least(middle, carrier))
        elif ups[2]:
            bounds.append(_next_above(middle, carrier))
        else:
            bounds.append(high)
    return bounds


def _at_least(bound: Fraction, carrier: Carrier) -> float:
    """Return the smallest carrier value that is not below the bound."""
    kind: Any = DTYPES[carrier.type]
    value = kind(float(bound))
    while Fraction(float(value)) < bound:
        value = np.nextafter(value, kind(math.inf))
    while Fraction(float(below := np.nextafter(value, kind(-math.inf)))) >= bound:
        value = below
    return float(value)


def _next_above(bound: Fraction, carrier: Carrier) -> float:
    """Return the smallest carrier value above the bound."""
    kind: Any = DTYPES[carrier.type]
    value = _at_least(bound, carrier)
    return value if Fraction(value) > bound else float(np.nextafter(kind(value), kind(math.inf)))


def _choose(x: Expr, bounds: Sequence[float], columns: Sequence[Sequence[float]]) -> list[Expr]:
    """Return from each column the entry whose number is how many bounds x reaches. The bounds ascend."""
    if len(bounds) < _SHORT:
        chosen = [const(x.type, column[0]) for column in columns]
        for number, bound in enumerate(bounds, 1):
            reached = const(x.type, bound) <= x
            chosen = [select(reached, const(x.type, c[number]), f) for c, f in zip(columns, chosen, strict=True)]
        return chosen
    index, size = _reached(x, bounds), 1 << len(bounds).bit_length()
    return [_entries([*c, *[c[-1]] * (size - len(c))], x)(index) for c in columns]


def _reached(x: Expr, bounds: Sequence[float]) -> Expr:
    """Return how many of the ascending bounds x reaches, by bisection."""
    size = 1 << len(bounds).bit_length()
    bound_at = _entries([*bounds, *[math.inf] * (size - len(bounds))], x)
    index, step = const("u32", 0), size >> 1
    while step:
        # Invariant: x reaches the first ``index`` bounds, and fewer than ``index + 2 step`` of them.
        index = select(bound_at(index + (step - 1)) <= x, index + step, index)
        step >>= 1
    return index


def position_of(x: Expr, values: Sequence[float]) -> Expr:
    """Return the position (u32) of x among the values of a table, of which it is one."""
    return _reached(x, values[1:])


def value_at(position: Expr, values: Sequence[float], like: Expr) -> Expr:
    """Return the value at a position (u32), as a value of the type of ``like``; beyond the last one, the last."""
    size = 1 << (len(values) - 1).bit_length()
    return _entries([*values, *[values[-1]] * (size - len(values))], like)(position)


def _entries(column: Sequence[float], x: Expr) -> Callable[[Expr], Expr]:
    """Return a function from a number (u32) to the entry of the column, as a value of x's type."""
    carrier = CARRIERS[x.type]
    codes = [carrier.ordinal(abs(v)) | (math.copysign(1.0, v) < 0) << (31 if x.type == "f32" else 63) for v in column]
    if x.type == "f32":
        return lambda index: from_bits(lookup(index, codes))
    lows, highs = [c & 0xFFFFFFFF for c in codes], [c >> 32 for c in codes]
    return lambda index: from_bits(widen(lookup(index, highs)) << 32 | widen(lookup(index, lows)))


def _moved(x: Expr, values: Sequence[float], mode: Mode, random: Expr) -> Expr:
    """Return a neighbour of the nearest value, away from zero or towards it by a coin.

    An infinity is the end itself.
    """
    ends = (0, len(values) - 1)
    columns: list[list[float]] = [[], []]
    for number, value in enumerate(values):
        for column, step in zip(columns, (1, -1) if value > 0 else (-1, 1), strict=True):
            # Zero stays, and an end has one neighbour.
            inside = ends[0] <= number + step <= ends[1]
            column.append(value if value == 0 else values[number + (step if inside else -step)])
    up, down = _choose(x, _bounds(values, mode, CARRIERS[x.type]), columns)
    moved = select((random >> 31).equals(1), up, down)
    moved = select(x.equals(math.inf), values[-1], moved)
    return select(x.equals(-math.inf), values[0], moved)


def _by_chance(x: Expr, values: Sequence[float], mode: Mode, random: Expr) -> Expr:
    """Return the neighbour that the random bits choose."""
    inside = select(x < values[0], values[0], select(const(x.type, values[-1]) < x, values[-1], x))
    low, high = _choose(inside, values[1:], [values, [*values[1:], values[-1]]])
    rises = absolute(low) < absolute(high)
    kept, other = select(rises, low, high), select(rises, high, low)
    inexact = (low < inside) & (inside < high)
    fraction, whole = lost_fraction(inside, kept, other)
    never = const("bool", 0)
    seen = Lost(
        negative=~rises,
        positive=rises,
        odd=never,
        even=never,
        inexact=inexact,
        half=never,
        above=never,
        drawn=inexact & is_drawn(fraction, whole, mode, random),
        coin=(random >> 31).equals(1),
        never=never,
    )
    return select(mode.away(seen), other, select(inexact, kept, low))


def lost_fraction(x: Expr, kept: Expr, other: Expr) -> tuple[Expr, Expr]:
    """Return floor(2^32 q) as a u32, and whether 2^32 q is an integer: q = |x - kept| / |other - kept| in binary64."""
    x, kept, other = (widen(v) if v.type == "f32" else v for v in (x, kept, other))
    quotient = absolute((x - kept) / (other - kept))
    # Rounded to 1, q becomes the largest number below 1. A NaN, where kept is other, is not used.
    quotient = select(quotient < 1.0, quotient, 1.0 - 2.0**-53)
    ordinal = ordinal_of(bits(quotient), CARRIERS["f64"])
    field = maximum(ordinal >> 52, 1)
    significand = select((ordinal >> 52).equals(0), ordinal, (ordinal & ((1 << 52) - 1)) | (1 << 52))
    # q is significand 2^(field - 1075).
    places = minimum(const("u64", 1075 - 32) - field, 63)
    dropped = significand & ((const("u64", 1) << places) - 1)
    return narrow(significand >> places), dropped.equals(0)
