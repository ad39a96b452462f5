"""The results that fxround must return, in rational arithmetic: the reference of test_whole_range.py.

Nothing here is shared with fxround but the rows of formats and modes, through ``numerics.specification.exact``, the
specification of one rounding. A value is a float; infinities, NaNs and the signs of zeros follow IEEE 754-2019, 6 and
7.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fxround.numerics.formats import FORMATS
from fxround.numerics.modes import Rounding
from fxround.numerics.specification.exact import floor_log2, round_exact, round_float

NAN: Final = math.nan
Array = npt.NDArray[Any]
Place = tuple[int, ...]
Contraction = Callable[[Sequence[float], Sequence[float]], float]


def sign(x: float) -> float:
    return math.copysign(1.0, x)


def rounded(value: Fraction, negative_zero: bool, rounding: Rounding, random: int = 0) -> float:
    """R of a rational; ``negative_zero``: the sign of a zero. random: 32 random bits."""
    return round_exact(value, value < 0 or (value == 0 and negative_zero), rounding, random)


def in_chain(rounding: Rounding) -> Rounding:
    """docs/numerics.md, section 3, over operands of at most 32 bits: what has binary32's exponents has binary64's in a
    chain, but the hardware's own."""
    fmt, like = rounding.format, FORMATS["binary32"]
    if str(rounding) == "binary32/nearest_even/inf" or rounding.overflow != "inf":
        return rounding
    if (fmt.emin, fmt.emax, fmt.subnormals) != (like.emin, like.emax, True):
        return rounding
    return Rounding(fmt.with_range_of(FORMATS["binary64"]), rounding.mode, "inf")


def is_down(rounding: Rounding) -> bool:
    return rounding.mode.name == "toward_negative"


def fma(a: float, b: float, c: float, rounding: Rounding, chain: bool = False, random: int = 0) -> float:
    """R(a * b + c); in a chain an exact zero of unlike zeros, or a cancellation, is +0 in every mode."""
    if any(map(math.isnan, (a, b, c))) or (math.isinf(a) and b == 0) or (math.isinf(b) and a == 0):
        return NAN
    if math.isinf(a) or math.isinf(b):
        infinite = math.inf * sign(a) * sign(b)
        return NAN if math.isinf(c) and c != infinite else round_float(infinite, rounding)
    if math.isinf(c):
        return round_float(c, rounding)
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    product, addend = sign(a) * sign(b), sign(c)
    alike = Fraction(a) * Fraction(b) == 0 and c == 0 and product == addend
    return rounded(exact, product < 0 if alike else is_down(rounding) and not chain, rounding, random)


def add(a: float, b: float, rounding: Rounding, chain: bool = False) -> float:
    return fma(a, 1.0, b, rounding, chain)


def sub(a: float, b: float, rounding: Rounding) -> float:
    return add(a, -b, rounding)


def mul(a: float, b: float, rounding: Rounding) -> float:
    if any(map(math.isnan, (a, b))) or (math.isinf(a) and b == 0) or (math.isinf(b) and a == 0):
        return NAN
    if math.isinf(a) or math.isinf(b):
        return round_float(math.inf * sign(a) * sign(b), rounding)
    return rounded(Fraction(a) * Fraction(b), sign(a) * sign(b) < 0, rounding)


def div(a: float, b: float, rounding: Rounding) -> float:
    if any(map(math.isnan, (a, b))) or (math.isinf(a) and math.isinf(b)) or (a == 0 and b == 0):
        return NAN
    if math.isinf(a) or b == 0:
        return round_float(math.inf * sign(a) * sign(b), rounding)
    if math.isinf(b):
        return rounded(Fraction(0), sign(a) * sign(b) < 0, rounding)
    return rounded(Fraction(a) / Fraction(b), sign(a) * sign(b) < 0, rounding)


def reciprocal(a: float, rounding: Rounding) -> float:
    return div(1.0, a, rounding)


