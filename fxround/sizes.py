"""Sizes: for which arguments a captured graph is right.

What is true here. Tracing names the sizes that may change by symbols, and notes every condition on them that it met.
What it assumed is kept, and asked again before another call may use the graph.

Why it is safe. A call whose sizes do not satisfy every expression and condition is captured anew.

    before   a graph traced with a batch of 4 runs with 5, and a branch on the batch is silently wrong
    after    sizes.admit([(5, 3)])        # False where the trace assumed an even batch
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Sizes:
    """The sizes for which a graph is right: one expression a dimension, and the conditions met while tracing."""

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
    """Dimensions as expressions in the symbols that are left, and the guards in the same symbols."""
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
