"""Integers and fixed point as formats: multiples of one number, with both signs."""

from __future__ import annotations

import re

from fxround.errors import shown
from fxround.numerics.formats import Format


def integers(bits: int) -> Format:
    """Return the integers -(2^(bits-1) - 1) to 2^(bits-1) - 1 as a format. Raises ValueError but for 2 to 53 bits."""
    return fixed_point(bits, 0)


def fixed_point(bits: int, fraction: int) -> Format:
    """Return the multiples of 2^-fraction of at most bits - 1 binary digits, with both signs, as a format.

    Raises ValueError for fewer than 2 or more than 53 bits, and for a fraction beyond 1000.
    """
    if not 2 <= bits <= 53 or abs(fraction) > 1000:
        raise ValueError(f"fixed point of {bits} bits and 2^{-fraction}: expected 2 to 53 bits, 2^-1000 to 2^1000")
    magnitude = bits - 1
    largest = (2.0**magnitude - 1) * 2.0**-fraction
    return Format.custom(precision=magnitude, emin=magnitude - 1 - fraction, maximum=largest, inf=False, nan=False)


def element_of(text: str, how: str) -> Format:
    """Return the format of the elements of a scaled format: any, int2 to int16, or for ``affine`` uint2 to uint16.

    Raises ValueError for other texts.
    """
    whole = re.fullmatch(r"(u?)int([0-9]{1,2})", text.strip())
    if whole is None:
        return Format.parse(text)
    unsigned, bits = bool(whole[1]), int(whole[2])
    if not 2 <= bits <= 16 or unsigned != (how == "affine"):
        raise ValueError(
            f"elements {shown(text)} with a scale made by {shown(how)}: expected int2 to int16, or uint2 to uint16 "
            "with affine"
        )
    # An unsigned integer has no sign's bit.
    return integers(bits + 1 if unsigned else bits)
