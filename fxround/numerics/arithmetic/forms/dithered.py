"""Stochastic rounding to binary64 of sums, products and multiply-adds by one addition, far from the ends of the range.

Let v be the exact value, t the binary64 number next to v towards zero, q the quantum above t, and w the random word: a
step away from zero is drawn if floor(2^32 (v - t) / q) + w >= 2^32. That is t + d truncated, for d = (v - t) + (w + c)
2^-32 q: below the next power of two, t + q is reached if d >= q; t itself may be the last number of its binade, where
d < 2 q leads no further than to the power of two. c = 2^-10 is less than what the fraction is good to, and makes d
robust, as follows.

**What v - t is.** A product is p + e, e = fma(a, b, -p) exactly, and p + c = s + f exactly (``two_sum``). s - t is
exact: both are multiples of the smaller of their quanta, and near each other. (s - t) + (f + e) has two roundings. If p
and c cancel to less than half of the larger one, f = 0 (Sterbenz) and the last of them keeps the sign, and zero;
otherwise f + e is a few q at most, so that the first is off by less than 2^-50 q. That moves the fraction less than its
32 bits do.

**Which t is taken.** The processor truncates, or the nearest number is moved by the sign of what it lost. Where that
sign is wrong, v is nearer than 2^-50 q to a number u, and the two take u and its neighbour towards zero. Since 0 < (w +
c) 2^-32 < 1 - 2^-33, both lead to u: from u, d is more than 0 and less than q; from the neighbour, d is q or more. So
all processors have the same bits.

**The range.** Products and results are zero, or from 2^-900 to 2^1000. Then everything above is zero or normal: e is a
multiple of 2^-1004, and (w + c) 2^-32 q of 2^-994. Elsewhere the general algorithm decides. Sums of products of numbers
that are zero or from 2^-380 to 2^400 never leave the range, in any order and in 2^200 steps: they are multiples of
2^-864 (a number whose quantum is less is exact).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from fxround.numerics.arithmetic.residuals import two_sum
from fxround.numerics.arithmetic.scalar import (
    Expr,
    absolute,
    bits,
    const,
    fma,
    from_bits,
    negate,
    rarely,
    select,
    toward_zero,
    widen,
)
from fxround.numerics.arithmetic.thresholds import drawn_word
from fxround.numerics.formats import FORMATS
from fxround.numerics.formats.carriers import CARRIERS
from fxround.numerics.modes import MODES, Rounding

_CARRIER: Final = CARRIERS["f64"]
_RANGE: Final = 2.0**-900, 2.0**1000
_OPERANDS: Final = 2.0**-380, 2.0**400
_DRAWN: Final = [MODES[name].away for name in ("stochastic", "stochastic_b")]
# The encoding of 2^-52 (1 + c 2^-32), in which the random word has the bits below the exponent.
_ONE: Final = (_CARRIER.bias - 52) << 52
_ROBUST: Final = 1 << 10


@dataclass(frozen=True)
class _Exact:
    """nearest + (what it lost) = near + rest, exactly but for the rounding of ``rest``.

    product: which must be in the range, and two factors that explain a product of zero; None for sums.
    """

    nearest: Expr
    near: Expr
    rest: Expr
    product: tuple[Expr, Expr, Expr] | None = None

    def beyond(self, x: Expr) -> Expr:
        """Return what the exact value is more than x, a neighbour of it."""
        return (self.near - x) + self.rest


def _sum(a: Expr, b: Expr) -> _Exact:
    total = two_sum(a, b)
    assert total.error is not None
    return _Exact(total.value, total.value, total.error)


def _product(a: Expr, b: Expr) -> _Exact:
    product = a * b
    return _Exact(product, product, fma(a, b, negate(product)), (product, a, b))


def _fused(a: Expr, b: Expr, c: Expr) -> _Exact:
    product = a * b
    total = two_sum(product, c)
    assert total.error is not None
    rest = total.error + fma(a, b, negate(product))
    return _Exact(fma(a, b, c), total.value, rest, (product, a, b))


def _fused_inside(a: Expr, b: Expr, c: Expr) -> _Exact:
    """The same for factors whose product is exact."""
    return _sum(a * b, c)


_EXACT: Final = MappingProxyType[str, Callable[..., _Exact]](
    {
        "add": _sum,
        "sub": lambda a, b: _sum(a, negate(b)),
        "mul": _product,
        "fma": _fused,
        "add_step": _sum,
        "fma_step": _fused,
        "add_inside": _sum,
        "fma_inside": _fused_inside,
    }
)


def is_dithered(operator: str, rounding: Rounding) -> bool:
    """Whether there is this way for an operator, by its name, and a rounding."""
    return operator in _EXACT and rounding.format == FORMATS["binary64"] and rounding.mode.away in _DRAWN


def dithered(operator: str, operands: tuple[Expr, ...], rounding: Rounding, random: Expr, general: Expr) -> Expr:
    """Return R(f(operands)) where ``is_dithered``. general: the same by the general algorithm."""
    exact = _EXACT[operator](*operands)
    # An exact zero has the sign that IEEE 754 gives it.
    inside = _in_range(exact.nearest) | exact.nearest.equals(0.0)
    if exact.product is not None:
        product, a, b = exact.product
        inside = inside & (_in_range(product) | a.equals(0.0) | b.equals(0.0))
    drawn = select(exact.nearest.equals(0.0), exact.nearest, _drawn(exact, rounding, random))
    return rarely(~inside, general, drawn)


def dithered_inside(operator: str, operands: tuple[Expr, ...], rounding: Rounding, random: Expr) -> Expr:
    """Return R(f(operands)) of operands of which nothing leaves the range, and which are not all -0."""
    return _drawn(_EXACT[operator](*operands), rounding, random)


def is_operand(x: Expr) -> Expr:
    """Whether sums of products of numbers such as x never leave the range: x is zero, or from 2^-380 to 2^400."""
    return _within(x, _OPERANDS) | x.equals(0.0)


def _drawn(exact: _Exact, rounding: Rounding, random: Expr) -> Expr:
    kept = toward_zero(exact.nearest, exact.beyond(exact.nearest))
    power = from_bits(bits(kept) & (1 << 64) - (1 << 52))
    word = widen(drawn_word(random, rounding.mode)) << 20
    noise = from_bits(word | (_ONE | _ROBUST)) - from_bits(const("u64", _ONE))
    moved = fma(noise, power, exact.beyond(kept))
    total = kept + moved
    return toward_zero(total, moved - (total - kept))


def _in_range(x: Expr) -> Expr:
    return _within(x, _RANGE)


def _within(x: Expr, bounds: tuple[float, float]) -> Expr:
    least, past = map(_CARRIER.ordinal, bounds)
    return bits(absolute(x)) - least < const("u64", past - least)
