"""Metrics: compare a model's result under perturbation with its unperturbed result.

A metric computes *sums* of one sample of one batch. Sums are added over batches (or the greatest is kept) and then
finished, so that a metric over many batches is that of the whole data and not a mean of means. ``dice_pairs`` compares
pairs of samples instead. Sums are computed in binary64. A metric that does not fit a result (labels of a tensor without
classes) raises a ValueError that states the expected shape.

``metric`` makes metrics of other choices: another dimension of the classes, a threshold for one channel of logits, the
targets of the data in place of the unperturbed result, and a function of the caller's with the direction in which it is
better. A metric of torchmetrics keeps its own state of a batch in place of sums.
"""

from __future__ import annotations

import copy
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from fxround.short_reprs import Short
from fxround.significance.inputs import ModelCall

Sums = tuple[Any, ...]
Better = Literal["higher", "lower", ""]
Against = Literal["unperturbed", "target"]
Measure = Callable[[Any, Any, ModelCall], Sums]
K: Final = 5
# The label of a position that is no target, in PyTorch's losses and transformers.
NO_TOKEN: Final = -100


@dataclass(frozen=True)
class Classes:
    """How a result says which class it takes.

    dimension   that of the classes; None for dimension 1, unless the result is that of a sequence
    threshold   for a result without classes: the label of an element is whether it is greater. None for classes
    """

    dimension: int | None = None
    threshold: float | None = None

    def require(self, x: Tensor, call: ModelCall) -> None:
        """Raise ValueError for a result of which it is not known which dimension has the classes."""
        if self.dimension is not None or self.threshold is not None or x.dim() != 3:
            return
        if any(t.shape == x.shape[:2] and not t.is_floating_point() for t in call.tensors):
            raise ValueError(
                f"the result of shape {tuple(x.shape)} follows integers of shape {tuple(x.shape[:2])}, so that its "
                "classes may be in dimension 1 or 2; say which: fxround.metric('label_flips', class_dim=-1)"
            )

    def of(self, x: Tensor) -> int:
        """Return the dimension of the classes. Raises ValueError for less than two, or without such a dimension."""
        where = 1 if self.dimension is None else self.dimension
        if x.dim() < 2 or not -x.dim() <= where < x.dim():
            raise ValueError(f"classes are in dimension {where} of a result, [n, classes, ...]; got {tuple(x.shape)}")
        if x.shape[where] < 2:
            raise ValueError(
                f"the result of shape {tuple(x.shape)} has {x.shape[where]} class in dimension {where}; expected at "
                "least two. Of one channel of logits, fxround.metric('dice', threshold=0.0) compares which are "
                "positive; fxround.metric(..., class_dim=...) says where the classes are"
            )
        return where % x.dim()

    def count(self, x: Tensor) -> int:
        """Return the number of classes."""
        return 2 if self.threshold is not None else x.shape[self.of(x)]

    def labels(self, result: Any) -> Tensor:
        """Return the class of each row, voxel or token: those of ``threshold`` have the shape without one channel.

        Whole numbers, which no result has, are labels already.
        """
        if isinstance(result, Tensor) and result.dtype == torch.int64:
            return result
        x = primary(result)
        if self.threshold is None:
            return x.argmax(self.of(x))
        above = (x > self.threshold).long()
        return above.squeeze(1) if x.dim() > 1 and x.shape[1] == 1 else above

    def targets(self, name: str, result: Any, target: Any) -> Tensor:
        """Return the labels that targets say, with the shape of the result's labels; name: of the metric.

        Targets have one class for each label, perhaps in a dimension of one channel, as whole numbers of any dtype; or
        a number for each class, as the result has, of which the greatest counts. Raises ValueError for others.
        """
        x, predicted = primary(result), self.labels(result)
        if not isinstance(target, Tensor):
            raise ValueError(f"{name} needs targets: {_OF_TARGETS}")
        one = 1 if self.dimension is None else self.dimension % x.dim()
        whole = target.squeeze(one) if target.dim() == predicted.dim() + 1 and target.shape[one] == 1 else target
        if whole.shape == predicted.shape:
            return _whole(name, whole, self.count(x))
        if self.threshold is None and target.shape == x.shape:
            return target.argmax(self.of(x))
        raise ValueError(
            f"{name} compares labels of shape {tuple(predicted.shape)} with targets of shape {tuple(target.shape)}; "
            "expected one class for each label. Classes are in dimension 1 of a result, or where "
            f"fxround.metric({name!r}, class_dim=...) says"
        )


