"""Evaluations in binary32 alone, for roundings to binary32: an interval, and whether it rounds to one number.

A ``Single`` is an interval [head + low, head + high] that holds the exact value wherever it is ``trusted``. Rounding is
monotone, so where both ends round to the same binary32 number, the exact value rounds to it too (Ziv 1991). Elsewhere,
in about one lane of a thousand, ``quick`` decides in binary64.

Other modes than nearest even look at s, the number nearest to the lower end, and at what both ends are more than s, lo
and hi: lo is exact (Dekker), hi is off by 2^-24 of itself, and its sign is right. A directed mode returns s or a
neighbour, as the signs of lo and hi agree on. For ``stochastic``, let q be the quantum above s, and u < 1 the random
word; the general algorithm truncates v + u q to a multiple of q, with 29 bits of u and v rounded to binary64, which is
off by less than 2^-28 q. Here u has 23 bits, 2^-23 less at most, and v / q + u - 1/2 is rounded to 2^-25 and then to an
integer, once 2^-21 below the lower end and once above the upper one. If both integers are alike, so is the general
algorithm's. If s is a power of two and lo < 0, the quantum below s is another one, and these lanes are doubtful. For
s from 2^-90 on, every part that counts is normal.

A value is a head and a tail, kept apart by error-free transformations, so that a few units of 2^-24 of the tail are
lost; each function states the sum that makes the interval's half width. ``trusted`` excludes arguments for which a part
that counts is subnormal; a NaN equals nothing, so it is never taken for a result. ``benchmarks.exhaustive`` compares
the results of these kernels for all binary32 inputs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from fxround.numerics.arithmetic.scalar import (
    Expr,
    absolute,
    bits,
    const,
    fma,
    from_bits,
    lookup,
    negate,
    select,
    signed_to_f32,
)
from fxround.numerics.elementary.coefficients import COEFFICIENTS
from fxround.numerics.elementary.pairs import Pair, fast_two_sum, two_product, two_sum
from fxround.numerics.elementary.single_tables import ENTRIES
from fxround.numerics.modes import Mode


def _nearest(value: float) -> float:
    """Return the nearest binary32 number."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def _encodings(values: Iterable[float]) -> list[int]:
    """Return the encodings of the nearest binary32 numbers."""
    return [int.from_bytes(struct.pack("<f", v), "little") for v in values]


SIGN: Final = 1 << 31
SHIFTER: Final = 1.5 * 2.0**23
"""Adding it to |t| < 2^22 leaves t, rounded to an integer, in the low bits."""
STEPS: Final = _nearest(32 * 1.4426950408889634)
STEP: Final = (0.021660849452018738, _nearest(-5.952044687368025e-11))
"""log(2) / 32 in two parts, good to 2^-58."""
_POWERS: Final = [(e - (j << 18)) & 0xFFFFFFFF for j, e in enumerate(_encodings(ENTRIES["exp_power"]))]
"""Entry j plus (32 n + j) 2^18 is the encoding of 2^(n + j/32)."""
_EXCESS: Final = _encodings(ENTRIES["exp_excess"])
_EXP_BOUND: Final = _nearest(2.2e-11)
_LOWERED: Final = _encodings(v - _EXP_BOUND for v in ENTRIES["exp_excess"])
"""_EXCESS, so that what comes out is the interval's lower end."""
_SIGMOID_BOUND: Final = _nearest(2.8e-11)
_TANH_BOUND: Final = _nearest(2.5e-11)
_TANH_REST: Final = 2.625 * 2.0**-24

LN2: Final = (45426 * 2.0**-16, _nearest(0.6931471805599453 - 45426 * 2.0**-16))
_INVERSES: Final = _encodings(ENTRIES["log_inverse"])
_LOG_HEADS: Final = _encodings(ENTRIES["log_head"])
_LOG_RESTS: Final = _encodings(ENTRIES["log_rest"])
_EXPONENT: Final = 0x1FF << 23
_LOG_BOUND: Final = 2.0**-35
_LOG_REST: Final = 3.5 * 2.0**-24

