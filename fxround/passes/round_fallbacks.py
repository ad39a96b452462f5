"""Round the result of every stock kernel once, and record why the kernel was kept.

After this pass every floating-point value is rounded, exact, moved, left alone by the policy, or native with a reason.
A selection (relu, maximum, where) rounds nothing unless its operands may lie outside the format that the policy gives
to its result. Under ``strict`` an operator without a kernel is an error.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final, cast

import torch
from torch import fx

from fxround.errors import UnsupportedOperator
from fxround.graph.dtypes import FORMAT_OF, STORAGES
from fxround.graph.site import META, Site, float_value, float_values, function_of, site
from fxround.numerics.formats import Format
from fxround.numerics.modes import Rounding
from fxround.numerics.specification.exact import round_float
from fxround.operators.rules import rule_of
from fxround.passes.rewrite import ROUND, Plan, decided, insert, keeps, round_after, sites

LEFT_ALONE = "the policy leaves it alone"
OWN = "the model's own fxround.round"
_ROUNDED = "; its result is rounded once"
# The operators that choose some of many elements, and those by which gradients find the chosen ones.
_CHOOSE: Final = (
    *("aten.amax.default", "aten.amin.default", "aten.median.default", "aten.nanmedian.default"),
    *("aten.scatter_reduce.two", "aten.segment_reduce.default", "fxround.extreme_of_processes.default"),
)
_COMPARISONS: Final = ("aten.eq.Tensor", "aten._segment_reduce_backward.default")


def round_results(graph: fx.GraphModule, plan: Plan) -> None:
    """Round after the operators that kept their stock kernel, and give each of them a reason."""
    for node, place in sites(graph):
        rule = rule_of(node)
        if plan.strict and rule is not None and rule.kind == "random" and not float_values(node):
            raise UnsupportedOperator(
                f"{place}: node {node.name} draws integers from PyTorch's global generator, not from (seed, sample), "
                f"and policy {plan.policy.name!r} is strict: pass them as an argument, or pass strict=False."
            )
        if place.status != "native":
            continue
        wanted = decided(place)
        if wanted is None:
            node.meta[META] = replace(place, reason=place.reason or LEFT_ALONE)
            continue
        if any(value.layout != torch.strided for value in float_values(node)):
            raise UnsupportedOperator(
                f"{place}: {_said(node)} has a sparse result, which policy {plan.policy.name!r} cannot round: for the "
                "gradient of an embedding, pass sparse=False to the embedding."
            )
        reason = OWN if is_own(node) else place.reason or _reason(place, node)
        if plan.strict and wanted[0].accumulate != "native" and not is_own(node):
            raise UnsupportedOperator(
                f"{place}: {_said(node)} cannot be rounded, and policy {plan.policy.name!r} is strict: {reason}. "
                "Pass strict=False to keep the stock kernel and round its result once, or replace the operator."
            )
        rounded = [_round_if_stored(graph, result) for result in _results(node)]
        node.meta[META] = replace(place, reason=reason + (_ROUNDED if any(rounded) else ""))


def _said(node: fx.Node) -> str:
    """Return the node by its name; with the function of the model, where it is a part of what that computes."""
    called = function_of(node) if node.target is torch.ops.aten.view_as_real_copy.default else ""
    return f"{called} (node {node.name})" if called else f"node {node.name}"


def is_own(node: fx.Node) -> bool:
    """Whether the node is a call of ``fxround.round`` in the model's code: a rounding, which no policy chooses."""
    return str(node.target).startswith("fxround.round_")


def _results(node: fx.Node) -> list[fx.Node]:
    """Return the node itself, or the nodes that take its values if it yields several."""
    return [node] if float_value(node) is not None else list(node.users)


def _round_if_stored(graph: fx.GraphModule, node: fx.Node) -> bool:
    place, value = node.meta.get(META), float_value(node)
    wanted = decided(place) if place is not None else None
    if place is None or value is None or wanted is None or value.dtype not in STORAGES:
        return False
    round_after(graph, node, wanted[1], place.number)
    return True