def _whole(name: str, target: Tensor, classes: int) -> Tensor:
    """Return targets as int64. Raises ValueError for numbers that are no classes; -100 is none, and allowed."""
    labels = target.long()
    if target.is_floating_point() and not bool((labels == target).all()):
        raise ValueError(f"{name} has targets that are no whole numbers; expected classes from 0 to {classes - 1}")
    wrong = labels[((labels < 0) | (labels >= classes)) & (labels != NO_TOKEN)]
    if len(wrong):
        raise ValueError(
            f"{name} has the target {int(wrong[0])}; expected classes from 0 to {classes - 1}, or {NO_TOKEN} for none"
        )
    return labels


@dataclass(frozen=True, repr=False)
class Metric(Short):
    """One row of ``METRICS``.

    name, meaning, unit   text for reports
    better      whether "higher" or "lower" values are better; "" if nobody has said it of a function
    measure     (sample, reference, call) to the sums of one batch
    finish      sums to the value of the metric
    combine     whether sums of batches are added, the greatest is kept, or states of torchmetrics are merged
    changed     (sample, reference) to a bool tensor of the labels that changed, rows first, for metrics that name rows
    pairs       whether the metric compares pairs of samples
    share       whether values are between 0 and 1, for which ``samples="auto"`` has a rule of its own
    compares    whether the sums depend on the reference
    classes     how it finds the labels of a result
    function    the caller's function that it measures
    against     whether the reference is the unperturbed result or the target of the data
    settings    what a metric object of torchmetrics was made with
    row         the row of ``METRICS`` that it was made of, if its name is another
    """

    name: str
    meaning: str
    unit: str
    better: Better
    measure: Measure
    finish: Callable[[Sums], float]
    combine: Literal["add", "greatest", "merge"] = "add"
    changed: Callable[[Any, Any], Tensor] | None = None
    pairs: bool = False
    share: bool = False
    compares: bool = True
    classes: Classes = Classes()
    function: Callable[[Any, Any], Any] | None = None
    against: Against = "unperturbed"
    settings: str = ""
    row: str = ""

    def _line(self) -> str:
        unit = f" [{self.unit}]" if self.unit else ""
        reference = "the unperturbed result" if self.against == "unperturbed" else "the target"
        better = f"{self.better} is better" if self.better else "which values are better is not known"
        classes = [f"{key}={value}" for key, value in vars(self.classes).items() if value is not None]
        return ", ".join([f"{self.name}, {self.meaning}{unit}", f"against {reference}", better, *classes])

    def reference(self, result: Any, unperturbed: Any, call: ModelCall) -> Any:
        """Return what a result is compared with: the unperturbed one, or the target.

        Raises ValueError for data without targets, and for targets of another shape than the labels.
        """
        if self.against == "unperturbed":
            return unperturbed
        if call.target is None:
            raise ValueError(f"{self.name} is compared with targets, and the data have none: {_OF_TARGETS}")
        return (
            self.classes.targets(self.name, result, call.target)
            if (self.row or self.name) in OF_LABELS
            else call.target
        )

    def added(self, a: Sums | None, b: Sums) -> Sums:
        """Return the combined sums of two batches."""
        if a is None:
            return b
        if self.combine == "merge":
            return (_merged(a[0], b[0]),)
        pick = max if self.combine == "greatest" else float.__add__
        return tuple(pick(x, y) for x, y in zip(a, b, strict=True))


def primary(result: Any) -> Tensor:
    """Return the first floating-point tensor of a result, of a complex one the parts. Raises ValueError if none is."""
    for numbers in map(real_numbers, pytree.tree_leaves(result)):
        if numbers is not None:
            return numbers
    raise ValueError("the model returns no floating-point tensor, so there is nothing to measure")


def _pair(sample: Any, reference: Any) -> tuple[Tensor, Tensor]:
    """Return both results. Raises ValueError if their shapes differ, which arithmetic would broadcast."""
    x, r = primary(sample), primary(reference)
    if x.shape != r.shape:
        raise ValueError(f"the results have the shapes {tuple(x.shape)} and {tuple(r.shape)}, and cannot be compared")
    return x, r


