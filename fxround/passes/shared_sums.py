"""Sums over what several processes share: the order of each process's part, and the tree that adds the parts.

An order of S shards is a balanced tree over S parts of a sum. A process that has one of t equal parts computes it under
S / t shards, and the sums of the processes are added by the rest of the tree, in the order of their ranks: together the
bits of one process. ``share_sums`` writes this into the graph. Both passes refuse what would show how many processes
there are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import fx

from fxround.capture.processes import SUM_OF_PROCESSES
from fxround.capture.shared_choices import EXTREME_OF_PROCESSES
from fxround.errors import PolicyError, UnsupportedOperator, UnsupportedRounding
from fxround.graph.dialect import AddProcesses, graphs_of, read
from fxround.graph.dialect.blocks import BlockCall
from fxround.graph.dtypes import FORMAT_OF, STORAGES
from fxround.graph.site import META, PORT, Port, Site, float_value, float_values, site
from fxround.graph.values import evaluate
from fxround.kernels.accumulators import accumulator_of, chain_rounding
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.formats import Format
from fxround.numerics.formats.storage import CARRIER_OF
from fxround.passes.analyses.draws import any_draws, draws
from fxround.passes.rewrite import Plan, become, decided, insert, rng_of, round_after, sites
from fxround.policy import Assignment

_ADVICE: Final = (
    'the preset "reproducible_sharded" has 8 shards, and so has a rule with order="shards:8/lanes:16" for what this '
    "rule selects"
)


def share_sums(graph: fx.GraphModule, plan: Plan) -> None:
    """Give each process the part of the order that it computes, and add the parts by a kernel of fxround's.

    Raises PolicyError for an order that the processes cannot share.
    """
    _refuse_scales(graph, plan)
    for node, place in sites(graph):
        if node.target not in (SUM_OF_PROCESSES, EXTREME_OF_PROCESSES):
            continue
        part, group, processes = node.args[:3]
        assert isinstance(part, fx.Node) and isinstance(group, str) and isinstance(processes, int)
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
        node.meta[META] = replace(place, assignment=made.assignment)
        wanted = decided(made)
        if wanted is None:
            continue
        dtype = node.meta["val"].dtype
        own = _of_each(made, wanted[0], processes, dtype)
        part.meta[META] = replace(made, assignment=own)
        inside, held = str(own.rounding), _holding(own, dtype)
        rounding = str(wanted[1]) if held == dtype else inside
        if held != dtype:
            _widen(graph, part, held)
        become(graph, node, AddProcesses(part, group, processes, inside, rounding, rng_of(graph), place.number))
        if held != dtype:
            evaluate(graph, node)
            round_after(graph, node, wanted[1], place.number, dtype)
            node.meta[META] = replace(node.meta[META], assignment=own)


def _of_each(place: Site, assignment: Assignment, processes: int, dtype: torch.dtype) -> Assignment:
    """Return how one of several processes computes its part of a sum: it rounds what it has to no other format.

    dtype: of the sum in one process, whose chain may have more exponents than the format of its steps.
    """
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
    carriers = (CARRIER_OF[STORAGES[dtype]],)
    inside = chain_rounding(accumulate.step, accumulator_of(accumulate.step, carriers), carriers, accumulate.flips)
    part, how = replace(order, shards=order.shards // processes), replace(accumulate, step=inside)
    return replace(assignment, order=part, accumulate=how, rounding=inside, blocks=None)


def _holding(assignment: Assignment, dtype: torch.dtype) -> torch.dtype:
    """Return a dtype that holds what is assigned: this one, or a wider one."""
    rounding = assignment.rounding
    assert rounding is not None
    dtypes = (dtype, torch.float32, torch.float64)
    return next(d for d in dtypes if rounding.format.within(Format.parse(FORMAT_OF[d])))


def _widen(graph: fx.GraphModule, part: fx.Node, dtype: torch.dtype) -> None:
    """Let a node read its operands in another dtype, which has all of their values, and give its result in it."""
    for operand in part.all_input_nodes:
        value = float_value(operand)
        if value is not None and value.dtype != dtype:
            wide = insert(graph, part, torch.ops.aten._to_copy.default, (operand,), dtype=dtype)
            part.replace_input_with(operand, wide)
    part.kwargs = {name: value for name, value in part.kwargs.items() if name != "dtype"}
    evaluate(graph, part)


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
