"""cbrt, rsqrt and hypot.

Each is an approximation y with a few wrong bits plus the exact residual times the derivative, as in y + (x - y^3) / (3
y^2): a pair good to about 2^-95. The result is therefore the nearest binary64 number but for one case in 2^40, and an
exact result (cbrt(27), hypot(3, 4), rsqrt(1/16)) is exact. Arguments near the ends of binary64's range are scaled
before they are squared or cubed.
"""

from __future__ import annotations

import math
from typing import Final

from fxround.numerics.arithmetic.scalar import Expr, absolute, bits, const, fma, from_bits, negate, select, sqrt
from fxround.numerics.elementary.approximation import Approximation
from fxround.numerics.elementary.exponential import is_infinite
from fxround.numerics.elementary.function import Elementary
from fxround.numerics.elementary.pairs import f64, fast_two_sum, scaled, square_root, two_product, with_sign_of

_THIRD_OF_EXPONENT: Final = 0x553F15A0
"""High word of a number from which a third of x's is subtracted to get x^(-1/3) within 4.4 %."""
_ONE_THIRD_2_33: Final = 0xAAAAAAAB


def cbrt(x: Expr) -> Approximation:
    """The cube root: x^(-1/3) by two steps of order four, then one exact residual."""
    size = absolute(x)
    tiny, huge = size < 2.0**-900, size > 2.0**900
    a = size if x.op == "widen" else size * select(tiny, f64(2.0**180), select(huge, f64(2.0**-180), f64(1.0)))
    third = ((bits(a) >> 32) * _ONE_THIRD_2_33) >> 33
    z = from_bits((const("u64", _THIRD_OF_EXPONENT) - third) << 32)
    for _ in range(2):
        h = fma(negate((a * z) * z), z, 1.0)
        z = fma(z * h, fma(h, fma(h, 14.0 / 81.0, 2.0 / 9.0), 1.0 / 3.0), z)
    y = (a * z) * z
    square = two_product(y, y)
    cube = two_product(square.hi, y)
    residual = (a - cube.hi) - fma(square.lo, y, cube.lo)
    value = fast_two_sum(y, residual * (z * z * (1.0 / 3.0)))
    if x.op != "widen":
        value = scaled(value, select(tiny, f64(2.0**-60), select(huge, f64(2.0**60), f64(1.0))))
    cases = ((x.equals(0.0) | ~(size < math.inf), x),)
    return Approximation(*with_sign_of(x, value), cases=cases, noise=2.0**-70)


def rsqrt(x: Expr) -> Approximation:
    """1 / sqrt(x)."""
    y = 1.0 / sqrt(x)
    product = two_product(x, y)
    residual = fma(negate(product.lo), y, fma(negate(product.hi), y, 1.0))
    value = fast_two_sum(y, residual * (y * 0.5))
    return Approximation(*value, cases=((x.equals(0.0) | is_infinite(x), y),), noise=2.0**-70)


def hypot(x: Expr, y: Expr) -> Approximation:
    """sqrt(x^2 + y^2): infinite if either is, even if the other is NaN."""
    a, b = absolute(x), absolute(y)
    large, small = select(a > b, a, b), select(a > b, b, a)
    exponent: Expr | None = None
    if x.op != "widen" or y.op != "widen":
        huge, tiny = large > 2.0**500, large < 2.0**-400
        factor = select(huge, f64(2.0**-600), select(tiny, f64(2.0**600), f64(1.0)))
        exponent = select(huge, const("u64", 600), select(tiny, const("u64", -600), const("u64", 0)))
        large, small = large * factor, small * factor
    squares = two_product(large, large), two_product(small, small)
    hi, lo = fast_two_sum(squares[0].hi, squares[1].hi)
    root = square_root(fast_two_sum(hi, (lo + squares[1].lo) + squares[0].lo))
    return Approximation(*root, exponent, cases=((is_infinite(x) | is_infinite(y), math.inf),))


FUNCTIONS: Final = (
    Elementary("cbrt", 1, cbrt, 0.501, "cbrt(+-0) = +-0; exact cubes are exact", "sign(x)*cbrt(abs(x))", "Householder"),
    Elementary("rsqrt", 1, rsqrt, 0.501, "rsqrt(+-0) = +-inf, NaN below", "1/sqrt(x)", "Markstein 2000"),
    Elementary("hypot", 2, hypot, 0.501, "hypot(+-inf, NaN) = +inf", "hypot(x, y)", "Borges 2020"),
)
