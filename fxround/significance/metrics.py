"""Metrics: compare a model's result under perturbation with its unperturbed result.

A metric computes *sums* of one sample of one batch. Sums are added over batches (or the greatest is kept) and then
finished, so that a metric over many batches is that of the whole data and not a mean of means. ``dice_pairs`` compares
pairs of samples instead. Sums are computed in binary64. A metric that does not fit a result (labels of a tensor without
classes) raises a ValueError that states the expected shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from fxround.errors import shown, type_of
from fxround.graph.dtypes import FORMAT_OF, real_numbers
from fxround.numerics.formats import Format
from fxround.significance.inputs import ModelCall

Sums = tuple[float, ...]
Measure = Callable[[Any, Any, ModelCall], Sums]
K: Final = 5
# The label of a position that is no target, in PyTorch's losses and transformers.
NO_TOKEN: Final = -100


@dataclass(frozen=True)
class Metric:
    """One row of ``METRICS``.

    name, meaning, unit   text for reports
    better      whether "higher" or "lower" values are better
    measure     (sample, reference, call) to the sums of one batch
    finish      sums to the value of the metric
    combine     whether sums of batches are added or the greatest is kept
    rows        (sample, reference) to a bool tensor of the rows that changed, for metrics that name rows
    pairs       whether the metric compares pairs of samples
    share       whether values are between 0 and 1, for which ``samples="auto"`` has a rule of its own
    compares    whether the sums depend on the reference
    """

    name: str
    meaning: str
    unit: str
    better: Literal["higher", "lower"]
    measure: Measure
    finish: Callable[[Sums], float]
    combine: Literal["add", "greatest"] = "add"
    rows: Callable[[Any, Any], Tensor] | None = None
    pairs: bool = False
    share: bool = False
    compares: bool = True

    def added(self, a: Sums | None, b: Sums) -> Sums:
        """Return the combined sums of two batches."""
        if a is None:
            return b
        pick = max if self.combine == "greatest" else float.__add__
        return tuple(pick(x, y) for x, y in zip(a, b, strict=True))


def primary(result: Any) -> Tensor:
    """Return the first floating-point tensor of a result, of a complex one the parts. Raises ValueError if none is."""
    for numbers in map(real_numbers, pytree.tree_leaves(result)):
        if numbers is not None:
            return numbers
    raise ValueError("the model returns no floating-point tensor, so there is nothing to measure")


def labels(result: Any) -> Tensor:
    """Return the greatest class of each row.

    Classes are dimension 1 of [n, classes] and [n, classes, height, width, ...], and the last of [n, time, classes].
    """
    x = primary(result)
    if x.dim() < 2:
        raise ValueError(f"labels need a result of shape [n, classes, ...], got {tuple(x.shape)}")
    return x.argmax(class_dimension(x))


def class_dimension(x: Tensor) -> int:
    """Return the dimension that holds the classes. Raises ValueError for one class, which is always the greatest."""
    where = 2 if x.dim() == 3 else 1
    if x.shape[where] < 2:
        raise ValueError(
            f"the result of shape {tuple(x.shape)} has {x.shape[where]} class in dimension {where}; expected at least "
            "two. Of one channel of logits x, return torch.cat([-x, x], 1), whose greatest class says whether x > 0, "
            "or measure by a function of your own"
        )
    return where


def _powers(sample: Any, reference: Any, call: ModelCall) -> Sums:
    x, r = primary(sample).double(), primary(reference).double()
    return float(r.square().sum()), float((x - r).square().sum())


def decibels(signal: float, noise: float) -> float:
    """Return ten times the decimal logarithm of a ratio of sums of squares: infinity without noise, NaN for NaNs."""
    if math.isnan(signal) or math.isnan(noise):
        return math.nan
    if noise == 0.0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0.0 and noise < math.inf else -math.inf


def _relative(sums: Sums) -> float:
    signal, noise = sums
    return 0.0 if noise == 0.0 else math.sqrt(noise / signal) if signal > 0.0 else math.inf


def _ulps(sample: Any, reference: Any, call: ModelCall) -> Sums:
    """Return the greatest distance in ulps of the reference, in the tensor's own format."""
    x, r = primary(sample), primary(reference)
    fmt = Format.parse(FORMAT_OF[r.dtype])
    exponent = torch.frexp(r.double().abs()).exponent - 1
    ulp = torch.ldexp(torch.ones_like(r, dtype=torch.float64), exponent.clamp(min=fmt.emin) + 1 - fmt.precision)
    apart = (x.double() - r.double()).abs() / ulp
    apart = torch.where((x == r) | (x.isnan() & r.isnan()), 0.0, apart).nan_to_num(math.inf, math.inf)
    return (float(apart.max()) if apart.numel() else 0.0,)


