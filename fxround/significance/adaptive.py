"""Sample until a figure is known to a given tolerance, by sequential rules of tested coverage.

Samples come in groups of five, after each of which a rule forms an interval of the watched figure's mean; sampling
stops when the mean of the samples is within the tolerance of both ends.

``SequentialShare`` is the rule of figures between 0 and 1: label flips, accuracies. It assumes nothing but that samples
are independent and have one distribution: items of a sample may change together, and may change once in a thousand
samples. It bets against each candidate m for the mean: a capital that is multiplied by 1 + f (x / m - 1) for each
sample x has the expectation 1 if m is the mean, and so exceeds 2 / error ever with a probability of at most error / 2
(Ville's inequality). This holds for all evaluations together. Sources: Ville, Étude critique de la notion de collectif
(1939); Waudby-Smith and Ramdas, Estimating means of bounded random variables by betting, JRSS B 86 (2024).

``Sequential`` is the rule of all others. Each group gives one value (mean bits over the results' elements, or the mean
of a metric) from that group alone, so that values are independent whatever the correlation between elements. Student's
interval of their mean is formed at half the permitted error (97.5 % for 95 %), because it is evaluated repeatedly, and
is widened by Johnson's correction for skewness. Equal values are no evidence. The classes of distributions for which
the mean is within the tolerance at least as often as ``confidence`` requires are in docs/variability.md, and are
simulated in tests/significance/test_adaptive.py. Sources: Chow and Robbins, Ann. Math. Stat. 36 (1965); Johnson,
Modified t tests and confidence intervals for asymmetrical populations, JASA 73 (1978).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fxround.graph.dtypes import FORMAT_OF
from fxround.numerics.formats import Format
from fxround.significance.bits import CONFIDENCE, student_quantile
from fxround.significance.moments import Moments, chunks

GROUP: Final = 5
LEAST: Final = 6
# The fractions of the capital that are bet, and the part of it that bets each fraction: more on the greater ones, which
# alone find out soon that a share is near 0.
FRACTIONS: Final = 0.5 ** np.arange(11)
PARTS: Final = 12 / 11 / ((np.arange(11) + 1) * (np.arange(11) + 2))
_HALVINGS: Final = 50


@dataclass
class Sequential:
    """Values of a figure, one per group, until their mean is known to within ``tolerance``.

    confidence: the least probability that the mean is within the tolerance. tried: the number of groups, those without
    a figure included.
    """

    tolerance: float
    confidence: float = CONFIDENCE
    values: list[float] = field(default_factory=list)
    tried: int = 0

    def __post_init__(self) -> None:
        require_tolerance(self.tolerance)

    def add(self, figures: Sequence[float]) -> None:
        """Add the figures of one more group; their mean is its value."""
        self.tried += 1
        value = sum(figures) / len(figures) if figures else math.nan
        if math.isfinite(value):
            self.values.append(value)

    @property
    def half_width(self) -> float:
        """Half of the interval of the mean; infinite without two different values."""
        n, deviation = len(self.values), float(np.std(self.values, ddof=1)) if len(self.values) > 1 else 0.0
        if deviation == 0.0:
            return math.inf
        student = student_quantile(1 - (1 - self.confidence) / 4, n - 1)
        apart = (np.array(self.values) - np.mean(self.values)) / np.std(self.values)
        skewness = abs(float(np.mean(apart**3)))
        return deviation / math.sqrt(n) * (student + skewness * (2 * student**2 + 1) / (6 * math.sqrt(n)))

    @property
    def known(self) -> bool:
        """Whether the mean is known to the tolerance."""
        return len(self.values) >= LEAST and self.half_width <= self.tolerance

    @property
    def done(self) -> bool:
        """Whether to stop: the mean is known, or none of the first groups gave a figure."""
        return self.known or (self.tried >= LEAST and not self.values)


@dataclass
class SequentialShare:
    """Figures between 0 and 1, one per sample, until their mean is known to within ``tolerance``.

    confidence: the least probability that the mean is within the tolerance, for every distribution. counts: how many
    samples have each figure.
    """

    tolerance: float
    confidence: float = CONFIDENCE
    counts: Counter[float] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        require_tolerance(self.tolerance)

    def add(self, figures: Sequence[float]) -> None:
        """Add the figures of one more group. Raises ValueError for one beyond 0 to 1."""
        for figure in figures:
            if not 0 <= figure <= 1:
                raise ValueError(f"the watched metric is {figure}; expected a share from 0 to 1")
            self.counts[figure] += 1

    @property
    def mean(self) -> float:
        """The mean of the figures."""
        return sum(x * n for x, n in self.counts.items()) / self.counts.total()

    @property
    def half_width(self) -> float:
        """The greatest distance of the mean from the ends of its interval."""
        if not self.counts:
            return math.inf
        low = _end(self._refutes_below, self.mean)
        high = 1 - _end(lambda m: self._refutes_above(1 - m), 1 - self.mean)
        return max(self.mean - low, high - self.mean)

    @property
    def known(self) -> bool:
        """Whether the mean is known to the tolerance."""
        if not self.counts:
            return False
        low, high = self.mean - self.tolerance, self.mean + self.tolerance
        return (low <= 0 or self._refutes_below(low)) and (high >= 1 or self._refutes_above(high))

    @property
    def done(self) -> bool:
        """Whether to stop."""
        return self.known

    def _refutes_below(self, m: float) -> bool:
        """Whether the figures show that their mean is more than m, 0 < m < 1."""
        return self._refutes(np.array(list(self.counts)), m)

    def _refutes_above(self, m: float) -> bool:
        return self._refutes(1 - np.array(list(self.counts)), 1 - m)

    def _refutes(self, figures: NDArray[np.float64], m: float) -> bool:
        numbers = np.array(list(self.counts.values()))
        return log_capital(figures, numbers, m) >= math.log(2 / (1 - self.confidence))


def log_capital(figures: NDArray[np.float64], numbers: NDArray[np.int64], m: float) -> float:
    """Return the logarithm of the capital of bets that the mean is more than m; it falls with m.

    numbers: how often each figure was seen.
    """
    with np.errstate(divide="ignore"):
        logs = np.log1p(FRACTIONS[:, None] * (figures / m - 1))
    grown = logs @ numbers + np.log(PARTS)
    most = float(grown.max())
    return most + math.log(float(np.exp(grown - most).sum())) if math.isfinite(most) else most


def _end(refuted: Callable[[float], bool], mean: float) -> float:
    """Return the greatest m below the mean that is refuted, 0 if none is."""
    low, high = 0.0, mean
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if middle > 0 and refuted(middle):
            low = middle
        else:
            high = middle
    return low


def require_tolerance(tolerance: float) -> None:
    """Raise ValueError for a tolerance that no figure can be held to."""
    if not tolerance > 0:
        raise ValueError(f"tolerance is {tolerance}; expected more than 0 (bits, or the metric's own unit)")


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
