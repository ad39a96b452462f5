"""Layered drawings of directed acyclic graphs, as SVG text.

The method is Sugiyama's in its simplest form: layers by the longest path; an edge over several layers passes through a
dummy node in each, so that it avoids boxes; crossings are reduced by barycentre sweeps; x is the least-squares position
under the order of a layer (isotonic regression). It reads a networkx graph, needs no graphviz, browser or file, and
gives the same drawing for the same graph. Source: Sugiyama, Tagawa, Toda, IEEE Trans. SMC 11 (1981).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from statistics import fmean
from typing import Any, Final

import networkx as nx

WIDTH: Final = 176
HEIGHT: Final = 46
GAP: Final = 26
DUMMY: Final = 14
PITCH: Final = HEIGHT + 30
MARGIN: Final = 28
COLUMN: Final = 236
SWEEPS: Final = 12

_STYLE: Final = (
    "text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;fill:#212529}"
    ".a{font-size:12.5px;font-weight:600}.b{font-size:10.5px;fill:#5c636a}.t{font-size:16px;font-weight:600}"
    ".l{font-size:12px}.e{fill:none;stroke:#adb5bd;stroke-width:1.3}"
    "g.n:hover rect.box{stroke-width:2.6}"
)


@dataclass(frozen=True)
class _Dummy:
    """The point at which the edges that leave ``source`` pass through a layer."""

    source: Hashable
    layer: int


@dataclass(frozen=True)
class Legend:
    """A heading, and labelled colours, (label, fill, stroke), in a number of columns."""

    title: str
    entries: tuple[tuple[str, str, str], ...] = ()
    columns: int = 3


def svg(graph: nx.DiGraph, legend: Legend) -> str:
    """Return the SVG text of an acyclic graph.

    Node attributes: ``lines`` (texts, the first one bold), ``title`` (tooltip), ``fill``, ``stroke``, ``stripe``
    (colour of the left edge, or ""), ``input`` (nodes that depend on it are drawn as early as possible, the others as
    late). Raises ValueError if the graph has a cycle.
    """
    if not nx.is_directed_acyclic_graph(graph):
        raise ValueError("the graph has a cycle; a layered drawing needs an acyclic one")
    layers, hops = _layers(graph)
    x = _positions(_ordered(layers, hops), hops)
    row = {node: i for i, layer in enumerate(layers) for node in layer}
    left = min(x.values(), default=0.0) - WIDTH / 2
    header = 64 + 22 * _legend_rows(legend)
    place = {node: (x[node] - left + MARGIN, row[node] * PITCH + header) for node in x}
    width = max([COLUMN * legend.columns + 52.0, *(px + WIDTH / 2 + MARGIN for px, _ in place.values())])
    height = header + len(layers) * PITCH
    edges = "".join(_edge(place[a], place[b], isinstance(b, _Dummy)) for a, b in hops.edges)
    boxes = "".join(_box(place[node], graph.nodes[node]) for node in graph.nodes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}"><style>{_STYLE}</style>'
        f'<rect width="100%" height="100%" fill="#ffffff"/>{_legend(legend)}{edges}{boxes}</svg>\n'
    )


def _layers(graph: nx.DiGraph) -> tuple[list[list[Hashable]], nx.DiGraph]:
    """Return nodes and dummies by layer, and the graph of hops from one layer to the next."""
    level = {node: i for i, nodes in enumerate(nx.topological_generations(graph)) for node in nodes}
    inputs = {node for node, data in graph.nodes(data=True) if data.get("input")}
    dependent = inputs.union(*(nx.descendants(graph, node) for node in inputs))
    # A node that depends on no input (the scale of a batch norm) is drawn just above its first use, not at the top.
    for node in reversed(list(nx.topological_sort(graph))):
        if graph.out_degree(node) and (node not in dependent or graph.in_degree(node) == 0):
            level[node] = min(level[after] for after in graph.successors(node)) - 1
    layers: list[list[Hashable]] = [[] for _ in range(max(level.values(), default=-1) + 1)]
    hops = nx.DiGraph()
    for node in graph.nodes:
        layers[level[node]].append(node)
        hops.add_node(node)
    for source in graph.nodes:
        last = max((level[after] for after in graph.successors(source)), default=0)
        chain = [source, *(_Dummy(source, i) for i in range(level[source] + 1, last))]
        for dummy in chain[1:]:
            layers[dummy.layer].append(dummy)
        nx.add_path(hops, chain)
        hops.add_edges_from((chain[level[after] - level[source] - 1], after) for after in graph.successors(source))
    return layers, hops


def _ordered(layers: list[list[Hashable]], hops: nx.DiGraph) -> list[list[Hashable]]:
    """Sort each layer by the mean position of its neighbours, down and up in turn, to reduce crossings."""
    rank = {node: float(i) for layer in layers for i, node in enumerate(layer)}
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for layer in layers if down else reversed(layers):
            key = {n: _mean(rank, hops.predecessors(n) if down else hops.successors(n), rank[n]) for n in layer}
            layer.sort(key=key.__getitem__)
            rank |= {node: float(i) for i, node in enumerate(layer)}
    return layers


def _positions(layers: list[list[Hashable]], hops: nx.DiGraph) -> dict[Hashable, float]:
    """Return x of every node: near its neighbours, in the order of its layer, with room for its box."""
    x: dict[Hashable, float] = {}
    for layer in layers:
        offsets = _offsets(layer)
        x |= {node: offset - offsets[-1] / 2 for node, offset in zip(layer, offsets, strict=True)}
    for sweep in range(4 * SWEEPS):
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            wanted = [_pulled(x, n, (*hops.predecessors(n), *hops.successors(n))) for n in layer]
            offsets = _offsets(layer)
            fitted = _isotonic([w - o for w, o in zip(wanted, offsets, strict=True)])
            x |= {node: f + o for node, f, o in zip(layer, fitted, offsets, strict=True)}
    return x


def _offsets(layer: Sequence[Hashable]) -> list[float]:
    """Return the least distances of a layer's nodes from its first node."""
    sizes = [DUMMY if isinstance(node, _Dummy) else WIDTH for node in layer]
    steps = [(a + b) / 2 + GAP for a, b in pairwise(sizes)]
    return [sum(steps[:i]) for i in range(len(sizes))]


