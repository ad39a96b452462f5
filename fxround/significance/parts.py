"""Parts: reports of some samples of a study, which several jobs of a cluster take, and their merger.

A part keeps the values of its samples and of the runs that they are compared with. ``merge`` gives these values to the
same statistics in the order of the sample numbers, so that its figures are those of one study, bit for bit: no sum of
rounded numbers is split. The numbers of a metric are those of single samples, or of pairs, which are counted anew from
the labels that a part keeps. Example::

    reports = [fxround.variability(model, x, samples=5, first_sample=5 * job) for job in range(4)]
    merged = fxround.merge(reports)                   # fxround.variability(model, x, samples=20)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any

import torch.utils._pytree as pytree
from torch import Tensor

from fxround.errors import type_of
from fxround.fingerprint import hash
from fxround.short_reprs import Short
from fxround.significance.adaptive import GROUP
from fxround.significance.elements import Elements
from fxround.significance.figures import Options, Place, Tally
from fxround.significance.inputs import ModelCall
from fxround.significance.metrics import METRICS, Sums, dice_of, dice_sums
from fxround.significance.moments import Moments
from fxround.significance.places import OUTPUT
from fxround.significance.recorder import Measured, changed_rows

if TYPE_CHECKING:
    from fxround.significance.report import VariabilityReport

Key = tuple[str, str]


@dataclass
class Statistics:
    """The moments of one batch's samples, those of the results in groups of GROUP samples. offset: of its first row."""

    offset: int
    moments: dict[Key, Moments] = field(default_factory=dict)
    group: dict[Key, Moments] = field(default_factory=dict)
    spoiled: dict[Key, str] = field(default_factory=dict)
    taken: int = 0

    def add(self, key: Key, value: Tensor) -> None:
        """Add one sample's value at one place; those of results are collected a group at a time."""
        held = self.group if key[0] == OUTPUT else self.moments
        if key in self.spoiled:
            return
        if key not in held:
            held[key] = Moments(tuple(value.shape), value.dtype)
        try:
            held[key].add(value)
        except ValueError as error:  # a size that depends on the data, and so on the sample
            self.spoil(key, error)

    def spoil(self, key: Key, error: ValueError) -> None:
        """Leave a place out, and keep the reason."""
        self.spoiled[key] = str(error)
        for held in (self.moments, self.group):
            held.pop(key, None)

    def end_group(self) -> None:
        """Merge the results' group into the earlier samples."""
        for key, group in list(self.group.items()):
            try:
                self.moments.setdefault(key, Moments(group.shape, group.dtype)).merge(group)
            except ValueError as error:
                self.spoil(key, error)
        self.group.clear()

    def tally(self, tallies: dict[Key, Tally], known: Iterable[Place], options: Options) -> None:
        """Add these statistics to those of earlier batches. known: the places that are watched, results apart."""
        places = {(place.kind, place.name): place for place in known}
        for key in [*places, *(k for k in (*self.moments, *self.spoiled) if k not in places)]:
            place = places.get(key) or Place(key[1], OUTPUT)
            tally = tallies.setdefault(key, Tally(place, options))
            if key in self.moments:
                tally.add(self.moments[key], self.offset)
            tally.note = self.spoiled.get(key, tally.note)

    def compare(self, tallies: dict[Key, Tally], reference: str, key: Key, value: Tensor) -> None:
        """Compare the mean of one place with its value in a reference."""
        if key in self.moments:
            tallies[key].compare(reference, self.moments[key], value, self.offset)


@dataclass(frozen=True, repr=False)
class BatchRecord(Short):
    """What of a batch does not depend on its samples, and what metrics of labels keep of them.

    inputs      the digest of its arguments and target
    offset      the position of its first row in all inputs
    places      the places that are watched
    references  the values of each run that the samples are compared with
    changed     by metric, the labels that changed in any sample
    labels      by metric of pairs, the number of classes and the labels of every sample
    """

    inputs: str
    offset: int
    places: tuple[Place, ...]
    references: dict[str, dict[Key, Tensor]]
    changed: dict[str, Tensor]
    labels: dict[str, tuple[int, list[Tensor]]]

    def _line(self) -> str:
        compared = ", ".join(self.references) or "nothing"
        return f"rows from {self.offset}, inputs {self.inputs[:12]}, compared with {compared}"


