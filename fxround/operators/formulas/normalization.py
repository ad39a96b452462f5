"""Formulas of the normalisation layers: two-pass moments, one rsqrt per group, then scale and shift.

layer_norm, for example, is ``d = x - sum(x) / n; y = (d * rsqrt(sum(d * d) / n + eps)) * w + b``. Batch norm multiplies
rsqrt and weight first (once per channel); layer and group norm multiply by rsqrt, then by weight. In the backward
formulas h stands for the normalised values d * rsqrt, and the three gradients share the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxround.operators.formulas.table import affine, channels, count, formula, total, widened

aten = torch.ops.aten


def _moments(x: Tensor, dims: Sequence[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (x - mean, mean, rsqrt(var + eps)), the statistics with their dimensions kept."""
    n = count(x, dims)
    center = total(x, dims, True) / n
    d = x - center
    return d, center, (total(d * d, dims, True) / n + eps).rsqrt()


@formula(aten.native_layer_norm.default, statistics=True)
def layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
    """layer_norm(x) = (d * rsqrt(sum(d * d) / n + eps)) * weight + bias, d = x - sum(x) / n"""
    dims = list(range(x.dim() - len(shape), x.dim()))
    d, center, rstd = _moments(widened(x), dims, eps)
    return tuple(t.to(x.dtype) for t in (affine(d * rstd, weight, bias), center, rstd))