def _isotonic(values: Sequence[float]) -> list[float]:
    """Return the nearest non-decreasing sequence, by least squares (pool adjacent violators)."""
    pools: list[list[float]] = []
    for value in values:
        pools.append([value])
        while len(pools) > 1 and fmean(pools[-2]) > fmean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    return [mean for pool in pools for mean in [fmean(pool)] * len(pool)]


def _pulled(x: Mapping[Hashable, float], node: Hashable, neighbours: Sequence[Hashable]) -> float:
    """Return the mean x of the neighbours; hops of a long edge weigh more, which straightens it (Gansner 1993)."""
    dummy = isinstance(node, _Dummy)
    weights = [(1, 2, 8)[dummy + isinstance(other, _Dummy)] for other in neighbours]
    total = sum(weights)
    return sum(w * x[other] for w, other in zip(weights, neighbours, strict=True)) / total if total else x[node]


def _mean(of: Mapping[Hashable, float], nodes: Iterable[Hashable], otherwise: float) -> float:
    values = [of[node] for node in nodes]
    return fmean(values) if values else otherwise


def _edge(start: tuple[float, float], end: tuple[float, float], onward: bool) -> str:
    """Draw one hop; it enters a dummy in the middle of its layer and a node at its top."""
    (x0, y0), (x1, y1) = (start[0], start[1] + HEIGHT), end
    through = f" V{y1 + HEIGHT:.1f}" if onward else ""
    middle = (y0 + y1) / 2
    curve = f"M{x0:.1f} {y0:.1f} C{x0:.1f} {middle:.1f} {x1:.1f} {middle:.1f} {x1:.1f} {y1:.1f}{through}"
    return f'<path class="e" d="{curve}"/>'


def _box(at: tuple[float, float], style: Mapping[str, Any]) -> str:
    x, y = at[0] - WIDTH / 2, at[1]
    texts = "".join(_text(line, x + 14, y + 19 + 15 * i, heading=i == 0) for i, line in enumerate(style["lines"]))
    bar = f'x="{x + 4:.1f}" y="{y + 5}" width="4" height="{HEIGHT - 10}" rx="2"'
    mark = f'<rect {bar} fill="{style["stripe"]}"/>' if style.get("stripe") else ""
    shape = f'x="{x:.1f}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="7"'
    colours = f'fill="{style["fill"]}" stroke="{style["stroke"]}" stroke-width="1.4"'
    title = f"<title>{escape(style['title'])}</title>"
    return f'<g class="n">{title}<rect class="box" {shape} {colours}/>{mark}{texts}</g>'


def _text(line: str, x: float, y: float, *, heading: bool) -> str:
    kind, length = ("a", 19) if heading else ("b", 27)
    return f'<text class="{kind}" x="{x:.1f}" y="{y}">{escape(_cut(line, length))}</text>'


def _cut(text: str, length: int) -> str:
    """Return the text; the middle of a text longer than ``length`` is left out."""
    return text if len(text) <= length else f"{text[: length // 2 - 1]}…{text[-(length - length // 2) :]}"


def _legend_rows(legend: Legend) -> int:
    return -(-len(legend.entries) // legend.columns)


def _legend(legend: Legend) -> str:
    marks = []
    for i, (label, fill, stroke) in enumerate(legend.entries):
        x, y = MARGIN + COLUMN * (i % legend.columns), 46 + 22 * (i // legend.columns)
        marks.append(
            f'<rect x="{x}" y="{y}" width="14" height="14" rx="3" fill="{fill}" stroke="{stroke}" stroke-width="1.4"/>'
            f'<text class="l" x="{x + 21}" y="{y + 11}">{escape(label)}</text>'
        )
    return f'<text class="t" x="{MARGIN}" y="32">{escape(legend.title)}</text>{"".join(marks)}'
