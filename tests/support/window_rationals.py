"""Pools, interpolations and folds written over the arrays of ``array_rationals``, window by window.

Positions and taps are enumerated from the definitions in docs/numerics.md, section 5. Nothing is shared with fxround.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import formula_rationals as again
import numpy as np
from array_rationals import Arrays
from rationals import Array, Place


@dataclass(frozen=True)
class Pool:
    """An average pooling as PyTorch documents it."""

    kernel: Place
    stride: Place
    pad: Place
    ceil: bool = False
    include_pad: bool = True
    divisor: int | None = None

    def counts(self, sizes: Sequence[int]) -> Place:
        """How many windows there are: with ceil, the last one begins inside of the image or the padding before it."""
        found = []
        for n, k, s, p in zip(sizes, self.kernel, self.stride, self.pad, strict=True):
            steps = Fraction(n + 2 * p - k, s)
            last = math.ceil(steps) if self.ceil else math.floor(steps)
            found.append(last if self.ceil and last * s - p >= n else last + 1)
        return tuple(found)

    def window(self, index: Place) -> list[Place]:
        begin = [i * s - p for i, s, p in zip(index, self.stride, self.pad, strict=True)]
        return [tuple(b + t for b, t in zip(begin, tap, strict=True)) for tap in np.ndindex(*self.kernel)]

    def count(self, index: Place, sizes: Sequence[int]) -> int:
        if self.divisor is not None:
            return self.divisor
        margin = self.pad if self.include_pad else (0,) * len(sizes)
        return sum(_inside(place, sizes, margin) for place in self.window(index))


def _inside(place: Place, sizes: Sequence[int], margin: Place) -> bool:
    return all(-m <= p < n + m for p, n, m in zip(place, sizes, margin, strict=True))


def planes(x: Array, dims: int) -> tuple[Place, list[Place], Place]:
    """The dimensions before the image's, their indices, and the sizes of the image."""
    lead = x.shape[: x.ndim - dims]
    return lead, list(np.ndindex(*lead)), x.shape[x.ndim - dims :]


def avg_pool(o: Arrays, x: Array, pool: Pool) -> Array:
    lead, _, sizes = planes(x, len(pool.kernel))
    none = (0,) * len(sizes)
    out = np.empty((*lead, *pool.counts(sizes)), object)
    for i in np.ndindex(out.shape):
        plane, index = x[i[: len(lead)]], i[len(lead) :]
        window = [plane[place] if _inside(place, sizes, none) else 0.0 for place in pool.window(index)]
        out[i] = o.o.div(o.o.total(window), float(pool.count(index, sizes)))
    return out


def avg_pool_backward(o: Arrays, g: Array, sizes: Place, pool: Pool) -> Array:
    lead, indices, outs = planes(g, len(sizes))
    none = (0,) * len(sizes)
    parts = []
    for i in indices:
        for w in np.ndindex(*outs):
            share = o.o.div(g[(*i, *w)], float(pool.count(w, sizes)))
            parts += [((*i, *place), share) for place in pool.window(w) if _inside(place, sizes, none)]
    if pool.kernel == pool.stride and all(n == w * k for n, w, k in zip(sizes, outs, pool.kernel, strict=True)):
        out = np.empty((*lead, *sizes), object)
        for place, share in parts:
            out[place] = share
        return out
    return o.gathered((*lead, *sizes), parts)


def _adaptive(index: Place, sizes: Place, outs: Place) -> list[list[int]]:
    """The positions of a window along each dimension."""
    rows = zip(index, sizes, outs, strict=True)
    return [list(range(math.floor(i * n / w), math.ceil((i + 1) * n / w))) for i, n, w in rows]


