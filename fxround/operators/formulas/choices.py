"""Formulas of maxima and minima that distinguish zeros, -0 below +0, and return NaN if any is (IEEE 754-2019, 9.6).

PyTorch's own kernels return either zero, depending on which one their vectors meet first: in the middle of a tensor
another one than at its end, so that a row's result could depend on the batch, or on the processor. The same holds for
the bits of a NaN: here a maximum of many gives the one quiet NaN, and a maximum of two gives its second operand if that
is a NaN, else its first.
"""

from __future__ import annotations

import math
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import Tensor

from fxround.operators.formulas.table import formula, reduced_dims

aten = torch.ops.aten

# Whether aten.amax and aten.amin mean PyTorch's kernels, without the formulas of this file.
_RAW: Final[ContextVar[bool]] = ContextVar("raw", default=False)


@formula(aten.maximum.default)
def maximum(x: Tensor, y: Tensor) -> Tensor:
    """maximum(x, y) = the larger one, -0 below +0; NaN if either is"""
    return torch.where((x < y) | y.isnan() | ((x == y) & x.signbit()), y, x)


@formula(aten.minimum.default)
def minimum(x: Tensor, y: Tensor) -> Tensor:
    """minimum(x, y) = the smaller one, -0 below +0; NaN if either is"""
    return torch.where((y < x) | y.isnan() | ((x == y) & y.signbit()), y, x)


@formula(aten.clamp.Tensor)
def clamp(x: Tensor, min: Tensor | None = None, max: Tensor | None = None) -> Tensor:
    """clamp(x, low, high) of tensors = minimum(maximum(x, low), high)"""
    risen = x if min is None else maximum(x, min)
    return risen if max is None else minimum(risen, max)


@formula(aten.clamp_min.Tensor)
def clamp_min(x: Tensor, min: Tensor) -> Tensor:
    """clamp(x, low, high) of tensors = minimum(maximum(x, low), high)"""
    return maximum(x, min)  # type: ignore[no-any-return]


@formula(aten.clamp_max.Tensor)
def clamp_max(x: Tensor, max: Tensor) -> Tensor:
    """clamp(x, low, high) of tensors = minimum(maximum(x, low), high)"""
    return minimum(x, max)  # type: ignore[no-any-return]


def largest(x: Tensor, dims: Any, keepdim: bool) -> Tensor:
    """Return amax by PyTorch's kernel, for formulas whose result is the same for either zero, and for every NaN."""
    return _raw(torch.amax, x, dims, keepdim)


def smallest(x: Tensor, dims: Any, keepdim: bool) -> Tensor:
    """Return amin by PyTorch's kernel, under the same condition as ``largest``."""
    return _raw(torch.amin, x, dims, keepdim)


def _raw(reduce: Any, x: Tensor, dims: Any, keepdim: bool) -> Tensor:
    token = _RAW.set(True)
    try:
        result: Tensor = reduce(x, dims, keepdim)
    finally:
        _RAW.reset(token)
    return result


@formula(aten.amax.default)
def amax(x: Tensor, dim: Any = (), keepdim: bool = False) -> Any:
    """amax(x) = the largest one, -0 below +0; NaN if any is"""
    if _RAW.get():
        return NotImplemented
    extreme = largest(x, dim, keepdim)
    positive = ((x == 0) & ~x.signbit()).any(reduced_dims(x, dim), keepdim)
    return one_nan(_zeros(extreme, extreme == 0, positive))


@formula(aten.amin.default)
def amin(x: Tensor, dim: Any = (), keepdim: bool = False) -> Any:
    """amin(x) = the smallest one, -0 below +0; NaN if any is"""
    if _RAW.get():
        return NotImplemented
    extreme = smallest(x, dim, keepdim)
    negative = ((x == 0) & x.signbit()).any(reduced_dims(x, dim), keepdim)
    return one_nan(_zeros(extreme, extreme == 0, ~negative))


def one_nan(values: Tensor) -> Tensor:
    """Return ``values`` with the one quiet NaN in place of any NaN.

    Where PyTorch's kernels use vectors they return the NaN 0xffffffff.
    """
    return values.masked_fill(values.isnan(), math.nan)


def _zeros(values: Tensor, zero: Tensor, positive: Tensor) -> Tensor:
    return values.masked_fill(zero & positive, 0.0).masked_fill(zero & ~positive, -0.0)


@formula(aten.max.default)
def max_of_all(x: Tensor) -> Tensor:
    """max(x) = amax(x) over all elements"""
    return amax(x, reduced_dims(x, None))  # type: ignore[no-any-return]


@formula(aten.min.default)
def min_of_all(x: Tensor) -> Tensor:
    """min(x) = amin(x) over all elements"""
    return amin(x, reduced_dims(x, None))  # type: ignore[no-any-return]


@formula(aten.aminmax.default)
def aminmax(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """aminmax(x) = (amin(x), amax(x))"""
    dims = reduced_dims(x, dim)
    return amin(x, dims, keepdim), amax(x, dims, keepdim)
