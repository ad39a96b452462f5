"""Sums over what several processes share: the order of each process's part, and the tree that adds the parts.

An order of S shards is a balanced tree over S parts of a sum. A process that has one of t equal parts computes it under
S / t shards, and the sums of the processes are added by the rest of the tree, in the order of their ranks: together the
bits of one process. ``share_sums`` writes this into the graph. Both passes refuse what would show how many processes
there are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from torch import fx

from fxround.capture.processes import SUM_OF_PROCESSES
from fxround.errors import PolicyError, UnsupportedOperator, UnsupportedRounding
from fxround.graph.dialect import AddProcesses, graphs_of, read
from fxround.graph.dialect.blocks import BlockCall
from fxround.graph.dtypes import FORMAT_OF, STORAGES
from fxround.graph.site import META, PORT, Port, Site, float_values, site
from fxround.kernels.accumulators import accumulator_of, chain_rounding
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.formats import Format
from fxround.numerics.formats.storage import CARRIER_OF
from fxround.passes.analyses.draws import any_draws, draws
from fxround.passes.rewrite import Plan, become, decided, rng_of, sites
from fxround.policy import Assignment

_ADVICE: Final = (
    'the preset "reproducible_sharded" has 8 shards, and so has a rule with order="shards:8/lanes:16" for what this '
    "rule selects"
)


def share_sums(graph: fx.GraphModule, plan: Plan) -> None:
    """Give each process the part of the order that it computes, and add the parts by a kernel of fxround's.

    Raises PolicyError for an order that the processes cannot share, UnsupportedRounding for an accumulator that a
    process cannot pass on.
    """
    _refuse_scales(graph, plan)
    for node, place in sites(graph):
        if node.target is not SUM_OF_PROCESSES:
            continue
        part, group, processes = node.args
        assert isinstance(part, fx.Node) and isinstance(group, str) and isinstance(processes, int)
        made = site(part)
        if made is None or made.kind not in ("contraction", "reduction"):
            raise UnsupportedOperator(f"{place}: {processes} processes share a sum that fxround does not find")
        node.meta[META] = replace(place, assignment=made.assignment)
        wanted = decided(made)
        if wanted is None:
            continue
        own = _of_each(made, part, wanted[0], processes)
        part.meta[META] = replace(made, assignment=own)
        accumulate, rounding = str(own.rounding), str(wanted[1])
        become(graph, node, AddProcesses(part, group, processes, accumulate, rounding, rng_of(graph), place.number))


def _of_each(place: Site, part: fx.Node, assignment: Assignment, processes: int) -> Assignment:
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
    step, dtype = accumulate.step, part.meta["val"].dtype
    carriers = (CARRIER_OF[STORAGES[dtype]],)
    inside = chain_rounding(step, accumulator_of(step, carriers), carriers)
    if processes > 1 and (inside != step or not step.format.within(Format.parse(FORMAT_OF[dtype]))):
        raise UnsupportedRounding(
            f"{place}: {processes} processes share this sum, and pass on accumulators of {step} as tensors of "
            f"{str(dtype)[6:]}, which do not have their precision and range: use a model in float32, and "
            'accumulate="binary32", or a model in float64'
        )
    return replace(assignment, order=replace(order, shards=order.shards // processes), rounding=step, blocks=None)


def _refuse_scales(graph: fx.GraphModule, plan: Plan) -> None:
    """Raise UnsupportedRounding for scales: that of a tensor or a block would be that of a process's part."""
    ports = _ports(graph)
    if not any(port.shared for port in ports):
        return
    kept = any(port.kind == "multiplier" for port in ports)
    if kept or _has_scales(graph):
        raise UnsupportedRounding(f"the policy {plan.policy.name!r} has formats with scales. {_OF_PARTS}")


def counted_in_parts(graph: fx.GraphModule) -> str:
    """Return what a lowered graph computes of the elements that a process has: "random bits", "scales" or ""."""
    if any(map(any_draws, graphs_of(graph))):
        return "random bits"
    return "scales" if _has_scales(graph) else ""


def _has_scales(graph: fx.GraphModule) -> bool:
    return any(isinstance(read(node), BlockCall) for part in graphs_of(graph) for node in part.graph.nodes)


def _ports(graph: fx.GraphModule) -> list[Port]:
    return [node.meta[PORT] for node in graph.graph.find_nodes(op="placeholder") if PORT in node.meta]


def require_shared(graph: fx.GraphModule, plan: Plan) -> None:
    """Raise for operations of a model that processes share whose bits would depend on the number of processes.

    Random bits are drawn by the number of an element, which is counted in the part of a process.
    """
    if not any(port.shared for port in _ports(graph)):
        return
    for part in graphs_of(graph):
        for node, place in sites(part):
            call = read(node)
            if place.kind == "random" and float_values(node):
                raise UnsupportedOperator(f"{place} draws random numbers. {_OF_PARTS}")
            if call is not None and draws(call):
                raise UnsupportedRounding(
                    f"{place}: the policy {plan.policy.name!r} draws random bits here. {_OF_PARTS}"
                )


_OF_PARTS: Final = (
    "Processes share this model, and each would count the elements of its own part alone, so that the bits would "
    "depend on their number: use a policy without random bits and scales, and eval mode where dropout draws"
)
