"""Values whose bits flip, in the scalar IR: the code of a value, xor a mask, and the value of the code.

``exact_faults`` is the specification; it shares the layout of codes (``encodings``) with this file.
"""

from __future__ import annotations

import math
from typing import Final

from fxround.numerics.arithmetic.posits import code_of_posit, posit_of_code
from fxround.numerics.arithmetic.scalar import WIDTH, Expr, bits, const, from_bits, maximum, minimum, rarely, select
from fxround.numerics.arithmetic.tables import position_of, value_at
from fxround.numerics.faults import Faults, words_per_bit
from fxround.numerics.formats import Format
from fxround.numerics.formats.carriers import CARRIERS, Carrier, ordinal_of
from fxround.numerics.formats.encodings import Encoding, Integers

# A bijection of 32 bits: MurmurHash3's finalizer (Austin Appleby), in which each bit changes half of the bits.
_MIXING: Final = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))
_WEYL: Final = 0x9E3779B9


def flipped(x: Expr, encoding: Encoding, numbers: tuple[int, int, int], random: Expr) -> Expr:
    """Return x, a value of the encoding's format or a NaN, with a bit flipped where the random word (u32) says so.

    numbers: the lowest bit of the field, its number of bits, and q. A NaN stays. Raises ValueError for a format that
    the carrier does not hold, or a field that it does not have.
    """
    carrier, fmt = CARRIERS[x.type], encoding.format
    carrier.require(fmt)
    first, count, q = numbers
    fits = 0 < count <= encoding.field("any")[1] - first
    if not fits or (fmt.is_grid and fmt.zero and fmt.emin < carrier.format.emin):
        raise ValueError(f"flip_{first}_{count}_{q}: the encoding of {fmt.said} in a {carrier.format} has no such bits")
    flips = random < q * count if q * count < 1 << 32 else const("bool", 1)
    mask = const("u32" if fmt.values else carrier.code, 0)
    for i in reversed(range(count)):
        mask = select((random - i * q) < q if count > 1 else flips, 1 << (first + i), mask)
    moved = _moved(x, encoding, carrier, mask)
    is_nan = const(carrier.code, carrier.infinity) < ordinal_of(bits(x), carrier)
    return rarely(flips, select(is_nan, x, moved), x)


def _moved(x: Expr, encoding: Encoding, carrier: Carrier, mask: Expr) -> Expr:
    """Return the value whose code is that of x, which is no NaN, xor the mask."""
    fmt, integers = encoding.format, encoding.integers
    if fmt.values:
        return value_at(position_of(x, fmt.values) ^ mask, fmt.values, x)
    if fmt.posit is not None:
        return posit_of_code(code_of_posit(x, fmt.posit) ^ mask, fmt.posit, carrier)
    ordinal = ordinal_of(bits(x), carrier)
    negative = ~(bits(x) ^ ordinal).equals(0)
    if integers is not None:
        return from_bits(_of_integers(ordinal, negative, mask, integers, fmt.quantum_exponent, carrier))
    return from_bits(_of_number(ordinal, negative, mask, encoding, carrier))


def _of_number(ordinal: Expr, negative: Expr, mask: Expr, encoding: Encoding, carrier: Carrier) -> Expr:
    """Return the encoding of a floating-point number after the mask."""
    fmt, width = encoding.format, encoding.magnitude
    code = _code(ordinal, encoding, carrier) ^ (mask & ((1 << width) - 1))
    sign = select(negative, 1, const(carrier.code, 0)) ^ (mask >> width)
    beyond = const(carrier.code, encoding.last) < code
    value = select(beyond, _special(code, encoding, carrier), _ordinal(code, encoding, carrier))
    if not fmt.minus_zero:
        # The code of minus zero is the NaN.
        value = select(value.equals(0) & sign.equals(1), carrier.nan if fmt.nan else 0, value)
        sign = select(value.equals(0), 0, sign)
    is_nan = const(carrier.code, carrier.infinity) < value
    return select(is_nan, carrier.nan, value | (sign << (WIDTH[carrier.code] - 1)))