@dataclass(frozen=True, repr=False)
class Part(Short):
    """What a report has to be merged with others: how it was measured, and its batches."""

    first_sample: int
    capture: str
    options: Options
    metrics: tuple[str, ...]
    batches: tuple[BatchRecord, ...]

    def _line(self) -> str:
        batches = f"{len(self.batches)} batch{'es' * (len(self.batches) != 1)}"
        metrics = ", ".join(self.metrics) or "none"
        return f"samples from {self.first_sample} of {batches}, {self.capture}, metrics {metrics}"


def digest_of(call: ModelCall) -> str:
    """Return a digest of the arguments and the target of a call: of the bits of tensors, and of plain values."""
    digest = hashlib.sha256()
    for path, leaf in pytree.tree_flatten_with_path((call.args, call.kwargs, call.target))[0]:
        plain = isinstance(leaf, bool | int | float | str | None)
        text = hash(leaf) if isinstance(leaf, Tensor) else repr(leaf) if plain else type(leaf).__qualname__
        digest.update(f"{pytree.keystr(path)}={text};".encode())
    return digest.hexdigest()


def merge(reports: Iterable[VariabilityReport], *, samples: int | None = None) -> VariabilityReport:
    """Return the report of all samples: every figure has the bits of one study that takes them all.

    Args:
        reports: of ``variability(..., first_sample=n)``, in any order; together they have the samples from 0 on, each
            once.
        samples: the number of samples that they must have together; None accepts any.

    Raises:
        TypeError: for anything but such reports.
        ValueError: for samples that are missing or twice, an interrupted report, and reports of different models,
            policies, seeds, inputs or settings, or whose unperturbed runs have other bits, as on another processor.

    Example::

        reports = [fxround.load_report(path) for path in Path("parts").glob("*.report")]
        print(fxround.merge(reports, samples=40))
    """
    given = list(reports)
    for report in given:
        if not hasattr(report, "part"):
            raise TypeError(f"a report is {type_of(report)}; expected what fxround.variability returned")
        if report.part is None:
            raise ValueError(f"a report of {_range(report)} keeps no samples: measure it with first_sample=0")
    if not given:
        raise ValueError("there are no reports to merge")
    ordered = sorted(given, key=_first)
    _require_every_sample(ordered, samples)
    for other in ordered[1:]:
        _require_alike(ordered[0], other)
    return _merged(ordered)


def _part(report: VariabilityReport) -> Part:
    assert report.part is not None
    return report.part


def _first(report: VariabilityReport) -> int:
    return _part(report).first_sample


def _range(report: VariabilityReport) -> str:
    """Return the samples of a report as text."""
    first = report.part.first_sample if report.part is not None else 0
    last = first + max(report.samples, default=0) - 1
    return f"sample {first}" if first == last else f"samples {first} to {last}"


def _require_every_sample(ordered: Sequence[VariabilityReport], samples: int | None) -> None:
    for report in ordered:
        if not report.complete:
            raise ValueError(f"the report from sample {_first(report)} on was interrupted: measure its samples again")
    ends = [_first(report) + report.samples[0] for report in ordered]
    if _first(ordered[0]) > 0:
        raise ValueError(
            f"samples 0 to {_first(ordered[0]) - 1} are missing: the first report has {_range(ordered[0])}"
        )
    for (report, end), later in pairwise(zip(ordered, ends, strict=True)):
        begins = _first(later[0])
        if begins < end:
            raise ValueError(f"sample {begins} is there twice: reports have {_range(report)} and {_range(later[0])}")
        if begins > end:
            raise ValueError(f"samples {end} to {begins - 1} are missing, after the report of {_range(report)}")
    if samples is not None and ends[-1] != samples:
        raise ValueError(f"the reports have {ends[-1]} samples together; expected {samples}")


