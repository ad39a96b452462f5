"""Sums over what several processes share: the order of each process's part, and the tree that adds the parts.

An order of S shards is a balanced tree over S parts of a sum. A process that has one of t equal parts computes it under
S / t shards, and the sums of the processes are added by the rest of the tree, in the order of their ranks: together the
bits of one process. ``share_sums`` chooses the part, and ``add_shares`` adds the parts when they have kernels.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

from torch import fx

from fxround.capture.processes import SUM_OF_PROCESSES
from fxround.capture.shared_choices import EXTREME_OF_PROCESSES
from fxround.errors import PolicyError, UnsupportedOperator, UnsupportedRounding
from fxround.graph.dialect import AddProcesses, Call, ContractionCall, Matmul, Sum, graphs_of, read
from fxround.graph.dialect.blocks import BlockCall
from fxround.graph.dialect.call import value_of
from fxround.graph.dialect.reductions import dims_of
from fxround.graph.site import META, PORT, Port, Site, site
from fxround.graph.values import evaluate
from fxround.kernels import from_text
from fxround.kernels.from_text import UNFINISHED, accumulators
from fxround.numerics.accumulation import Accumulation
from fxround.passes.analyses.draws import any_draws
from fxround.passes.rewrite import Plan, become, decided, locating, rng_of, sites
from fxround.policy import Assignment

_ADVICE: Final = (
    'the preset "reproducible_sharded" has 8 shards, and so has a rule with order="shards:8/lanes:16" for what this '
    "rule selects"
)


def share_sums(graph: fx.GraphModule, plan: Plan) -> None:
    """Give each process the part of the order that it computes.

    Raises PolicyError for an order that the processes cannot share.
    """
    _refuse_kept_scales(graph, plan)
    for node, place in sites(graph):
        if node.target not in (SUM_OF_PROCESSES, EXTREME_OF_PROCESSES):
            continue
        part, _, processes = _arguments(node)
        made = site(part)
        if processes == 1:
            node.replace_all_uses_with(part)
            graph.graph.erase_node(node)
            continue
        if node.target is EXTREME_OF_PROCESSES:  # what rounds the maximum in one process rounds that of the parts
            assert made is not None
            node.meta[META] = replace(place, assignment=made.assignment, number=made.number)
            part.meta[META] = replace(made, assignment=None, number=place.number)
            continue
        if made is None or made.kind not in ("contraction", "reduction"):
            raise UnsupportedOperator(f"{place}: {processes} processes share a sum that fxround does not find")
        node.meta[META] = replace(place, assignment=made.assignment, number=made.number)
        wanted = decided(made)
        if wanted is not None:
            part.meta[META] = replace(made, assignment=_of_each(made, wanted[0], processes))


def add_shares(graph: fx.GraphModule, plan: Plan) -> None:
    """Let each process store the accumulators of its part, and add them by a kernel of fxround's.

    Raises UnsupportedOperator for a sum without a kernel.
    """
    for node, place in sites(graph):
        wanted = decided(place) if node.target is SUM_OF_PROCESSES else None
        if wanted is None:
            continue
        part, group, processes = _arguments(node)
        made, call, dtype = site(part), read(part), node.meta["val"].dtype
        if made is None or made.assignment is None or not isinstance(call, ContractionCall | Sum):
            raise UnsupportedOperator(f"{place}: {processes} processes share a sum for which fxround has no kernel")
        with locating(place):
            held = accumulators(call.accumulate, call.loads())
        unfinished: Call[fx.Node] = replace(call, rounding=UNFINISHED)  # type: ignore[arg-type]
        part.args = unfinished.arguments()
        evaluate(graph, part)
        part.meta[META] = replace(made, assignment=replace(made.assignment, rounding=held, blocks=None))
        whole = _whole(call, wanted[0])
        become(
            graph,
            node,
            AddProcesses(
                *(part, group, processes, dtype, *whole, str(wanted[1]), length_of(call)), rng_of(graph), place.number
            ),
        )


def _arguments(node: fx.Node) -> tuple[fx.Node, str, int]:
    part, group, processes = node.args[:3]
    assert isinstance(part, fx.Node) and isinstance(group, str) and isinstance(processes, int)
    return part, group, processes


def _whole(call: ContractionCall[fx.Node] | Sum[fx.Node], assignment: Assignment) -> tuple[str, str]:
    """Return the order and the accumulation of the whole sum, as ``AddProcesses`` has them."""
    return (str(assignment.order), call.accumulate) if isinstance(call, Sum) else ("", str(assignment.of_products))


def shards_of_call(call: Any) -> int:
    """Return the shards in which a call sums; 1 for one that does not."""
    if isinstance(call, Sum) or (isinstance(call, AddProcesses) and call.order):
        return from_text.order(call.order).shards
    if isinstance(call, ContractionCall | AddProcesses):
        return from_text.accumulation(call.accumulate).shards or 1
    return 1


def length_of(call: ContractionCall[fx.Node] | Sum[fx.Node]) -> int:
    """Return how many elements a process sums; 0 where that is known at run time alone, or by windows."""
    if isinstance(call, Sum):
        value = value_of(call.x)
        sizes = [value.shape[d] for d in dims_of(value, call.dims)]
    else:
        sizes = [value_of(call.a).shape[-1]] if isinstance(call, Matmul) else [0]
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else 0


def _of_each(place: Site, assignment: Assignment, processes: int) -> Assignment:
    """Return how one of several processes computes its part of a sum."""
    order, accumulate = assignment.order, assignment.accumulate
    if not isinstance(accumulate, Accumulation):
        raise PolicyError(
            f"{place}: {processes} processes share this sum, and the policy leaves it to the stock kernel, whose order "
            f"depends on their number: {_ADVICE}"
        )
    if order.shards % processes:
        has = f"{order.shards} shards, which {processes} cannot share evenly" if order.shards > 1 else "no shards"
        raise PolicyError(
            f"{place}: {processes} processes share this sum, and its order {order} has {has}: the bits would depend on "
            f"the number of processes; {_ADVICE}"
        )
    return replace(assignment, order=replace(order, shards=order.shards // processes))


def _refuse_kept_scales(graph: fx.GraphModule, plan: Plan) -> None:
    """Raise UnsupportedRounding for scales that a module keeps: each process would keep those of its part."""
    ports = _ports(graph)
    if any(port.shared for port in ports) and any(port.kind == "multiplier" for port in ports):
        raise UnsupportedRounding(
            f"the policy {plan.policy.name!r} keeps scales between calls, processes share this model, and each would "
            "keep the scales of its own part: use a policy with scales of each call (mxfp8), or without scales"
        )


def counted_in_parts(graph: fx.GraphModule) -> str:
    """Return what a lowered graph computes of the elements that a process has: "random bits", "scales" or ""."""
    if any(map(any_draws, graphs_of(graph))):
        return "random bits"
    return "scales" if _has_scales(graph) else ""


def _has_scales(graph: fx.GraphModule) -> bool:
    return any(isinstance(read(node), BlockCall) for part in graphs_of(graph) for node in part.graph.nodes)


def _ports(graph: fx.GraphModule) -> list[Port]:
    return [node.meta[PORT] for node in graph.graph.find_nodes(op="placeholder") if PORT in node.meta]
