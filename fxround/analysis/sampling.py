"""Sampling until a figure is known well enough: a sequential rule with tested coverage.

What is true here. Samples come in groups of five. Each group gives one value of the figure that is watched (mean bits
over the results' elements, or a metric), computed from that group alone, so that the values are independent whatever
the correlation between elements. After each group, from the fourth on, Student's interval of their mean is formed at
twice the asked-for strictness (97.5 % for 95 %); sampling stops when its half width is at most the tolerance.

Why it is safe. Looking again and again makes a fixed-size interval too optimistic; the stricter level pays for it. A
simulation over normal and skewed figures, easy and hard, finds the mean inside the tolerance at least as often as
asked for (tests/test_analysis_sampling.py). Sources: Chow and Robbins, Ann. Math. Stat. 36 (1965); batch means, Law
and Kelton.

    before   samples=10, and hope
    after    rule = Sequential(tolerance=0.5); rule.add(19.3); ...; rule.done
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from fxround.analysis.statistics import Moments, chunks
from fxround.numerics.formats import Format
from fxround.refusals import FORMAT_OF
from fxround.significance import CONFIDENCE, require

GROUP: Final = 5
LEAST: Final = 4


@dataclass
class Sequential:
    """Values of a figure, one a group, until their mean is known to within ``tolerance``.

    confidence: that the mean is within the tolerance, at least. A group without a figure (None) counts as tried.
    """

    tolerance: float
    confidence: float = CONFIDENCE
    values: list[float] = field(default_factory=list)
    tried: int = 0

    def __post_init__(self) -> None:
        if not self.tolerance > 0:
            raise ValueError(f"tolerance is {self.tolerance}; expected more than 0 (bits, or the metric's own unit)")

    def add(self, value: float | None) -> None:
        """The figure of one more group."""
        self.tried += 1
        if value is not None and math.isfinite(value):
            self.values.append(value)

    @property
    def half_width(self) -> float:
        """Half of Student's interval of the mean; infinite below two values."""
        n = len(self.values)
        if n < 2:
            return math.inf
        student = require("scipy.stats", "report").t.ppf(1 - (1 - self.confidence) / 4, n - 1)
        return float(student * np.std(self.values, ddof=1) / math.sqrt(n))

    @property
    def done(self) -> bool:
        """Whether to stop: known well enough, or no group of the first few gave any figure."""
        if self.tried < LEAST:
            return False
        return not self.values or (len(self.values) >= LEAST and self.half_width <= self.tolerance)


def group_bits(group: Iterable[Moments]) -> float | None:
    """The figure of one group of samples: mean of -log2(sigma / |mean|) over elements with evidence, cut at 0 and the
    precision; None without any."""
    total, elements = 0.0, 0
    for moments in group:
        precision = float(Format.parse(FORMAT_OF[moments.dtype]).precision)
        for part in chunks(moments.size):
            mean, sigma, same = moments.mean[part], moments.sigma(part), moments.same(part)
            with np.errstate(divide="ignore", invalid="ignore"):
                bits = np.clip(-np.log2(sigma / np.abs(mean)), 0.0, precision)
            seen = ~same & (sigma != 0.0)
            total += float(np.where(np.isfinite(bits[seen]), bits[seen], 0.0).sum())
            elements += int(seen.sum())
    return total / elements if elements else None
