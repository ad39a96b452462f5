"""Formulas of pooling and of its gradients: a sum over the window in the order of its elements, divided by the count.

avg_pool2d with windows of 2x2, for example, is ``sum(x.unfold(2, 2, 2).unfold(3, 2, 2), [-2, -1]) / 4``. A window is a
view (``unfold``), so no element is copied; windows of unequal lengths are filled with zeros at the end. In the backward
formulas every element of a window gets the window's share; where windows overlap, an element adds up its shares in the
order of the windows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from itertools import groupby, pairwise

import torch
from torch import Tensor

from fxround.operators.formulas.table import formula, total, widened

aten = torch.ops.aten


def _window_counts(size: int, out: int, kernel: int, stride: int, pad: int, include_pad: bool) -> list[int]:
    """Return how many elements the average of each window divides by, along one dimension."""
    starts = [i * stride - pad for i in range(out)]
    low, high = (-pad, size + pad) if include_pad else (0, size)
    return [min(s + kernel, high) - max(s, low) for s in starts]


def _divisor(counts: Sequence[list[int]], x: Tensor) -> Tensor | int:
    """Return the product of the counts of each dimension, as a number where it is the same everywhere."""
    if all(len(set(c)) == 1 for c in counts):
        return math.prod(c[0] for c in counts)
    axes = range(len(counts))
    tables = [_table(c, x.device).reshape([-1 if i == d else 1 for i in axes]) for d, c in enumerate(counts)]
    return reduce(torch.mul, tables).to(x.dtype)


def _table(values: Sequence[int], device: torch.device) -> Tensor:
    """Return an integer tensor of these values, made of operators: a constant tensor would not trace as a function."""
    return torch.cat([torch.full([len(list(run))], value, device=device) for value, run in groupby(values)])


@formula(aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default)
def avg_pool(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """avg_pool(x) = sum(window) / count, the window padded with zeros, the count as PyTorch documents it"""
    n = len(kernel_size) if len(kernel_size) > 1 else x.dim() - 2
    full = [list(v) * n if len(v) == 1 else list(v) for v in (kernel_size, stride or kernel_size, padding)]
    w = widened(x)
    counts: list[list[int]] = []
    padded: list[int] = []
    for size, k, s, p in zip(x.shape[-n:], *full, strict=True):
        out = _pooled(size, k, s, p, ceil_mode)
        counts.append(_window_counts(size, out, k, s, p, count_include_pad))
        padded = [p, max(0, (out - 1) * s + k - size - p), *padded]
    windows = w if not any(padded) else aten.constant_pad_nd(w, padded, 0.0)
    for d, (k, s, c) in enumerate(zip(full[0], full[1], counts, strict=True)):
        windows = windows.unfold(x.dim() - n + d, k, s).narrow(x.dim() - n + d, 0, len(c))
    summed = total(windows, list(range(-n, 0)))
    return (summed / (divisor_override or _divisor(counts, w))).to(x.dtype)


def _pooled(size: int, kernel: int, stride: int, pad: int, ceil_mode: bool) -> int:
    """Return the number of windows.

    With ceil_mode it includes a last one that starts inside the input or the left padding.
    """
    span = size + 2 * pad - kernel
    out = (-(-span // stride) if ceil_mode else span // stride) + 1
    return out - 1 if ceil_mode and (out - 1) * stride >= size + pad else out


@formula(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default, aten.adaptive_avg_pool1d.default)
def adaptive_avg_pool(x: Tensor, output_size: Sequence[int]) -> Tensor:
    """adaptive_avg_pool(x) = sum(window) / count, window i of n floor(i L / n) to ceil((i + 1) L / n), filled with 0"""
    n = len(output_size)
    sizes = x.shape[-n:]
    w = widened(x)
    counts: list[list[int]] = []
    for d, (size, out) in enumerate(zip(sizes, output_size, strict=True)):
        starts = [i * size // out for i in range(out)]
        lengths = [-(-(i + 1) * size // out) - s for i, s in enumerate(starts)]
        w = _windows(w, x.dim() - n + d, starts, lengths)
        counts.append(lengths)
    return (total(w, list(range(-n, 0))) / _divisor(counts, w)).to(x.dtype)


def _windows(x: Tensor, dim: int, starts: list[int], lengths: list[int]) -> Tensor:
    """Return x with ``dim`` cut into windows and their elements as a new last dimension, zeros after a shorter one."""
    size, longest = x.shape[dim], max(lengths)
    steps = {b - a for a, b in pairwise(starts)} or {longest}
    # One element that all windows share has no step that ``unfold`` takes.
    if len(set(lengths)) == 1 and len(steps) == 1 and steps != {0}:
        return x.unfold(dim, longest, steps.pop())
    # Shorter windows are filled from a zero that is appended to the dimension: a copy, which rounds nothing.
    longer = aten.constant_pad_nd(x, [0, 0] * (x.dim() - dim - 1) + [0, 1], 0.0)
    k = torch.arange(longest, device=x.device)
    ends, begins = (_table(values, x.device).unsqueeze(1) for values in (lengths, starts))
    index = torch.where(k < ends, begins + k, size)
    taken = longer.index_select(dim, index.reshape(-1)).unflatten(dim, (len(starts), longest))
    moved: Tensor = taken.movedim(dim + 1, -1)
    return moved


def _spread(g: Tensor, sizes: Sequence[int], starts: Sequence[list[int]], lengths: Sequence[list[int]]) -> Tensor:
    """Add each element of g (..., windows) to every element of its window, which gives (..., *sizes).

    Window k of dimension d starts at starts[d][k] and has lengths[d][k] elements. Those outside of the sizes get
    nothing.
    """
    n = len(sizes)
    flat: Tensor | None = None
    for d, size in enumerate(sizes):
        tap = torch.arange(max(lengths[d]), device=g.device)
        position = _table(starts[d], g.device).unsqueeze(1) + tap
        inside = (tap < _table(lengths[d], g.device).unsqueeze(1)) & (position >= 0) & (position < size)
        # Elements outside go to an extra row per dimension, which is dropped below.
        own = torch.where(inside, position, size).reshape(_axes(position, d, n))
        flat = own if flat is None else flat * (size + 1) + own
    assert flat is not None
    windows, taps = math.prod(len(s) for s in starts), math.prod(max(k) for k in lengths)
    rows = g.reshape(-1, windows).t()
    source = rows.unsqueeze(1).expand(windows, taps, rows.shape[1]).reshape(windows * taps, rows.shape[1])
    full = [size + 1 for size in sizes]
    empty = g.new_zeros([math.prod(full), rows.shape[1]])
    spread: Tensor = aten.index_put(empty, [flat.reshape(-1)], source, True).t().reshape([-1, *full])
    for d, size in enumerate(sizes):
        spread = spread.narrow(d + 1, 0, size)
    return spread.reshape([*g.shape[: g.dim() - n], *sizes])


def _axes(table: Tensor, d: int, n: int) -> list[int]:
    """Return the shape of a (window, tap) table of dimension d among n dimensions of windows and n of taps."""
    shape = [1] * (2 * n)
    shape[d], shape[n + d] = table.shape
    return shape


@formula(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
def avg_pool_backward(
    gradient: Tensor,
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    """avg_pool_backward(g) = sum of g / count over the windows of an element, in their order; moved where they tile"""
    n = 3 if len(kernel_size) == 3 or x.dim() == 5 else 2
    full = [list(v) * n if len(v) == 1 else list(v) for v in (kernel_size, stride or kernel_size, padding)]
    sizes, outs = list(x.shape[-n:]), list(gradient.shape[-n:])
    rows = list(zip(sizes, outs, *full, strict=True))
    counts = [_window_counts(size, out, k, s, p, count_include_pad) for size, out, k, s, p in rows]
    g = widened(gradient)
    share = g / (divisor_override or _divisor(counts, g))
    if all(size == out * k and s == k and p == 0 for size, out, k, s, p in rows):
        return _repeated(share, full[0]).to(gradient.dtype)
    starts = [[i * s - p for i in range(out)] for _, out, _, s, p in rows]
    return _spread(share, sizes, starts, [[k] * out for _, out, k, _, _ in rows]).to(gradient.dtype)


def _repeated(share: Tensor, taps: Sequence[int]) -> Tensor:
    """Return every element repeated over its window, for windows that tile the plane."""
    n = len(taps)
    lead, outs = list(share.shape[: share.dim() - n]), list(share.shape[share.dim() - n :])
    apart = share.reshape([*lead, *(size for out in outs for size in (out, 1))])
    tiled = apart.expand([*lead, *(size for pair in zip(outs, taps, strict=True) for size in pair)])
    return tiled.reshape([*lead, *(out * k for out, k in zip(outs, taps, strict=True))])


@formula(aten._adaptive_avg_pool2d_backward.default)
def adaptive_avg_pool2d_backward(gradient: Tensor, x: Tensor) -> Tensor:
    """adaptive_avg_pool_backward(g) = sum of g / count over the windows of an element, in their order"""
    return _adaptive_avg_backward(gradient, x, 2)


@formula(aten._adaptive_avg_pool3d_backward.default)
def adaptive_avg_pool3d_backward(gradient: Tensor, x: Tensor) -> Tensor:
    """adaptive_avg_pool_backward(g) = sum of g / count over the windows of an element, in their order"""
    return _adaptive_avg_backward(gradient, x, 3)


def _adaptive_avg_backward(gradient: Tensor, x: Tensor, n: int) -> Tensor:
    sizes, outs = list(x.shape[-n:]), list(gradient.shape[-n:])
    starts = [[i * size // out for i in range(out)] for size, out in zip(sizes, outs, strict=True)]
    ends = [[-(-(i + 1) * size // out) for i in range(out)] for size, out in zip(sizes, outs, strict=True)]
    lengths = [[e - s for s, e in zip(*pair, strict=True)] for pair in zip(starts, ends, strict=True)]
    g = widened(gradient)
    return _spread(g / _divisor(lengths, g), sizes, starts, lengths).to(gradient.dtype)


@formula(
    aten.replication_pad1d_backward.default,
    aten.replication_pad2d_backward.default,
    aten.replication_pad3d_backward.default,
)
def replication_pad_backward(gradient: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor:
    """replication_pad_backward(g) = sum of g over the copies of an element, in their order"""
    n = len(padding) // 2
    sizes = list(x.shape[-n:])
    lows = [padding[2 * (n - 1 - d)] for d in range(n)]
    outs = list(gradient.shape[-n:])
    copies = [[min(max(i - lows[d], 0), sizes[d] - 1) for i in range(outs[d])] for d in range(n)]
    return _spread(gradient, sizes, copies, [[1] * out for out in outs])


@formula(
    aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices_backward.default,
)
def max_pool_backward(
    gradient: Tensor,
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Tensor,
) -> Tensor:
    """max_pool_backward(g) = g added at the maxima, in the order of the windows; moved there where none overlap"""
    n = 3 if len(kernel_size) == 3 or x.dim() == 5 else 2
    full = [list(v) * n if len(v) == 1 else list(v) for v in (kernel_size, stride or kernel_size, dilation)]
    apart = all(s > d * (k - 1) for k, s, d in zip(*full, strict=True))
    return _at_maxima(gradient, x, indices, n, apart)


@formula(aten.adaptive_max_pool2d_backward.default)
def adaptive_max_pool2d_backward(gradient: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    """adaptive_max_pool_backward(g) = g added at the maxima, in the order of the windows"""
    return _at_maxima(gradient, x, indices, 2, apart=False)


@formula(aten.adaptive_max_pool3d_backward.default)
def adaptive_max_pool3d_backward(gradient: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    """adaptive_max_pool_backward(g) = g added at the maxima, in the order of the windows"""
    return _at_maxima(gradient, x, indices, 3, apart=False)


def _at_maxima(gradient: Tensor, x: Tensor, indices: Tensor, n: int, apart: bool) -> Tensor:
    empty = torch.zeros_like(x).reshape(-1, math.prod(x.shape[-n:]))
    where, values = (t.reshape(-1, math.prod(indices.shape[-n:])) for t in (indices, gradient))
    moved = empty.scatter(1, where, values) if apart else empty.scatter_add(1, where, values)
    return moved.reshape(x.shape)