def _changed(sample: Any, reference: Any) -> Tensor:
    moved = labels(sample) != labels(reference)
    return moved.flatten(1).any(1) if moved.dim() > 1 else moved


def _flips(sample: Any, reference: Any, call: ModelCall) -> Sums:
    moved = labels(sample) != labels(reference)
    return float(moved.sum()), float(moved.numel())


def _top(sample: Any, reference: Any, call: ModelCall) -> Sums:
    """Count the reference's k greatest classes that are among the sample's."""
    x, r = primary(sample), primary(reference)
    if r.dim() < 2:
        raise ValueError(f"top_k needs a result of shape [n, classes, ...], got {tuple(r.shape)}")
    where = class_dimension(r)
    k = min(K, r.shape[where])
    mine, theirs = (t.topk(k, where).indices.movedim(where, -1).unsqueeze(-1) for t in (x, r))
    shared = (mine == theirs.transpose(-1, -2)).any(-1)
    return float(shared.sum()), float(shared.numel())


def dice_sums(a: Tensor, b: Tensor, classes: int) -> Sums:
    """Return twice the common elements of each class, then the sum of the sizes of each class in both maps."""
    flat_a, flat_b = a.flatten().long(), b.flatten().long()
    both = torch.bincount(flat_a[flat_a == flat_b], minlength=classes)
    sizes = torch.bincount(flat_a, minlength=classes) + torch.bincount(flat_b, minlength=classes)
    return tuple(map(float, (*(2 * both).tolist(), *sizes.tolist())))


def dice_of(sums: Sums) -> tuple[float, ...]:
    """Return the Sorensen-Dice coefficient of every class; NaN if neither map has it."""
    classes = len(sums) // 2
    return tuple(b / s if s else math.nan for b, s in zip(sums[:classes], sums[classes:], strict=True))


def _dice(sample: Any, reference: Any, call: ModelCall) -> Sums:
    r = primary(reference)
    return dice_sums(labels(sample), labels(reference), r.shape[class_dimension(r)])


def _worst_class(sums: Sums) -> float:
    return float(np.nanmin([1.0, *dice_of(sums)]))


def _transport(sample: Any, reference: Any, call: ModelCall) -> Sums:
    """Wasserstein-1 distance along the last dimension, positions 0, 1, ...: each row is a distribution of mass 1."""
    x, r = primary(sample).double(), primary(reference).double()
    if bool((r < 0).any()):
        raise ValueError("wasserstein_1 compares distributions along the last dimension: values must not be negative")
    x, r = (t.clamp(min=0) / t.clamp(min=0).sum(-1, keepdim=True) for t in (x, r))
    rows = (x - r).cumsum(-1).abs().sum(-1)
    return float(rows.sum()), float(rows.numel())


def _divergence(sample: Any, reference: Any, call: ModelCall) -> Sums:
    """KL(reference || sample) of softmax over the classes, per row."""
    x, r = primary(sample).double(), primary(reference).double()
    where = class_dimension(r) if r.dim() > 1 else 0
    p, q = r.log_softmax(where), x.log_softmax(where)
    rows = (p.exp() * (p - q)).sum(where)
    return float(rows.sum()), float(rows.numel())


def _surprise(sample: Any, reference: Any, call: ModelCall) -> Sums:
    """Negative log-likelihood of the next tokens: logits [n, time, vocabulary], integer tokens [n, time].

    The tokens are the argument ``labels``, where -100 is no token, or the first integer tensor. Tokens whose
    ``attention_mask`` [n, time] is 0 do not count either.
    """
    given = getattr(sample, "logits", None)
    logits = (given if isinstance(given, Tensor) else primary(sample)).double()
    tokens = next((t for t in _tokens(call) if not t.is_floating_point() and t.dtype != torch.bool), None)
    if logits.dim() != 3 or tokens is None or tokens.shape != logits.shape[:2]:
        raise ValueError("perplexity needs logits [n, time, vocabulary] and integer tokens [n, time] among the inputs")
    targets = tokens[:, 1:].long()
    mask = call.kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == tokens.shape:
        targets = targets.masked_fill(mask[:, 1:] == 0, NO_TOKEN)
    lost = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), targets.flatten(), ignore_index=NO_TOKEN, reduction="sum"
    )
    return float(lost), float((targets != NO_TOKEN).sum())


def _tokens(call: ModelCall) -> list[Tensor]:
    labels = call.kwargs.get("labels")
    return [labels] if isinstance(labels, Tensor) else call.tensors


