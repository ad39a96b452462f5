"""The elementary functions in pairs: what binary64 loses of them, for the modes that draw in binary64 itself.

A mode that draws needs the lost fraction of an ulp, hence some 30 bits more than a function's ordinary definition has.
Each definition here is the ordinary one with every step in pairs, which lose a few units of 2^-104, and with Taylor's
series whose first terms are pairs and whose others, below 2^-40 of the sum, are binary64 numbers. The bounds below are
of the value's relative error; an ulp is at least 2^-53 of a value, so that 2^-84 of it is 2^-31 of an ulp. A test
measures every bound against MPFR.

The argument of an exponential is kept to 2^-96 absolutely: k log 2 is subtracted in parts (``precise``), from numbers
below 2^10. ``precise_log`` is good to 2^-93 of max(1, |log x|), and of log x where k = 0; elsewhere |log x| > 0.34.
A quotient is corrected by its exact remainder, 2^-103. Where a result is a difference, its terms differ by a factor of
1.4 at least (2^k (1 + q) - 1 with k = 1 or -1 is the nearest to a cancellation), which loses three bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from math import factorial
from types import MappingProxyType
from typing import Final

from fxround.numerics.arithmetic.scalar import Expr, absolute, const, negate, select
from fxround.numerics.elementary.approximation import (
    Approximation,
    clamped,
    power_of_two,
    round_to_integer,
)
from fxround.numerics.elementary.coefficients import ERFC_PAIRS
from fxround.numerics.elementary.error_function import HALF_SQRT_PI, NEAR, TWO_OVER_SQRT_PI
from fxround.numerics.elementary.error_function import erfinv as short_erfinv
from fxround.numerics.elementary.exponential import LN2_FULL, at_least, at_most, is_infinite
from fxround.numerics.elementary.hyperbolic import square_plus
from fxround.numerics.elementary.inverse_trigonometric import QUARTER_PI, TAN_PI_8, comparable
from fxround.numerics.elementary.logarithm import LOG2_E, LOG10_2, LOG10_E, domain, is_power_of_ten, split
from fxround.numerics.elementary.modulo_pi import EXTENDED64, quarter_turns
from fxround.numerics.elementary.pairs import (
    Pair,
    add,
    choose,
    divide,
    f64,
    fast_two_sum,
    multiply,
    negated,
    scaled,
    square_root,
    two_product,
    two_sum,
    with_sign_of,
)
from fxround.numerics.elementary.power import edges, sign_of_power
from fxround.numerics.elementary.precise import (
    add_logarithm_of_power,
    exponential_series,
    log_of_fraction,
    pair_constant,
    pair_series,
    precise_exp,
    precise_expm1,
    precise_log,
)
from fxround.numerics.elementary.roots import cbrt, rsqrt
from fxround.numerics.elementary.trigonometric import is_odd, not_finite, sign_of_half_turn

ONE: Final = (1.0, 0.0)
LOG10_2_REST: Final = (1.42050232272661e-13, 2.8316642130894684e-31)
"""log10(2) minus the 42 bits of ``LOG10_2``, as a pair."""
FAR: Final = 2.0**120
"""Beyond, asinh x, acosh x and log(1 + 2 x) are log(2 x) to 2^-120."""
ERFC_CENTRE: Final = 0.15
ERFC_HEADS: Final = 25

Definition = Callable[..., Approximation]


def _single(x: Expr | float) -> Pair:
    return Pair(x if isinstance(x, Expr) else f64(x), f64(0.0))


def _inexact(x: Expr, value: Pair, sign: Expr, reach: float = 2.0**-300) -> Pair:
    """Return the value with a low part that is not zero, where it underflowed: for 2^-960 < |x| < reach.

    sign: a number with the low part's sign. Results below 2^-960 count as exact, as those of arithmetic do.
    """
    size = absolute(x)
    tiny = (size > 2.0**-960) & (size < reach) & value.lo.equals(0.0)
    return Pair(value.hi, select(tiny, with_sign_of(sign, _single(2.0**-1074)).hi, value.lo))


# ---- exponentials and logarithms ----


def _minus_one(x: Pair) -> tuple[Pair, Expr]:
    """Return m and k with exp(x) - 1 = 2^k m; any k above 200 counts as 200 there."""
    q, k = precise_expm1(x)
    return add(two_sum(f64(1.0), negate(power_of_two(0 - at_most(k, 200)))), q), k


def exp(x: Expr) -> Approximation:
    """exp(x)."""
    value, k = precise_exp(_single(clamped(x, -800.0, 800.0)))
    return Approximation(*value, k, exact=is_infinite(x))


def exp2(x: Expr) -> Approximation:
    """2^x."""
    clipped = clamped(x, -1200.0, 1200.0)
    k, k_integer = round_to_integer(clipped)
    q = exponential_series(multiply(_single(clipped - k), pair_constant(LN2_FULL)))
    return Approximation(*add(pair_constant(ONE), q), k_integer, exact=is_infinite(x))


def expm1(x: Expr) -> Approximation:
    """exp(x) - 1. Below -60 it exceeds -1 by less than 2^-86."""
    value, k = _minus_one(_single(clamped(x, -60.0, 800.0)))
    value = _inexact(x, value, f64(1.0))
    return Approximation(*value, k, cases=((x.equals(0.0), x),), exact=is_infinite(x))


def log(x: Expr) -> Approximation:
    """The natural logarithm."""
    return Approximation(*precise_log(_single(x)), cases=domain(x))


def log2(x: Expr) -> Approximation:
    """The logarithm to base 2."""
    parts = split(x)
    fraction = multiply(log_of_fraction(_single(parts.f)), pair_constant(LOG2_E))
    return Approximation(*add(_single(parts.k), fraction), cases=domain(x))


def log10(x: Expr) -> Approximation:
    """The logarithm to base 10."""
    parts = split(x)
    fraction = multiply(log_of_fraction(_single(parts.f)), pair_constant(LOG10_E))
    rest = add(multiply(_single(parts.k), pair_constant(LOG10_2_REST)), fraction)
    value = add(_single(parts.k * LOG10_2[0]), rest)
    return Approximation(*value, cases=domain(x), exact=is_power_of_ten(x, value.hi))


def _log1p(x: Pair) -> Pair:
    """Return log(1 + x), x > -1, relatively accurate near 0."""
    one, lost = two_sum(f64(1.0), x.hi)
    parts = split(one)
    f = choose(parts.k.equals(0.0), x, two_sum(parts.f, (lost + x.lo) * parts.unit))
    return add_logarithm_of_power(parts.k, log_of_fraction(f))


def log1p(x: Expr) -> Approximation:
    """log(1 + x)."""
    value = _inexact(x, _log1p(_single(x)), f64(-1.0))
    return Approximation(*value, cases=(*domain(x, -1.0), (x.equals(0.0), x)))


def _decay(x: Expr) -> tuple[Pair, Expr, Pair]:
    """Return exp(-|x|) as pair and exponent k, and as the pair 2^max(k, -300) times that pair."""
    size = absolute(x)
    pair, k = precise_exp(_single(negate(select(size > 800.0, f64(800.0), size))))
    return pair, k, scaled(pair, power_of_two(at_least(k, -300)))


def sigmoid(x: Expr) -> Approximation:
    """1 / (1 + exp(-x))."""
    pair, k, small = _decay(x)
    below = x < 0.0
    quotient = divide(choose(below, pair, pair_constant(ONE)), add(pair_constant(ONE), small))
    return Approximation(*quotient, select(below, k, const("u64", 0)), exact=is_infinite(x))


def softplus(x: Expr) -> Approximation:
    """log(1 + exp(x)), which is exp(x) (1 - exp(x) / 2) where exp(x) < 2^-100."""
    pair, k, small = _decay(x)
    far = (x < 0.0) & (small.hi < 2.0**-100)
    total = choose(far, pair, add(_single(select(x > 0.0, x, 0.0)), _log1p(small)))
    exponent = select(far, k, const("u64", 0))
    return Approximation(*total, exponent, cases=((x.equals(math.inf), x),), exact=is_infinite(x))


# ---- hyperbolic functions and their inverses ----


def _hyperbolic(x: Expr) -> tuple[Pair, Pair, Pair, Expr]:
    """Return q, m = 1 + q and 2^-2k / m with exp(|x|) = 2^k m, and k."""
    size = absolute(x)
    q, k = precise_expm1(_single(select(size > 720.0, 720.0, size)))
    m = add(pair_constant(ONE), q)
    return q, m, scaled(divide(pair_constant(ONE), m), power_of_two(0 - at_most(k + k, 300))), k


def sinh(x: Expr) -> Approximation:
    """The hyperbolic sine: (m - 2^-2k / m) 2^(k-1), where k = 0: (q + q / m) / 2."""
    q, m, inverse, k = _hyperbolic(x)
    value = choose(k.equals(0), add(q, divide(q, m)), add(m, negated(inverse)))
    value = _inexact(x, with_sign_of(x, value), x)
    return Approximation(*value, k - 1, cases=((x.equals(0.0), x),), exact=is_infinite(x))


def cosh(x: Expr) -> Approximation:
    """The hyperbolic cosine."""
    _, m, inverse, k = _hyperbolic(x)
    value = _inexact(x, add(m, inverse), f64(1.0), 2.0**-500)
    return Approximation(*value, k - 1, exact=is_infinite(x))


def tanh(x: Expr) -> Approximation:
    """The hyperbolic tangent. Beyond 60 it differs from 1 by less than 2^-172."""
    size = absolute(x)
    numerator, k = _minus_one(_single(select(size > 60.0, f64(60.0), size) * -2.0))
    quotient = divide(negated(numerator), add(_single(power_of_two(1 - k)), numerator))
    value = _inexact(x, with_sign_of(x, quotient), negate(x))
    return Approximation(*value, cases=((x.equals(0.0), x),), exact=is_infinite(x))


def _doubled(large: Expr, size: Expr, f: Pair) -> Pair:
    """Return log(1 + f), or log(2 size) where ``large``."""
    value = _log1p(choose(large, _single(size), f))
    return choose(large, add(value, pair_constant(LN2_FULL)), value)


def asinh(x: Expr) -> Approximation:
    """The inverse hyperbolic sine: log(1 + f), f = |x| + x^2 / (1 + sqrt(1 + x^2))."""
    size = absolute(x)
    large = size > FAR
    a = select(large, f64(1.0), size)
    root = add(pair_constant(ONE), square_root(square_plus(a, 1.0)))
    value = with_sign_of(x, _doubled(large, size, add(_single(a), divide(two_product(a, a), root))))
    value = _inexact(x, value, negate(x))
    return Approximation(*value, cases=((x.equals(0.0) | ~(size < math.inf), x),))


def acosh(x: Expr) -> Approximation:
    """The inverse hyperbolic cosine: log(1 + f), f = (x - 1) + sqrt(x^2 - 1)."""
    large = x > FAR
    a = select(large, f64(1.0), x)
    value = _doubled(large, x, add(square_root(square_plus(a, -1.0)), two_sum(a, f64(-1.0))))
    outside = select(x < 1.0, math.nan, x)
    return Approximation(*value, cases=((~((x >= 1.0) & (x < math.inf)), outside),))


def atanh(x: Expr) -> Approximation:
    """The inverse hyperbolic tangent: log(1 + 2 |x| / (1 - |x|)) / 2."""
    size = absolute(x)
    a = select(size < 1.0, size, 0.5)
    value = scaled(_log1p(divide(_single(a + a), two_sum(f64(1.0), negate(a)))), 0.5)
    value = _inexact(x, with_sign_of(x, value), x)
    pole = with_sign_of(x, _single(math.inf)).hi
    return Approximation(*value, cases=((x.equals(0.0), x), (size.equals(1.0), pole), (~(size <= 1.0), f64(math.nan))))


# ---- trigonometric functions and their inverses ----


def _sine(r: Pair) -> Pair:
    """Return sin(r), |r| <= pi/4."""
    return multiply(r, pair_series(multiply(r, r), [Fraction((-1) ** n, factorial(2 * n + 1)) for n in range(15)], 8))


def _cosine(r: Pair) -> Pair:
    """Return cos(r), |r| <= pi/4."""
    return pair_series(multiply(r, r), [Fraction((-1) ** n, factorial(2 * n)) for n in range(16)], 9)


def _turned(x: Expr, quarters: int) -> Pair:
    quadrant, r = quarter_turns(x, EXTENDED64)
    turned = quadrant + quarters
    return with_sign_of(sign_of_half_turn(turned), choose(is_odd(turned), _cosine(r), _sine(r)))


def sin(x: Expr) -> Approximation:
    """The sine."""
    value = _inexact(x, with_sign_of(x, _turned(x, 0)), negate(x))
    return Approximation(*value, cases=(*not_finite(x), (x.equals(0.0), x)))


def cos(x: Expr) -> Approximation:
    """The cosine."""
    return Approximation(*_inexact(x, _turned(x, 1), f64(-1.0), 2.0**-500), cases=not_finite(x))


def tan(x: Expr) -> Approximation:
    """The tangent."""
    quadrant, r = quarter_turns(x, EXTENDED64)
    sine, cosine = _sine(r), _cosine(r)
    odd = is_odd(quadrant)
    value = with_sign_of(x, divide(choose(odd, negated(cosine), sine), choose(odd, sine, cosine)))
    return Approximation(*_inexact(x, value, x), cases=(*not_finite(x), (x.equals(0.0), x)))


def _angle(y: Pair, x: Pair, left: Expr) -> Pair:
    """Return the angle of (x, y) for x, y >= 0 that are not both 0; pi minus it where ``left``."""
    steep = y.hi > x.hi
    small, large = choose(steep, x, y), choose(steep, y, x)
    bent = small.hi > large.hi * TAN_PI_8
    t = divide(choose(bent, add(small, negated(large)), small), choose(bent, add(large, small), large))
    series = pair_series(multiply(t, t), [Fraction((-1) ** n, 2 * n + 1) for n in range(40)], 18)
    value = multiply(t, series)
    eighths = select(bent, f64(1.0), f64(0.0))
    eighths = select(steep, 2.0 - eighths, eighths)
    eighths = select(left, 4.0 - eighths, eighths)
    base = multiply(_single(eighths), pair_constant(QUARTER_PI))
    return add(base, choose(steep ^ left, negated(value), value))


def _other_leg(size: Expr) -> Pair:
    """Return sqrt(1 - size^2); NaN beyond 1."""
    return square_root(multiply(two_sum(f64(1.0), negate(size)), two_sum(f64(1.0), size)))


def asin(x: Expr) -> Approximation:
    """The arc sine."""
    size = absolute(x)
    value = _angle(_single(size), _other_leg(size), const("bool", 0))
    return Approximation(*_inexact(x, with_sign_of(x, value), x), cases=((x.equals(0.0), x),))


def acos(x: Expr) -> Approximation:
    """The arc cosine."""
    size = absolute(x)
    return Approximation(*_angle(_other_leg(size), _single(size), x < 0.0))


def atan(x: Expr) -> Approximation:
    """The arc tangent."""
    size = absolute(x)
    clipped = select(size > 2.0**200, 2.0**200, size)
    value = with_sign_of(x, _angle(_single(clipped), _single(1.0), const("bool", 0)))
    return Approximation(*_inexact(x, value, negate(x)), cases=((x.equals(0.0), x),))


def atan2(y: Expr, x: Expr) -> Approximation:
    """The angle of the point (x, y)."""
    left = with_sign_of(x, _single(1.0)).hi < 0.0
    a, b, exponent = comparable(y, x)
    value = with_sign_of(y, _angle(_single(a), _single(b), left))
    if exponent is not None:
        exponent = select(left, const("u64", 0), exponent)
    unknown = ~y.equals(y) | ~x.equals(x)
    return Approximation(*value, exponent, cases=((unknown, math.nan),))


# ---- the error function ----


def _erf_near(x: Expr) -> Pair:
    """Return erf(x), |x| <= 3/4."""
    series = [Fraction((-1) ** n, factorial(n) * (2 * n + 1)) for n in range(26)]
    value = multiply(_single(x), pair_series(two_product(x, x), series, 13))
    return multiply(value, pair_constant(TWO_OVER_SQRT_PI))


def _erfc_far(size: Expr) -> tuple[Pair, Expr]:
    """Return erfc(size) as a pair and an exponent, 3/4 <= size <= 27.5: as ``error_function``."""
    u = divide(pair_constant(ONE), two_sum(size, f64(3.0)))
    coefficients = [Fraction(hi) + Fraction(lo) for hi, lo in ERFC_PAIRS]
    curve = pair_series(add(u, pair_constant((-ERFC_CENTRE, 0.0))), coefficients, ERFC_HEADS)
    decay, k = precise_exp(negated(two_product(size, size)))
    return multiply(decay, multiply(u, curve)), k


def erf(x: Expr) -> Approximation:
    """The error function. Beyond 10 it differs from 1 by less than 2^-147."""
    size = absolute(x)
    near = size < NEAR
    tail, k = _erfc_far(select(near, 1.0, select(size > 10.0, 10.0, size)))
    far = add(pair_constant(ONE), negated(scaled(tail, power_of_two(k))))
    total = choose(near, _erf_near(select(near, size, 0.5)), far)
    return Approximation(*with_sign_of(x, total), cases=((x.equals(0.0), x),), exact=is_infinite(x))


def erfc(x: Expr) -> Approximation:
    """1 - erf(x)."""
    size = absolute(x)
    near, upper = size < NEAR, x >= NEAR
    tail, k = _erfc_far(select(near, 1.0, select(size > 27.5, 27.5, size)))
    part = choose(near, _erf_near(select(near, x, 0.5)), scaled(tail, power_of_two(at_least(k, -300))))
    beyond = add(_single(select(near, f64(1.0), f64(2.0))), negated(part))
    total = choose(upper, tail, beyond)
    return Approximation(*total, select(upper, k, const("u64", 0)), exact=is_infinite(x))


def erfinv(x: Expr) -> Approximation:
    """The inverse of erf, by a step of Newton's method from a binary64 value y, which is off by some 2^-52 of it.

    The step leaves y^2 2^-104 of the value; sqrt(pi)/2 x, where |x| < 2^-60, leaves 2^-121.
    """
    size = absolute(x)
    inside = select(size < 1.0, size, 0.5)
    short = short_erfinv(inside)
    y = short.hi + short.lo
    near = y < NEAR
    tail, k = _erfc_far(select(near, 1.0, y))
    above = add(_single(1.0 - inside), negated(scaled(tail, power_of_two(k))))
    excess = choose(near, add(_erf_near(select(near, y, 0.5)), _single(negate(inside))), above)
    decay, exponent = precise_exp(negated(two_product(y, y)))
    slope = decay.hi * power_of_two(exponent) * TWO_OVER_SQRT_PI[0]
    newton = add(_single(y), _single(negate((excess.hi + excess.lo) / slope)))
    value = choose(size < 2.0**-60, multiply(_single(size), pair_constant(HALF_SQRT_PI)), newton)
    edge = select(size.equals(1.0), with_sign_of(x, _single(math.inf)).hi, math.nan)
    return Approximation(*with_sign_of(x, value), cases=((x.equals(0.0), x), (~(size < 1.0), edge)))


# ---- powers and roots ----


def power(a: Expr, b: Expr) -> Approximation:
    """a to the power b.

    Exact results and midpoints are off by 2^-97 at most, so that what is lost is rounded to a multiple of 2^-86 of the
    value, unless that is next to 1, where only a = 1 and b = 0 are exact.
    """
    size, exponent = absolute(a), absolute(b)
    argument = multiply(_single(b), precise_log(_single(size)))
    low = select(absolute(argument.hi) < 800.0, argument.lo, 0.0)
    value, k = precise_exp(Pair(clamped(argument.hi, -800.0, 800.0), low))
    value = fast_two_sum(value.hi, value.lo)
    near_one = absolute(argument.hi) < 2.0**-54
    shifter = value.hi * (1.5 * 2.0**-33)
    lost = select(near_one, value.lo, (value.lo + shifter) - shifter)
    integer, sign = sign_of_power(a, exponent)
    return Approximation(*with_sign_of(sign, Pair(value.hi, lost)), k, cases=edges(a, b, integer, sign))


def _with_less_noise(definition: Definition) -> Definition:
    """Return a definition of which nothing counts as lost below 2^-86 of the value, in place of 2^-70."""
    return lambda x: replace(definition(x), noise=2.0**-86)


EXTENDED: Final[Mapping[str, Definition]] = MappingProxyType(
    {
        definition.__name__: definition
        for definition in (
            *(exp, exp2, expm1, log, log2, log10, log1p, sigmoid, softplus, sinh, cosh, tanh, asinh, acosh, atanh),
            *(sin, cos, tan, asin, acos, atan, atan2, erf, erfc, erfinv),
        )
    }
    | {"pow": power, "cbrt": _with_less_noise(cbrt), "rsqrt": _with_less_noise(rsqrt)}
)
"""The definition in pairs of each function whose ordinary definition is not exact enough."""
