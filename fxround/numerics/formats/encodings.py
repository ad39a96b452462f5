"""The codes of a format's values, as memory holds them: which bits a value has, and what its fields are.

The code of a floating-point number has a sign, the exponent, the trailing significand; without its sign it is the
number of the magnitude, counted from zero. So e4m3fn has 8 bits, binary32 32. A code after the maximum's is infinity's
if the format has it, and else a NaN, or the maximum in a format without NaNs. Integers and fixed point are in two's
complement, or counted from their least value. The code of a table's value is its position, and posits have their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from fxround.numerics.formats import Format
from fxround.numerics.formats.fixed_point import integers
from fxround.numerics.formats.scaled import ScaledFormat

# The parts of an encoding; "any" is all of it.
FIELDS: Final = ("significand", "exponent", "sign", "any")


@dataclass(frozen=True)
class Integers:
    """Codes of multiples of one number: the code is the multiple less ``least``, in this number of bits.

    With least = -2^(bits - 1), a code differs from two's complement by its highest bit alone, so that a flipped bit is
    the same in both.
    """

    least: int
    bits: int

    @property
    def largest(self) -> int:
        """The largest magnitude that a code has."""
        return max(-self.least, self.least + (1 << self.bits) - 1)


@dataclass(frozen=True)
class Encoding:
    """The layout of a format's codes.

    span: the least and the largest value of fixed point and of integers with a zero point; None for all of the format.
    Raises ValueError for a format without zero whose values have more than one digit.
    """

    format: Format
    span: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        fmt = self.format
        if fmt.is_grid and not fmt.zero and fmt.precision > 1:
            raise ValueError(f"{fmt} has no zero and several digits: the codes of such a format are not defined")

    @staticmethod
    def of_elements(form: ScaledFormat) -> Encoding:
        """Return the encoding of the elements of a scaled format, which with a zero point are the stored integers."""
        if form.scaling is not None and form.scaling.how == "affine":
            return Encoding(integers(form.element.precision + 1), (0.0, form.element.maximum))
        return Encoding(form.element, form.span)

    @property
    def integers(self) -> Integers | None:
        """The codes of integers and fixed point, which have neither infinity nor NaN; None for other formats."""
        fmt = self.format
        plain = fmt.is_grid and fmt.signed and not (fmt.inf or fmt.nan) and fmt.subnormals
        if not plain or self.last > 1 << fmt.precision:
            return None
        span = self.span or fmt.span
        if span is None:
            return Integers(-(1 << fmt.precision), fmt.precision + 1) if self.last < 1 << fmt.precision else None
        least, most = (int(math.ldexp(v, -fmt.quantum_exponent)) for v in span)
        count = most - least + 1
        if count & (count - 1) == 0 and count > 1:
            return Integers(least, count.bit_length() - 1)
        digits = max(most.bit_length(), (-least - 1).bit_length() if least else 0, 1)
        return Integers(-(1 << digits), digits + 1) if least else Integers(0, digits)

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
        # Without a zero, the smallest value has the code 0.
        return ((exponent - fmt.emin) << self.trailing) + significand - (not fmt.zero)

    @property
    def magnitude(self) -> int:
        """The number of bits of a floating-point number without the sign."""
        fmt = self.format
        # The only NaN of a format without minus zero has the code of minus zero.
        return (self.last + fmt.inf + (fmt.nan and (fmt.minus_zero or not fmt.signed))).bit_length()

    @property
    def fields(self) -> dict[str, tuple[int, int]]:
        """The lowest bit of each field and its number of bits, which can be 0."""
        fmt, integers = self.format, self.integers
        if fmt.values:
            return {"any": (0, (len(fmt.values) - 1).bit_length())}
        if fmt.posit is not None:
            return {"sign": (fmt.posit[0] - 1, 1), "any": (0, fmt.posit[0])}
        if integers is not None:
            width = integers.bits
            signed = int(integers.least == -(1 << (width - 1)))
            return {"significand": (0, width - signed), "sign": (width - signed, signed), "any": (0, width)}
        width, signed = self.magnitude, int(fmt.signed)
        return {
            "significand": (0, self.trailing),
            "exponent": (self.trailing, width - self.trailing),
            "sign": (width, signed),
            "any": (0, width + signed),
        }

    def field(self, name: str) -> tuple[int, int]:
        """Return the lowest bit of a field and its number of bits; ValueError if the format lacks the field."""
        first, count = self.fields.get(name, (0, 0))
        if count < 1:
            raise ValueError(f"{self.format.said} has no bits of the {name}{self._said}")
        return first, count

    @property
    def _said(self) -> str:
        """What a message adds: the fields that there are, where the format has others than a floating-point number."""
        if self.format.values:
            return ": the code of a table's value is its position; write any:"
        if self.format.posit is not None:
            return ": the fields of a posit begin where its regime ends; write sign: or any:"
        if self.integers is not None:
            known = [name for name, (_, count) in self.fields.items() if count]
            return f": it consists of integers or fixed point, which have {', '.join(known)}"
        return ""
