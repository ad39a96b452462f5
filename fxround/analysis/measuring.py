"""Measuring: metrics of every sample, kept as sums over batches.

What is true here. For each metric and sample number a ``Recorder`` keeps the sums so far; the rows whose label
changed in any sample are kept as numbers. Label maps stay in memory during a batch only, and only for metrics of
pairs.

    before   results[i].append(metric(...))     # a mean of means
    after    recorder.take(i, result); recorder.measured()
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fxround.analysis.inputs import Call
from fxround.analysis.metrics import Metric, Sums, class_dimension, dice_of, dice_sums, labels, primary


@dataclass(frozen=True)
class Measured:
    """A metric's value for every sample (or pair of samples), and the rows that changed in any of them.

    rows: numbers of the rows whose label changed in some sample, None for a metric that names none. of: rows in all.
    classes: Sorensen-Dice of every class, in the worst sample or pair.
    """

    name: str
    meaning: str
    unit: str
    better: str
    values: tuple[float, ...]
    rows: tuple[int, ...] | None = None
    of: int = 0
    classes: tuple[float, ...] | None = None

    @property
    def mean(self) -> float:
        """Over the samples."""
        return float(np.mean(self.values))

    @property
    def spread(self) -> float:
        """Standard deviation over the samples."""
        return float(np.std(self.values)) if np.isfinite(self.values).all() else math.nan

    @property
    def worst(self) -> float:
        """The least where higher is better, the greatest where lower is."""
        return float((min if self.better == "higher" else max)(self.values))

    @property
    def changed_share(self) -> float:
        """The share of rows that changed in any sample."""
        return len(self.rows or ()) / max(self.of, 1)


class Recorder:
    """The sums of one metric."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.sums: dict[Any, Sums] = {}
        self.rows: list[int] = []
        self.of = 0
        self._changed: Tensor | None = None
        self._maps: list[Tensor] = []

    def take(self, number: int, sample: Any, reference: Any, call: Call) -> float:
        """Measure sample ``number`` of the batch; returns its value in this batch (NaN for a metric of pairs)."""
        if self.metric.pairs:
            found = labels(sample)
            classes = primary(sample).shape[class_dimension(primary(sample))]
            for i, earlier in enumerate(self._maps):
                self._add((i, number), dice_sums(earlier, found, classes))
            self._maps.append(found.to(torch.int16 if classes < 1 << 15 else torch.int32))
            return math.nan
        sums = self.metric.measure(sample, reference, call)
        self._add(number, sums)
        if self.metric.rows is not None:
            moved = self.metric.rows(sample, reference)
            self._changed = moved if self._changed is None else self._changed | moved
        return self.metric.finish(sums)

    def _add(self, key: Any, sums: Sums) -> None:
        self.sums[key] = self.metric.added(self.sums.get(key), sums)

    def end(self, call: Call) -> None:
        """The batch is over."""
        self.of += call.rows
        if self._changed is not None:
            self.rows += [int(i) + call.offset for i in self._changed.nonzero().flatten()]
        self._changed, self._maps = None, []

    def measured(self) -> Measured | None:
        """What was found; None before any sample."""
        if not self.sums:
            return None
        metric, values = self.metric, tuple(self.metric.finish(sums) for sums in self.sums.values())
        rows = tuple(self.rows) if metric.rows is not None else None
        classes = None
        if metric.name.startswith("dice"):
            worst = min(self.sums.values(), key=metric.finish)
            classes = dice_of(worst)
        return Measured(metric.name, metric.meaning, metric.unit, metric.better, values, rows, self.of, classes)
