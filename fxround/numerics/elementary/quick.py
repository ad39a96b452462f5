"""Short evaluations for binary32 to nearest even: good to 2^-36, with a test of whether that is enough.

A ``Quick`` is a binary64 value within 2^-36 of the exact one, relatively, wherever it is ``trusted``. Rounding to
nearest changes only at the midpoints of neighbours, so a value further than 2^-35 from every midpoint rounds as the
exact value does, by the hardware's conversion. About one lane in a thousand is nearer, or not trusted, and takes the
full evaluation of the function's own file (Ziv 1991). A result next to a binary32 number, as sin(x) next to x, is far
from a midpoint and needs no full evaluation.

Each error is the sum of a polynomial's (at most 2^-37, stated next to its ``Fit``) and of a few roundings of binary64;
the tests measure the sum against mpmath. ``trusted`` holds only where the result is a normal number of binary32, or
exact. Where erf is cut off, value and exact value lie above the last midpoint below 1; tanh and sigmoid are cut off
where they differ from 1 by less than 2^-56.
``benchmarks.exhaustive`` compares the results of these kernels for all binary32 inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fxround.numerics.arithmetic.scalar import (
    Expr,
    absolute,
    bits,
    const,
    fma,
    from_bits,
    negate,
    select,
    signed_to_f64,
)
from fxround.numerics.elementary.approximation import SHIFTER, SIGN, clamped
from fxround.numerics.elementary.coefficients import COEFFICIENTS
from fxround.numerics.elementary.derivations import FITS
from fxround.numerics.elementary.pairs import f64, polynomial
from fxround.numerics.formats.carriers import CARRIERS

MAGNITUDE: Final = (1 << 63) - 1
_ordinal: Final = CARRIERS["f64"].ordinal
LOG2_E: Final = 1.4426950408889634
LN2: Final = 0.6931471805599453
HALF_PI: Final = (1.5707963267341256, 6.077100506506192e-11)
"""pi/2: the first part has 33 bits, so that k times it is exact for |k| < 2^20."""
WINDOW: Final = 1 << 18
"""2^-35 of the value, in binary64 ulps of the upper end of a binade."""
_VANISHING: Final = -127.0
"""exp of what is below is less than 2^-182."""
_SQRT_HALF_BITS: Final = 0x3FE6A09E667F3BCD
_EXPONENT: Final = 0xFFF << 52


@dataclass(frozen=True)
class Quick:
    """A value within 2^-36 of the exact one where ``trusted`` (bool) holds and ``saturates`` (bool) does not.

    Where the function ``saturates`` (None: nowhere), the value's magnitude is more than 1 - 2^-25, and the exact
    one is at most 1, and no less than the value's, but for 2^-36.
    ``vanishes`` (bool): where the exact value lies between 0 and 2^-182, 2^-33 of binary32's least quantum, or is 0;
    None means nowhere. The value means nothing there.
    """

    value: Expr
    trusted: Expr
    saturates: Expr | None = None
    vanishes: Expr | None = None

    def ends(self, graded: bool) -> tuple[Expr, Expr]:
        """Return the ends of an interval that holds the exact value where it is ``trusted``, and is no zero.

        graded: of the mode that rounds them. Where the function saturates, a graded mode starts from the nearest
        binary64 number, which may be 1; for the others all values between 1's predecessor and 1 are alike.
        """
        code = bits(self.value)
        far = code + WINDOW
        if self.saturates is not None:
            far = select(self.saturates, (code & SIGN) | (_ordinal(1.0) - int(not graded)), far)
        return from_bits(code - WINDOW), from_bits(far)

    def doubtful(self) -> Expr:
        """Whether the exact value may round to another binary32 number than ``value`` does."""
        # The 29 low bits are those that binary32 drops; at a midpoint they are 2^28.
        beside = (bits(self.value) - ((1 << 28) - WINDOW)) & ((1 << 29) - 1)
        return (beside <= 2 * WINDOW) | ~self.trusted


def _zero_or_within(x: Expr, low: float, high: float) -> Expr:
    """Whether x = 0 or low <= |x| < high, in integers: for odd functions that are about x near 0."""
    size = bits(x) & MAGNITUDE
    return size.equals(0) | ((size - _ordinal(low)) < _ordinal(high) - _ordinal(low))


def _positive(x: Expr) -> Expr:
    """Whether 0 < x < 2^128, for a binary32 x."""
    return (bits(x) - 1) < _ordinal(2.0**128) - 1


def _powers(x: Expr) -> tuple[Expr, Expr]:
    """Return 2^k as bits above a significand of zeros, and exp(r) - 1: x = k log 2 + r, |x| < 100, r off by 2^-47."""
    shifted = fma(x, LOG2_E, SHIFTER)
    r = fma(shifted - SHIFTER, -LN2, x)
    return bits(shifted) << 52, r * polynomial(r, COEFFICIENTS["quick_exp"])


def exp(x: Expr) -> Quick:
    """2^k (1 + r Q(r)), trusted up to 87, where the result is normal."""
    power, rest = _powers(x)
    return Quick(from_bits(bits(rest + 1.0) + power), absolute(x) < 87.0, vanishes=x < _VANISHING)


def _reciprocal(d: Expr) -> Expr:
    """Return 1 / d for 1 <= d < 2^130: a subtraction of encodings, which is off by 12 %, then three steps, to 2^-50."""
    y = from_bits(const("u64", 0x7FDE623822FC16E6) - bits(d))
    e = fma(negate(d), y, 1.0)
    y = fma(y, fma(e, e, e), y)
    e = fma(negate(d), y, 1.0)
    y = fma(y, fma(e, e, e), y)
    return fma(y, fma(negate(d), y, 1.0), y)


def sigmoid(x: Expr) -> Quick:
    """1 / (1 + exp(-x)). x beyond 87 counts as 87, whose result is 1 - 2^-125."""
    kept = select(x > 87.0, 87.0, x)
    return Quick(_reciprocal(exp(negate(kept)).value + 1.0), x > -87.0, vanishes=x < _VANISHING)


def tanh(x: Expr) -> Quick:
    """(E - 1) / (E + 1), E = exp(2 x), where E - 1 = 2^k (exp(r) - 1) + (2^k - 1). |x| beyond 20 counts as 20."""
    size = clamped(x, -20.0, 20.0)
    power, rest = _powers(size + size)
    scale = from_bits(power + bits(f64(1.0)))
    numerator = fma(scale, rest, scale - 1.0)
    value = numerator * _reciprocal(numerator + 2.0)
    # The numerator of -0 is +0.
    signed = from_bits(bits(value) | (bits(x) & SIGN))
    return Quick(signed, _zero_or_within(x, 2.0**-100, 2.0**127))


def _logarithm(x: Expr, name: str) -> tuple[Expr, Expr]:
    """Return k 2^52 and log(1 + f) of a positive normal number 2^k (1 + f), sqrt(1/2) <= 1 + f < sqrt(2)."""
    exponent = (bits(x) - _SQRT_HALF_BITS) & _EXPONENT
    f = from_bits(bits(x) - exponent) - 1.0
    return signed_to_f64(exponent), f * polynomial(f, COEFFICIENTS[name])


def log(x: Expr) -> Quick:
    """k log 2 + f P(f)."""
    k, fraction = _logarithm(x, "quick_log")
    return Quick(fma(k, LN2 * 2.0**-52, fraction), _positive(x))


def erf(x: Expr) -> Quick:
    """x P(x^2) up to 4, where the result rounds to 1."""
    size = clamped(x, -4.0, 4.0)
    value = size * polynomial(fma(size, size, -FITS["quick_erf"].centre), COEFFICIENTS["quick_erf"])
    return Quick(value, _zero_or_within(x, 2.0**-100, 2.0**127), saturates=absolute(x) >= 4.0)


def _turned(x: Expr, quarter: int) -> Quick:
    """Return sin(x + quarter pi/2): x = k pi/2 + r, r good to 2^-70, far less than |r| itself for |x| < 2^17."""
    shifted = fma(x, 2 / 3.141592653589793, SHIFTER)
    k = shifted - SHIFTER
    r = fma(k, -HALF_PI[1], fma(k, -HALF_PI[0], x))
    z = r * r
    sine = r * fma(z, polynomial(z, COEFFICIENTS["quick_sin"]), 1.0)  # -0 for r = -0
    cosine = fma(z, polynomial(z, COEFFICIENTS["quick_cos"]), 1.0)
    turns = bits(shifted) + quarter
    value = select((turns & 1).equals(0), sine, cosine)
    signed = from_bits(bits(value) ^ ((turns >> 1) << 63))
    return Quick(signed, absolute(x) < 2.0**17)


def sin(x: Expr) -> Quick:
    """The sine. A subnormal x is its own sine."""
    return _turned(x, 0)


def cos(x: Expr) -> Quick:
    """The cosine."""
    return _turned(x, 1)


def power(a: Expr, b: Expr) -> Quick:
    """2^(b log2 a) for a > 0, with a logarithm good to 2^-49."""
    k, fraction = _logarithm(a, "quick_power")
    t = b * fma(k, 2.0**-52, fraction)
    shifted = t + SHIFTER
    r = (t - (shifted - SHIFTER)) * LN2
    value = from_bits(bits(fma(r, polynomial(r, COEFFICIENTS["quick_exp"]), f64(1.0))) + (bits(shifted) << 52))
    return Quick(value, (absolute(t) < 125.0) & _positive(a))
