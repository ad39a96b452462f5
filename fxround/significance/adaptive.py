"""Sample until a figure is known to a given tolerance, by a sequential rule of tested coverage.

Samples come in groups of five. Each group gives one value of the watched figure (mean bits over the results' elements,
or a metric) from that group alone, so that values are independent whatever the correlation between elements. From the
fourth group on, Student's interval of their mean is formed at half the permitted error (97.5 % for 95 %), and
sampling stops when its half width is at most the tolerance. Repeated tests make a fixed-size interval too optimistic;
the stricter level compensates for that. A simulation over normal and skewed figures finds the mean inside the tolerance
at least as often as ``confidence`` requires (tests/significance/test_adaptive.py). Sources: Chow and Robbins, Ann.
Math. Stat. 36 (1965); batch means, Law and Kelton.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from fxround.graph.dtypes import FORMAT_OF
from fxround.numerics.formats import Format
from fxround.significance.bits import CONFIDENCE, require
from fxround.significance.moments import Moments, chunks

GROUP: Final = 5
LEAST: Final = 4


@dataclass
class Sequential:
    """Values of a figure, one per group, until their mean is known to within ``tolerance``.

    confidence: the least probability that the mean is within the tolerance. tried: the number of groups, those without
    a figure (None) included.
    """

    tolerance: float
    confidence: float = CONFIDENCE
    values: list[float] = field(default_factory=list)
    tried: int = 0

    def __post_init__(self) -> None:
        if not self.tolerance > 0:
            raise ValueError(f"tolerance is {self.tolerance}; expected more than 0 (bits, or the metric's own unit)")

    def add(self, value: float | None) -> None:
        """Add the figure of one more group."""
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
        """Whether to stop: the mean is known to the tolerance, or none of the first groups gave a figure."""
        if self.tried < LEAST:
            return False
        return not self.values or (len(self.values) >= LEAST and self.half_width <= self.tolerance)


def group_bits(group: Iterable[Moments]) -> float | None:
    """Return the figure of one group of samples, None without evidence.

    It is the mean of -log2(sigma / |mean|) over elements with evidence, clipped to 0 and the precision.
    """
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
