"""Formulas of losses and their gradients: one term per element, then the reduction; a mean divides by its count.

t is the target, g the gradient of the loss, n the number of terms; reduction "none" returns the terms. mse_loss, for
example, is ``d = x - t; l = sum(d * d) / n``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fxround.operators.formulas.table import count, formula, require_dtype, scaled, total, widened

aten = torch.ops.aten
_MEAN, _SUM = 1, 2


def _reduced(terms: Tensor, reduction: int) -> Tensor:
    if reduction == 0:
        return terms
    dims = list(range(terms.dim()))
    summed = total(terms, dims)
    return summed / count(terms, dims) if reduction == _MEAN else summed


def _share(gradient: Tensor, x: Tensor, reduction: int) -> Tensor:
    """Return the gradient of one term."""
    return gradient / count(x, list(range(x.dim()))) if reduction == _MEAN else gradient


@formula(aten.mse_loss.default)
def mse_loss(x: Tensor, target: Tensor, reduction: int = _MEAN) -> Tensor:
    """mse_loss(x, t) = sum(d * d) / n, d = x - t"""
    d = widened(x) - widened(target)
    return _reduced(d * d, reduction).to(x.dtype)


@formula(aten.mse_loss_backward.default)
def mse_loss_backward(gradient: Tensor, x: Tensor, target: Tensor, reduction: int) -> Tensor:
    """mse_loss_backward(g) = ((x - t) * 2) * (g / n)"""
    return (((widened(x) - widened(target)) * 2) * _share(widened(gradient), x, reduction)).to(x.dtype)


@formula(aten.smooth_l1_loss.default)
def smooth_l1_loss(x: Tensor, target: Tensor, reduction: int = _MEAN, beta: float = 1.0) -> Tensor:
    """smooth_l1_loss(x, t) = sum(where(|d| < b, ((d * d) * 0.5) / b, |d| - 0.5 b)) / n, d = x - t"""
    d = widened(x) - widened(target)
    terms = d.abs() if beta == 0 else torch.where(d.abs() < beta, (d * d * 0.5) / beta, d.abs() - 0.5 * beta)
    return _reduced(terms, reduction).to(x.dtype)


@formula(aten.smooth_l1_loss_backward.default)
def smooth_l1_loss_backward(gradient: Tensor, x: Tensor, target: Tensor, reduction: int, beta: float) -> Tensor:
    """smooth_l1_loss_backward(g) = where(|d| >= b, sign(d), d / b) * (g / n), d = x - t"""
    d = widened(x) - widened(target)
    # The order of the branches keeps a NaN: it fails the comparison and goes through d / beta, whereas its sign is 0.
    slope = d.sign() if beta == 0 else torch.where(d.abs() >= beta, d.sign(), d / beta)
    return (slope * _share(widened(gradient), x, reduction)).to(x.dtype)


@formula(aten.huber_loss.default)
def huber_loss(x: Tensor, target: Tensor, reduction: int = _MEAN, delta: float = 1.0) -> Tensor:
    """huber_loss(x, t) = sum(where(|d| <= c, (d * d) * 0.5, (|d| - 0.5 c) * c)) / n, d = x - t"""
    d = widened(x) - widened(target)
    terms = torch.where(d.abs() <= delta, (d * d) * 0.5, scaled(d.abs() - 0.5 * delta, delta))
    return _reduced(terms, reduction).to(x.dtype)


@formula(aten.huber_loss_backward.default)
def huber_loss_backward(gradient: Tensor, x: Tensor, target: Tensor, reduction: int, delta: float) -> Tensor:
    """huber_loss_backward(g) = clamp(x - t, -c, c) * (g / n)"""
    d = widened(x) - widened(target)
    return (d.clamp(-delta, delta) * _share(widened(gradient), x, reduction)).to(x.dtype)


@formula(aten.binary_cross_entropy.default)
def binary_cross_entropy(x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = _MEAN) -> Tensor:
    """binary_cross_entropy(x, t) = sum(((t - 1) * max(log1p(-x), -100) - t * max(log(x), -100)) * weight) / n"""
    require_dtype(x.dtype, target=target)
    w, t = widened(x), widened(target)
    terms = (t - 1) * (-w).log1p().clamp(min=-100) - t * w.log().clamp(min=-100)
    return _reduced(terms if weight is None else terms * weight, reduction).to(x.dtype)


@formula(aten.binary_cross_entropy_backward.default)
def binary_cross_entropy_backward(
    gradient: Tensor, x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = _MEAN
) -> Tensor:
    """binary_cross_entropy_backward(g) = (((x - t) / max((1 - x) * x, 1e-12)) * weight) * (g / n)"""
    w, t = widened(x), widened(target)
    slope = (w - t) / ((1 - w) * w).clamp(min=1e-12)
    slope = slope if weight is None else slope * weight
    return (slope * _share(widened(gradient), x, reduction)).to(x.dtype)


@formula(aten.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits(
    x: Tensor, target: Tensor, weight: Tensor | None = None, pos_weight: Tensor | None = None, reduction: int = _MEAN
) -> Tensor:
    """binary_cross_entropy_with_logits(x, t) = sum(((1 - t) * x + softplus(-x) * ((p - 1) * t + 1)) * weight) / n"""
    w, t = widened(x), widened(target)
    log = F.softplus(-w)
    log = log if pos_weight is None else log * ((pos_weight - 1) * t + 1)
    terms = (1 - t) * w + log
    return _reduced(terms if weight is None else terms * weight, reduction).to(x.dtype)


def _chosen(x: Tensor, target: Tensor, weight: Tensor | None, ignored: int) -> tuple[Tensor, Tensor, Any, int]:
    """Return the classes with ignored ones as 0, whether each is kept, its weight or 0, and the classes' dimension."""
    kept, dim = target != ignored, min(x.dim() - 1, 1)
    classes = torch.where(kept, target, torch.zeros_like(target))
    if weight is None:
        return classes, kept, None, dim
    # An ignored target takes a zero that is appended to the weights: a copy, which rounds nothing.
    places = torch.where(kept, target, x.shape[dim])
    own = aten.constant_pad_nd(weight, [0, 1], 0.0).index_select(0, places.reshape(-1)).reshape(classes.shape)
    return classes, kept, own, dim


