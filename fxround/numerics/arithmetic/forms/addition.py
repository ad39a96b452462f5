"""A faster rounding algorithm for formats that have their carrier's exponents: one integer addition and a mask.

For such a format, rounding always drops the same number d of low bits of an encoding. A step away from zero is a carry
out of these bits, so the algorithm adds a number that carries exactly where the mode's rule steps, and clears the low
bits: ``(code + addend) >> d << d``. A carry out of the maximum gives infinity. With low the value of the d bits, each
addend is chosen so that low + addend >= 2^d is the rule of ``modes``; the tests compare every mode with the
specification and with the general algorithm of ``rounding``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from fxround.numerics.arithmetic.scalar import WIDTH, Expr, bits, const, from_bits, select, widen
from fxround.numerics.arithmetic.thresholds import drawn_word
from fxround.numerics.formats.carriers import Carrier, is_nan_code, ordinal_of
from fxround.numerics.modes import Mode, Rounding


@dataclass(frozen=True)
class Terms:
    """The values that addends are made of: 2^d and its half, the lowest kept bit, the sign and the random bits.

    ``even_tie``: 1 where low 2^n / 2^d is an even integer and a half, for n random bits; else 0.
    """

    unit: int
    half: int
    odd: Expr
    negative: Expr
    coin: Expr
    drawn: Expr
    even_tie: Expr


ADDENDS: Final[MappingProxyType[str, Callable[[Terms], Expr | int]]] = MappingProxyType(
    {
        "nearest_even": lambda t: t.odd + (t.half - 1),
        "nearest_away": lambda t: t.half,
        "nearest_zero": lambda t: t.half - 1,
        "nearest_odd": lambda t: t.half - t.odd,
        "toward_zero": lambda t: 0,
        # t.odd ^ t.odd is a zero of the encoding's type.
        "toward_positive": lambda t: select(t.negative, t.odd ^ t.odd, t.unit - 1),
        "toward_negative": lambda t: select(t.negative, t.unit - 1, t.odd ^ t.odd),
        "away_from_zero": lambda t: t.unit - 1,
        # The general rule steps where floor(low 2^32 / 2^d) + r >= 2^32, which is low + floor(r 2^d / 2^32) >= 2^d.
        "stochastic": lambda t: t.drawn,
        "stochastic_b": lambda t: t.drawn,
        "stochastic_c": lambda t: t.drawn - t.even_tie,
        "stochastic_equal": lambda t: select(t.coin, t.unit - 1, t.odd ^ t.odd),
        "up_down": lambda t: t.odd + (t.half - 1),
    }
)


def is_one_addition(rounding: Rounding, carrier: Carrier) -> bool:
    """Whether ``round_by_addition`` applies.

    The format must have its carrier's exponents, and a carry out of its maximum must give infinity, as its overflow
    asks.
    """
    fmt = rounding.format
    uniform = fmt.emin == carrier.format.emin and fmt.subnormals and fmt.precision > 1
    top = carrier.ordinal(fmt.maximum) + (1 << (carrier.format.precision - fmt.precision)) == carrier.infinity
    plain = fmt.is_grid and fmt.has_minus_zero and rounding.overflow == "inf"
    return uniform and top and plain and rounding.mode.name in ADDENDS


def round_by_addition(x: Expr, rounding: Rounding, carrier: Carrier, random: Expr | None, any_nan: bool) -> Expr:
    """Return R(x) for a rounding that satisfies ``is_one_addition``. any_nan: as in ``rounding.round_expr``."""
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
            drawn=zero if random is None else _drawn(random, mode, drop, carrier),
            even_tie=_even_tie(code, drop - mode.random_bits, carrier),
        )
        kept = ((code + ADDENDS[mode.name](terms)) >> drop) << drop
    if mode.jitter:
        kept = _jitter(kept, unit, rounding, carrier, coin)
    if not any_nan:
        kept = select(is_nan_code(code, carrier), carrier.nan, kept)
    return from_bits(kept)


def _even_tie(code: Expr, unseen: int, carrier: Carrier) -> Expr:
    """Return 1 where the ``unseen`` lowest bits are a half and the bit above them is 0, else 0."""
    if unseen < 1:
        return const(carrier.code, 0)
    tie = (code & ((2 << unseen) - 1)).equals(1 << (unseen - 1))
    return select(tie, const(carrier.code, 1), 0)


def _drawn(random: Expr, mode: Mode, drop: int, carrier: Carrier) -> Expr:
    """Return the mode's word, scaled from 32 bits to the ``drop`` bits lost."""
    word = drawn_word(random, mode)
    drawn = widen(word) if carrier.code == "u64" else word
    return drawn << (drop - 32) if drop > 32 else drawn >> min(32 - drop, WIDTH["u32"] - 1)


def _jitter(code: Expr, unit: int, rounding: Rounding, carrier: Carrier, coin: Expr) -> Expr:
    """Move an encoding one unit up or down. Zeros, infinities and NaNs stay; the maximum moves down only."""
    ordinal = ordinal_of(code, carrier)
    up = coin & (ordinal < carrier.ordinal(rounding.format.maximum))
    moved = select(up, code + unit, code - unit)
    # One unsigned comparison excludes zero, whose ordinal wraps around, and everything from infinity on.
    return select((ordinal - 1) < (carrier.infinity - 1), moved, code)
