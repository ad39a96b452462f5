"""A graph of any size as one HTML file, whose modules open and close, and that needs no network and no other file.

Python decides what is shown: the module tree, texts and colours are data in the page. ``page/graph.js`` draws the
modules that are open, with the layout of dagre (``vendor/``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any, Final

import networkx as nx

from fxround.views.colouring import Colouring, heading
from fxround.views.module_tree import Group, module_tree
from fxround.views.summaries import Operation

# A name of Operation, and that of the attribute of a node.
_FACTS: Final = {f.name: "path" if f.name == "module" else f.name for f in fields(Operation) if f.name != "node"}
_MARKED: Final = ("fill", "stroke", "said", "stripe")


def graph_page(graph: nx.DiGraph, shown: nx.DiGraph, colourings: Sequence[Colouring], title: str) -> str:
    """Return the HTML document of a graph.

    graph: of ``graph_views.to_networkx``. shown: its nodes that are drawn, of ``pictures.drawn``. colourings: the
    properties that a reader can choose, the first one at the start.
    """
    style = _file("page/style.css")
    license_text = _file("vendor/dagre.LICENSE").strip()
    scripts = (f"/*! dagre\n\n{license_text}\n*/\n{_file('vendor/dagre.min.js')}", _file("page/graph.js"))
    meta = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    data = json.dumps(
        page_data(graph, shown, colourings, title), separators=(",", ":"), allow_nan=False, ensure_ascii=False
    )
    head = f"<head>{meta}<style>{style}</style></head>"
    code = "".join(f"<script>{script}</script>" for script in scripts)
    body = f"<body>{_file('page/body.html')}{embedded_json('graph', data)}{code}</body>"
    return f'<!doctype html>\n<html lang="en">{head}{body}</html>\n'


def page_data(graph: nx.DiGraph, shown: nx.DiGraph, colourings: Sequence[Colouring], title: str) -> dict[str, Any]:
    """Return what the page is made of as plain data.

    nodes       name, label, value (format and shape of the result), facts (as in ``summary()``), and the parameters
                that are read
    edges       pairs of positions in nodes
    groups      the module tree, the group of all nodes first: label, module, class, kind, number of operations, and the
                children, {"node": i} or {"group": i}
    colourings  name, title, legend, and a mark for each node and each group
    """
    tree = module_tree(shown)
    places = {node: i for i, node in enumerate(shown)}
    groups = list(_walk(tree))
    numbers = {id(group): i for i, group in enumerate(groups)}
    classes = _classes(shown)
    members = [{n: shown.nodes[n] for n in g.nodes() if shown.nodes[n]["op"] == "call_function"} for g in groups]
    return {
        "title": title,
        "nodes": [_node(graph, shown, node) for node in shown],
        "edges": [[places[a], places[b]] for a, b in shown.edges],
        "groups": [
            {
                "kind": group.kind,
                "label": group.label if not group.call else f"{group.label}, call {group.call + 1}",
                "module": group.path,
                "class": classes.get(group.path, ""),
                "operations": len(inside),
                "children": [
                    {"group": numbers[id(c)]} if isinstance(c, Group) else {"node": places[c]} for c in group.children
                ],
            }
            for group, inside in zip(groups, members, strict=True)
        ],
        "colourings": [_coloured(c, shown, groups, members) for c in colourings],
    }


def embedded_json(name: str, text: str) -> str:
    """Return an element that holds JSON. In JSON, "<" is in strings alone, where an escape stands for it."""
    escaped = text.replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{escaped}</script>'


def _walk(group: Group) -> Iterator[Group]:
    yield group
    for child in group.children:
        if isinstance(child, Group):
            yield from _walk(child)


def _node(graph: nx.DiGraph, shown: nx.DiGraph, node: str) -> dict[str, Any]:
    data = shown.nodes[node]
    calls = data["op"] == "call_function"
    return {
        "name": node,
        "label": heading(data),
        "kind": "operation" if calls else "input" if data["op"] == "placeholder" else "output",
        "value": _value(data),
        "type": data["type"],
        "facts": {fact: data[key] for fact, key in _FACTS.items()} if calls else {},
        "class": data["module_type"],
        "reads": sorted(_parameters(graph, shown, node)),
    }


def _value(data: Mapping[str, Any]) -> str:
    """Return the format of a value, as far as its operation says it, with its shape."""
    dtype, bracket, shape = data["type"].partition("[")
    rounded = data["status"] == "rounded" and not data["reason"] and not dtype.startswith("(")
    return f"{data['rounding'].partition('/')[0] if rounded else dtype}{bracket}{shape}"


def _parameters(graph: nx.DiGraph, shown: nx.DiGraph, node: str) -> Iterator[str]:
    """Yield names and types of the parameters and buffers that an operation reads, directly or as a view."""
    unread, seen = [node], {node}
    while unread:
        for used in graph.predecessors(unread.pop()):
            if used in shown or used in seen:
                continue
            seen.add(used)
            unread.append(used)
            data = graph.nodes[used]
            if data["op"] in ("placeholder", "get_attr"):
                yield f"{data['name'] or used} {data['type']}"


def _classes(shown: nx.DiGraph) -> dict[str, str]:
    """Return the names of the modules' classes by their paths."""
    pairs = (entry.rpartition(": ") for _, data in shown.nodes(data=True) for entry in data["modules"].split(", "))
    return {path: kind for path, separator, kind in pairs if separator}


def _coloured(
    colouring: Colouring, shown: nx.DiGraph, groups: Sequence[Group], members: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    nodes = [colouring.of_node(node, data) for node, data in shown.nodes(data=True)]
    whole = [
        colouring.of_module(group.path if group.kind == "module" and not group.call else None, inside)
        for group, inside in zip(groups, members, strict=True)
    ]
    return {
        "name": colouring.name,
        "title": colouring.title,
        "legend": [{"label": label, "fill": fill, "stroke": stroke} for label, fill, stroke in colouring.entries],
        **{
            which: [{key: getattr(mark, key) for key in _MARKED} | {"facts": dict(mark.facts)} for mark in marks]
            for which, marks in (("nodes", nodes), ("groups", whole))
        },
    }


@cache
def _file(name: str) -> str:
    return files("fxround.views").joinpath(name).read_text(encoding="utf-8")