def adaptive_avg_pool(o: Arrays, x: Array, outs: Place) -> Array:
    lead, _, sizes = planes(x, len(outs))
    everywhere = [_adaptive(index, sizes, outs) for index in np.ndindex(*outs)]
    longest = [max(len(window[d]) for window in everywhere) for d in range(len(outs))]
    out = np.empty((*lead, *outs), object)
    for i in np.ndindex(out.shape):
        plane, window = x[i[: len(lead)]], _adaptive(i[len(lead) :], sizes, outs)
        taken = []
        for tap in np.ndindex(*longest):
            inside = all(t < len(places) for t, places in zip(tap, window, strict=True))
            taken.append(plane[tuple(p[t] for p, t in zip(window, tap, strict=True))] if inside else 0.0)
        out[i] = o.o.div(o.o.total(taken), float(math.prod(map(len, window))))
    return out


def adaptive_avg_pool_backward(o: Arrays, g: Array, sizes: Place) -> Array:
    lead, indices, outs = planes(g, len(sizes))
    parts = []
    for i in indices:
        for w in np.ndindex(*outs):
            window = _adaptive(w, sizes, outs)
            share = o.o.div(g[(*i, *w)], float(math.prod(map(len, window))))
            parts += [((*i, *place), share) for place in itertools.product(*window)]
    return o.gathered((*lead, *sizes), parts)


def first_largest(plane: Array, places: Sequence[Place]) -> Place:
    """The first of the largest elements in the order of the index; a NaN is larger than all."""
    best = places[0]
    for place in places[1:]:
        v, top = plane[place], plane[best]
        if v > top or (math.isnan(v) and not math.isnan(top)):
            best = place
    return best


def adaptive_max_pool(o: Arrays, x: Array, outs: Place) -> Array:
    lead, _, sizes = planes(x, len(outs))
    out = np.empty((*lead, *outs), object)
    for i in np.ndindex(out.shape):
        plane, window = x[i[: len(lead)]], _adaptive(i[len(lead) :], sizes, outs)
        out[i] = plane[first_largest(plane, list(itertools.product(*window)))]
    return o.kept(out)


def max_pool(o: Arrays, x: Array, pool: Pool) -> Array:
    lead, _, sizes = planes(x, len(pool.kernel))
    out = np.empty((*lead, *pool.counts(sizes)), object)
    for i in np.ndindex(out.shape):
        plane = x[i[: len(lead)]]
        places = [p for p in pool.window(i[len(lead) :]) if _inside(p, sizes, (0,) * len(sizes))]
        out[i] = plane[first_largest(plane, places)]
    return o.kept(out)


def at_maxima(o: Arrays, g: Array, sizes: Place, indices: Array, apart: bool) -> Array:
    """indices: the row-major number of each window's largest element. apart: no two windows overlap."""
    lead, _, _ = planes(g, len(sizes))
    parts = [((*i[: len(lead)], *np.unravel_index(int(indices[i]), sizes)), g[i]) for i in np.ndindex(g.shape)]
    if not apart:
        return o.gathered((*lead, *sizes), parts)
    out = np.zeros((*lead, *sizes), object) + 0.0
    for place, v in parts:
        out[place] = v
    return out


def replication_pad_backward(o: Arrays, g: Array, sizes: Place, before: Place) -> Array:
    lead, _, _ = planes(g, len(sizes))
    parts = []
    for i in np.ndindex(g.shape):
        rows = zip(i[len(lead) :], before, sizes, strict=True)
        parts.append(((*i[: len(lead)], *(min(max(p - b, 0), n - 1) for p, b, n in rows)), g[i]))
    return o.gathered((*lead, *sizes), parts)


# Interpolation.


def source(
    i: int, size: int, out: int, scale: float | None, align: bool, number: Callable[[float], Any], clamp: bool = True
) -> Any:
    """Where an element of the result lies in the source, in the dtype's own arithmetic."""
    if align:
        return number((size - 1) / (out - 1) if out > 1 else 0.0) * number(i)
    ratio = number(size / out if scale is None else 1 / scale)
    at = (number(i) + number(0.5)) * ratio - number(0.5)
    return max(at, number(0)) if clamp else at


