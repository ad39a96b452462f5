"""The report of ``fxround.compare``: a row for each policy, its metrics over the runs, and what it costs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fxround.atomic_files import write_file
from fxround.policy import Policy
from fxround.short_reprs import Short
from fxround.significance.figures import plain
from fxround.significance.recorder import Measured
from fxround.tuning.costs import Costs
from fxround.tuning.studies import number_of
from fxround.views.table import Table, Tabled, data_frame


@dataclass(frozen=True, repr=False)
class PolicyResult(Short):
    """What was measured of one policy.

    name        the name of the policy in the comparison
    policy      the policy
    metrics     the metrics, each with a value for every complete run
    costs       bits of weights and activations, and multiply-adds by format
    seconds     how long its runs took, with the compilation of kernels that are in no cache
    complete    whether all runs are complete
    error       what ended the runs before their end: the type and the message of an exception; else ""
    """

    name: str
    policy: Policy
    metrics: tuple[Measured, ...]
    costs: Costs
    seconds: float
    complete: bool = True
    error: str = ""

    def _line(self) -> str:
        measured = [f"{metric.title} {_cell(metric)}" for metric in self.metrics if metric.values]
        state = f"failed: {self.error}" if self.error else "" if self.complete else "not complete"
        bits = self.costs.weight_bits
        weights = "" if bits is None else f"{bits:.4g} bits a weight"
        return ", ".join(filter(None, (self.name, *measured, weights, state)))

    def metric(self, name: str) -> Measured:
        """Return a metric by its name. Raises KeyError for one that was not measured."""
        return {metric.name: metric for metric in self.metrics}[name]

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values; NaN is None, and infinities are text."""
        metrics = [_metric_dict(metric) for metric in self.metrics]
        data: dict[str, Any] = plain(
            {"name": self.name, "policy": self.policy.to_dict(), "metrics": metrics, **asdict(self.costs)}
            | {"seconds": self.seconds, "complete": self.complete, "error": self.error}
        )
        return data

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> PolicyResult:
        """Return the result that ``to_dict`` wrote."""
        own = [field.name for field in fields(Measured)]
        metrics = tuple(
            Measured(
                **{key: metric[key] for key in own if key in metric}
                | {"values": tuple(map(number_of, metric["values"]))}
            )
            for metric in data["metrics"]
        )
        costs = Costs(data["weight_bits"], data["activation_bits"], data["multiply_adds"])
        rest = data["seconds"], data["complete"], data["error"]
        return PolicyResult(data["name"], Policy.from_dict(data["policy"]), metrics, costs, *rest)


