"""Copies in machine code: what fills, pads, selects by constant numbers or replaces parts of a tensor, as moved rows.

Simulations on grids are made of these operations: a boundary is a part of the grid that is replaced, or a padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx

from fxround.graph.dtypes import STORAGES
from fxround.operators.rules import CONSTANTS, argument
from fxround.runtime.cpu.plans.planner import VIEWS, NoPlan, Planner, Value
from fxround.runtime.cpu.plans.step_memory import StepMemory, memory_of

aten = torch.ops.aten
_EMPTY: Final = (
    *(aten.empty.memory_format, aten.empty_strided.default),
    *(aten.empty_like.default, aten.empty_permuted.default),
)
# What is computed from constant numbers is constant: the numbers by which PyTorch selects in a roll, and the mask by
# which it replaces a row.
_OF_NUMBERS: Final = VIEWS | {
    *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.fmod.Scalar, aten.remainder.Scalar, aten.eq.Scalar)
}
# The most runs of consecutive rows that a selection is made of.
_PIECES: Final = 4


class CopyingPlanner(Planner):
    """A planner of whole bodies, whose values nothing but the body reads.

    constants   the nodes whose numbers are the same in every step and call
    memory      that of the values of a step
    held        what has to live as long as the plan
    body        what is planned
    """

    def __init__(self, body: fx.GraphModule) -> None:
        super().__init__()
        self.constants = set[fx.Node]()
        self.memory = StepMemory(body.graph)
        self.held: list[Any] = []
        self.body = body

    def add(self, node: fx.Node) -> None:
        """Plan a node. Raises NoPlan for one that is not planned."""
        if node.op == "get_attr":
            held = fx.graph_module._get_attr(self.body, str(node.target))
            if not isinstance(held, Tensor) or not held.is_cpu or held.dtype not in STORAGES:
                raise NoPlan
            self.env[node] = self.kept(held)
        elif node.target is aten.lift_fresh_copy.default:
            self.env[node] = self._copied(self.value(node.args[0]))
        elif node.target in _EMPTY:
            value: Tensor = node.meta["val"]
            like = self._argument(node.args[0])
            self.env[node] = self.made(like.shape if isinstance(like, Tensor) else like, value.dtype)
        elif self._is_constant(node):
            target: Any = node.target
            made = target(*self._argument(node.args), **self._argument(node.kwargs))
            if not isinstance(made, Tensor):
                raise NoPlan
            self.constants.add(node)
            self.env[node] = self.kept(made)
        elif node.target is aten.copy.default:
            self._copy(node)
        elif node.target is aten.slice_scatter.default:
            self._replace(node)
        elif node.target is aten.where.self:
            self._choose(node)
        elif node.target is aten.constant_pad_nd.default:
            self._pad(node)
        elif node.target is aten.index_select.default:
            self._select(node)
        else:
            super().add(node)

    def kept(self, tensor: Tensor) -> Value:
        """Return a tensor as a value that no step writes, and that lives as long as the plan."""
        self.held.append(tensor)
        return Value(tensor)

    def made(self, shape: Sequence[int], dtype: torch.dtype) -> Value:
        """Return a new row-major value that a kernel is going to write."""
        made = self.memory.take(shape, dtype)
        return Value(made, memory_of(made))

    def _is_constant(self, node: fx.Node) -> bool:
        used = node.all_input_nodes
        if str(node.target) in CONSTANTS:
            return True
        fixed = all(x in self.constants or isinstance(self.env.get(x), int) for x in used)
        return node.target in _OF_NUMBERS and fixed and any(x in self.constants for x in used)

    def _copy(self, node: fx.Node) -> None:
        """Plan a copy, whose result is what is copied, in the layout of another tensor."""
        place, value = (self.value(x) for x in node.args[:2])
        if value.tensor.dtype != place.tensor.dtype:
            raise NoPlan
        self.env[node] = value.view(value.tensor.expand(place.tensor.shape))

    def _replace(self, node: fx.Node) -> None:
        """Plan a tensor with other rows ``start`` to ``end`` along a dimension."""
        base, rows = (self.value(x) for x in node.args[:2])
        dim, start, end, step = (self._argument(argument(node, n)) for n in ("dim", "start", "end", "step"))
        if step != 1:
            raise NoPlan
        self.env[node] = self._replaced(node, base, rows, dim % base.tensor.dim(), start, end)

    def _replaced(self, node: fx.Node, base: Value, rows: Value, dim: int, start: int | None, end: int | None) -> Value:
        if rows.tensor.dtype != base.tensor.dtype or base.tensor.dtype not in STORAGES:
            raise NoPlan
        if memory_of(rows.tensor) == memory_of(base.tensor):
            rows = self._copied(rows)
        whole = base if self.memory.ends_with(base.tensor, node) else self._copied(base)
        place = whole.view(aten.slice.Tensor(whole.tensor, dim, start, end, 1))
        self._put(rows, place, whole.tensor, dim)
        return whole

    def _choose(self, node: fx.Node) -> None:
        """Plan a choice by a constant mask that is true for consecutive rows."""
        mask: Any = node.args[0]
        if mask not in self.constants:
            raise NoPlan
        other, base = (self.value(x) for x in node.args[1:3])
        chosen, shape = self.value(mask).tensor, base.tensor.shape
        along = [d for d, size in enumerate(chosen.shape) if size > 1]
        if chosen.dim() != len(shape) or len(along) != 1 or chosen.shape[along[0]] != shape[along[0]]:
            raise NoPlan
        (dim,), rows = along, chosen.flatten().nonzero().flatten().tolist()
        if not rows or rows[-1] - rows[0] + 1 != len(rows) or shape != node.meta["val"].shape:
            raise NoPlan
        part = other.tensor.expand(shape).narrow(dim, rows[0], len(rows))
        self.env[node] = self._replaced(node, base, other.view(part), dim, rows[0], rows[-1] + 1)

    def _pad(self, node: fx.Node) -> None:
        """Plan a tensor between rows of a number, one dimension after the other, the last one first."""
        value, pads = self.value(node.args[0]), self._argument(node.args[1])
        if any(not isinstance(n, int) or n < 0 for n in pads):
            raise NoPlan
        fill = argument(node, "value")
        for i in range(0, len(pads), 2):
            dim = value.tensor.dim() - 1 - i // 2
            parts = [value]
            for n, first in zip(pads[i : i + 2], (True, False), strict=True):
                if n:
                    shape = [n if d == dim else size for d, size in enumerate(value.tensor.shape)]
                    row = self.kept(torch.full(shape, fill, dtype=value.tensor.dtype, device="cpu"))
                    parts = [row, *parts] if first else [*parts, row]
            value = self._joined(parts, dim) if len(parts) > 1 else value
        self.env[node] = value if any(pads) else self._copied(value)

    def _select(self, node: fx.Node) -> None:
        """Plan a selection by constant numbers, as a few pieces of consecutive ones."""
        index: Any = node.args[2]
        if index not in self.constants:
            raise NoPlan
        value, numbers = self.value(node.args[0]), self.value(index).tensor.flatten().tolist()
        dim = int(argument(node, "dim")) % max(1, value.tensor.dim())
        ends = [i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1] + 1] if numbers else []
        if not numbers or len(ends) >= _PIECES or value.tensor.dim() == 0:
            raise NoPlan
        bounds = zip([0, *ends], [*ends, len(numbers)], strict=True)
        parts = [value.view(value.tensor.narrow(dim, numbers[a], b - a)) for a, b in bounds]
        self.env[node] = self._joined(parts, dim)

    def _argument(self, arg: Any) -> Any:
        """Return an argument of a node with tensors in place of nodes."""
        return super()._argument(list(arg) if isinstance(arg, Sequence) and not isinstance(arg, str) else arg)
