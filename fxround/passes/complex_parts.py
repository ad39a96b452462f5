"""Complex parts: complex numbers that are only joined, moved and read become their real and imaginary parts.

The formulas of complex numbers compute parts, join them (``aten.complex``) and read them (``aten.view_as_real``). This
pass moves the parts in place of the joined numbers: a permutation of complex numbers becomes two of real ones. Complex
nodes remain where an operator without a formula reads them, or the graph returns them. No bit changes.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, fx

from fxround.graph.site import is_complex
from fxround.operators.rules import rule_of
from fxround.passes.rewrite import Plan, insert

aten = torch.ops.aten

# Where the operators of these names take a number: its real part goes to the real parts.
_VALUES: Final = frozenset({"value", "fill_value", "s"})
_ONES: Final = {
    aten.ones.default: aten.zeros.default,
    aten.ones_like.default: aten.zeros_like.default,
    aten.new_ones.default: aten.new_zeros.default,
}
_READS: Final = (aten.view_as_real.default, aten.view_as_real_copy.default)
_JOINS: Final = (aten.view_as_complex.default, aten.view_as_complex_copy.default)
_Parts = tuple[fx.Node, fx.Node]


def split_complex(graph: fx.GraphModule, plan: Plan) -> None:
    """Replace complex numbers by their parts wherever both are known."""
    parts: dict[fx.Node, _Parts] = {}
    made: list[fx.Node] = []
    for node in list(graph.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _READS and node.args[0] in parts:
            _read(graph, node, parts[node.args[0]])
        elif is_complex(node) and (both := _parts(graph, node, parts)) is not None:
            parts[node] = both
            made.append(node)
    for node in reversed(made):
        _rejoin(graph, node, parts[node])


def _parts(graph: fx.GraphModule, node: fx.Node, parts: dict[fx.Node, _Parts]) -> _Parts | None:
    """Return nodes of the two parts; None if the operator does more than to join or to move numbers."""
    if node.target is aten.complex.default:
        re, im = node.args
        return re, im  # type: ignore[return-value]
    if node.target in _JOINS:
        re, im = (insert(graph, node, aten.select.int, (node.args[0], -1, i)) for i in (0, 1))
        return re, im
    rule = rule_of(node)
    if rule is None or rule.kind != "movement" or not isinstance(node.meta.get("val"), Tensor):
        return None
    if any(is_complex(x) and x not in parts for x in node.all_input_nodes) or not _moves_alike(node):
        return None
    return _moved(graph, node, parts, 0), _moved(graph, node, parts, 1)


def _moves_alike(node: fx.Node) -> bool:
    """Whether an operator moves the real and the imaginary parts in the same way, by real operands that are indices."""
    if node.target is aten.eye.default or node.target is aten.eye.m or node.target is aten.as_strided.default:
        return False
    return not any(value.is_floating_point() for value in _tensors(node))


def _tensors(node: fx.Node) -> list[Tensor]:
    return [x.meta["val"] for x in node.all_input_nodes if isinstance(x.meta.get("val"), Tensor)]


def _moved(graph: fx.GraphModule, node: fx.Node, parts: dict[fx.Node, _Parts], i: int) -> fx.Node:
    """Insert the operator on the real (i = 0) or the imaginary parts before the node."""
    target: Any = node.target
    names = [declared.name for declared in target._schema.arguments]
    args = [_part(argument, name, parts, i) for name, argument in zip(names, node.args, strict=False)]
    kwargs = {name: _part(argument, name, parts, i) for name, argument in node.kwargs.items()}
    if i and target in _ONES:
        target = _ONES[target]
    return insert(graph, node, target, args, **kwargs)


def _part(x: Any, name: str, parts: dict[fx.Node, _Parts], i: int) -> Any:
    if isinstance(x, torch.dtype):
        return x.to_real() if x.is_complex else x
    if isinstance(x, list | tuple):
        return type(x)(_part(each, name, parts, i) for each in x)
    if isinstance(x, fx.Node):
        return parts[x][i] if x in parts else x
    if isinstance(x, bool | int | float | complex) and name in _VALUES:
        return complex(x).imag if i else complex(x).real
    return x


def _read(graph: fx.GraphModule, node: fx.Node, both: _Parts) -> None:
    """Let what selects a part of these numbers use it, and everything else the two parts side by side."""
    whole = []
    for user in list(node.users):
        index = _selected(user, node)
        if index is None:
            whole.append(user)
            continue
        user.replace_all_uses_with(both[index])
        graph.graph.erase_node(user)
    if whole:
        node.replace_all_uses_with(insert(graph, node, aten.stack.default, (list(both), -1)))
    graph.graph.erase_node(node)


def _selected(user: fx.Node, node: fx.Node) -> int | None:
    """Return which part a node selects; None if it does something else."""
    if user.target is not aten.select.int:
        return None
    dim: Any = user.args[1]
    index: Any = user.args[2]
    return index % 2 if dim in (-1, node.meta["val"].dim() - 1) else None


def _rejoin(graph: fx.GraphModule, node: fx.Node, both: _Parts) -> None:
    """Erase a node whose numbers nobody reads; compute them from the parts where somebody does."""
    node.replace_all_uses_with(
        both[0], delete_user_cb=lambda user: isinstance(user.meta.get("val"), torch.SymInt | int)
    )
    if not node.users:
        graph.graph.erase_node(node)
    elif node.target is not aten.complex.default and node.target not in _JOINS:
        whole = insert(graph, node, aten.complex.default, both)
        node.replace_all_uses_with(whole)
        graph.graph.erase_node(node)
