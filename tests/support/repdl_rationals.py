"""RepDL's definitions, docs/reproducibility.md, written again over the arrays of ``array_rationals``.

f is 1/n as a value of the dtype; g is the gradient of the result. What is not here has fxround's own formula.
"""

from __future__ import annotations

import math

import formula_rationals as again
import numpy as np
from array_rationals import Arrays, channels
from rationals import Array


def mean(o: Arrays, x: Array, *axes: int) -> Array:
    return o.mul(o.total(x, *axes), 1 / math.prod(x.shape[a] for a in axes))


def mean_backward(o: Arrays, g: Array, x: Array, axis: int) -> Array:
    return np.repeat(np.expand_dims(o.mul(g, 1 / x.shape[axis]), axis), x.shape[axis], axis)


def cross_entropy(o: Arrays, x: Array, targets: Array) -> Array:
    """x: (items, classes)."""
    s, e = _shifted(o, x)
    log = o.log(o.total(e, 1))
    return mean(o, o.sub(log, s[np.arange(len(x)), targets]), 0)


def cross_entropy_backward(o: Arrays, g: Array, x: Array, targets: Array) -> Array:
    _, e = _shifted(o, x)
    chosen = np.eye(x.shape[1])[targets].astype(object)
    return o.mul(o.mul(o.sub(o.div(e, o.total(e, 1, kept=True)), chosen), 1 / len(x)), g)


def _shifted(o: Arrays, x: Array) -> tuple[Array, Array]:
    s = o.sub(x, o.kept(o.along(again.largest, x, [1], True)))
    return s, o.exp(s)


def _space(x: Array) -> tuple[int, ...]:
    return (0, *range(2, x.ndim))


def inference(o: Arrays, x: Array, w: Array, b: Array, m: Array, v: Array) -> Array:
    std = o.sqrt(o.add(v, 1e-5))
    y = o.div(o.sub(x, channels(m, x)), channels(std, x))
    return o.add(o.mul(y, channels(w, x)), channels(b, x))


def batch_norm(o: Arrays, x: Array, w: Array, b: Array, m: Array, v: Array, momentum: float) -> list[Array]:
    """The result, mean and standard deviation of the batch, and the running statistics."""
    center = mean(o, x, *_space(x))
    d = o.sub(x, channels(center, x))
    var = mean(o, o.mul(d, d), *_space(x))
    std = o.sqrt(o.add(var, 1e-5))
    y = o.add(o.mul(o.div(d, channels(std, x)), channels(w, x)), channels(b, x))
    running = [o.add(o.mul(new, momentum), o.mul(old, 1 - momentum)) for new, old in ((center, m), (var, v))]
    return [y, center, std, *running]


def batch_norm_backward(o: Arrays, g: Array, x: Array, w: Array, m: Array, std: Array, train: bool) -> list[Array]:
    """Of the operand, the weight and the bias. std: of the batch, or from the running variance."""
    axes, n = _space(x), x.size // x.shape[1]
    d, u = o.sub(x, channels(m, x)), o.div(w, std)
    on_weight, on_bias = o.total(o.mul(o.div(d, channels(std, x)), g), *axes), o.total(g, *axes)
    on_x = o.mul(channels(u, x), g)
    if train:
        slope = o.div(w, o.mul(o.mul(o.mul(std, 2), std), std))
        p = o.total(o.mul(o.mul(g, o.neg(d)), channels(slope, x)), *axes)
        h = o.mul(channels(o.mul(p, 1 / n), x), d)
        v = o.add(h, h)
        q = o.add(o.mul(o.neg(u), on_bias), o.total(o.neg(v), *axes))
        on_x = o.add(o.add(on_x, v), channels(o.mul(q, 1 / n), x))
    return [on_x, on_weight, on_bias]
