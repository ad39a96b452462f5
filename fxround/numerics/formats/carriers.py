"""Carriers: binary32 and binary64, the types that hold the values of all narrower formats.

The encoding of a float without its sign bit is its *ordinal*. Ordinals grow with the magnitude, by one from each float
to the next, and every ordinal above infinity's is a NaN. ``Carrier.require`` refuses a format whose values the carrier
does not hold exactly.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from fxround.numerics.arithmetic.scalar import WIDTH, Expr, Type, bits, const, from_bits, select
from fxround.numerics.formats import FORMATS, Format


@dataclass(frozen=True)
class Carrier:
    """The type that holds the values of narrower formats: its own format, and the layout of its encoding."""

    type: Type
    code: Type
    format: Format

    @property
    def trailing(self) -> int:
        """The number of bits of the trailing significand: precision - 1."""
        return self.format.precision - 1

    @property
    def bias(self) -> int:
        """The exponent's bias."""
        return 1 - self.format.emin

    @property
    def infinity(self) -> int:
        """The ordinal of infinity. Every larger ordinal is a NaN."""
        return ((1 << (WIDTH[self.code] - 1)) - 1) >> self.trailing << self.trailing

    @property
    def nan(self) -> int:
        """The encoding of the only NaN that fxround returns: quiet, positive, no payload."""
        return self.infinity | 1 << (self.trailing - 1)

    def ordinal(self, value: float) -> int:
        """Return the encoding of a non-negative value of the carrier."""
        return int.from_bytes(struct.pack("<f" if self.type == "f32" else "<d", value), "little")

    def require(self, fmt: Format) -> None:
        """Raise ValueError unless the carrier holds every value of ``fmt`` and can be rounded to it."""
        mine = self.format
        if fmt.precision > mine.precision:
            raise ValueError(
                f"{fmt.said} has precision {fmt.precision}, more than the {mine.precision} bits of the {mine} values "
                f"to be rounded; use a tensor of a wider dtype"
            )
        # One binade below emin the carrier's subnormals still form one grid; in lower binades their precision falls.
        lowest = mine.emin - 1 if fmt.precision == 1 or fmt.subnormals else mine.emin
        if fmt.emin < lowest or fmt.maximum > mine.maximum:
            raise ValueError(
                f"{fmt.said} has the range 2^{fmt.emin} to {fmt.maximum:g}, more than {mine} holds; "
                f"use a tensor of a wider dtype"
            )


CARRIERS: Final = MappingProxyType(
    {
        "f32": Carrier("f32", "u32", FORMATS["binary32"]),
        "f64": Carrier("f64", "u64", FORMATS["binary64"]),
    }
)


def ordinal_of(code: Expr, carrier: Carrier) -> Expr:
    """Return the encoding without its sign bit."""
    return code & ((1 << (WIDTH[carrier.code] - 1)) - 1)


def is_nan_code(code: Expr, carrier: Carrier) -> Expr:
    """Return bool: the encoding is a NaN.

    The test uses integers: an optimizer may treat all NaNs as equal and drop a float comparison.
    """
    return const(carrier.code, carrier.infinity) < ordinal_of(code, carrier)


def one_nan(x: Expr) -> Expr:
    """Return x with every NaN replaced by the carrier's one NaN: processors disagree on signs and payloads."""
    carrier = CARRIERS[x.type]
    return from_bits(select(is_nan_code(bits(x), carrier), carrier.nan, bits(x)))
