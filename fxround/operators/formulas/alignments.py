"""The formula of the CTC loss: the forward algorithm in logarithms, one step per time, and its derivative.

The labels of a text are y_1, ..., y_S with a blank before, between and after them: 2 S + 1 in all. a_t(s) is the
logarithm of the probability of everything that ends at label s at time t. Source: Graves, Fernandez, Gomez and
Schmidhuber, Connectionist temporal classification, ICML 2006, section 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fxround.capture.loops import scan
from fxround.operators.formulas.table import constant, count, formula, total

_REDUCTIONS = ("none", "mean", "sum")


class _LessProbabilities(torch.autograd.Function):
    """The losses as they are, with exp(x) in the gradient of x: what log_softmax before them would add to it.

    An infinite loss has no posterior probabilities: its gradients are NaN, as PyTorch's are, unless they are zeros.
    """

    @staticmethod
    def forward(ctx: Any, losses: Tensor, x: Tensor, inside: Tensor, zero_infinity: bool) -> Tensor:
        ctx.save_for_backward(losses, x, inside)
        ctx.zero_infinity = zero_infinity
        return losses.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        losses, x, inside = ctx.saved_tensors
        g = gradients[0]
        share = g if ctx.zero_infinity else torch.where(losses == math.inf, math.nan, g)
        return g, torch.where(inside[:, :, None], x.exp() * share[:, None], 0.0), None, None


def _moved(a: Tensor, places: int) -> Tensor:
    """Return a(s - places), -inf where there is no such label."""
    return F.pad(a, (places, 0), value=-math.inf)[:, : a.shape[1]]


def _log_of_sum(*terms: Tensor) -> Tensor:
    """Return the logarithm of the sum of exp of the terms, added in their order; -inf, without a slope, of none."""
    most = terms[0]
    for term in terms[1:]:
        most = torch.maximum(most, term)
    shift = torch.where(most.isinf(), 0.0, most).detach()
    added = (terms[0] - shift).exp()
    for term in terms[1:]:
        added = added + (term - shift).exp()
    nothing = added == 0
    return torch.where(nothing, -math.inf, torch.where(nothing, 1.0, added).log() + shift)


def _integers(numbers: Tensor | Sequence[int], name: str, device: torch.device) -> Tensor:
    """Return labels or lengths in int64."""
    if not isinstance(numbers, Tensor):
        return constant([int(n) for n in numbers], torch.int64, device)
    if numbers.is_floating_point() or numbers.dtype == torch.bool:
        raise TypeError(f"ctc_loss: expected {name} of an integer dtype, not {numbers.dtype}")
    return numbers.to(device, torch.int64)


def _lengths(given: Tensor | Sequence[int], batch: Any, most: Any, name: str, device: torch.device) -> Tensor:
    """Return the lengths as a tensor. One outside of 0 to ``most`` is an error: in a tensor, when it is read."""
    if not isinstance(given, Tensor) and any(n < 0 or n > most for n in given):
        raise ValueError(f"ctc_loss: expected {name} from 0 to {most}, not {[int(n) for n in given]}")
    lengths = _integers(given, name, device).reshape(-1)
    if lengths.shape[0] != batch:
        raise ValueError(f"ctc_loss: expected {batch} {name}, one for each row of the batch, not {lengths.shape[0]}")
    return torch.arange(most + 1, device=device).gather(0, lengths)


def _padded(targets: Tensor, lengths: Tensor | Sequence[int], batch: Any) -> Tensor:
    """Return the targets as rows. Behind its own labels a row may have any.

    Rows of concatenated targets are as long as all together where their lengths are not known before the call.
    """
    if targets.dim() == 2:
        if targets.shape[0] != batch:
            raise ValueError(f"ctc_loss: expected targets of {batch} rows, not of the shape {tuple(targets.shape)}")
        return targets
    size = targets.shape[0]
    if not isinstance(lengths, Tensor) and sum(lengths) != size:
        raise ValueError(f"ctc_loss: expected {sum(lengths)} targets, as many as target_lengths have, not {size}")
    longest = size if isinstance(lengths, Tensor) else max(lengths, default=0)
    if longest == 0:
        return targets.new_zeros([batch, 0])
    own = _integers(lengths, "target_lengths", targets.device).reshape(-1)
    ends = own.cumsum(0)
    # Reads one element, so that any other number of targets is an error.
    surplus = torch.zeros_like(ends[:1]).gather(0, ends[-1:] - size)
    places = (ends - own + surplus)[:, None] + torch.arange(longest, device=targets.device)
    return targets[places.clamp(max=size - 1)]


def _labels(targets: Tensor, lengths: Tensor, blank: int) -> Tensor:
    """Return each row's labels with blanks before, between and after them, and blanks behind the row's own."""
    places = torch.arange(targets.shape[1], device=targets.device)
    own = torch.where(places < lengths[:, None], targets, blank)
    wide = torch.stack([torch.full_like(own, blank), own], -1).flatten(1)
    return F.pad(wide, (0, 1), value=blank)


def _step(a: Tensor, score: Tensor, inside: Tensor, skips: Tensor) -> list[Tensor]:
    """Return a at the next time; a itself behind the end of a row's input."""
    skipped = torch.where(skips, _moved(a, 2), -math.inf)
    after = _log_of_sum(a, _moved(a, 1), skipped) + score
    return [torch.where(inside[:, None], after, a)]


