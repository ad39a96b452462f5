"""Which parameters of a graph divide a value by a factor for each channel, if they are divided by it themselves.

A sum is divided if both summands are, a product of matrices if the rows of a weight are, a norm's result if the vector
that multiplies it and the one that is added are. In exact arithmetic nothing else changes, and with powers of two
nothing else changes in floating point either, as long as no number leaves the normal range.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, fx

from fxround.graph.site import PORT, Port
from fxround.operators.rules import argument

_ATEN: Final = torch.ops.aten
_RESHAPES: Final = (_ATEN.reshape.default, _ATEN.view.default, _ATEN._unsafe_view.default)
_COPIES: Final = (_ATEN.clone.default, _ATEN.alias.default)
# What multiplies commutes with these; factors are positive.
_HOMOGENEOUS: Final = (_ATEN.relu.default, _ATEN.neg.default, _ATEN.mul.Scalar, _ATEN.div.Scalar)

# Names of parameters, each with the dimension that is divided.
Absorbed = dict[str, int]


def readers(node: fx.Node) -> set[fx.Node]:
    """Return what reads the elements of a value, and not its sizes alone."""
    return {user for user in node.users if user.op == "output" or isinstance(user.meta.get("val"), Tensor)}


def absorb(node: fx.Node, axis: int, size: int, user: fx.Node | None = None) -> Absorbed | None:
    """Return the parameters that divide a value along an axis, or None if there are none.

    axis: negative. size: that of the axis. user: the only node that may read the value, and so each parameter; None:
    whatever reads the value wants it divided.
    """
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() < -axis or not _has_size(value, axis, size):
        return None
    if user is not None and readers(node) != {user}:
        return None
    if node.op == "placeholder":
        port: Port = node.meta[PORT]
        return {port.name: value.dim() + axis} if port.kind == "parameter" else None
    return _through(node, axis, size) if node.op == "call_function" else None


def _through(node: fx.Node, axis: int, size: int) -> Absorbed | None:
    """Return ``absorb`` of what an operation reads."""
    target, args = node.target, node.args
    if target in _COPIES or target in _HOMOGENEOUS:
        return _read(args[0], axis, size, node)
    if target in _RESHAPES:
        operand: Any = args[0]
        before = operand.meta["val"]
        is_vector = before.dim() == 1 and _has_size(before, 0, size)
        return _read(args[0], -1, size, node) if axis == -1 or is_vector else None
    if target is _ATEN.permute.default:
        dims: Any = args[1]
        return _read(args[0], dims[axis] % len(dims) - len(dims), size, node)
    if target in (_ATEN.add.Tensor, _ATEN.sub.Tensor):
        first, second = (_read(arg, axis, size, node) for arg in args[:2])
        if first is None or second is None or first.keys() & second.keys():
            return None
        return {**first, **second}
    if target is _ATEN.mul.Tensor:
        second = _read(args[1], axis, size, node)
        return _read(args[0], axis, size, node) if second is None else second
    if target is _ATEN.div.Tensor:
        return _read(args[0], axis, size, node)
    if target is _ATEN.mm.default:
        return _read(args[1], axis, size, node) if axis == -1 else None
    if target is _ATEN.convolution.default and axis == 1 - node.meta["val"].dim():
        weight: Any = argument(node, "weight")
        output = 1 if argument(node, "transposed") else 0
        return _read(weight, output - weight.meta["val"].dim(), size, node)
    return None


def _read(value: Any, axis: int, size: int, user: fx.Node) -> Absorbed | None:
    return absorb(value, axis, size, user) if isinstance(value, fx.Node) else None


def _has_size(value: Tensor, axis: int, size: Any) -> bool:
    """Return whether a size is known to be this one; a comparison of symbols would be a guard."""
    if not value.dim():
        return False
    own = value.shape[axis]
    return type(own) is int and type(size) is int and own == size


def source_along(node: fx.Node, axis: int) -> fx.Node:
    """Return the value of which a node is a copy, or another shape, with the same channels along the axis."""
    while node.op == "call_function" and (node.target in _COPIES or (node.target in _RESHAPES and axis == -1)):
        before: Any = node.args[0]
        same = node.target in _COPIES or _has_size(before.meta["val"], -1, node.meta["val"].shape[-1])
        if not same:
            break
        node = before
    return node


__all__ = ["Absorbed", "absorb", "readers", "source_along"]
