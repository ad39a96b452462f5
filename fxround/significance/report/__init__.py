"""The report of a variability study: figures as data, tables, plots, and a check for continuous integration.

Text, HTML and plots are made from the same numbers. Every figure in bits is the lower end of a confidence interval
whose width is beside it, and the legend states the cost of few samples. The findings name results that are stable but
far from a reference. A figure without evidence is None, never the number of bits of the format, so that
``check(min_bits=...)`` fails on it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import networkx as nx
from torch import Tensor

from fxround.atomic_files import write_file
from fxround.errors import shown, type_of
from fxround.policy import Policy
from fxround.short_reprs import Short
from fxround.significance.bits import above, decimal, general_probability, penalty, require
from fxround.significance.elements import Bits, Elements
from fxround.significance.figures import Figures, plain
from fxround.significance.metrics import METRICS
from fxround.significance.parts import Part
from fxround.significance.places import OUTPUT, said_of_undrawn
from fxround.significance.recorder import Measured
from fxround.significance.study import UNPERTURBED, Study
from fxround.views.colouring import ByPolicy, Colouring
from fxround.views.graph_views import to_networkx
from fxround.views.pictures import drawn, write_picture
from fxround.views.table import Numeral, Table, Value, of_notebook

if TYPE_CHECKING:
    from fxround.significance.report.difference import ReportDifference

# A result is called wrong if this share of its elements is beyond their spread: normal samples put less than 0.1 %
# of sound elements there (tests/significance/test_figures.py).
OUTSIDE: Final = 0.05
# Of fewer elements than this, one or two outside by chance are a larger share, so that half of them must be outside.
FEW: Final = 100
OUTSIDE_OF_FEW: Final = 0.5
SHOWN_ROWS: Final = 12
COLUMNS: Final = ("bits", "+", "worst", "whole", "digits", "contrib.", "evidence %")


class CheckFailed(AssertionError):
    """Raised by ``VariabilityReport.check``; the message lists every condition that failed."""


@dataclass(frozen=True)
class Adaptive:
    """How ``samples="auto"`` ended: the watched figure, its tolerance, its half width in the worst batch, and whether
    the tolerance was reached.
    """

    watch: str
    tolerance: float
    half_width: float
    reached: bool


@dataclass(frozen=True, repr=False)
class VariabilityReport(Short):
    """The results of ``fxround.variability``. A place is a result of the model, a layer or a node that was measured.

    policy, seed, method, confidence  as passed
    samples     the number of runs of each batch
    complete    False if Ctrl-C ended the study
    batches     the number of batches that the inputs have; None if unknown
    rows        the number of input rows in all batches
    figures     one ``Figures`` per place: results first, then layers or nodes in the order of the model
    metrics     the metrics over samples
    isolated    with ``isolate``: figures of the first result when only one layer or operator is perturbed
    adaptive    how ``samples="auto"`` ended, None otherwise
    notes       warnings that belong to the figures
    undrawn     the operations that are the same in every sample although the policy draws: name, operator, module, line
    provenance  versions, machine, times and seeds, as plain data
    kept        every sample if requested: per batch a dict from (kind, name) to a list of tensors
    part        of a part of a study (``first_sample``), what ``fxround.merge`` needs besides the samples
    graph       the rounded graph for networkx
    elements    the bits of each element of the results, which ``bits`` and ``map`` show

    ``report["name"]`` is the ``Figures`` of a place; ``print(report)`` shows everything. Example::

        report = fxround.variability(model, x, capture="layers")
        report["output"].bits, report["output"].worst
        report.to_html("report.html")
    """

    policy: Policy
    seed: int
    method: str
    confidence: float
    samples: tuple[int, ...]
    complete: bool
    batches: int | None
    rows: int
    figures: tuple[Figures, ...]
    metrics: tuple[Measured, ...]
    isolated: tuple[Figures, ...]
    adaptive: Adaptive | None
    notes: tuple[str, ...]
    undrawn: tuple[str, ...]
    provenance: dict[str, Any]
    kept: tuple[dict[tuple[str, str], list[Tensor]], ...] = field(default=(), repr=False)
    graph: nx.DiGraph | None = field(default=None, repr=False, compare=False)
    part: Part | None = field(default=None, repr=False, compare=False)
    elements: Elements = field(default_factory=Elements, repr=False, compare=False)

    @staticmethod
    def of(
        study: Study, policy: Policy, complete: bool, batches: int | None, provenance: dict[str, Any]
    ) -> VariabilityReport:
        """Return the report of a study as far as it has run."""
        figures = [tally.figures() for tally in study.tallies.values()]
        recorders = study.recorders or ()
        return VariabilityReport(
            policy=policy,
            seed=provenance["seed"],
            method=study.plan.options.method,
            confidence=study.plan.options.confidence,
            samples=tuple(study.counts),
            complete=complete,
            batches=batches,
            rows=study.rows,
            figures=tuple(sorted(figures, key=lambda f: f.place.kind != OUTPUT)),
            metrics=tuple(m for r in recorders if (m := r.measured()) is not None),
            isolated=tuple(tally.figures() for tally in study.alone.values()),
            adaptive=_adaptive(study),
            notes=tuple(study.runs.notes),
            undrawn=study.undrawn,
            provenance=provenance,
            kept=tuple(study.samples),
            graph=to_networkx(study.runs.perturbed.graph) if study.counts else None,
            part=study.part(),
            elements=study.elements,
        )

    # ---- reading ----

    def __getitem__(self, name: str) -> Figures:
        """The figures of a result, layer or node by name; results come first. Raises KeyError listing the names."""
        for figures in self.figures:
            if figures.place.name == name:
                return figures
        raise KeyError(f"no figures of {shown(name)}; there are {', '.join(f.place.name for f in self.figures)}")

    @property
    def outputs(self) -> tuple[Figures, ...]:
        """The figures of the results."""
        return tuple(f for f in self.figures if f.place.kind == OUTPUT)

    @property
    def places(self) -> tuple[Figures, ...]:
        """The figures of the layers or nodes, in the order of the model."""
        return tuple(f for f in self.figures if f.place.kind != OUTPUT)

    def metric(self, name: str) -> Measured:
        """Return the values of a metric. Raises ValueError listing the measured names."""
        for metric in self.metrics:
            if metric.name == name:
                return metric
        names = ", ".join(m.name for m in self.metrics) or "none"
        raise ValueError(f"no metric {shown(name)} was measured; measured: {names}. Ask for it with metrics=(...,)")

    # ---- views ----

    def table(self) -> Table:
        """Return a table with one row per place.

        Its columns are bits (mean, what the interval of one element has above it, worst, of the whole tensor), decimal
        digits, contributing bits, evidence in percent, and the agreement with each reference.
        """
        references = list(dict.fromkeys(name for f in self.figures for name in f.agreement))
        broken = any(f.nonfinite for f in self.figures)
        columns = ("place", *COLUMNS, *_headings(references), *(["not finite"] if broken else []))
        rows = tuple(
            (f.place.name, *_numbers(f), *_agreements(f, references), *([f.nonfinite or None] if broken else []))
            for f in self.figures
        )
        return Table(columns, rows)

    def isolated_table(self) -> Table:
        """Return a table with one row per site: the figures of the first result when only that site is perturbed."""
        return Table(("perturbed alone", *COLUMNS), tuple((f.place.name, *_numbers(f)) for f in self.isolated))

    def metrics_table(self) -> Table:
        """Return a table with one row per metric.

        Its columns are mean, spread and worst value over the samples, which value the worst is and of which sample.
        """
        columns = ("metric", "mean", "spread", "worst", "which is", "unit", "meaning")
        rows = [
            (
                m.name,
                Numeral(f"{m.mean:.6g}"),
                Numeral(f"{m.spread:.3g}"),
                Numeral(f"{m.worst:.6g}" if m.better else ""),
                self._worst_is(m),
                m.unit,
                m.meaning,
            )
            for m in self.metrics
        ]
        return Table(columns, tuple(rows))

    def _worst_is(self, metric: Measured) -> str:
        """Return which value of a metric is the worst one, and of which sample."""
        if metric.worst_at is None:
            return ""
        side = "least" if metric.better == "higher" else "greatest"
        if len(set(metric.values)) == 1:
            return f"the {side}, in all"
        known = METRICS.get(metric.name)
        first = 0 if self.part is None else self.part.first_sample
        what = "pair" if known is not None and known.pairs else "sample"
        return f"the {side}, {what} {first + metric.worst_at}"

    def __str__(self) -> str:
        tables = self.tables
        last = "\n".join([*self.findings, *self.worst_elements, *self.notes, self.legend])
        return "\n\n".join([self.heading, *self.warnings, *map(str, tables), last])

    @property
    def worst_elements(self) -> tuple[str, ...]:
        """A sentence for each result: its element with the fewest bits, with the mean and deviation of its samples."""
        return tuple(
            f"{f.place.name}: the worst element is {list(f.worst_at)}, {f.worst:.2f} bits: {f.worst_mean:.4g} with a "
            f"deviation of {f.worst_sigma:.2g}."
            for f in self.outputs
            if f.worst is not None
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader has to know before the figures: that some operations draw nothing."""
        return (f"WARNING: {said_of_undrawn(self.undrawn)}.",) if self.undrawn else ()

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables that have rows."""
        return tuple(t for t in (self.table(), self.isolated_table(), self.metrics_table()) if len(t))

    @property
    def heading(self) -> str:
        """One line: model, policy, samples, inputs, batches and seed."""
        model = self.provenance["model"]
        runs = _range(self.samples)
        several = "" if len(self.samples) == 1 else "es"
        state = "" if self.complete else f"  INTERRUPTED: {self._partial}"
        return (
            f"{model['class'].rpartition('.')[2]}, {model['parameters']:,} parameters: policy {self.policy.name}, "
            f"{runs} samples of {self.rows:,} inputs in {len(self.samples)} batch{several}, seed {self.seed}{state}"
        )

    @property
    def _partial(self) -> str:
        whole = f" of {self.batches}" if self.batches else ""
        return f"{len(self.samples)}{whole} batches, the last with {self.samples[-1] if self.samples else 0} samples"

    @property
    def legend(self) -> str:
        """One line on how to read the figures."""
        n = min(self.samples, default=0)
        if n < 2:
            return "No batch has two samples: there are no figures."
        if self.method == "general":
            chance = general_probability(n, self.confidence)
            how = f"general method, which holds with probability {chance:.2f} from {n} samples"
        else:
            how = (
                f"CNH's lower bound, {n} samples lower every figure by {penalty(n, None, self.confidence):.2f} bits; "
                f"one element's true bits are between its figure and {above(n, self.confidence):.2f} more "
                f"({self.confidence:.0%}, normal samples)"
            )
        return f"bits: {how}; evidence: elements whose samples differ; only these count."

    @property
    def findings(self) -> tuple[str, ...]:
        """The most important findings as sentences: wrong or unproven results, changed labels, NaN and infinities."""
        return tuple(_findings(self))

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the kept samples and the graph as plain data."""
        return {
            "policy": self.policy.to_dict(),
            "seed": self.seed,
            "method": self.method,
            "confidence": self.confidence,
            "samples": list(self.samples),
            "complete": self.complete,
            "batches": self.batches,
            "rows": self.rows,
            "figures": [_figures_dict(f) for f in self.figures],
            "metrics": [
                plain(asdict(m) | {"mean": m.mean, "spread": m.spread, "worst": m.worst}) for m in self.metrics
            ],
            "isolated": [_figures_dict(f) for f in self.isolated],
            "adaptive": plain(asdict(self.adaptive)) if self.adaptive else None,
            "findings": list(self.findings),
            "notes": list(self.notes),
            "undrawn": list(self.undrawn),
            "provenance": plain(self.provenance),
        }

    def to_json(self, indent: int | None = 2) -> str:
        """Return ``to_dict`` as JSON text; ``indent`` as for ``json.dumps``."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def save(self, path: str | Path) -> Path:
        """Write the whole report, with the samples that it keeps, for ``fxround.load_report``; returns the path.

        Raises ValueError for a policy that is more than its rules, such as a ``CalibratedPolicy``.
        """
        from fxround.significance.report import files

        return files.write(self, path)

    def to_pandas(self) -> Any:
        """Return a ``pandas.DataFrame`` with one row per place. Raises ImportError without pandas."""
        return require("pandas", "report").DataFrame([_flat(f) for f in self.figures])

    def bits(self, output: str = OUTPUT, batch: int | None = None) -> Bits:
        """Return the significant bits of each element of a result: a float32 array, shaped like the result.

        The mean over elements with evidence is ``report[output].bits``. Bits are those of the study's method, in 0 to
        the precision of the format, and rounded to binary32; NaN is an element without evidence, of which all samples
        are equal. They come from streamed statistics; no sample is kept.

        Args:
            output: the name of a result, as in ``report.outputs``.
            batch: the number of a batch; None for the rows of all batches.

        Raises:
            KeyError: for another name.
            ValueError: for a layer, for a batch that there is not, for results of different shapes with ``batch=None``,
                and for results of more than 67,108,864 elements, of which no bits are kept.

        Example::

            bits = report.bits()
            worst = numpy.unravel_index(numpy.nanargmin(bits), bits.shape)
        """
        self._require_result(output)
        return self.elements.of(output, batch)

    def _require_result(self, name: str) -> None:
        """Raise KeyError for an unknown name, ValueError for that of a layer."""
        if self[name].place.kind != OUTPUT:
            names = ", ".join(f.place.name for f in self.outputs)
            raise ValueError(f"bits of each element are kept of results only: {names}; got the layer {shown(name)}")

    def to_xarray(self, output: str = OUTPUT, batch: int | None = None, dims: Sequence[str] | None = None) -> Any:
        """Return ``bits`` as an ``xarray.DataArray`` that says what they are: unit, format, method, samples, policy.

        dims: the names of the dimensions; None takes "row", "dim_1", ... Raises ImportError without xarray, and what
        ``bits`` raises.
        """
        bits, f = self.bits(output, batch), self[output]
        known = {
            "long_name": "significant bits",
            "units": "bit",
            "format": f.dtype,
            "precision": f.precision,
            "method": f.method,
            "confidence": f.confidence,
            "samples": f.samples,
            "policy": self.policy.name,
            "seed": self.seed,
        }
        own = [f"dim_{i}" if i else "row" for i in range(bits.ndim)]
        return require("xarray", "report").DataArray(bits, dims=dims or own, name=output, attrs=known)

    def map(
        self,
        output: str = OUTPUT,
        background: Any = None,
        *,
        row: int = 0,
        channel: int | None = None,
        axis: int = 0,
        at: int | None = None,
        path: str | Path | None = None,
    ) -> Any:
        """Return a matplotlib figure of the significant bits of an image, or of a slice of a volume, over its anatomy.

        The scale of the colours is that of the format, 0 to 24 bits for binary32, so that figures can be compared. Its
        colours (viridis) can be told apart with any colour vision. A pixel without evidence has no colour.

        Args:
            output: the name of a result: [n, height, width], [n, channels, height, width] or
                [n, channels, depth, height, width].
            background: the anatomy: a tensor or an array of the size of the image or volume, perhaps with channels in
                front, of which the mean is drawn. None takes the first input of the model, if it has this size.
            row: the number of the image among the rows of all batches.
            channel: the channel of the result; None for the least bits of all channels.
            axis: of a volume: the dimension that is cut, 0 for the depth, 1 for the height, 2 for the width.
            at: where a volume is cut; None for the middle.
            path: also write the figure there.

        Raises:
            ValueError: for a result that is no image, a background of another size, and an index out of range; also
                what ``bits`` raises.
            ImportError: without matplotlib.

        Example::

            report = fxround.variability(net, volumes)                # [n, 1, depth, height, width]
            report.map(axis=1, at=32, path="bits.png")
        """
        from fxround.significance.report import maps

        self._require_result(output)
        return maps.draw(self, output, maps.Cut(row, channel, axis, at), background, path)

    def plot(self, path: str | Path | None = None) -> Any:
        """Return a matplotlib figure: bits per layer, histogram over elements, spread of samples.

        path: also write the figure there. Raises ImportError without matplotlib.
        """
        from fxround.significance.report import plots

        return plots.plot(self, path)

    def draw(self, path: str | Path, *, step: int = 5) -> Path:
        """Draw the graph, every operation in the colour of the bits that it has lost; returns the path.

        path: a file that ends in .html, .svg or .json, as for ``RoundedModule.draw``. step: the bits that one of the
        five colours stands for. With ``capture="nodes"`` every operation has a figure of its own, with ``"layers"``
        that of its layer. Raises ValueError for a path with another suffix, a step below 1, and a report without a
        graph.
        """
        colouring = self.colouring(step)
        return write_picture(path, self.drawable, [colouring, ByPolicy(drawn(self.drawable))], colouring.title)

    def colouring(self, step: int = 5) -> Colouring:
        """Return the colours of the graph by bits lost, for ``RoundedModule.draw(report=)``; step: as for ``draw``."""
        from fxround.significance.report.drawing import ByBits

        return ByBits(self, step)

    @property
    def drawable(self) -> nx.DiGraph:
        """The graph. Raises ValueError if the study was interrupted before its first sample and has none."""
        if self.graph is None:
            raise ValueError("the report has no graph: the study ended before its first sample")
        return self.graph

    def to_html(self, path: str | Path | None = None) -> str:
        """Return one self-contained HTML page; ``path``: also write it there."""
        from fxround.significance.report import html

        text = html.page(self)
        if path is not None:
            write_file(path, text)
        return text

    def _repr_html_(self) -> str:
        said = (*self.warnings, *self.findings, *self.worst_elements, *self.notes)
        return of_notebook(self.heading, self.tables, said, self.legend)

    # ---- continuous integration ----

    def difference(
        self, other: VariabilityReport, names: tuple[str, str] = ("this report", "the other")
    ) -> ReportDifference:
        """Compare with the report of another commit: which figures changed, of which results, layers and metrics.

        Reports that keep samples (``first_sample=``, ``keep_samples=True``) also say how many elements have other bits.

        Args:
            other: a report of the same study, of another commit, machine or version.
            names: what to call the two.

        Returns:
            A ``ReportDifference``: ``differing``, ``first``, ``lost(bits)`` and ``causes``; ``print`` shows a table.

        Raises:
            TypeError: for anything but a report.

        Example::

            assert not report.difference(fxround.load_report("golden.report")).differing
        """
        from fxround.significance.report.difference import ReportDifference

        if not isinstance(other, VariabilityReport):
            raise TypeError(f"other is {type_of(other)}; expected what fxround.variability or load_report returned")
        return ReportDifference(self, other, *names)

    def check(
        self,
        *,
        min_bits: float | None = None,
        min_worst: float | None = None,
        max_flips: float | None = None,
        max_outside: float | None = None,
        allow_nonfinite: bool = False,
    ) -> VariabilityReport:
        """Return the report if every condition holds.

        Args:
            min_bits: the least mean number of significant bits of every result; no evidence fails.
            min_worst: the least number of significant bits of any element of a result.
            max_flips: the largest share, 0 to 1, of labels that change in any sample: of inputs, or of the voxels or
                tokens of all inputs.
            max_outside: the largest share, 0 to 1, of elements whose reference is beyond their spread.
            allow_nonfinite: whether NaN and infinities pass.

        Raises:
            CheckFailed: an AssertionError that lists every failed condition. A report that was interrupted fails.
            ValueError: for a bound that is NaN or a share beyond 0 to 1, and for ``max_flips`` if label flips were not
                measured.
            TypeError: for a bound that is no number.

        Example::

            fxround.variability(model, x).check(min_bits=10, max_flips=0.0)
        """
        require_bounds(min_bits=min_bits, min_worst=min_worst, max_flips=max_flips, max_outside=max_outside)
        failures = [] if self.complete else [f"the study was interrupted ({self._partial})"]
        for f in self.outputs:
            failures += _failures(f, min_bits, min_worst, max_outside, allow_nonfinite)
        if max_flips is not None and self.metric("label_flips").changed_share > max_flips:
            flips = self.metric("label_flips")
            failures.append(f"{flips.changed:,} of {flips.labels:,} labels changed, allowed: {max_flips:g} of all")
        if failures:
            raise CheckFailed("; ".join(failures))
        return self


def load_report(path: str | Path) -> VariabilityReport:
    """Read a report that ``VariabilityReport.save`` wrote.

    Raises OSError for a file that cannot be read, ValueError for one that is no report of this version.

    Example::

        report.save("part-3.report")
        assert fxround.load_report("part-3.report")["output"].bits == report["output"].bits
    """
    from fxround.significance.report import files

    data = files.read(path)
    return VariabilityReport(**data | {"adaptive": data["adaptive"] and Adaptive(**data["adaptive"])})


def require_bounds(**bounds: Any) -> None:
    """Raise for bounds of ``check`` that no report can be held to: TypeError for no number, ValueError for others."""
    for name, bound in bounds.items():
        if bound is None:
            continue
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            raise TypeError(f"{name} is {type_of(bound)}; expected a number, or None for no bound")
        if math.isnan(bound):
            raise ValueError(f"{name} is {bound}; expected a number")
        if name.startswith("max_") and not 0 <= bound <= 1:
            raise ValueError(f"{name} is {bound}; expected a share from 0 to 1")


def _failures(
    f: Figures, min_bits: float | None, min_worst: float | None, max_outside: float | None, allow_nonfinite: bool
) -> Iterator[str]:
    name = f.place.name
    for measured, least, what in ((f.bits, min_bits, "bits"), (f.worst, min_worst, "bits in the worst element")):
        if least is not None and (measured is None or measured < least):
            came = "no evidence (all samples are equal)" if measured is None else f"{measured:.2f}"
            yield f"{name}: {came} {what}, expected at least {least:g}"
    for reference, agreement in f.agreement.items():
        if max_outside is not None and agreement.outside_share > max_outside:
            yield f"{name}: {agreement.outside_share:.1%} of elements are beyond their spread from the {reference} run"
    if f.nonfinite and not allow_nonfinite:
        yield f"{name}: {f.nonfinite} elements are not finite, first in sample {f.first_nonfinite}"


def _adaptive(study: Study) -> Adaptive | None:
    if not study.rules:
        return None
    worst = max(rule.half_width for rule in study.rules)
    reached = all(rule.known for rule in study.rules)
    return Adaptive(study.plan.watch, study.plan.tolerance, worst, reached)


def _findings(report: VariabilityReport) -> Iterator[str]:
    # Of several results, nothing says which ones are computed from an operation.
    names = [text.partition(":")[0] for text in report.undrawn] if len(report.outputs) == 1 else []
    for f in report.outputs:
        yield from _stability(f, names)
    for metric in report.metrics:
        if metric.rows is not None:
            more = ", ..." if len(metric.rows) > SHOWN_ROWS else ""
            rows = ", ".join(map(str, metric.rows[:SHOWN_ROWS])) + more
            which = f" (rows {rows})" if rows else ""
            whole = f"{len(metric.rows)} of {metric.of} inputs{which}"
            if metric.labels != metric.of:
                whole = f"{metric.changed:,} of {metric.labels:,}, in {whole}"
            yield f"Labels that change in any sample: {whole}."
    broken = next((f for f in report.places if f.nonfinite), None)
    if broken is not None:
        where = f", {broken.place.source}" if broken.place.source else ""
        yield f"First NaN or infinity: {broken.place.name} ({broken.place.operator}{where})."
    if report.adaptive is not None:
        a = report.adaptive
        taken = _range(report.samples)
        verdict = "known to" if a.reached else f"NOT known to within {a.tolerance:g} after {taken} samples:"
        width = "equal samples are no evidence" if math.isinf(a.half_width) else f"± {a.half_width:.2g}"
        yield f"Adaptive: {a.watch} {verdict} {width} ({report.confidence:.0%})."


def _stability(f: Figures, undrawn: Sequence[str]) -> Iterator[str]:
    name = f.place.name
    if f.note:
        yield f"{name}: {f.note}."
    if f.evidence == 0 and f.elements:
        yield f"{name}: no evidence, all samples are equal (is the policy deterministic, or is nothing rounded?)."
    for reference, a in f.agreement.items():
        if a.outside_share >= (OUTSIDE if f.elements >= FEW else OUTSIDE_OF_FEW):
            if f.evidence == 0 and undrawn:
                # Equal samples say nothing about operations that are the same in all of them.
                names = ", ".join(undrawn[:3])
                yield (
                    f"{name}: {a.outside_share:.0%} of elements differ from the {reference} run, and no spread says "
                    f"whether that is much, since nothing is drawn in {names}; {a.bits:.1f} bits agree in the mean, "
                    f"{a.worst:.1f} in the worst."
                )
                continue
            # The unperturbed run rounds too: it may be the one that is wrong (a sum that stagnates).
            said = f"NOT the {reference} run's value" if reference == UNPERTURBED else "STABLE AND WRONG"
            real = "" if f.bits is None else f"; {f.bits:.1f} bits are stable"
            yield (
                f"{name}: {said}: {a.outside_share:.0%} of elements are further from the {reference} run than "
                f"their spread explains; {a.bits:.1f} bits agree in the mean, {a.worst:.1f} in the worst{real}."
            )


def _numbers(f: Figures) -> tuple[Value, ...]:
    digits = None if f.bits is None else decimal(f.bits)
    return f.bits, f.above, f.worst, f.norm, digits, f.contributing, 100 * f.evidence_share


def _headings(references: list[str]) -> list[str]:
    return [heading for name in references for heading in (f"= {name}", f"≠ {name} %")]


def _agreements(f: Figures, references: list[str]) -> list[Value]:
    agreements = [f.agreement.get(name) for name in references]
    return [value for a in agreements for value in ((a.bits, 100 * a.outside_share) if a else (None, None))]


def _range(samples: tuple[int, ...]) -> str:
    low, high = min(samples, default=0), max(samples, default=0)
    return str(low) if low == high else f"{low} to {high}"


def _figures_dict(f: Figures) -> dict[str, Any]:
    data: dict[str, Any] = plain(asdict(f))
    data["agreement"] = {name: plain(asdict(a) | {"outside_share": a.outside_share}) for name, a in f.agreement.items()}
    return data | {"penalty": f.penalty, "above": f.above, "evidence_share": f.evidence_share}


def _flat(f: Figures) -> dict[str, Any]:
    """Return the figures of a place as one flat row of columns."""
    data = _figures_dict(f)
    place = data.pop("place")
    for nested in ("agreement", "quantiles", "histogram"):
        del data[nested]
    data |= {f"q{100 * float(q):g}": v for q, v in f.quantiles.items()}
    data |= {f"{name}_{key}": v for name, a in f.agreement.items() for key, v in asdict(a).items()}
    return {**place, **data}
