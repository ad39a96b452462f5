"""Rounding by one addition, where the grid is uniform: the fast equal of the general algorithm.

What is true here. Where a format shares its carrier's exponents, rounding always drops the same d bits of
an encoding. Stepping away from zero is then a carry out of them: add a number that carries exactly where the
mode's rule steps, and clear them. A carry out of the maximum gives infinity by itself.

Why it is safe. For each mode the addend is chosen so that low + addend >= 2^d is the rule of ``modes`` (low:
the d bits lost); the tests compare every mode with the specification, and with the general path.

    before   select(rule(odd, low == half, low > half, ...), above, below)
    after    (code + addend) >> d << d
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from fxround.numerics.carriers import Carrier, is_nan_code, ordinal_of
from fxround.numerics.modes import Rounding
from fxround.numerics.scalar import WIDTH, Expr, bits, const, from_bits, select, widen


@dataclass(frozen=True)
class Terms:
    """What addends are made of: 2^d and its half, the lowest kept bit, the sign, and the random bits."""

    unit: int
    half: int
    odd: Expr
    negative: Expr
    coin: Expr
    drawn: Expr


ADDENDS: Final[MappingProxyType[str, Callable[[Terms], Expr | int]]] = MappingProxyType(
    {
        "nearest_even": lambda t: t.odd + (t.half - 1),
        "nearest_away": lambda t: t.half,
        "nearest_zero": lambda t: t.half - 1,
        "toward_zero": lambda t: 0,
        "toward_positive": lambda t: select(t.negative, t.odd ^ t.odd, t.unit - 1),
        "toward_negative": lambda t: select(t.negative, t.unit - 1, t.odd ^ t.odd),
        "away_from_zero": lambda t: t.unit - 1,
        # floor(low 2^32 / 2^d) + r >= 2^32 exactly if low + floor(r 2^d / 2^32) >= 2^d.
        "stochastic": lambda t: t.drawn,
        "stochastic_equal": lambda t: select(t.coin, t.unit - 1, t.odd ^ t.odd),
        "up_down": lambda t: t.odd + (t.half - 1),
    }
)


def is_one_addition(rounding: Rounding, carrier: Carrier) -> bool:
    """Whether the grid is uniform and a carry out of the maximum lands on infinity, as the overflow asks."""
    fmt = rounding.format
    uniform = fmt.emin == carrier.format.emin and fmt.subnormals and fmt.precision > 1
    top = carrier.ordinal(fmt.maximum) + (1 << (carrier.format.precision - fmt.precision)) == carrier.infinity
    plain = fmt.signed and fmt.zero and rounding.overflow == "inf"
    return uniform and top and plain and rounding.mode.name in ADDENDS


def round_by_addition(x: Expr, rounding: Rounding, carrier: Carrier, random: Expr | None, any_nan: bool) -> Expr:
    """R(x) for a rounding that ``is_one_addition``. any_nan: as in ``rounding.round_expr``."""
    code, mode = bits(x), rounding.mode
    drop = carrier.format.precision - rounding.format.precision
    unit = 1 << drop
    zero = const(carrier.code, 0)
    coin = const("bool", 0) if random is None else (random >> 31).equals(1)
    kept = code
    if drop:
        terms = Terms(
            unit=unit,
            half=unit >> 1,
            odd=(code >> drop) & 1,
            negative=ordinal_of(code, carrier) < code,
            coin=coin,
            drawn=zero if random is None else _drawn(random, mode.random_bits, drop, carrier),
        )
        kept = ((code + ADDENDS[mode.name](terms)) >> drop) << drop
    if mode.jitter:
        kept = _jitter(kept, unit, rounding, carrier, coin)
    if not any_nan:
        kept = select(is_nan_code(code, carrier), carrier.nan, kept)
    return from_bits(kept)


def _drawn(random: Expr, count: int, drop: int, carrier: Carrier) -> Expr:
    """The highest ``count`` random bits, scaled from 32 bits to the ``drop`` bits lost."""
    unused = 32 - count
    drawn = (random >> unused) << unused if unused else random
    drawn = widen(drawn) if carrier.code == "u64" else drawn
    return drawn << (drop - 32) if drop > 32 else drawn >> min(32 - drop, WIDTH["u32"] - 1)


def _jitter(code: Expr, unit: int, rounding: Rounding, carrier: Carrier, coin: Expr) -> Expr:
    """One unit up or down: zeros, infinities and NaNs stay, the maximum steps down only."""
    ordinal = ordinal_of(code, carrier)
    up = coin & (ordinal < carrier.ordinal(rounding.format.maximum))
    moved = select(up, code + unit, code - unit)
    return select((ordinal - 1) < (carrier.infinity - 1), moved, code)
