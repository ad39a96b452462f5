"""pow(a, b) = exp(b log|a|), with a logarithm good to 2^-65, and to 2^-93 near a boundary.

log(1 + f) = 2 (s + s z (1/3 + z P(z))), s = f / (2 + f), z = s^2, where everything but the tail P is in pairs. The
product b log|a| is a pair, good to 2^-55 absolutely where the result neither over- nor underflows, so that the result
is good to a fraction of an ulp before its last rounding. For binary32 arguments, a result within 8 ulps of a number of
26 bits is computed again to 2^-87 (``precise``). The special cases are those of C23, annex F.10.4.4, in the order in
which they override each other.

Exact and midpoint cases (after Lauter and Lefevre, IEEE TC 58(2), 2009). Let a = m 2^e > 0 and b = n 2^-F be binary32
numbers, m and n odd (F may be negative), a != 1, b != 0, and let z = a^b = q 2^k, q odd, have at most 25 bits.

    1.  m = 1: z = 2^(e b), so e b is an integer (2^t is irrational for any other rational t).
    2.  m > 1. Then b > 0: for b < 0, 1/z = a^-b is an algebraic integer power with odd part above 1, and its inverse z
        is no dyadic rational.
        F <= 0: b is an integer and z = m^b 2^(e b), so m^b < 2^25; 3^16 > 2^25, hence b <= 15.
        F > 0: z^(2^F) = a^n, that is q^(2^F) 2^(k 2^F) = m^n 2^(e n). n is odd, so m = r^(2^F), q = r^n, and 2^F
        divides e; r >= 3 and m < 2^24 give F <= 3, and r^n < 2^25 gives n <= 15.

So b is a multiple of 1/8 up to 15, or a is a power of two: finitely many families, which ``exact_powers`` lists; the
tests run them all, in every mode, with both signs of a. In these cases the pair is an exact result plus an error below
2^-87 of it, under NOISE = 2^-82, and counts as exact, so that all of them are rounded exactly. It is not proved that no
other pair comes within 2^-82 of a boundary, or within 2^-87 on its wrong side: of some 2^61 pairs with a finite result
other than 1, 2^61 2^26 2^-87, about one, is to be expected so near.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from fxround.numerics.arithmetic.scalar import Expr, absolute, bits, fma, rarely, select
from fxround.numerics.elementary import quick
from fxround.numerics.elementary.approximation import Approximation, Case, clamped, power_of_two
from fxround.numerics.elementary.coefficients import COEFFICIENTS
from fxround.numerics.elementary.exponential import LN2, exponential, is_infinite
from fxround.numerics.elementary.function import Elementary
from fxround.numerics.elementary.logarithm import split
from fxround.numerics.elementary.pairs import (
    Pair,
    add,
    divide,
    f64,
    fast_two_sum,
    multiply,
    polynomial,
    scaled,
    two_product,
    with_sign_of,
)
from fxround.numerics.elementary.precise import precise_exp, precise_log

NOISE: Final = 2.0**-82
THIRD: Final = (0.3333333333333333, 1.850371707708594e-17)


def exact_powers() -> Iterator[tuple[int, int, int, int]]:
    """Yield (m, e modulus, n, F) of part 2 above, b = 1 left out.

    They stand for a = m 2^e with e a multiple of the modulus, and b = n 2^-F.
    """
    for f in range(4):
        for n in range(1, 16, 2) if f else range(2, 16):
            for r in range(3, 1 << 13, 2):
                if r**n < 1 << 25 and r ** (2**f) < 1 << 24:
                    yield r ** (2**f), 2**f, n, f


def accurate_log(x: Expr) -> Pair:
    """Return log(x) to 2^-65 relatively, for positive finite x."""
    parts = split(x)
    f = parts.f
    s = divide(Pair(f, f64(0.0)), fast_two_sum(f64(2.0), f))
    z = multiply(s, s)
    bend = fast_two_sum(f64(THIRD[0]), z.hi * polynomial(z.hi, COEFFICIENTS["log_tail"]))
    curve = multiply(multiply(s, z), Pair(bend.hi, bend.lo + THIRD[1]))
    fraction = scaled(add(s, curve), 2.0)
    return add(fast_two_sum(parts.k * LN2[0], parts.k * LN2[1]), fraction)


def _is_integer(size: Expr) -> Expr:
    """Whether size is an integer, for size >= 0."""
    return ((size + 2.0**52) - 2.0**52).equals(size) | (size >= 2.0**52)


def power(a: Expr, b: Expr) -> Approximation:
    """a to the power b."""
    size, exponent = absolute(a), absolute(b)
    logarithm = accurate_log(size)
    product = two_product(b, logarithm.hi)
    ordinary = absolute(product.hi) < 800.0
    low = select(ordinary, fma(b, logarithm.lo, product.lo), 0.0)
    value, k = exponential(Pair(clamped(product.hi, -800.0, 800.0), low))

    noise = 2.0**-56
    if a.op == "widen" and b.op == "widen":
        value, noise = _refined(size, b, value, k), NOISE
    integer, sign = sign_of_power(a, exponent)
    hi, lo = with_sign_of(sign, value)
    # Next to 1 the noise of an exact result and a true remainder look alike; but there only a = 1 is exact, which is a
    # case.
    near_one = absolute(product.hi) < 2.0**-54
    remainder = with_sign_of(sign, with_sign_of(product.hi, Pair(f64(2.0**-55), f64(0.0)))).hi
    return Approximation(hi, lo, k, cases=edges(a, b, integer, sign), residue=(near_one, remainder), noise=noise)


def sign_of_power(a: Expr, exponent: Expr) -> tuple[Expr, Expr]:
    """Return whether the exponent's size is an integer, and a number with the sign of the power of a."""
    integer = _is_integer(exponent)
    odd = integer & ~_is_integer(exponent * 0.5)
    return integer, select(odd, a, absolute(a))


