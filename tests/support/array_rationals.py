"""The arithmetic of ``formula_rationals`` over arrays, and composite operators of several dimensions written with it.

An element that the contract leaves open is None, and so is what is computed from it. Bags and indices are enumerated
element by element from the definitions in docs/numerics.md, section 5; windows are in ``window_rationals``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import formula_rationals as again
import numpy as np
from formula_rationals import Arithmetic
from rationals import Array, Place


@dataclass(frozen=True)
class Arrays:
    """Operations on arrays that broadcast, each element rounded once."""

    o: Arithmetic

    def __getattr__(self, name: str) -> Callable[..., Array]:
        scalar = getattr(self.o, name)
        return lambda *xs: self.each(scalar, *xs)

    def number(self, x: float) -> float:
        """A Python number as a value of the dtype."""
        return float(np.float32(x)) if self.o.short else x

    def each(self, f: Callable[..., Any], *xs: Any) -> Array:
        full = np.broadcast_arrays(
            *(np.asarray(x if isinstance(x, np.ndarray) else self.number(x), object) for x in xs)
        )
        out = np.empty(full[0].shape, object)
        for i in np.ndindex(out.shape):
            out[i] = _unless_open(f, [x[i] for x in full])
        return out

    def scaled(self, x: Any, factor: float) -> Any:
        """No operation where the factor is 1."""
        return x if factor == 1 else self.mul(x, factor)

    def where(self, chosen: Any, x: Any, y: Any) -> Array:
        """A selection, rounded if a rule of the policy matches it."""
        return self.each(lambda c, a, b: self.o.kept(a if c else b), _bits(chosen), x, y)

    def neg(self, x: Any) -> Array:
        return self.each(lambda v: self.o.kept(-v), x)

    def abs(self, x: Any) -> Array:
        return self.each(lambda v: self.o.kept(abs(v)), x)

    def clamp(self, x: Any, low: float, high: float) -> Array:
        low, high = self.number(low), self.number(high)
        return self.each(lambda v: self.o.kept(again.clamped(v, low, high)), x)

    def along(self, f: Callable[[list[float]], Any], x: Array, axes: Sequence[int], kept: bool = False) -> Array:
        """f of the elements of several dimensions, in row-major order."""
        reduced = sorted(a % x.ndim for a in axes)
        rest = [d for d in range(x.ndim) if d not in reduced]
        rows = x.transpose(*rest, *reduced).reshape(*(x.shape[d] for d in rest), -1)
        out = np.empty(rows.shape[:-1], object)
        for i in np.ndindex(out.shape):
            out[i] = _unless_open(lambda *row: f(list(row)), list(rows[i]))
        return out.reshape([1 if d in reduced else n for d, n in enumerate(x.shape)]) if kept else out

    def total(self, x: Array, *axes: int, kept: bool = False) -> Array:
        return self.along(self.o.total, x, axes, kept)

    def mm(self, a: Array, b: Array) -> Array:
        """A chain for every row of a and column of b."""
        out = np.empty((a.shape[0], b.shape[1]), object)
        for i, j in np.ndindex(out.shape):
            row, column = list(a[i]), list(b[:, j])
            out[i, j] = None if None in row or None in column else self.o.dot(row, column)
        return out

    def gathered(self, shape: Sequence[int], parts: Iterable[tuple[Place, Any]]) -> Array:
        """Zeros with each part added at its place, in their order."""
        chains: dict[Place, list[Any]] = {place: [] for place in np.ndindex(*shape)}
        for place, part in parts:
            chains[place].append(part)
        out = np.empty(shape, object)
        for place, chain in chains.items():
            out[place] = _unless_open(lambda *row: self.o.added(row), chain)
        return out


def _bits(chosen: Any) -> Array:
    return np.asarray(chosen, object)


def _unless_open(f: Callable[..., Any], xs: list[Any]) -> Any:
    """f(*xs), or None if it or one of xs is undefined by the contract."""
    if any(x is None for x in xs):
        return None
    try:
        return f(*(float(x) if isinstance(x, float) else x for x in xs))
    except again.Undecided:
        return None


def condition(f: Callable[..., bool], *xs: Any) -> Array:
    """A condition on each element; None if it is undefined."""
    full = np.broadcast_arrays(*(np.asarray(x, object) for x in xs))
    out = np.empty(full[0].shape, object)
    for i in np.ndindex(out.shape):
        out[i] = _unless_open(f, [x[i] for x in full])
    return out


def channels(v: Array, x: Array) -> Array:
    return v.reshape(1, -1, *[1] * (x.ndim - 2))


# Normalization.


def moments(o: Arrays, x: Array, *axes: int) -> tuple[Array, Array, Array, Array]:
    """The differences from the mean, the mean, rsqrt of the variance, and the sum of the squares."""
    n = math.prod(x.shape[a] for a in axes)
    center = o.div(o.total(x, *axes, kept=True), n)
    d = o.sub(x, center)
    squares = o.total(o.mul(d, d), *axes, kept=True)
    return d, center, o.rsqrt(o.add(o.div(squares, n), 1e-5)), squares


def group_norm(o: Arrays, x: Array, w: Array, b: Array, groups: int) -> tuple[Array, Array, Array]:
    d, center, r, _ = moments(o, x.reshape(len(x), groups, -1), 2)
    y = o.mul(d, r).reshape(x.shape)
    return o.add(o.mul(y, channels(w, x)), channels(b, x)), center, r


def batch_norm(o: Arrays, x: Array, w: Array, b: Array, mean: Array, var: Array, m: float) -> tuple[Array, ...]:
    """The result, the batch's mean and rsqrt, and the running statistics."""
    axes = (0, *range(2, x.ndim))
    n = math.prod(x.shape[a] for a in axes)
    d, center, r, squares = moments(o, x, *axes)
    y = o.add(o.mul(d, o.mul(r, channels(w, x))), channels(b, x))
    new = o.div(squares.ravel(), n - 1)
    running = [o.add(o.mul(old, 1 - m), o.mul(v, m)) for old, v in ((mean, center.ravel()), (var, new))]
    return y, center, r, *running