def _corners(
    o: Arrays, i: Place, sizes: Place, outs: Place, scale: float | None, align: bool
) -> list[tuple[int, int, float]]:
    """For each dimension, the two neighbours of a result and its distance from the first."""
    number: Callable[[float], Any] = np.float32 if o.o.short else np.float64
    found = []
    for p, n, w in zip(i, sizes, outs, strict=True):
        at = source(p, n, w, scale, align, number)
        low = int(at)
        found.append((low, min(low + 1, n - 1), again.clamped(o.o.sub(float(at), float(low)), 0.0, 1.0)))
    return found


def interpolated(o: Arrays, x: Array, outs: Place, scale: float | None = None, align: bool = False) -> Array:
    """(bi-, tri-)linear: the last dimension first."""
    lead, _, sizes = planes(x, len(outs))
    out = np.empty((*lead, *outs), object)
    for i in np.ndindex(out.shape):
        plane, corners = x[i[: len(lead)]], _corners(o, i[len(lead) :], sizes, outs, scale, align)

        def value(d: int, place: Place, plane: Array = plane, corners: Any = corners) -> float:
            if d == len(corners):
                return float(plane[place])
            low, high, weight = corners[d]
            left, right = value(d + 1, (*place, low)), value(d + 1, (*place, high))
            return o.o.add(left, o.o.mul(o.o.sub(right, left), weight))

        out[i] = value(0, ())
    return out


def interpolated_backward(
    o: Arrays, g: Array, sizes: Place, outs: Place, scale: float | None = None, align: bool = False
) -> Array:
    """Both neighbours of each dimension get their share; what the last corner adds up comes first."""
    lead, _, _ = planes(g, len(sizes))
    shares: dict[Place, list[tuple[Place, Any]]] = {c: [] for c in np.ndindex(*[2] * len(sizes))}
    for i in np.ndindex(g.shape):
        corners = _corners(o, i[len(lead) :], sizes, outs, scale, align)
        parts: dict[Place, Any] = {(): g[i]}
        for _, _, weight in corners:
            highs = {c: o.o.mul(v, weight) for c, v in parts.items()}
            lows = {(*c, 0): o.o.add(v, o.o.kept(-highs[c])) for c, v in parts.items()}
            parts = lows | {(*c, 1): v for c, v in highs.items()}
        for choice, v in parts.items():
            place = tuple(corner[up] for corner, up in zip(corners, choice, strict=True))
            shares[choice].append(((*i[: len(lead)], *place), v))
    return _accumulated(o, (*lead, *sizes), [shares[c] for c in sorted(shares, reverse=True)])


def _accumulated(o: Arrays, shape: Place, shares: Sequence[list[tuple[Place, Any]]]) -> Array:
    """Each list added up by itself, then the sums one after the other."""
    total, *rest = (o.gathered(shape, parts) for parts in shares)
    for more in rest:
        total = o.add(total, more)
    return total


def _cubic(o: Arrays, at: Any) -> tuple[int, list[float]]:
    """The element before a position, and the weights of the four around it: Keys's formula with a = -3/4."""
    low, f = math.floor(at), o.o
    t = again.clamped(f.sub(float(at), float(low)), 0.0, 1.0)

    def outer(x: float) -> float:
        return f.sub(f.mul(f.add(f.mul(f.sub(f.mul(x, -0.75), -3.75), x), -6.0), x), -3.0)

    def inner(x: float) -> float:
        return f.add(f.mul(f.mul(f.sub(f.mul(x, 1.25), 2.25), x), x), 1.0)

    rest = f.sub(1.0, t)
    return low, [outer(f.add(t, 1.0)), inner(t), inner(rest), outer(f.sub(2.0, t))]


