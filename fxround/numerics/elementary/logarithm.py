"""log, log2, log10 and log1p: k log 2 + log(1 + f), 1 + f in [sqrt(1/2), sqrt(2)).

With s = f / (2 + f) and z = s^2, log(1 + f) = f - f^2/2 + s (f^2/2 + z P(z)) (fdlibm's form of Tang 1990). The first
two terms are a pair and the rest is below 0.1 |f|; k log 2 is added in two parts, the first of which is exact. So log
is good to 2^-56 before its last rounding, near 1 too, and log(1) = +0, log2(2^n) = n. Subnormals are scaled by 2^54
first; every argument that is not positive and finite is a case.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from fxround.numerics.arithmetic.scalar import Expr, bits, fma, from_bits, minimum, negate, select
from fxround.numerics.elementary import quick, single
from fxround.numerics.elementary.approximation import Approximation, Case, clamped, integer_to_f64, round_to_integer
from fxround.numerics.elementary.coefficients import COEFFICIENTS
from fxround.numerics.elementary.exponential import LN2
from fxround.numerics.elementary.function import Elementary
from fxround.numerics.elementary.pairs import Pair, choose, f64, fast_two_sum, polynomial, two_product, two_sum

LOG2_E: Final = (1.4426950408889634, 2.0355273740931033e-17)
LOG10_E: Final = (0.4342944819032518, 1.098319650216765e-17)
LOG10_2: Final = (0.30102999566383914, 1.42050232272661e-13)
"""log10(2): the first part has 42 significant bits."""
_SQRT_HALF_BITS: Final = 0x3FE6A09E667F3BCD
_BIAS: Final = 1100


class Split(NamedTuple):
    """The parts of a positive number 2^k * (1 + f), f exact, sqrt(1/2) <= 1 + f < sqrt(2).

    ``unit`` is 2^-min(k, 900).
    """

    k: Expr
    f: Expr
    unit: Expr


def split(x: Expr) -> Split:
    """Return exponent and fraction of a positive finite number, subnormal or not."""
    tiny = x < 2.0**-1022
    code = bits(select(tiny, x * 2.0**54, x))
    biased = (code + ((_BIAS << 52) - _SQRT_HALF_BITS)) >> 52
    k = integer_to_f64(biased, _BIAS) - select(tiny, f64(54.0), f64(0.0))
    fraction = from_bits(code - ((biased - _BIAS) << 52)) - 1.0
    return Split(k, fraction, from_bits((_BIAS + 1023 - minimum(biased, _BIAS + 900)) << 52))


def log_fraction(f: Expr, tail: Expr | None = None) -> Pair:
    """Return log(1 + f + tail) with relative accuracy 2^-56, |f| <= 0.4143 and |tail| at most about an ulp of f."""
    s = f / (f + 2.0)
    z = s * s
    half = two_product(f * 0.5, f)
    hi, lo = fast_two_sum(f, negate(half.hi))
    low = fma(s, fma(z, polynomial(z, COEFFICIENTS["log"]), half.hi), lo - half.lo)
    if tail is not None:
        # 1 / (1 + f) = (1 - s)^2 / (1 - z), to 0.1 %
        low = fma((1.0 - s) * (1.0 - s), fma(tail, z, tail), low)
    return fast_two_sum(hi, low)


def add_exponent(k: Expr, fraction: Pair) -> Pair:
    """Return k log 2 + fraction, for an integer |k| < 2048 and |fraction| < 1/2."""
    hi, lo = fast_two_sum(k * LN2[0], fraction.hi)
    return Pair(hi, fma(k, LN2[1], lo + fraction.lo))


def domain(x: Expr, pole: float = 0.0) -> tuple[Case, ...]:
    """Return the cases of a logarithm: -inf at the pole, NaN below, +inf and NaN unchanged."""
    outside = (x <= pole) | ~(x < math.inf)
    value = select(x.equals(pole), -math.inf, select(x < pole, math.nan, x))
    return ((outside, value),)


def log(x: Expr) -> Approximation:
    """The natural logarithm."""
    parts = split(x)
    hi, lo = add_exponent(parts.k, log_fraction(parts.f))
    return Approximation(hi, lo, cases=domain(x))


def log2(x: Expr) -> Approximation:
    """The logarithm to base 2; log2(2^n) = n."""
    parts = split(x)
    fraction = log_fraction(parts.f)
    product = two_product(fraction.hi, LOG2_E[0])
    hi, lo = fast_two_sum(parts.k, product.hi)
    low = fma(fraction.hi, LOG2_E[1], fma(fraction.lo, LOG2_E[0], product.lo))
    return Approximation(*fast_two_sum(hi, lo + low), cases=domain(x))


def log10(x: Expr) -> Approximation:
    """The logarithm to base 10; log10(10^n) = n wherever 10^n is exact."""
    parts = split(x)
    fraction = log_fraction(parts.f)
    product = two_product(fraction.hi, LOG10_E[0])
    hi, lo = fast_two_sum(parts.k * LOG10_2[0], product.hi)
    low = fma(fraction.hi, LOG10_E[1], fma(fraction.lo, LOG10_E[0], product.lo))
    value = fast_two_sum(hi, lo + fma(parts.k, LOG10_2[1], low))
    return Approximation(*value, cases=domain(x), exact=is_power_of_ten(x, value.hi))


def is_power_of_ten(x: Expr, logarithm: Expr) -> Expr:
    """Whether x = 10^n, n the integer next to the logarithm. 10^22 is the last power that is a binary64 number."""
    _, n = round_to_integer(clamped(logarithm, 0.0, 22.0))
    power = f64(1.0)
    for i in range(5):
        power = power * select(((n >> i) & 1).equals(0), f64(1.0), f64(10.0**2**i))
    return power.equals(x)


def log1p(x: Expr) -> Approximation:
    """log(1 + x), with relative accuracy near 0."""
    hi, lo = log1p_pair(Pair(x, f64(0.0)))
    return Approximation(hi, lo, cases=(*domain(x, -1.0), (x.equals(0.0), x)))


def log1p_pair(x: Pair) -> Pair:
    """Return log(1 + x) for x > -1. Where 1 + x needs no scaling, x itself is the fraction."""
    one, lost = two_sum(f64(1.0), x.hi)
    parts = split(one)
    scaled = Pair(parts.f, (lost + x.lo) * parts.unit)
    return add_exponent(parts.k, log_fraction(*choose(parts.k.equals(0.0), x, scaled)))


FUNCTIONS: Final = (
    Elementary(
        "log",
        1,
        log,
        0.65,
        "log(+-0) = -inf, log(x < 0) = NaN, log(1) = +0",
        "log(x)",
        "Tang 1990",
        quick.log,
        single.log,
    ),
    Elementary("log2", 1, log2, 0.7, "as log; exact at powers of 2", "log(x, 2)", "Tang 1990"),
    Elementary("log10", 1, log10, 0.7, "as log; exact at powers of 10", "log10(x)", "Tang 1990"),
    Elementary("log1p", 1, log1p, 0.7, "log1p(+-0) = +-0, log1p(-1) = -inf", "log1p(x)", "Tang 1990"),
)
