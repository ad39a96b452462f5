"""Formulas of activations and of arithmetic with a hidden factor.

A formula uses the fewest operations that compute the function; a selection (where, clamp) rounds nothing. gelu, for
example, is ``(x * 0.5) * (1 + erf(x * sqrt(1/2)))``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fxround.operators.formulas.table import formula, require_dtype, scaled, widened

aten = torch.ops.aten


@formula(aten.add.Tensor)
def add(x: Tensor, y: Any, *, alpha: Any = 1) -> Any:
    """add(x, y, alpha) = x + alpha * y, a factor of 1 left out"""
    return NotImplemented if alpha == 1 else x + y * alpha


@formula(aten.sub.Tensor)
def sub(x: Tensor, y: Any, *, alpha: Any = 1) -> Any:
    """sub(x, y, alpha) = x - alpha * y, a factor of 1 left out"""
    return NotImplemented if alpha == 1 else x - y * alpha


@formula(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(x: Tensor, y: Any, alpha: Any = 1) -> Any:
    """rsub(x, y, alpha) = y - alpha * x, a factor of 1 left out"""
    return NotImplemented if alpha == 1 else torch.rsub(x * alpha, y)


@formula(aten.addcmul.default)
def addcmul(x: Tensor, a: Tensor, b: Tensor, *, value: Any = 1) -> Tensor:
    """addcmul(x, a, b, value) = x + (a * b) * value, a factor of 1 left out"""
    return x + scaled(a * b, value)


@formula(aten.addcdiv.default)
def addcdiv(x: Tensor, a: Tensor, b: Tensor, *, value: Any = 1) -> Tensor:
    """addcdiv(x, a, b, value) = x + (a / b) * value, a factor of 1 left out"""
    # Dynamo writes some spellings of addcmul and addcdiv this way before a formula can: this is the definition of all.
    return x + scaled(a / b, value)


@formula(aten.lerp.Scalar)
def lerp_scalar(x: Tensor, y: Tensor, weight: float) -> Tensor:
    """lerp(x, y, w) = x + w * (y - x) if |w| < 1/2, else y - (y - x) * (1 - w)"""
    return x + (y - x) * weight if abs(weight) < 0.5 else y - (y - x) * (1 - weight)


@formula(aten.lerp.Tensor)
def lerp_tensor(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """lerp(x, y, w) = x + w * (y - x) if |w| < 1/2, else y - (y - x) * (1 - w)"""
    d = y - x
    return torch.where(weight.abs() < 0.5, x + d * weight, y - d * (1 - weight))


_POWERS: dict[Any, Any] = {
    1: lambda x: x.clone(),
    2: lambda x: x * x,
    0.5: torch.sqrt,
    -0.5: torch.rsqrt,
    -1: torch.reciprocal,
}


@formula(aten.pow.Tensor_Scalar)
def pow_scalar(x: Tensor, exponent: Any) -> Any:
    """pow(x, c) = x, x * x, sqrt(x), rsqrt(x), 1 / x for c = 1, 2, 1/2, -1/2, -1; one operation for any other c"""
    return _POWERS[exponent](x) if exponent in _POWERS else NotImplemented


@formula(aten.arange.start_step)
def arange(start: Any, end: Any, step: Any = 1, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    """arange(start, end, step) = start + k * step in floating point, k = 0, 1, ...; integer steps are exact"""
    whole = all(isinstance(v, int | torch.SymInt) for v in (start, end, step))
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if whole or not dtype.is_floating_point:
        return NotImplemented
    k = torch.arange(math.ceil((end - start) / step), dtype=torch.int64, device=options.get("device")).to(dtype)
    return scaled(k, step) if start == 0 else scaled(k, step) + start


@formula(aten.silu.default)
def silu(x: Tensor) -> Tensor:
    """silu(x) = x * sigmoid(x)"""
    w = widened(x)
    return (w * w.sigmoid()).to(x.dtype)


@formula(aten.gelu.default)
def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """gelu(x) = (x * 0.5) * (1 + erf(x * sqrt(1/2))); tanh: (x * 0.5) * (1 + tanh(c * (x + 0.044715 * (x * x * x))))"""
    w = widened(x)
    if approximate == "tanh":
        inner = (w + (w * w * w) * 0.044715) * math.sqrt(2.0 / math.pi)
        return ((w * 0.5) * (inner.tanh() + 1)).to(x.dtype)
    return ((w * 0.5) * ((w * math.sqrt(0.5)).erf() + 1)).to(x.dtype)


@formula(aten.softplus.default)
def softplus(x: Tensor, beta: Any = 1, threshold: Any = 20) -> Any:
    """softplus(x) = log(1 + exp(x)), one operation; otherwise where(x * b > t, x, softplus(x * b) / b)"""
    if beta == 1 and threshold == 20:
        return NotImplemented
    w = widened(x)
    curved = F.softplus(scaled(w, beta))
    return torch.where(scaled(w, beta) > threshold, w, curved if beta == 1 else curved / beta).to(x.dtype)


@formula(aten.log_sigmoid_forward.default)
def log_sigmoid(x: Tensor) -> Any:
    """logsigmoid(x) = -softplus(-x)"""
    return -F.softplus(-widened(x)).to(x.dtype), x.new_zeros(0)


@formula(aten.mish.default)
def mish(x: Tensor) -> Tensor:
    """mish(x) = x * tanh(softplus(x))"""
    w = widened(x)
    return (w * F.softplus(w).tanh()).to(x.dtype)


@formula(aten.hardsigmoid.default)
def hardsigmoid(x: Tensor) -> Tensor:
    """hardsigmoid(x) = clamp(x + 3, 0, 6) / 6"""
    return ((widened(x) + 3).clamp(0, 6) / 6).to(x.dtype)


@formula(aten.hardswish.default)
def hardswish(x: Tensor) -> Tensor:
    """hardswish(x) = (x * clamp(x + 3, 0, 6)) / 6"""
    w = widened(x)
    return ((w * (w + 3).clamp(0, 6)) / 6).to(x.dtype)


@formula(aten.elu.default)
def elu(x: Tensor, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Tensor:
    """elu(x) = where(x > 0, x * scale, expm1(x * input_scale) * (alpha * scale)), factors of 1 left out"""
    w = widened(x)
    negative = scaled(scaled(w, input_scale).expm1(), alpha * scale)
    return torch.where(w > 0, scaled(w, scale), negative).to(x.dtype)


@formula(aten.leaky_relu.default)
def leaky_relu(x: Tensor, negative_slope: Any = 0.01) -> Tensor:
    """leaky_relu(x) = where(x > 0, x, x * slope)"""
    return torch.where(x > 0, x, x * negative_slope)


@formula(F.rrelu, torch.rrelu)
def rrelu(x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False) -> Any:
    """rrelu(x) = leaky_relu(x, (lower + upper) / 2), in eval mode; in training mode the slopes are drawn"""
    return NotImplemented if training or inplace else F.leaky_relu(x, (lower + upper) / 2)


@formula(aten._prelu_kernel.default)
def prelu(x: Tensor, weight: Tensor) -> Tensor:
    """prelu(x) = where(x > 0, x, x * weight)"""
    return torch.where(x > 0, x, x * weight)


@formula(aten.softshrink.default)
def softshrink(x: Tensor, lambd: Any = 0.5) -> Tensor:
    """softshrink(x) = where(|x| > c, x - sign(x) * c, x * 0)"""
    # PyTorch's own formula, which PyTorch puts into the graph before any decomposition applies.
    return torch.where(x.abs() > lambd, x - x.sign() * lambd, x * 0)


@formula(aten.glu.default)
def glu(x: Tensor, dim: int = -1) -> Tensor:
    """glu(x) = a * sigmoid(b), a and b the halves of x"""
    a, b = x.chunk(2, dim)
    return (widened(a) * widened(b).sigmoid()).to(x.dtype)


@formula(aten.native_dropout.default)
def dropout(x: Tensor, p: float, train: bool | None = True) -> Any:
    """dropout(x) = (x * mask) * (1 / (1 - p)), mask 1 with probability 1 - p, else 0"""
    if not train or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    mask = aten.bernoulli.p(torch.empty_like(x, dtype=torch.float32), 1 - p)
    return x * mask.to(x.dtype) * (1 / (1 - p)), mask.to(torch.bool)


@formula(aten.index_add.default)
def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Any = 1) -> Tensor:
    """index_add(x, i, s) = x with alpha * s added at i, in the order of s"""
    require_dtype(x.dtype, source=source)
    indices = [None] * (dim % x.dim()) + [index]
    result: Tensor = aten.index_put(x, indices, scaled(source, alpha), True)
    return result
