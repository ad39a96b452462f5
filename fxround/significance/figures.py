"""Figures: summarize the statistics of many elements as one ``Figures`` per place of the model.

A ``Place`` is a result, the last value of a layer, or a node. A ``Tally`` takes the moments of its elements batch by
batch and keeps sums, extremes and a histogram. Elements whose samples are all equal are counted and left out of every
mean. Agreement with a reference compares the reference with the mean of the samples element by element; an element is
*outside* if the reference is further away than the spread of the samples explains. Memory is a few numbers and a
histogram per place, for any number of batches. Extremes and means use every element; quantiles come from bins of 1/16
bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fxround.graph.dtypes import FORMAT_OF
from fxround.numerics.formats import Format
from fxround.short_reprs import Short
from fxround.significance.bits import CONFIDENCE, Method, above, bits_from, penalty
from fxround.significance.moments import NEVER, Floats, Moments, as_array, chunks

BINS: Final = 16
QUANTILES: Final = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class Place:
    """A place of the model: its name in the report, its kind, its node of the graph, and its position in the model."""

    name: str
    kind: str
    node: str = ""
    path: str = ""
    operator: str = ""
    source: str = ""
    code: str = ""


@dataclass(frozen=True)
class Options:
    """How bits are computed: method, probability (None for the method's own) and confidence."""

    method: Method = "cnh"
    probability: float | None = None
    confidence: float = CONFIDENCE


@dataclass(frozen=True)
class Agreement:
    """The mean of the samples compared with one reference.

    bits        the mean number of leading bits shared, over elements; ``worst``: the least
    norm        bits of the whole tensor, from norms
    outside     the number of elements, of ``elements``, further from the reference than their spread explains
    worst_at    the index of the worst element
    """

    bits: float
    worst: float
    norm: float
    outside: int
    elements: int
    worst_at: tuple[int, ...] = ()

    @property
    def outside_share(self) -> float:
        """The share of elements that are outside, 0 to 1."""
        return self.outside / max(self.elements, 1)


@dataclass(frozen=True, repr=False)
class Figures(Short):
    """The significant bits of one place over its elements; bits are None if no element gave evidence.

    place             the place that was measured: its kind and name
    dtype             the name of the format of its values
    precision         the precision of that format, in bits
    samples           the least number of samples of a batch
    elements          the number of elements
    evidence          the number of elements whose samples differ; only these count in bits, worst and contributing
    bits              the mean of a lower bound on significant bits; None if no element gave evidence
    worst             the minimum of that bound
    contributing      the same mean of contributing bits (see ``significance``); None for the general method
    norm              significant bits of the tensor as a whole, from the norms of deviation and mean
    quantiles         of the bits, by probability as text ("0.05")
    histogram         the number of elements with k to k + 1 bits, for every k; the last entry is the whole precision
    nonfinite         the number of elements of which a sample was NaN or infinite
    first_nonfinite   the first such sample
    worst_at          the index of the worst element
    worst_mean        the mean of its samples
    worst_sigma       the standard deviation of its samples
    agreement         one ``Agreement`` per reference, by name
    note              why the place has no figures, or ""
    probability       as passed to ``variability``; None is the default
    confidence        as passed to ``variability``
    method            as passed to ``variability``
    """

    place: Place
    dtype: str
    precision: int
    samples: int
    elements: int
    evidence: int
    bits: float | None
    worst: float | None
    norm: float | None
    contributing: float | None
    quantiles: dict[str, float]
    histogram: tuple[int, ...]
    nonfinite: int = 0
    first_nonfinite: int | None = None
    worst_at: tuple[int, ...] = ()
    worst_mean: float | None = None
    worst_sigma: float | None = None
    agreement: dict[str, Agreement] = field(default_factory=dict)
    note: str = ""
    probability: float | None = None
    confidence: float = CONFIDENCE
    method: Method = "cnh"

    def _line(self) -> str:
        bits = f"no bits ({self.note or 'all samples are equal'})"
        if self.bits is not None and self.worst is not None:
            bits = f"{self.bits:.2f} bits in the mean, {self.worst:.2f} in the worst, of {self.precision}"
        return f"{self.place.name}, {bits}; {self.samples} samples of {self.elements:,} elements"

    @property
    def evidence_share(self) -> float:
        """The share of elements whose samples differ, 0 to 1."""
        return self.evidence / max(self.elements, 1)

    @property
    def above(self) -> float | None:
        """The bits by which the true bits of one element may exceed its figure.

        They are between the figure and this sum with probability ``confidence`` if the samples are normal. None for
        the general method, which does not assume that.
        """
        return above(self.samples, self.confidence) if self.samples > 1 and self.method == "cnh" else None

    @property
    def penalty(self) -> float | None:
        """The bits that the small number of samples costs every figure."""
        return penalty(self.samples, self.probability, self.confidence) if self.samples > 1 else None


def bits_of(moments: Moments, part: slice, options: Options) -> Floats:
    """Return the bits of some elements, clipped neither at 0 nor at the precision; NaN for no evidence."""
    return bits_from(
        moments.mean[part],
        moments.sigma(part),
        moments.low[part],
        moments.high[part],
        moments.same(part),
        samples=moments.count,
        method=options.method,
        probability=options.probability,
        confidence=options.confidence,
    )


class _Extreme:
    """The least value seen, and its position."""

    def __init__(self) -> None:
        self.value, self.index, self.facts = math.inf, -1, (0.0, 0.0)

    def see(self, values: Floats, start: int, *facts: Floats) -> None:
        if len(values) and (i := int(np.argmin(values))) >= 0 and values[i] < self.value:
            self.value, self.index = float(values[i]), start + i
            self.facts = tuple(float(f[i]) for f in facts)  # type: ignore[assignment]


class Tally:
    """The sums, extremes and histogram of one place over batches."""

    def __init__(self, place: Place, options: Options) -> None:
        self.place, self.options, self.note = place, options, ""
        self.dtype, self.precision, self.samples = "", 0, 0
        self.elements = self.evidence = self.nonfinite = 0
        self.first_nonfinite: int | None = None
        self.bits = self.contributing = self.spread = self.size = 0.0
        self.bins: NDArray[np.int64] = np.zeros(0, np.int64)
        self.worst: _Extreme = _Extreme()
        self.worst_at: tuple[int, ...] = ()
        self.references: dict[str, _Compared] = {}

    def add(self, moments: Moments, row: int = 0) -> None:
        """Add the moments of one batch, whose first row has the number ``row`` in all batches."""
        self._describe(moments)
        for part in chunks(moments.size):
            self._add(moments, part)
        if self.worst.index >= 0:
            self.worst_at = _where(self.worst.index, moments.shape, row)
            self.worst.index = -1
        if moments.broken is not None:
            seen = moments.broken[moments.broken != NEVER]
            self.nonfinite += len(seen)
            first = int(seen.min())
            self.first_nonfinite = first if self.first_nonfinite is None else min(first, self.first_nonfinite)

    def _describe(self, moments: Moments) -> None:
        name = FORMAT_OF[moments.dtype]
        self.dtype, self.precision = name, Format.parse(name).precision
        self.samples = min(self.samples or moments.count, moments.count)
        self.elements += moments.size
        if not len(self.bins):
            self.bins = np.zeros(self.precision * BINS + 1, np.int64)

    def _add(self, moments: Moments, part: slice) -> None:
        mean, sigma = moments.mean[part], moments.sigma(part)
        raw = bits_of(moments, part, self.options)
        seen = ~np.isnan(raw)
        cut = np.clip(raw, 0.0, float(self.precision))
        bits = cut[seen]
        self.evidence += len(bits)
        self.bits += float(bits.sum())
        self.bins += np.bincount((bits * BINS).astype(np.int64), minlength=len(self.bins))
        self.worst.see(np.where(seen, cut, np.inf), part.start, mean, sigma)
        if self.options.method == "cnh":
            gain = penalty(moments.count, self.options.probability, self.options.confidence) - penalty(
                moments.count, None, self.options.confidence, "contributing"
            )
            self.contributing += float(np.clip(raw[seen] + gain, 0.0, float(self.precision)).sum())
        finite = np.isfinite(sigma) & np.isfinite(mean)
        self.spread += float(np.square(sigma[finite]).sum())
        self.size += float(np.square(mean[finite]).sum())

    def compare(self, name: str, moments: Moments, value: Tensor, row: int = 0) -> None:
        """Compare one batch of a reference's values with this place, element by element."""
        if tuple(value.shape) != moments.shape:
            return
        compared = self.references.setdefault(name, _Compared(self.precision))
        flat = as_array(value)
        # A correctly rounded value is within half an ulp of its number, and within an ulp of another rounded value.
        floor = 2.0 ** (1 - self.precision) if value.dtype == moments.dtype else 2.0**-self.precision
        for part in chunks(moments.size):
            compared.add(moments, part, flat[part].astype(np.float64), bits_of(moments, part, self.options), floor)
        compared.locate(moments.shape, row)

    def figures(self) -> Figures:
        """Return the figures of the batches so far."""
        some, known = self.evidence > 0, self.options.method == "cnh"
        return Figures(
            place=self.place,
            dtype=self.dtype,
            precision=self.precision,
            samples=self.samples,
            elements=self.elements,
            evidence=self.evidence,
            bits=self.bits / self.evidence if some else None,
            worst=self.worst.value if some else None,
            norm=self._norm() if some else None,
            contributing=self.contributing / self.evidence if some and known else None,
            quantiles=_quantiles(self.bins) if some else {},
            histogram=_whole_bits(self.bins),
            nonfinite=self.nonfinite,
            first_nonfinite=self.first_nonfinite,
            worst_at=self.worst_at,
            worst_mean=self.worst.facts[0] if some else None,
            worst_sigma=self.worst.facts[1] if some else None,
            probability=self.options.probability,
            confidence=self.options.confidence,
            method=self.options.method,
            agreement={name: compared.agreement() for name, compared in self.references.items()},
            note=self.note,
        )

    def _norm(self) -> float:
        lost = penalty(self.samples, self.options.probability, self.options.confidence)
        bits = _shared(math.sqrt(self.spread), math.sqrt(self.size)) - lost
        return min(max(bits, 0.0), float(self.precision))


class _Compared:
    """The sums of the agreement with one reference."""

    def __init__(self, precision: int) -> None:
        self.precision, self.elements, self.outside, self.bits = precision, 0, 0, 0.0
        self.apart = self.size = 0.0
        self.worst = _Extreme()
        self.worst_at: tuple[int, ...] = ()

    def add(self, moments: Moments, part: slice, reference: Floats, raw: Floats, floor: float) -> None:
        mean = moments.mean[part]
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            apart = np.abs(mean - reference)
            bits = -np.log2(apart / np.abs(reference))
            bits = np.where(apart == 0, self.precision, np.where(np.isfinite(bits), bits, 0.0))
            bits = np.where(_alike(mean, reference), self.precision, np.clip(bits, 0.0, self.precision))
            radius = np.fmax(np.exp2(-raw) * np.abs(mean), np.abs(reference) * floor)
            finite = np.isfinite(apart)
            self.outside += int((finite & (apart > radius)).sum())
        self.elements += len(bits)
        self.bits += float(bits.sum())
        self.apart += float(np.square(apart[finite]).sum())
        self.size += float(np.square(reference[finite]).sum())
        self.worst.see(bits, part.start)

    def locate(self, shape: tuple[int, ...], row: int) -> None:
        if self.worst.index >= 0:
            self.worst_at, self.worst.index = _where(self.worst.index, shape, row), -1

    def agreement(self) -> Agreement:
        norm = min(max(_shared(math.sqrt(self.apart), math.sqrt(self.size)), 0.0), float(self.precision))
        bits, worst = self.bits / max(self.elements, 1), self.worst.value if self.elements else float(self.precision)
        return Agreement(bits, worst, norm, self.outside, self.elements, self.worst_at)


def _alike(a: Floats, b: Floats) -> NDArray[np.bool_]:
    """Whether elements are equal; a NaN equals any reference that is not finite."""
    alike: NDArray[np.bool_] = (a == b) | (np.isnan(a) & ~np.isfinite(b))
    return alike


def _shared(apart: float, size: float) -> float:
    """Return -log2(apart / size), infinite if ``apart`` is 0."""
    if apart == 0.0:
        return math.inf
    return -math.log2(apart / size) if size > 0.0 and math.isfinite(apart) else 0.0


def _where(index: int, shape: tuple[int, ...], row: int) -> tuple[int, ...]:
    """Return the index of an element in all batches."""
    at = [int(i) for i in np.unravel_index(index, shape)]
    return (at[0] + row, *at[1:]) if at else ()


def _quantiles(bins: NDArray[np.int64]) -> dict[str, float]:
    """Return quantiles, each the middle of its bin."""
    below = np.cumsum(bins)
    reached = {f"{q:g}": int(np.searchsorted(below, q * below[-1], side="left")) for q in QUANTILES}
    last = (len(bins) - 1) / BINS
    return {q: min((i + 0.5) / BINS, last) for q, i in reached.items()}


def _whole_bits(bins: NDArray[np.int64]) -> tuple[int, ...]:
    """Return the number of elements with k to k + 1 bits, for every k; the last entry is the whole precision."""
    whole = [int(bins[k : k + BINS].sum()) for k in range(0, len(bins) - 1, BINS)]
    return (*whole, int(bins[-1])) if len(bins) else ()


def plain(value: Any) -> Any:
    """Convert to JSON's types: tuples become lists, NaN None, and infinities text."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value