def _taps(o: Arrays, i: Place, sizes: Place, outs: Place, align: bool) -> list[list[tuple[int, float]]]:
    """For each dimension, four places, beyond an edge those of the edge, and their weights."""
    number: Callable[[float], Any] = np.float32 if o.o.short else np.float64
    found = []
    for p, n, w in zip(i, sizes, outs, strict=True):
        low, weights = _cubic(o, source(p, n, w, None, align, number, clamp=False))
        found.append([(min(max(low - 1 + k, 0), n - 1), v) for k, v in enumerate(weights)])
    return found


def bicubic(o: Arrays, x: Array, outs: Place, align: bool = False) -> Array:
    lead, _, sizes = planes(x, 2)
    out = np.empty((*lead, *outs), object)
    for i in np.ndindex(out.shape):
        plane, (rows, columns) = x[i[:-2]], _taps(o, i[-2:], sizes, outs, align)
        lines = [_chained(o, [o.o.mul(float(plane[r, c]), v) for c, v in columns]) for r, _ in rows]
        out[i] = _chained(o, [o.o.mul(line, v) for line, (_, v) in zip(lines, rows, strict=True)])
    return out


def _chained(o: Arrays, terms: Sequence[float]) -> float:
    total, *rest = terms
    for term in rest:
        total = o.o.add(total, term)
    return total


def bicubic_backward(o: Arrays, g: Array, sizes: Place, outs: Place, align: bool = False) -> Array:
    """Sixteen sums, one for each tap, the last tap's first."""
    lead, _, _ = planes(g, 2)
    shares: dict[Place, list[tuple[Place, Any]]] = {c: [] for c in np.ndindex(4, 4)}
    for i in np.ndindex(g.shape):
        rows, columns = _taps(o, i[-2:], sizes, outs, align)
        for (r, (y, v)), (c, (x, w)) in itertools.product(enumerate(rows), enumerate(columns)):
            shares[r, c].append(((*i[:-2], y, x), o.o.mul(o.o.mul(g[i], v), w)))
    return _accumulated(o, (*lead, *sizes), [shares[c] for c in sorted(shares, reverse=True)])


def nearest_places(i: Place, sizes: Place, outs: Place, exact: bool) -> Place:
    """In binary32, whatever the dtype."""
    found = []
    for p, n, w in zip(i, sizes, outs, strict=True):
        found.append(int((np.float32(p) + np.float32(0.5 if exact else 0.0)) * np.float32(n / w)))
    return tuple(found)


def nearest(x: Array, outs: Place, exact: bool = False) -> Array:
    """A movement: no element is rounded."""
    lead, _, sizes = planes(x, len(outs))
    out = np.empty((*lead, *outs), object)
    for i in np.ndindex(out.shape):
        out[i] = x[(*i[: len(lead)], *nearest_places(i[len(lead) :], sizes, outs, exact))]
    return out


def nearest_backward(o: Arrays, g: Array, sizes: Place, exact: bool = False) -> Array:
    lead, _, outs = planes(g, len(sizes))
    parts = [
        ((*i[: len(lead)], *nearest_places(i[len(lead) :], sizes, outs, exact)), g[i]) for i in np.ndindex(g.shape)
    ]
    return o.gathered((*lead, *sizes), parts)


# Interpolation with antialias.


@dataclass(frozen=True)
class Antialias:
    """The filter of ``mode``, bilinear or bicubic, made wider where an image shrinks."""

    mode: str
    outs: Place
    align: bool = False
    scales: tuple[float | None, float | None] = (None, None)

    def at(self, t: Fraction) -> Fraction:
        t = abs(t)
        if self.mode == "bilinear":
            return max(1 - t, Fraction(0))
        if t <= 1:
            return Fraction(3, 2) * t**3 - Fraction(5, 2) * t**2 + 1
        return -(t**3) / 2 + Fraction(5, 2) * t**2 - 4 * t + 2 if t < 2 else Fraction(0)

    def weights(self, d: int, size: int) -> list[dict[int, float]]:
        """For every result of dimension d (0 or 1), the elements of its window and their weights."""
        out, scale = self.outs[d], self.scales[d]
        h = Fraction(size, out) if scale is None else 1 / Fraction(scale)
        if self.align:
            h = Fraction(size - 1, out - 1) if out > 1 else Fraction(0)
        wide, reach = max(h, Fraction(1)), 1 if self.mode == "bilinear" else 2
        found = []
        for i in range(out):
            c = h * (i + Fraction(1, 2)) - Fraction(1, 2)
            window = [j for j in range(size) if abs(j - c) < reach * wide]
            whole = sum(self.at((j - c) / wide) for j in window)
            found.append({j: float(self.at((j - c) / wide) / whole) for j in window})
        return found