def _require_alike(one: VariabilityReport, other: VariabilityReport) -> None:
    a, b = _part(one), _part(other)
    models = [(r.provenance["model"]["class"], r.provenance["model"]["hash"]) for r in (one, other)]
    facts: tuple[tuple[str, Any, Any], ...] = (
        ("models", models[0], models[1]),
        ("policies", one.policy, other.policy),
        ("seeds", one.seed, other.seed),
        ("inputs", [r.inputs for r in a.batches], [r.inputs for r in b.batches]),
        ("values of capture", a.capture, b.capture),
        ("methods, probabilities or confidences", a.options, b.options),
        ("metrics", a.metrics, b.metrics),
        ("references", [list(r.references) for r in a.batches], [list(r.references) for r in b.batches]),
        ("places", [r.places for r in a.batches], [r.places for r in b.batches]),
    )
    which = f"the reports of {_range(one)} and of {_range(other)}"
    for what, mine, theirs in facts:
        if mine != theirs:
            raise ValueError(f"{which} have different {what}: merge reports of one study alone")
    for mine, theirs in zip(a.batches, b.batches, strict=True):
        for name, values in mine.references.items():
            changed = [key[1] for key, value in values.items() if not _equal(value, theirs.references[name].get(key))]
            if changed:
                raise ValueError(
                    f"{which} have {name} runs of different bits, first at {changed[0]}: stock kernels depend on the "
                    "processor and the number of threads; run all jobs on one kind of machine, with the same number"
                )


def _equal(a: Tensor, b: Tensor | None) -> bool:
    return b is not None and hash(a) == hash(b)


def _merged(ordered: Sequence[VariabilityReport]) -> VariabilityReport:
    one, part = ordered[0], _part(ordered[0])
    tallies: dict[Key, Tally] = {}
    elements = Elements(inputs=list(one.elements.inputs))
    counts = []
    for number, record in enumerate(part.batches):
        batch = Statistics(record.offset)
        for report in ordered:
            for sample in range(report.samples[number]):
                for key, values in report.kept[number].items():
                    batch.add(key, values[sample])
                batch.taken += 1
                if batch.taken % GROUP == 0:
                    batch.end_group()
        batch.end_group()
        counts.append(batch.taken)
        if batch.taken >= 2:
            batch.tally(tallies, record.places, part.options)
            elements.add_results(batch.moments, tallies, part.options)
            for name, reference in record.references.items():
                for key, value in reference.items():
                    batch.compare(tallies, name, key, value)
    figures = [tally.figures() for tally in tallies.values()]
    measured = (_measured(name, ordered) for name in part.metrics)
    return replace(
        one,
        samples=tuple(counts),
        figures=tuple(sorted(figures, key=lambda f: f.place.kind != OUTPUT)),
        metrics=tuple(metric for metric in measured if metric is not None),
        notes=tuple(dict.fromkeys(note for report in ordered for note in report.notes)),
        provenance={**one.provenance, "parts": [report.provenance for report in ordered[1:]]},
        kept=(),
        part=None,
        elements=elements,
    )


def _measured(name: str, ordered: Sequence[VariabilityReport]) -> Measured | None:
    """Return the values of a metric for all samples."""
    if name in _part(ordered[0]).batches[0].labels:
        return _of_pairs(name, ordered)
    parts = [report.metric(name) for report in ordered]
    values = tuple(value for part in parts for value in part.values)
    classes = parts[[min(part.values) for part in parts].index(min(values))].classes if parts[0].classes else None
    merged = replace(parts[0], values=values, classes=classes)
    if parts[0].rows is None:
        return merged
    rows: list[int] = []
    changed = labels = 0
    for records in zip(*(_part(report).batches for report in ordered), strict=True):
        moved = records[0].changed[name]
        for record in records[1:]:
            moved = moved | record.changed[name]
        rows += changed_rows(moved, records[0].offset)
        changed, labels = changed + int(moved.sum()), labels + moved.numel()
    return replace(merged, rows=tuple(rows), changed=changed, labels=labels)


def _of_pairs(name: str, ordered: Sequence[VariabilityReport]) -> Measured | None:
    metric = METRICS[name]
    sums: dict[tuple[int, int], Sums] = {}
    for records in zip(*(_part(report).batches for report in ordered), strict=True):
        maps = [labels for record in records for labels in record.labels[name][1]]
        classes = records[0].labels[name][0]
        for first, second in sorted(combinations(range(len(maps)), 2), key=lambda pair: pair[::-1]):
            counted = dice_sums(maps[first], maps[second], classes)
            sums[first, second] = metric.added(sums.get((first, second)), counted)
    if not sums:
        return None
    values, worst = tuple(map(metric.finish, sums.values())), min(sums.values(), key=metric.finish)
    words = metric.name, metric.meaning, metric.unit, metric.better
    return Measured(*words, values, None, ordered[0].rows, 0, 0, dice_of(worst))