@formula(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss(x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int) -> Any:
    """nll_loss(x, t) = sum(-x[t] * weight[t]) / sum(weight[t]), zeros in the place of targets that are ignored"""
    classes, kept, own, dim = _chosen(x, target, weight, ignore_index)
    terms = -widened(x).gather(dim, classes.unsqueeze(dim)).squeeze(dim)
    zero = terms.new_zeros([])
    terms = torch.where(kept, terms if own is None else terms * own, zero)
    if reduction == 0:
        return terms.to(x.dtype), x.new_zeros([])
    dims = list(range(terms.dim()))
    weights = kept.sum().to(terms.dtype) if own is None else total(own, dims)
    summed = total(terms, dims)
    return (summed / weights if reduction == _MEAN else summed).to(x.dtype), weights.to(x.dtype)


@formula(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(
    gradient: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """nll_loss_backward(g) = -(g / sum(weight[t])) * weight[t] at the targets that are not ignored, 0 elsewhere"""
    classes, kept, own, dim = _chosen(x, target, weight, ignore_index)
    share = widened(gradient) / widened(total_weight) if reduction == _MEAN else widened(gradient)
    value = -share if own is None else -share * own
    value = torch.where(kept, value, value.new_zeros([])).to(x.dtype)
    return torch.zeros_like(x).scatter(dim, classes.unsqueeze(dim), value.unsqueeze(dim))


@formula(aten.multi_margin_loss.default)
def multi_margin_loss(
    x: Tensor, target: Tensor, p: Any = 1, margin: Any = 1, weight: Tensor | None = None, reduction: int = _MEAN
) -> Tensor:
    """multi_margin_loss(x, t) = sum(where(arange(len(x[0])) == t, 0, relu((1 - gather(x, 1, t)) + x))) / n"""
    # A margin in place of 1; for p = 2 a term is its square; it is multiplied by the weight of t then. The gradient of
    # relu is 0 at 0, as that of PyTorch's kernel.
    require_dtype(torch.int64, target=target)
    require_dtype(x.dtype, weight=weight)
    if p not in (1, 2) or x.dim() > 2:
        return NotImplemented  # type: ignore[no-any-return]  # PyTorch's own definition raises for these
    rows, targets = torch.atleast_2d(x), torch.atleast_1d(target).unsqueeze(1)
    terms = ((margin - torch.gather(rows, 1, targets)) + rows).relu()
    terms = terms if p == 1 else terms * terms
    terms = terms if weight is None else terms * torch.atleast_1d(weight)[targets]
    terms = torch.where(torch.arange(rows.shape[1], device=x.device) != targets, terms, 0)
    if reduction == _MEAN:
        return terms.mean()
    return terms.sum() / rows.shape[1] if reduction == _SUM else terms.mean(1).reshape(target.shape)


@formula(aten.multilabel_margin_loss_forward.default)
def multilabel_margin_loss(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """multilabel_margin_loss(x, t) = sum(sum of relu((1 - x[j]) + x[i]) / classes over targets j and others i) / n"""
    # The targets of a row are the classes before its first -1, for which PyTorch's decomposition takes class 0. The
    # second result is 1 for a class that is a target, and 0 for the others.
    require_dtype(torch.int64, target=target)
    rows, targets = torch.atleast_2d(x), torch.atleast_2d(target)
    classes = rows.shape[1]
    places = torch.arange(classes, device=target.device)
    end = torch.where(targets == -1, places, classes).amin(-1, keepdim=True)
    given = places < end
    # Targets after the first -1 count for nothing, but one that is no class is an error, as of PyTorch's kernel.
    own = torch.gather(rows, -1, torch.where(targets == -1, 0, targets))
    is_target = (places == torch.where(given, targets, -1).unsqueeze(-1)).any(1)
    terms = ((1.0 - own.T.unsqueeze(-1)) + rows).relu() / classes
    terms = torch.where(given.T.unsqueeze(-1), torch.where(is_target, 0, terms), 0)
    losses = terms.sum((0, -1)) if reduction != _SUM else terms.sum()
    loss = losses.mean() if reduction == _MEAN else losses.reshape(x.shape[:-1]) if reduction != _SUM else losses
    return loss, is_target.to(x.dtype).reshape(target.shape)