EIGHTHS: Final = 1.5 * 2.0**20
"""Adding it to |t| < 2^19 leaves 8 t, rounded to an integer, in the low bits."""
_ERF: Final = [_encodings(ENTRIES[f"erf_{power}"]) for power in range(7)]
_ERF_RESTS: Final = [_encodings(ENTRIES[f"erf_rest_{power}"]) for power in (0, 1)]
_ERF_END: Final = _nearest(3.93)
_ERF_BOUND: Final = 2.0**-38
_ERF_REST: Final = 5.5 * 2.0**-24
_SMALL: Final = (127 - 90) << 23

# Other modes than nearest even look at the interval if s has at least the first of these codes, and is below the second
# one, or below 1 if the function has a sign: tanh and erf are cut off where s is 1.
_LEAST: Final = (127 - 90) << 23
_PAST: Final = 253 << 23
_ONE: Final = 127 << 23
_TOWARD: Final = ("toward_zero", "toward_positive", "toward_negative", "away_from_zero")
_MARGIN: Final = 2.0**-21


class Rounded(NamedTuple):
    """A rounded value, f32, and whether it is ``doubtful`` (bool), where it means nothing."""

    value: Expr
    doubtful: Expr


@dataclass(frozen=True)
class Single:
    """An interval [head + low, head + high] (f32) that holds the exact value where ``trusted`` holds.

    ``trusted`` is a bool; None means everywhere. If ``sign`` (u32) is given, the interval holds |value|, and ``sign``
    is the sign bit. ``positive``: the interval has no negative numbers.
    """

    head: Expr
    low: Expr
    high: Expr
    trusted: Expr | None = None
    sign: Expr | None = None
    positive: bool = True

    @property
    def value(self) -> Expr:
        """The rounded value, f32. It means nothing where it is ``doubtful``."""
        value = self.head + self.low
        return value if self.sign is None else from_bits(bits(value) | self.sign)

    def doubtful(self) -> Expr:
        """Whether the ends round to different numbers, or the interval is not trusted."""
        same = (self.head + self.low).equals(self.head + self.high)
        return ~(same if self.trusted is None else same & self.trusted)

    def rounded(self, mode: Mode, random: Expr | None) -> Rounded | None:
        """Return the value rounded to binary32 by another mode than nearest even; None if there is no such way."""
        if not self.positive or mode.name not in (*_TOWARD, "stochastic"):
            return None
        nearest = self.head + self.low
        rest = self.head - nearest
        low, high = rest + self.low, rest + self.high
        code = bits(nearest)
        if mode.name == "stochastic":
            assert random is not None
            value, doubtful = _drawn(code, low, high, random)
        else:
            value, doubtful = self._directed(mode.name, code, low, high)
        past = _PAST if self.sign is None else _ONE
        outside = const("u32", past - _LEAST) <= code - _LEAST
        doubtful = doubtful | outside if self.trusted is None else doubtful | outside | ~self.trusted
        return Rounded(from_bits(value if self.sign is None else value | self.sign), doubtful)

    def _directed(self, mode: str, code: Expr, low: Expr, high: Expr) -> Rounded:
        """Return the code of the magnitude towards zero, or away from it, and whether the ends disagree."""
        inward = Rounded(select(low < 0.0, code - 1, code), (low < 0.0) & ~(high < 0.0))
        outward = Rounded(select(high > 0.0, code + 1, code), (high > 0.0) & ~(low > 0.0))
        if mode == "toward_zero":
            return inward
        if mode == "away_from_zero":
            return outward
        up, down = (outward, inward) if mode == "toward_positive" else (inward, outward)
        if self.sign is None:
            return up
        return Rounded(*(select(self.sign.equals(0), x, y) for x, y in zip(up, down, strict=True)))


