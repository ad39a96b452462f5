"""A comparison of policies as plots and as one HTML page. All numbers are the report's."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from fxround.errors import shown
from fxround.significance.recorder import Measured
from fxround.significance.report import plots
from fxround.significance.report.html import document, finding, section, table_html
from fxround.views.table import Table

if TYPE_CHECKING:
    from fxround.tuning.comparison import ComparisonReport, PolicyResult

# What each word of ``bits=`` stands for.
_BITS: Final[Mapping[str, str]] = MappingProxyType(
    {"weight": "bits of a parameter", "activation": "bits of an operand of products that is no parameter"}
)


def plot(report: ComparisonReport, path: str | Path | None, bits: str) -> Any:
    """Return the figure of ``ComparisonReport.plot``."""
    if bits not in _BITS:
        raise ValueError(f"bits is {shown(bits)}; expected one of {', '.join(map(repr, _BITS))}")
    if not report.unrounded:
        raise ValueError("the comparison was interrupted before its first figure: there is nothing to plot")
    return plots.figure_of([partial(_panel, report, metric, bits) for metric in report.unrounded], path, 4.4)


def _panel(report: ComparisonReport, unrounded: Measured, bits: str, axes: Any) -> None:
    """Draw one metric of all policies."""
    left_out: list[str] = []
    labels: list[tuple[str, float, float]] = []
    for row in report.policies:
        why = _missing(row, unrounded.name, bits)
        if why:
            left_out.append(f"{row.name}: {why}")
            continue
        metric, x = row.metric(unrounded.name), _bits_of(row, bits)
        assert x is not None
        axes.errorbar(x, metric.mean, metric.spread, color=plots.MEAN, marker="o", markersize=5, capsize=3)
        labels.append((row.name, x, metric.mean))
    if math.isfinite(unrounded.mean):
        axes.axhline(unrounded.mean, linestyle="--", linewidth=1, color=plots.WORST, label="unrounded")
        axes.legend(loc="best")
    note = f"\nNot shown: {'; '.join(left_out)}" if left_out else ""
    better = f": {unrounded.better} is better" if unrounded.better else ""
    axes.set(title=f"{unrounded.title}{better}", xlabel=_BITS[bits] + note)
    axes.margins(x=0.12, y=0.15)
    plots.label_points(axes, labels)


def _missing(row: PolicyResult, name: str, bits: str) -> str:
    """Return why a policy has no place in a panel; "" for one that has."""
    if not row.metrics:
        return "failed"
    mean = row.metric(name).mean
    if not math.isfinite(mean):
        return f"{mean:g}"
    return "" if _bits_of(row, bits) is not None else "codes without a definition, or no such value"


def _bits_of(row: PolicyResult, bits: str) -> float | None:
    return row.costs.weight_bits if bits == "weight" else row.costs.activation_bits


def page(report: ComparisonReport) -> str:
    """Return the whole HTML document."""
    title, whole = f"Policies for {report.model}", report.table()
    texts = [f"<br>{escape(line)}" for line in report.legend.splitlines()]
    legend = f"<p class='legend'>{''.join(texts).removeprefix('<br>')}</p>"
    pictures = plots.svg_of(report.plot()) if report.unrounded else ""
    policies = "".join(
        f"<h3>{escape(row.name)}</h3><pre>{escape(row.policy.to_toml())}</pre>" for row in report.policies
    )
    facts = json.dumps(dict(report.described) | {"samples": report.samples, "seed": report.seed}, indent=2)
    parts = [
        f"<h1>{escape(title)}</h1><p class='sub'>{escape(report.heading)}</p>",
        "".join(finding(text, bad=True) for text in report.findings),
        section("Metrics and costs", table_html(Table(whole.columns, whole.rows)) + legend),
        section("Metrics against bits", f"<div class='plots'>{pictures}</div>") if pictures else "",
        section("To repeat this", f"<pre>{escape(facts)}</pre>{policies}"),
    ]
    return document(title, parts, report.to_json(indent=None))


__all__ = ["page", "plot"]