def sqrt(x: float, rounding: Rounding) -> float:
    if math.isnan(x) or x < 0:
        return NAN
    if math.isinf(x) or x == 0:
        return round_float(x, rounding)
    exact = Fraction(x)
    # 400 bits of the root, and a last one that says whether there are more.
    shift = 400 - floor_log2(exact) // 2
    scaled = exact * Fraction(4) ** shift
    root = math.isqrt(scaled.numerator // scaled.denominator)
    inexact = root * root != scaled
    return rounded(Fraction(2 * root + inexact) / Fraction(2) ** (shift + 1), False, rounding)


OPERATORS: Final[dict[str, tuple[int, Callable[..., float]]]] = {
    "add": (2, add),
    "sub": (2, sub),
    "mul": (2, mul),
    "div": (2, div),
    "reciprocal": (1, reciprocal),
    "sqrt": (1, sqrt),
    "fma": (3, fma),
}


def contraction(
    a: Sequence[float],
    b: Sequence[float],
    step: Rounding,
    store: Rounding,
    product: Rounding | None = None,
    chunk: int | None = None,
    combine: Rounding | None = None,
) -> float:
    """acc = R(a b + acc) from +0, k ascending; R(P(a b) + acc); or runs of ``chunk`` added up by ``combine``."""
    acc, total = 0.0, 0.0
    for k, (x, y) in enumerate(zip(a, b, strict=True)):
        acc = fma(x, y, acc, step, True) if product is None else add(mul(x, y, product), acc, step, True)
        if chunk is not None and combine is not None and ((k + 1) % chunk == 0 or k + 1 == len(a)):
            total, acc = add(acc, total, combine, True), 0.0
    return round_float(total if chunk is not None else acc, store)


def sequential(x: Iterable[float], step: Rounding, begin: float = 0.0) -> list[float]:
    """Every prefix of acc = R(acc + x) from ``begin``."""
    prefixes = []
    for value in x:
        begin = add(begin, value, step, True)
        prefixes.append(begin)
    return prefixes


def products(x: Iterable[float], step: Rounding) -> list[float]:
    """Every prefix of acc = R(acc * x) from 1."""
    acc, prefixes = 1.0, []
    for value in x:
        acc = mul(acc, value, step)
        prefixes.append(acc)
    return prefixes


def lanes(x: Sequence[float], n: int, step: Rounding) -> float:
    """n strided accumulators, then halves: docs/numerics.md, section 4."""
    acc = [0.0] * n
    for k, value in enumerate(x):
        acc[k % n] = add(acc[k % n], value, step, True)
    used = min(n, len(x))
    width = 1
    while width < used:
        width *= 2
    while width > 1:
        width //= 2
        for lane in range(width):
            if lane + width < used:
                acc[lane] = add(acc[lane], acc[lane + width], step, True)
    return acc[0]


def exact_sum(x: Sequence[float], rounding: Rounding) -> float:
    """One rounding of the sum, +0 where that is zero."""
    special = [v for v in x if not math.isfinite(v)]
    if special:
        return round_float(sum(special), rounding)
    return rounded(sum(map(Fraction, x), Fraction(0)), False, rounding)


@dataclass(frozen=True)
class Windows:
    """How a kernel walks over an image of any number of dimensions."""

    stride: tuple[int, ...]
    pad: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1

    def place(self, result: Place, tap: Place) -> Place:
        """The element of the image under a tap of the kernel, for one element of the result."""
        steps = zip(result, tap, self.stride, self.pad, self.dilation, strict=True)
        return tuple(p * s + t * d - q for p, t, s, q, d in steps)

    def counts(self, image: Sequence[int], taps: Sequence[int]) -> Place:
        """The size of the result."""
        rows = zip(image, taps, self.stride, self.pad, self.dilation, strict=True)
        return tuple((n + 2 * q - d * (t - 1) - 1) // s + 1 for n, t, s, q, d in rows)


def at(plane: Array, place: Place) -> float:
    """An element, or +0 outside of the image."""
    inside = all(0 <= p < n for p, n in zip(place, plane.shape, strict=True))
    return float(plane[place]) if inside else 0.0


def convolution(x: Array, w: Array, windows: Windows, how: Contraction) -> Array:
    """k over (channel of the group, tap), padding contributing products with +0."""
    taps, own, results = w.shape[2:], w.shape[1], w.shape[0] // windows.groups
    out = np.empty((len(x), len(w), *windows.counts(x.shape[2:], taps)))
    for n, o, *p in np.ndindex(out.shape):
        first = o // results * own
        left = [at(x[n, first + c], windows.place(tuple(p), t)) for c in range(own) for t in np.ndindex(taps)]
        out[(n, o, *p)] = how(left, w[o].ravel().tolist())
    return out


def transposed(x: Array, w: Array, windows: Windows, size: Sequence[int], how: Contraction) -> Array:
    """The plain convolution over the input with stride - 1 zeros between its elements and the kernel turned around.

    w: (channels of x, channels of the result in a group, taps). size: of the result.
    """
    taps, own, results = w.shape[2:], w.shape[0] // windows.groups, w.shape[1]
    out = np.empty((len(x), results * windows.groups, *size))
    turned = [tuple(n - 1 - t for n, t in zip(taps, tap, strict=True)) for tap in np.ndindex(taps)]

    def spread(plane: Array, q: Place, tap: Place) -> float:
        """The element under a tap, or one of the zeros between and around the elements."""
        steps = zip(q, tap, windows.stride, windows.pad, windows.dilation, strict=True)
        places = [divmod(p + d - t * e, s) for p, t, s, d, e in steps]
        return 0.0 if any(between for _, between in places) else at(plane, tuple(p for p, _ in places))

    for n, o, *q in np.ndindex(out.shape):
        first, column = o // results * own, o % results
        left = [spread(x[n, first + c], tuple(q), t) for c in range(own) for t in turned]
        out[(n, o, *q)] = how(left, [float(w[(first + c, column, *t)]) for c in range(own) for t in turned])
    return out


def weight_gradient(small: Array, image: Array, taps: Sequence[int], windows: Windows, how: Contraction) -> Array:
    """k over (image, pixel of ``small``): of the result's gradient, or of a transposed convolution's input."""
    own, results = image.shape[1] // windows.groups, small.shape[1] // windows.groups
    out = np.empty((small.shape[1], own, *taps))
    pixels = list(np.ndindex(small.shape[2:]))
    for o, c, *t in np.ndindex(out.shape):
        channel = o // results * own + c
        right = [at(these[channel], windows.place(p, tuple(t))) for these in image for p in pixels]
        out[(o, c, *t)] = how(small[:, o].ravel().tolist(), right)
    return out
