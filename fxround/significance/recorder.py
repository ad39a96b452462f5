"""Measuring: compute metrics of every sample, kept as sums over batches.

A ``Recorder`` keeps the sums of one metric for each sample number, and the numbers of the rows whose label changed in
any sample. Label maps stay in memory during one batch only, and only for metrics of pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fxround.short_reprs import Short
from fxround.significance.inputs import ModelCall
from fxround.significance.metrics import Metric, Sums, dice_of, dice_sums, primary, worst_class


@dataclass(frozen=True, repr=False)
class Measured(Short):
    """A metric's value for every sample, or for every pair of samples.

    name, meaning, unit, better   as in ``metrics.METRICS``
    values      one value per sample or pair
    rows        the rows of which a label changed in any sample; None for a metric that names no rows
    of          the number of all rows
    changed     the number of labels that changed in any sample: a row of an image or a text has many
    labels      the number of all labels
    classes     the Sorensen-Dice coefficient of every class in the worst sample or pair, for Dice metrics
    """

    name: str
    meaning: str
    unit: str
    better: str
    values: tuple[float, ...]
    rows: tuple[int, ...] | None = None
    of: int = 0
    changed: int = 0
    labels: int = 0
    classes: tuple[float, ...] | None = None

    def _line(self) -> str:
        if not self.values:
            return f"{self.name}, no values"
        worst = f", worst {self.worst:.6g}" if self.better else ""
        unit = f" {self.unit}" if self.unit else ""
        return f"{self.name}, mean {self.mean:.6g} ±{self.spread:.2g}{worst}{unit}, of {len(self.values)} values"

    @property
    def title(self) -> str:
        """The name with the unit, if there is one."""
        return f"{self.name} [{self.unit}]" if self.unit else self.name

    @property
    def mean(self) -> float:
        """The mean over the samples."""
        return float(np.mean(self.values))

    @property
    def spread(self) -> float:
        """The standard deviation over the samples; NaN if a value is not finite."""
        if not np.isfinite(self.values).all():
            return math.nan
        # The mean of equal values is rounded, and may be another one.
        return float(np.std(self.values)) if len(set(self.values)) > 1 else 0.0

    @property
    def worst(self) -> float:
        """The least value if higher is better, else the greatest; NaN if nobody has said which values are better."""
        if not self.better:
            return math.nan
        return float((min if self.better == "higher" else max)(self.values))

    @property
    def worst_at(self) -> int | None:
        """The position of ``worst`` among the values; None if nobody has said which values are better."""
        return self.values.index(self.worst) if self.worst in self.values else None

    @property
    def changed_share(self) -> float:
        """The share of labels that changed in any sample, 0 to 1."""
        return self.changed / max(self.labels, 1)


def changed_rows(moved: Tensor, offset: int) -> list[int]:
    """Return the rows with a changed label. offset: the position of the first row in all inputs."""
    return [int(i) + offset for i in moved.reshape(len(moved), -1).any(1).nonzero().flatten()]


class Recorder:
    """The sums of one metric, and of the batch that is measured the labels that moved and the label maps of samples."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.sums: dict[Any, Sums] = {}
        self.rows: list[int] = []
        self.of = self.changed = self.labels = 0
        self.moved: Tensor | None = None
        self.maps: list[Tensor] = []
        self.classes = 0

    def take(self, number: int, sample: Any, reference: Any, call: ModelCall) -> float:
        """Measure sample ``number`` of the batch; returns its value in this batch (NaN for a metric of pairs)."""
        if self.metric.pairs:
            x, how = primary(sample), self.metric.classes
            how.require(x, call)
            predicted, self.classes = how.labels(sample), how.count(x)
            for i, earlier in enumerate(self.maps):
                self._add((i, number), dice_sums(earlier, predicted, self.classes))
            self.maps.append(predicted.to(torch.int16 if self.classes < 1 << 15 else torch.int32))
            return math.nan
        compared = self.metric.reference(sample, reference, call)
        sums = self.metric.measure(sample, compared, call)
        self._add(number, sums)
        if self.metric.changed is not None:
            moved = self.metric.changed(sample, compared)
            self.moved = moved if self.moved is None else self.moved | moved
        return self.metric.finish(sums)

    def _add(self, key: Any, sums: Sums) -> None:
        self.sums[key] = self.metric.added(self.sums.get(key), sums)

    def end(self, call: ModelCall) -> None:
        """End the batch: keep the rows that changed."""
        self.of += call.rows
        if self.moved is not None:
            self.changed += int(self.moved.sum())
            self.labels += self.moved.numel()
            self.rows += changed_rows(self.moved, call.offset)
        self.moved, self.maps = None, []

    def measured(self) -> Measured | None:
        """Return the values; None before any sample."""
        if not self.sums:
            return None
        metric, values = self.metric, tuple(self.metric.finish(sums) for sums in self.sums.values())
        rows = tuple(self.rows) if metric.changed is not None else None
        classes = None
        if metric.finish is worst_class:
            worst = min(self.sums.values(), key=metric.finish)
            classes = dice_of(worst)
        counts = rows, self.of, self.changed, self.labels
        return Measured(metric.name, metric.meaning, metric.unit, metric.better, values, *counts, classes)
