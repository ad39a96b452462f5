"""Contractions: matrix products and convolutions accumulate in a fixed order, and each step is rounded.

acc = +0; acc = R_acc(a_k * b_k + acc), k ascending; then R. For example, ``aten.mm(x, w)`` becomes
``fxround.matmul(x, w, "binary32/nearest_even/inf", "bfloat16/stochastic/inf", rng, 8)``. A bias is an addition of its
own. The stock kernel computes products under ``accumulate="native"`` and products of integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from torch import fx

from fxround.graph.site import float_value
from fxround.kernels.specialize import contract_kernel
from fxround.numerics.accumulation import Accumulation
from fxround.operators.rules import rule_of
from fxround.passes.rewrite import STORAGES, Plan, become, decided, locating, rng_of, sites, size_of

aten = torch.ops.aten
_BACKWARD: Final = aten.convolution_backward.default


def lower_contractions(graph: fx.GraphModule, plan: Plan) -> None:
    """Replace mm, bmm, convolution and convolution's gradients by their fixed-order kernels."""
    for node, place in sites(graph):
        wanted, rule = decided(place), rule_of(node) if place.kind == "contraction" else None
        if wanted is None or rule is None or not isinstance(wanted[0].accumulate, Accumulation):
            continue
        if float_value(node) is None or node.meta["val"].dtype not in STORAGES:
            continue
        assignment, rounding = wanted
        storage = STORAGES[node.meta["val"].dtype]
        with locating(place):
            contract_kernel(wanted[0].accumulate, rounding, (storage, storage), storage)
        operands = _OPERANDS[rule.lower](graph, node)
        tail = (str(assignment.accumulate), str(rounding), rng_of(graph), place.number)
        become(graph, node, rule.lower, (*operands, *tail))
    graph.graph.eliminate_dead_code(is_impure_node=lambda node: node.target is not _BACKWARD)


def _matmul(graph: fx.GraphModule, node: fx.Node) -> tuple[Any, ...]:
    return tuple(node.args[:2])


def _convolution(graph: fx.GraphModule, node: fx.Node) -> tuple[Any, ...]:
    x, weight, _, *geometry = node.args
    return x, weight, *_expanded(node, geometry)


def _expanded(image: Any, geometry: Sequence[Any]) -> list[Any]:
    """The arguments of a convolution's geometry with a number for each spatial dimension: one may stand for all."""
    dims = len(image.meta["val"].shape) - 2
    return [list(g) * dims if isinstance(g, list | tuple) and len(g) == 1 else g for g in geometry]


def _gradient(graph: fx.GraphModule, node: fx.Node) -> tuple[Any, ...]:
    """Return (gradient of the result, the other operand, the size of the differentiated operand, the geometry).

    ``node`` takes one result of a convolution_backward, whose position says which operand is differentiated.
    """
    backward, position = node.args
    assert isinstance(backward, fx.Node) and isinstance(position, int)
    gradient, *operands = cast("tuple[fx.Node, ...]", backward.args[:3])
    geometry = _expanded(gradient, backward.args[4:10])
    size = [size_of(graph, node, operands[position], d) for d in range(len(operands[position].meta["val"].shape))]
    return gradient, operands[1 - position], size, *geometry


_OPERANDS: Final = {
    "matmul": _matmul,
    "convolution": _convolution,
    "convolution_input_gradient": _gradient,
    "convolution_weight_gradient": _gradient,
}