@formula(aten.native_group_norm.default, statistics=True)
def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, N: Any, C: Any, HxW: Any, group: int, eps: float
) -> Any:
    """group_norm(x) = (d * rsqrt(sum(d * d) / n + eps)) * weight + bias, d = x - sum(x) / n over each group"""
    d, center, rstd = _moments(widened(x).reshape(N, group, C // group * HxW), [2], eps)
    y = (d * rstd).reshape(x.shape)
    y = affine(y, *(v if v is None else channels(v, x) for v in (weight, bias)))
    return tuple(t.to(x.dtype) for t in (y, center.squeeze(2), rstd.squeeze(2)))


def _normalized(x: Tensor, d: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    scale = rstd if weight is None else rstd * channels(weight, x)
    return affine(d * scale, None, None if bias is None else channels(bias, x))


@formula(aten._native_batch_norm_legit_no_training.default)
def batch_norm_inference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> Any:
    """batch_norm(x) = (x - mean) * (rsqrt(var + eps) * weight) + bias, with the running mean and var"""
    w = widened(x)
    d = w - channels(widened(mean), x)
    rstd = (widened(var) + eps).rsqrt()
    y = _normalized(x, d, channels(rstd, x), weight, bias)
    return y.to(x.dtype), x.new_empty(0), x.new_empty(0)


def _batch_norm_training(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Return the result, and the mean, rstd and sum(d * d) per channel."""
    w = widened(x)
    dims = [0, *range(2, x.dim())]
    n = count(x, dims)
    center = total(w, dims, True) / n
    d = w - center
    squares = total(d * d, dims, True)
    rstd = (squares / n + eps).rsqrt()
    return _normalized(x, d, rstd, weight, bias).to(x.dtype), center.reshape(-1), rstd.reshape(-1), squares.reshape(-1)


@formula(aten._native_batch_norm_legit.no_stats, statistics=True)
def batch_norm_without_statistics(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> Any:
    """batch_norm(x) = d * (rsqrt(sum(d * d) / n + eps) * weight) + bias, d = x - sum(x) / n over batch and space"""
    return _batch_norm_training(x, weight, bias, eps)[:3]


@formula(aten._native_batch_norm_legit_functional.default, statistics=True)
def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """training: as without statistics; running = (1 - m) * running + m * new, the new var being sum(d * d) / (n - 1)"""
    if not training:
        result = batch_norm_inference(x, weight, bias, running_mean, running_var, momentum, eps)
        return *result, running_mean, running_var
    y, center, rstd, squares = _batch_norm_training(x, weight, bias, eps)
    n = count(x, [0, *range(2, x.dim())])
    new_mean = running_mean * (1 - momentum) + (center * momentum).to(running_mean.dtype)
    new_var = running_var * (1 - momentum) + (squares / (n - 1) * momentum).to(running_var.dtype)
    return y, center, rstd, new_mean, new_var


def _normalized_backward(g: Tensor, h: Tensor, dims: Sequence[int]) -> Tensor:
    """Return (g - sum(g) / n) - h * (sum(g * h) / n), for a gradient g of the normalised values h."""
    n = count(h, dims)
    return (g - total(g, dims, True) / n) - h * (total(g * h, dims, True) / n)


def _affine_backward(gradient: Tensor, h: Tensor, dims: Sequence[int], mask: Sequence[bool]) -> tuple[Any, Any]:
    """Return the gradients of weight and bias."""
    return total(gradient * h, dims) if mask[1] else None, total(gradient, dims) if mask[2] else None


@formula(aten.native_layer_norm_backward.default)
def layer_norm_backward(
    gradient: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Sequence[bool],
) -> Any:
    """layer_norm_backward(g) = ((v - sum(v) / n - h * (sum(v * h) / n)) * rstd, sum(g * h), sum(g)), v = g * weight"""
    inner = list(range(x.dim() - len(shape), x.dim()))
    g, r = widened(gradient), widened(rstd)
    h = (widened(x) - widened(mean)) * r
    on_weight, on_bias = _affine_backward(g, h, list(range(x.dim() - len(shape))), mask)
    on_x = _normalized_backward(g if weight is None else g * weight, h, inner) * r if mask[0] else None
    return tuple(None if t is None else t.to(x.dtype) for t in (on_x, on_weight, on_bias))


@formula(aten.native_group_norm_backward.default)
def group_norm_backward(
    gradient: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    N: Any,
    C: Any,
    HxW: Any,
    group: int,
    mask: Sequence[bool],
) -> Any:
    """group_norm_backward(g) = as layer_norm_backward over each group; weight and bias over batch and space"""
    g, r = widened(gradient), widened(rstd).reshape(N, group, 1)
    h = (widened(x).reshape(N, group, C // group * HxW) - widened(mean).reshape(N, group, 1)) * r
    on_weight, on_bias = _affine_backward(g, h.reshape(x.shape), [0, *range(2, x.dim())], mask)
    v = g if weight is None else g * channels(weight, x)
    on_x = (_normalized_backward(v.reshape(h.shape), h, [2]) * r).reshape(x.shape) if mask[0] else None
    return tuple(None if t is None else t.to(x.dtype) for t in (on_x, on_weight, on_bias))


@formula(aten.native_batch_norm_backward.default)
def batch_norm_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    train: bool,
    eps: float,
    mask: Sequence[bool],
) -> Any:
    """batch_norm_backward(g) = (v * (rstd * weight), sum(g * h), sum(g)), v = g - sum(g) / n - h * (sum(g * h) / n)"""
    if not train:
        assert running_mean is not None and running_var is not None
        mean, rstd = running_mean, (widened(running_var) + eps).rsqrt()
    assert mean is not None and rstd is not None
    g, r = widened(gradient), channels(widened(rstd), x)
    dims = [0, *range(2, x.dim())]
    h = (widened(x) - channels(widened(mean), x)) * r
    on_weight, on_bias = _affine_backward(g, h, dims, mask)
    scale = r if weight is None else r * channels(weight, x)
    on_x = (_normalized_backward(g, h, dims) if train else g) * scale if mask[0] else None
    kinds = (x.dtype, x.dtype if weight is None else weight.dtype)
    return tuple(None if t is None else t.to(kinds[i > 0]) for i, t in enumerate((on_x, on_weight, on_bias)))


@formula(aten._weight_norm_interface.default)
def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Any:
    """weight_norm(v, g) = v * (g / sqrt(sum(v * v))), the sum over all dimensions but one"""
    norm = total(v * v, [d for d in range(v.dim()) if d != dim % v.dim()], True).sqrt()
    return v * (g / norm), norm
