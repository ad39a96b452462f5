"""Colours and texts of the operations of a graph by one property, which the SVG drawing and the HTML page show."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import networkx as nx

STATUS_COLOURS: Final = {
    "rounded": ("#e6f5ee", "#2b8a63"),
    "exact": ("#f1f3f5", "#868e96"),
    "native": ("#fdebd3", "#d9822b"),
    "input": ("#e7effb", "#3b6fb6"),
    "output": ("#e7effb", "#3b6fb6"),
}
_STRIPES: Final = ("#2b8a63", "#7048e8", "#c2255c", "#1c7ed6", "#e67700", "#0b7285", "#5c940d", "#495057")
# From little to much, of what a user wants little of: fill and border.
SHADES: Final = (
    ("#e6f4ea", "#2b8a3e"),
    ("#f1f8d9", "#74a312"),
    ("#fff3bf", "#e6a700"),
    ("#ffe0b8", "#e8590c"),
    ("#ffd0cc", "#c92a2a"),
)
# Of a node of which the property is not known.
UNKNOWN: Final = ("#f1f3f5", "#adb5bd")
_FACTS: Final = ("operator", "path", "module_type", "source", "code", "type", "rounding", "accumulate")


@dataclass(frozen=True)
class Mark:
    """How a node is shown: fill and border, a text below its name, (name, text) pairs, and the colour of a stripe."""

    fill: str
    stroke: str
    said: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    stripe: str = ""


class Colouring(ABC):
    """A property by which nodes and modules are coloured.

    ``name`` says it in a menu, ``title`` in a heading; ``entries`` are the legend's labels, fills and borders.
    """

    name: ClassVar[str]
    title: str
    entries: tuple[tuple[str, str, str], ...]

    @abstractmethod
    def of_node(self, node: str, data: Mapping[str, Any]) -> Mark:
        """Return the mark of a node. data: its attributes, as in ``graph_views.to_networkx``."""

    @abstractmethod
    def of_module(self, path: str | None, members: Mapping[str, Mapping[str, Any]]) -> Mark:
        """Return the mark of several operations. path: of the module that they are; None for several."""


class ByPolicy(Colouring):
    """Colours by what was done with a value; each rounding has a stripe of its own."""

    name = "policy"
    title = "What the policy rounds, and how"

    def __init__(self, graph: nx.DiGraph) -> None:
        data = [data for _, data in graph.nodes(data=True)]
        roundings = Counter(d["rounding"] for d in data if d["status"] == "rounded")
        self._stripes = {
            text: _STRIPES[min(i, len(_STRIPES) - 1)] for i, (text, _) in enumerate(roundings.most_common())
        }
        statuses = Counter(d["status"] for d in data)
        entries = [(f"{s} ({statuses[s]})", *STATUS_COLOURS[s]) for s in ("rounded", "exact", "native") if statuses[s]]
        entries += [(f"{text} ({roundings[text]})", colour, colour) for text, colour in self._stripes.items()]
        self.entries = tuple(entries)

    def of_node(self, node: str, data: Mapping[str, Any]) -> Mark:
        """Return the colours of the node's status."""
        status = {"placeholder": "input", "output": "output"}.get(data["op"], data["status"])
        stripe = self._stripes[data["rounding"]] if status == "rounded" else ""
        return Mark(*STATUS_COLOURS[status], stripe=stripe)

    def of_module(self, path: str | None, members: Mapping[str, Mapping[str, Any]]) -> Mark:
        """Return the colours of "native" if a member is native, of "rounded" if one is rounded, else of "exact"."""
        statuses = Counter(data["status"] for data in members.values())
        status = next(s for s in ("native", "rounded", "exact") if statuses[s] or s == "exact")
        stripes = {self._stripes[d["rounding"]] for d in members.values() if d["status"] == "rounded"}
        said = ", ".join(f"{statuses[s]} {s}" for s in ("rounded", "exact", "native") if statuses[s])
        return Mark(*STATUS_COLOURS[status], said, stripe=stripes.pop() if len(stripes) == 1 else "")


def heading(data: Mapping[str, Any]) -> str:
    """Return the short name of an operation, the name of an input, or "result"."""
    short: str = data["operator"].removeprefix("aten.").removesuffix(".default")
    named: dict[str, str] = {"placeholder": data["name"], "output": "result"}
    return named.get(data["op"], short)


def style(graph: nx.DiGraph, colouring: Colouring) -> None:
    """Give the nodes of a graph the attributes that ``svg`` draws."""
    for node, data in graph.nodes(data=True):
        mark = colouring.of_node(node, data)
        calls = data["op"] == "call_function"
        facts = [(key, data[key]) for key in _FACTS if data[key]] if calls else [(heading(data), data["type"])]
        data.update(
            lines=[heading(data), mark.said or (data["path"] or "(root)" if calls else data["type"])],
            title="\n".join(f"{key}: {text}" for key, text in (*facts, *mark.facts)),
            input=data["op"] == "placeholder",
            fill=mark.fill,
            stroke=mark.stroke,
            stripe=mark.stripe,
        )