def _reason(place: Site, node: fx.Node) -> str:
    if place.assignment is not None and place.assignment.accumulate == "native":
        return "the policy keeps the stock kernel, whose bits depend on the device"
    return f"no kernel stores {float_values(node)[0].dtype}"


def round_selections(graph: fx.GraphModule, plan: Plan) -> None:
    """Round the result of an exact operator if an operand may lie outside the result's format."""
    grids: dict[fx.Node, Format] = {}
    for node in list(graph.graph.nodes):
        values, place = float_values(node), node.meta.get(META)
        if not values or values[0].dtype not in FORMAT_OF:
            continue
        grids[node] = _grid(node, place, grids)
        wanted = decided(place) if place is not None and place.kind == "exact" else None
        if wanted is None or place.status == "rounded" or float_value(node) is None:
            continue
        if not keeps(wanted[1], grids[node]) and not _unmoved(wanted[1], grids[node]):
            grids[round_after(graph, node, wanted[1], place.number)] = wanted[1].format


def compare_selections(graph: fx.GraphModule, plan: Plan) -> None:
    """Let gradients find the chosen elements by the value that was chosen, not by its rounding.

    PyTorch's formulas for amax, median and others compare the operand with the result. A rounding of the result to a
    narrower format than the operand's would equal no element.
    """
    for node in list(graph.graph.nodes):
        place = site(node)
        if place is None or place.direction != "backward" or str(node.target) not in _COMPARISONS:
            continue
        for operand in node.all_input_nodes:
            chosen, moves = _chosen(operand)
            if chosen is None:
                continue
            for move in reversed(moves):
                chosen = insert(graph, node, move.target, (chosen, *move.args[1:]), **move.kwargs)
            node.replace_input_with(operand, chosen)


def _chosen(node: fx.Node) -> tuple[fx.Node | None, list[fx.Node]]:
    """Return the selection whose rounding a value is, and what moved that, last first; None for any other value."""
    moves, rounded = [], False
    while (place := site(node)) is not None and node.op == "call_function":
        if place.operator == ROUND:
            node, rounded = node.all_input_nodes[0], True
        elif place.kind == "movement" and isinstance(node.args[0], fx.Node):
            moves.append(node)
            node = node.args[0]
        elif _spells(node):
            node = cast(fx.Node, node.args[2])
        else:
            break
    return (node if rounded and str(node.target) in _CHOOSE else None), moves


def _spells(node: fx.Node) -> bool:
    """Whether the node is the step of the formulas of amax and amin that gives zeros and NaNs their one encoding."""
    if str(node.target) != "aten.where.self" or not isinstance(node.args[1], fx.Node):
        return False
    number = node.args[1].args[0] if str(node.args[1].target) == "aten.scalar_tensor.default" else None
    return isinstance(number, float) and (number == 0 or math.isnan(number))


def _unmoved(rounding: Rounding, grid: Format) -> bool:
    """Whether up_down leaves the value: it moves results of operations, not a selection among values of the format."""
    return rounding.mode.moves and grid.within(rounding.format)


def _grid(node: fx.Node, place: Site | None, grids: dict[fx.Node, Format]) -> Format:
    """Return a format that holds every value of the node: the one it was rounded to, or one that its operands have."""
    own = Format.parse(FORMAT_OF[float_values(node)[0].dtype])
    if place is None or place.status == "native" or node.op != "call_function":
        return own
    wanted = decided(place)
    if place.status == "rounded":
        return wanted[1].format if wanted else own
    formats = [grids[source] for source in node.all_input_nodes if source in grids]
    widest = next((f for f in formats if all(other.within(f) for other in formats)), None)
    return widest if widest is not None and _holds(widest, node) else own


def _holds(grid: Format, node: fx.Node) -> bool:
    """Whether the format has zero and the numbers in the node's arguments (the bounds of a clamp)."""
    numbers = [a for a in (*node.args[1:], *node.kwargs.values()) if isinstance(a, float | int)]
    nearest = Rounding.parse(grid.name)
    return all(round_float(float(n), nearest) == float(n) for n in (0.0, *numbers))
