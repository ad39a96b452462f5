"""erf, erfc and erfinv: a polynomial up to 3/4, exp(-x^2) times a polynomial in 1 / (x + 3) beyond.

For |x| < 3/4, erf(x) = x (2/sqrt(pi) + x^2 P(x^2)) with the constant as a pair. Beyond, erfc(x) exp(x^2) = u Q(u), u =
1 / (x + 3), is smooth up to infinity, so that one polynomial is enough (the idea of Shepherd and Laframboise 1981); x^2
is exact, as a pair. There erf = 1 - erfc, and erfc(-x) = 2 - erfc(x): nothing cancels. erfinv(x) / x is smooth in w =
-log(1 - x^2), and for w > 5 in sqrt(w) (Giles 2010): the polynomials are good to 2^-44, and for a binary64 argument one
step of Newton's method makes that 2^-54. |x| is clamped to 27.5, where erfc has underflowed, and to 7 for erf, where 1
- erf < 2^-73.
"""

from __future__ import annotations

import math
from typing import Final

from fxround.numerics.arithmetic.scalar import Expr, absolute, const, fma, negate, select, sqrt
from fxround.numerics.elementary import quick, single
from fxround.numerics.elementary.approximation import Approximation, power_of_two
from fxround.numerics.elementary.coefficients import COEFFICIENTS
from fxround.numerics.elementary.derivations import FITS
from fxround.numerics.elementary.exponential import exponential, is_infinite
from fxround.numerics.elementary.function import Elementary
from fxround.numerics.elementary.logarithm import log1p_pair
from fxround.numerics.elementary.pairs import (
    Pair,
    choose,
    f64,
    fast_two_sum,
    multiply,
    negated,
    polynomial,
    scaled,
    two_product,
    two_sum,
    with_sign_of,
)

TWO_OVER_SQRT_PI: Final = (1.1283791670955126, 1.533545961316588e-17)
HALF_SQRT_PI: Final = (0.886226925452758, -3.8332932499128993e-17)
NEAR: Final = 0.75


def _near_zero(x: Expr) -> Pair:
    """Return erf(x), |x| < 3/4."""
    z = x * x
    head = two_product(x, TWO_OVER_SQRT_PI[0])
    curve = fma(z, polynomial(z, COEFFICIENTS["erf"]), TWO_OVER_SQRT_PI[1])
    return fast_two_sum(head.hi, fma(x, curve, head.lo))


def _far(size: Expr) -> tuple[Pair, Expr]:
    """Return erfc(size) as a pair and an exponent, 3/4 <= size <= 27.5."""
    shifted = two_sum(size, f64(3.0))
    u = 1.0 / shifted.hi
    curve = _fitted("erfc", u)
    factor = two_product(u, curve)
    # u is off by u * lost, and d(erfcx)/du u = (2/sqrt(pi) - 2 x erfcx) / u.
    lost = fma(negate(u), shifted.lo, fma(negate(u), shifted.hi, 1.0))
    slope = fma(size * -2.0, factor.hi, TWO_OVER_SQRT_PI[0]) * shifted.hi
    decay, k = exponential(negated(two_product(size, size)))
    return multiply(decay, Pair(factor.hi, fma(lost, slope, factor.lo))), k


def erf(x: Expr) -> Approximation:
    """The error function."""
    size = absolute(x)
    tail, k = _far(select(size > 7.0, 7.0, size))
    small = scaled(tail, power_of_two(k))
    hi, lo = fast_two_sum(f64(1.0), negate(small.hi))
    far = with_sign_of(x, Pair(hi, lo - small.lo))
    total = choose(size < NEAR, _near_zero(x), far)
    return Approximation(*total, cases=((x.equals(0.0), x),), exact=is_infinite(x))


def erfc(x: Expr) -> Approximation:
    """1 - erf(x), with relative accuracy down to gradual underflow."""
    size = absolute(x)
    tail, k = _far(select(size > 27.5, 27.5, size))
    near, upper = size < NEAR, x >= NEAR
    reach = select(k + 2048 < 2048 - 200, const("u64", -200), k)
    part = choose(near, _near_zero(x), scaled(tail, power_of_two(reach)))
    hi, lo = fast_two_sum(select(near, f64(1.0), f64(2.0)), negate(part.hi))
    total = choose(upper, tail, Pair(hi, lo - part.lo))
    return Approximation(*total, select(upper, k, const("u64", 0)), exact=is_infinite(x))


def erfinv(x: Expr) -> Approximation:
    """The inverse of erf."""
    size = absolute(x)
    inside = select(size < 1.0, size, 0.5)
    logarithm = log1p_pair(negated(two_product(inside, inside)))
    w = negate(logarithm.hi + logarithm.lo)
    root = sqrt(w)
    beyond = select(root < 4.0, _fitted("erfinv_middle", root), _fitted("erfinv_far", root))
    value = two_product(size, select(w < 5.0, _fitted("erfinv", w), beyond))
    if x.op != "widen":
        value = choose(size < 2.0**-500, _tiny_inverse(size), _corrected(inside, value.hi + value.lo))
    edge = select(size.equals(1.0), with_sign_of(x, Pair(f64(math.inf), f64(0.0))).hi, math.nan)
    return Approximation(*with_sign_of(x, value), cases=((~(size < 1.0), edge),))


def _tiny_inverse(size: Expr) -> Pair:
    """Return erfinv(size) = size sqrt(pi) / 2, which for tiny sizes is right to every bit that a pair has."""
    hi, lo = two_product(size, HALF_SQRT_PI[0])
    return Pair(hi, fma(size, HALF_SQRT_PI[1], lo))


def _corrected(size: Expr, y: Expr) -> Pair:
    """Return erfinv(size) by a step of Newton's method from y, which is good to 2^-44.

    The step uses erf, or 1 - size beyond 3/4.
    """
    near, far = _near_zero(y), select(y < NEAR, 1.0, y)
    tail, k = _far(far)
    unit = power_of_two(k)
    excess = choose(y < NEAR, negated(near), scaled(tail, unit))
    whole = select(y < NEAR, negate(size), 1.0 - size)
    decay, exponent = exponential(negated(two_product(y, y)))
    slope = decay.hi * power_of_two(exponent) * TWO_OVER_SQRT_PI[0]
    return fast_two_sum(y, ((excess.hi - whole) + excess.lo) / slope)


def _fitted(name: str, x: Expr) -> Expr:
    return polynomial(x - FITS[name].centre, COEFFICIENTS[name])


FUNCTIONS: Final = (
    Elementary(
        "erf",
        1,
        erf,
        1.1,
        "erf(+-0) = +-0, erf(+-inf) = +-1",
        "erf(x)",
        "Shepherd and Laframboise 1981",
        quick.erf,
        single.erf,
    ),
    Elementary("erfc", 1, erfc, 2.2, "erfc(-inf) = 2, erfc(inf) = +0", "erfc(x)", "Shepherd and Laframboise 1981"),
    Elementary("erfinv", 1, erfinv, 2.2, "erfinv(+-1) = +-inf, erfinv(|x| > 1) = NaN", "erfinv(x)", "Giles 2010"),
)
