"""The specification of soft errors: which code a value has, over integers and rational numbers, and what flips.

It shares the layout of an encoding (``encodings.Encoding``) with the kernels, and nothing else: the magnitudes of a
format are numbered in ascending order, from zero or from the least one.
"""

from __future__ import annotations

import math
from fractions import Fraction

from fxround.numerics.faults import Faults, words_per_bit
from fxround.numerics.formats import Format
from fxround.numerics.formats.encodings import Encoding
from fxround.numerics.formats.posit_codes import posit_value
from fxround.numerics.specification.exact import floor_log2


def code_of(value: float, fmt: Format | Encoding) -> int:
    """Return the code of a value of the format, which is no NaN, with the sign in the highest bit."""
    encoding = _encoding(fmt)
    fmt, integers = encoding.format, encoding.integers
    if fmt.values:
        return fmt.values.index(value)
    if fmt.posit is not None:
        return _posit_code(value, fmt.posit)
    if integers is not None:
        return int(_whole(Fraction(value) / Fraction(2) ** fmt.quantum_exponent, value, fmt)) - integers.least
    sign = int(math.copysign(1.0, value) < 0) << encoding.magnitude
    if math.isinf(value):
        return sign | (encoding.last + 1)
    magnitude = abs(Fraction(value))
    binade = max(floor_log2(magnitude), fmt.emin) if magnitude else fmt.emin
    number = magnitude / Fraction(2) ** (binade - fmt.precision + 1) + (binade - fmt.emin) * 2**encoding.trailing
    return sign | (int(_whole(number, value, fmt)) - (not fmt.zero))


def value_of(code: int, fmt: Format | Encoding) -> float:
    """Return the value of a code; every NaN is the one NaN."""
    encoding = _encoding(fmt)
    fmt, integers = encoding.format, encoding.integers
    if fmt.values:
        return fmt.values[min(code, len(fmt.values) - 1)]
    if fmt.posit is not None:
        return _posit_of(code, fmt.posit)
    if integers is not None:
        return float((code + integers.least) * Fraction(2) ** fmt.quantum_exponent)
    sign, number = divmod(code, 1 << encoding.magnitude)
    if number > encoding.last:
        other = math.nan if fmt.nan else fmt.maximum
        magnitude = math.inf if fmt.inf and number == encoding.last + 1 else other
    else:
        binade, rest = divmod(number + (not fmt.zero), 2**encoding.trailing)
        flushed = binade == 0 and not fmt.subnormals
        scale = Fraction(2) ** (fmt.emin - encoding.trailing + max(binade, 1) - 1)
        magnitude = 0.0 if flushed else float((rest + 2**encoding.trailing * (binade > 0)) * scale)
    if not fmt.minus_zero and magnitude == 0:
        return math.nan if sign and fmt.nan else 0.0
    return magnitude if math.isnan(magnitude) else math.copysign(magnitude, -1.0 if sign else 1.0)


def _encoding(fmt: Format | Encoding) -> Encoding:
    return Encoding(fmt) if isinstance(fmt, Format) else fmt


def _whole(number: Fraction, value: float, fmt: Format) -> Fraction:
    """Return the number. Raises ValueError if it is no integer."""
    if number.denominator != 1:
        raise ValueError(f"{value} is no value of {fmt}")
    return number


def _posit_code(value: float, posit: tuple[int, int]) -> int:
    """Return the code of a posit, by bisection: values ascend with the codes of positive ones."""
    low, high = 0, 1 << (posit[0] - 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if posit_value(middle, *posit) <= abs(value) else (low, middle)
    if low and posit_value(low, *posit) != abs(value):
        raise ValueError(f"{value} is no value of posit{posit}")
    return -low % (1 << posit[0]) if value < 0 else low


def _posit_of(code: int, posit: tuple[int, int]) -> float:
    top = 1 << (posit[0] - 1)
    if code in (0, top):
        return math.nan if code else 0.0
    return -posit_value(2 * top - code, *posit) if code > top else posit_value(code, *posit)


def flip(value: float, fmt: Format | Encoding, numbers: tuple[int, int, int], random: int) -> float:
    """Return a value of the format after a fault.

    numbers: the lowest bit of the field, its number of bits, and q. random: 32 random bits.
    """
    first, count, q = numbers
    if math.isnan(value) or q == 0 or random // q >= count:
        return value
    return value_of(code_of(value, fmt) ^ (1 << (first + random // q)), fmt)


def word(random: int, number: int) -> int:
    """Return the random word of fault ``number`` of a step with this word: MurmurHash3's finalizer, all in 32 bits."""
    x = random ^ ((number + 1) * 0x9E3779B9 & 0xFFFFFFFF)
    x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ x >> 16


def flip_step(value: float, fmt: Format, faults: Faults, random: int) -> float:
    """Return an accumulator of the format after the faults of a step with this random word."""
    for number, fault in enumerate(faults.faults):
        first, count = Encoding(fmt).field(fault.part)
        value = flip(value, fmt, (first, count, words_per_bit(fault, count)), word(random, number))
    return value