@dataclass(frozen=True, repr=False)
class ComparisonReport(Tabled):
    """The results of ``fxround.compare``, in the order of the policies.

    model            the name of the model's class
    batches, rows    the data: how many batches, and rows of them
    samples, seed    as passed
    unrounded        the metrics of the unrounded model, with one value each
    policies         a ``PolicyResult`` for each policy that has begun
    remaining        the names of the policies that Ctrl-C left
    interrupted      whether Ctrl-C ended the comparison before its end
    described        what the figures belong to: hashes of model and data, metrics, versions; {} without ``path``

    ``report["name"]`` is the row of a policy, ``print(report)`` shows all.
    """

    model: str
    batches: int
    rows: int
    samples: int
    seed: int
    unrounded: tuple[Measured, ...]
    policies: tuple[PolicyResult, ...]
    remaining: tuple[str, ...]
    interrupted: bool
    described: Mapping[str, Any]

    def __getitem__(self, name: str) -> PolicyResult:
        """Return the row of a policy. Raises KeyError for a name that has none."""
        return {row.name: row for row in self.policies}[name]

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values; NaN is None, and infinities are text."""
        names = ("model", "batches", "rows", "samples", "seed", "remaining", "interrupted", "described")
        data: dict[str, Any] = plain({name: getattr(self, name) for name in names})
        unrounded = [plain(_metric_dict(metric)) for metric in self.unrounded]
        return data | {"unrounded": unrounded, "policies": [row.to_dict() for row in self.policies]}

    def to_json(self, indent: int | None = 2) -> str:
        """Return ``to_dict`` as JSON; ``indent`` as for ``json.dumps``."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def to_pandas(self) -> Any:
        """Return a ``pandas.DataFrame`` with a row for each policy. Raises ImportError without pandas.

        Each metric has the columns of its mean, its spread and its worst value, and each format one of multiply-adds.
        """
        rows: list[dict[str, Any]] = []
        for row in self.policies:
            flat: dict[str, Any] = {"policy": row.name, "runs": len(row.metrics[0].values) if row.metrics else 0}
            for metric in row.metrics:
                own = {"": metric.mean, " spread": metric.spread, " worst": metric.worst}
                flat |= {f"{metric.name}{part}": value for part, value in own.items()}
            flat |= {"weight bits": row.costs.weight_bits, "activation bits": row.costs.activation_bits}
            flat |= {f"multiply-adds {name}": count for name, count in row.costs.multiply_adds.items()}
            rows.append(flat | {"seconds": row.seconds, "complete": row.complete, "error": row.error})
        # A failed policy has no metrics.
        names = [f"{m.name}{part}" for m in self.unrounded for part in ("", " spread", " worst")]
        columns = dict.fromkeys(["policy", "runs", *names, *(key for row in rows for key in row)])
        return data_frame(rows, list(columns))

    def table(self) -> Table:
        """Return a row for the unrounded model and one for each policy."""
        titles = [metric.title for metric in self.unrounded]
        columns = ("policy", *titles, "weight bits", "activation bits", "multiply-adds", "seconds")
        first = ("(unrounded)", *map(_cell, self.unrounded), None, None, "", None)
        rows = tuple(self._row(row) for row in self.policies)
        return Table(columns, (first, *rows), self.heading, "\n".join([*self.findings, self.legend]))

    @property
    def heading(self) -> str:
        """One line: model, data, samples and seed."""
        state = f", INTERRUPTED before {', '.join(self.remaining) or 'its end'}" if self.interrupted else ""
        return (
            f"{self.model}: {len(self.policies)} policies, {self.rows:,} rows of data in {self.batches} "
            f"batch{'es' * (self.batches != 1)}, {self.samples} samples of policies that draw, seed {self.seed}{state}"
        )

    def plot(self, path: str | Path | None = None, *, bits: str = "weight") -> Any:
        """Return a matplotlib figure: each metric against the bits of a value, with its spread over the runs as a bar.

        A dashed line is the unrounded model. Below a panel are the policies that have no place in it, with the reason.

        path: also write the figure there. bits: of the parameters (``"weight"``), or of the operands of products that
        are no parameters (``"activation"``). Raises ValueError for other words, ImportError without matplotlib.
        """
        from fxround.tuning import comparison_views

        return comparison_views.plot(self, path, bits)

    def to_html(self, path: str | Path | None = None) -> str:
        """Return one self-contained HTML page; ``path``: also write it there. Raises ImportError without matplotlib."""
        from fxround.tuning import comparison_views

        text = comparison_views.page(self)
        if path is not None:
            write_file(path, text)
        return text

    def _row(self, row: PolicyResult) -> tuple[str | float | None, ...]:
        cells = [_cell(metric) for metric in row.metrics] or ["failed" if row.error else ""] * len(self.unrounded)
        counted = sorted(row.costs.multiply_adds.items(), key=lambda item: -item[1])
        products = ", ".join(f"{_short(count)} {name}" for name, count in counted)
        return (row.name, *cells, row.costs.weight_bits, row.costs.activation_bits, products, row.seconds)

    @property
    def findings(self) -> tuple[str, ...]:
        """What a reader has to know before the figures: policies that failed, are not finished, or have NaNs."""
        broken = [metric.name for metric in self.unrounded if any(map(math.isnan, metric.values))]
        said = [f"the unrounded model: NaN in {', '.join(broken)}"] if broken else []
        for row in self.policies:
            runs = len(row.metrics[0].values) if row.metrics else 0
            if row.error:
                said.append(f"{row.name} failed after {runs} complete runs: {row.error}")
            elif not row.complete:
                said.append(f"{row.name} is not finished: {runs} of {self.samples} runs")
            broken = [metric.name for metric in row.metrics if any(map(math.isnan, metric.values))]
            if broken:
                said.append(f"{row.name}: NaN in {', '.join(broken)}")
        return tuple(said)

    @property
    def legend(self) -> str:
        """Lines on how to read the figures."""
        metrics = "; ".join(f"{m.name}: {m.meaning}" for m in self.unrounded)
        return (
            f"{metrics}. ±: standard deviation over the runs.\nBits: the mean over parameters, and over operands of "
            "products that are no parameters, scales of blocks included. Multiply-adds: of the first batch."
        )


def _cell(metric: Measured) -> str:
    if len(metric.values) == 1:
        return f"{metric.mean:.6g}"
    return f"{metric.mean:.6g} ±{metric.spread:.2g}"


def _metric_dict(metric: Measured) -> dict[str, Any]:
    keys = ("name", "meaning", "unit", "better", "values")
    return {key: getattr(metric, key) for key in keys} | {"mean": metric.mean, "spread": metric.spread}


def _short(count: int) -> str:
    """Return a count of multiply-adds in three digits."""
    for size, unit in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


__all__ = ["ComparisonReport", "PolicyResult"]
