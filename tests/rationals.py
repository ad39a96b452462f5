"""What fxround must return, computed over rational numbers: the reference of test_whole_range and its long run.

Nothing here is shared with fxround but the rows of formats and modes, through ``numerics.exact``, the specification of
one rounding. A value is a float; infinities, NaNs and the signs of zeros follow IEEE 754-2019, 6 and 7.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Final

from fxround.numerics.exact import floor_log2, round_exact, round_float
from fxround.numerics.modes import Rounding

NAN: Final = math.nan
Contraction = Callable[[Sequence[float], Sequence[float]], float]


def sign(x: float) -> float:
    return math.copysign(1.0, x)


def rounded(value: Fraction, negative_zero: bool, rounding: Rounding) -> float:
    """R of a rational; ``negative_zero`` says what a zero is."""
    return round_exact(value, value < 0 or (value == 0 and negative_zero), rounding)


def is_down(rounding: Rounding) -> bool:
    return rounding.mode.name == "toward_negative"


def fma(a: float, b: float, c: float, rounding: Rounding, chain: bool = False) -> float:
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
    return rounded(exact, product < 0 if alike else is_down(rounding) and not chain, rounding)


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


def convolution(
    x: list[list[list[float]]], w: list[list[list[float]]], stride: int, pad: int, dilation: int, how: Contraction
) -> list[list[list[float]]]:
    """One-dimensional: k over (channel, tap), padding contributing products with +0."""
    taps, size = len(w[0][0]), len(x[0][0])
    count = (size + 2 * pad - dilation * (taps - 1) - 1) // stride + 1

    def at(row: list[float], place: int) -> float:
        return row[place] if 0 <= place < size else 0.0

    def result(image: list[list[float]], filters: list[list[float]], p: int) -> float:
        pairs = [
            (at(row, p * stride + t * dilation - pad), filters[c][t])
            for c, row in enumerate(image)
            for t in range(taps)
        ]
        return how([a for a, _ in pairs], [b for _, b in pairs])

    return [[[result(image, filters, p) for p in range(count)] for filters in w] for image in x]


def transposed(
    x: list[list[list[float]]],
    w: list[list[list[float]]],
    stride: int,
    pad: int,
    dilation: int,
    size: int,
    how: Contraction,
) -> list[list[list[float]]]:
    """The plain convolution over the input with stride - 1 zeros between its elements and the kernel turned around.

    w: (channels of x, channels of the result, taps). size: of the result.
    """
    taps, begin = len(w[0][0]), dilation * (len(w[0][0]) - 1) - pad
    wide = (len(x[0][0]) - 1) * stride + 1
    turned = [[[row[o][taps - 1 - t] for t in range(taps)] for row in w] for o in range(len(w[0]))]

    def at(row: list[float], p: int) -> float:
        return row[p // stride] if 0 <= p < wide and p % stride == 0 else 0.0

    # A padding beyond the kernel's reach cuts elements off: begin is negative then.
    places = range(-begin, size + dilation * (taps - 1) - begin)
    spread = [[[at(row, p) for p in places] for row in i] for i in x]
    return convolution(spread, turned, 1, 0, dilation, how)


def weight_gradient(
    small: list[list[list[float]]],
    image: list[list[list[float]]],
    taps: int,
    stride: int,
    pad: int,
    dilation: int,
    how: Contraction,
) -> list[list[list[float]]]:
    """k over (image, pixel of ``small``): of the result's gradient, or of a transposed convolution's input."""
    size = len(image[0][0])

    def result(o: int, c: int, t: int) -> float:
        left, right = [], []
        for these, those in zip(small, image, strict=True):
            for p, value in enumerate(these[o]):
                place = p * stride + t * dilation - pad
                left.append(value)
                right.append(those[c][place] if 0 <= place < size else 0.0)
        return how(left, right)

    return [[[result(o, c, t) for t in range(taps)] for c in range(len(image[0]))] for o in range(len(small[0]))]