def _drawn(code: Expr, low: Expr, high: Expr, random: Expr) -> Rounded:
    """Return the code of the magnitude that is drawn, and whether the ends disagree."""
    scale = from_bits(const("u32", 254 + 23 << 23) - (code & (0xFF << 23)))
    drawn = from_bits((random >> 9) | (127 << 23))
    ends = (low, drawn - (1.5 + _MARGIN)), (high, drawn - (1.5 - _MARGIN))
    first, last = (bits(fma(end, scale, place) + SHIFTER) for end, place in ends)
    power = (code & (1 << 23) - 1).equals(0) & (low < 0.0)
    return Rounded(code + (first - bits(const("f32", SHIFTER))), ~first.equals(last) | power)


def _polynomial(x: Expr, name: str) -> Expr:
    """Evaluate a polynomial by Horner's rule with fma."""
    *others, last = COEFFICIENTS[name]
    value = const("f32", last)
    for c in reversed(others):
        value = fma(value, x, c)
    return value


class _Powers(NamedTuple):
    """The parts of exp = power (1 + r + rest); ``square`` is (r + the argument's low part)^2 < 2^-13."""

    power: Expr
    r: Expr
    rest: Expr
    square: Expr

    def pair(self) -> Pair:
        """Return the sum as a pair whose tail is below 2^-13 of the head."""
        head = fma(self.power, self.r, self.power)
        return Pair(head, fma(self.power, self.rest, fma(self.power, self.r, self.power - head)))


def _powers(x: Expr, excess: list[int]) -> _Powers:
    """Reduce x = k log(2)/32 + r, |x| < 87.

    r is exact; its low part, below 2^-22, holds what the head of log(2)/32 lacks. The table holds binary32 numbers near
    2^(j/32), and how much j log(2)/32 exceeds their logarithms, so that ``power`` is exact too (after Gal 1986). exp(r)
    - 1 - r loses 2^-37.5 where its argument is rounded, and less than 2^-36.1 in the roundings of a square below 2^-13,
    half of which counts: 2.0e-11 of the value in all.
    """
    shifted = fma(x, STEPS, SHIFTER)
    k = shifted - SHIFTER
    r = fma(k, -STEP[0], x)
    low = fma(k, -STEP[1], from_bits(lookup(bits(shifted), excess)))
    near = r + low
    square = near * near
    rest = fma(square, _polynomial(near, "single_exp"), low)
    power = from_bits(lookup(bits(shifted), _POWERS) + (bits(shifted) << 18))
    return _Powers(power, r, rest, square)


def exp(x: Expr) -> Single:
    """exp(x) within 2.0e-11. The table lowers it by 2.2e-11; the upper end is rounded once more (2^-38)."""
    parts = _powers(x, _LOWERED)
    head, low = parts.pair()
    return Single(head, low, fma(parts.power, 2 * _EXP_BOUND, low), absolute(x) < 75.0)


def sigmoid(x: Expr) -> Single:
    """1 / (1 + exp(-x)): exp's bound, plus roundings of a tail below 2^-23; the quotient's remainder is exact."""
    e = fast_two_sum(*_powers(negate(x), _EXCESS).pair())
    d = two_sum(const("f32", 1.0), e.hi)
    inverse = 1.0 / d.hi
    residue = fma(negate(inverse), d.lo + e.lo, fma(negate(inverse), d.hi, 1.0))
    tail = residue * inverse
    low, high = (fma(inverse, bound, tail) for bound in (-_SIGMOID_BOUND, _SIGMOID_BOUND))
    return Single(inverse, low, high, absolute(x) < 75.0)


