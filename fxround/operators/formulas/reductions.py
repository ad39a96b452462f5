"""Formulas of sums, means, variances, norms of vectors and softmax: a reduction, then its arithmetic.

A mean divides by n (it does not multiply by 1/n), a variance is two-pass, a softmax subtracts the maximum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxround.operators.formulas.choices import largest, one_nan, smallest
from fxround.operators.formulas.table import count, formula, reduced_dims, total, widened

aten = torch.ops.aten


@formula(aten.mean.default, aten.mean.dim)
def mean(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """mean(x) = sum(x) / n"""
    kept = dtype or x.dtype
    w = widened(x.to(kept))
    dims = reduced_dims(x, dim)
    return (total(w, dims, keepdim) / count(x, dims)).to(kept)


def _variance(x: Tensor, dims: Sequence[int], correction: Any, keepdim: bool) -> tuple[Tensor, Tensor]:
    center = total(x, dims, True) / count(x, dims)
    d = x - center
    n = count(x, dims) - correction
    divisor = max(n, 0) if isinstance(n, int | float) else n
    return total(d * d, dims, keepdim) / divisor, center if keepdim else center.squeeze(list(dims))


def _correction(unbiased: Any) -> Any:
    return 1 if unbiased is None else unbiased


@formula(aten.var.correction)
def var(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    """var(x) = sum(d * d) / (n - correction), d = x - sum(x) / n"""
    return _variance(widened(x), reduced_dims(x, dim), _correction(correction), keepdim)[0].to(x.dtype)


@formula(aten.std.correction)
def std(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    """std(x) = sqrt(var(x))"""
    return _variance(widened(x), reduced_dims(x, dim), _correction(correction), keepdim)[0].sqrt().to(x.dtype)


@formula(aten.var_mean.correction)
def var_mean(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    """var_mean(x) = (var(x), sum(x) / n)"""
    variance, center = _variance(widened(x), reduced_dims(x, dim), _correction(correction), keepdim)
    return variance.to(x.dtype), center.to(x.dtype)


@formula(aten.std_mean.correction)
def std_mean(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    """std_mean(x) = (sqrt(var(x)), sum(x) / n)"""
    variance, center = _variance(widened(x), reduced_dims(x, dim), _correction(correction), keepdim)
    return variance.sqrt().to(x.dtype), center.to(x.dtype)


@formula(aten.linalg_vector_norm.default)
def linalg_vector_norm(
    x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """norm(x) = sqrt(sum(x * x)) for ord 2, sum(|x|) for 1, max or min of |x| for +-inf, sum(|x|^ord)^(1/ord) else"""
    kept = dtype or x.dtype
    w, dims = widened(x.to(kept)), reduced_dims(x, dim)
    if ord == 2:
        return total(w * w, dims, keepdim).sqrt().to(kept)
    if ord == 0:
        return total((w != 0).to(w.dtype), dims, keepdim).to(kept)
    if math.isinf(ord):
        return one_nan((largest if ord > 0 else smallest)(w.abs(), dims, keepdim)).to(kept)
    powers = total(w.abs() if ord == 1 else w.abs() ** ord, dims, keepdim)
    return (powers if ord == 1 else powers ** (1.0 / ord)).to(kept)


@formula(aten.dist.default)
def dist(x: Tensor, y: Tensor, p: Any = 2) -> Tensor:
    """dist(x, y) = norm(x - y)"""
    return linalg_vector_norm(x - y, p)  # type: ignore[no-any-return]


@formula(aten.logsumexp.default)
def logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """logsumexp(x) = log(sum(exp(x - m))) + m, m = amax(x), and 0 where that is infinite"""
    w, dims = widened(x), reduced_dims(x, dim)
    top = largest(w, dims, True)
    top = torch.where(top.abs() == math.inf, torch.zeros_like(top), top)
    result = total((w - top).exp(), dims, True).log() + top
    return (result if keepdim else result.squeeze(dims)).to(x.dtype)


def _exponentials(x: Tensor, dim: int) -> Tensor:
    return (x - largest(x, [dim], True)).exp()


@formula(aten._softmax.default, statistics=True)
def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """softmax(x) = e / sum(e), e = exp(x - amax(x))"""
    kept = torch.float32 if half_to_float else x.dtype
    if x.dim() and x.shape[dim] == 0:
        return x.to(kept).clone()
    e = _exponentials(widened(x), dim)
    return (e / total(e, [dim], True)).to(kept)


@formula(aten._safe_softmax.default, statistics=True)
def safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """safe_softmax(x) = softmax(x), and 0 in a row whose entries are all -inf"""
    x = x.to(dtype or x.dtype)
    if x.dim() and x.shape[dim] == 0:
        return x.clone()
    w = widened(x)
    top = largest(w, [dim], True)
    e = (w - top).exp()
    return torch.where(top == -math.inf, torch.zeros_like(x), (e / total(e, [dim], True)).to(x.dtype))


@formula(aten._log_softmax.default, statistics=True)
def log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """log_softmax(x) = s - log(sum(exp(s))), s = x - amax(x)"""
    kept = torch.float32 if half_to_float else x.dtype
    if x.dim() and x.shape[dim] == 0:
        return x.to(kept).clone()
    w = widened(x)
    shifted = w - largest(w, [dim], True)
    return (shifted - total(shifted.exp(), [dim], True).log()).to(kept)


@formula(aten._softmax_backward_data.default)
def softmax_backward(gradient: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """softmax_backward(g) = y * (g - sum(g * y))"""
    g, w = widened(gradient), widened(y)
    return (w * (g - total(g * w, [dim], True))).to(input_dtype)


@formula(aten._log_softmax_backward_data.default)
def log_softmax_backward(gradient: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """log_softmax_backward(g) = g - exp(y) * sum(g)"""
    g, w = widened(gradient), widened(y)
    return (g - w.exp() * total(g, [dim], True)).to(input_dtype)
