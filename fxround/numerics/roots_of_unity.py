"""Roots of unity, correctly rounded: the constants of Fourier transforms.

``roots_of_unity(8, 24)[1]`` is (0.70710677, -0.70710677). Numbers are integers in units of 2^-bits; a value whose error
leaves two candidates is computed again with more bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

_BITS = 192
_MOST_BITS = 1024
Number = tuple[int, int]


@functools.lru_cache(maxsize=256)
def roots_of_unity(n: int, precision: int) -> tuple[tuple[float, float], ...]:
    """Return e^(-2 pi i k / n) for k from 0 to n - 1 as pairs (real, imaginary), each rounded to nearest.

    precision: the bits of the significand. No part but 0, 1/2 and 1 is a rational number (Niven 1956), so that none
    lies in the middle of two values.
    """
    bits = _BITS
    while (rounded := _rounded(_powers(n, n, bits), precision, bits, 2 * n + 4)) is None:
        bits *= 2
    return tuple(_with_exact_zeros(k, n, root) for k, root in enumerate(rounded))


@functools.lru_cache(maxsize=64)
def chirp_spectrum(n: int, size: int, precision: int) -> tuple[tuple[float, float], ...]:
    """Return the Fourier transform of b over ``size``, with b[j] = b[size - j] = e^(i pi j^2 / n) / size for j < n.

    size: a power of two, at least 2 n - 1. Each part is rounded to nearest.

    Raises ArithmeticError if ``_MOST_BITS`` bits do not tell on which side of the middle of two values a part lies.
    """
    bits = _BITS
    while bits <= _MOST_BITS:
        roots = _powers(2 * n, 2 * n, bits)
        chirp = [(0, 0)] * size
        for j in range(n):
            re, im = roots[j * j % (2 * n)]
            chirp[j] = chirp[-j] = re // size, -im // size
        spectrum = _transformed(chirp, _powers(size, size, bits))
        # Each step of the transform adds less than the errors of its operands and of a root, each below 2 n + size.
        error = (2 * n + 8 * size) * size.bit_length()
        rounded = _rounded(spectrum, precision, bits, error)
        if rounded is not None:
            return tuple(rounded)
        bits *= 2
    raise ArithmeticError(f"the chirp of length {n} in a transform of {size} is not decided by {_MOST_BITS} bits")


def _with_exact_zeros(k: int, n: int, root: tuple[float, float]) -> tuple[float, float]:
    re, im = root
    return (0.0 if 4 * k in (n, 3 * n) else re, 0.0 if 2 * k in (0, n) else im)


def _powers(n: int, count: int, bits: int) -> list[Number]:
    """Return the first powers of e^(-2 pi i / n), with errors below 2 n + 2 units each."""
    one = 1 << bits
    guard = 16
    re, im = _turned(n, bits + guard)
    re, im = re >> guard, im >> guard
    powers = [(one, 0)]
    a, b = one, 0
    for _ in range(1, count):
        a, b = (a * re - b * im) >> bits, (a * im + b * re) >> bits
        powers.append((a, b))
    return powers


def _turned(n: int, bits: int) -> Number:
    """Return e^(-2 pi i / n), by the series of sine and cosine."""
    if n == 1:
        return 1 << bits, 0
    angle = 2 * _pi(bits) // n
    parts = [0, 0]
    term, k = 1 << bits, 0
    while term:
        parts[k % 2] += -term if k % 4 in (2, 3) else term
        k += 1
        term = (term * angle >> bits) // k
    return parts[0], -parts[1]


@functools.lru_cache(maxsize=8)
def _pi(bits: int) -> int:
    """Return pi by Machin's formula, 16 atan(1/5) - 4 atan(1/239)."""

    def inverse_tangent(x: int) -> int:
        total, power, k = 0, (1 << (bits + 32)) // x, 0
        while power:
            total += (-1) ** k * (power // (2 * k + 1))
            power //= x * x
            k += 1
        return total

    return (16 * inverse_tangent(5) - 4 * inverse_tangent(239)) >> 32


def _transformed(x: Sequence[Number], roots: Sequence[Number]) -> list[Number]:
    """Return the Fourier transform of a power of two of numbers. roots: of unity, of the length or a multiple."""
    if len(x) == 1:
        return list(x)
    bits = roots[0][0].bit_length() - 1
    even, odd = _transformed(x[::2], roots[::2]), _transformed(x[1::2], roots[::2])
    turned = [
        ((a * c - b * d) >> bits, (a * d + b * c) >> bits)
        for (a, b), (c, d) in zip(odd, roots[: len(odd)], strict=True)
    ]
    pairs = list(zip(even, turned, strict=True))
    return [(a + c, b + d) for (a, b), (c, d) in pairs] + [(a - c, b - d) for (a, b), (c, d) in pairs]


def _rounded(numbers: Sequence[Number], precision: int, bits: int, error: int) -> list[tuple[float, float]] | None:
    """Return the numbers rounded to nearest, or None if one of the results is not certain.

    bits: a unit of the numbers is 2^-bits. error: the largest error of a number, in units.
    """
    pairs = []
    for number in numbers:
        parts = []
        for value in number:
            near = 0.0 if abs(value) <= error else _nearest(value, precision, bits)
            decided = abs(value) <= error or _nearest(value - error, precision, bits) == _nearest(
                value + error, precision, bits
            )
            if not decided:
                return None
            parts.append(near)
        pairs.append((parts[0], parts[1]))
    return pairs


def _nearest(value: int, precision: int, bits: int) -> float:
    """Return a number of 2^-bits units rounded to ``precision`` bits. The middle of two values is not met."""
    magnitude = abs(value)
    shift = max(magnitude.bit_length() - precision, 1)
    return math.ldexp(math.copysign((magnitude + (1 << (shift - 1))) >> shift, value), shift - bits)
