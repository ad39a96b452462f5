"""Results that share memory with an input or another result in the model, and that the policy rounds.

A model that returns its argument, or a view of it, returns that very tensor, and so does the compiled module. If the
policy rounds the argument where it enters, or the result, the result has other numbers: it is a tensor of its own,
whose gradient is passed on as it is, since a view only moves numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fxround.capture import Captured
from fxround.capture.aliases import Alias
from fxround.graph.site import PORT, Port, site


def rounded_aliases(captured: Captured, lowered: fx.GraphModule) -> frozenset[int]:
    """Return the positions of the results that share memory in the model and are rounded in the lowered graph."""
    outputs: Any = lowered.graph.output_node().args[0]
    pairs = zip(captured.outputs, outputs, strict=False)  # magnitudes follow
    results = [node for port, node in pairs if port.kind != "gradient" and not port.mutation]
    written = {(port.name, port.index) for port in captured.results if port.mutation}
    return frozenset(i for i, alias in captured.aliases.items() if _is_rounded(alias, results[i], results, written))


def rounded_once(shared: Tensor, rounded: Tensor) -> Tensor:
    """Return the rounded numbers with the gradient of the tensor that has them before they were rounded."""
    result: Tensor = _Rounded.apply(shared, rounded)  # type: ignore[no-untyped-call]
    return result


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shared: Tensor, rounded: Tensor) -> Tensor:
        return rounded.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


def _is_rounded(alias: Alias, result: Any, results: list[Any], written: set[tuple[str, int]]) -> bool:
    """Whether a result has other numbers than what it shares memory with.

    written: the inputs that the model changes in place, of which a view shows what is written.
    """
    if not isinstance(result, fx.Node):
        return False
    root = _root(result)
    if isinstance(alias.base, int):
        return root is not _root(results[alias.base])
    if isinstance(alias.base, Port):
        port, own = root.meta.get(PORT), (alias.base.name, alias.base.index)
        return own not in written and (port is None or (port.name, port.index) != own)
    return root.op != "get_attr"


def _root(node: fx.Node) -> fx.Node:
    """Return the node that makes the numbers of a value, or brings them into the graph."""
    while node.op == "call_function" and node.all_input_nodes:
        place = site(node)
        if place is None or place.status == "rounded":
            return node
        node = node.all_input_nodes[0]
    return node