def weighted(o: Arrays, x: Array, axis: int, weights: Sequence[dict[int, float]]) -> Array:
    """For every dictionary the sum of x at its places times the weights; the shorter ones end in zeros."""
    longest = max(map(len, weights))
    moved = np.moveaxis(x, axis, -1)
    out = np.empty((*moved.shape[:-1], len(weights)), object)
    for i in np.ndindex(out.shape):
        own = weights[i[-1]].items()
        terms = [(moved[(*i[:-1], j)], o.number(w)) for j, w in own] + [(0.0, 0.0)] * (longest - len(own))
        out[i] = o.o.total([o.o.mul(float(v), w) for v, w in terms])
    return np.moveaxis(out, -1, axis)


def antialiased(o: Arrays, x: Array, how: Antialias) -> Array:
    for axis in (-1, -2):
        x = weighted(o, x, axis, how.weights(axis, x.shape[axis]))
    return x


def antialiased_backward(o: Arrays, g: Array, sizes: Place, how: Antialias) -> Array:
    for axis in (-2, -1):
        forward = how.weights(axis, sizes[axis])
        g = weighted(o, g, axis, [{i: w[j] for i, w in enumerate(forward) if j in w} for j in range(sizes[axis])])
    return g


# Folds.


@dataclass(frozen=True)
class Blocks:
    """The sliding blocks of an image of ``sizes``, as PyTorch's fold and unfold have them."""

    sizes: Place
    kernel: Place
    stride: Place
    pad: Place
    dilation: Place

    @property
    def counts(self) -> Place:
        rows = zip(self.sizes, self.kernel, self.stride, self.pad, self.dilation, strict=True)
        return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in rows)

    def place(self, tap: Place, block: Place) -> Place:
        rows = zip(tap, block, self.stride, self.pad, self.dilation, strict=True)
        return tuple(b * s - p + t * d for t, b, s, p, d in rows)

    def elements(self) -> list[tuple[int, int, Place]]:
        """(row of the columns' array, column, place in the image), in the order in which a fold adds."""
        (h, w), (rows, columns) = self.kernel, self.counts
        found = []
        for u, p, v, q in np.ndindex(h, rows, w, columns):
            found.append((u * w + v, p * columns + q, self.place((u, v), (p, q))))
        return found


def unfold(x: Array, blocks: Blocks) -> Array:
    """(images, channels * taps, blocks)."""
    taps = math.prod(blocks.kernel)
    out = np.zeros((x.shape[0], x.shape[1] * taps, math.prod(blocks.counts)), object) + 0.0
    for n, c in np.ndindex(x.shape[:2]):
        for row, column, place in blocks.elements():
            if _inside(place, blocks.sizes, (0, 0)):
                out[n, c * taps + row, column] = x[(n, c, *place)]
    return out


def fold(o: Arrays, x: Array, blocks: Blocks) -> Array:
    """The blocks added up, over (tap's row, block's row, tap's column, block's column)."""
    taps, parts = math.prod(blocks.kernel), []
    channels = x.shape[1] // taps
    for n, c in np.ndindex(x.shape[0], channels):
        for row, column, place in blocks.elements():
            if _inside(place, blocks.sizes, (0, 0)):
                parts.append(((n, c, *place), x[n, c * taps + row, column]))
    return o.gathered((x.shape[0], channels, *blocks.sizes), parts)
