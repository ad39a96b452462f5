"""x modulo pi/2 for every finite x, in integers (Payne and Hanek 1983).

x = M 2^Q with an integer M. Only the bits of 2/pi that land between 2^1 and 2^-n of M 2^Q 2/pi matter: those above give
multiples of 4 quadrants. Selects cut them out of a constant, at a position that the exponent gives; they are multiplied
by M modulo 2^(n+2). The nearest quadrant is taken off the top, which leaves a fraction f of pi/2, |f| <= 1/2, and r = f
pi/2 is returned as a pair. The closest that a binary64 number above 1 comes to a multiple of pi/2 is 2^-61 of a
quadrant, a binary32 number 2^-34. n = 190 and n = 126 make the truncation 2^-137 and 2^-102 of a quadrant.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from fxround.numerics.arithmetic.scalar import Expr, absolute, bits, const, maximum, minimum, select
from fxround.numerics.elementary.approximation import integer_to_f64
from fxround.numerics.elementary.pairs import Pair, add, choose, f64, fast_two_sum, multiply

HALF_PI: Final = (1.5707963267948966, 6.123233995736766e-17)
TWO_OVER_PI: Final = int(
    "A2F9836E4E441529FC2757D1F534DDC0DB6295993C439041FE5163ABDEBBC561B7246E3A424DD2E0"
    "06492EEA09D1921CFE1DEB1CB129A73EE88235F52EBB4484E99C7026B45F7E413991D639835339F4"
    "9C845F8BBDF9283B1FF897FFDE05980FEF2F118B5A0A6D1F6D367ECF27CB09B74F463F669E5FEA2D"
    "7527BAC7EBE5F17B3D0739F78A5292EA6BFB5FB11F8D5D0856033046FC7B6BABF0CFBC209AF4361D",
    16,
)
"""The first 1280 bits of 2/pi."""
_DIGIT: Final = (1 << 32) - 1


@dataclass(frozen=True)
class Argument:
    """The type of x: the bits of its significand, its largest exponent, and how many words of 2/pi it needs."""

    precision: int
    largest_exponent: int
    words: int

    def constant(self) -> list[Expr]:
        """Return 64-bit words of 2/pi, the first bit of which lands on 2^1 for |x| in [1/2, 1).

        Bits after the 1280 known ones are zero: for the largest x they are below 2^-256 of a quadrant.
        """
        zeros, count = self.precision + 2, self.words + 1 + (self.largest_exponent + 1) // 64
        stream = (TWO_OVER_PI << 64) >> (1280 + 64 + zeros - 64 * count)
        return [const("u64", stream >> (64 * (count - 1 - i))) for i in range(count)]


BINARY32: Final = Argument(24, 127, 2)
BINARY64: Final = Argument(53, 1023, 3)
EXTENDED64: Final = Argument(53, 1023, 4)
"""n = 254: the truncation is 2^-201 of a quadrant."""


def quarter_turns(x: Expr, kind: Argument | None = None) -> tuple[Expr, Pair]:
    """Return the number modulo 4 (u64) of the multiple of pi/2 nearest to |x|, and |x| minus that multiple."""
    kind = kind or (BINARY32 if x.op == "widen" else BINARY64)
    size = absolute(x)
    quadrant, remainder = _reduce(size, kind)
    small = size < HALF_PI[0] / 2
    return select(small, const("u64", 0), quadrant), choose(small, Pair(size, f64(0.0)), remainder)


def _reduce(size: Expr, kind: Argument) -> tuple[Expr, Pair]:
    code = bits(size)
    exponent = minimum(maximum(code >> 52, 1022), 1023 + kind.largest_exponent)
    significand = ((code & ((1 << 52) - 1)) | (1 << 52)) >> (53 - kind.precision)
    digits = _multiply(significand, _window(kind, exponent - 1022), kind.precision > 32)
    top = (digits[0] << 32) | digits[1]
    quadrant = (top + (1 << 61)) >> 62
    fraction = top - (quadrant << 62)
    # Every part is a binary64 number without rounding: it is below 2^32 in magnitude, scaled by a power of two.
    head = integer_to_f64((fraction >> 32) ^ (1 << 31), 1 << 31)
    parts = [integer_to_f64(d, 0) * 2.0 ** (-32 * i) for i, d in enumerate([fraction & _DIGIT, *digits[2:]], 1)]
    total = add(fast_two_sum(head, parts[0]), _sum(parts[1:4]))
    return quadrant, multiply(total, Pair(f64(HALF_PI[0] * 2.0**-30), f64(HALF_PI[1] * 2.0**-30)))


def _sum(parts: list[Expr]) -> Pair:
    """Return the sum of decreasing parts, without overlap."""
    hi, lo = fast_two_sum(parts[0], parts[1])
    return Pair(hi, lo + parts[2]) if len(parts) > 2 else Pair(hi, lo)


def _window(kind: Argument, position: Expr) -> list[Expr]:
    """Return kind.words words of the constant, from the bit at this position on."""
    words, index, shift = kind.constant(), position >> 6, position & 63
    for stage in reversed(range((len(words) - kind.words - 1).bit_length())):
        step, here = 1 << stage, ~((index >> stage) & 1).equals(0)
        need = kind.words + step
        # A word beyond the last one is needed only where the remaining index is 0.
        words = [select(here, words[j + step], w) if j + step < len(words) else w for j, w in enumerate(words[:need])]
    return [(a << shift) | ((b >> 1) >> (63 - shift)) for a, b in pairwise(words)]


def _multiply(significand: Expr, words: list[Expr], long: bool) -> list[Expr]:
    """Return significand * words modulo 2^(64 len(words)), as 32-bit digits, the highest first."""
    digits = [part for w in reversed(words) for part in (w & _DIGIT, w >> 32)]
    low = _row(significand & _DIGIT, digits, [])
    product = _row(significand >> 32, digits[:-1], low[1:]) if long else low[1:]
    return [*reversed(product), low[0]]


def _row(factor: Expr, digits: list[Expr], addend: list[Expr]) -> list[Expr]:
    """Return factor * digits + addend, lowest digit first, with as many digits as there are.

    factor: below 2^32, or below 2^21 with an addend.
    """
    out: list[Expr] = []
    carry: Expr | None = None
    for i, digit in enumerate(digits):
        total = factor * digit + addend[i] if addend else factor * digit
        total = total if carry is None else total + carry
        out.append(total & _DIGIT)
        carry = total >> 32
    return out
