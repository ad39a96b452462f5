"""Soft errors: bits of values that flip by chance, in the encoding of the value's own format.

A fault has a field of the encoding and a probability p. With this probability one bit of the field flips, and every bit
of the field is as likely as any other. The encoding is the usual one: a sign, the exponent, the trailing significand;
the code without its sign is the number of the magnitude, counted from zero. So e4m3fn has 8 bits, binary32 32. A code
after the maximum's is infinity's if the format has it, and else a NaN, or the maximum in a format without NaNs.
Integers and fixed point, which have neither infinity nor NaN, are in two's complement; the bits below their sign are
the field ``significand``.

The random word r of an element (``randomness``) decides both: bit i of the n bits of the field flips if r div q = i,
with q = round(2^32 p / n). The probability is therefore n q / 2^32, and nothing else of the run matters: not the
threads, the instruction set, or the order. ``exact_faults`` is the specification.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from fxround.errors import shown
from fxround.numerics.carriers import CARRIERS, Carrier
from fxround.numerics.formats import Format
from fxround.numerics.scalar import WIDTH, Expr, bits, const, from_bits, minimum, rarely, select

# A bijection of 32 bits: MurmurHash3's finalizer (Austin Appleby), in which each bit changes half of the bits.
_MIXING: Final = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))
_WEYL: Final = 0x9E3779B9

# The parts of an encoding; "any" is all of it.
FIELDS: Final = ("significand", "exponent", "sign", "any")
_OPERATOR: Final = re.compile(r"flip_([0-9]{1,2})_([0-9]{1,2})_([0-9]{1,10})")
_WORDS: Final = 1 << 32


@dataclass(frozen=True)
class Fault:
    """With this probability, from 0 to 1, one bit of the field flips. Raises ValueError for anything else."""

    field: str
    probability: float

    def __post_init__(self) -> None:
        if self.field not in FIELDS:
            raise ValueError(f"no field is named {shown(self.field)}; expected {', '.join(FIELDS)}")
        if not 0 <= self.probability <= 1:
            raise ValueError(f"{self.field}: the probability is {self.probability}; expected 0 to 1")

    def __str__(self) -> str:
        return f"{self.field}:{self.probability!r}"


@dataclass(frozen=True)
class Faults:
    """The faults of a value, which happen one after the other. ``Faults.parse(str(f)) == f``.

    Example::

        Faults.parse("significand:1e-6 sign:1e-9")
    """

    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        return " ".join(map(str, self.faults))

    @property
    def possible(self) -> Faults | None:
        """The faults of a probability above zero; None if there are none."""
        found = tuple(fault for fault in self.faults if fault.probability)
        return Faults(found) if found else None

    @staticmethod
    def parse(text: Any) -> Faults:
        """Parse ``field:probability``, several separated by spaces, each field once. Raises ValueError."""
        if isinstance(text, Faults):
            return text
        words = text.split() if isinstance(text, str) else []
        found = []
        for word in words:
            field, colon, number = word.partition(":")
            try:
                found.append(Fault(field, float(number) if colon else math.nan))
            except ValueError as error:
                if field in FIELDS and not _is_number(number):
                    raise ValueError(f"{shown(number)} is no probability; expected {field}:1e-6") from None
                raise error
        if not found or len({fault.field for fault in found}) < len(found):
            raise ValueError(f"{shown(text)}: expected faults like 'significand:1e-6 sign:1e-9', each field once")
        return Faults(tuple(found))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Encoding:
    """The layout of a format's codes: from the highest bit a sign, an exponent, and a trailing significand.

    Raises ValueError for a format without zero, and for a table or a posit.
    """

    format: Format

    def __post_init__(self) -> None:
        if not self.format.is_grid:
            raise ValueError(f"{self.format.said} is a table or a posit, which has no fields whose bits could flip")
        if not self.format.zero:
            raise ValueError(f"{self.format} has no zero: the faults of scales are not defined")

    @property
    def is_integer(self) -> bool:
        """Whether the values are multiples of one number, without infinity and NaN: two's complement."""
        fmt = self.format
        plain = fmt.signed and not (fmt.inf or fmt.nan)
        return plain and self.last == 2**fmt.precision - 1 and fmt.subnormals

    @property
    def trailing(self) -> int:
        """The number of bits of the trailing significand."""
        return self.format.precision - 1

    @property
    def last(self) -> int:
        """The code of the maximum: its number among the magnitudes of the format with subnormals."""
        fmt = self.format
        exponent = max(fmt.emax, fmt.emin)
        significand = int(math.ldexp(fmt.maximum, self.trailing - exponent))
        return ((exponent - fmt.emin) << self.trailing) + significand

    @property
    def magnitude(self) -> int:
        """The number of bits without the sign."""
        fmt = self.format
        # The only NaN of a format without minus zero has the code of minus zero.
        return (self.last + fmt.inf + (fmt.nan and (fmt.minus_zero or not fmt.signed))).bit_length()

    def field(self, name: str) -> tuple[int, int]:
        """Return the lowest bit of a field and its number of bits; ValueError if the format lacks the field."""
        width, signed = self.magnitude, int(self.format.signed)
        rows = {
            "significand": (0, self.trailing),
            "exponent": (self.trailing, width - self.trailing),
            "sign": (width, signed),
            "any": (0, width + signed),
        }
        if self.is_integer:
            rows |= {"significand": (0, width), "exponent": (0, 0)}
        first, count = rows[name]
        if count < 1:
            said = "; integers and fixed point have significand, sign and any" if self.is_integer else ""
            raise ValueError(f"{self.format} has no bits of the {name}{said}")
        return first, count


