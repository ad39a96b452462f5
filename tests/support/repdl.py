"""RepDL's operators, written again from its formulas: explicit loops over binary32 numbers, nothing of fxround.

A fused multiply-add is computed with rational numbers and rounded here; ``+ - * /`` and sqrt of NumPy's float32 are
IEEE 754's. Arrays are float32; gradients come first, as in PyTorch's backward operators.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]


def nearest(exact: Fraction) -> np.float32:
    """The nearest float32, ties to even (in the normal range)."""
    if exact == 0:
        return np.float32(0)
    near = np.float32(float(exact))
    both = (np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf)))
    return min(both, key=lambda x: (abs(Fraction(float(x)) - exact), int(np.float32(x).view(np.int32)) & 1))


def fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    return nearest(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))


def _correct(function: Any, x: Array) -> Array:
    """A function of mpmath, rounded once: 120 bits are enough to see on which side of a float32's boundary it is."""
    with mpmath.workprec(120):
        values = [function(mpmath.mpf(float(v))) for v in x.ravel()]
        exact = [Fraction(int(v.man)) * Fraction(2) ** int(v.exp) for v in values]
    return np.array([nearest(e) for e in exact], np.float32).reshape(x.shape)


def added(terms: Iterable[np.float32]) -> np.float32:
    """One chain from +0."""
    acc = np.float32(0)
    for term in terms:
        acc = np.float32(acc + term)
    return acc


def share(n: int) -> np.float32:
    return np.float32(1.0 / n)


def sum_channels(x: Array) -> Array:
    """Over all dimensions but the second, in row-major order."""
    return np.array([added(x[:, c].ravel()) for c in range(x.shape[1])], np.float32)


def sum_last(x: Array) -> Array:
    return np.array([added(row) for row in x], np.float32)


def mm(a: Array, b: Array) -> Array:
    y = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for i, j in np.ndindex(*y.shape):
        for k in range(a.shape[1]):
            y[i, j] = fma(a[i, k], b[k, j], y[i, j])
    return y


def linear(x: Array, w: Array, b: Array) -> Array:
    return mm(x, w.T) + b


def linear_backward(g: Array, x: Array, w: Array) -> tuple[Array, Array, Array]:
    return mm(g, w), mm(g.T, x), sum_channels(g)


