"""Formulas of scatters that do more than add: their sums are those of index_add and scatter_add, in source order.

A mean adds first and divides once by the number of terms. Products and maxima stay operators of the graph.
_embedding_bag, for example, is ``zeros.index_add(0, bag, w[indices])``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxround.operators.formulas.table import formula

aten = torch.ops.aten
_SUM, _MEAN = 0, 1


def _divided(total: Tensor, count: Tensor) -> Tensor:
    """Return total / count, with a count of at least 1."""
    return total / count.clamp(min=1).to(total.dtype)


@formula(aten.scatter_reduce.two)
def scatter_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    """scatter_reduce(x, i, s) = x with s added at i, x or 0 to begin with; a mean divides by the number of terms"""
    if reduce not in ("sum", "mean"):
        return NotImplemented
    begin = x if include_self else x.scatter(dim, index, 0.0)
    total = begin.scatter_add(dim, index, source)
    if reduce == "sum":
        return total
    own = torch.ones_like(x, dtype=torch.int64)
    own = own if include_self else own.scatter(dim, index, 0)
    return _divided(total, own.scatter_add(dim, index, torch.ones_like(index)))


@formula(aten.scatter.reduce)
def scatter(x: Tensor, dim: int, index: Tensor, source: Tensor, *, reduce: str) -> Any:
    """scatter(x, i, s, add) = x with s added at i, in the order of s"""
    return x.scatter_add(dim, index, source) if reduce == "add" else NotImplemented


@formula(aten.index_reduce.default)
def index_reduce(x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True) -> Any:
    """index_reduce(x, i, s, mean) = (x + the sum of s at i) / the number of terms, x or 0 to begin with"""
    if reduce not in ("mean", "amax", "amin") or not x.dim():
        return NotImplemented
    shape = [-1 if d == dim % x.dim() else 1 for d in range(x.dim())]
    wide = index.reshape(shape).expand(source.shape)
    return torch.scatter_reduce(x, dim, wide, source, reduce, include_self=include_self)


def _bags(indices: Tensor, offsets: Tensor, include_last_offset: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the bag of each index, the first index of each bag, and the index after its last."""
    begin = offsets[:-1] if include_last_offset else offsets
    end = torch.full_like(begin[:1], indices.shape[0])
    places = torch.arange(indices.shape[0], dtype=offsets.dtype, device=offsets.device)
    return torch.bucketize(places, begin, right=True) - 1, begin, torch.cat([begin[1:], end])


def _kept(indices: Tensor, padding_idx: int, rows: Any) -> Tensor:
    """Return whether each index differs from the padding index."""
    return indices != (padding_idx % rows if padding_idx >= 0 else -1)


def _sizes(kept: Tensor, begin: Tensor, end: Tensor) -> Tensor:
    """Return how many indices of each bag differ from the padding index."""
    before = torch.cat([torch.zeros_like(end[:1]), kept.to(end.dtype).cumsum(0)])
    return before[end] - before[begin]


@formula(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    """embedding_bag(w, i) = the sum of w[i] (times its sample's weight) from 0, in the order of i; a mean divides it"""
    if mode not in (_SUM, _MEAN) or sparse or scale_grad_by_freq:
        return NotImplemented
    bag, begin, end = _bags(indices, offsets, include_last_offset)
    rows = weight[indices]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    # Rows of the padding index go to an extra bag after the others, which is dropped.
    kept = _kept(indices, padding_idx, weight.shape[0])
    bag = torch.where(kept, bag, torch.full_like(bag, begin.shape[0]))
    total = weight.new_zeros(begin.shape[0] + 1, weight.shape[1]).index_add(0, bag, rows)[:-1]
    if mode == _MEAN:
        total = _divided(total, _sizes(kept, begin, end)[:, None])
    nothing = offsets.new_empty(0)
    return total, nothing, nothing, nothing


@formula(aten._embedding_bag_backward.default)
def embedding_bag_backward(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    offset2bag: Tensor,
    bag_size: Tensor,
    maximum_indices: Tensor,
    num_weights: Any,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Tensor | None,
    padding_idx: int = -1,
) -> Any:
    """embedding_bag_backward(g, i) = 0 with g of the bag (of a mean: over its size) added at i, in the order of i"""
    if mode not in (_SUM, _MEAN) or sparse or scale_grad_by_freq:
        return NotImplemented
    bag, begin, end = _bags(indices, offsets[: grad.shape[0]], False)
    kept = _kept(indices, padding_idx, num_weights)
    rows = (_divided(grad, _sizes(kept, begin, end)[:, None]) if mode == _MEAN else grad)[bag]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    places = torch.where(kept, indices, torch.full_like(indices, 0) + num_weights)
    return grad.new_zeros(num_weights + 1, grad.shape[1]).index_add(0, places, rows)[:-1]


@formula(aten._embedding_bag_per_sample_weights_backward.default)
def embedding_bag_weights_backward(
    grad: Tensor,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    offset2bag: Tensor,
    mode: int,
    padding_idx: int = -1,
) -> Any:
    """embedding_bag_weights_backward(g, w, i) = sum(g of the bag * w[i]) over a row, 0 for padding"""
    bag, _, _ = _bags(indices, offsets[: grad.shape[0]], False)
    products = (grad[bag] * weight[indices]).sum(1)
    return torch.where(_kept(indices, padding_idx, weight.shape[0]), products, torch.zeros_like(products))
