"""Sizes: the argument shapes for which a captured graph is right.

Tracing names the sizes that may change by symbols and records every condition on them that it met. ``Sizes`` keeps
these assumptions. A call whose sizes do not satisfy every expression and condition is captured again: for example,
``sizes.admit([(5, 3)])`` is False if the trace assumed an even batch.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx


@dataclass(frozen=True)
class Sizes:
    """The sizes for which a graph is right: one expression per dimension, and the conditions met while tracing."""

    dimensions: tuple[tuple[Any, ...] | None, ...]
    conditions: tuple[Any, ...] = ()

    def admit(self, shapes: Sequence[tuple[int, ...] | None]) -> bool:
        """Whether arguments of these shapes may run the graph (None: not a tensor)."""
        values: dict[Any, int] = {}
        pairs = [
            (expression, size)
            for dimensions, shape in zip(self.dimensions, shapes, strict=True)
            if dimensions is not None and shape is not None
            for expression, size in zip(dimensions, shape, strict=True)
        ]
        for expression, size in pairs:
            if getattr(expression, "is_symbol", False) and values.setdefault(expression, size) != size:
                return False
        if any(size != (e if isinstance(e, int) else e.xreplace(values)) for e, size in pairs):
            return False
        return not any(condition.xreplace(values) == False for condition in self.conditions)  # noqa: E712 (sympy)


def sizes_of(values: Sequence[Any]) -> Sizes:
    """Return the dimensions as expressions in the remaining symbols, and the guards in the same symbols."""
    dimensions: list[tuple[Any, ...] | None] = []
    environment: Any = None
    for value in values:
        if not isinstance(value, torch.Tensor):
            dimensions.append(None)
            continue
        sizes: list[Any] = list(value.shape)
        dimensions.append(tuple(size.node.expr if isinstance(size, torch.SymInt) else size for size in sizes))
        environment = next((s.node.shape_env for s in sizes if isinstance(s, torch.SymInt)), environment)
    if environment is None:
        return Sizes(tuple(dimensions))
    conditions = [environment.replace(guard.expr) for guard in environment.guards]
    return Sizes(tuple(dimensions), tuple(c for c in dict.fromkeys(conditions) if c != True))  # noqa: E712 (sympy)


def ask_arguments_for_sizes(graph: fx.GraphModule) -> None:
    """Take sizes from another input where the trace took them from a tangent.

    Computing results must not need tangents.
    """
    aten = torch.ops.aten
    known: dict[str, tuple[fx.Node, int]] = {}
    for node in list(graph.graph.nodes):
        if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor):
            if type(node.meta["desc"]).__name__ != "TangentAOTInput":
                for dim, size in enumerate(node.meta["val"].shape):
                    known.setdefault(str(size), (node, dim))
        elif node.target in (aten.sym_size.int, aten.sym_numel.default) and node.args[0].op == "placeholder":
            shape = node.args[0].meta["val"].shape
            sizes = [shape[node.args[1]]] if node.target is aten.sym_size.int else list(shape)
            if type(node.args[0].meta["desc"]).__name__ == "TangentAOTInput":
                _ask_elsewhere(graph, node, sizes, known)


def _ask_elsewhere(
    graph: fx.GraphModule, node: fx.Node, sizes: list[Any], known: dict[str, tuple[fx.Node, int]]
) -> None:
    """Replace a product of sizes by one of sizes of known nodes, if all of them are known."""
    if any(not isinstance(size, int) and str(size) not in known for size in sizes):
        return
    total: Any = 1
    with graph.graph.inserting_before(node):
        for size in sizes:
            factor: Any = size
            if not isinstance(size, int):
                factor = graph.graph.call_function(torch.ops.aten.sym_size.int, known[str(size)])
                factor.meta = {**node.meta, "val": size}
            if isinstance(total, int) and isinstance(factor, int):
                total = total * factor
                continue
            value = _number(total) * _number(factor)
            total = graph.graph.call_function(operator.mul, (total, factor))
            total.meta = {**node.meta, "val": value}
    if isinstance(total, fx.Node):
        node.replace_all_uses_with(total)
        graph.graph.erase_node(node)


def _number(size: Any) -> Any:
    return size.meta["val"] if isinstance(size, fx.Node) else size
