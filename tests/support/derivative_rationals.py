"""The derivatives of docs/numerics.md, section 5, written again over the arrays of ``array_rationals``.

g is the gradient of the result, y the result, x the operand. A formula rounds where the
document's line has an operation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from array_rationals import MEAN, Arrays, channels, condition
from rationals import Array

# Activations.


def mish(o: Arrays, g: Array, x: Array) -> Array:
    t = o.tanh(o.softplus(x))
    return o.mul(g, o.add(t, o.mul(o.mul(x, o.sigmoid(x)), o.sub(1, o.mul(t, t)))))


def gelu(o: Arrays, g: Array, x: Array) -> Array:
    cumulative = o.mul(o.add(o.erf(o.mul(x, math.sqrt(0.5))), 1), 0.5)
    density = o.mul(o.exp(o.mul(o.mul(x, x), -0.5)), 1 / math.sqrt(2 * math.pi))
    return o.mul(g, o.add(cumulative, o.mul(x, density)))


def gelu_tanh(o: Arrays, g: Array, x: Array) -> Array:
    c, square = math.sqrt(2 / math.pi), o.mul(x, x)
    t = o.tanh(o.mul(o.add(x, o.mul(o.mul(square, x), 0.044715)), c))
    inner = o.mul(o.add(o.mul(square, 3 * 0.044715), 1), c)
    slope = o.mul(o.mul(o.mul(x, 0.5), o.sub(1, o.mul(t, t))), inner)
    return o.mul(g, o.add(o.mul(o.add(t, 1), 0.5), slope))


def elu(o: Arrays, g: Array, x: Array, alpha: float, scale: float, factor: float) -> Array:
    slope = o.scaled(o.exp(o.scaled(x, factor)), factor * alpha * scale)
    return o.where(condition(lambda v: v > 0, x), o.scaled(g, scale), o.mul(g, slope))


def elu_of_result(o: Arrays, g: Array, y: Array, alpha: float, scale: float, factor: float) -> Array:
    slope = o.mul(o.add(y, alpha * scale), factor)
    return o.where(condition(lambda v: v > 0, y), o.scaled(g, scale), o.mul(g, slope))


def leaky_relu(o: Arrays, g: Array, x: Array, slope: Any) -> Array:
    return o.where(condition(lambda v: v > 0, x), g, o.mul(g, slope))


def prelu(o: Arrays, g: Array, x: Array, w: Array) -> list[Array]:
    return [leaky_relu(o, g, x, w), o.where(condition(lambda v: v > 0, x), 0.0, o.mul(g, x))]


def softplus(o: Arrays, g: Array, x: Array, beta: float, threshold: float) -> Array:
    inner = o.scaled(x, beta)
    return o.where(condition(lambda v: v > threshold, inner), g, o.mul(g, o.sigmoid(inner)))


def log_sigmoid(o: Arrays, g: Array, x: Array) -> Array:
    return o.mul(g, o.sigmoid(o.neg(x)))


def hardsigmoid(o: Arrays, g: Array, x: Array) -> Array:
    return o.where(condition(lambda v: -3 < v < 3, x), o.div(g, 6), 0.0)


def hardswish(o: Arrays, g: Array, x: Array) -> Array:
    middle = o.where(condition(lambda v: v < 3, x), o.mul(g, o.add(o.div(x, 3), 0.5)), g)
    return o.where(condition(lambda v: v < -3, x), 0.0, middle)


def shrink(o: Arrays, g: Array, x: Array, c: float) -> Array:
    c = o.number(c)
    return o.where(condition(lambda v: -c <= v <= c, x), 0.0, g)


def glu(o: Arrays, g: Array, x: Array) -> Array:
    """Halves of dimension 1."""
    a, b = np.split(x, 2, 1)
    s = o.sigmoid(b)
    return np.concatenate([o.mul(g, s), o.mul(o.mul(o.mul(g, a), s), o.sub(1, s))], 1)


def dropout(o: Arrays, g: Array, mask: Array, scale: float) -> Array:
    return o.mul(o.mul(g, mask), scale)


def embedding(o: Arrays, g: Array, indices: Sequence[int], rows: int, padding: int, by_count: bool) -> Array:
    parts = []
    for k, index in enumerate(indices):
        count = o.o.kept(float(list(indices).count(index)))
        for c, v in enumerate(g[k]):
            # What is padding is added too, as a zero.
            share = o.o.div(v, count) if by_count else v
            parts.append(((index, c), 0.0 if index == padding else share))
    return o.gathered((rows, g.shape[1]), parts)


# Softmax and normalization.


def log_softmax(o: Arrays, g: Array, y: Array) -> Array:
    return o.sub(g, o.mul(o.exp(y), o.total(g, 1, kept=True)))


def normalized(o: Arrays, g: Array, h: Array, *axes: int) -> Array:
    n = math.prod(h.shape[a] for a in axes)
    here = o.sub(g, o.div(o.total(g, *axes, kept=True), n))
    return o.sub(here, o.mul(h, o.div(o.total(o.mul(g, h), *axes, kept=True), n)))


def layer_norm(o: Arrays, g: Array, x: Array, mean: Array, r: Array, w: Array) -> list[Array]:
    """Rows of dimension 1; mean and r: (rows, 1)."""
    h = o.mul(o.sub(x, mean), r)
    return [o.mul(normalized(o, o.mul(g, w), h, 1), r), o.total(o.mul(g, h), 0), o.total(g, 0)]


def group_norm(o: Arrays, g: Array, x: Array, mean: Array, r: Array, w: Array, groups: int) -> list[Array]:
    """mean and r: (items, groups)."""
    apart, spatial = (len(x), groups, -1), (0, *range(2, x.ndim))
    scale = r[:, :, None]
    h = o.mul(o.sub(x.reshape(apart), mean[:, :, None]), scale)
    v = o.mul(g, channels(w, x)).reshape(apart)
    on_x = o.mul(normalized(o, v, h, 2), scale).reshape(x.shape)
    return [on_x, o.total(o.mul(g, h.reshape(x.shape)), *spatial), o.total(g, *spatial)]


def batch_norm(o: Arrays, g: Array, x: Array, w: Array, mean: Array, r: Array, train: bool) -> list[Array]:
    axes = (0, *range(2, x.ndim))
    scale = channels(r, x)
    h = o.mul(o.sub(x, channels(mean, x)), scale)
    v = normalized(o, g, h, *axes) if train else g
    return [o.mul(v, o.mul(scale, channels(w, x))), o.total(o.mul(g, h), *axes), o.total(g, *axes)]


def weight_norm(o: Arrays, h: Array, v: Array, g: Array, n: Array) -> list[Array]:
    s = o.total(o.mul(h, v), *range(1, v.ndim), kept=True)
    on_v = o.mul(o.sub(h, o.mul(v, o.div(s, o.mul(n, n)))), o.div(g, n))
    return [on_v, o.div(s, n)]


# Losses.


def share(o: Arrays, g: Array, x: Array, reduction: int) -> Array:
    return o.div(g, x.size) if reduction == MEAN else g


def mse(o: Arrays, g: Array, x: Array, t: Array, reduction: int) -> Array:
    return o.mul(o.mul(o.sub(x, t), 2), share(o, g, x, reduction))


def smooth_l1(o: Arrays, g: Array, x: Array, t: Array, reduction: int, b: float) -> Array:
    d = o.sub(x, t)
    sign = o.each(lambda v: v if math.isnan(v) or v == 0 else math.copysign(1.0, v), d)
    slope = o.where(condition(lambda v: abs(v) >= o.number(b), d), sign, o.div(d, b))
    return o.mul(slope, share(o, g, x, reduction))


def huber(o: Arrays, g: Array, x: Array, t: Array, reduction: int, c: float) -> Array:
    return o.mul(o.clamp(o.sub(x, t), -c, c), share(o, g, x, reduction))


def bce(o: Arrays, g: Array, x: Array, t: Array, w: Array, reduction: int) -> Array:
    slope = o.div(o.sub(x, t), o.clamp(o.mul(o.sub(1, x), x), 1e-12, math.inf))
    return o.mul(o.mul(slope, w), share(o, g, x, reduction))


def nll_loss(
    o: Arrays, g: Array, x: Array, targets: Array, w: Array | None, reduction: int, ignored: int, weight: Array
) -> Array:
    """weight: the sum of the weights that the loss was divided by."""
    out = np.zeros(x.shape, object) + 0.0
    for i in np.ndindex(targets.shape):
        label = int(targets[i])
        if label == ignored:
            continue
        own = g[i] if g.ndim else g[()]
        own = o.o.kept(-(o.o.div(own, weight[()]) if reduction == MEAN else own))
        out[(i[0], label, *i[1:])] = o.o.kept(own) if w is None else o.o.mul(own, w[label])
    return out
