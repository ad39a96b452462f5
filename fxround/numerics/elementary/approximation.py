"""The value that a function's definition returns, and its last rounding.

An ``Approximation`` is (hi + lo) * 2^exponent, except where one of its cases overrides it. ``nearest`` adds hi and lo:
one binary64 rounding of a value that is far closer to the exact one than an ulp, so that a result that is a binary64
number comes out exact. ``sticky`` rounds the sum to odd, so that an inexact result never looks exact to the rounding
that follows (Boldo and Melquiond 2008): exp(2^-90) lies above 1 and becomes 1 + 2^-23 in binary32, toward_positive.

Scaling by 2^exponent uses two factors, each a normal number, so that only the last product rounds (gradual underflow)
or overflows; where it would round, ``nearest`` rounds the unevaluated sum instead. With ``sticky``, overflow gives the
largest finite number and underflow the smallest, so that the next rounding decides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

from fxround.numerics.arithmetic.scalar import Expr, absolute, bits, const, fma, from_bits, negate, rarely, select
from fxround.numerics.elementary.pairs import f64, two_sum

SIGN: Final = 1 << 63
SHIFTER: Final = 6755399441055744.0
"""1.5 * 2^52: adding it to |t| < 2^51 leaves t, rounded to an integer, in the low bits."""
_SHIFTER_BITS: Final = 0x433 << 52 | 1 << 51
SURE: Final = 2.0**-83
TINY: Final = 2.0**-30
"""Below this, x - x^3/6 and its like round to x, and the sign of the second term decides the rest."""
_INFINITY_BITS: Final = 0x7FF << 52

Case = tuple[Expr, Expr | float]


class Loss(NamedTuple):
    """The binary64 number next to a value, and what it lost of it.

    ``sign`` has the sign of the value minus ``near``. ``size`` is the difference; zero where it underflows, and without
    meaning where ``near`` is infinite. ``sure``: the sign is not in doubt by errors of 2^-84 of the value.
    """

    near: Expr
    sign: Expr
    size: Expr
    sure: Expr


@dataclass(frozen=True)
class Approximation:
    """(hi + lo) * 2^exponent; ``cases`` (condition, value) override it, the last one that holds.

    ``exponent`` is a u64 in two's complement, |exponent| < 2046. ``exact`` (bool): the function's value is a binary64
    number here, namely ``nearest``, whatever lo is. ``residue`` (condition, lo): the sign of what is lost where hi is
    right but 106 bits do not show it, as in sin(x) = x - x^3/6 for a tiny x. ``noise``: a loss below this fraction of
    the value is an evaluation error of an exact result, as in log10(1000).
    """

    hi: Expr
    lo: Expr
    exponent: Expr | None = None
    cases: tuple[Case, ...] = ()
    exact: Expr | None = None
    residue: tuple[Expr, Expr] | None = None
    noise: float = 0.0

    def nearest(self) -> Expr:
        """Return the value rounded once to binary64, to nearest even, also where the result is subnormal."""
        value = self.hi + self.lo
        if self.exponent is not None:
            scaled = _scale(value, self.exponent)
            value = rarely(absolute(scaled) <= 2.0**-1022, self._subnormal(self.exponent), scaled)
        return _override(value, self.cases)

    def _subnormal(self, exponent: Expr) -> Expr:
        """Round the value to a multiple of 2^-1074, to nearest even, where it is at most 2^-1022.

        In units of 2^-1074 the sum is an integer next to 2^52 plus a rest, which is rounded to odd before it is added.
        The bits of numbers above 2^52 count these units, as the bits of subnormal numbers do.
        """
        total, error = self._parts()
        sign = bits(total) & SIGN
        a, b = (from_bits(bits(_scale(part, exponent + 1074)) ^ sign) for part in (total, error))
        whole = a + 2.0**52
        rest = two_sum(a - (whole - 2.0**52), b)
        code = bits(whole + _to_odd(rest.hi, rest.lo, ~rest.lo.equals(0.0))) - (0x433 << 52)
        return from_bits(code | sign)

    def _parts(self) -> tuple[Expr, Expr]:
        """Return the binary64 number nearest to the sum, and what it lost; zero where that is noise."""
        total = self.hi + self.lo
        error = self.lo - (total - self.hi)
        if self.noise:
            error = select(absolute(error) > absolute(total) * self.noise, error, 0.0)
        return total, error

    def lost(self) -> Loss:
        """Return the nearest binary64 number, and what it lost of the value."""
        total, error = self._parts()
        near, size, sign = total, error, error
        if self.residue is not None:
            sign = select(*self.residue, error)
        sure = absolute(error) > absolute(total) * SURE
        if self.exponent is not None:
            scaled = _scale(total, self.exponent)
            near = rarely(absolute(scaled) <= 2.0**-1022, self._subnormal(self.exponent), scaled)
            # What the exponent's bounds took away counts too: the difference is exact, both being within a factor of 2.
            missed = total - _scale(near, 0 - self.exponent)
            size = _scale(missed + error, self.exponent)
            sign = select(missed.equals(0.0), sign, missed + error)
            infinite = absolute(near).equals(math.inf) & (absolute(total) < math.inf)
            sign, sure = select(infinite, negate(total), sign), sure | infinite | ~missed.equals(0.0)
        if self.exact is not None:
            sign = select(self.exact, 0.0, sign)
        for condition, special in self.cases:
            near, sign, sure = select(condition, special, near), select(condition, 0.0, sign), sure | condition
        return Loss(near, sign, select(sign.equals(0.0), 0.0, size), sure)

    def sticky(self) -> Expr:
        """Return the value rounded to odd. An inexact value is neither zero nor infinite."""
        lo = self.lo if self.residue is None else select(*self.residue, self.lo)
        value = _odd_sum(self.hi, lo, self.noise)
        if self.exponent is not None:
            value = _stay_finite(_scale(value, self.exponent), value)
        if self.exact is not None:
            value = select(self.exact, _scale(self.hi + self.lo, self.exponent), value)
        return _override(value, self.cases)


def _override(value: Expr, cases: tuple[Case, ...]) -> Expr:
    for condition, special in cases:
        value = select(condition, special, value)
    return value


def _odd_sum(hi: Expr, lo: Expr, noise: float) -> Expr:
    """Return hi + lo rounded to odd, for |hi| >= |lo|: an inexact even sum steps towards its error."""
    total = hi + lo
    error = lo - (total - hi)
    return _to_odd(total, error, absolute(error) > (absolute(total) * noise if noise else f64(0.0)))


def _to_odd(total: Expr, error: Expr, inexact: Expr) -> Expr:
    """Step to the next number in the error's direction where the total is even and ``inexact``."""
    code = bits(total)
    step = select((error < 0.0) ^ (total < 0.0), const("u64", -1), const("u64", 1))
    return from_bits(select((code & 1).equals(0) & inexact, code + step, code))


