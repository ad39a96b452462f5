"""The exact value of + - * / sqrt and fma: a binary64 value, and the sign of what it lost.

A residual of binary32 operands is one or two operations, for nothing over- or underflows there. Over binary64 operands
the residual itself may: products and quotients are then judged by operands brought to exponents around 0, sums by the
larger operand first. So the sign is right for all finite operands, as far as a format whose quantum is 2^-950 or more
can tell; what is less than that is not zero, and has its sign.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from fxround.numerics.scalar import Expr, absolute, bits, const, fma, from_bits, maximum, minimum, negate, select, sqrt

_SIGN: Final = 1 << 63
_FRACTION: Final = (1 << 52) - 1
_BIAS: Final = 1023
_FIELDS: Final = 2047
# Beyond this difference of exponents the smaller addend of a product of two significands is a sign and no more.
_APART: Final = 200
# Keeps a sum of exponents that may be negative above zero.
_OFFSET: Final = 8192


@dataclass(frozen=True)
class Wide:
    """A binary64 value and the sign of what it lost: exact value = value + (something of error's sign).

    ``error`` None: nothing was lost, or (elementary functions) what was lost is bounded elsewhere.
    ``size``: what was lost, to a few ulps; None where ``error`` is that itself.
    ``odd``: the exact value rounded to odd in binary64, where ``error`` does not tell.
    """

    value: Expr
    error: Expr | None = None
    size: Expr | None = None
    odd: Expr | None = None


def to_odd(wide: Wide) -> Expr:
    """The exact value rounded to odd in binary64: inexact results end in a one."""
    if wide.odd is not None:
        return wide.odd
    if wide.error is None:
        return wide.value
    code = bits(wide.value)
    lost = (wide.error < 0.0) | (wide.error > 0.0)
    outward = (bits(wide.error) ^ code) < _SIGN
    moved = select(outward, code + 1, code - 1)
    return from_bits(select(lost & (code & 1).equals(0), moved, code))


def are_binary32(*args: Expr) -> bool:
    """Whether every operand is known to be a binary32 value, widened."""
    return all(a.op == "widen" for a in args)


def two_sum(a: Expr, b: Expr) -> Wide:
    """a + b = value + error, unless it overflows (Knuth, The Art of Computer Programming 2, 4.2.2, theorem B)."""
    total = a + b
    part = total - a
    return Wide(total, (a - (total - part)) + (b - part))


def exact_sum(a: Expr, b: Expr) -> Wide:
    """a + b; an infinite sum of finite operands has lost something of the other sign."""
    plain = two_sum(a, b)
    if are_binary32(a, b):
        return plain
    return _ordered(a, b, plain)


def exact_difference(a: Expr, b: Expr) -> Wide:
    """a - b, likewise."""
    plain = two_sum(a, negate(b))
    return plain if are_binary32(a, b) else _ordered(a, negate(b), plain)


def _ordered(a: Expr, b: Expr, plain: Wide) -> Wide:
    """The larger operand first (Dekker 1971): total - large is exact, and infinite where total overflowed."""
    swapped = absolute(a) < absolute(b)
    large, small = select(swapped, b, a), select(swapped, a, b)
    return Wide(plain.value, small - (plain.value - large), size=plain.error)


def exact_product(a: Expr, b: Expr) -> Wide:
    """a * b; of operands that are not zero, a product that is zero has lost something of its own sign."""
    value = a * b
    if are_binary32(a, b):
        # 24 + 24 bits fit 53, and exponents of binary32 products stay far inside binary64.
        return Wide(value)
    lost = fma(a, b, negate(value))
    gone = value.equals(0.0) & ~a.equals(0.0) & ~b.equals(0.0)
    return Wide(value, select(gone, from_bits(bits(value) | 1), lost), size=lost)


def exact_quotient(a: Expr, b: Expr) -> Wide:
    """a / b; where the quotient is a normal number, the sign is that of the significands' own division."""
    value = a / b
    remainder = fma(negate(value), b, a)
    size = remainder / b
    if not are_binary32(a, b):
        m, n = _significand(a).value, _significand(b).value
        ratio = m / n
        normal = ((bits(value) >> 52) & _FIELDS) - 1 < const("u64", _FIELDS - 1)
        remainder = select(normal, fma(negate(ratio), n, m), remainder)
    return Wide(value, from_bits(bits(remainder) ^ (bits(b) & _SIGN)), size)


def exact_reciprocal(x: Expr) -> Wide:
    """1 / x: its remainder underflows nowhere."""
    value = const("f64", 1.0) / x
    remainder = fma(negate(value), x, 1.0)
    return Wide(value, from_bits(bits(remainder) ^ (bits(x) & _SIGN)), remainder / x)


def exact_root(x: Expr) -> Wide:
    """sqrt(x); a small x is brought near 1 by an even power of 2, which its root follows exactly."""
    value = sqrt(x)
    remainder = fma(negate(value), value, x)
    size = remainder / (value + value)
    if not are_binary32(x):
        small = x < 2.0**-600
        root, square = select(small, value * 2.0**200, value), select(small, x * 2.0**400, x)
        remainder = fma(negate(root), root, square)
    return Wide(value, remainder, size)


def exact_fused(a: Expr, b: Expr, c: Expr) -> Wide:
    """a * b + c."""
    if are_binary32(a, b):
        return fused_inside(a, b, c)
    plain = _fused(a, b, c)
    return Wide(plain.value, plain.error, odd=_fused_to_odd(a, b, c, plain.value))


def fused_inside(a: Expr, b: Expr, c: Expr) -> Wide:
    """a * b + c of an exact product, where no sum can overflow."""
    return two_sum(a * b, c)


def _fused(a: Expr, b: Expr, c: Expr) -> Wide:
    """a * b + c, while nothing over- or underflows.

    The two small parts, rounded to odd, keep the sign of all that is below the large one; the large one and
    the nearest value differ by a few ulps, exactly.
    """
    product = a * b
    value, total = fma(a, b, c), two_sum(product, c)
    assert total.error is not None
    return Wide(value, (total.value - value) + to_odd(two_sum(total.error, fma(a, b, negate(product)))))


class _Parts(NamedTuple):
    """A number as value * 2^(field - 1023), 1 <= |value| < 2; of a zero and of what is not finite, anything.

    field: a u64 with 64 added to the encoding's, so that it is positive for subnormal numbers too."""

    value: Expr
    field: Expr


def _significand(x: Expr) -> _Parts:
    small = absolute(x) < 2.0**-1022
    code = bits(select(small, x * 2.0**64, x))
    field = (code >> 52) & _FIELDS
    return _Parts(from_bits((code & (_SIGN | _FRACTION)) | (_BIAS << 52)), select(small, field, field + 64))


def _fused_to_odd(a: Expr, b: Expr, c: Expr, nearest: Expr) -> Expr:
    """a * b + c rounded to odd in binary64; what is below 2^-1022 is not rounded, but keeps its sign and is not zero.

    With a and b brought to [1, 2) their product is in [1, 4), a multiple of 2^-104. c comes along, but never further
    than 2^200 times smaller or larger: there the smaller addend is far below the last bit of the larger, and any
    number of its sign does for it. Then the power of 2 is put back, within binary64's exponents.
    """
    (m, i), (n, j), (k, field) = _significand(a), _significand(b), _significand(c)
    # field of c less that of the product, and its power of 2, both with an offset.
    apart = (field + (_OFFSET + _BIAS + 64)) - (i + j)
    near = minimum(maximum(apart, _OFFSET - _APART), _OFFSET + _APART)
    without = c.equals(0.0)
    addend = from_bits(bits(k) + ((near - _OFFSET) << 52))
    sum_ = to_odd(_fused(m, n, select(without, c, addend)))
    scale = select(without | (apart <= near), i + j, (field + (_BIAS + 64)) - _APART)
    code = bits(sum_)
    # The result's own field, with an offset: scale has 2 * (1023 + 64) more than the exponent, of which the sum's
    # field brings the 1023 that a field has.
    moved = ((code >> 52) & _FIELDS) + scale + (_OFFSET - 2 * (_BIAS + 64))
    inside = (code & (_SIGN | _FRACTION)) | ((moved - _OFFSET) & _FIELDS) << 52
    largest = (_FIELDS << 52) - 1
    large = (code & _SIGN) | largest
    scaled = select(moved <= _OFFSET, (code & _SIGN) | 1, select(moved >= _OFFSET + _FIELDS, large, inside))
    # A product of zero leaves c; what is not finite, and an exact zero, are what the hardware says.
    plain = a.equals(0.0) | b.equals(0.0) | sum_.equals(0.0) | ~(_finite(a) & _finite(b) & _finite(c))
    return select(plain, nearest, from_bits(scaled))


def _finite(x: Expr) -> Expr:
    return (bits(x) & (_FIELDS << 52)) < const("u64", _FIELDS << 52)
