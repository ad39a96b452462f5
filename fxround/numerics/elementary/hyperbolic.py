"""tanh from exp(-2|x|) - 1.

What is true here. With N = (exp(-2|x|) - 1) 2^-k and w = 2^-k, tanh|x| = -N / (2 w + N): nothing cancels, N is good to
2^-56 relative, near 0 too, and the quotient of the two pairs is corrected by its remainder.

Why it is safe. |x| is clamped to 22, where 1 - tanh is below 2^-62.

    before   (exp(x) - exp(-x)) / (exp(x) + exp(-x))
    after    -expm1(-2|x|) / (2 + expm1(-2|x|))
"""

from __future__ import annotations

from fxround.numerics.elementary.approximation import TINY, Approximation, power_of_two
from fxround.numerics.elementary.exponential import is_infinite, reduced
from fxround.numerics.elementary.pairs import Pair, divide, f64, fast_two_sum, negated, with_sign_of
from fxround.numerics.scalar import Expr, absolute, select


def tanh(x: Expr) -> Approximation:
    """The hyperbolic tangent."""
    size = absolute(x)
    parts = reduced(select(size > 22.0, f64(22.0), size) * -2.0)
    numerator = parts.minus_one()
    head = fast_two_sum(power_of_two(1 - parts.k), numerator.hi)
    quotient = divide(negated(numerator), Pair(head.hi, head.lo + numerator.lo))
    hi, lo = with_sign_of(x, quotient)
    residue = (size < TINY, x * (x * x * -0.3))
    return Approximation(hi, lo, cases=((x.equals(0.0), x),), exact=is_infinite(x), residue=residue)
