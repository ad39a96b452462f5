"""Rounding to nearest even in the carrier alone, by one addition, for formats with fewer exponents than it.

The carrier is binary32 or binary64; the numbers below are binary32's. Let q = 2^(e - p + 1) be the format's quantum at
the magnitude a of x, with e the exponent of x within emin and emax. C = 2^23 q is a power of two, and the quantum of
binary32 from C to 2 C is q. As a < C, the sum a + C is rounded to a multiple of q, ties to an even one, and 2^23, the
number of quanta in C, is even; the subtraction of C is exact. Beyond 2^(emax + 1) the quantum may be larger, but a
multiple of it is still beyond the maximum, as the value is.

A quotient, a product or a sum of binary32 numbers is first rounded to binary32. Ties of the format are binary32
numbers, so that this step can only make a tie of a value that is none: ``quotient``, ``product`` and ``total`` find the
ties, and leave those whose residual is not zero to the general algorithm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from fxround.numerics.arithmetic.residuals import two_sum
from fxround.numerics.arithmetic.scalar import (
    WIDTH,
    Expr,
    absolute,
    bits,
    const,
    fma,
    from_bits,
    maximum,
    minimum,
    negate,
    rarely,
    select,
)
from fxround.numerics.formats.carriers import CARRIERS, Carrier, one_nan
from fxround.numerics.modes import Rounding

# A format's least exponents: half of its quantum, and residuals of values as large as that, are normal numbers. Formats
# with binary32's exponents have a shorter way in binary64 (``rounding.round_inside``).
_LEAST_QUANTUM: Final = -100
# Magnitudes from 2^-100 on have quotients whose residuals do not underflow.
_LEAST_DIVIDEND: Final = 2.0**-100

_BEYOND: Final = MappingProxyType({"inf": math.inf, "nan": math.nan})


def is_short(rounding: Rounding, carrier: Carrier) -> bool:
    """Whether the rounding is to nearest even, to a format that this algorithm serves in the carrier."""
    fmt = rounding.format
    plain = fmt.is_grid and fmt.has_minus_zero and fmt.subnormals and 1 < fmt.precision < carrier.trailing
    ends = (
        fmt.quantum_exponent >= _LEAST_QUANTUM and fmt.emax + carrier.trailing - fmt.precision < carrier.format.emax - 1
    )
    return plain and ends and rounding.mode.name == "nearest_even"


@dataclass(frozen=True)
class _Rounded:
    """A rounded value, and whether the value was a tie."""

    value: Expr
    tie: Expr


def identity(x: Expr, rounding: Rounding, any_nan: bool) -> Expr:
    """Return R(x) of a value of the carrier. any_nan: a NaN may have any sign and payload."""
    rounded = _round(x, rounding).value
    return rounded if any_nan else one_nan(rounded)


def quotient(x: Expr, divisor: Expr, rounding: Rounding, any_nan: bool, general: Expr) -> Expr:
    """Return R(x / divisor) of values of the carrier; general: the same by the general algorithm.

    The residual x - q d is a multiple of d's quantum times half of the format's, at q's exponent. If |x| is at least
    2^-100, that is at least 2^-149, so that the residual is zero only if the quotient is exact.
    """
    nearest = x / divisor
    exact = fma(negate(nearest), divisor, x).equals(0.0) & (const(x.type, _LEAST_DIVIDEND) <= absolute(x))
    return _checked(nearest, exact, rounding, any_nan, general)


def product(x: Expr, factor: Expr, rounding: Rounding, any_nan: bool, general: Expr) -> Expr:
    """Return R(x * factor) of values of the carrier; general: the same by the general algorithm.

    A tie is at least 2^-101, so that its residual, a multiple of 2^-48 of it, is at least 2^-149 or zero.
    """
    nearest = x * factor
    return _checked(nearest, fma(x, factor, negate(nearest)).equals(0.0), rounding, any_nan, general)


def total(x: Expr, y: Expr, rounding: Rounding, any_nan: bool, general: Expr) -> Expr:
    """Return R(x + y) of values of the carrier; general: the same by the general algorithm."""
    wide = two_sum(x, y)
    assert wide.error is not None
    return _checked(wide.value, wide.error.equals(0.0), rounding, any_nan, general)


def scaled_down(x: Expr, power: Expr, rounding: Rounding, any_nan: bool) -> Expr:
    """Return R(x / power) of binary32 values, where power is a power of two from 2^-127 to 2^127.

    Its reciprocal is exact, and so is the product with it, unless it is beyond binary32's normal numbers: then it is
    beyond the format's maximum, or below half of its quantum, as the quotient is.
    """
    return identity(x * (const(x.type, 1.0) / power), rounding, any_nan)


def _checked(nearest: Expr, exact: Expr, rounding: Rounding, any_nan: bool, general: Expr) -> Expr:
    rounded = _round(nearest, rounding)
    return rarely(rounded.tie & ~exact, general, rounded.value if any_nan else one_nan(rounded.value))


def _round(x: Expr, rounding: Rounding) -> _Rounded:
    fmt, carrier = rounding.format, CARRIERS[x.type]
    trailing, sign = carrier.trailing, 1 << WIDTH[carrier.code] - 1

    def field(exponent: int) -> int:
        return (exponent + carrier.bias) << trailing

    drop = trailing + 1 - fmt.precision
    magnitude = absolute(x)
    exponent = bits(magnitude) & (sign - (1 << trailing))
    power = minimum(maximum(exponent, field(fmt.emin)), field(fmt.emax)) + (drop << trailing)
    grid = from_bits(power)
    multiple = (magnitude + grid) - grid
    half = from_bits(power - (trailing + 1 << trailing))
    tie = absolute(magnitude - multiple).equals(half)
    beyond = const(x.type, _BEYOND.get(rounding.overflow, fmt.maximum))
    # A NaN compares false and stays.
    kept = select(const(x.type, fmt.maximum) < multiple, beyond, multiple)
    return _Rounded(from_bits(bits(kept) | (bits(x) & sign)), tie)