def _hits(sample: Any, reference: Any, call: ModelCall) -> Sums:
    """Count the labels that equal the targets of the data."""
    if not isinstance(call.target, Tensor):
        raise ValueError("accuracy needs targets: inputs that yield (x, target), as a DataLoader of a dataset does")
    predicted, target = labels(sample), call.target
    if target.dim() == predicted.dim() + 1 and target.shape[1] == 1:
        target = target.squeeze(1)
    if target.shape != predicted.shape:
        raise ValueError(
            f"accuracy compares labels of shape {tuple(predicted.shape)} with targets of shape "
            f"{tuple(call.target.shape)}; expected one class for each label"
        )
    right = predicted == target
    return float(right.sum()), float(right.numel())


def _share(sums: Sums) -> float:
    return sums[0] / sums[1] if sums[1] else math.nan


def _first(sums: Sums) -> float:
    return sums[0]


def _perplexity(sums: Sums) -> float:
    try:
        return math.exp(_share(sums))
    except OverflowError:
        return math.inf


_ROWS: Final = (
    Metric("sqnr", "signal over perturbation", "dB", "higher", _powers, lambda sums: decibels(*sums)),
    Metric("relative_error", "norm of the perturbation over the norm", "", "lower", _powers, _relative),
    Metric("max_ulp", "greatest distance", "ulp", "lower", _ulps, _first, "greatest"),
    Metric("label_flips", "labels that change", "share", "lower", _flips, _share, rows=_changed, share=True),
    Metric("top_k", f"of the {K} greatest classes, those kept", "share", "higher", _top, _share, share=True),
    Metric("accuracy", "labels that equal the targets", "share", "higher", _hits, _share, share=True, compares=False),
    Metric("dice", "Sorensen-Dice of the worst class", "", "higher", _dice, _worst_class, share=True),
    Metric("dice_pairs", "the same, of the worst pair of samples", "", "higher", _dice, _worst_class, pairs=True),
    Metric("wasserstein_1", "transport along the last dimension", "steps", "lower", _transport, _share),
    Metric("kl", "KL divergence of the softmax", "nats", "lower", _divergence, _share),
    Metric("perplexity", "of the next token", "", "lower", _surprise, _perplexity, compares=False),
)
METRICS: Final[Mapping[str, Metric]] = MappingProxyType({metric.name: metric for metric in _ROWS})


def chosen(asked: Any, result: Any) -> tuple[Metric, ...]:
    """Return the metrics of ``metrics=`` for a result; for ``"auto"``, those that fit it."""
    return tuple(METRICS[name] for name in _fitting(result)) if asked == "auto" else named(asked)


def named(asked: Any) -> tuple[Metric, ...]:
    """Return the metrics of one or several names, functions or Metrics; none for ``"auto"``, which depends on the
    result.

    A function takes (sample, unperturbed result) and returns a number; batches are weighted by their rows. Raises
    ValueError for an unknown name, TypeError for anything else.
    """
    if asked is None or asked == "auto":
        return ()
    several = (asked,) if isinstance(asked, str | Metric) or callable(asked) else tuple(asked)
    return tuple(_metric(one) for one in several)


def _fitting(result: Any) -> tuple[str, ...]:
    tensors = [t for t in pytree.tree_leaves(result) if real_numbers(t) is not None]
    if not tensors:
        return ()
    classes = tensors[0].dim() == 2 and tensors[0].shape[1] > 1 and not tensors[0].is_complex()
    return ("sqnr", "max_ulp", "label_flips") if classes else ("sqnr", "max_ulp")


def _metric(asked: Any) -> Metric:
    if isinstance(asked, Metric):
        return asked
    if isinstance(asked, str):
        if asked not in METRICS:
            raise ValueError(f"no metric is named {shown(asked)}; known: {', '.join(METRICS)}, or a function")
        return METRICS[asked]
    if not callable(asked):
        raise TypeError(f"a metric is a name, a Metric or a function of (sample, unperturbed), got {shown(asked)}")

    return mean_over_rows(asked, "a function of the caller's", lambda sample, reference, _: asked(sample, reference))


def mean_over_rows(
    function: Any, meaning: str, value: Callable[[Any, Any, ModelCall], Any], *, compares: bool = True
) -> Metric:
    """Return the metric of a caller's function, which has its name: the mean over batches, weighted by their rows.

    value: (sample, reference, call) to a number. Measuring raises TypeError if it returns anything else.
    """
    name = getattr(function, "__name__", type(function).__name__)

    def measure(sample: Any, reference: Any, call: ModelCall) -> Sums:
        number = value(sample, reference, call)
        if isinstance(number, Tensor | np.ndarray) and math.prod(number.shape) == 1:
            number = number.item()
        if not isinstance(number, Real):
            raise TypeError(f"metric {name} returned {type_of(number)}; expected a number")
        return float(number) * call.rows, float(call.rows)

    return Metric(name, meaning, "", "higher", measure, _share, compares=compares)
