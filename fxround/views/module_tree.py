"""The modules of a drawn graph as a tree, in which modules can be closed: no group of it is in a circle of edges.

A module that is called several times, with other operations in between, is a group for each call. Equal layers in a row
are one group, which counts them. A module with one operation is that operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, Literal

import networkx as nx

# So many equal layers in a row are one group.
FOLDED: Final = 3
_LAYER: Final = ("operator", "module_type", "type", "rounding", "accumulate", "status")


@dataclass(frozen=True)
class Group:
    """A call of a module, or several equal layers, in a graph.

    kind      "module", or "layers" for equal ones
    path      the path of the module; of layers, that of the first one
    label     what a reader sees: the path inside of the group around it
    children  nodes, by name, and groups, in an order in which edges lead downwards
    call      the number of the call among those of the module inside of the group around it, from 0
    """

    kind: Literal["module", "layers"]
    path: str
    label: str
    children: tuple[str | Group, ...]
    call: int = 0

    def nodes(self) -> Iterator[str]:
        """Yield the names of the nodes in the group and in its groups."""
        for child in self.children:
            if isinstance(child, Group):
                yield from child.nodes()
            else:
                yield child


def module_tree(graph: nx.DiGraph) -> Group:
    """Return the group of all nodes of a graph that ``pictures.drawn`` returned.

    Raises ``networkx.NetworkXUnfeasible`` if the graph has a cycle.
    """
    return Group(
        "module", "", "", _children(graph, list(nx.lexicographical_topological_sort(graph, _order(graph))), "")
    )


def _order(graph: nx.DiGraph) -> Any:
    return {node: i for i, node in enumerate(graph)}.__getitem__


def _children(graph: nx.DiGraph, nodes: Sequence[str], path: str) -> tuple[str | Group, ...]:
    """Return the children of the module at a path. nodes: those in it, in topological order."""
    calls: dict[str, int] = {}
    children: list[str | Group] = []
    for inside, members in _calls(graph, nodes, path):
        call = calls[inside] = calls.get(inside, -1) + 1
        if len(members) == 1 or inside == path:
            children += members
            continue
        below = _children(graph, members, inside)
        # A group of nothing but another one: a list of layers, or a module around a module.
        only = below[0] if len(below) == 1 else None
        if isinstance(only, Group):
            label = f"{_label(inside, path)}.{only.label}"
            children.append(Group(only.kind, only.path, label, only.children, max(call, only.call)))
        else:
            children.append(Group("module", inside, _label(inside, path), below, call))
    return tuple(_folded(graph, children, path))


def _calls(graph: nx.DiGraph, nodes: Sequence[str], path: str) -> list[tuple[str, list[str]]]:
    """Return the calls of the modules directly inside a module, with their nodes; a node of its own is a call.

    A node joins the last call of its module unless that closes a circle. ``before`` has, for each call, the calls from
    which paths lead to it, as bits.
    """
    members: list[tuple[str, list[str]]] = []
    before: list[int] = []
    call_of: dict[str, int] = {}
    last: dict[str, int] = {}
    for node in nodes:
        inside = _inside(graph.nodes[node]["path"], path)
        sources = {call_of[used] for used in graph.predecessors(node) if used in call_of}
        call = last.get(inside, -1) if inside != path else -1
        if call < 0 or any(source != call and before[source] >> call & 1 for source in sources):
            call = last[inside] = len(members)
            members.append((inside, []))
            before.append(0)
        call_of[node] = call
        members[call][1].append(node)
        reaching = 0
        for source in sources - {call}:
            reaching |= before[source] | 1 << source
        if reaching & ~before[call]:
            before[call] |= reaching
            before = [b | before[call] if b >> call & 1 else b for b in before]
    calls = nx.DiGraph()
    calls.add_nodes_from(range(len(members)))
    calls.add_edges_from(
        (call_of[used], call_of[node]) for node in nodes for used in graph.predecessors(node) if used in call_of
    )
    calls.remove_edges_from(nx.selfloop_edges(calls))
    return [members[call] for call in nx.lexicographical_topological_sort(calls)]


def _inside(path: str, around: str) -> str:
    """Return the path of the module directly inside ``around`` that contains the module at ``path``."""
    prefix = f"{around}." if around else ""
    if path == around or not path.startswith(prefix):
        return around
    return prefix + path.removeprefix(prefix).partition(".")[0]


def _label(path: str, around: str) -> str:
    """Return the path of a module inside of the module ``around``; "" for that itself."""
    return f"{path}.".removeprefix(f"{around}." if around else "").removesuffix(".")


def _folded(graph: nx.DiGraph, children: Sequence[str | Group], path: str) -> Iterator[str | Group]:
    """Yield the children of the module at a path with one group for equal layers in a row."""
    forms = [_form(graph, child) if isinstance(child, Group) else child for child in children]
    for _, run in groupby(zip(forms, children, strict=True), key=lambda pair: pair[0]):
        layers = [child for _, child in run]
        if len(layers) < FOLDED or not all(isinstance(layer, Group) for layer in layers):
            yield from layers
            continue
        first, last = layers[0], layers[-1]
        assert isinstance(first, Group) and isinstance(last, Group)
        same = first.path == last.path
        label = f"{first.label}, {len(layers)} calls" if same else f"{first.label} to {_label(last.path, path)}"
        yield Group("layers", first.path, label, tuple(layers))


def _form(graph: nx.DiGraph, group: Group) -> tuple[Any, ...]:
    """Return what is the same for equal layers: their operations, and where the operands of these come from."""
    nodes = list(group.nodes())
    places = {node: i for i, node in enumerate(nodes)}
    outside: dict[str, int] = {}
    form = []
    for node in nodes:
        data: Mapping[str, Any] = graph.nodes[node]
        sources = [
            (True, places[used]) if used in places else (False, outside.setdefault(used, len(outside)))
            for used in graph.predecessors(node)
        ]
        form.append((_label(data["path"], group.path), *(data[key] for key in _LAYER), frozenset(sources)))
    return tuple(form)
