"""What PyTorch does not differentiate: results of ``detach``, and what a model computes under ``torch.no_grad``.

A captured graph has values alone: ``x * x.detach()`` and ``x * x`` are the same product. Its gradients are right,
because autograd has made them. Before they are differentiated again, each value that autograd took for a constant must
be known, so that it is one there too. Dynamo's graph has this in the fake values, which require gradients or do not.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Final

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.nn import functional as F

from fxround.capture.torch_private import is_backward, traced_from
from fxround.graph.site import located

# In the ``meta`` of a captured node: autograd did not differentiate its value.
CONSTANT: Final = "fxround_constant"
_SWITCH: Final = torch._C._set_grad_enabled
_FUNCTION: Final = torch.ops.higher_order.autograd_function_apply
_IN_PLACE: Final = frozenset(
    {
        *(operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv),
        *(operator.imod, operator.ipow, operator.imatmul),
    }
)
_UNTOLD: Final = (
    "what is a constant of the derivative cannot be told from the graph. Call detach() on a result, at the level of "
    "the model's code"
)
_DETACHED: Final = ("detach", "detach_", "_get_data_attr")


def mark_constants(graph: fx.GraphModule, joint: fx.GraphModule) -> str:
    """Mark the nodes of AOTAutograd's graph whose values autograd took for constants.

    graph: Dynamo's graph, of which the joint graph was traced. Returns why its gradients cannot be differentiated
    again, with the place in the model; an empty text if they can.
    """
    called = (node for node in graph.graph.nodes if node.op in ("call_method", "call_function"))
    constants = {node.name for node in called if _is_constant(node)}
    for node in joint.graph.nodes:
        if node.op == "call_function" and not is_backward(node) and traced_from(node) in constants:
            node.meta[CONSTANT] = True
    scaled = next((located(node) for node in graph.graph.nodes if _scales_by_counts(node)), None)
    if scaled is not None:
        return f"{scaled} has scale_grad_by_freq=True, with which PyTorch's second derivative is none of its gradient's"
    doubt = next(_doubts(graph, constants), "")
    return doubt and f"{doubt}: {_UNTOLD}"


def _scales_by_counts(node: fx.Node) -> bool:
    if node.target is not F.embedding:
        return False
    given = node.kwargs.get("scale_grad_by_freq", node.args[5] if len(node.args) > 5 else False)
    return bool(given) and any(_flags(node))


def _is_constant(node: fx.Node) -> bool:
    flags = _flags(node)
    return bool(flags) and not any(flags)


def _flags(node: fx.Node) -> list[bool]:
    """Return whether each floating-point tensor among a node's results requires a gradient."""
    leaves = pytree.tree_leaves(node.meta.get("example_value"))
    return [_requires(x) for x in leaves if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())]


def _requires(value: Tensor) -> bool:
    """Whether a tensor, or one that a transform of ``torch.func`` has wrapped in it, requires a gradient."""
    functorch = torch._C._functorch
    while not value.requires_grad and functorch.is_functorch_wrapped_tensor(value):
        value = functorch.get_unwrapped(value)
    return value.requires_grad


def _doubts(graph: fx.GraphModule, constants: set[str]) -> Iterator[str]:
    enabled = True
    for node in graph.graph.nodes:
        if node.target is _SWITCH:
            enabled = bool(node.args[0])
        elif _name(node) == "detach_" or (not enabled and _changes(node)):
            yield f"{located(node)} changes a value that has a gradient in place, without a gradient"
        elif len(set(_flags(node))) > 1:
            yield f"{located(node)} has results with and without a gradient"
        for body in _bodies(graph, node):
            yield from _doubts_of_body(node, body, constants)


def _doubts_of_body(caller: fx.Node, body: fx.GraphModule, constants: set[str]) -> Iterator[str]:
    """Yield what a body has that the nodes of ATen's graph do not tell."""
    for node in body.graph.nodes:
        switches = node.target is _SWITCH and caller.target is not _FUNCTION
        if switches or _name(node) in _DETACHED:
            yield f"{located(caller)} detaches a value inside of its body"
        elif node.name in constants:
            yield f"{located(caller)}: the name {node.name} is that of a detached value outside of its body"
        for inner in _bodies(body, node):
            yield from _doubts_of_body(node, inner, constants)


def _bodies(graph: fx.GraphModule, node: fx.Node) -> list[fx.GraphModule]:
    """Return the bodies that a node calls."""
    if node.op != "call_function":
        return []
    used = [getattr(graph, str(x.target), None) for x in node.all_input_nodes if x.op == "get_attr"]
    return [x for x in used if isinstance(x, fx.GraphModule)]


def _name(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")


def _changes(node: fx.Node) -> bool:
    """Whether a node changes a tensor in place that requires a gradient."""
    changes = node.target in _IN_PLACE or (_name(node).endswith("_") and not _name(node).endswith("__"))
    if not changes or _name(node) == "requires_grad_" or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    return any(_flags(node.args[0]))
