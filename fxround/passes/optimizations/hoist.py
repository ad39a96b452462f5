"""Hoist: move reshapes and copies out of the way of fusion.

A reshape of a pointwise operation's result moves to its operands: a layer's bias, which was added to [batch * time,
width], is then added in the shape [batch, time, width] of the activation and the residual. A copy of a result that
nothing else reads is replaced by the result, and a copy that one pointwise operation reads by what it copies: such an
operation reads any layout. A copy of which only parts are read (q, k and v) is replaced by copies of these parts, whose
memory ends with them. Any other row-major copy becomes a program, so that fxround's threads make it; in a graph of
PyTorch's operators alone it stays one of these.

Elements keep their row-major numbers, so every element has the same operands, rounding and random words as it had; a
broadcast operand extends along the last dimension only, which does not change. Results of fxround's operators are new
row-major tensors, so the removed copy would have had their layout, and nothing else reads their memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor, fx

from fxround.graph.dialect import CALLS, POINTWISE, Pointwise, read_map
from fxround.graph.site import float_value, site
from fxround.operators.rules import argument, rule_of
from fxround.passes.optimizations.choose import CARRIED, COPY, is_row_major
from fxround.passes.rewrite import become, rng_of

aten = torch.ops.aten

_PLAIN: Final = (None, torch.preserve_format, torch.contiguous_format)


def hoist(graph: fx.GraphModule) -> fx.GraphModule:
    """Change the graph in place and return it."""
    rounds = any(map(_is_ours, graph.graph.nodes))
    for node in graph.graph.find_nodes(op="call_function", target=aten.clone.default):
        _copy_parts(graph.graph, node)
    for node in graph.graph.find_nodes(op="call_function", target=aten.clone.default):
        if _is_spare(node) or [user.target for user in node.users] == [POINTWISE]:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
        elif rounds:
            _program(graph, node)
    for node in graph.graph.find_nodes(op="call_function", target=aten.reshape.default):
        _hoist(graph.graph, node)
    return graph


def _program(graph: fx.GraphModule, clone: fx.Node) -> None:
    """Turn a copy that is row-major in every call into the exact program that makes it."""
    place, value = site(clone), float_value(clone)
    if place is not None and value is not None and value.dtype in CARRIED and _becomes_row_major(clone):
        become(graph, clone, Pointwise(clone.all_input_nodes, COPY, value.dtype, rng_of(graph), place.number))


def _copy_parts(graph: fx.Graph, clone: fx.Node) -> None:
    """Replace a row-major copy, of which different parts along the first dimension are read, by copies of the parts."""
    parts = list(clone.users)
    if float_value(clone) is None or not _becomes_row_major(clone) or len(parts) < 2:
        return
    if any(part.target is not aten.select.int or argument(part, 1) != 0 for part in parts):
        return
    indices = [argument(part, 2) for part in parts]
    if not all(isinstance(i, int) and i >= 0 for i in indices) or len(set(indices)) < len(indices):
        return
    source = clone.all_input_nodes[0]
    for part, index in zip(parts, indices, strict=True):
        with graph.inserting_before(clone):
            selected = graph.call_function(aten.select.int, (source, 0, index))
            copied = graph.call_function(aten.clone.default, (selected,), {"memory_format": torch.contiguous_format})
        selected.meta = part.meta | {"val": source.meta["val"].select(0, index)}
        copied.meta = clone.meta | {"val": part.meta["val"].clone()}
        part.replace_all_uses_with(copied)
        graph.erase_node(part)
    graph.erase_node(clone)


def _becomes_row_major(clone: fx.Node) -> bool:
    """Whether a copy is row-major in every call, whatever the layout of the arguments."""
    asked = clone.kwargs.get("memory_format") == torch.contiguous_format
    return is_row_major(clone.meta["val"]) and (asked or _is_ours(clone.all_input_nodes[0]))


def _is_spare(clone: fx.Node) -> bool:
    """Whether a copy is of a value that nothing else reads: a result of fxround's, reshaped or selected from (relu)."""
    source, user = clone.all_input_nodes[0], clone
    while set(source.users) == {user} and (source.target is aten.reshape.default or _chooses(source)):
        source, user = source.all_input_nodes[0], source
    return _is_ours(source) and set(source.users) == {user} and clone.kwargs.get("memory_format") in _PLAIN


def _chooses(node: fx.Node) -> bool:
    """Whether the node is an exact operator of one tensor, whose layout it keeps."""
    rule = rule_of(node) if node.op == "call_function" else None
    return rule is not None and rule.kind == "exact" and bool(rule.body) and len(node.all_input_nodes) == 1


def _is_ours(node: fx.Node) -> bool:
    """Whether the node is a row-major tensor that an operator of fxround's computes."""
    return node.target in CALLS


def _hoist(graph: fx.Graph, view: fx.Node) -> None:
    """Reshape the operands instead of the result.

    This is done if a user of the result can then be fused and no operand's fusion is lost.
    """
    operation = view.all_input_nodes[0]
    call = read_map(operation)
    if not isinstance(call, Pointwise) or len(operation.users) != 1 or not any(map(_fuses, view.users)):
        return
    before, after = operation.meta["val"], view.meta["val"]
    kinds = [_kind(operand, before, after) for operand in call.xs]
    if "" in kinds or "whole" not in kinds:
        return
    with graph.inserting_before(view):
        moved = []
        for operand, kind in zip(call.xs, kinds, strict=True):
            moved.append(operand)
            if kind == "whole":
                moved[-1] = graph.call_function(aten.reshape.default, (operand, argument(view, 1)))
                moved[-1].meta = dict(view.meta)
        again = graph.call_function(call.overload, replace(call, xs=moved).arguments())
        again.meta = operation.meta | {"val": after}
    view.replace_all_uses_with(again)
    graph.erase_node(view)
    graph.erase_node(operation)


def _fuses(node: fx.Node) -> bool:
    return node.target is POINTWISE or _chooses(node)


def _kind(operand: fx.Node, before: Tensor, after: Tensor) -> str:
    """Return how an operand takes part: "whole", "broadcast" (equally in either shape), or "" for neither."""
    value = operand.meta["val"]
    if all(isinstance(n, int) and n == 1 for n in value.shape) and value.dim() <= after.dim():
        return "broadcast"
    if str(tuple(value.shape)) == str(tuple(before.shape)):
        known = _is_ours(operand) and not _fuses(operand)
        return "whole" if known and value.dtype == after.dtype else ""
    last = [shape[-1] if shape else 1 for shape in (value.shape, before.shape, after.shape)]
    outer = [n for n in value.shape[:-1] if not isinstance(n, int) or n != 1]
    same = all(isinstance(n, int) for n in last) and len(set(last)) == 1
    return "broadcast" if same and not outer and value.dim() <= after.dim() else ""