def _stay_finite(scaled: Expr, value: Expr) -> Expr:
    """Return the nearest nonzero finite number where scaling lost a nonzero finite value."""
    code = bits(absolute(scaled))
    lost_above = code.equals(_INFINITY_BITS) & ~bits(absolute(value)).equals(_INFINITY_BITS)
    lost_below = code.equals(0) & ~bits(absolute(value)).equals(0)
    held = select(lost_above, const("u64", _INFINITY_BITS - 1), select(lost_below, const("u64", 1), code))
    return from_bits(held | (bits(scaled) & SIGN))


def _scale(value: Expr, exponent: Expr | None) -> Expr:
    if exponent is None:
        return value
    half = ((exponent + 2048) >> 1) - 1024
    return (value * power_of_two(half)) * power_of_two(exponent - half)


def power_of_two(exponent: Expr) -> Expr:
    """Return 2^exponent as f64, for a u64 in two's complement between -1022 and 1023."""
    return from_bits((exponent + 1023) << 52)


def significand(size: Expr) -> tuple[Expr, Expr]:
    """Return m in [1, 2) and e + 2048 (u64) with size = m 2^e, for positive finite sizes."""
    tiny = size < 2.0**-1022
    code = bits(select(tiny, size * 2.0**54, size))
    exponent = (code >> 52) + select(tiny, const("u64", 2048 - 1023 - 54), const("u64", 2048 - 1023))
    return from_bits((code & ((1 << 52) - 1)) | (1023 << 52)), exponent


def round_to_integer(x: Expr, factor: float = 1.0) -> tuple[Expr, Expr]:
    """Return x * factor rounded to the nearest integer, as f64 and as u64 in two's complement; |x factor| < 2^51."""
    shifted = x + SHIFTER if factor == 1.0 else fma(x, factor, SHIFTER)
    return shifted - SHIFTER, bits(shifted) - _SHIFTER_BITS


def integer_to_f64(k: Expr, bias: int) -> Expr:
    """Return k - bias as f64, for a u64 k < 2^52."""
    return from_bits(k | (0x433 << 52)) - f64(float(2**52 + bias))


def clamped(x: Expr, low: float, high: float) -> Expr:
    """Return x kept in [low, high]. A NaN stays."""
    return select(x < low, low, select(x > high, high, x))
