"""Formulas of products: everything besides mm, bmm and convolution is a multiplication or an addition of its own.

addmm, for example, is ``y = mm(x, w) + b``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxround.operators.formulas.table import formula, require_dtype, scaled, total

aten = torch.ops.aten


Product = Callable[[Tensor, Tensor], Tensor]


def _product(a: Tensor, b: Tensor, term: Tensor, beta: Any, alpha: Any, product: Product) -> Tensor:
    require_dtype(a.dtype, term=term)
    return _with_term(product(a, b), term, beta, alpha)


def _with_term(product: Tensor, term: Tensor, beta: Any, alpha: Any) -> Tensor:
    result = scaled(product, alpha)
    return result if beta == 0 else result + scaled(term, beta)


@formula(aten.addmm.default)
def addmm(term: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """addmm(c, a, b) = alpha * mm(a, b) + beta * c, factors of 1 left out"""
    return _product(a, b, term, beta, alpha, torch.mm)


@formula(aten.baddbmm.default)
def baddbmm(term: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """baddbmm(c, a, b) = alpha * bmm(a, b) + beta * c, factors of 1 left out"""
    return _product(a, b, term, beta, alpha, torch.bmm)


@formula(aten._scaled_mm.default)
def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Any:
    """_scaled_mm(a, b) = mm(a, b) * scale_a * scale_b + bias in binary32, times scale_result if out_dtype has 8 bits"""
    # Scales of blocks have no formula.
    columns = {(), (1,), (1, 1), (1, b.shape[1])}
    if tuple(scale_a.shape) not in {(), (1,), (1, 1), (a.shape[0], 1)} or tuple(scale_b.shape) not in columns:
        return NotImplemented
    result = torch.mm(a.to(torch.float32), b.to(torch.float32)) * scale_a.to(torch.float32)
    result = result * scale_b.to(torch.float32)
    result = result if bias is None else result + bias.to(torch.float32)
    dtype = a.dtype if out_dtype is None else out_dtype
    if scale_result is not None and dtype.itemsize == 1:
        result = result * scale_result
    return result.to(dtype)


@formula(aten.addbmm.default)
def addbmm(term: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """addbmm(c, a, b) = alpha * mm([a_1 a_2 ...], [b_1; b_2; ...]) + beta * c: one chain over batch and k"""
    rows, columns = a.transpose(0, 1).reshape(a.shape[1], -1), b.reshape(-1, b.shape[2])
    return _product(rows, columns, term, beta, alpha, torch.mm)


@formula(aten.mv.default)
def mv(a: Tensor, x: Tensor) -> Tensor:
    """mv(a, x) = mm(a, x as a column)"""
    return torch.mm(a, x.unsqueeze(1)).squeeze(1)


@formula(aten.addmv.default)
def addmv(term: Tensor, a: Tensor, x: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """addmv(c, a, x) = alpha * mv(a, x) + beta * c, factors of 1 left out"""
    return _product(a, x, term, beta, alpha, mv)


@formula(aten.dot.default, aten.vdot.default)
def dot(x: Tensor, y: Tensor) -> Tensor:
    """dot(x, y) = mm(x as a row, y as a column)"""
    return torch.mm(x.unsqueeze(0), y.unsqueeze(1)).reshape([])


@formula(aten.addr.default)
def addr(term: Tensor, x: Tensor, y: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """addr(c, x, y) = alpha * (x_i * y_j) + beta * c, factors of 1 left out"""
    return _with_term(x.unsqueeze(1) * y.unsqueeze(0), term, beta, alpha)


@formula(aten.convolution.default)
def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Any:
    """convolution(x, w, b) = convolution(x, w) + b"""
    if bias is None:
        return NotImplemented
    y = aten.convolution(x, weight, None, *rest)
    return y + bias.reshape([-1] + [1] * (weight.dim() - 2))


@formula(aten.convolution_backward.default)
def convolution_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *rest: Any, output_mask: Any = None
) -> Any:
    """convolution_backward(g) = (transposed convolution of g with w, sum over (image, pixel) of g * x, sum(g))"""
    *geometry, mask = rest if output_mask is None else (*rest, output_mask)
    if list(mask) in ([True, False, False], [False, True, False]):
        return NotImplemented
    operands = (gradient, x, weight, None, *geometry)
    on_input = aten.convolution_backward(*operands, [True, False, False])[0] if mask[0] else None
    on_weight = aten.convolution_backward(*operands, [False, True, False])[1] if mask[1] else None
    spatial = [0, *range(2, gradient.dim())]
    return on_input, on_weight, total(gradient, spatial) if mask[2] else None


@formula(aten._trilinear.default)
def trilinear(
    a: Tensor, b: Tensor, c: Tensor, expand_a: Any, expand_b: Any, expand_c: Any, sumdim: Any, unroll: int = 1
) -> Tensor:
    """trilinear(a, b, c) = sum((a * b) * c)"""
    for dims, position in ((expand_a, 0), (expand_b, 1), (expand_c, 2)):
        for d in dims:
            a, b, c = (t.unsqueeze(d) if position == i else t for i, t in enumerate((a, b, c)))
    return total(a * b * c, sumdim)


@formula(aten._cdist_forward.default)
def cdist(a: Tensor, b: Tensor, p: float, compute_mode: int | None = None) -> Tensor:
    """cdist(a, b) = norm(a_i - b_j)"""
    distance: Tensor = torch.linalg.vector_norm(a.unsqueeze(-2) - b.unsqueeze(-3), p, [-1])
    return distance


@formula(aten._cdist_backward.default)
def cdist_backward(gradient: Tensor, a: Tensor, b: Tensor, p: float, distances: Tensor) -> Tensor:
    """cdist_backward(g) = sum(s * g) over j, s the slope of the norm along d = a_i - b_j, 0 where d = 0"""
    d = a.unsqueeze(-2) - b.unsqueeze(-3)
    g, n = gradient.unsqueeze(-1), distances.unsqueeze(-1)
    if p == 0:
        return d.new_zeros([*d.shape[:-2], d.shape[-1]])
    if p == 2:
        slope = d / n
    else:
        # The sign of a NaN is 0; d itself keeps it.
        sign = torch.where(d.isnan(), d, d.sign())
        slope = sign if p == 1 or math.isinf(p) else sign * (d.abs() / n) ** (p - 1)
        if math.isinf(p):
            slope = torch.where(d.abs() < n, torch.zeros_like(d), slope)
    slope = torch.where(d == 0, torch.zeros_like(d), slope)
    return total(slope * g, [slope.dim() - 2])
