"""Two reports of one model side by side, such as those of two commits: which figures and which bits changed, and where.

Reports of the same model, inputs, policy, seed and samples are equal, bit for bit. Reports that keep their samples
(``first_sample=``, ``keep_samples=True``) also say how many elements of each place have other bits in any sample.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fxround.fingerprint import hash
from fxround.numerics.lazy import cached_property
from fxround.significance.figures import Figures, plain
from fxround.significance.places import OUTPUT
from fxround.significance.recorder import Measured
from fxround.views.table import Table, Tabled

if TYPE_CHECKING:
    from fxround.significance.report import VariabilityReport

_Key = tuple[str, str]


@dataclass(frozen=True, repr=False)
class ReportDifference(Tabled):
    """What ``VariabilityReport.difference`` returns: two reports side by side, and their names.

    Example::

        difference = load_report("before.report").difference(load_report("after.report"))
        assert not difference.differing, difference.first
        print(difference)
    """

    one: VariabilityReport
    other: VariabilityReport
    name: str
    other_name: str

    @property
    def differing(self) -> tuple[str, ...]:
        """The places with other figures or bits, in the order of the model, results last; then the metrics."""
        places = [key for key in self._keys if self._state(key) != "equal"]
        places.sort(key=lambda key: key[0] == OUTPUT)
        return (*(name for _, name in places), *(name for name in self._metrics if self._metric_state(name) != "equal"))

    def lost(self, bits: float) -> tuple[str, ...]:
        """Return the places that have lost more than some mean bits from the first report to the other.

        Equal samples count as the precision of the format. A place without figures in the other report has lost all.
        """
        worse = []
        for key in self._of_both[0]:
            mine, theirs = self._pair(key)
            assert mine is not None
            had, has = _known(mine), 0.0 if theirs is None else _known(theirs)
            if has < had - bits:
                worse.append(key[1])
        return tuple(worse)

    @property
    def causes(self) -> tuple[str, ...]:
        """What differs before the samples: model, weights, policy, seed, inputs, samples, references, versions."""
        return tuple(name for name, mine, theirs in self._facts if mine != theirs)

    @property
    def first(self) -> str:
        """A sentence with the first place or metric that differs; "" if none does."""
        if not self.differing:
            return ""
        name = self.differing[0]
        key = next((key for key in self._keys if key[1] == name and self._state(key) != "equal"), None)
        if key is None:
            what = f"the mean of {name} is"
            values = [None if one is None else one.mean for one in self._metrics[name]]
        else:
            what = f"the bits of {name} are"
            values = [None if one is None else one.bits for one in self._pair(key)]
        mine, theirs = ("not known" if value is None else repr(value) for value in values)
        changed = None if key is None else self._changed[key]
        elements = "" if changed is None else f", {changed:,} elements have other bits"
        number = len(self._keys) + len(self._metrics)
        reason = f"; {', '.join(self.causes)} differ, too" if self.causes else ""
        return (
            f"{len(self.differing)} of {number} places and metrics differ, first {name}: {what} {mine} in {self.name}, "
            f"{theirs} in {self.other_name}{elements}{reason}"
        )

    def table(self) -> Table:
        """Return a row for each place: whether it is equal, bits, and the elements that have other bits in a sample."""
        pair = self.name, self.other_name
        bits_of, worst_of = ([f"{what}, {name}" for name in pair] for what in ("bits", "worst"))
        columns = ("place", "is", *bits_of, "change", *worst_of, "elements changed")
        rows = []
        for key in self._keys:
            mine, theirs = self._pair(key)
            bits, other_bits = (None if f is None else f.bits for f in (mine, theirs))
            change = None if bits is None or other_bits is None else other_bits - bits
            worst = (None if f is None else f.worst for f in (mine, theirs))
            rows.append((key[1], self._state(key), bits, other_bits, change, *worst, self._changed[key]))
        note = f"{', '.join(self.causes)} differ." if self.causes else ""
        return Table(columns, tuple(rows), f"{self.name} and {self.other_name}: {self.one.heading}", note)

    def metrics_table(self) -> Table:
        """Return a row for each metric: whether all its values are equal, and its mean and worst value in each."""
        named = self.name, self.other_name
        columns = ("metric", "is", *(f"{what}, {name}" for what in ("mean", "worst") for name in named))
        rows = []
        for name, pair in self._metrics.items():
            means = (None if one is None else one.mean for one in pair)
            worst = (None if one is None else one.worst for one in pair)
            rows.append((name, self._metric_state(name), *means, *worst))
        return Table(columns, tuple(rows))

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the reports as plain data."""
        tables = {"places": list(self.table()), "metrics": list(self.metrics_table())}
        data: dict[str, Any] = plain(
            {"names": (self.name, self.other_name), "differing": self.differing, "causes": self.causes, **tables}
        )
        return data

    def __str__(self) -> str:
        metrics = self.metrics_table()
        return "\n\n".join(map(str, [self.table(), *([metrics] if len(metrics) else [])]))

    @property
    def _facts(self) -> tuple[tuple[str, Any, Any], ...]:
        facts = []
        for report in (self.one, self.other):
            model, part = report.provenance["model"], report.part
            facts.append(
                {
                    "models": (model["class"], model["parameters"]),
                    "weights": model["hash"],
                    "policies": report.policy,
                    "seeds": report.seed,
                    "inputs": (report.rows, None if part is None else [batch.inputs for batch in part.batches]),
                    "samples": (report.samples, None if part is None else part.first_sample),
                    "methods": (report.method, report.confidence),
                    "unperturbed runs": [] if part is None else [_hashes(batch.references) for batch in part.batches],
                    "versions": {k: v for k, v in report.provenance["versions"].items() if k in ("fxround", "torch")},
                }
            )
        return tuple((name, facts[0][name], facts[1][name]) for name in facts[0])

    @staticmethod
    def _figures(report: VariabilityReport) -> dict[_Key, Figures]:
        alone = {("perturbed alone", f.place.name): f for f in report.isolated}
        return {(f.place.kind, f.place.name): f for f in report.figures} | alone

    @cached_property
    def _of_both(self) -> tuple[dict[_Key, Figures], dict[_Key, Figures]]:
        return self._figures(self.one), self._figures(self.other)

    def _pair(self, key: _Key) -> tuple[Figures | None, Figures | None]:
        mine, theirs = self._of_both
        return mine.get(key), theirs.get(key)

    @property
    def _keys(self) -> list[_Key]:
        mine, theirs = self._of_both
        return list(mine | theirs)

    def _state(self, key: _Key) -> str:
        mine, theirs = self._pair(key)
        if mine is None or theirs is None:
            return f"only in {self.other_name if mine is None else self.name}"
        return "equal" if _numbers(mine) == _numbers(theirs) and not self._changed[key] else "differs"

    @cached_property
    def _changed(self) -> dict[_Key, int | None]:
        """How many elements of each place have other bits in any sample, over batches; None if that is not known."""
        return {key: self._changed_of(key) for key in self._keys}

    def _changed_of(self, key: _Key) -> int | None:
        mine, theirs = ([batch.get(key) for batch in report.kept] for report in (self.one, self.other))
        if not mine or len(mine) != len(theirs) or not all(mine) or not all(theirs):
            return None
        counts = [_differing(a or [], b or []) for a, b in zip(mine, theirs, strict=True)]
        return None if None in counts else sum(count or 0 for count in counts)

    @property
    def _metrics(self) -> dict[str, tuple[Measured | None, Measured | None]]:
        mine, theirs = ({m.name: m for m in report.metrics} for report in (self.one, self.other))
        return {name: (mine.get(name), theirs.get(name)) for name in mine | theirs}

    def _metric_state(self, name: str) -> str:
        mine, theirs = self._metrics[name]
        if mine is None or theirs is None:
            return f"only in {self.other_name if mine is None else self.name}"
        return "equal" if plain(asdict(mine)) == plain(asdict(theirs)) else "differs"