def _powers(sample: Any, reference: Any, call: ModelCall) -> Sums:
    x, r = (t.double() for t in _pair(sample, reference))
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
    x, r = _pair(sample, reference)
    fmt = Format.parse(FORMAT_OF[r.dtype])
    exponent = torch.frexp(r.double().abs()).exponent - 1
    ulp = torch.ldexp(torch.ones_like(r, dtype=torch.float64), exponent.clamp(min=fmt.emin) + 1 - fmt.precision)
    apart = (x.double() - r.double()).abs() / ulp
    apart = torch.where((x == r) | (x.isnan() & r.isnan()), 0.0, apart).nan_to_num(math.inf, math.inf)
    return (float(apart.max()) if apart.numel() else 0.0,)


def _label_pair(classes: Classes, sample: Any, reference: Any) -> tuple[Tensor, Tensor]:
    """Return the labels of both. Raises ValueError if shapes differ, of results or of a result and target labels."""
    mine, theirs = classes.labels(sample), classes.labels(reference)
    if theirs is not reference:
        _pair(sample, reference)
    return mine, theirs


def _changed(classes: Classes, sample: Any, reference: Any) -> Tensor:
    mine, theirs = _label_pair(classes, sample, reference)
    return (mine != theirs) & (theirs != NO_TOKEN)


def _flips(classes: Classes, sample: Any, reference: Any, call: ModelCall) -> Sums:
    classes.require(primary(sample), call)
    mine, theirs = _label_pair(classes, sample, reference)
    counted = theirs != NO_TOKEN
    return float(((mine != theirs) & counted).sum()), float(counted.sum())


def _top(classes: Classes, sample: Any, reference: Any, call: ModelCall) -> Sums:
    """Count the reference's k greatest classes, or the target's class, that are among the sample's k greatest."""
    x = primary(sample)
    classes.require(x, call)
    where = classes.of(x)
    k = min(K, x.shape[where])
    mine = x.topk(k, where).indices.movedim(where, -1).unsqueeze(-1)
    theirs = classes.labels(reference)
    if theirs is reference:
        counted = theirs != NO_TOKEN
        return float((mine == theirs[..., None, None]).any((-1, -2))[counted].sum()), float(counted.sum())
    _, r = _pair(sample, reference)
    kept = (mine == r.topk(k, where).indices.movedim(where, -1).unsqueeze(-2)).any(-1)
    return float(kept.sum()), float(kept.numel())


def dice_sums(a: Tensor, b: Tensor, classes: int) -> Sums:
    """Return twice the common elements of each class, then the sum of the sizes of each class in both maps.

    Elements that are -100 in ``b`` belong to no class.
    """
    counted = b.flatten() != NO_TOKEN
    flat_a, flat_b = a.flatten()[counted].long(), b.flatten()[counted].long()
    both = torch.bincount(flat_a[flat_a == flat_b], minlength=classes)
    sizes = torch.bincount(flat_a, minlength=classes) + torch.bincount(flat_b, minlength=classes)
    return tuple(map(float, (*(2 * both).tolist(), *sizes.tolist())))


def dice_of(sums: Sums) -> tuple[float, ...]:
    """Return the Sorensen-Dice coefficient of every class; NaN if neither map has it."""
    classes = len(sums) // 2
    return tuple(b / s if s else math.nan for b, s in zip(sums[:classes], sums[classes:], strict=True))


def _dice(classes: Classes, sample: Any, reference: Any, call: ModelCall) -> Sums:
    x = primary(sample)
    classes.require(x, call)
    return dice_sums(*_label_pair(classes, sample, reference), classes.count(x))


def worst_class(sums: Sums) -> float:
    """Return the least Sorensen-Dice coefficient; 1 if no map has a class."""
    return float(np.nanmin([1.0, *dice_of(sums)]))


def _transport(sample: Any, reference: Any, call: ModelCall) -> Sums:
    """Wasserstein-1 distance along the last dimension, positions 0, 1, ...: each row is a distribution of mass 1."""
    x, r = (t.double() for t in _pair(sample, reference))
    if bool((r < 0).any()):
        raise ValueError("wasserstein_1 compares distributions along the last dimension: values must not be negative")
    x, r = (t.clamp(min=0) / t.clamp(min=0).sum(-1, keepdim=True) for t in (x, r))
    rows = (x - r).cumsum(-1).abs().sum(-1)
    return float(rows.sum()), float(rows.numel())


