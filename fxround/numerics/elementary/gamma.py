"""lgamma and digamma: Stirling's series beyond 14, the recurrence below, the reflection for negative arguments.

Everything is in pairs, good to 2^-88 absolutely (relatively, where a value is above 1). With p = |x|, w = p + 14 if p <
14 and p beyond, P = p (p + 1) ... (p + 13) or 1, and q = sin(pi p) / pi,

    lgamma(x)  = S(w) - log P                          S(w) = (w - 1/2) log w - w + log(2 pi)/2 + 1/(12 w) - ...
    lgamma(-p) = log(P / (p |q|)) - S(w)               DLMF 5.5.3
    digamma(x) = D(w) - 1/p - ... - 1/(p + 13)         D(w) = log w - 1/(2 w) - 1/(12 w^2) + ...
    digamma(-p) = digamma(p + 1) + cos(pi p) / q       DLMF 5.5.4

At the zeros of lgamma (1, 2, and two between negative integers) and of digamma, terms of up to 2^6 cancel. Neighbouring
binary32 numbers next to a zero have values 2^-22 or more apart, so that half of the 88 bits remain even at the nearest
of them. Binary64 numbers come as close as 2^-53: the positive zeros (1, 2 and digamma's at 1.46) have series of their
own there; next to a negative zero a binary64 argument's value is good to 2^-88 absolutely only. p - round(p) is exact,
so sin(pi p) and cos(pi p) need no reduction.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Final

from fxround.numerics.arithmetic.scalar import Expr, absolute, const, negate, rarely, select
from fxround.numerics.elementary.approximation import Approximation
from fxround.numerics.elementary.coefficients import EXPANDED
from fxround.numerics.elementary.function import Elementary
from fxround.numerics.elementary.modulo_pi import TWO_OVER_PI
from fxround.numerics.elementary.pairs import (
    Pair,
    add,
    choose,
    divide,
    f64,
    multiply,
    negated,
    scaled,
    two_product,
    two_sum,
)
from fxround.numerics.elementary.precise import pair_constant, pair_series, precise_log

SHIFT: Final = 14
PI: Final = Fraction(2 << 1280, TWO_OVER_PI)
HALF_LOG_2_PI: Final = (0.9189385332046728, -3.8782941580672414e-17)
ONE: Final = (1.0, 0.0)


def bernoulli(count: int) -> list[Fraction]:
    """Return the Bernoulli numbers B_0 ... B_count."""
    numbers = [Fraction(1)]
    for m in range(1, count + 1):
        total = sum(math.comb(m + 1, k) * b for k, b in enumerate(numbers))
        numbers.append(-Fraction(total) / (m + 1))
    return numbers


_TERMS: Final = 16


def _stirling(degree: int) -> list[Fraction]:
    """Return the coefficients of 1 / w^(2n - 1) in lgamma (degree 1) or of 1 / w^2n in log - digamma (degree 0)."""
    numbers = bernoulli(2 * _TERMS)
    return [numbers[2 * n] / (2 * n * (2 * n - 1) ** degree) for n in range(1, _TERMS + 1)]


def _reciprocal(a: Pair) -> Pair:
    return divide(pair_constant(ONE), a)


def _shifted(size: Expr, i: int) -> Pair:
    """Return size + i, exactly."""
    return two_sum(size, f64(float(i)))


def _sine(g: Expr) -> Pair:
    """Return sin(pi g) / pi to 2^-98 of it, |g| <= 1/2."""
    coefficients = [(-1) ** k * PI ** (2 * k) / math.factorial(2 * k + 1) for k in range(18)]
    return multiply(Pair(g, f64(0.0)), pair_series(two_product(g, g), coefficients, 9))


def _cosine(g: Expr) -> Pair:
    """Return cos(pi g) to 2^-98, |g| <= 1/2."""
    return pair_series(two_product(g, g), [(-1) ** k * PI ** (2 * k) / math.factorial(2 * k) for k in range(18)], 10)


def _fraction(size: Expr) -> Expr:
    """Return size minus the nearest integer; 0 from 2^52 on."""
    whole = (size + 2.0**52) - 2.0**52
    return select(size < 2.0**52, size - whole, 0.0)


def _expanded(name: str, x: Expr, total: Pair) -> Pair:
    """Return the value; within 2^-8 of a zero of the function from Taylor's series, to 2^-70 of it."""
    zero, *coefficients = EXPANDED[name]
    hi, lo = two_sum(x - zero[0], f64(-zero[1]))
    distance = Pair(hi, lo - zero[2])
    series = pair_series(distance, [sum(map(Fraction, parts), Fraction()) for parts in coefficients], 5)
    near, value = absolute(hi) < 2.0**-8, multiply(distance, series)
    return Pair(rarely(near, value.hi, total.hi), rarely(near, value.lo, total.lo))