def conv2d(x: Array, w: Array, b: Array, stride: int, padding: int, groups: int = 1) -> Array:
    (n, _, height, width), (out, per, kh, kw) = x.shape, w.shape
    oh, ow = ((size + 2 * padding - k) // stride + 1 for size, k in ((height, kh), (width, kw)))
    y = np.zeros((n, out, oh, ow), np.float32)
    for i, o, p, q in np.ndindex(*y.shape):
        for c, u, v in np.ndindex(per, kh, kw):
            h, s = p * stride - padding + u, q * stride - padding + v
            if 0 <= h < height and 0 <= s < width:
                y[i, o, p, q] = fma(x[i, o // (out // groups) * per + c, h, s], w[o, c, u, v], y[i, o, p, q])
    return y + b[:, None, None]


def conv2d_backward(g: Array, x: Array, w: Array, stride: int, padding: int) -> tuple[Array, Array, Array]:
    """For one group, as in RepDL."""
    on_x, on_w = np.zeros_like(x), np.zeros_like(w)
    for i, c, h, s in np.ndindex(*x.shape):
        for o, u, v in np.ndindex(w.shape[0], *w.shape[2:]):
            (p, odd), (q, other) = divmod(h - u + padding, stride), divmod(s - v + padding, stride)
            if odd == other == 0 and 0 <= p < g.shape[2] and 0 <= q < g.shape[3]:
                on_x[i, c, h, s] = fma(g[i, o, p, q], w[o, c, u, v], on_x[i, c, h, s])
    for o, c, u, v in np.ndindex(*w.shape):
        for i, p, q in np.ndindex(x.shape[0], *g.shape[2:]):
            h, s = p * stride - padding + u, q * stride - padding + v
            if 0 <= h < x.shape[2] and 0 <= s < x.shape[3]:
                on_w[o, c, u, v] = fma(g[i, o, p, q], x[i, c, h, s], on_w[o, c, u, v])
    return on_x, on_w, sum_channels(g)


def _spread(v: Array, x: Array) -> Array:
    return v.reshape(1, -1, *[1] * (x.ndim - 2))


class BatchNorm:
    """The forward pass in training, and the values that the backward pass needs."""

    def __init__(self, x: Array, weight: Array, bias: Array, eps: float) -> None:
        self.x, self.weight, self.f = x, weight, share(x.size // x.shape[1])
        self.mean = sum_channels(x) * self.f
        d = x - _spread(self.mean, x)
        self.var = sum_channels(d * d) * self.f
        self.std = np.sqrt(self.var + np.float32(eps))
        self.y = d / _spread(self.std, x) * _spread(weight, x) + _spread(bias, x)

    def running(self, mean: Array, var: Array, momentum: float) -> tuple[Array, Array]:
        new, old = np.float32(momentum), np.float32(1.0 - momentum)
        return new * self.mean + old * mean, new * self.var + old * var

    def backward(self, g: Array) -> tuple[Array, Array, Array]:
        """The gradients, in the order in which autograd visits the functions of the forward pass."""
        x, mean, std, weight = (
            self.x,
            _spread(self.mean, self.x),
            _spread(self.std, self.x),
            _spread(self.weight, self.x),
        )
        on_x = weight / std * g
        on_mean = (-self.weight / self.std) * sum_channels(g)
        slope = weight / (np.float32(2) * std * std * std)
        on_var = sum_channels(g * (mean - x) * slope)
        on_weight = sum_channels((x - mean) / std * g)
        square = _spread(on_var * self.f, x) * (x - mean)
        on_d = square + square
        on_x = on_x + on_d
        on_mean = on_mean + sum_channels(-on_d)
        return on_x + _spread(on_mean * self.f, x), on_weight, sum_channels(g)


def batch_norm_eval(x: Array, mean: Array, var: Array, weight: Array, bias: Array, eps: float) -> Array:
    std = np.sqrt(var + np.float32(eps))
    return (x - _spread(mean, x)) / _spread(std, x) * _spread(weight, x) + _spread(bias, x)


def softmax(x: Array) -> Array:
    e = _correct(mpmath.exp, x - x.max(1, keepdims=True))
    return e / sum_last(e)[:, None]


def cross_entropy(x: Array, target: npt.NDArray[np.int64]) -> np.float32:
    shifted = x - x.max(1, keepdims=True)
    logs = _correct(mpmath.log, sum_last(_correct(mpmath.exp, shifted)))
    return share(len(x)) * added(logs - shifted[np.arange(len(x)), target])


def cross_entropy_backward(g: np.float32, x: Array, target: npt.NDArray[np.int64]) -> Array:
    return (softmax(x) - np.eye(x.shape[1], dtype=np.float32)[target]) * share(len(x)) * g


def mean(x: Array) -> np.float32:
    return share(x.size) * added(x.ravel())


def mean_backward(g: np.float32, x: Array) -> Array:
    return np.full_like(x, g * share(x.size))


def sgd(p: Array, g: Array, buffer: Array | None, lr: float, momentum: float) -> tuple[Array, Array]:
    buffer = g if buffer is None else buffer * np.float32(momentum) + g
    return p + buffer * np.float32(-lr), buffer


def adam(p: Array, g: Array, m: Array, v: Array, step: int, lr: float, b1: float, b2: float, eps: float) -> Any:
    m = m * np.float32(b1) + g * np.float32(1 - b1)
    v = v * np.float32(b2) + (g * g) * np.float32(1 - b2)
    denominator = np.sqrt(v) / np.float32(math.sqrt(1 - b2**step)) + np.float32(eps)
    return p + (m / denominator) * np.float32(-(lr / (1 - b1**step))), m, v
