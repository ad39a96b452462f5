"""Reductions: sums run in a declared order, and each addition is rounded.

``sum`` follows the policy's Order: ``aten.sum.dim_IntList(x, [1], True)`` becomes
``fxround.sum(x, [1], True, "lanes:16", "binary32/stochastic/inf", ..., rng, 4)``. Products, prefixes and the
accumulating scatters ascend. Each element of a scatter's result is an accumulated or an original value; if the policy's
result format is narrower, a rounding follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Final

import torch
from torch import fx

from fxround.graph.dialect import CALLS, IndexPut, ReductionCall, ScanCall, ScatterAdd
from fxround.graph.dtypes import FORMAT_OF, STORAGES
from fxround.graph.site import META, Site
from fxround.graph.values import evaluate
from fxround.kernels.reductions import scatter_format
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.formats import Format
from fxround.numerics.modes import Rounding
from fxround.operators.rules import argument, rule_of
from fxround.passes import streams
from fxround.passes.rewrite import Plan, become, decided, insert, keeps, rng_of, round_after, sites
from fxround.policy import Assignment

aten = torch.ops.aten


def lower_reductions(graph: fx.GraphModule, plan: Plan) -> None:
    """Replace sums, products, their prefixes and accumulating scatters by their fixed-order kernels."""
    for node, place in sites(graph):
        wanted, rule = decided(place), rule_of(node) if place.kind == "reduction" else None
        if wanted is None or rule is None or not isinstance(wanted[0].accumulate, Accumulation):
            continue
        if rule.lower not in _LOWERINGS:
            node.meta[META] = replace(place, reason=f"fxround has no kernel for {rule.lower} yet")
        elif node.meta["val"].dtype in STORAGES:
            _LOWERINGS[rule.lower](graph, node, place, wanted[0], wanted[1])


def _step(assignment: Assignment) -> Accumulation:
    """Return the rounding of one addition and its faults. Product roundings and chunks apply to contractions only."""
    assert isinstance(assignment.accumulate, Accumulation)
    return assignment.accumulate.of_sums


def _tail(
    graph: fx.GraphModule, place: Site, assignment: Assignment, rounding: Rounding
) -> tuple[str, str, fx.Node, int]:
    """Return the last arguments of every reduction: accumulate, rounding, rng, node."""
    return str(_step(assignment)), str(rounding), rng_of(graph), place.number


def _reduced(graph: fx.GraphModule, node: fx.Node) -> tuple[fx.Node, list[int], bool]:
    """Return operand, dimensions and keepdim of aten.sum or aten.prod in any of their overloads."""
    named = {declared.name for declared in node.target._schema.arguments}  # type: ignore[union-attr]
    source, dims = argument(node, "self"), argument(node, "dim") if "dim" in named else []
    if source.meta["val"].dim() == 0:
        return insert(graph, node, aten.reshape.default, (source, [1])), [0], False
    dims = [dims] if isinstance(dims, int) else list(dims or range(source.meta["val"].dim()))
    return source, dims, "keepdim" in named and bool(argument(node, "keepdim"))


def _reduce(graph: fx.GraphModule, node: fx.Node, place: Site, assignment: Assignment, rounding: Rounding) -> None:
    """Lower a sum or product over dimensions; the policy's order is for operators that have one."""
    cls, (source, dims, keepdim) = _call_of(node), _reduced(graph, node)
    order = (str(assignment.order),) if "order" in {field.name for field in fields(cls)} else ()
    become(graph, node, cls(source, dims, keepdim, *order, *_tail(graph, place, assignment, rounding)))


def _scan(graph: fx.GraphModule, node: fx.Node, place: Site, assignment: Assignment, rounding: Rounding) -> None:
    """Lower sums or products of all prefixes."""
    cls, source, dim = _call_of(node), argument(node, "self"), argument(node, "dim")
    tail = _tail(graph, place, assignment, rounding)
    if source.meta["val"].dim():
        become(graph, node, cls(source, dim, *tail))
        return
    column = insert(graph, node, aten.reshape.default, (source, [1]))
    call = cls(column, 0, *tail)
    one = insert(graph, node, call.overload, call.arguments())
    one.meta[META] = replace(place, status="rounded", reason="")
    node.replace_all_uses_with(insert(graph, node, aten.reshape.default, (one, [])))
    graph.graph.erase_node(node)


def _call_of(node: fx.Node) -> Any:
    """Return the class of the operator that the rule of the node names."""
    rule = rule_of(node)
    assert rule is not None
    return _CALLS[rule.lower]


def _scatter(graph: fx.GraphModule, node: fx.Node, place: Site, assignment: Assignment, rounding: Rounding) -> None:
    """Lower scatter_add(x, dim, index, source) and index_put(x, indices, values, True).

    The kernel stores an accumulator to nearest in the tensor's dtype. If the accumulator is wider than that and the
    result is rounded otherwise, the kernel works on a binary32 copy, so that the result is rounded once.
    """
    accumulate, dtype = _step(assignment), node.meta["val"].dtype
    stored = Format.parse(FORMAT_OF[dtype])
    copied = not accumulate.step.format.within(stored) and rounding != Rounding.parse(str(stored))

    def operand(name: str) -> fx.Node:
        given: fx.Node = argument(node, name)
        return insert(graph, node, aten._to_copy.default, (given,), dtype=torch.float32) if copied else given

    x, tail = operand("self"), (str(accumulate), rng_of(graph), place.number)
    if node.target is aten.scatter_add.default:
        src = operand("src")
        become(graph, node, ScatterAdd(x, argument(node, "dim"), argument(node, "index"), src, *tail))
    else:
        become(graph, node, IndexPut(x, argument(node, "indices"), operand("values"), *tail))
    if copied:
        evaluate(graph, node)
        round_after(graph, node, rounding, streams.second(place.number), dtype)
    elif not keeps(rounding, scatter_format(accumulate, STORAGES[dtype]) if _is_zero(x) else stored):
        round_after(graph, node, rounding, streams.second(place.number))


def _is_zero(node: fx.Node) -> bool:
    """Whether a scatter begins with zeros, as gradients do. Other values that it keeps may not belong to the format."""
    constant = node.target in (aten.full.default, aten.full_like.default)
    return constant and bool(argument(node, "fill_value") == 0)


_CALLS: Final = {cls.name: cls for cls in CALLS.values() if issubclass(cls, ReductionCall | ScanCall)}
_LOWERINGS: Final[dict[str, Callable[[fx.GraphModule, fx.Node, Site, Assignment, Rounding], None]]] = {
    **{name: _reduce if issubclass(cls, ReductionCall) else _scan for name, cls in _CALLS.items()},
    ScatterAdd.name: _scatter,
    IndexPut.name: _scatter,
}