def share(fault: Fault, count: int) -> int:
    """Return q, the number of random words for which one bit of a field of ``count`` bits flips.

    Raises ValueError for a probability that is not zero and smaller than half of count / 2^32.
    """
    q = round(Fraction(fault.probability) * _WORDS / count)
    if q == 0 and fault.probability > 0:
        raise ValueError(
            f"{fault}: a field of {count} bits can flip with probability {count * 2.0**-32:.3g}, the smallest, or 0"
        )
    return q


def operator_of(fault: Fault, fmt: Format) -> str:
    """Return the operator ``flip_first_count_q`` of a program; raises what ``share`` and ``Encoding`` raise."""
    first, count = Encoding(fmt).field(fault.field)
    return f"flip_{first}_{count}_{share(fault, count)}"


def numbers_of(name: str) -> tuple[int, int, int] | None:
    """Return the lowest bit, the number of bits and q of an operator; None for an operator that is no fault."""
    found = _OPERATOR.fullmatch(name)
    return None if found is None else (int(found[1]), int(found[2]), int(found[3]))


def word_of(random: Expr, number: int) -> Expr:
    """Return the random word (u32) of fault ``number`` of an accumulator's step, a bijection of the step's word.

    Roundings of the step read its word as it is, so that they draw what they draw without faults.
    """
    x = random ^ ((number + 1) * _WEYL % _WORDS)
    for shift, factor in _MIXING:
        x = (x ^ (x >> shift)) * factor
    return x ^ (x >> 16)


def hit(x: Expr, fmt: Format, faults: Faults | None, random: Expr) -> Expr:
    """Return an accumulator of the format after the faults of a step with this random word (u32).

    Raises what ``operator_of`` and ``flipped`` raise.
    """
    for i, fault in enumerate(faults.faults if faults else ()):
        first, count = Encoding(fmt).field(fault.field)
        x = flipped(x, fmt, (first, count, share(fault, count)), word_of(random, i))
    return x


def flipped(x: Expr, fmt: Format, numbers: tuple[int, int, int], random: Expr) -> Expr:
    """Return x, a value of the format or a NaN, with a bit flipped where the random word (u32) says so.

    A NaN stays. Raises ValueError for a format that the carrier does not hold, or a field that it does not have.
    """
    carrier, encoding = CARRIERS[x.type], Encoding(fmt)
    carrier.require(fmt)
    first, count, q = numbers
    if not 0 < count <= encoding.magnitude + fmt.signed - first or fmt.emin < carrier.format.emin:
        raise ValueError(f"flip_{first}_{count}_{q}: the encoding of {fmt} in a {carrier.format} has no such bits")
    hit = random < q * count if q * count < _WORDS else const("bool", 1)
    mask = const(carrier.code, 0)
    for i in reversed(range(count)):
        mask = select((random - i * q) < q if count > 1 else hit, 1 << (first + i), mask)
    return rarely(hit, _with_mask(x, encoding, carrier, mask), x)


def _with_mask(x: Expr, encoding: Encoding, carrier: Carrier, mask: Expr) -> Expr:
    """Return the value whose code is that of x, xor the mask."""
    fmt, width = encoding.format, encoding.magnitude
    whole = bits(x)
    ordinal = whole & ((1 << (WIDTH[carrier.code] - 1)) - 1)
    negative = ~(whole ^ ordinal).equals(0)
    if encoding.is_integer:
        moved = _of_integer(_code(ordinal, encoding, carrier), negative, mask, encoding, carrier)
        return select(const(carrier.code, carrier.infinity) < ordinal, x, from_bits(moved))
    code = _code(ordinal, encoding, carrier) ^ (mask & ((1 << width) - 1))
    sign = select(negative, 1, const(carrier.code, 0)) ^ (mask >> width)
    beyond = const(carrier.code, encoding.last) < code
    value = select(beyond, _special(code, encoding, carrier), _ordinal(code, encoding, carrier))
    if not fmt.minus_zero:
        # The code of minus zero is the NaN.
        value = select(value.equals(0) & sign.equals(1), carrier.nan if fmt.nan else 0, value)
        sign = select(value.equals(0), 0, sign)
    is_nan = const(carrier.code, carrier.infinity) < value
    result = select(is_nan, carrier.nan, value | (sign << (WIDTH[carrier.code] - 1)))
    return select(const(carrier.code, carrier.infinity) < ordinal, x, from_bits(result))


def _of_integer(number: Expr, negative: Expr, mask: Expr, encoding: Encoding, carrier: Carrier) -> Expr:
    """Return the encoding of the integer whose code in two's complement is that of another one, xor the mask.

    number: the magnitude of the other one. The result can be -2^n, which is no value of the symmetric format.
    """
    width = encoding.magnitude
    count, half = 1 << (width + 1), 1 << width
    code = (select(negative, const(carrier.code, count) - number, number) & (count - 1)) ^ mask
    below = ~(code & half).equals(0)
    value = _ordinal(select(below, const(carrier.code, count) - code, code), encoding, carrier)
    return select(below, value | (1 << (WIDTH[carrier.code] - 1)), value)


def _is_shifted(encoding: Encoding, carrier: Carrier) -> bool:
    """Whether the codes of the format are those of the carrier without the lowest bits."""
    return encoding.format.emin == carrier.format.emin


def _offset(encoding: Encoding, carrier: Carrier) -> int:
    """The code of 2^emin in the carrier without the lowest bits, less its code in the format."""
    return (encoding.format.emin + carrier.bias - 1) << encoding.trailing


def _code(ordinal: Expr, encoding: Encoding, carrier: Carrier) -> Expr:
    """Return the code of a magnitude; for a NaN any code."""
    fmt, drop = encoding.format, carrier.trailing - encoding.trailing
    least = carrier.ordinal(2.0**fmt.emin)
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
