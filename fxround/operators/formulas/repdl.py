"""RepDL's formulas, for policies whose ``definitions`` are ``"repdl"``; where RepDL has none, fxround's own apply.

A mean is a product with 1/n, batch norm divides by the standard deviation and differentiates mean, variance and
normalisation one by one, cross entropy has the gradient of its softmax, and the gradient of a convolution's input
visits the kernel in its own order. f stands for 1/n rounded to the dtype. Cross entropy and mean are defined before
differentiation, as functions that carry their own backward; the rest are definitions of operators. An option that RepDL
refuses falls back to fxround's formula. RepDL: Xie, Zhang, Chen, arXiv 2510.09180.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fxround.operators.formulas import products
from fxround.operators.formulas.table import affine, channels, count, formula, reduced_dims, total, widened

aten = torch.ops.aten
definition = partial(formula, definitions="repdl")


def _mean(x: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
    return total(x, dims, keepdim) * (1 / count(x, dims))


@definition(aten.mean.default, aten.mean.dim)
def mean(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """mean(x) = sum(x) * f"""
    kept = dtype or x.dtype
    return _mean(widened(x.to(kept)), reduced_dims(x, dim), keepdim).to(kept)


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
        ctx.shape, ctx.dims, ctx.keepdim, ctx.share = x.shape, dims, keepdim, 1 / count(x, dims)
        return torch.mean(x, dims, keepdim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        g = gradients[0] * ctx.share
        for d in () if ctx.keepdim else ctx.dims:
            g = g.unsqueeze(d)
        return g.expand(ctx.shape), None, None


@definition(torch.mean, torch.Tensor.mean)
def differentiated_mean(x: Tensor, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
    """mean_backward(g) = g * f"""
    return NotImplemented if options else _Mean.apply(x, reduced_dims(x, dim), keepdim)  # type: ignore[no-untyped-call]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor) -> Tensor:
        shifted = x - torch.amax(x, [1], True)
        e = shifted.exp()
        s = total(e, [1], True)
        ctx.save_for_backward(e, s, target)
        terms = s.log() - shifted.gather(1, target.unsqueeze(1))
        return _mean(terms.squeeze(1), [0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        e, s, target = ctx.saved_tensors
        chosen = target.unsqueeze(1) == torch.arange(e.shape[1], device=e.device)
        return ((e / s - chosen.to(e.dtype)) * (1 / e.shape[0])) * gradients[0], None


@definition(F.cross_entropy)
def cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """cross_entropy(x, t) = sum(log(sum(e)) - s[t]) * f, s = x - amax(x), e = exp(s);
    cross_entropy_backward(g) = ((e / sum(e) - o) * f) * g, o 1 at the target and 0 elsewhere
    """
    options = (weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    plain = options == (None, None, -100, None, "mean", 0.0) and x.dim() == 2 and target.dim() == 1
    return _CrossEntropy.apply(x, target) if plain else NotImplemented  # type: ignore[no-untyped-call]


def _normalized(d: Tensor, std: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return affine(d / channels(std, d), *(v if v is None else channels(v, d) for v in (weight, bias)))


@definition(aten._native_batch_norm_legit_no_training.default)
def batch_norm_inference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> Any:
    """batch_norm(x) = ((x - mean) / sqrt(var + eps)) * weight + bias, with the running mean and var"""
    w = widened(x)
    std = (widened(var) + eps).sqrt()
    y = _normalized(w - channels(widened(mean), x), std, weight, bias)
    return y.to(x.dtype), x.new_empty(0), x.new_empty(0)


def _training(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Return the result, and per channel the mean, the standard deviation and the variance."""
    w, dims = widened(x), [0, *range(2, x.dim())]
    center = _mean(w, dims)
    d = w - channels(center, x)
    var = _mean(d * d, dims)
    std = (var + eps).sqrt()
    return _normalized(d, std, weight, bias).to(x.dtype), center, std, var


