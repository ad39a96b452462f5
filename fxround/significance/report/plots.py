"""Plots of a variability report with matplotlib: bits per layer, bits over elements, and the spread of the samples.

Plots show the report's numbers. Drawing needs no display and leaves matplotlib's settings and current figure alone.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fxround.atomic_files import write_file
from fxround.significance.bits import require
from fxround.significance.figures import Figures

if TYPE_CHECKING:
    from fxround.significance.recorder import Measured
    from fxround.significance.report import VariabilityReport

MEAN: Final = "#1c7ed6"
_BAND: Final = "#a5d8ff"
WORST: Final = "#e8590c"
_REFERENCE: Final = ("#2b8a3e", "#862e9c", "#c2255c")
INK: Final = "#343a40"
STYLE: Final = {
    "font.size": 9,
    "axes.edgecolor": "#adb5bd",
    "axes.labelcolor": INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e9ecef",
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.fonttype": "path",
    "svg.hashsalt": "fxround",
}
LABELLED: Final = 40


def plot(report: VariabilityReport, path: str | Path | None = None) -> Any:
    """Return a matplotlib figure of all plots that the report has data for; ``path``: also write it there."""
    panels = [_layers] * bool(report.places) + [_histogram] + [_metrics] * bool(report.metrics)
    return figure_of([partial(draw, report) for draw in panels], path)


def figure_of(panels: Sequence[Callable[[Any], None]], path: str | Path | None = None, height: float = 3.6) -> Any:
    """Return a matplotlib figure of panels, one below the other. A panel is a function that draws on axes.

    path: also write the figure there. height: of a panel, in inches. Raises ImportError without matplotlib.
    """
    with require("matplotlib", "report").rc_context(STYLE):
        figure = new_figure((10, height * len(panels)))
        for axes, draw in zip(np.atleast_1d(figure.subplots(len(panels), 1)), panels, strict=True):
            draw(axes)
        if path is not None:
            write(figure, Path(path))
    return figure


def label_points(axes: Any, points: Sequence[tuple[str, float, float]]) -> None:
    """Write a text beside each point (text, x, y) of axes whose limits are final; above earlier ones in its way."""
    axes.figure.draw_without_rendering()  # the layout
    size, to_points = 8.0, 72.0 / axes.figure.dpi
    taken: list[tuple[float, float, float]] = []
    for text, x, y in points:
        left, low = (float(value) * to_points for value in axes.transData.transform((x, y)))
        right, up = left + 0.7 * size * len(text), 4.0
        while any(left < r and lo < right and abs(low + up - h) < 1.2 * size for lo, r, h in taken):
            up += 1.3 * size
        taken.append((left, right, low + up))
        axes.annotate(text, (x, y), (5, up), textcoords="offset points", fontsize=size, color=INK)


def new_figure(size: tuple[float, float]) -> Any:
    """Return an empty matplotlib figure that a notebook shows, whether pyplot is imported or not. size: in inches."""
    figure = require("matplotlib.figure", "report").Figure(figsize=size, layout="constrained", facecolor="white")
    figure._repr_png_ = partial(_png, figure)
    return figure


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def write(figure: Any, path: Path) -> None:
    """Write a figure in the format of the path's suffix; without one, in matplotlib's own, whose suffix it gets."""
    matplotlib = require("matplotlib", "report")
    suffix = path.suffix or f".{matplotlib.rcParams['savefig.format']}"
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix[1:].lower(), dpi=150, metadata={"Date": None} if suffix == ".svg" else None)
    write_file(path.with_suffix(suffix), buffer.getbuffer())


def svg(report: VariabilityReport) -> str:
    """Return the plots as one SVG element, the same text for the same report."""
    return svg_of(plot(report))


def svg_of(figure: Any) -> str:
    """Return a figure as one SVG element, the same text for the same numbers."""
    buffer = io.StringIO()
    with require("matplotlib", "report").rc_context(STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()[buffer.getvalue().index("<svg") :]


def _layers(report: VariabilityReport, axes: Any) -> None:
    """Plot mean, 5 to 95 % and worst bits of every place, and the bits that agree with the references."""
    shown = report.places
    x = np.arange(len(shown))
    low, high = ([_of(f.quantiles.get(q)) for f in shown] for q in ("0.05", "0.95"))
    axes.vlines(x, low, high, color=_BAND, linewidth=max(1.5, min(9, 300 / len(shown))), label="5 to 95 %")
    axes.plot(x, [_of(f.worst) for f in shown], "v", color=WORST, markersize=4, label="worst")
    for colour, name in zip(_REFERENCE, dict.fromkeys(n for f in shown for n in f.agreement), strict=False):
        agree = [f.agreement[name].bits if name in f.agreement else np.nan for f in shown]
        axes.plot(x, agree, "--", color=colour, linewidth=1, label=f"= {name}")
    above = [[0.0] * len(shown), [f.above or 0.0 for f in shown]]
    axes.errorbar(
        x, [_of(f.bits) for f in shown], above, color=MEAN, marker="o", markersize=4, capsize=2, label="mean +"
    )
    axes.set(title="Significant bits, place by place", ylabel="bits")
    axes.set_ylim(0, max(f.precision for f in shown) + 1)
    every = -(-len(shown) // LABELLED)
    axes.set_xticks(
        x[::every],
        [f.place.name for f in shown][::every],
        rotation=60 if len(shown) > 8 else 0,
        ha="right" if len(shown) > 8 else "center",
    )
    axes.legend(ncols=5, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.1)


def _of(value: float | None) -> float:
    return np.nan if value is None else value


def _histogram(report: VariabilityReport, axes: Any) -> None:
    """Plot the elements of every result by their bits."""
    for i, f in enumerate(report.outputs[: len(_REFERENCE) + 1]):
        colour = (MEAN, *_REFERENCE)[i]
        axes.bar(np.arange(len(f.histogram)) + 0.5, f.histogram, 0.9, color=colour, alpha=0.75, label=_label(f))
    axes.set(title="Results: elements by significant bits", xlabel="bits", ylabel="elements")
    axes.set_xlim(0, max((f.precision for f in report.outputs), default=24) + 1)
    if report.outputs:
        axes.legend(loc="upper left")


def _label(f: Figures) -> str:
    silent = f.elements - f.evidence
    return f"{f.place.name}: {f.evidence:,} elements" + (f", {silent:,} without evidence" if silent else "")


def _metrics(report: VariabilityReport, axes: Any) -> None:
    """Plot every sample's value of each metric, scaled to the range of its samples."""
    rows = report.metrics
    for row, metric in enumerate(reversed(rows)):
        values = np.array(metric.values)
        values = values[np.isfinite(values)]
        if not len(values):
            continue
        low, high = values.min(), values.max()
        place = (values - low) / (high - low) if high > low else np.full(len(values), 0.5)
        axes.plot(place, np.full(len(values), row), "o", color=MEAN, alpha=0.55, markersize=6)
        for at, text, align in ((-0.03, f"{low:.6g}", "right"), (1.03, f"{high:.6g} {metric.unit}", "left")):
            axes.text(at, row, text, ha=align, va="center", fontsize=8, color=INK)
    axes.set_yticks(range(len(rows)), [_metric_label(m) for m in reversed(rows)])
    axes.set(title="Spread of the samples, each metric from its least to its greatest value", xlim=(-0.2, 1.25))
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xticks([])
    axes.grid(False)


def _metric_label(metric: Measured) -> str:
    """Return a metric's name, and which of its values is the worst."""
    if not metric.better:
        return metric.name
    return f"{metric.name}\n(worst: {'least' if metric.better == 'higher' else 'greatest'})"