def _known(figures: Figures) -> float:
    """Return the bits of a place in the mean: the precision for equal samples, 0 for a place without figures."""
    if figures.bits is None:
        return 0.0 if figures.note or figures.nonfinite else float(figures.precision)
    return figures.bits


def _numbers(figures: Figures) -> Any:
    """Return all figures of a place, and not its line of source; NaN equals NaN."""
    return plain({name: value for name, value in asdict(figures).items() if name != "place"})


def _hashes(references: dict[str, dict[_Key, Tensor]]) -> dict[str, dict[_Key, str]]:
    return {name: {key: hash(value) for key, value in values.items()} for name, values in references.items()}


def _differing(mine: list[Tensor], theirs: list[Tensor]) -> int | None:
    """Return how many elements have other bits in any sample; None for samples of other shapes, dtypes or number."""
    kinds = [[(x.shape, x.dtype) for x in samples] for samples in (mine, theirs)]
    if kinds[0] != kinds[1]:
        return None
    changed = np.zeros(tuple(mine[0].shape), bool)
    for a, b in zip(mine, theirs, strict=True):
        encodings = [x.contiguous().reshape(-1, 1).view(torch.uint8).numpy() for x in (a, b)]
        changed |= (encodings[0] != encodings[1]).any(-1).reshape(changed.shape)
    return int(changed.sum())


__all__ = ["ReportDifference"]
