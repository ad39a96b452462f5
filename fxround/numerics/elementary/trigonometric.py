"""sin, cos and tan: two polynomials on [-pi/4, pi/4] after an exact reduction.

x = n pi/2 + r + r', where r + r' is good to 2^-75 relatively for every finite x (``modulo_pi``). sin and cos of r + r'
are pairs whose heads are r and 1 - r^2/2, good to 2^-56. The quadrant n picks one of them and its sign. sin(+-0) and
tan(+-0) keep their sign because the sign is applied last; infinities are cases.
"""

from __future__ import annotations

import math
from typing import Final

from fxround.numerics.arithmetic.scalar import Expr, absolute, fma, from_bits, negate
from fxround.numerics.elementary import quick
from fxround.numerics.elementary.approximation import Approximation, Case
from fxround.numerics.elementary.coefficients import COEFFICIENTS
from fxround.numerics.elementary.function import Elementary
from fxround.numerics.elementary.modulo_pi import quarter_turns
from fxround.numerics.elementary.pairs import (
    Pair,
    choose,
    divide,
    f64,
    fast_two_sum,
    negated,
    polynomial,
    two_product,
    with_sign_of,
)


def _sin(r: Pair) -> Pair:
    """Return sin(r), |r| <= pi/4."""
    z = r.hi * r.hi
    curve = r.hi * (z * polynomial(z, COEFFICIENTS["sin"]))
    return fast_two_sum(r.hi, fma(r.lo, fma(z, -0.5, 1.0), curve))


def _cos(r: Pair) -> Pair:
    """Return cos(r), |r| <= pi/4."""
    square = two_product(r.hi, r.hi)
    z = square.hi
    hi, lo = fast_two_sum(f64(1.0), z * -0.5)
    curve = fma(z * z, polynomial(z, COEFFICIENTS["cos"]), fma(square.lo, -0.5, lo))
    return fast_two_sum(hi, fma(negate(r.hi), r.lo, curve))


def is_odd(quadrant: Expr) -> Expr:
    """Whether a multiple of pi/2 exchanges sine and cosine."""
    return ~(quadrant & 1).equals(0)


def sign_of_half_turn(quadrant: Expr) -> Expr:
    """Return a float with the sign (-1)^(quadrant / 2)."""
    return from_bits(quadrant << 62)


def not_finite(x: Expr) -> tuple[Case, ...]:
    """Return the case of infinities and NaN."""
    return ((~(absolute(x) < math.inf), math.nan),)


def sin(x: Expr) -> Approximation:
    """The sine."""
    quadrant, r = quarter_turns(x)
    value = with_sign_of(sign_of_half_turn(quadrant), choose(is_odd(quadrant), _cos(r), _sin(r)))
    return Approximation(*with_sign_of(x, value), cases=(*not_finite(x), (x.equals(0.0), x)))


def cos(x: Expr) -> Approximation:
    """The cosine."""
    quadrant, r = quarter_turns(x)
    turned = quadrant + 1
    value = with_sign_of(sign_of_half_turn(turned), choose(is_odd(turned), _cos(r), _sin(r)))
    return Approximation(*value, cases=not_finite(x))


def tan(x: Expr) -> Approximation:
    """The tangent."""
    quadrant, r = quarter_turns(x)
    sine, cosine = _sin(r), _cos(r)
    odd = is_odd(quadrant)
    value = divide(choose(odd, negated(cosine), sine), choose(odd, sine, cosine))
    return Approximation(*with_sign_of(x, value), cases=(*not_finite(x), (x.equals(0.0), x)))


FUNCTIONS: Final = (
    Elementary(
        "sin", 1, sin, 0.9, "sin(+-0) = +-0, sin(+-inf) = NaN", "sin(x)", "Payne and Hanek 1983, fdlibm", quick.sin
    ),
    Elementary("cos", 1, cos, 0.95, "cos(+-inf) = NaN", "cos(x)", "Payne and Hanek 1983, fdlibm", quick.cos),
    Elementary("tan", 1, tan, 1.0, "tan(+-0) = +-0, tan(+-inf) = NaN", "tan(x)", "Payne and Hanek 1983, fdlibm"),
)
