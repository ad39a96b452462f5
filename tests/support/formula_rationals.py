"""The composite operators of docs/numerics.md, section 5, written again over the rational arithmetic of ``rationals``.

``Arithmetic`` holds the roundings of a policy: ``value`` of every operation, ``step`` of every addition of a sum and of
every multiply-add. Elementary functions are MPFR's, with so many bits that one rounding follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import gmpy2
import rationals

from fxround.numerics.modes import Rounding
from fxround.numerics.specification.exact import round_float

Row = list[float]
BITS: Final = 600
_BINARY32: Final = Rounding.parse("binary32")


def _softplus(x: Any) -> Any:
    # Beyond 10000 every format sees the same, and exp would leave MPFR's range.
    return gmpy2.log1p(gmpy2.exp(x)) if x < 0 else x + gmpy2.log1p(gmpy2.exp(-min(x, 10000)))


def _sigmoid(x: Any) -> Any:
    return 1 - 1 / (1 + gmpy2.exp(min(x, 10000))) if x > 0 else 1 / (1 + gmpy2.exp(-x))


# What MPFR computes, and the exact results, that no number of bits would show to be exact.
FUNCTIONS: Final[dict[str, tuple[Callable[[Any], Any], dict[float, float]]]] = {
    "exp": (gmpy2.exp, {0.0: 1.0, math.inf: math.inf, -math.inf: 0.0}),
    "expm1": (gmpy2.expm1, {0.0: 0.0, math.inf: math.inf, -math.inf: -1.0}),
    "log": (gmpy2.log, {0.0: -math.inf, 1.0: 0.0, math.inf: math.inf}),
    "log1p": (gmpy2.log1p, {0.0: 0.0, -1.0: -math.inf, math.inf: math.inf}),
    "tanh": (gmpy2.tanh, {0.0: 0.0, math.inf: 1.0, -math.inf: -1.0}),
    "erf": (gmpy2.erf, {0.0: 0.0, math.inf: 1.0, -math.inf: -1.0}),
    "sigmoid": (_sigmoid, {0.0: 0.5, math.inf: 1.0, -math.inf: 0.0}),
    "softplus": (_softplus, {math.inf: math.inf, -math.inf: 0.0}),
    "rsqrt": (gmpy2.rec_sqrt, {0.0: math.inf, math.inf: 0.0}),
}


def _function(name: str, x: float, rounding: Rounding, near: Fraction | None) -> float:
    compute, exact = FUNCTIONS[name]
    outside = (name in ("log", "rsqrt") and x < 0) or (name == "log1p" and x < -1)
    if math.isnan(x) or outside:
        return math.nan
    if x in exact:
        # An odd function keeps the sign of a zero, and rsqrt of one has it.
        odd = x == 0 and name in ("expm1", "log1p", "tanh", "erf", "rsqrt")
        return round_float(math.copysign(exact[x], x) if odd else exact[x], rounding)
    found = _exactly(lambda: compute(gmpy2.mpfr(x)))
    return _decided(found, x < 0 and name in ("expm1", "log1p", "tanh", "erf"), f"{name}({x.hex()})", rounding, near)


def _exactly(compute: Callable[[], Any]) -> Any:
    with gmpy2.context(precision=BITS, emin=gmpy2.get_emin_min(), emax=gmpy2.get_emax_max()):
        return compute()


def _decided(found: Any, negative_zero: bool, what: str, rounding: Rounding, near: Fraction | None) -> float:
    """R of what MPFR found, which is good to nearly BITS bits; Undecided within ``near`` of a boundary.

    near: None for an operand of 32 bits, whose result is exact or that far from a boundary, unless it tends to one;
    then MPFR's last rounding says on which side it is.
    """
    sign = -1 if found < 0 or (found == 0 and negative_zero) else 1
    if abs(found) > gmpy2.mpfr(2) ** 2000:
        return rationals.rounded(sign * Fraction(2) ** 2000, False, rounding)
    if abs(found) < gmpy2.mpfr(2) ** -2000:
        return rationals.rounded(sign * Fraction(1, 2**2000), False, rounding)
    numerator, denominator = found.as_integer_ratio()
    value = Fraction(int(numerator), int(denominator))
    if near is None:
        beside = value - abs(value) * Fraction((found.rc > 0) - (found.rc < 0), 2 ** (BITS - 10))
        return rationals.rounded(beside, False, rounding)
    low, high = (rationals.rounded(value * (1 + part), False, rounding) for part in (-near, near))
    if low != high:
        raise Undecided(f"{what} lies too near a boundary of {rounding}")
    return low


_NEAR: Final = Fraction(1, 2**50)


class Undecided(ValueError):
    """An elementary function of a float64 operand next to a boundary: docs/numerics.md lets it go to either side."""


@dataclass(frozen=True)
class Arithmetic:
    """Operations that are each rounded once."""

    value: Rounding
    step: Rounding
    # Over binary32 operands: chains have their range, and functions are correctly rounded.
    short: bool = False

    @property
    def chain(self) -> Rounding:
        return rationals.in_chain(self.step) if self.short else self.step

    def __getattr__(self, name: str) -> Callable[..., float]:
        if name in rationals.OPERATORS:
            return lambda *xs: rationals.OPERATORS[name][1](*xs, self.value)
        if name in FUNCTIONS:
            near = None if self.short else _NEAR
            return lambda x: _function(name, x, self.value, near)
        raise AttributeError(name)

    def pow(self, x: float, c: float) -> float:
        """x^c of x >= 0 and c > 0. Exact powers are left open."""
        if math.isnan(x) or x in (0.0, 1.0, math.inf):
            return round_float(abs(x), self.value)
        found = _exactly(lambda: gmpy2.mpfr(x) ** gmpy2.mpfr(c))
        return _decided(found, False, f"{x.hex()} ** {c}", self.value, _NEAR)

    def total(self, x: Sequence[float]) -> float:
        return round_float(rationals.lanes(list(x), 16, self.chain), self.value)

    def dot(self, a: Sequence[float], b: Sequence[float]) -> float:
        return rationals.contraction(a, b, self.chain, self.value)

    def added(self, x: Sequence[float], begin: float = 0.0) -> float:
        """The result of a scatter: the first value, to which the others are added in order."""
        acc = rationals.sequential(x, self.chain, begin)[-1] if len(x) else begin
        return round_float(round_float(acc, _BINARY32) if self.short else acc, self.value)

    def kept(self, x: float) -> float:
        """The result of a selection or a change of sign, rounded if a rule of the policy matches it."""
        return round_float(x, self.value)


def largest(x: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, x)) else max(x)


def mean(o: Arithmetic, x: Row) -> float:
    return o.div(o.total(x), float(len(x)))


def centered(o: Arithmetic, x: Row) -> tuple[Row, float]:
    """The differences from the mean, and the sum of their squares."""
    center = mean(o, x)
    d = [o.sub(v, center) for v in x]
    return d, o.total([o.mul(v, v) for v in d])


def variance(o: Arithmetic, x: Row) -> float:
    return o.div(centered(o, x)[1], float(len(x) - 1))


def softmax(o: Arithmetic, x: Row) -> Row:
    top = o.kept(largest(x))
    e = [o.exp(o.sub(v, top)) for v in x]
    s = o.total(e)
    return [o.div(v, s) for v in e]


def log_softmax(o: Arithmetic, x: Row) -> Row:
    top = o.kept(largest(x))
    s = [o.sub(v, top) for v in x]
    log = o.log(o.total([o.exp(v) for v in s]))
    return [o.sub(v, log) for v in s]


def logsumexp(o: Arithmetic, x: Row) -> float:
    top = o.kept(largest(x))
    top = 0.0 if math.isinf(top) else top
    return o.add(o.log(o.total([o.exp(o.sub(v, top)) for v in x])), top)


def layer_norm(o: Arithmetic, x: Row, w: Row, b: Row) -> Row:
    d, squares = centered(o, x)
    r = o.rsqrt(o.add(o.div(squares, float(len(x))), 1e-5))
    return [o.add(o.mul(o.mul(v, r), p), q) for v, p, q in zip(d, w, b, strict=True)]


def batch_norm(o: Arithmetic, x: Row, m: float, v: float, w: float, b: float) -> Row:
    scale = o.mul(o.rsqrt(o.add(v, 1e-5)), w)
    return [o.add(o.mul(o.sub(each, m), scale), b) for each in x]


def norm(o: Arithmetic, x: Row, order: float) -> float:
    if order == 2:
        return o.sqrt(o.total([o.mul(v, v) for v in x]))
    return o.total([o.kept(abs(v)) for v in x]) if order == 1 else largest([o.kept(abs(v)) for v in x])


def lerp(o: Arithmetic, x: float, y: float, w: float) -> float:
    d = o.sub(y, x)
    return o.add(x, o.mul(d, w)) if abs(w) < 0.5 else o.sub(y, o.mul(d, 1 - w))


def gelu(o: Arithmetic, x: float) -> float:
    return o.mul(o.mul(x, 0.5), o.add(o.erf(o.mul(x, math.sqrt(0.5))), 1.0))


def gelu_tanh(o: Arithmetic, x: float) -> float:
    inner = o.mul(o.add(x, o.mul(o.mul(o.mul(x, x), x), 0.044715)), math.sqrt(2 / math.pi))
    return o.mul(o.mul(x, 0.5), o.add(o.tanh(inner), 1.0))


def clamped(x: float, low: float, high: float) -> float:
    return x if math.isnan(x) else min(max(x, low), high)


def huber(o: Arithmetic, x: float, t: float, c: float) -> float:
    d = o.sub(x, t)
    if abs(d) <= c:
        return o.mul(o.mul(d, d), 0.5)
    return o.mul(o.sub(abs(d), 0.5 * c), c)


def smooth_l1(o: Arithmetic, x: float, t: float, b: float) -> float:
    d = o.sub(x, t)
    return o.div(o.mul(o.mul(d, d), 0.5), b) if abs(d) < b else o.sub(abs(d), 0.5 * b)


def bce_with_logits(o: Arithmetic, x: float, t: float) -> float:
    return o.add(o.mul(o.sub(1.0, t), x), o.softplus(o.kept(-x)))


def silu_backward(o: Arithmetic, g: float, x: float) -> float:
    s = o.sigmoid(x)
    return o.mul(g, o.mul(s, o.add(o.mul(x, o.sub(1.0, s)), 1.0)))


def softmax_backward(o: Arithmetic, g: Row, y: Row) -> Row:
    s = o.total([o.mul(a, b) for a, b in zip(g, y, strict=True)])
    return [o.mul(b, o.sub(a, s)) for a, b in zip(g, y, strict=True)]


def softshrink(o: Arithmetic, x: float, c: float) -> float:
    if o.kept(abs(x)) > c:
        return o.sub(x, o.mul(math.copysign(1.0, x), c))
    return o.mul(x, 0.0)