def _refined(size: Expr, b: Expr, value: Pair, k: Expr) -> Pair:
    """Return the value, its low part good to 2^-87 where 57 bits may not decide on which side of a boundary it lies."""
    near = ((bits(value.hi + value.lo) + 8) & ((1 << 27) - 1)) <= 16
    argument = multiply(Pair(b, f64(0.0)), precise_log(Pair(size, f64(0.0))))
    precise, precise_k = precise_exp(Pair(clamped(argument.hi, -800.0, 800.0), argument.lo))
    hi, lo = scaled(precise, power_of_two(precise_k - k))
    return Pair(value.hi, rarely(near, (hi - value.hi) + lo, value.lo))


def edges(a: Expr, b: Expr, integer: Expr, sign: Expr) -> tuple[Case, ...]:
    """Return the special cases; ``integer`` and ``sign`` as from ``sign_of_power``."""
    size = absolute(a)
    extreme = size.equals(0.0) | is_infinite(a) | is_infinite(b)
    grows = (size > 1.0) ^ (b > 0.0)
    limit = with_sign_of(sign, Pair(select(grows, f64(0.0), f64(math.inf)), f64(0.0))).hi
    unit = with_sign_of(sign, Pair(f64(1.0), f64(0.0))).hi
    undefined = (a < 0.0) & (a > -math.inf) & ~integer
    unknown = ~a.equals(a) | ~b.equals(b)
    return (
        (undefined, math.nan),
        (extreme, limit),
        (size.equals(1.0) & (integer | is_infinite(b) | (a > 0.0)), unit),
        (unknown, math.nan),
        (a.equals(1.0) | b.equals(0.0), 1.0),
    )


FUNCTIONS: Final = (Elementary("pow", 2, power, 0.7, "C23, annex F.10.4.4", "x**y", "Markstein 2000", quick.power),)