def _of_integers(
    ordinal: Expr, negative: Expr, mask: Expr, integers: Integers, exponent: int, carrier: Carrier
) -> Expr:
    """Return the encoding of a multiple of 2^exponent after the mask. The result can be any that has a code."""
    largest, offset = integers.largest, -integers.least
    digits = largest.bit_length() - (largest & (largest - 1) == 0)
    grid = Encoding(
        Format.custom(
            precision=max(digits, 1),
            emin=max(digits, 1) - 1 + exponent,
            maximum=math.ldexp(largest, exponent),
            inf=False,
            nan=False,
        )
    )
    number = _code(ordinal, grid, carrier)
    code = select(negative, const(carrier.code, offset) - number, number + offset) & ((1 << integers.bits) - 1)
    code = code ^ mask
    below = code < offset if offset else const("bool", 0)
    value = _ordinal(select(below, const(carrier.code, offset) - code, code - offset), grid, carrier)
    return select(below, value | (1 << (WIDTH[carrier.code] - 1)), value)


def _is_shifted(encoding: Encoding, carrier: Carrier) -> bool:
    """Whether the codes of the format are those of the carrier without the lowest bits."""
    return encoding.format.emin == carrier.format.emin


def _offset(encoding: Encoding, carrier: Carrier) -> int:
    """The code of 2^emin in the carrier without the lowest bits, less its code in the format."""
    return (encoding.format.emin + carrier.bias - encoding.format.zero) << encoding.trailing


def _code(ordinal: Expr, encoding: Encoding, carrier: Carrier) -> Expr:
    """Return the code of a magnitude; for a NaN any code."""
    fmt, drop = encoding.format, carrier.trailing - encoding.trailing
    least = carrier.ordinal(2.0**fmt.emin)
    if not fmt.zero:
        return (ordinal >> drop) - _offset(encoding, carrier)
    if _is_shifted(encoding, carrier):
        code = ordinal >> drop
    else:
        normal = (ordinal >> drop) - _offset(encoding, carrier)
        # 2^emin + x is exact for x below 2^emin, and has x's number in its trailing bits.
        moved = bits(from_bits(minimum(ordinal, least)) + 2.0**fmt.emin)
        small = (moved >> drop) - (_offset(encoding, carrier) + (1 << encoding.trailing))
        code = select(ordinal < least, small, normal)
    return select(ordinal.equals(carrier.infinity), encoding.last + 1, code)


def _ordinal(code: Expr, encoding: Encoding, carrier: Carrier) -> Expr:
    """Return the carrier's ordinal of a finite magnitude's code."""
    fmt, drop = encoding.format, carrier.trailing - encoding.trailing
    if not fmt.zero:
        # The carrier's code of the least value has other low bits if it is subnormal there.
        return maximum((code + _offset(encoding, carrier)) << drop, carrier.ordinal(2.0**fmt.emin))
    tiny = code < (1 << encoding.trailing)
    if _is_shifted(encoding, carrier):
        ordinal = code << drop
    else:
        shifted = select(tiny, code + (1 << encoding.trailing), code) + _offset(encoding, carrier)
        value = shifted << drop
        ordinal = select(tiny, bits(from_bits(value) - 2.0**fmt.emin), value)
    return ordinal if fmt.subnormals else select(tiny, 0, ordinal)


def _special(code: Expr, encoding: Encoding, carrier: Carrier) -> Expr:
    """Return the ordinal of a code after the maximum's."""
    fmt = encoding.format
    other = carrier.nan if fmt.nan else carrier.ordinal(fmt.maximum)
    return select(code.equals(encoding.last + 1), carrier.infinity if fmt.inf else other, const(carrier.code, other))


def word_of(random: Expr, number: int) -> Expr:
    """Return the random word (u32) of fault ``number`` of an accumulator's step, a bijection of the step's word.

    Roundings of the step read its word as it is, so that they draw what they draw without faults.
    """
    x = random ^ ((number + 1) * _WEYL % (1 << 32))
    for shift, factor in _MIXING:
        x = (x ^ (x >> shift)) * factor
    return x ^ (x >> 16)


def hit(x: Expr, fmt: Format, faults: Faults | None, random: Expr) -> Expr:
    """Return an accumulator of the format after the faults of a step with this random word (u32).

    Raises what ``words_per_bit``, ``Encoding`` and ``flipped`` raise.
    """
    for i, fault in enumerate(faults.faults if faults else ()):
        encoding = Encoding(fmt)
        first, count = encoding.field(fault.part)
        x = flipped(x, encoding, (first, count, words_per_bit(fault, count)), word_of(random, i))
    return x
