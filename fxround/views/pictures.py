"""Pictures of a graph: an SVG drawing, which suits small ones, a page for graphs of any size, Model Explorer's JSON."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

import networkx as nx

from fxround.atomic_files import write_file
from fxround.errors import shown, type_of
from fxround.graph.site import placed
from fxround.views.colouring import ByPolicy, Colouring, style
from fxround.views.graph_page import graph_page
from fxround.views.model_explorer import model_explorer_graph
from fxround.views.summaries import SILENT
from fxround.views.svg import Legend, svg

# An SVG drawing of more nodes is longer than two screens.
_SMALL: Final = 40
_FRAME: Final = "width:100%;height:46em;border:1px solid #adb5bd;border-radius:7px"


def write_picture(path: str | Path, graph: nx.DiGraph, colourings: Sequence[Colouring], title: str) -> Path:
    """Write a picture of a graph of ``to_networkx``, as SVG, HTML or JSON by the suffix of the path; returns the path.

    colourings: what a reader of the page can choose; the first one colours the drawing. Raises ValueError for a path
    with another suffix.
    """
    suffix = Path(path).suffix
    if suffix == ".svg":
        return write_file(path, coloured(drawn(graph), colourings[0], title=title))
    if suffix == ".html":
        return write_file(path, graph_page(graph, drawn(graph), colourings, title))
    if suffix == ".json":
        return write_file(path, model_explorer_graph(drawn(graph), colourings[0], title))
    raise ValueError(f"draw: expected a path that ends in .svg, .html or .json, got {shown(str(path))}")


def embedded(graph: nx.DiGraph, colourings: Sequence[Colouring], title: str) -> str:
    """Return a picture as a part of an HTML document: a small graph as SVG, another one as a page in a frame."""
    visible = drawn(graph)
    if len(visible) <= _SMALL:
        return coloured(visible, colourings[0], title=title)
    page = graph_page(graph, visible, colourings, title)
    return f'<iframe title="{escape(title)}" style="{_FRAME}" srcdoc="{escape(page)}"></iframe>'


def coloured(graph: nx.DiGraph, colouring: Colouring, *, title: str = "", columns: int = 3) -> str:
    """Return the SVG text of a graph that ``drawn`` returned; its nodes get the attributes that ``svg`` reads."""
    style(graph, colouring)
    return svg(graph, Legend(title or colouring.title, colouring.entries, columns))


def drawn(graph: nx.DiGraph) -> nx.DiGraph:
    """Return arithmetic, arguments and results; data movement becomes edges, sizes and parameters are left out."""
    visible = graph.copy()
    for name, data in graph.nodes(data=True):
        argument = data["name"].startswith("argument")
        if (data["op"] in ("get_attr", "placeholder") and not argument) or not data["tensor"]:
            visible.remove_node(name)
        elif data["status"] in SILENT:
            visible.add_edges_from((a, b) for a in visible.predecessors(name) for b in visible.successors(name))
            visible.remove_node(name)
    visible.remove_nodes_from([name for name in list(visible) if visible.degree(name) == 0 and len(visible) > 1])
    return visible


def colourings_of(graph: nx.DiGraph, report: Any) -> list[Colouring]:
    """Return the colourings by a report, or by several, and by the policy.

    Raises TypeError for what is no report with a graph, and ValueError for a report of another graph.
    """
    reports = () if report is None else tuple(report) if isinstance(report, list | tuple) else (report,)
    for each in reports:
        if not hasattr(each, "colouring"):
            raise TypeError(
                f"report is {type_of(each)}; expected a VariabilityReport, an AttributionReport, or several"
            )
        require_same(graph, each.graph)
    return [*(each.colouring() for each in reports), ByPolicy(drawn(graph))]


def require_same(graph: nx.DiGraph, reported: nx.DiGraph | None) -> None:
    """Raise ValueError unless each rounded operation of a report's graph is an operation of ``graph`` as well."""
    if reported is None:
        raise ValueError("the report has no graph: the study ended before its first sample")
    for node, data in reported.nodes(data=True):
        there = graph.nodes.get(node, {})
        if data["status"] == "rounded" and any(there.get(key) != data[key] for key in ("operator", "path")):
            raise ValueError(
                f"the report is of another graph: its {node} ({placed(data['operator'], data['path'], '', '')}) is not "
                'in this one. Draw the graph of the report: report.draw("graph.html")'
            )
