"""asin, acos, atan and atan2.

asin uses one polynomial in z, z = x^2 up to 1/2 and z = (1 - |x|) / 2 beyond, where asin|x| = pi/2 - 2 asin(sqrt(z))
(fdlibm). atan2 divides the smaller of |x| and |y| by the larger, or, where that exceeds tan(pi/8), smaller - larger by
smaller + larger. The quotient is a pair, at most 0.4143; the angle that was taken off is a multiple of pi/4, kept as a
pair. The tails are below 0.06 of the value, so that the error is little more than the last rounding's.

If both arguments of atan2 are infinite they count as 1 and 1, if one is, as 1 and 0. For binary64 arguments the
significands are divided and the exponents kept apart, so that the quotient neither over- nor underflows.
"""

from __future__ import annotations

import math
from typing import Final

from fxround.numerics.arithmetic.scalar import Expr, absolute, bits, const, fma, maximum, minimum, select
from fxround.numerics.elementary.approximation import Approximation, power_of_two, significand
from fxround.numerics.elementary.coefficients import COEFFICIENTS
from fxround.numerics.elementary.exponential import is_infinite
from fxround.numerics.elementary.function import Elementary
from fxround.numerics.elementary.modulo_pi import HALF_PI
from fxround.numerics.elementary.pairs import (
    Pair,
    choose,
    divide_exactly,
    f64,
    fast_two_sum,
    negated,
    polynomial,
    scaled,
    square_root,
    two_product,
    two_sum,
    with_sign_of,
)

QUARTER_PI: Final = (0.7853981633974483, 3.061616997868383e-17)
TAN_PI_8: Final = 0.41421356237309503


def _arcsine(size: Expr) -> tuple[Expr, Pair]:
    """Return whether size > 1/2, and asin(size), or there asin(sqrt((1 - size) / 2)). NaN beyond 1."""
    far = size > 0.5
    z = select(far, fma(size, -0.5, 0.5), size * size)
    root = choose(far, square_root(Pair(z, f64(0.0))), Pair(size, f64(0.0)))
    return far, fast_two_sum(root.hi, fma(root.hi * z, polynomial(z, COEFFICIENTS["asin"]), root.lo))


def _from(turns: float, value: Pair) -> Pair:
    """Return turns * pi/2 - value."""
    hi, lo = fast_two_sum(f64(HALF_PI[0] * turns), -1.0 * value.hi)
    return Pair(hi, (lo - value.lo) + HALF_PI[1] * turns)


def asin(x: Expr) -> Approximation:
    """The arc sine."""
    far, value = _arcsine(absolute(x))
    return Approximation(*with_sign_of(x, choose(far, _from(1.0, scaled(value, 2.0)), value)))


def acos(x: Expr) -> Approximation:
    """The arc cosine."""
    far, value = _arcsine(absolute(x))
    double = scaled(value, 2.0)
    beyond = choose(x < 0.0, _from(2.0, double), double)
    return Approximation(*choose(far, beyond, _from(1.0, with_sign_of(x, value))))


def _angle(y: Expr, x: Expr, left: Expr) -> Pair:
    """Return the angle of (x, y) for x, y >= 0 that are not both 0; pi minus it where ``left``."""
    steep = y > x
    small, large = select(steep, x, y), select(steep, y, x)
    bent = small > large * TAN_PI_8
    over = choose(bent, two_sum(small, -1.0 * large), Pair(small, f64(0.0)))
    under = choose(bent, two_sum(large, small), Pair(large, f64(0.0)))
    t = divide_exactly(over, under)
    z = t.hi * t.hi
    value = fast_two_sum(t.hi, fma(t.hi * z, polynomial(z, COEFFICIENTS["atan"]), t.lo))
    # The angle in eighths of a turn: 0 or 1, mirrored at 2 where steep and at 4 where left.
    eighths = select(bent, f64(1.0), f64(0.0))
    eighths = select(steep, 2.0 - eighths, eighths)
    eighths = select(left, 4.0 - eighths, eighths)
    base = two_product(eighths, QUARTER_PI[0])
    value = choose(steep ^ left, negated(value), value)
    hi, lo = fast_two_sum(base.hi, value.hi)
    return Pair(hi, fma(eighths, QUARTER_PI[1], base.lo) + (lo + value.lo))


def atan(x: Expr) -> Approximation:
    """The arc tangent."""
    size = absolute(x)
    clipped = select(size > 2.0**200, 2.0**200, size)
    return Approximation(*with_sign_of(x, _angle(clipped, f64(1.0), const("bool", 0))))


def comparable(y: Expr, x: Expr) -> tuple[Expr, Expr, Expr | None]:
    """Return sizes a and b, neither infinite, not both zero, and an exponent: |y / x| = a / b 2^exponent.

    Of binary64 numbers the larger is scaled to [1, 2), and the other to at least 2^-100. The exponent is nonzero only
    where y is so much smaller that the arc tangent differs from its argument by less than 2^-200 of it.
    """
    a, b = absolute(y), absolute(x)
    endless = is_infinite(y) | is_infinite(x)
    a = select(endless, select(is_infinite(y), f64(1.0), f64(0.0)), a)
    b = select(endless, select(is_infinite(x), f64(1.0), f64(0.0)), b)
    b = select(a.equals(0.0) & b.equals(0.0), 1.0, b)
    if x.op == "widen" and y.op == "widen":
        return a, b, None
    (m, e), (n, f) = significand(a), significand(b)
    lowest = maximum(e, f) - 100
    small, large = (
        select(size.equals(0.0), 0.0, part * power_of_two(maximum(k, lowest) - lowest - 100))
        for size, part, k in ((a, m, e), (b, n, f))
    )
    return small, large, minimum(e, lowest) - lowest


def atan2(y: Expr, x: Expr) -> Approximation:
    """The angle of the point (x, y), in [-pi, pi]."""
    left = ~(bits(x) >> 63).equals(0)
    a, b, exponent = comparable(y, x)
    value = with_sign_of(y, _angle(a, b, left))
    if exponent is not None:
        exponent = select(left, const("u64", 0), exponent)
    unknown = ~y.equals(y) | ~x.equals(x)
    return Approximation(*value, exponent, cases=((unknown, math.nan),))


FUNCTIONS: Final = (
    Elementary("asin", 1, asin, 0.7, "asin(+-0) = +-0, asin(|x| > 1) = NaN", "asin(x)", "fdlibm"),
    Elementary("acos", 1, acos, 0.7, "acos(1) = +0, acos(|x| > 1) = NaN", "acos(x)", "fdlibm"),
    Elementary("atan", 1, atan, 0.75, "atan(+-0) = +-0", "atan(x)", "fdlibm"),
    Elementary("atan2", 2, atan2, 0.75, "C23, annex F.10.1.4", "atan2(x, y)", "fdlibm"),
)