def _divergence(classes: Classes, sample: Any, reference: Any, call: ModelCall) -> Sums:
    """KL(reference || sample) of softmax over the classes, per row."""
    x, r = (t.double() for t in _pair(sample, reference))
    classes.require(r, call)
    where = classes.of(r) if r.dim() > 1 else 0
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


def _hits(classes: Classes, sample: Any, reference: Any, call: ModelCall) -> Sums:
    """Count the labels that equal the targets of the data."""
    target = classes.targets("accuracy", sample, call.target)
    counted = target != NO_TOKEN
    return float((classes.labels(sample) == target)[counted].sum()), float(counted.sum())


def _share(sums: Sums) -> float:
    return float(sums[0] / sums[1]) if sums[1] else math.nan


def _first(sums: Sums) -> float:
    return float(sums[0])


def _perplexity(sums: Sums) -> float:
    try:
        return math.exp(_share(sums))
    except OverflowError:
        return math.inf


def _rows(classes: Classes) -> tuple[Metric, ...]:
    """Return all metrics. classes: how they find the labels of a result."""

    def of_labels(name: str, meaning: str, unit: str, better: Any, measure: Any, finish: Any, **rest: Any) -> Metric:
        return Metric(name, meaning, unit, better, partial(measure, classes), finish, classes=classes, **rest)

    changed = partial(_changed, classes)
    pairs = "the same, of the worst pair of samples"
    return (
        Metric("sqnr", "signal over perturbation", "dB", "higher", _powers, lambda sums: decibels(*sums)),
        Metric("relative_error", "norm of the perturbation over the norm", "", "lower", _powers, _relative),
        Metric("max_ulp", "greatest distance", "ulp", "lower", _ulps, _first, "greatest"),
        of_labels("label_flips", "labels that change", "share", "lower", _flips, _share, changed=changed, share=True),
        of_labels("top_k", f"of the {K} greatest classes, those kept", "share", "higher", _top, _share, share=True),
        of_labels(
            *("accuracy", "labels that equal the targets", "share", "higher", _hits, _share), share=True, compares=False
        ),
        of_labels("dice", "Sorensen-Dice of the worst class", "", "higher", _dice, worst_class, share=True),
        of_labels("dice_pairs", pairs, "", "higher", _dice, worst_class, pairs=True),
        Metric("wasserstein_1", "transport along the last dimension", "steps", "lower", _transport, _share),
        of_labels("kl", "KL divergence of the softmax", "nats", "lower", _divergence, _share),
        Metric("perplexity", "of the next token", "", "lower", _surprise, _perplexity, compares=False),
    )


METRICS: Final[Mapping[str, Metric]] = MappingProxyType({metric.name: metric for metric in _rows(Classes())})
_OF_TARGETS: Final = (
    "batches (x, target) of a DataLoader, or fxround.batches(loader, lambda batch: (arguments, target)) for others"
)
# The attributes of a metric object that say what it computes.
_SETTINGS: Final = (bool, int, float, str, tuple, list, type(None))
# What has labels, and what of it has no meaning for a threshold, which makes no order of the classes.
OF_LABELS: Final = frozenset(("label_flips", "top_k", "accuracy", "dice", "dice_pairs", "kl"))
_OF_SCORES: Final = frozenset(("top_k", "kl"))
_OF_TWO_RESULTS: Final = MappingProxyType({"kl": "compares scores of two results", "dice_pairs": "compares samples"})