def tanh(x: Expr) -> Single:
    """(1 - F) / (1 + F), F = exp(-2 |x|). |x| beyond 20 counts as 20, whose result is 1 as well.

    1 - F is as small as x. The roundings of exp's square, five of 2^-24 of a half of it, therefore have a term of their
    own (``_TANH_REST``); exp's other errors are in ``_TANH_BOUND``. A subnormal x has no other part that counts.
    """
    size = absolute(x)
    parts = _powers(select(size > 20.0, 20.0, size) * -2.0, _EXCESS)
    one = const("f32", 1.0) - parts.power
    lost = (1.0 - one) - parts.power
    head = fma(negate(parts.power), parts.r, one)
    tail = fma(negate(parts.power), parts.r, one - head)
    n = fast_two_sum(head, fma(negate(parts.power), parts.rest, tail + lost))
    high = 2.0 - n.hi
    low = ((2.0 - high) - n.hi) - n.lo
    inverse = 1.0 / high
    value = n.hi * inverse
    residue = fma(negate(value), low, fma(negate(value), high, n.hi) + n.lo)
    tail = residue * inverse
    width = fma(value, _TANH_BOUND, parts.power * parts.square * _TANH_REST * inverse)
    return Single(value, tail - width, tail + width, sign=bits(x) & SIGN)


def log(x: Expr) -> Single:
    """k log(2) - log(c) + log1p(f), x = 2^k m, f = m c - 1 < 2^-6, c one of 32 inverses; near 1, k = 0 and c = 1.

    The heads of the first two have 16 bits after the binary point, so that they add exactly; their rests lose 2^-24 of
    themselves (``_LOG_BOUND``, relative to the heads' sum). log1p(f) - f loses five roundings of half a square, and f's
    (``_LOG_REST``).
    """
    code = bits(x) - (0x3F800000 - (1 << 17))
    power = code & _EXPONENT
    k = signed_to_f32(power)
    m = from_bits(bits(x) - power)
    index = code >> 18
    c = from_bits(lookup(index, _INVERSES))
    product = two_product(m, c)
    f = product.hi - 1.0
    near = f + product.lo
    square = near * near
    whole = fma(k, LN2[0] * 2.0**-23, from_bits(lookup(index, _LOG_HEADS)))
    low = fma(k, LN2[1] * 2.0**-23, from_bits(lookup(index, _LOG_RESTS)))
    head = fast_two_sum(whole, f)
    tail = (head.lo + product.lo) + fma(square, _polynomial(near, "single_log"), low)
    width = fma(absolute(whole), _LOG_BOUND, square * _LOG_REST)
    return Single(head.hi, tail - width, tail + width, (bits(x) - (1 << 23)) < (0xFE << 23), positive=False)


def erf(x: Expr) -> Single:
    """a P(a - c), a = |x|, c the nearest multiple of 1/8, |a - c| <= 1/16.

    a beyond 3.93 counts as 3.93, whose result is 1 too. P's first two coefficients have two parts. The rest, ``rest``,
    is below 2^-9 of P. It loses at most seven roundings of 2^-24 of itself, including that of its largest coefficient.
    That 5.5 units bound their sum is established by the comparison over all inputs.
    """
    size = absolute(x)
    # Zero, or large enough that no part is subnormal.
    trusted = (bits(size) - 1) >= _SMALL - 1
    size = select(size > _ERF_END, _ERF_END, size)
    shifted = size + EIGHTHS
    u = size - (shifted - EIGHTHS)

    def entry(table: list[int]) -> Expr:
        return from_bits(lookup(bits(shifted), table))

    curve = entry(_ERF[6])
    for table in _ERF[5:1:-1]:
        curve = fma(curve, u, entry(table))
    slope = two_product(u, entry(_ERF[1]))
    total = fast_two_sum(entry(_ERF[0]), slope.hi)
    rest = fma(u, fma(u, curve, entry(_ERF_RESTS[1])), entry(_ERF_RESTS[0])) + (total.lo + slope.lo)
    value = two_product(size, total.hi)
    tail = fma(size, rest, value.lo)
    width = size * fma(absolute(rest), _ERF_REST, _ERF_BOUND)
    return Single(value.hi, tail - width, tail + width, trusted, bits(x) & SIGN)
