"""Sizes: the argument shapes for which a captured graph is right.

Tracing names the sizes that may change by symbols and records every condition on them that it met. ``Sizes`` keeps
these assumptions. A call whose sizes do not satisfy every expression and condition is captured again: for example,
``sizes.admit([(5, 3)])`` is False if the trace assumed an even batch.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import fx


@dataclass(frozen=True)
class Sizes:
    """The sizes for which a graph is right: one expression per dimension, and the conditions met while tracing."""

    dimensions: tuple[tuple[Any, ...] | None, ...]
    conditions: tuple[Any, ...] = ()

    def admit(self, shapes: Sequence[tuple[int, ...] | None]) -> bool:
        """Whether arguments of these shapes may run the graph (None: not a tensor).

        A size that has a symbol is not 0: PyTorch answers ``s == 0`` by the sign of the symbol, without a condition.
        """
        values: dict[Any, int] = {}
        pairs = self._paired(shapes)
        for expression, size in pairs:
            if getattr(expression, "is_symbol", False) and values.setdefault(expression, size) != size:
                return False
            if size == 0 and getattr(expression, "is_positive", False):
                return False
        if any(size != (e if isinstance(e, int) else e.xreplace(values)) for e, size in pairs):
            return False
        return not any(condition.xreplace(values) == False for condition in self.conditions)  # noqa: E712 (sympy)

    def measured(self, shape: Sequence[Any], shapes: Sequence[tuple[int, ...] | None]) -> tuple[Any, ...]:
        """Return a traced shape in the numbers of these arguments; a size that they do not determine stays a symbol."""
        values = {expression: size for expression, size in self._paired(shapes) if not isinstance(expression, int)}
        sizes = [n.node.expr.xreplace(values) if isinstance(n, torch.SymInt) else n for n in shape]
        return tuple(int(n) if _is_number(n) else n for n in sizes)

    def _paired(self, shapes: Sequence[tuple[int, ...] | None]) -> list[tuple[Any, int]]:
        """Return each dimension of the arguments with its size."""
        return [
            (expression, size)
            for dimensions, shape in zip(self.dimensions, shapes, strict=True)
            if dimensions is not None and shape is not None
            for expression, size in zip(dimensions, shape, strict=True)
        ]

    def differing(self, shapes: Sequence[tuple[int, ...] | None]) -> Iterator[tuple[int, int]]:
        """Yield (argument, dimension) of the sizes that have a symbol, or another number than in these shapes."""
        for i, (dimensions, shape) in enumerate(zip(self.dimensions, shapes, strict=True)):
            for d, (expression, size) in enumerate(zip(dimensions or (), shape or (), strict=False)):
                if not isinstance(expression, int) or expression != size:
                    yield i, d


def sizes_of(values: Sequence[Any]) -> Sizes:
    """Return the dimensions as expressions in the remaining symbols, and the guards in the same symbols."""
    dimensions: list[tuple[Any, ...] | None] = []
    environment: Any = None
    for value in values:
        if not isinstance(value, torch.Tensor):
            dimensions.append(None)
            continue
        sizes: list[Any] = list(value.shape)
        dimensions.append(tuple(map(_expression, sizes)))
        environment = next((s.node.shape_env for s in sizes if isinstance(s, torch.SymInt)), environment)
    if environment is None:
        return Sizes(tuple(dimensions))
    conditions = [environment.replace(guard.expr) for guard in environment.guards]
    return Sizes(tuple(dimensions), tuple(c for c in dict.fromkeys(conditions) if c != True))  # noqa: E712 (sympy)


def _expression(size: Any) -> Any:
    """Return a size as an expression. An empty example is right for no other size, also where nothing reads it."""
    if not isinstance(size, torch.SymInt):
        return size
    return 0 if size.node.hint == 0 else size.node.expr


def ask_arguments_for_sizes(graph: fx.GraphModule) -> None:
    """Take sizes from another input where the trace took them from a tangent, and from a shape if from a layout.

    Computing results must not need tangents. A trace reads a size from the first place that has its expression, which
    may be a stride or the offset of a view: those of a tensor that a kernel made, or of a view that was passed, are
    other numbers.
    """
    aten = torch.ops.aten
    known: dict[str, tuple[fx.Node, int]] = {}
    earlier: dict[str, tuple[fx.Node, int]] = {}
    for node in list(graph.graph.nodes):
        if isinstance(node.meta.get("val"), torch.Tensor):
            for dim, size in enumerate(node.meta["val"].shape):
                earlier.setdefault(str(size), (node, dim))
        elif node.target in (aten.sym_stride.int, aten.sym_storage_offset.default):
            _ask_elsewhere(graph, node, [node.meta["val"]], earlier)
            continue
        if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor):
            if not _is_tangent(node):
                for dim, size in enumerate(node.meta["val"].shape):
                    known.setdefault(str(size), (node, dim))
        elif node.target in (aten.sym_size.int, aten.sym_numel.default) and node.args[0].op == "placeholder":
            shape = node.args[0].meta["val"].shape
            sizes = [shape[node.args[1]]] if node.target is aten.sym_size.int else list(shape)
            if _is_tangent(node.args[0]):
                _ask_elsewhere(graph, node, sizes, known)


def _is_tangent(node: Any) -> bool:
    """Whether an input is the gradient of a result, or what this process has of one."""
    desc = node.meta["desc"]
    return "TangentAOTInput" in (type(desc).__name__, type(getattr(desc, "base", None)).__name__)


def _ask_elsewhere(
    graph: fx.GraphModule, node: fx.Node, sizes: list[Any], known: dict[str, tuple[fx.Node, int]]
) -> None:
    """Replace a product of sizes by one that is computed from the sizes of known nodes, if they determine all."""
    expressions = [size.node.expr if isinstance(size, torch.SymInt) else size for size in sizes]
    if not all(_is_known(expression, known) for expression in expressions):
        return

    def computed(function: Any, a: Any, b: Any) -> Any:
        if isinstance(a, int) and isinstance(b, int):
            return function(a, b)
        made = graph.graph.call_function(function, (a, b))
        made.meta = {**node.meta, "val": function(_number(a), _number(b))}
        return made

    def written(expression: Any) -> Any:
        if _is_number(expression):
            return int(expression)
        if str(expression) in known:
            source, dim = known[str(expression)]
            made = graph.graph.call_function(torch.ops.aten.sym_size.int, (source, dim))
            made.meta = {**node.meta, "val": source.meta["val"].shape[dim]}
            return made
        return reduce(partial(computed, _COMPUTED[type(expression).__name__]), map(written, expression.args))

    with graph.graph.inserting_before(node):
        total = reduce(partial(computed, operator.mul), map(written, expressions), 1)
    if isinstance(total, fx.Node):
        node.replace_all_uses_with(total)
        graph.graph.erase_node(node)


# How sizes are computed from others: a batch of videos has as many images as videos times frames.
_COMPUTED: Final = MappingProxyType({"Mul": operator.mul, "Add": operator.add, "FloorDiv": operator.floordiv})


def _is_known(expression: Any, known: Mapping[str, Any]) -> bool:
    """Whether an expression is a number, a known size, or is computed from such."""
    if _is_number(expression) or str(expression) in known:
        return True
    return type(expression).__name__ in _COMPUTED and all(_is_known(part, known) for part in expression.args)


def _is_number(expression: Any) -> bool:
    return isinstance(expression, int) or bool(expression.is_Integer)


def _number(size: Any) -> Any:
    return size.meta["val"] if isinstance(size, fx.Node) else size