def metric(
    of: str | Callable[[Any, Any], Any],
    *,
    better: Literal["higher", "lower"] | None = None,
    class_dim: int | None = None,
    threshold: float | None = None,
    against: Against | None = None,
    name: str | None = None,
) -> Metric:
    """Return a metric for ``variability``, ``localize``, ``compare`` or ``tune`` with choices of the caller's.

    Args:
        of: a name of ``fxround.significance.metrics.METRICS``; a metric object of torchmetrics, which is copied; or a
            function that returns a number for a batch: of (sample, unperturbed result) in ``variability`` and
            ``localize``, of (result, target) in ``compare`` and ``tune``, and with ``against="target"`` everywhere.
        better: whether higher or lower values of a function are better. The worst value of its samples and a loss of
            it are not known without.
        class_dim: the dimension of a result that has the classes. Without it that is dimension 1, as in
            ``torch.nn.functional.cross_entropy``; the result of a sequence, [n, time, classes], has -1.
        threshold: for results without classes, such as [n, 1, ...] of a binary segmentation: the label of an element is
            1 where it is greater than this, and 0 elsewhere.
        against: what a result is compared with: ``"unperturbed"``, the result without perturbation, or ``"target"``,
            the target of each batch: classes as whole numbers for metrics of labels, where -100 is none, and a tensor
            like the result for others. None takes the target for torchmetrics, and the unperturbed result for all else.
        name: what reports call it, where one of its own name is measured too; None for its own.

    Raises:
        ValueError: for an unknown name, and for a choice that the metric does not have.
        TypeError: for what is neither a name nor a function.

    Example::

        fxround.variability(model, tokens, metrics=[fxround.metric("label_flips", class_dim=-1)])
        fxround.variability(net, volumes, metrics=[fxround.metric("dice", threshold=0.0)])
        fxround.variability(net, loader, metrics=["dice", fxround.metric("dice", against="target", name="truth")])
        fxround.variability(net, loader, metrics=[torchmetrics.classification.MulticlassAUROC(10)])
        fxround.localize(net, x, (fxround.metric(largest_change, better="lower"), 1e-3))
    """
    if name is not None and not (isinstance(name, str) and name):
        raise ValueError(f"name is {shown(name)}; expected a text, what reports call the metric")
    made = _chosen(of, better, class_dim, threshold, against)
    return made if name in (None, made.name) else replace(made, name=name, row=made.name)


def _chosen(of: Any, better: Any, class_dim: int | None, threshold: float | None, against: Against | None) -> Metric:
    """Return a metric with choices, as ``metric`` says."""
    if better not in (None, "higher", "lower"):
        raise ValueError(f"better is {shown(better)}; expected 'higher' or 'lower'")
    if against not in (None, "unperturbed", "target"):
        raise ValueError(f"against is {shown(against)}; expected 'unperturbed' or 'target'")
    if not isinstance(of, str):
        if class_dim is not None or threshold is not None:
            raise ValueError("class_dim and threshold belong to metrics that have a name; a function has its own")
        own = _metric(of)
        if own.combine == "merge" and own.better and better not in (None, own.better):
            raise ValueError(f"better is {better!r}, and {own.better} values of {own.name} are better")
        chosen_against = against or own.against
        return replace(
            own, better=better or own.better, against=chosen_against, compares=chosen_against == "unperturbed"
        )
    if _metric(of).better != (better or _metric(of).better):
        raise ValueError(f"better is {better!r}, and {_metric(of).better} values of {of} are better")
    row = _named_metric(of, class_dim, threshold)
    if against != "target":
        return row
    if row.pairs or not row.compares or of in _OF_TWO_RESULTS:
        raise ValueError(
            f"{of} {_OF_TWO_RESULTS.get(of, 'has its own reference')}, and cannot be compared with targets"
        )
    return replace(row, against=against, compares=False)


def _named_metric(of: str, class_dim: int | None, threshold: float | None) -> Metric:
    """Return the metric of a name that finds labels as these say."""
    if class_dim is None and threshold is None:
        return METRICS[of]
    if of not in OF_LABELS:
        raise ValueError(f"{of} has no labels; class_dim and threshold belong to {', '.join(sorted(OF_LABELS))}")
    if class_dim is not None and (isinstance(class_dim, bool) or not isinstance(class_dim, int)):
        raise TypeError(f"class_dim is {type_of(class_dim)}; expected an int")
    if threshold is not None and class_dim is not None:
        raise ValueError("a result has classes in class_dim, or one channel with a threshold; expected one of the two")
    if threshold is not None and (isinstance(threshold, bool) or not isinstance(threshold, int | float)):
        raise TypeError(f"threshold is {type_of(threshold)}; expected a number")
    if threshold is not None and math.isnan(threshold):
        raise ValueError("threshold is nan, and no element is greater or less; expected a number")
    if threshold is not None and of in _OF_SCORES:
        raise ValueError(f"{of} compares scores of classes, of which a threshold leaves none; expected class_dim")
    return next(row for row in _rows(Classes(class_dim, threshold)) if row.name == of)


