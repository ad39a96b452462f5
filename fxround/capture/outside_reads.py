"""Prepares tensors that a graph reads from outside: neither state nor arguments, but attributes, globals, closures.

Nothing is noted for guards here, unlike in ``readings``.

AOTAutograd sees their values where it sees wrapped tensors for everything else. A change in place of such a tensor is
therefore no part of a graph, and one of a tensor that is made of them alone (``self.edges.new_zeros(n, 3)``, of which
columns are written) would stay a change in place in the graph.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx

from fxround.capture.guards import spelled
from fxround.capture.refusals import LeftToPython
from fxround.graph.source_lines import source_line


def wrap_reads(model: torch.nn.Module, graph: fx.GraphModule, sources: Collection[str]) -> None:
    """Make copies of the tensors from outside, which AOTAutograd wraps, if the graph changes any tensor in place.

    sources: of these tensors, as Dynamo spells them. Raises LeftToPython if one of them is changed.
    """
    if not sources or not any(_is_changed(node) for node in graph.graph.nodes):
        return
    read = [node for node in graph.graph.find_nodes(op="placeholder") if _source(node) in sources]
    changed = [(spelled(_source(node)), "Tensor", _line(node)) for node in read if _is_changed(node)]
    if changed:
        raise LeftToPython(model, changed)
    for node in read:
        with graph.graph.inserting_after(graph.graph.find_nodes(op="placeholder")[-1]):
            copy = graph.graph.call_function(torch.ops.aten.lift_fresh_copy.default, (node,))
        copy.meta = {"example_value": node.meta["example_value"]}
        node.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)
    graph.recompile()


def _source(node: fx.Node) -> str:
    return str(getattr(getattr(node, "_dynamo_source", None), "name", ""))


def _is_changed(node: fx.Node) -> bool:
    """Whether Dynamo has seen a change in place of a tensor, or of a view of it."""
    value: Any = node.meta.get("example_value")
    return isinstance(value, Tensor) and not value.is_inference() and value._version > 0


def _line(node: fx.Node) -> str:
    """Return the line of the first operation that writes to a tensor, or to a view of it."""
    return next((": ".join(source_line(t)) for user in node.users if (t := user.meta.get("stack_trace"))), "")
