"""Contractions: matrix products and convolutions accumulate in order, each step rounded.

What is true here. acc = +0; acc = R_acc(a_k * b_k + acc), k ascending; then R. A bias is an addition of its own.
``accumulate="native"`` and integer products are left to the stock kernel.

    before   %mm = aten.mm.default(%x, %w)
    after    %mm = fxround.matmul(%x, %w, "binary32/nearest_even/inf", "bfloat16/stochastic/inf", %rng, 8)
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fxround.numerics.accumulation import Accumulation
from fxround.ops import rule_of
from fxround.passes.rewrite import STORAGES, Plan, become, decided, locating, rng_of, sites
from fxround.specialize import contract_kernel


def lower_contractions(graph: fx.GraphModule, plan: Plan) -> None:
    """Replace mm, bmm and convolution by their fixed-order kernels."""
    for node, place in sites(graph):
        wanted, rule = decided(place), rule_of(node) if place.kind == "contraction" else None
        if wanted is None or rule is None or not isinstance(wanted[0].accumulate, Accumulation):
            continue
        if node.meta["val"].dtype in STORAGES:
            assignment, rounding = wanted
            storage = STORAGES[node.meta["val"].dtype]
            with locating(place):
                contract_kernel(wanted[0].accumulate, rounding, (storage, storage), storage)
            operands = _OPERANDS[rule.lower](node)
            become(
                graph,
                node,
                rule.lower,
                (*operands, str(assignment.accumulate), str(rounding), rng_of(graph), place.number),
            )


def _convolution(node: fx.Node) -> tuple[Any, ...]:
    x, weight, _, *geometry = node.args
    return x, weight, *geometry


_OPERANDS = {"matmul": lambda node: tuple(node.args[:2]), "convolution": _convolution}
