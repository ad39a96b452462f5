"""Choose: selections between two values become programs, so that they can be fused with the operations around them.

A ``where`` becomes an exact program. If its condition compares numbers of its own dtype, the program contains the
comparison; any other condition is read as a mask. The conversion of a mask to numbers becomes a program too. For
example, ``where(y <= 0, 0, g)`` becomes
``fxround.pointwise([y, g], "t0 = where_le(x0, 0x0.0p+0, 0x0.0p+0, x1) @ exact")``. The lowered graph, which users see,
keeps its operators. A selection rounds nothing: the bits of the selected value do not change, NaNs included. Only
float32 and float64 selections become programs: a kernel does not keep the bits of a float16 NaN. A selection whose
result is not row-major stays as it is where no neighbour is rounded, and so do all where nothing is rounded: programs'
results are row-major, those of PyTorch have the layout of their operands, which may change from call to call, and a
kernel of PyTorch may add in another order where its operand's layout differs.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import fx

from fxround.graph.dialect import Pointwise
from fxround.graph.dtypes import literal
from fxround.graph.geometry import surely
from fxround.graph.site import float_value, site
from fxround.graph.values import copy_node, module_of
from fxround.operators.rules import argument
from fxround.passes.rewrite import become, drop_dead, rng_of

aten = torch.ops.aten

COPY: Final = "t0 = identity(x0) @ exact"
# The carriers' own dtypes: reading and storing them converts nothing.
CARRIED: Final = (torch.float32, torch.float64)
# A comparison's operator in a program, and whether its sides are exchanged, or the two values.
_COMPARED: Final = {
    "lt": ("where_lt", False, False),
    "le": ("where_le", False, False),
    "gt": ("where_lt", True, False),
    "ge": ("where_le", True, False),
    "eq": ("where_eq", False, False),
    "ne": ("where_eq", False, True),
}
_COMPARISONS: Final = {
    getattr(getattr(aten, name), overload): row for name, row in _COMPARED.items() for overload in ("Scalar", "Tensor")
}
# Operators that make constants, and the position of the number among the arguments (None: it is zero).
_FILLED: Final[dict[Any, int | None]] = {
    aten.full.default: 1,
    aten.full_like.default: 1,
    aten.scalar_tensor.default: 0,
    aten.zeros.default: None,
    aten.zeros_like.default: None,
}


def choose(graph: fx.GraphModule) -> fx.GraphModule:
    """Return a new graph, which shares the attributes of ``graph``, in which selections are programs."""
    copied = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        made[node] = copy_node(copied, node, made)
    chosen = module_of(graph, copied)
    rounded = {node for node in chosen.graph.nodes if (place := site(node)) and place.status == "rounded"}
    if not rounded:
        return chosen
    for node in chosen.graph.nodes:
        place, value = site(node), float_value(node)
        if node.op != "call_function" or place is None or place.status != "exact":
            continue
        if value is None or value.dtype not in CARRIED:
            continue
        if not is_row_major(value) and rounded.isdisjoint([*node.all_input_nodes, *node.users]):
            continue
        if node.target is aten.where.self:
            _choice(chosen, node)
        elif node.target is aten._to_copy.default and _is_mask(node.args[0]):
            _program(chosen, node, "identity", [node.args[0]])
    drop_dead(chosen, lambda node: not _is_kept(node))
    return chosen


def is_row_major(value: torch.Tensor) -> bool:
    """Whether the strides certainly are those of a kernel's result, also in dimensions of one element."""
    step: Any = 1
    for size, stride in reversed(list(zip(value.shape, value.stride(), strict=True))):
        if not surely(stride == step):
            return False
        step = step * size
    return True


def _is_kept(node: fx.Node) -> bool:
    return node.target not in _COMPARISONS and node.target not in _FILLED


def _is_mask(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.meta["val"].dtype == torch.bool


def _choice(graph: fx.GraphModule, node: fx.Node) -> None:
    """Turn a ``where`` into its program, if both of its values are numbers of its dtype."""
    condition, yes, no = node.args
    if not _is_mask(condition):
        return
    assert isinstance(condition, fx.Node)
    row = _COMPARISONS.get(condition.target)
    sides: list[Any] = [_number(side, node) for side in condition.args] if row is not None else [None]
    if row is None or None in sides:
        # A mask that holds is 1.0: it is compared with zero, and the values are exchanged.
        row, sides = ("where_eq", False, True), [condition, 0.0]
    name, turned, swapped = row
    values = [_number(value, node) for value in ((no, yes) if swapped else (yes, no))]
    if None not in values:
        _program(graph, node, name, [*(reversed(sides) if turned else sides), *values])


def _number(value: Any, node: fx.Node) -> fx.Node | float | None:
    """Return a tensor of the node's dtype, or a number that is exact in it; None for anything else."""
    dtype = node.meta["val"].dtype
    if isinstance(value, fx.Node):
        if not isinstance(value.meta["val"], torch.Tensor) or value.meta["val"].dtype != dtype:
            return None
        if value.target not in _FILLED:
            return value
        position = _FILLED[value.target]
        value = 0.0 if position is None else argument(value, position)
    if not isinstance(value, bool | int | float) or value != value:
        return None
    return float(value) if float.fromhex(literal(value, dtype)) == value else None


def _program(graph: fx.GraphModule, node: fx.Node, operator: str, operands: list[Any]) -> None:
    """Replace the node by the exact program of an operator over tensors and numbers."""
    place = site(node)
    assert place is not None
    tensors = list(dict.fromkeys(o for o in operands if isinstance(o, fx.Node)))
    shapes = [tensor.meta["val"].shape for tensor in tensors]
    # A constant that is dropped cannot give the result its shape.
    if not shapes or torch.broadcast_shapes(*shapes) != node.meta["val"].shape:
        return
    names = ", ".join(f"x{tensors.index(o)}" if isinstance(o, fx.Node) else o.hex() for o in operands)
    text = f"t0 = {operator}({names}) @ exact"
    become(graph, node, Pointwise(tensors, text, node.meta["val"].dtype, rng_of(graph), place.number))
