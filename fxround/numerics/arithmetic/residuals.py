"""The exact value of + - * / sqrt and fma as a binary64 value and the sign of what it lost.

For binary32 operands the residual takes one or two operations, because nothing over- or underflows. For binary64
operands the residual itself may: products and quotients are then judged with operands scaled to exponents around 0, and
sums with the larger operand first. The sign is therefore right for all finite operands and every format whose quantum
is 2^-950 or more; a residual below that is not zero and keeps its sign. ``product_below``, ``quotient_below`` and
``fused_below`` cost more, and are right for every format within binary64, whose least exponents may be binary64's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from fxround.numerics.arithmetic.scalar import (
    Expr,
    absolute,
    bits,
    const,
    fma,
    from_bits,
    maximum,
    minimum,
    negate,
    select,
    sqrt,
)

_SIGN: Final = 1 << 63
_FRACTION: Final = (1 << 52) - 1
_BIAS: Final = 1023
_FIELDS: Final = 2047
# Beyond this difference of exponents the smaller addend of a product of two significands matters by its sign only.
_APART: Final = 200
# Results below 2^-900 are judged 2^600 times larger: the last bit of a product that does not round to zero is at least
# 2^-1180.
_SMALL: Final = 2.0**-900
_RAISED: Final = 2.0**600
# Added to sums of exponents that may be negative, so that they stay above zero.
_OFFSET: Final = 8192


@dataclass(frozen=True)
class Wide:
    """A binary64 value and the sign of what it lost: the exact value minus ``value`` has the sign of ``error``.

    ``error`` None: nothing was lost, or (elementary functions) a stated bound holds. ``size``: what was lost, to a few
    ulps of it; None if ``error`` itself is that. ``odd``: the exact value rounded to odd in binary64, where ``error``
    does not determine it.
    """

    value: Expr
    error: Expr | None = None
    size: Expr | None = None
    odd: Expr | None = None


def to_odd(wide: Wide) -> Expr:
    """Return the exact value rounded to odd in binary64: an inexact result has an odd significand."""
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
    """Return a + b = value + error, unless it overflows.

    Source: Knuth, The Art of Computer Programming 2, 4.2.2, theorem B.
    """
    total = a + b
    part = total - a
    return Wide(total, (a - (total - part)) + (b - part))


def exact_sum(a: Expr, b: Expr) -> Wide:
    """Return a + b. An infinite sum of finite operands has lost something of the other sign."""
    plain = two_sum(a, b)
    if are_binary32(a, b):
        return plain
    return _ordered(a, b, plain)


def exact_difference(a: Expr, b: Expr) -> Wide:
    """Return a - b, with the same rule for overflow as ``exact_sum``."""
    plain = two_sum(a, negate(b))
    return plain if are_binary32(a, b) else _ordered(a, negate(b), plain)


def _ordered(a: Expr, b: Expr, plain: Wide) -> Wide:
    """Subtract the larger operand first (Dekker 1971): total - large is exact, and infinite where total overflowed."""
    swapped = absolute(a) < absolute(b)
    large, small = select(swapped, b, a), select(swapped, a, b)
    return Wide(plain.value, small - (plain.value - large), size=plain.error)


def exact_product(a: Expr, b: Expr) -> Wide:
    """Return a * b. A zero product of nonzero operands has lost something of its own sign."""
    value = a * b
    if are_binary32(a, b):
        # 24 + 24 bits fit 53, and exponents of binary32 products stay far inside binary64's: the product is exact.
        return Wide(value)
    lost = fma(a, b, negate(value))
    gone = value.equals(0.0) & ~a.equals(0.0) & ~b.equals(0.0)
    return Wide(value, select(gone, from_bits(bits(value) | 1), lost), size=lost)


def product_below(a: Expr, b: Expr) -> Wide:
    """Return a * b for a format of any exponents.

    If the value is below 2^-900, the smaller operand is below 2^-450, so that it can be raised. Multiples of the last
    bits of a and b, which are 2^-1180 or more unless the value is zero, are then normal numbers.
    """
    plain = exact_product(a, b)
    if are_binary32(a, b):
        return plain
    assert plain.error is not None
    swapped = absolute(a) < absolute(b)
    large, small = select(swapped, b, a), select(swapped, a, b)
    raised = fma(large, small * _RAISED, negate(plain.value * _RAISED))
    low = (absolute(plain.value) < _SMALL) & ~plain.value.equals(0.0)
    return Wide(plain.value, select(low, raised, plain.error), size=plain.size)


def quotient_below(a: Expr, b: Expr) -> Wide:
    """Return a / b for a format of any exponents.

    If the value is subnormal or zero, |a| is at most 4 and b at least 2^-53, unless a is zero: a and the value can be
    raised, and the remainder is a multiple of 2^-1180 before it is.
    """
    plain = exact_quotient(a, b)
    if are_binary32(a, b):
        return plain
    assert plain.error is not None
    raised = fma(negate(plain.value * _RAISED), b, a * _RAISED)
    low = absolute(plain.value) < 2.0**-1022
    return Wide(plain.value, select(low, from_bits(bits(raised) ^ (bits(b) & _SIGN)), plain.error), plain.size)


def exact_quotient(a: Expr, b: Expr) -> Wide:
    """Return a / b. Where the quotient is normal, the sign comes from the division of the scaled significands."""
    value = a / b
    remainder = fma(negate(value), b, a)
    size = remainder / b
    if not are_binary32(a, b):
        m, n = _significand(a).value, _significand(b).value
        ratio = m / n
        # Zero, subnormal, infinite and NaN quotients: their field is 0 or 2047, and the comparison is false.
        normal = ((bits(value) >> 52) & _FIELDS) - 1 < const("u64", _FIELDS - 1)
        scaled = fma(negate(ratio), n, m)
        remainder, size = select(normal, scaled, remainder), select(normal, (scaled / n) * (value / ratio), size)
    return Wide(value, from_bits(bits(remainder) ^ (bits(b) & _SIGN)), size)


def exact_reciprocal(x: Expr) -> Wide:
    """Return 1 / x. Its remainder never underflows."""
    value = const("f64", 1.0) / x
    remainder = fma(negate(value), x, 1.0)
    return Wide(value, from_bits(bits(remainder) ^ (bits(x) & _SIGN)), remainder / x)


def exact_root(x: Expr) -> Wide:
    """Return sqrt(x). A small x is scaled by an even power of 2, by whose root the result scales exactly."""
    value = sqrt(x)
    remainder = fma(negate(value), value, x)
    size = remainder / (value + value)
    if not are_binary32(x):
        small = x < 2.0**-600
        root, square = select(small, value * 2.0**200, value), select(small, x * 2.0**400, x)
        remainder = fma(negate(root), root, square)
    return Wide(value, remainder, size)


def exact_fused(a: Expr, b: Expr, c: Expr) -> Wide:
    """Return a * b + c."""
    if are_binary32(a, b):
        return fused_inside(a, b, c)
    plain = _fused(a, b, c)
    return Wide(plain.value, plain.error, odd=_fused_to_odd(a, b, c, plain.value))


def fused_below(a: Expr, b: Expr, c: Expr) -> Wide:
    """Return a * b + c for a format of any exponents."""
    if are_binary32(a, b):
        return fused_inside(a, b, c)
    plain = _fused(a, b, c)
    return Wide(plain.value, plain.error, odd=_fused_to_odd(a, b, c, plain.value, below=True))


def fused_beyond(a: Expr, b: Expr, c: Expr) -> Wide:
    """Return a * b + c with the sign of its error for all operands, for a format of any exponents."""
    if are_binary32(a, b):
        return fused_inside(a, b, c)
    plain = _fused(a, b, c)
    return Wide(plain.value, _fused_error(a, b, c, plain.value), size=plain.error)


def fused_inside(a: Expr, b: Expr, c: Expr) -> Wide:
    """Return a * b + c for a product that is exact in binary64 and a sum that cannot overflow."""
    return two_sum(a * b, c)


def _fused(a: Expr, b: Expr, c: Expr) -> Wide:
    """Return a * b + c, provided that nothing over- or underflows.

    The sum of the two small parts is rounded to odd and so keeps the sign of everything below the large part. The large
    part and the nearest value differ by a few ulps, hence exactly.
    """
    product = a * b
    value, total = fma(a, b, c), two_sum(product, c)
    assert total.error is not None
    return Wide(value, (total.value - value) + to_odd(two_sum(total.error, fma(a, b, negate(product)))))


class _Parts(NamedTuple):
    """A number as value * 2^(field - 1023 - 64), 1 <= |value| < 2.

    field: the encoding's exponent field plus 64 (u64), so that it is positive for subnormal numbers too. The parts of
    zeros and non-finite numbers mean nothing.
    """

    value: Expr
    field: Expr


def _significand(x: Expr) -> _Parts:
    small = absolute(x) < 2.0**-1022
    code = bits(select(small, x * 2.0**64, x))
    field = (code >> 52) & _FIELDS
    return _Parts(from_bits((code & (_SIGN | _FRACTION)) | (_BIAS << 52)), select(small, field, field + 64))


class _Scaled(NamedTuple):
    """a * b + c as ``sum`` times a power of 2.

    ``moved``: the field of the result's exponent plus 8192, u64. ``plain``: where the product is zero, the sum is
    exactly zero, or an operand is not finite, so that the hardware's result is the exact one.
    """

    sum: Wide
    moved: Expr
    plain: Expr


def _scaled_sum(a: Expr, b: Expr, c: Expr) -> _Scaled:
    """Return a * b + c with operands near 1.

    With a and b scaled to [1, 2), their product is in [1, 4) and a multiple of 2^-104. c is scaled along, but to at
    most 2^200 times smaller or larger: beyond that the smaller addend is far below the last bit of the larger one, and
    any number of its sign has the same effect.
    """
    (m, i), (n, j), (k, field) = _significand(a), _significand(b), _significand(c)
    # The field of c minus that of the product, and the power of 2 of their sum, both with an offset.
    apart = (field + (_OFFSET + _BIAS + 64)) - (i + j)
    near = minimum(maximum(apart, _OFFSET - _APART), _OFFSET + _APART)
    without = c.equals(0.0)
    addend = from_bits(bits(k) + ((near - _OFFSET) << 52))
    total = _fused(m, n, select(without, c, addend))
    scale = select(without | (apart <= near), i + j, (field + (_BIAS + 64)) - _APART)
    # The result's own field, with an offset: scale exceeds the exponent by 2 * (1023 + 64), of which the sum's field
    # contributes the 1023 that a field has.
    odd = to_odd(total)
    moved = ((bits(odd) >> 52) & _FIELDS) + scale + (_OFFSET - 2 * (_BIAS + 64))
    plain = a.equals(0.0) | b.equals(0.0) | odd.equals(0.0) | ~(_finite(a) & _finite(b) & _finite(c))
    return _Scaled(total, moved, plain)


def _fused_to_odd(a: Expr, b: Expr, c: Expr, nearest: Expr, below: bool = False) -> Expr:
    """Return a * b + c rounded to odd in binary64.

    A value below 2^-1022 is rounded to odd among the subnormal numbers if ``below``. Otherwise it is not rounded, but
    keeps its sign and is not zero. Then the power of 2 is put back, within binary64's exponents.
    """
    scaled = _scaled_sum(a, b, c)
    code, moved = bits(to_odd(scaled.sum)), scaled.moved
    inside = (code & (_SIGN | _FRACTION)) | ((moved - _OFFSET) & _FIELDS) << 52
    largest = (_FIELDS << 52) - 1
    large = (code & _SIGN) | largest
    least = _subnormal_to_odd(code, moved) if below else (code & _SIGN) | 1
    result = select(moved <= _OFFSET, least, select(moved >= _OFFSET + _FIELDS, large, inside))
    return select(scaled.plain, nearest, from_bits(result))


def _fused_error(a: Expr, b: Expr, c: Expr, nearest: Expr) -> Expr:
    """Return a number with the sign of a * b + c minus the nearest binary64 number.

    Where that number is normal, the sum near 1 is rounded as it is, and loses a number of the same sign. Below, its
    significand, rounded to odd, is compared with the nearest number. An infinite one is beyond.
    """
    scaled = _scaled_sum(a, b, c)
    assert scaled.sum.error is not None
    code, magnitude = bits(to_odd(scaled.sum)), bits(absolute(nearest))
    shift = minimum(select(scaled.moved <= _OFFSET, _OFFSET + 1 - scaled.moved, const("u64", 0)), const("u64", 54))
    exact, rounded = (code & _FRACTION) | (1 << 52), magnitude << shift
    sign = code & _SIGN
    outward, inward = from_bits(sign | 1), from_bits((sign ^ _SIGN) | 1)
    low = select(exact.equals(rounded), 0.0, select(rounded < exact, outward, inward))
    error = select(scaled.moved <= _OFFSET, low, scaled.sum.error)
    return select(scaled.plain, 0.0, select(magnitude.equals(_FIELDS << 52), inward, error))


def _subnormal_to_odd(code: Expr, moved: Expr) -> Expr:
    """Return the encoding of a number rounded to odd; its exponent's field would be ``moved`` - 8192, zero or less."""
    shift = minimum(select(moved <= _OFFSET, _OFFSET + 1 - moved, const("u64", 0)), const("u64", 54))
    significand = (code & _FRACTION) | (1 << 52)
    kept = significand >> shift
    lost = ~(kept << shift).equals(significand)
    return (code & _SIGN) | select(lost, kept | 1, kept)


def _finite(x: Expr) -> Expr:
    return (bits(x) & (_FIELDS << 52)) < const("u64", _FIELDS << 52)