def is_auto(asked: Any) -> bool:
    """Whether the metrics are those that fit the result. Equality of torchmetrics' objects is a metric."""
    return isinstance(asked, str) and asked == "auto"


def chosen(asked: Any, result: Any) -> tuple[Metric, ...]:
    """Return the metrics of ``metrics=`` for a result; for ``"auto"``, those that fit it."""
    return tuple(METRICS[name] for name in _fitting(result)) if is_auto(asked) else named(asked)


def named(asked: Any) -> tuple[Metric, ...]:
    """Return the metrics of one or several names, functions or Metrics; none for ``"auto"``, which depends on the
    result.

    A function takes (sample, unperturbed result) and returns a number; batches are weighted by their rows. Which of its
    values are better is not known. Raises ValueError for an unknown name and for two metrics of one name, TypeError for
    anything else.
    """
    if asked is None or is_auto(asked):
        return ()
    several = (asked,) if isinstance(asked, str | Metric) or callable(asked) else tuple(asked)
    metrics = tuple(_metric(one) for one in several)
    require_names(metrics)
    return metrics


def require_names(metrics: Sequence[Metric]) -> None:
    """Raise ValueError for two metrics of one name."""
    names = [metric.name for metric in metrics]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"two metrics have the name {shown(name)}; give functions names of their own, or one of the metrics "
                f"another name: fxround.metric({name!r}, ..., name='other')"
            )


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
    if _is_of_torchmetrics(asked):
        return _of_torchmetrics(asked)
    if not callable(asked):
        raise TypeError(
            "a metric is a name, a Metric, a metric object of torchmetrics, or a function of (sample, unperturbed), "
            f"got {shown(asked)}"
        )
    made = mean_over_rows(asked, "a function of the caller's", lambda sample, reference, _: asked(sample, reference))
    return replace(made, function=asked)


def _is_of_torchmetrics(asked: Any) -> bool:
    """Whether this is a metric object of torchmetrics, which is imported if there is one."""
    package = sys.modules.get("torchmetrics")
    return package is not None and isinstance(asked, package.Metric)


def _of_torchmetrics(asked: Any) -> Metric:
    """Return the metric of an object of torchmetrics, which is not changed: each batch has a copy of it as its sums."""
    name = type(asked).__name__
    better: Better = "" if asked.higher_is_better is None else "higher" if asked.higher_is_better else "lower"

    def measure(sample: Any, reference: Any, call: ModelCall) -> Sums:
        state = copy.deepcopy(asked)
        state.reset()
        state.update(primary(sample), reference if isinstance(reference, Tensor) else primary(reference))
        return (state,)

    def finish(sums: Sums) -> float:
        value = copy.deepcopy(sums[0]).compute()  # which keeps its value, also when more batches are merged
        if not isinstance(value, Tensor) or value.numel() != 1:
            came = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type_of(value)
            raise ValueError(f"{name} computes {came}; expected one number, such as that of average='macro'")
        return float(value)

    settings = {key: value for key, value in sorted(vars(asked).items()) if isinstance(value, _SETTINGS)}
    return Metric(
        *(name, "of torchmetrics", "", better, measure, finish, "merge"),
        compares=False,
        function=asked,
        against="target",
        settings=str({key: value for key, value in settings.items() if not key.startswith("_")}),
    )


def _merged(earlier: Any, later: Any) -> Any:
    """Return a metric of torchmetrics with the batches of both."""
    merged = copy.deepcopy(earlier)
    merged.merge_state(later)
    return merged


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

    return Metric(name, meaning, "", "", measure, _share, compares=compares)


def bound_of(name: str, text: str) -> tuple[Literal["higher", "lower"], float]:
    """Return the direction and the bound of an argument that is a text. Raises ValueError for any other text."""
    match = re.fullmatch(r"\s*(>=|<=)\s*(\S+)\s*", text)
    try:
        bound = float(match[2]) if match else math.nan
    except ValueError:
        bound = math.nan
    if match is None or math.isnan(bound):
        raise ValueError(f"{name} is {shown(text)}; expected '>= 0.95' or '<= 0.1', with a number of your own")
    return ("higher" if match[1] == ">=" else "lower"), bound