def lgamma(x: Expr) -> Approximation:
    """log|Gamma(x)|; +inf at the poles."""
    size, negative = absolute(x), x < 0.0
    near, tiny = size < float(SHIFT), size < 2.0**-100
    w = choose(near, _shifted(size, SHIFT), Pair(size, f64(0.0)))
    product = Pair(size, f64(0.0))
    for i in range(1, SHIFT):
        product = multiply(product, _shifted(size, i))
    product = choose(near, product, pair_constant(ONE))
    g = _fraction(size)
    sine = _sine(select(g.equals(0.0), 0.25, absolute(g)))
    quotient = divide(product, multiply(Pair(size, f64(0.0)), sine))
    argument = choose(negative, quotient, product)
    # Below 2^-100, lgamma(x) = -log|x| to every bit that a pair has.
    argument = choose(tiny, Pair(size, f64(0.0)), argument)
    total, exponent = _stirling_sum(w, x.op != "widen")
    total = add(choose(tiny, pair_constant((0.0, 0.0)), total), negated(precise_log(argument)))
    total = choose(negative & ~tiny, negated(total), total)
    if x.op != "widen":
        for name in ("lgamma_one", "lgamma_two"):
            total = _expanded(name, x, total)
    pole = (negative & g.equals(0.0)) | size.equals(0.0)
    zero = x.equals(1.0) | x.equals(2.0)
    endless = pole | size.equals(math.inf)
    cases = ((zero, f64(0.0)), (endless, f64(math.inf)), (~x.equals(x), f64(math.nan)))
    return Approximation(*total, exponent, cases=cases)


def _stirling_sum(w: Pair, wide: bool) -> tuple[Pair, Expr | None]:
    """Return S(w), times 2^-64 where its exponent is 64 (only if ``wide``: S(w) may overflow binary64)."""
    logarithm, inverse = precise_log(w), _reciprocal(w)
    series = multiply(inverse, pair_series(multiply(inverse, inverse), _stirling(1), 4))
    rest = add(pair_constant(HALF_LOG_2_PI), series)
    exponent: Expr | None = None
    if wide:
        huge = w.hi > 2.0**900
        unit = select(huge, f64(2.0**-64), f64(1.0))
        w, rest, exponent = scaled(w, unit), scaled(rest, unit), select(huge, const("u64", 64), const("u64", 0))
        half = unit * -0.5
    else:
        half = f64(-0.5)
    product = multiply(add(w, Pair(half, f64(0.0))), logarithm)
    return add(add(product, negated(w)), rest), exponent


def digamma(x: Expr) -> Approximation:
    """The derivative of log Gamma: NaN at the negative integers, -inf at +0 and +inf at -0."""
    size, negative = absolute(x), x < 0.0
    near = size < float(SHIFT)
    w = choose(near, _shifted(size, SHIFT), Pair(size, f64(0.0)))
    inverse = _reciprocal(w)
    square = multiply(inverse, inverse)
    tail = add(scaled(inverse, 0.5), multiply(square, pair_series(square, _stirling(0), 5)))
    first = _reciprocal(Pair(select(size < 2.0**-1022, 1.0, size), f64(0.0)))
    terms = _reciprocal(_shifted(size, 1))
    for i in range(2, SHIFT):
        terms = add(terms, _reciprocal(_shifted(size, i)))
    # The recurrence subtracts 1/p for a positive x. digamma(p + 1) does not contain that term, so beyond 14 it has to
    # be added.
    nothing = pair_constant((0.0, 0.0))
    first = choose(negative, choose(near, nothing, negated(first)), choose(near, first, nothing))
    recurrence = choose(near, terms, nothing)
    total = add(add(precise_log(w), negated(tail)), negated(recurrence))
    g = _fraction(size)
    inside = select(g.equals(0.0), 0.25, g)
    turn = divide(_cosine(inside), _sine(inside))
    total = add(total, negated(first))
    total = choose(negative, add(turn, total), total)
    if x.op != "widen":
        total = _expanded("digamma", x, total)
    edge = select(size.equals(0.0), negate(1.0 / x), f64(math.nan))
    pole = (negative & g.equals(0.0)) | size.equals(0.0) | ~x.equals(x)
    subnormal = size < 2.0**-1022
    return Approximation(*total, cases=((subnormal, -1.0 / x), (x.equals(math.inf), x), (pole, edge)))


FUNCTIONS: Final = (
    Elementary(
        "lgamma",
        1,
        lgamma,
        0.501,
        "lgamma(1) = lgamma(2) = +0, +inf at the poles",
        "re(loggamma(x))",
        "DLMF 5.11.1",
        near_zeros=2.0**-88,
    ),
    Elementary(
        "digamma",
        1,
        digamma,
        0.501,
        "digamma(+-0) = -+inf, NaN at the other poles",
        "digamma(x)",
        "DLMF 5.11.2",
        near_zeros=2.0**-88,
    ),
)