@definition(aten._native_batch_norm_legit.no_stats)
def batch_norm_without_statistics(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> Any:
    """batch_norm(x) = (d / sqrt(sum(d * d) * f + eps)) * weight + bias, d = x - sum(x) * f over batch and space"""
    return _training(x, weight, bias, eps)[:3]


@definition(aten._native_batch_norm_legit_functional.default)
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
    """training: as without statistics; running = m * new + (1 - m) * running, the new var being sum(d * d) * f"""
    if not training:
        result = batch_norm_inference(x, weight, bias, running_mean, running_var, momentum, eps)
        return *result, running_mean, running_var
    y, center, std, var = _training(x, weight, bias, eps)
    pairs = ((center, running_mean), (var, running_var))
    running = ((new * momentum).to(old.dtype) + old * (1 - momentum) for new, old in pairs)
    return y, center, std, *running


@definition(aten.native_batch_norm_backward.default)
def batch_norm_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor | None,
    std: Tensor | None,
    train: bool,
    eps: float,
    mask: Sequence[bool],
) -> Any:
    """batch_norm_backward(g) = ((u * g + v) + q * f, sum((d / std) * g), sum(g)), u = weight / std, d = x - mean,
    v = h + h, h = (p * f) * d, p = sum((g * -d) * (weight / (((2 * std) * std) * std))), q = -u * sum(g) + sum(-v);
    in eval mode (u * g, and the same two)
    """
    if not train:
        assert running_mean is not None and running_var is not None
        mean, std = running_mean, (widened(running_var) + eps).sqrt()
    assert mean is not None and std is not None  # the second statistic is what the forward formula gave
    g, dims = widened(gradient), [0, *range(2, x.dim())]
    d = widened(x) - channels(widened(mean), x)
    on_weight = total((d / channels(std, x)) * g, dims) if mask[1] else None
    on_bias = total(g, dims) if mask[2] else None
    own = torch.ones_like(std) if weight is None else weight
    on_x = _input_gradient(g, d, std, own, dims, train) if mask[0] else None
    kinds = (x.dtype, own.dtype, own.dtype)
    return tuple(None if t is None else t.to(kind) for t, kind in zip((on_x, on_weight, on_bias), kinds, strict=True))


def _input_gradient(g: Tensor, d: Tensor, std: Tensor, weight: Tensor, dims: Sequence[int], train: bool) -> Tensor:
    """Return the gradient through the normalisation and, in training, through the variance and the mean."""
    u = weight / std
    through = channels(u, d) * g
    if not train:
        return through
    share = 1 / count(d, dims)
    slope = weight / (((std * 2) * std) * std)
    p = total((g * -d) * channels(slope, d), dims)
    half = channels(p * share, d) * d
    v = half + half
    q = -u * total(g, dims) + total(-v, dims)
    return (through + v) + channels(q * share, d)


@definition(aten.convolution_backward.default)
def convolution_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *rest: Any, output_mask: Any = None
) -> Any:
    """convolution_backward(g): of the input sum of g * w over (output channel, kernel position), both ascending"""
    *geometry, mask = rest if output_mask is None else (*rest, output_mask)
    transposed = geometry[3]
    if transposed or not mask[0]:
        return products.convolution_backward(gradient, x, weight, bias_sizes, *geometry, mask)
    stride, padding, dilation, *_, groups = geometry
    on_input = _convolution_input_gradient(gradient, x, weight, stride, padding, dilation, groups)
    if not any(mask[1:]):
        return on_input, None, None
    others = products.convolution_backward(gradient, x, weight, bias_sizes, *geometry, [False, *mask[1:]])
    return (on_input, *_both(others, gradient, x, weight, geometry))


def _both(others: Any, gradient: Tensor, x: Tensor, weight: Tensor, geometry: Sequence[Any]) -> tuple[Any, Any]:
    """Return the gradients of weight and bias.

    The formula in products returns NotImplemented for the gradient of a weight alone.
    """
    if others is NotImplemented:
        others = aten.convolution_backward(gradient, x, weight, None, *geometry, [False, True, False])
    return others[1], others[2]


def _convolution_input_gradient(
    g: Tensor, x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    """Return gx[h], the sum of g[(h + padding - k * dilation) / stride] * w[k], k ascending.

    g is reversed, with stride - 1 zeros between its elements, and convolved with the kernel as stored: then k ascends.
    A transposed convolution reverses the kernel instead, so that k would descend.
    """
    spatial = list(range(2, x.dim()))
    pads: list[Any] = []
    for d, s, p, wide in zip(spatial, stride, padding, dilation, strict=True):
        g = _spread(g, d, s)
        reach = wide * (weight.shape[d] - 1)
        pads = [x.shape[d] - g.shape[d] + p, reach - p, *pads]
    turned = aten.constant_pad_nd(g.flip(spatial), pads, 0.0)
    ones, zeros = [1] * len(spatial), [0] * len(spatial)
    by_group = weight.reshape(groups, -1, *weight.shape[1:]).transpose(1, 2)
    kernel = by_group.reshape(x.shape[1], -1, *weight.shape[2:])
    result: Tensor = aten.convolution(turned, kernel, None, ones, zeros, list(dilation), False, zeros, groups)
    return result.flip(spatial)


def _spread(g: Tensor, dim: int, stride: int) -> Tensor:
    """Return g with stride - 1 zeros between its elements along dim."""
    if stride == 1:
        return g
    gaps = g.new_zeros([*g.shape, stride - 1])
    wide = torch.cat([g.unsqueeze(-1), gaps], -1).movedim(-1, dim + 1).flatten(dim, dim + 1)
    return wide.narrow(dim, 0, wide.shape[dim] - (stride - 1))
