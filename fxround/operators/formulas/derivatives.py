"""Formulas of the derivatives of activations, dropout and embeddings, which AOTAutograd puts into a backward graph.

g is the gradient of the result, y the result, x the operand; s and t are values that the formula names. silu's, for
example, is ``s = sigmoid(x); gx = g * (s * (x * (1 - s) + 1))``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fxround.operators.formulas.table import formula, scaled, widened

aten = torch.ops.aten


def _zeros(x: Tensor) -> Tensor:
    return x.new_zeros([])


@formula(aten.sigmoid_backward.default)
def sigmoid_backward(gradient: Tensor, y: Tensor) -> Tensor:
    """sigmoid_backward(g) = g * (y * (1 - y))"""
    g, w = widened(gradient), widened(y)
    return (g * (w * (1 - w))).to(gradient.dtype)


@formula(aten.tanh_backward.default)
def tanh_backward(gradient: Tensor, y: Tensor) -> Tensor:
    """tanh_backward(g) = g * (1 - y * y)"""
    g, w = widened(gradient), widened(y)
    return (g * (1 - w * w)).to(gradient.dtype)


@formula(aten.silu_backward.default)
def silu_backward(gradient: Tensor, x: Tensor) -> Tensor:
    """silu_backward(g) = g * (s * (x * (1 - s) + 1)), s = sigmoid(x)"""
    g, w = widened(gradient), widened(x)
    s = w.sigmoid()
    return (g * (s * (w * (1 - s) + 1))).to(gradient.dtype)


@formula(aten.mish_backward.default)
def mish_backward(gradient: Tensor, x: Tensor) -> Tensor:
    """mish_backward(g) = g * (t + (x * sigmoid(x)) * (1 - t * t)), t = tanh(softplus(x))"""
    g, w = widened(gradient), widened(x)
    t = F.softplus(w).tanh()
    return (g * (t + (w * w.sigmoid()) * (1 - t * t))).to(gradient.dtype)


@formula(aten.gelu_backward.default)
def gelu_backward(gradient: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    """gelu_backward(g) = g * ((erf(x sqrt(1/2)) + 1) * 0.5 + x * (exp((x * x) * -0.5) * c)), tanh: likewise"""
    g, w = widened(gradient), widened(x)
    if approximate == "tanh":
        return (g * _gelu_tanh_slope(w)).to(gradient.dtype)
    cumulative = ((w * math.sqrt(0.5)).erf() + 1) * 0.5
    density = ((w * w) * -0.5).exp() * (1 / math.sqrt(2 * math.pi))
    return (g * (cumulative + w * density)).to(gradient.dtype)


def _gelu_tanh_slope(x: Tensor) -> Tensor:
    """Return (1 + t) * 0.5 + ((x * 0.5) * (1 - t * t)) * (c * (1 + 0.134145 * (x * x))).

    t is the tanh of gelu's formula, c = sqrt(2 / pi).
    """
    scale = math.sqrt(2.0 / math.pi)
    square = x * x
    t = ((x + (square * x) * 0.044715) * scale).tanh()
    inner = (square * (3 * 0.044715) + 1) * scale
    return (t + 1) * 0.5 + ((x * 0.5) * (1 - t * t)) * inner


@formula(aten.elu_backward.default)
def elu_backward(gradient: Tensor, alpha: Any, scale: Any, input_scale: Any, is_result: bool, x: Tensor) -> Tensor:
    """elu_backward(g) = where(x > 0, g * scale, g * (exp(x * a) * (a * alpha * scale))), a the input_scale"""
    g, w = widened(gradient), widened(x)
    slope = (w + alpha * scale) * input_scale if is_result else scaled(w, input_scale).exp()
    slope = slope if is_result else scaled(slope, input_scale * alpha * scale)
    return torch.where(w > 0, scaled(g, scale), g * slope).to(gradient.dtype)


@formula(aten.leaky_relu_backward.default)
def leaky_relu_backward(gradient: Tensor, x: Tensor, negative_slope: Any, is_result: bool) -> Tensor:
    """leaky_relu_backward(g) = where(x > 0, g, g * slope)"""
    return torch.where(x > 0, gradient, gradient * negative_slope)


@formula(aten._prelu_kernel_backward.default)
def prelu_backward(gradient: Tensor, x: Tensor, weight: Tensor) -> Any:
    """prelu_backward(g) = (where(x > 0, g, g * weight), where(x > 0, 0, g * x))"""
    return torch.where(x > 0, gradient, gradient * weight), torch.where(x > 0, _zeros(x), gradient * x)


@formula(aten.softplus_backward.default)
def softplus_backward(gradient: Tensor, x: Tensor, beta: Any, threshold: Any) -> Tensor:
    """softplus_backward(g) = where(x * b > t, g, g * sigmoid(x * b))"""
    g, w = widened(gradient), scaled(widened(x), beta)
    return torch.where(w > threshold, g, g * w.sigmoid()).to(gradient.dtype)


@formula(aten.log_sigmoid_backward.default)
def log_sigmoid_backward(gradient: Tensor, x: Tensor, buffer: Tensor) -> Tensor:
    """log_sigmoid_backward(g) = g * sigmoid(-x)"""
    return (widened(gradient) * (-widened(x)).sigmoid()).to(gradient.dtype)


@formula(aten.hardsigmoid_backward.default)
def hardsigmoid_backward(gradient: Tensor, x: Tensor) -> Tensor:
    """hardsigmoid_backward(g) = where(-3 < x < 3, g / 6, 0)"""
    g = widened(gradient)
    return torch.where((x > -3) & (x < 3), g / 6, _zeros(g)).to(gradient.dtype)


@formula(aten.hardswish_backward.default)
def hardswish_backward(gradient: Tensor, x: Tensor) -> Tensor:
    """hardswish_backward(g) = where(x <= -3, 0, where(x < 3, g * (x / 3 + 0.5), g))"""
    g, w = widened(gradient), widened(x)
    return torch.where(w <= -3, _zeros(g), torch.where(w < 3, g * (w / 3 + 0.5), g)).to(gradient.dtype)


@formula(aten.softshrink_backward.default, aten.hardshrink_backward.default)
def shrink_backward(gradient: Tensor, x: Tensor, lambd: Any) -> Tensor:
    """shrink_backward(g) = where(-c <= x <= c, 0, g)"""
    return torch.where((x >= -lambd) & (x <= lambd), _zeros(gradient), gradient)


@formula(aten.glu_backward.default)
def glu_backward(gradient: Tensor, x: Tensor, dim: int) -> Tensor:
    """glu_backward(g) = (g * s, ((g * a) * s) * (1 - s)), a and b the halves of x, s = sigmoid(b)"""
    g, (a, b) = widened(gradient), x.chunk(2, dim)
    s = widened(b).sigmoid()
    return torch.cat([g * s, ((g * widened(a)) * s) * (1 - s)], dim).to(gradient.dtype)


@formula(aten.native_dropout_backward.default)
def dropout_backward(gradient: Tensor, mask: Tensor, scale: float) -> Tensor:
    """dropout_backward(g) = (g * mask) * (1 / (1 - p))"""
    return scaled(gradient * mask.to(gradient.dtype), scale)


@formula(aten.embedding_dense_backward.default)
def embedding_backward(
    gradient: Tensor, indices: Tensor, rows: Any, padding_idx: Any = -1, scale_grad_by_freq: bool = False
) -> Tensor:
    """embedding_backward(g) = g added at the indices, in their order; nothing at padding_idx; over counts if asked"""
    if scale_grad_by_freq:
        ones = torch.ones_like(indices, dtype=torch.int64)
        counts = aten.index_put(indices.new_zeros([rows], dtype=torch.int64), [indices], ones, True)
        gradient = gradient / counts[indices].unsqueeze(-1).to(gradient.dtype)
    padded = padding_idx >= 0
    # Gradients of the padding index go to an extra row after the others, which is dropped.
    places = torch.where(indices == padding_idx, rows, indices) if padded else indices
    empty = gradient.new_zeros([rows + padded, gradient.shape[-1]])
    result: Tensor = aten.index_put(empty, [places], gradient, True)
    return result[:-1] if padded else result


@formula(aten._weight_norm_interface_backward.default)
def weight_norm_backward(gradient: Tensor, v: Tensor, g: Tensor, norm: Tensor, dim: int) -> Any:
    """weight_norm_backward(h) = ((h - v * (s / (n * n))) * (g / n), s / n), s = sum(h * v), n the norm"""
    dims = [d for d in range(v.dim()) if d != dim % v.dim()]
    along = torch.sum(gradient * v, dims, True)
    return (gradient - v * (along / (norm * norm))) * (g / norm), along / norm
