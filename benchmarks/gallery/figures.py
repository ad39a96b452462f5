"""The figures of the gallery, drawn from the stored tables alone."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.tables import ROOT, tables
from fxround.significance.report import plots

FOLDER: Final = ROOT / "docs" / "gallery"
# Text stays text: a figure is small, and a test reads its numbers.
STYLE: Final = {**plots.STYLE, "svg.fonttype": "none", "font.family": "sans-serif"}
BAR: Final = "#0b7285"
INCHES: Final = 0.26


@dataclass(frozen=True)
class Bars:
    """Horizontal bars of some columns of a table, one panel each.

    table: its name. columns: the numbers of the columns, and the titles of the panels. log: whether the axis is
    logarithmic. rows: those that are shown; None for all.
    """

    table: str
    columns: Mapping[int, str]
    log: bool = False
    rows: Callable[[str], bool] | None = None


FIGURES: Final[Mapping[str, Bars]] = {
    "sentences": Bars("gallery-sentences", {2: "nearest neighbour kept, %", 4: "greatest loss of a cosine"}),
    "pitch": Bars("gallery-pitch", {1: "share of the variance, %", 2: "significant bits after it"}),
    "images": Bars("gallery-images", {2: "class kept, %", 4: "probability of the class"}),
    "faces": Bars("gallery-faces", {3: "a box moves, % of its width", 4: "a landmark moves, %"}, log=True),
    "crystals": Bars(
        "gallery-crystals",
        {3: "energy off by, meV/atom", 4: "a force off by, meV/Å"},
        log=True,
        rows=lambda row: "every value" not in row,
    ),
    "fuzzy": Bars(
        "published-fuzzy", {1: "SR: bits of 24", 3: "UD: bits of 24"}, rows=lambda row: row.endswith("output")
    ),
}


def figure(name: str, stored: Mapping[str, Any] | None = None) -> str:
    """Return a figure as SVG text. stored: its table; that of the results where it is left out."""
    bars = FIGURES[name]
    table = tables()[bars.table] if stored is None else stored
    rows = [row for row in table["rows"] if bars.rows is None or bars.rows(row[0])]
    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=(8.4, 0.7 + INCHES * len(rows)), layout="constrained", facecolor="white")
        panels = drawn.subplots(1, len(bars.columns), sharey=True)
        for axes, (column, title) in zip(panels, bars.columns.items(), strict=True):
            _panel(axes, [row[0] for row in rows], [row[column] for row in rows], title, bars.log)
        text = io.StringIO()
        drawn.savefig(text, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in text.getvalue()[text.getvalue().index("<svg") :].splitlines()) + "\n"


def _panel(axes: Axes, labels: Sequence[str], cells: Sequence[str], title: str, log: bool) -> None:
    """Draw a column's numbers as bars with the cells beside them; an empty cell, or a zero of a logarithm, has none."""
    numbers = [float(cell or "nan") for cell in cells]
    axes.set(title=title, xscale="log" if log else "linear")
    axes.barh(range(len(labels)), numbers, color=BAR, height=0.62)
    for place, (number, cell) in enumerate(zip(numbers, cells, strict=True)):
        there = number > 0 or not log
        axes.annotate(
            cell, (number if there else 0, place), (4, 0), ("data" if there else axes.get_yaxis_transform()),
            textcoords="offset points", va="center", fontsize=8,
        )  # fmt: skip
    axes.minorticks_off()
    axes.set_yticks(range(len(labels)), labels)
    axes.grid(visible=False, axis="y")
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.margins(x=0.16)
