"""Formulas of the normalisation layers: two-pass moments, one rsqrt per group, then scale and shift.

Batch norm multiplies rsqrt and weight first (once a channel), layer and group norm multiply by rsqrt, then by weight.

    before   y = aten.native_layer_norm.default(x, [n], w, b, eps)[0]
    after    d = x - sum(x) / n; y = (d * rsqrt(sum(d * d) / n + eps)) * w + b
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxround.formulas.table import affine, channels, count, formula, total, widened

aten = torch.ops.aten


def _moments(x: Tensor, dims: Sequence[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mean, mean, rsqrt(var + eps)), the statistics with their dimensions kept."""
    n = count(x, dims)
    center = total(x, dims, True) / n
    d = x - center
    return d, center, (total(d * d, dims, True) / n + eps).rsqrt()


@formula(aten.native_layer_norm.default)
def layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
    """layer_norm(x) = (d * rsqrt(sum(d * d) / n + eps)) * weight + bias, d = x - sum(x) / n"""
    dims = list(range(x.dim() - len(shape), x.dim()))
    d, center, rstd = _moments(widened(x), dims, eps)
    return tuple(t.to(x.dtype) for t in (affine(d * rstd, weight, bias), center, rstd))


@formula(aten.native_group_norm.default)
def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, N: Any, C: Any, HxW: Any, group: int, eps: float
) -> Any:
    """group_norm(x) = (d * rsqrt(sum(d * d) / n + eps)) * weight + bias, d = x - sum(x) / n over each group"""
    d, center, rstd = _moments(widened(x).reshape(N, group, -1), [2], eps)
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
    """The result, the mean, rstd and sum(d * d) per channel, and n."""
    w = widened(x)
    dims = [0, *range(2, x.dim())]
    n = count(x, dims)
    center = total(w, dims, True) / n
    d = w - center
    squares = total(d * d, dims, True)
    rstd = (squares / n + eps).rsqrt()
    return _normalized(x, d, rstd, weight, bias).to(x.dtype), center.reshape(-1), rstd.reshape(-1), squares.reshape(-1)


@formula(aten._native_batch_norm_legit.no_stats)
def batch_norm_without_statistics(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> Any:
    """batch_norm(x) = d * (rsqrt(sum(d * d) / n + eps) * weight) + bias, d = x - sum(x) / n over batch and space"""
    return _batch_norm_training(x, weight, bias, eps)[:3]


@formula(aten._native_batch_norm_legit_functional.default)
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


@formula(aten._weight_norm_interface.default)
def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Any:
    """weight_norm(v, g) = v * (g / sqrt(sum(v * v))), the sum over all dimensions but one"""
    norm = total(v * v, [d for d in range(v.dim()) if d != dim % v.dim()], True).sqrt()
    return v * (g / norm), norm
