"""Units: the nodes that may be merged, and the order of the merged graph."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from fxround.errors import VerificationError
from fxround.graph.grouping import Unit, in_order, merged


def graph_of(edges: dict[str, str]) -> tuple[fx.Graph, dict[str, fx.Node]]:
    """A graph of nodes by name in order, each with the names of its operands."""
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for name, read in edges.items():
        nodes[name] = graph.call_function(torch.add, tuple(nodes[r] for r in read), name=name)
    return graph, nodes


def joining(*pairs: str) -> object:
    """Join two units if the first has one node of a pair and the second has the other."""
    return lambda a, b: any(
        {p[0]} & {n.name for n in a.nodes} and {p[1]} & {n.name for n in b.nodes} for p in map(str, pairs)
    )


def test_a_path_through_a_unit_that_reaches_further_than_its_users_is_seen() -> None:
    """u depends on {w, x}, and x on a; so a must not be merged with b, which reads u."""
    graph, nodes = graph_of({"w": "", "u": "w", "a": "", "x": "wa", "b": "au"})
    units = merged(graph, joining("wx", "ab"))  # type: ignore[arg-type]
    assert units[nodes["w"]] is units[nodes["x"]]
    assert units[nodes["a"]] is not units[nodes["b"]]
    done: list[str] = []
    for unit in in_order(units):
        assert {n.name for n in unit.inputs()} <= set(done)
        done += [n.name for n in unit.nodes]
    assert sorted(done) == ["a", "b", "u", "w", "x"]


def test_units_that_depend_on_one_another_are_reported() -> None:
    _, nodes = graph_of({"a": "", "b": "a", "c": "b"})
    outer = Unit([nodes["a"], nodes["c"]], 0, 2, 2)
    units = {nodes["a"]: outer, nodes["b"]: Unit([nodes["b"]], 1, 1, 1), nodes["c"]: outer}
    with pytest.raises(VerificationError, match=r"depend on one another: .*b"):
        list(in_order(units))
