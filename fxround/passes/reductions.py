"""Reductions: sums run in a declared order, and each addition is rounded.

``sum`` follows the policy's Order: ``aten.sum.dim_IntList(x, [1], True)`` becomes
``fxround.sum(x, [1], True, "lanes:16", "binary32/stochastic/inf", ..., rng, 4)``. Products, prefixes and the
accumulating scatters ascend. Each element of a scatter's result is an accumulated or an original value; if the policy's
result format is narrower, a rounding follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
from torch import fx

from fxround.capture.refusals import FORMAT_OF
from fxround.graph.site import META, Site
from fxround.graph.values import evaluate
from fxround.kernels.specialize import cumprod_kernel, cumsum_kernel, prod_kernel, scatter_format, sum_kernel
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.formats import Format
from fxround.numerics.modes import Rounding
from fxround.operators.rules import rule_of
from fxround.passes.rewrite import STORAGES, Plan, become, decided, insert, keeps, locating, rng_of, round_after, sites
from fxround.policy import Assignment

aten = torch.ops.aten


def lower_reductions(graph: fx.GraphModule, plan: Plan) -> None:
    """Replace sums, products, their prefixes and accumulating scatters by their fixed-order kernels."""
    for node, place in sites(graph):
        wanted, rule = decided(place), rule_of(node) if place.kind == "reduction" else None
        if wanted is None or rule is None or not isinstance(wanted[0].accumulate, Accumulation):
            continue
        if not hasattr(torch.ops.fxround, rule.lower):
            node.meta[META] = replace(place, reason=f"fxround has no kernel for {rule.lower} yet")
        elif node.meta["val"].dtype in STORAGES:
            _LOWERINGS[rule.lower](graph, node, place, wanted[0], wanted[1])


def _step(assignment: Assignment) -> Rounding:
    """Return the rounding of one addition. Product roundings and chunks apply to contractions only."""
    assert isinstance(assignment.accumulate, Accumulation)
    return assignment.accumulate.step


def _sum(graph: fx.GraphModule, node: fx.Node, place: Site, assignment: Assignment, rounding: Rounding) -> None:
    source: Any = node.args[0]
    dims = list(node.args[1] or []) if len(node.args) > 1 else []  # type: ignore[arg-type]
    keepdim = bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim", False))
    if source.meta["val"].dim() == 0:
        source, dims, keepdim = insert(graph, node, aten.reshape.default, (source, [1])), [0], False
    dims = dims or list(range(source.meta["val"].dim()))
    storage, accumulate, order = STORAGES[node.meta["val"].dtype], _step(assignment), assignment.order
    with locating(place):
        sum_kernel(order, accumulate, rounding, storage, storage)
    texts = (str(order), str(accumulate), str(rounding))
    become(graph, node, "sum", (source, dims, keepdim, *texts, rng_of(graph), place.number))


def _prod(graph: fx.GraphModule, node: fx.Node, place: Site, assignment: Assignment, rounding: Rounding) -> None:
    source: Any = node.args[0]
    dims = [node.args[1]] if len(node.args) > 1 else []
    keepdim = bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim", False))
    if source.meta["val"].dim() == 0:
        source, dims, keepdim = insert(graph, node, aten.reshape.default, (source, [1])), [0], False
    dims = dims or list(range(source.meta["val"].dim()))
    storage, accumulate = STORAGES[node.meta["val"].dtype], _step(assignment)
    with locating(place):
        prod_kernel(accumulate, rounding, storage, storage)
    tail = (str(accumulate), str(rounding), rng_of(graph), place.number)
    become(graph, node, "prod", (source, dims, keepdim, *tail))


def _scan(graph: fx.GraphModule, node: fx.Node, place: Site, assignment: Assignment, rounding: Rounding) -> None:
    """Lower cumsum and cumprod to the kernel that the operator's rule names."""
    rule = rule_of(node)
    assert rule is not None
    source, dim = node.args[:2]
    storage, accumulate = STORAGES[node.meta["val"].dtype], _step(assignment)
    assert isinstance(source, fx.Node)
    with locating(place):
        (cumsum_kernel if rule.lower == "cumsum" else cumprod_kernel)(accumulate, rounding, storage, storage)
    tail = (str(accumulate), str(rounding), rng_of(graph), place.number)
    if source.meta["val"].dim():
        become(graph, node, rule.lower, (source, dim, *tail))
        return
    column = insert(graph, node, aten.reshape.default, (source, [1]))
    scan = insert(graph, node, getattr(torch.ops.fxround, rule.lower).default, (column, 0, *tail))
    scan.meta[META] = replace(place, status="rounded", reason="")
    node.replace_all_uses_with(insert(graph, node, aten.reshape.default, (scan, [])))
    graph.graph.erase_node(node)


def _scatter(graph: fx.GraphModule, node: fx.Node, place: Site, assignment: Assignment, rounding: Rounding) -> None:
    """Lower scatter_add(x, dim, index, source) and index_put(x, indices, values, True).

    The kernel stores an accumulator to nearest in the tensor's dtype. If the accumulator is wider than that and the
    result is rounded otherwise, the kernel works on a binary32 copy, so that the result is rounded once.
    """
    rule = rule_of(node)
    assert rule is not None
    operands: list[Any] = list(node.args[:4] if rule.lower == "scatter_add" else node.args[:3])
    accumulate, dtype = _step(assignment), node.meta["val"].dtype
    stored = Format.parse(FORMAT_OF[dtype])
    copied = not accumulate.format.within(stored) and rounding != Rounding.parse(str(stored))
    if copied:
        for i in (0, len(operands) - 1):
            operands[i] = insert(graph, node, aten._to_copy.default, (operands[i],), dtype=torch.float32)
    become(graph, node, rule.lower, (*operands, str(accumulate), rng_of(graph), place.number))
    if copied:
        evaluate(graph, node)
        round_after(graph, node, rounding, place.number + 1, dtype)
    elif not keeps(rounding, scatter_format(accumulate, STORAGES[dtype]) if _is_zero(operands[0]) else stored):
        round_after(graph, node, rounding, place.number + 1)


def _is_zero(node: fx.Node) -> bool:
    """Whether a scatter begins with zeros, as gradients do. Other values that it keeps may not belong to the format."""
    return node.target in (aten.full.default, aten.full_like.default) and bool(node.args[1] == 0)


_LOWERINGS: Final[dict[str, Callable[[fx.GraphModule, fx.Node, Site, Assignment, Rounding], None]]] = {
    "sum": _sum,
    "prod": _prod,
    "cumsum": _scan,
    "cumprod": _scan,
    "scatter_add": _scatter,
    "index_put": _scatter,
}