def _losses(x: Tensor, labels: Tensor, inside: Tensor, sizes: Tensor) -> Tensor:
    """Return the negative logarithm of the probability of each row."""
    scores = x.gather(2, labels.expand(x.shape[0], *labels.shape))
    # Equal labels need a blank between them. Blanks are two apart themselves.
    skips = labels != F.pad(labels, (2, 0), value=-1)[:, : labels.shape[1]]
    place = torch.arange(labels.shape[1], device=x.device)
    begin = torch.where(place == 0, 0.0, -math.inf).to(x.dtype).expand(labels.shape)
    (a,) = scan(_step, [begin], [scores, inside], [skips])
    last = a.gather(1, (2 * sizes)[:, None])
    before = torch.where((sizes == 0)[:, None], -math.inf, a.gather(1, (2 * sizes - 1).clamp(min=0)[:, None]))
    return -_log_of_sum(last, before).squeeze(1)


def _reduced(losses: Tensor, sizes: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    if reduction == "sum":
        return total(losses, [0])
    return total(losses / sizes.clamp(min=1).to(losses.dtype), [0]) / count(losses, [0])


@formula(F.ctc_loss)
def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """ctc_loss(x, y) = sum(-lse(a(2 S), a(2 S - 1)) / S) / n, a = lse(a(s), a(s - 1), a(s - 2)) + x[t, y(s)] over t"""
    x, batched = log_probs, log_probs.dim() == 3
    if x.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"ctc_loss: expected log_probs of float32 or float64, not {x.dtype}: call .float() before")
    if x.dim() not in (2, 3) or x.shape[0] == 0 or not 0 <= blank < x.shape[-1]:
        shape = tuple(x.shape)
        raise ValueError(f"ctc_loss: expected log_probs (T, N, C) or (T, C) and 0 <= blank < C, not {shape}, {blank}")
    rows = x if batched else x.unsqueeze(1)
    labels = _integers(targets if batched else targets.reshape(1, -1), "targets", x.device)
    padded = _padded(labels, target_lengths, rows.shape[1])
    steps = _lengths(input_lengths, rows.shape[1], rows.shape[0], "input_lengths", x.device)
    sizes = _lengths(target_lengths, rows.shape[1], padded.shape[1], "target_lengths", x.device)
    inside = torch.arange(rows.shape[0], device=x.device)[:, None] < steps
    losses = _losses(rows, _labels(padded, sizes, blank), inside, sizes)
    losses = _LessProbabilities.apply(losses, rows, inside, zero_infinity)  # type: ignore[no-untyped-call]
    if zero_infinity:
        losses = torch.where(losses == math.inf, 0.0, losses)
    named = _REDUCTIONS[reduction] if isinstance(reduction, int) else reduction
    reduced = _reduced(losses, sizes, named)
    return reduced if batched or reduced.dim() == 0 else reduced.squeeze(0)


@formula(torch.ctc_loss)
def ctc_loss_by_number(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: int = 0,  # PyTorch's parser of arguments reads its default, at::Reduction::Mean, as 0
    zero_infinity: bool = False,
) -> Any:
    """ctc_loss(x, y) = sum(-lse(a(2 S), a(2 S - 1)) / S) / n"""
    return ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
