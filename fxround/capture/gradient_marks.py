"""Marks: which value of a backward graph is the gradient of which value of the forward graph.

A mark is an identity around a value that the model's code names: the result of a function or method that it calls, a
parameter or an argument. In the forward graph it becomes ``fxround::marked(x, k)``, in the backward graph
``fxround::marked_gradient(g, k)``, where g is the gradient of x, summed over its uses. The passes read the marks and
remove them: a lowered graph has none. Values are marked only for a policy that treats gradients of roundings. A value
that is a view of another tensor, or was changed in place, is not marked: the mark would give it memory of its own.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, fx

_LIBRARY: Final = torch.library.Library("fxround", "FRAGMENT")
for _name in ("marked", "marked_gradient"):
    _LIBRARY.define(f"{_name}(Tensor x, int mark) -> Tensor")
    _LIBRARY.impl(_name, lambda x, mark: x.clone(), "CompositeExplicitAutograd")

MARKED: Final = torch.ops.fxround.marked.default
MARKED_GRADIENT: Final = torch.ops.fxround.marked_gradient.default


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mark: int) -> Tensor:
        ctx.mark = mark
        marked: Tensor = MARKED(x, mark)
        return marked

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return MARKED_GRADIENT(gradients[0], ctx.mark), None


def _marked(x: Tensor, mark: int) -> Tensor:
    # ``_Mark.apply`` itself has no module since torch 2.14, and a graph cannot name it.
    value: Tensor = _Mark.apply(x, mark)  # type: ignore[no-untyped-call]
    return value


def mark_values(graph: fx.GraphModule) -> None:
    """Mark the floating-point values of Dynamo's graph that may be differentiated and have memory of their own."""
    nodes = list(graph.graph.nodes)
    entries = [node for node in nodes if node.op == "placeholder"]
    for number, node in enumerate(nodes):
        value = node.meta.get("example_value")
        if node.op not in ("placeholder", "call_function", "call_method") or not isinstance(value, Tensor):
            continue
        if not value.is_floating_point() or not value.requires_grad or _shares_memory(node, value):
            continue
        with graph.graph.inserting_after(entries[-1] if node.op == "placeholder" else node):
            mark = graph.graph.call_function(_marked, (node, number))
        mark.meta = dict(node.meta)
        node.replace_all_uses_with(mark, delete_user_cb=lambda user, mark=mark: user is not mark)
    graph.recompile()


def _shares_memory(node: fx.Node, value: Tensor) -> bool:
    given = (used.meta.get("example_value") for used in node.all_input_nodes)
    return any(isinstance(t, Tensor) and t.untyped_storage()._cdata == value.untyped_storage()._cdata for t in given)
