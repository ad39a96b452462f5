"""Normalize: make the graph independent of memory layout and of implicit conversions, and complex numbers real.

fxround's operators return row-major tensors, so a ``view`` that was legal for the original strides may not be legal for
theirs: it becomes a ``reshape``. ``as_strided`` reads memory: its operand is copied to the strides that it was traced
with. Operands of arithmetic are cast to the result's dtype by a node of the graph. PyTorch's kernels compute complex
numbers; after each operation that makes some, their parts become a real tensor, which a later pass rounds. Each
rewriting keeps the bits of every value under PyTorch's own kernels.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import fx

from fxround.errors import CaptureError
from fxround.graph.site import PORT, float_value, function_of, is_complex, located
from fxround.operators.rules import rule_of
from fxround.passes.rewrite import Plan, insert, source_of

aten = torch.ops.aten

# Operators on complex numbers that compute none.
_COMPLEX_MOVEMENT: Final = frozenset(
    {
        *(aten._conj.default, aten.resolve_conj.default, aten._neg_view.default, aten.resolve_neg.default),
        *(aten.complex.default, aten.view_as_complex.default, aten.view_as_complex_copy.default),
    }
)
_ROW_MAJOR: Final = torch.contiguous_format
_LAYOUT_BOUND: Final = frozenset({"aten.view.default", "aten._unsafe_view.default"})
# The position of the scattered values among the arguments.
_SCATTERS: Final = {"aten.scatter_add.default": 3, "aten.index_put.default": 2, "aten._unsafe_index_put.default": 2}


def normalize(graph: fx.GraphModule, plan: Plan) -> None:
    """Remove the graph's dependence on strides and its implicit conversions."""
    for node in list(graph.graph.nodes):
        if node.op == "placeholder" and is_complex(node) and node.users:
            _expose_parts(graph, node)
        if node.op != "call_function":
            continue
        if str(node.target) in _LAYOUT_BOUND:
            node.target = aten.reshape.default
        elif node.target is aten._efficientzerotensor.default:
            # Forward derivatives have zeros without memory, which no kernel could read.
            node.target = aten.zeros.default
        elif node.target is aten.as_strided.default:
            _restore_strides(graph, node)
        elif node.target is aten.view_as_complex.default and _is_tangent(node.args[0]):
            # The gradient that comes in may have any strides: a sum expands one number.
            node.update_arg(0, insert(graph, node, aten.clone.default, (node.args[0],), memory_format=_ROW_MAJOR))
        elif _computes_complex(node):
            _expose_parts(graph, node)
        elif float_value(node) is not None and not any(map(is_complex, node.all_input_nodes)):
            _cast_operands(graph, node)


def _is_tangent(node: Any) -> bool:
    """Whether the node is an incoming gradient, or moves one."""
    port = source_of(node).meta.get(PORT)
    return port is not None and port.kind == "tangent"


def _computes_complex(node: fx.Node) -> bool:
    """Whether the node is an operation on complex numbers or that makes some, and moves no number."""
    rule = rule_of(node)
    moves = node.target in _COMPLEX_MOVEMENT or (rule is not None and rule.kind == "movement")
    return isinstance(node.meta.get("val"), torch.Tensor) and is_complex(node) and not moves


def _expose_parts(graph: fx.GraphModule, node: fx.Node) -> None:
    """Let every use of complex numbers read them after a round trip by their parts."""
    parts = insert(graph, node, aten.view_as_real_copy.default, (node,))
    called = function_of(node)
    if called:
        parts._rename(f"{called.replace('.', '_')}_parts")
    whole = insert(graph, node, aten.view_as_complex_copy.default, (parts,))
    node.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not parts)
    # They were inserted before the node that they read. Placeholders stay together.
    last = node
    while last.next.op == "placeholder":
        last = last.next
    last.append(whole)
    last.append(parts)


def _restore_strides(graph: fx.GraphModule, node: fx.Node) -> None:
    """Copy the operand into the order of dimensions that it was traced with."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    value = source.meta["val"]
    order = sorted(range(value.dim()), key=lambda d: -value.stride(d))
    if not value.permute(order).is_contiguous():
        raise CaptureError(f"{located(node)}: as_strided of a tensor with gaps reads memory by layout; clone it first.")
    _restore_offset(node, value)
    inverse = [order.index(d) for d in range(value.dim())]
    permuted = insert(graph, node, aten.permute.default, (source, order))
    copy = insert(graph, node, aten.clone.default, (permuted,), memory_format=_ROW_MAJOR)
    node.update_arg(0, insert(graph, node, aten.permute.default, (copy, inverse)))


def _restore_offset(node: fx.Node, value: torch.Tensor) -> None:
    """Count an offset into memory from the first element of the operand, where its copy begins.

    value: the operand. Raises CaptureError if elements are read that lie in its memory, but are none of its own.
    """
    given = [*node.args[1:], *([] if len(node.args) > 3 else [node.kwargs.get("storage_offset")])]
    values: Any = fx.map_arg(given, lambda each: each.meta["val"])
    size, stride, begin = values
    first: Any = value.storage_offset()
    offset = 0 if begin is None else begin - first
    if begin is not None and not (isinstance(first, int) and first == 0):
        if not isinstance(offset, int):
            raise CaptureError(
                f"{located(node)}: as_strided with an offset of its own reads the memory of a view: call it on the "
                "tensor that has the memory, or leave the offset out."
            )
        node.args, node.kwargs = (*node.args[:3], offset), {}
    reach = sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    known = all(isinstance(each, int) for each in (offset, reach, value.numel(), *size))
    if (isinstance(offset, int) and offset < 0) or (known and 0 not in size and offset + reach >= value.numel()):
        raise CaptureError(
            f"{located(node)}: as_strided reads elements {offset} to {offset + reach} of a tensor of {value.numel()}, "
            "that is, memory that is not its own: call it on the tensor that has the memory."
        )


def _cast_operands(graph: fx.GraphModule, node: fx.Node) -> None:
    rule, value = rule_of(node), float_value(node)
    if rule is None or value is None or node.target is aten._to_copy.default:
        return
    if rule.kind not in ("pointwise", "elementary", "reduction", "contraction"):
        return
    for operand in dict.fromkeys(node.all_input_nodes):
        old = operand.meta.get("val")
        if not isinstance(old, torch.Tensor) or old.dtype == value.dtype or _is_index(node, operand):
            continue
        cast = insert(graph, node, aten._to_copy.default, (operand,), dtype=value.dtype)
        node.replace_input_with(operand, cast)


def _is_index(node: fx.Node, operand: fx.Node) -> bool:
    """Whether the operand is an index: anything but the first operand and the values of a scatter."""
    values = _SCATTERS.get(str(node.target))
    return values is not None and all(node.args[i] is not operand for i in (0, values))
