"""Draw the graph of a variability report: every operation in the colour of the bits that it has lost.

An operation has the figures of its node where the report has them, else those of its layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fxround.significance.figures import Figures
from fxround.views.graph_views import drawn
from fxround.views.svg import Legend, svg

if TYPE_CHECKING:
    from fxround.significance.report import VariabilityReport

# Bits lost, from none to all: fill and border.
_SHADES: Final = (
    ("#e6f4ea", "#2b8a3e"),
    ("#f1f8d9", "#74a312"),
    ("#fff3bf", "#e6a700"),
    ("#ffe0b8", "#e8590c"),
    ("#ffd0cc", "#c92a2a"),
)
_SILENT: Final = ("#f1f3f5", "#adb5bd")
STEP: Final = 5


def drawing(report: VariabilityReport, *, step: int = STEP, title: str = "", columns: int = 3) -> str:
    """Return the SVG text. ``step``: the bits that one colour stands for; ``columns``: of the legend.

    Raises ValueError for a report without a graph (of a study that was interrupted before its first sample) and for a
    step below 1.
    """
    if report.graph is None:
        raise ValueError("the report has no graph: the study ended before its first sample")
    if step < 1:
        raise ValueError(f"step is {step}: expected a number of bits of at least 1")
    graph = drawn(report.graph)
    by_node = {f.place.node: f for f in report.places if f.place.kind == "node"}
    by_path = {f.place.path: f for f in report.places if f.place.kind == "layer"}
    results = report.outputs[:1]
    for name, data in graph.nodes(data=True):
        figures = by_node.get(name) or (by_path.get(data["path"]) if data["op"] == "call_function" else None)
        if data["op"] == "output" and results:
            figures = results[0]
        data.update(_box(data, figures, step))
    return svg(graph, _legend(step, title or "Bits lost, mean over elements", columns))


def shade(lost: float, step: int = STEP) -> tuple[str, str]:
    """Return fill and border for a number of bits lost."""
    return _SHADES[min(max(int(lost // step), 0), len(_SHADES) - 1)]


def _box(data: dict[str, Any], f: Figures | None, step: int) -> dict[str, Any]:
    fill, stroke = _SILENT if f is None or f.bits is None else shade(f.precision - f.bits, step)
    head = {"placeholder": data["name"], "output": "result"}.get(data["op"]) or _short(data["operator"])
    said = "" if f is None else "no evidence" if f.bits is None else f"{f.bits:.1f} bits"
    facts = [f"{key}: {data[key]}" for key in ("operator", "path", "source", "code", "type", "rounding") if data[key]]
    whole = f"{f.place.name}: " if f is not None and f.place.kind == "layer" else ""
    lines = [head, f"{whole}{said}" if said else data["path"] or data["type"]]
    return {
        "lines": lines,
        "title": "\n".join(
            [*facts, *([f"worst element: {f.worst:.1f} bits"] if f is not None and f.worst is not None else [])]
        ),
        "input": data["op"] == "placeholder",
        "fill": fill,
        "stroke": stroke,
        "stripe": "",
    }


def _short(operator: str) -> str:
    return operator.removeprefix("aten.").removesuffix(".default")


def _legend(step: int, title: str, columns: int) -> Legend:
    entries = [(f"{i * step} to {(i + 1) * step} bits lost", *colours) for i, colours in enumerate(_SHADES[:-1])]
    most = (f"more than {step * len(entries)} lost", *_SHADES[-1])
    return Legend(title, (*entries, most, ("not looked at, or no evidence", *_SILENT)), columns)
