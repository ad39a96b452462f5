"""Runs of a lowered graph without derivatives: as a sample, or exactly, in binary64."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from fxround.attribution.graphs import is_tangent, plan_of
from fxround.attribution.states import binary64, is_float, widened
from fxround.graph.site import PORT


def evaluated(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    exact: bool = False,
    tangents: Callable[[list[Any], list[int]], list[Any]] | None = None,
    watched: Collection[str] = (),
    rounded: Collection[str] = (),
) -> tuple[list[Any], dict[str, Any]]:
    """Return what a lowered graph returns, and the values of the nodes ``watched``.

    exact: whether every operation is computed in binary64, without a rounding, but those ``rounded``. tangents: the
    function from the results to the gradients of those at some positions, for a joint graph.
    """
    values: dict[fx.Node, Any] = {}
    plan, seen, given = plan_of(graph), dict[str, Any](), iter(inputs)
    get, waiting = values.__getitem__, plan.tangents
    with torch.no_grad():
        for step in plan.steps:
            node = step.node
            if waiting and tangents is not None and any(is_tangent(used) for used in step.reads):
                made = tangents([values[used] for used in plan.results], [one.meta[PORT].index for one in waiting])
                values.update(zip(waiting, made, strict=True))
                waiting = ()
            if node.op in ("placeholder", "get_attr"):
                entering = attrgetter(str(node.target))(graph) if node.op == "get_attr" else None
                if node.op == "placeholder" and not is_tangent(node):
                    entering = next(given)
                values[node] = widened(entering) if exact else entering
            elif not exact:
                values[node] = step.call_with(get)
            elif step.scale or node.name in rounded:
                values[node] = step.call_with(lambda used: pytree.tree_map(_stored, values[used]))
                values[node] = values[node] if step.scale else pytree.tree_map(widened, values[node])
            else:
                values[node] = step.call_with(get, binary64)
            if node.name in watched:
                seen[node.name] = values[node]
            for used in plan.spent.get(node, ()):
                del values[used]
    return [values.get(used) for used in plan.returned], seen


def _stored(value: Any) -> Any:
    return value.float() if is_float(value) else value
