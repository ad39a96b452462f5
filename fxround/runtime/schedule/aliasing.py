"""Which operators of a graph may share memory between an operand and a result.

An operator's schema says which results may alias an operand, and PyTorch's own graph transformations rely on it. Two
operators, ``_unsafe_view`` and ``_reshape_alias``, and every operator without a row in the table of rules count as
sharing whatever their schemas say. The schedule and its verification read this one definition;
``tests/runtime/test_schedule.py`` compares it with the memory that operators return.
"""

from __future__ import annotations

import operator
from typing import Any, Final

import torch
from torch import fx

from fxround.graph.dialect import FUSED
from fxround.operators.rules import RULES
from fxround.runtime.torch_ops import CHOICES, KERNELS, MOVEMENTS

_ATEN: Final = torch.ops.aten
# Operators whose results may alias an operand whatever their schemas say.
_UNDECLARED: Final = frozenset({_ATEN._unsafe_view.default, _ATEN._reshape_alias.default})
# Views that keep row-major order. ``reshape`` is a view of a row-major tensor, and may copy any other.
_ROW_MAJOR: Final = frozenset(
    {
        *(_ATEN.reshape.default, _ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.alias.default),
        *(_ATEN.detach.default, _ATEN.unsqueeze.default, _ATEN.squeeze.default, _ATEN.squeeze.dim, _ATEN.squeeze.dims),
    }
)
# Views that do not keep it: a ``reshape`` after one of them may be a copy.
_OTHER: Final = frozenset(
    {
        *(_ATEN.permute.default, _ATEN.t.default, _ATEN.transpose.int, _ATEN.expand.default),
        *(_ATEN.slice.Tensor, _ATEN.select.int),
    }
)
# The operators, and the functions that a schedule calls in their place.
_KERNELS: Final = frozenset((*KERNELS, *KERNELS.values(), *MOVEMENTS, *MOVEMENTS.values()))
_LISTS: Final = frozenset((FUSED, KERNELS[FUSED]))
_CHOICES: Final = frozenset(CHOICES.values())


def is_kernel(node: fx.Node) -> bool:
    """Whether the node calls a kernel of ours, or a module that groups several."""
    return node.op == "call_module" or node.target in _KERNELS


def returns_list(node: fx.Node) -> bool:
    """Whether a call of ours returns a list of tensors, each on memory of its own."""
    return node.op == "call_module" or node.target in _LISTS


def is_known(node: fx.Node) -> bool:
    """Whether it is known which memory of its operands the node may return."""
    if is_kernel(node) or node.target is operator.getitem or node.target in _CHOICES:
        return True
    return node.op == "call_function" and str(node.target) in RULES


def may_share(node: fx.Node) -> bool:
    """Whether the node's result may reach its operands' memory."""
    if is_kernel(node) or node.target in _CHOICES:
        return False
    if node.target is operator.getitem or not is_known(node) or node.target in _UNDECLARED:
        return True
    schema: Any = getattr(node.target, "_schema", None)
    return schema is None or any(result.alias_info is not None for result in schema.returns)


def is_view_of(node: Any, made: fx.Node) -> bool:
    """Whether the node is ``made``, a row-major result of a kernel, or certainly a view of it."""
    reshaped = False
    while isinstance(node, fx.Node) and node is not made:
        if node.target not in _ROW_MAJOR and (reshaped or node.target not in _OTHER):
            return False
        reshaped |= node.target is _ATEN.reshape.default
        node = node.args[0]
    return node is made