def weight_norm(o: Arrays, v: Array, g: Array) -> tuple[Array, Array]:
    norm = o.sqrt(o.total(o.mul(v, v), *range(1, v.ndim), kept=True))
    return o.mul(v, o.div(g, norm)), norm


# Losses.

NONE, MEAN, SUM = 0, 1, 2


def reduced(o: Arrays, terms: Array, reduction: int) -> Array:
    if reduction == NONE:
        return terms
    summed = o.total(terms, *range(terms.ndim))
    return o.div(summed, terms.size) if reduction == MEAN else summed


def bce(o: Arrays, x: Array, t: Array, w: Array) -> Array:
    here = o.mul(t, o.clamp(o.log(x), -100, math.inf))
    there = o.mul(o.sub(t, 1), o.clamp(o.log1p(o.neg(x)), -100, math.inf))
    return o.mul(o.sub(there, here), w)


def bce_with_logits(o: Arrays, x: Array, t: Array, w: Array, p: Array) -> Array:
    log = o.mul(o.softplus(o.neg(x)), o.add(o.mul(o.sub(p, 1), t), 1))
    return o.mul(o.add(o.mul(o.sub(1, t), x), log), w)


def smooth_l1(o: Arrays, x: Array, t: Array, b: float) -> Array:
    d = o.sub(x, t)
    inner, outer = o.div(o.mul(o.mul(d, d), 0.5), b), o.sub(o.abs(d), 0.5 * b)
    return o.where(condition(lambda v: abs(v) < o.number(b), d), inner, outer)


def huber(o: Arrays, x: Array, t: Array, c: float) -> Array:
    d = o.sub(x, t)
    inner, outer = o.mul(o.mul(d, d), 0.5), o.mul(o.sub(o.abs(d), 0.5 * c), c)
    return o.where(condition(lambda v: abs(v) <= o.number(c), d), inner, outer)


def nll_loss(o: Arrays, x: Array, targets: Array, w: Array | None, reduction: int, ignored: int) -> list[Array]:
    """The loss, and the sum of the weights. x: (items, classes, ...), targets: (items, ...)."""
    terms, weights = np.empty(targets.shape, object), np.empty(targets.shape, object)
    for i in np.ndindex(targets.shape):
        label = int(targets[i])
        own = 1.0 if w is None or label == ignored else w[label]
        weights[i] = 0.0 if label == ignored else own
        terms[i] = 0.0 if label == ignored else x[(i[0], label, *i[1:])]
    kept = targets != ignored
    terms = o.where(kept, o.neg(terms) if w is None else o.mul(o.neg(terms), weights), 0.0)
    if reduction == NONE:
        return [terms]
    count = o.kept(np.asarray(float(kept.sum()), object))
    weight = count if w is None else o.total(weights, *range(targets.ndim))
    summed = o.total(terms, *range(targets.ndim))
    return [o.div(summed, weight) if reduction == MEAN else summed, weight]


def smoothed(o: Arrays, x: Array, targets: Array, w: Array | None, share: float, ignored: int) -> Array:
    """The mean cross entropy with label smoothing: share of it belongs to all classes alike. x: (items, classes)."""
    s = log_softmax(o, x)
    own, weight = nll_loss(o, s, targets, w, MEAN, ignored)
    if w is not None:
        # A selection, which is rounded where the loss above gathers.
        weight = o.total(o.where(targets == ignored, 0.0, w[targets]), 0)
    over = o.neg(o.total(s if w is None else o.mul(s, w[None]), 1))
    every = o.div(o.total(o.where(targets == ignored, 0.0, over), 0), weight)
    return o.add(o.mul(own, 1 - share), o.mul(every, share / x.shape[1]))


def log_softmax(o: Arrays, x: Array) -> Array:
    """Over dimension 1."""
    s = o.sub(x, o.kept(o.along(again.largest, x, [1], True)))
    return o.sub(s, o.log(o.total(o.exp(s), 1, kept=True)))


