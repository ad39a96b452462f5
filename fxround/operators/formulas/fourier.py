"""Formulas of Fourier transforms: complex sums, differences and products with roots of unity, each rounded once.

A length is a product of factors 4, 2, 3, 5 and the primes up to 31, in this order. A stage with the factor r of n = r m
adds (decimation in frequency): for p < m and k < r, ``y_k[p] = (sum of x[p + m j] w_r^(j k)) * w_n^(p k)``, and the
transform of y_k gives the elements k, k + r, k + 2 r, ... of the result. A length with a larger prime is a convolution
with a chirp (Bluestein 1970, IEEE Trans. Audio and Electroacoustics 18). All stages work on the real and the imaginary
parts of all rows at once, sorted as in Stockham's algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fxround.numerics.roots_of_unity import chirp_spectrum, roots_of_unity
from fxround.operators.formulas.complex_numbers import Parts, joined, parts_of, product
from fxround.operators.formulas.table import complex_formula, constant, formula, scaled

aten = torch.ops.aten

FACTORS: Final = (4, 2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31)
# The values of an operator's normalization: by nothing, by the square root of the length, by the length.
_NONE, _ROOT, _LENGTH = 0, 1, 2


def factors_of(n: int) -> list[int] | None:
    """Return the factors of the stages of a length, in order; None if a prime above 31 divides it."""
    factors = []
    for factor in FACTORS:
        while n % factor == 0:
            factors.append(factor)
            n //= factor
    return factors if n == 1 else None


@formula(aten.fft_fftfreq.default)
def fftfreq(n: Any, d: float = 1.0, *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    """fftfreq(n, d) = k * (1 / (n * d)), k = 0, 1, ..., -2, -1: n integers"""
    places = torch.arange(n, device=options.get("device"))
    return _frequencies(torch.where(places < (n + 1) // 2, places, places - n), n, d, dtype)


@formula(aten.fft_rfftfreq.default)
def rfftfreq(n: Any, d: float = 1.0, *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    """rfftfreq(n, d) = k * (1 / (n * d)), k = 0, 1, ..., n // 2"""
    return _frequencies(torch.arange(n // 2 + 1, device=options.get("device")), n, d, dtype)


def _frequencies(k: Tensor, n: Any, d: float, dtype: torch.dtype | None) -> Tensor:
    return scaled(k.to(torch.get_default_dtype() if dtype is None else dtype), 1.0 / (n * d))


@complex_formula(aten._fft_c2c.default)
def fft_c2c(z: Tensor, dim: Sequence[int], normalization: int, forward: bool) -> Any:
    """fft(z) along each dimension, the last one first, then divided by sqrt(n) or n; ifft(z) = swap(fft(swap(z)))"""
    if not z.is_complex() or z.dtype == torch.complex32:
        return NotImplemented
    parts = parts_of(z)
    for d in reversed(dim):
        parts = _along(parts, d, not forward)
    return joined(*_normalized(parts, _count(z.shape, dim), normalization))


@complex_formula(aten._fft_r2c.default)
def fft_r2c(x: Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> Any:
    """rfft(x) = the first n // 2 + 1 elements of fft(x), whose imaginary parts are left out of the first stage"""
    if x.dtype not in (torch.float32, torch.float64):
        return NotImplemented
    *others, last = dim
    parts = _along((x, None), last, False)
    if onesided:
        parts = _each(parts, lambda part: part.narrow(last, 0, int(x.shape[last]) // 2 + 1))
    if parts[1] is None:
        parts = parts[0], torch.zeros_like(parts[0])
    for d in reversed(others):
        parts = _along(parts, d, False)
    return joined(*_normalized(parts, _count(x.shape, dim), normalization))


@complex_formula(aten._fft_c2r.default)
def fft_c2r(z: Tensor, dim: Sequence[int], normalization: int, last_dim_size: int) -> Any:
    """irfft(z) = the real part of ifft(z, conj(z) backwards), without the imaginary parts of elements 0 and n / 2"""
    if z.dtype not in (torch.complex64, torch.complex128):
        return NotImplemented
    *others, last = dim
    n = int(last_dim_size)
    parts = parts_of(z)
    for d in reversed(others):
        parts = _along(parts, d, True)
    whole = _mirrored(parts, last, n)
    real = _along(whole, last, True)[0]
    sizes = [*z.shape]
    sizes[last] = n
    return _normalized((real, None), _count(sizes, dim), normalization)[0]


def _count(sizes: Sequence[Any], dim: Sequence[int]) -> int:
    return math.prod(int(sizes[d]) for d in dim)


def _each(parts: Parts, function: Any) -> Parts:
    re, im = parts
    return function(re), None if im is None else function(im)


def _normalized(parts: Parts, n: int, normalization: int) -> Parts:
    if normalization == _NONE or n == 1:
        return parts
    divisor = float(n) if normalization == _LENGTH else math.sqrt(n)
    return _each(parts, lambda part: part / divisor)


def _mirrored(parts: Parts, dim: int, n: int) -> Parts:
    """Return all n elements of which the first n // 2 + 1 are given and the others are their conjugates, backwards."""
    half = n // 2 + 1
    re, im = (part.narrow(dim, 0, half) for part in parts)
    zero = torch.zeros_like(im.narrow(dim, 0, 1))
    middle = (n - 1) // 2
    inner = im.narrow(dim, 1, middle)
    back = re.narrow(dim, 1, middle).flip(dim)
    nyquist = [zero] if n % 2 == 0 else []
    return torch.cat([re, back], dim), torch.cat([zero, inner, *nyquist, -inner.flip(dim)], dim)


# ---- one dimension ----


def _along(parts: Parts, dim: int, inverse: bool) -> Parts:
    """Return the transform along one dimension, of which the inverse is not normalized."""
    re, im = parts
    if inverse:
        re, im = (torch.zeros_like(re) if im is None else im), re
    dim %= re.dim()
    shape = re.shape
    n = int(shape[dim])
    # Rows of n elements, each of which is a run of numbers where the dimension is not the last one.
    rows = [math.prod(shape[:dim]), n, *([math.prod(shape[dim + 1 :])] if dim + 1 < len(shape) else [])]
    flat = _each((re, im), lambda part: part.reshape(rows))
    re, im = _each(_transformed(flat, n), lambda part: part.reshape(shape))
    if inverse:
        return (torch.zeros_like(re) if im is None else im), re
    return re, im


def _transformed(x: Parts, n: int) -> Parts:
    factors = factors_of(n)
    if factors is None:
        return _by_chirp(x, n)
    done = 1
    for r in factors:
        x = _stage(x, r, n // done, done)
        done *= r
    return x


def _stage(x: Parts, r: int, n: int, done: int) -> Parts:
    """Return the arrays after a stage: done transforms of length n, side by side, become done * r of length n / r."""
    m = n // r
    rows, size, *run = x[0].shape
    blocks = _each(x, lambda part: part.reshape([rows, r, m, done, *run]))
    y = _BUTTERFLIES[r](blocks) if r in _BUTTERFLIES else _sums(blocks, r)
    if m > 1:
        turns = _twiddles(x[0], n, r, done, bool(run))
        y = [y[0], *(product(part, turn) for part, turn in zip(y[1:], turns, strict=True))]
    if any(im is not None for _, im in y):
        y = [(re, torch.zeros_like(re) if im is None else im) for re, im in y]
    re, im = (None if part[0] is None else _side_by_side(part, done, bool(run)) for part in zip(*y, strict=True))
    return _each((re, im), lambda part: part.reshape([rows, size, *run]))


def _side_by_side(arrays: Sequence[Tensor], done: int, runs: bool) -> Tensor:
    """Return arrays (rows, m, done, ...) joined along ``done``."""
    if done > 1 or runs or arrays[0].shape[1] == 1:
        return torch.cat(list(arrays), 2)
    # Numbers one by one: a transposition is faster.
    return torch.cat([each.squeeze(2).unsqueeze(1) for each in arrays], 1).transpose(1, 2)


def _twiddles(like: Tensor, n: int, r: int, done: int, runs: bool) -> list[Parts]:
    """Return w_n^(p k) for p < n / r, each ``done`` times, for k from 1 to r - 1."""
    roots, m = _roots(like, n), n // r
    table = [[[roots[p * k][i]] * done for p in range(m)] for k in range(1, r) for i in (0, 1)]
    numbers = constant(table, like.dtype, like.device)
    turns = [numbers.select(0, i).unsqueeze(-1) if runs else numbers.select(0, i) for i in range(2 * r - 2)]
    return list(zip(turns[::2], turns[1::2], strict=True))


def _numbers(pairs: Sequence[tuple[float, float]], like: Tensor, runs: bool) -> Parts:
    """Return complex constants along the second dimension."""
    re, im = (constant(list(part), like.dtype, like.device) for part in zip(*pairs, strict=True))
    return (re.unsqueeze(-1), im.unsqueeze(-1)) if runs else (re, im)


def _precision(like: Tensor) -> int:
    return 24 if like.dtype == torch.float32 else 53


def _roots(like: Tensor, n: int) -> tuple[tuple[float, float], ...]:
    return roots_of_unity(n, _precision(like))


def _plus(x: Parts, y: Parts) -> Parts:
    return x[0] + y[0], None if x[1] is None else x[1] + y[1]


def _minus(x: Parts, y: Parts) -> Parts:
    return x[0] - y[0], None if x[1] is None else x[1] - y[1]


def _minus_i(x: Parts, y: Parts) -> Parts:
    """Return x - i y."""
    return (x[0], -y[0]) if x[1] is None else (x[0] + y[1], x[1] - y[0])


def _plus_i(x: Parts, y: Parts) -> Parts:
    """Return x + i y."""
    return (x[0], y[0]) if x[1] is None else (x[0] - y[1], x[1] + y[0])


def _scaled(x: Parts, factor: float) -> Parts:
    return _each(x, lambda part: part * factor)


def _apart(blocks: Parts) -> list[Parts]:
    re, im = blocks
    return [(re.select(1, j), None if im is None else im.select(1, j)) for j in range(re.shape[1])]


def _two(blocks: Parts) -> list[Parts]:
    a, b = _apart(blocks)
    return [_plus(a, b), _minus(a, b)]


def _four(blocks: Parts) -> list[Parts]:
    a, b, c, d = _apart(blocks)
    s, t, u, v = _plus(a, c), _minus(a, c), _plus(b, d), _minus(b, d)
    return [_plus(s, u), _minus_i(t, v), _minus(s, u), _plus_i(t, v)]


def _three(blocks: Parts) -> list[Parts]:
    a, b, c = _apart(blocks)
    s, d = _plus(b, c), _minus(b, c)
    middle = _minus(a, _scaled(s, 0.5))
    turned = _scaled(d, -_roots(a[0], 3)[1][1])
    return [_plus(a, s), _minus_i(middle, turned), _plus_i(middle, turned)]


def _five(blocks: Parts) -> list[Parts]:
    a, b, c, d, e = _apart(blocks)
    (c1, s1), (c2, s2) = ((re, -im) for re, im in _roots(a[0], 5)[1:3])
    p, q, u, v = _plus(b, e), _plus(c, d), _minus(b, e), _minus(c, d)
    m1 = _plus(_plus(a, _scaled(p, c1)), _scaled(q, c2))
    m2 = _plus(_plus(a, _scaled(p, c2)), _scaled(q, c1))
    t1 = _plus(_scaled(u, s1), _scaled(v, s2))
    t2 = _minus(_scaled(u, s2), _scaled(v, s1))
    return [_plus(a, _plus(p, q)), _minus_i(m1, t1), _minus_i(m2, t2), _plus_i(m2, t2), _plus_i(m1, t1)]


_BUTTERFLIES: Final = {2: _two, 3: _three, 4: _four, 5: _five}


def _sums(blocks: Parts, r: int) -> list[Parts]:
    """Return sum(x_j * w_r^(j k)) over j for every k, in the order of sums."""
    like = blocks[0]
    roots = _roots(like, r)
    table = [[roots[j * k % r] for j in range(r)] for k in range(r)]
    shape = [r, r, *[1] * (like.dim() - 2)]
    turns = [constant([[w[i] for w in row] for row in table], like.dtype, like.device).reshape(shape) for i in (0, 1)]
    terms = product(_each(blocks, lambda part: part.unsqueeze(1)), (turns[0], turns[1]))
    re, im = (part.sum(2) for part in terms)
    return [(re.select(1, k), im.select(1, k)) for k in range(r)]


def _by_chirp(x: Parts, n: int) -> Parts:
    """Return c * (the convolution of x * c with conj(c)), where c[j] = e^(-i pi j^2 / n)."""
    like = x[0]
    runs = like.dim() > 2
    size = 1 << (2 * n - 2).bit_length()
    roots = _roots(like, 2 * n)
    chirp = _numbers([roots[j * j % (2 * n)] for j in range(n)], like, runs)
    longer = _each(product(x, chirp), lambda part: aten.constant_pad_nd(part, [0, 0] * runs + [0, size - n], 0.0))
    spectrum = product(_transformed(longer, size), _numbers(chirp_spectrum(n, size, _precision(like)), like, runs))
    im, re = _transformed((spectrum[1], spectrum[0]), size)
    return product((re.narrow(1, 0, n), im.narrow(1, 0, n)), chirp)
