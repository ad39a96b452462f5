"""Formulas of average pooling: a sum over the window in the order of its elements, divided by the count.

A window is a view (``unfold``), so no element is copied; windows of unequal lengths are filled with zeros at the end.

    before   y = aten.avg_pool2d.default(x, [2, 2], [2, 2])
    after    y = sum(x.unfold(2, 2, 2).unfold(3, 2, 2), [-2, -1]) / 4
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from itertools import groupby, pairwise

import torch
from torch import Tensor

from fxround.formulas.table import formula, total, widened

aten = torch.ops.aten


def _window_counts(size: int, out: int, kernel: int, stride: int, pad: int, include_pad: bool) -> list[int]:
    """How many elements the average of each window divides by, along one dimension."""
    starts = [i * stride - pad for i in range(out)]
    low, high = (-pad, size + pad) if include_pad else (0, size)
    return [min(s + kernel, high) - max(s, low) for s in starts]


def _divisor(counts: Sequence[list[int]], x: Tensor) -> Tensor | int:
    """The product of the counts of each dimension: a number where it is the same everywhere."""
    if all(len(set(c)) == 1 for c in counts):
        return math.prod(c[0] for c in counts)
    tables = [_table(c).reshape([-1 if i == d else 1 for i in range(len(counts))]) for d, c in enumerate(counts)]
    return reduce(torch.mul, tables).to(x.dtype)


def _table(values: Sequence[int]) -> Tensor:
    """An integer tensor of these values, made of operators: a constant would not trace as a function."""
    return torch.cat([torch.full([len(list(run))], value) for value, run in groupby(values)])


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
    """The number of windows; with ceil_mode a last one that starts inside the input or the left padding."""
    span = size + 2 * pad - kernel
    out = (-(-span // stride) if ceil_mode else span // stride) + 1
    return out - 1 if ceil_mode and (out - 1) * stride >= size + pad else out


@formula(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default, aten.adaptive_avg_pool1d.default)
def adaptive_avg_pool(x: Tensor, output_size: Sequence[int]) -> Tensor:
    """adaptive_avg_pool(x) = sum(window) / count, window i of n covering floor(i L / n) to ceil((i + 1) L / n)"""
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
    """x with ``dim`` cut in windows and their elements as a new last dimension, zeros after a shorter one."""
    size, longest = x.shape[dim], max(lengths)
    steps = {b - a for a, b in pairwise(starts)} or {longest}
    if len(set(lengths)) == 1 and len(steps) == 1:
        return x.unfold(dim, longest, steps.pop())
    k = torch.arange(longest)
    index = (_table(starts).unsqueeze(1) + k).clamp(max=size - 1)
    taken = x.index_select(dim, index.reshape(-1)).unflatten(dim, (len(starts), longest)).movedim(dim + 1, -1)
    inside = k < _table(lengths).reshape([-1] + [1] * (taken.dim() - dim - 1))
    return torch.where(inside, taken, torch.zeros([], dtype=x.dtype))