def softmax(o: Arrays, x: Array) -> Array:
    """Over the last dimension, for numbers that the operations before have rounded."""
    e = o.exp(o.sub(x, o.kept(o.along(again.largest, x, [-1], True))))
    return o.div(e, o.total(e, -1, kept=True))


# Products.


def attention(o: Arrays, q: Array, k: Array, v: Array) -> Array:
    """One head: rows of q, k and v."""
    s = math.sqrt(1 / math.sqrt(q.shape[1]))
    scores = o.mm(o.mul(q, s), o.mul(k, s).T)
    empty = np.array([[all(x == -math.inf for x in row)] for row in scores])
    return o.mm(o.where(empty, 0.0, softmax(o, scores)), v)


def cdist(o: Arrays, a: Array, b: Array, p: float) -> Array:
    d = o.sub(a[:, None, :], b[None, :, :])
    if p == 0:
        return o.total(condition(lambda v: float(v != 0), d), 2)
    if p == 2:
        return o.sqrt(o.total(o.mul(d, d), 2))
    if math.isinf(p):
        return o.kept(o.along(again.largest, o.abs(d), [2]))
    if p == 1:
        return o.total(o.abs(d), 2)
    return o.pow(o.total(o.pow(o.abs(d), p), 2), 1 / p)


def cdist_backward(o: Arrays, g: Array, a: Array, b: Array, p: float) -> Array:
    """The slopes of the norm along the differences, times g, added over the rows of b."""
    d, n = o.sub(a[:, None, :], b[None, :, :]), cdist(o, a, b, p)[:, :, None]
    sign = condition(lambda v: v if math.isnan(v) else float((v > 0) - (v < 0)), d)
    if p == 0:
        return np.zeros(a.shape, object) + 0.0
    if p == 2:
        slope = o.div(d, n)
    elif p == 1:
        slope = o.kept(sign)
    elif math.isinf(p):
        slope = o.where(condition(lambda v, top: v < top, o.abs(d), n), 0.0, sign)
    else:
        ratio = o.div(o.abs(d), n)
        power = o.sqrt(ratio) if p == 1.5 else o.mul(ratio, ratio) if p == 3 else o.pow(ratio, p - 1)
        slope = o.mul(sign, power)
    slope = o.where(condition(lambda v: v == 0, d), 0.0, slope)
    return o.total(o.mul(slope, g[:, :, None]), 1)


# Bags and scatters.


@dataclass(frozen=True)
class Bags:
    """The rows that each bag adds up, and the padding that it leaves out."""

    indices: tuple[int, ...]
    offsets: tuple[int, ...]
    padding: int = -1

    def bags(self) -> list[list[int]]:
        """The places in ``indices`` of each bag."""
        ends = (*self.offsets[1:], len(self.indices))
        bags = [range(*ends_) for ends_ in zip(self.offsets, ends, strict=True)]
        return [[k for k in bag if self.indices[k] != self.padding] for bag in bags]

    def bag_of(self, place: int) -> int:
        return max(b for b, begin in enumerate(self.offsets) if begin <= place)


def embedding_bag(o: Arrays, w: Array, bags: Bags, own: Array | None = None, mean: bool = False) -> Array:
    """own: the weight of each index."""
    out = np.empty((len(bags.offsets), w.shape[1]), object)
    for b, places in enumerate(bags.bags()):
        for c in range(w.shape[1]):
            rows = [w[bags.indices[k], c] for k in places]
            rows = rows if own is None else [o.o.mul(v, own[k]) for v, k in zip(rows, places, strict=True)]
            summed = o.o.added(rows)
            out[b, c] = o.o.div(summed, o.o.kept(float(max(1, len(places))))) if mean else summed
    return out


def embedding_bag_max(w: Array, bags: Bags) -> Array:
    """0 for a bag of nothing; a NaN leaves it open."""
    out = np.empty((len(bags.offsets), w.shape[1]), object)
    for b, places in enumerate(bags.bags()):
        for c in range(w.shape[1]):
            row = [w[bags.indices[k], c] for k in places]
            out[b, c] = None if any(map(math.isnan, row)) else max(row, default=0.0)
    return out


def embedding_bag_backward(o: Arrays, g: Array, rows: int, bags: Bags, own: Any = None, mean: bool = False) -> Array:
    sizes = [o.o.kept(float(max(1, len(places)))) for places in bags.bags()]
    parts = []
    for k, index in enumerate(bags.indices):
        b = bags.bag_of(k)
        for c in range(g.shape[1]) if index != bags.padding else ():
            v = o.o.div(g[b, c], sizes[b]) if mean else g[b, c]
            parts.append(((index, c), v if own is None else o.o.mul(v, own[k])))
    return o.gathered((rows, g.shape[1]), parts)


def embedding_bag_weights_backward(o: Arrays, g: Array, w: Array, bags: Bags) -> Array:
    found = []
    for k, index in enumerate(bags.indices):
        products = [o.o.mul(a, b) for a, b in zip(g[bags.bag_of(k)], w[index], strict=True)]
        found.append(0.0 if index == bags.padding else o.o.total(products))
    return np.array(found, object)
