"""sigmoid and softplus from exp(-|x|).

E = exp(-|x|) <= 1 is a pair M times 2^k. sigmoid is 1 / (1 + E) or, for x < 0, E / (1 + E); softplus is max(x, 0) +
log(1 + E). Nothing cancels and nothing overflows, and a result far below 1 keeps its relative accuracy down to gradual
underflow, because 2^k is applied last. |x| is clamped to 800, where E has underflowed.
"""

from __future__ import annotations

import math
from typing import Final

from fxround.numerics.arithmetic.scalar import Expr, absolute, const, negate, select
from fxround.numerics.elementary import quick, single
from fxround.numerics.elementary.approximation import Approximation, power_of_two
from fxround.numerics.elementary.exponential import at_least, is_infinite, reduced
from fxround.numerics.elementary.function import Elementary
from fxround.numerics.elementary.logarithm import add_exponent, log_fraction
from fxround.numerics.elementary.pairs import Pair, choose, divide, f64, fast_two_sum, scaled, two_sum


def _decay(x: Expr) -> tuple[Pair, Expr, Pair]:
    """Return exp(-|x|) as pair M and exponent k, and as the pair E = 2^max(k, -300) M."""
    size = absolute(x)
    parts = reduced(negate(select(size > 800.0, f64(800.0), size)))
    pair = parts.exponential()
    return pair, parts.k, scaled(pair, power_of_two(at_least(parts.k, -300)))


def sigmoid(x: Expr) -> Approximation:
    """1 / (1 + exp(-x))."""
    pair, k, small = _decay(x)
    hi, lo = fast_two_sum(f64(1.0), small.hi)
    below = x < 0.0
    quotient = divide(choose(below, pair, Pair(f64(1.0), f64(0.0))), Pair(hi, lo + small.lo))
    return Approximation(*quotient, select(below, k, const("u64", 0)), exact=is_infinite(x))


def softplus(x: Expr) -> Approximation:
    """log(1 + exp(x))."""
    pair, k, small = _decay(x)
    far = (x < 0.0) & (small.hi < 2.0**-60)
    # 1 + E, or half of it: both lie within [sqrt(1/2), sqrt(2)), the domain of log_fraction.
    upper = small.hi > 0.4142
    shifted = fast_two_sum(f64(-0.5), small.hi * 0.5)
    f = choose(upper, Pair(shifted.hi, shifted.lo + small.lo * 0.5), small)
    logarithm = add_exponent(select(upper, f64(1.0), f64(0.0)), log_fraction(f.hi, f.lo))
    hi, lo = two_sum(select(x > 0.0, x, 0.0), logarithm.hi)
    total = choose(far, pair, Pair(hi, lo + logarithm.lo))
    exponent = select(far, k, const("u64", 0))
    return Approximation(*total, exponent, cases=((x.equals(math.inf), x),), exact=is_infinite(x))


FUNCTIONS: Final = (
    Elementary(
        "sigmoid",
        1,
        sigmoid,
        0.65,
        "sigmoid(-inf) = +0, sigmoid(inf) = 1",
        "1/(1+exp(-x))",
        "from exp",
        quick.sigmoid,
        single.sigmoid,
    ),
    Elementary("softplus", 1, softplus, 0.7, "softplus(-inf) = +0", "softplus(x)", "from exp and log1p"),
)
