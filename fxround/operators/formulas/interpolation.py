"""Formulas of interpolations that widen their filter when they shrink an image (``antialias=True``).

Every element of the result is a weighted sum of the source elements under a filter, along the last dimension first and
then along the one before. The weights depend on sizes alone: they are computed as rational numbers and become constants
of the graph, rounded to binary64 and then to the dtype. The derivative is the same sum with the weights transposed,
the dimensions in the opposite order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from typing import Any, Final

import torch
from torch import Tensor

from fxround.operators.formulas.table import constant, formula, total, widened

aten = torch.ops.aten


@dataclass(frozen=True)
class _Filter:
    """A filter that is 0 outside of (-reach, reach); value: of a number inside."""

    reach: int
    value: Callable[[Fraction], Fraction]


def _triangle(t: Fraction) -> Fraction:
    return 1 - abs(t)


def _cubic(t: Fraction) -> Fraction:
    """Return cubic convolution with a = -1/2 (Keys 1981, IEEE Trans. Acoustics, Speech and Signal Processing 29)."""
    t, a = abs(t), Fraction(-1, 2)
    return ((a + 2) * t - (a + 3)) * t * t + 1 if t <= 1 else ((a * t - 5 * a) * t + 8 * a) * t - 4 * a


_TRIANGLE: Final = _Filter(1, _triangle)
_CUBIC: Final = _Filter(2, _cubic)

# Of each result: the first source element and the weights from there on.
_Rows = list[tuple[int, list[float]]]


def _weights(kernel: _Filter, size: int, out: int, align: bool, scale: float | None) -> _Rows:
    """Return the weights of every result along one dimension of ``size`` source elements.

    align: PyTorch's align_corners. scale: results for a source element; None means out / size.
    """
    step = Fraction(size, out) if scale is None or scale <= 0 else 1 / Fraction(scale)
    if align:
        step = Fraction(size - 1, out - 1) if out > 1 else Fraction(0)
    wide = max(step, Fraction(1))
    rows = []
    for i in range(out):
        center = step * Fraction(2 * i + 1, 2) - Fraction(1, 2)
        low, high = floor(center - kernel.reach * wide) + 1, ceil(center + kernel.reach * wide)
        window = range(max(low, 0), min(high, size))
        values = [kernel.value((j - center) / wide) for j in window]
        whole = sum(values) or Fraction(1)
        rows.append((window.start, [float(v / whole) for v in values]))
    return rows


def _transposed(rows: _Rows, size: int) -> _Rows:
    """Return, for every source element, the first result that it enters and its weights from there on."""
    columns: list[tuple[int, list[float]]] = [(0, []) for _ in range(size)]
    for i, (start, weights) in enumerate(rows):
        for j, weight in enumerate(weights, start):
            first, column = columns[j]
            columns[j] = (first if column else i, [*column, weight])
    return columns


def _weighted(x: Tensor, dim: int, rows: _Rows) -> Tensor:
    """Return sum(window * w) along a dimension; a shorter window ends in zeros."""
    size, longest = int(x.shape[dim]), max(len(weights) for _, weights in rows)
    places = [[start + k if k < len(own) else size for k in range(longest)] for start, own in rows]
    table = [[*weights, *[0.0] * (longest - len(weights))] for _, weights in rows]
    longer = aten.constant_pad_nd(x, [0, 0] * (x.dim() - dim - 1) + [0, 1], 0.0)
    index = constant([p for row in places for p in row], torch.int64, x.device)
    taken = longer.index_select(dim, index).unflatten(dim, (len(rows), longest)).movedim(dim + 1, -1)
    weights = constant(table, x.dtype, x.device).reshape([len(rows), *[1] * (x.dim() - dim - 1), longest])
    return total(taken * weights, [-1])


def _interpolated(kernel: _Filter, x: Tensor, outs: Sequence[int], align: bool, scales: Sequence[Any]) -> Tensor:
    w = widened(x)
    for d in (3, 2):
        w = _weighted(w, d, _weights(kernel, int(x.shape[d]), int(outs[d - 2]), align, scales[d - 2]))
    return w.to(x.dtype)


def _spread(kernel: _Filter, g: Tensor, sizes: Sequence[int], align: bool, scales: Sequence[Any]) -> Tensor:
    w = widened(g)
    for d in (2, 3):
        rows = _weights(kernel, int(sizes[d]), int(g.shape[d]), align, scales[d - 2])
        w = _weighted(w, d, _transposed(rows, int(sizes[d])))
    return w.to(g.dtype)


@formula(aten._upsample_bilinear2d_aa.default)
def bilinear_aa(
    x: Tensor, output_size: Sequence[int], align_corners: bool, scales_h: Any = None, scales_w: Any = None
) -> Tensor:
    """bilinear_aa(x) = sum(window * w) along the last dimension, then along the one before"""
    return _interpolated(_TRIANGLE, x, output_size, align_corners, (scales_h, scales_w))


@formula(aten._upsample_bicubic2d_aa.default)
def bicubic_aa(
    x: Tensor, output_size: Sequence[int], align_corners: bool, scales_h: Any = None, scales_w: Any = None
) -> Tensor:
    """bicubic_aa(x) = sum(window * w) along the last dimension, then along the one before"""
    return _interpolated(_CUBIC, x, output_size, align_corners, (scales_h, scales_w))


@formula(aten._upsample_bilinear2d_aa_backward.default)
def bilinear_aa_backward(
    gradient: Tensor,
    output_size: Sequence[int],
    input_size: Sequence[int],
    align_corners: bool,
    scales_h: Any = None,
    scales_w: Any = None,
) -> Tensor:
    """bilinear_aa_backward(g) = sum(g * w) over the windows of an element, in their order, the last dimension last"""
    return _spread(_TRIANGLE, gradient, input_size, align_corners, (scales_h, scales_w))


@formula(aten._upsample_bicubic2d_aa_backward.default)
def bicubic_aa_backward(
    gradient: Tensor,
    output_size: Sequence[int],
    input_size: Sequence[int],
    align_corners: bool,
    scales_h: Any = None,
    scales_w: Any = None,
) -> Tensor:
    """bicubic_aa_backward(g) = sum(g * w) over the windows of an element, in their order, the last dimension last"""
    return _spread(_CUBIC, gradient, input_size, align_corners, (scales_h, scales_w))
