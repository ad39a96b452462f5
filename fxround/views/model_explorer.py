"""A graph in the JSON format of Google's Model Explorer, whose layers are the modules of the model.

The format is that of ``Graph`` and ``GraphNode`` in ``model_explorer.graph_builder``, of the package
``ai-edge-model-explorer``, which also says what the viewer shows of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

import networkx as nx

from fxround.views.colouring import Colouring, heading

# Attributes of a node that its panel shows; the type of its result is shown beside its edges as well.
_FACTS: Final = ("rounding", "accumulate", "status", "reason", "kind", "role", "direction", "source", "code")


def model_explorer_graph(shown: nx.DiGraph, colouring: Colouring, title: str) -> str:
    """Return the JSON text of a graph, which ``model-explorer graph.json`` opens.

    shown: the nodes that are drawn, of ``pictures.drawn``. colouring: of the nodes, and what it says of them.
    """
    nodes = [_node(shown, name, colouring) for name in shown]
    modules = {
        path.replace(".", "/"): {"class": kind}
        for data in dict(shown.nodes(data=True)).values()
        for path, kind in _modules(data)
    }
    graph = {"id": title, "nodes": nodes, "groupNodeAttributes": {"": {"colours": colouring.title}, **modules}}
    return json.dumps({"label": title, "graphs": [graph]}, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def _node(shown: nx.DiGraph, name: str, colouring: Colouring) -> dict[str, Any]:
    data = shown.nodes[name]
    mark = colouring.of_node(name, data)
    facts = {key: data[key] for key in _FACTS if data[key]} | dict(mark.facts)
    return {
        "id": name,
        "label": heading(data),
        "namespace": data["path"].replace(".", "/"),
        "attrs": _pairs(facts),
        "incomingEdges": [
            {"sourceNodeId": source, "sourceNodeOutputId": "0", "targetNodeInputId": str(i)}
            for i, source in enumerate(shown.predecessors(name))
        ],
        "outputsMetadata": [{"id": "0", "attrs": _pairs({"tensor_shape": data["type"]})}],
        "style": {"backgroundColor": mark.fill, "borderColor": mark.stroke},
    }


def _pairs(facts: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": text} for key, text in facts.items()]


def _modules(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the path and the class of the modules around a node."""
    for module in filter(None, data["modules"].split(", ")):
        path, _, kind = module.partition(": ")
        if path:
            yield path, kind
