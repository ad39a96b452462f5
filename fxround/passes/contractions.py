"""Contractions: matrix products and convolutions accumulate in a fixed order, and each step is rounded.

acc = +0; acc = R_acc(a_k * b_k + acc), k ascending; then R. For example, ``aten.mm(x, w)`` becomes
``fxround.matmul(x, w, "binary32/nearest_even/inf", "bfloat16/stochastic/inf", rng, 8)``. A bias is an addition of its
own. The stock kernel computes products under ``accumulate="native"`` and products of integers.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final

import torch
from torch import fx

from fxround.graph.dialect import (
    Call,
    Convolution,
    ConvolutionInputGradient,
    ConvolutionWeightGradient,
    Matmul,
)
from fxround.graph.dtypes import STORAGES
from fxround.graph.geometry import Geometry
from fxround.graph.site import float_value
from fxround.numerics.accumulation import Accumulation
from fxround.operators.rules import argument, rule_of
from fxround.passes.rewrite import Plan, become, decided, rng_of, sites, size_of

aten = torch.ops.aten
_BACKWARD: Final = aten.convolution_backward.default
# The last arguments of every contraction: accumulate, rounding, rng, node.
Tail = tuple[str, str, fx.Node, int]


def lower_contractions(graph: fx.GraphModule, plan: Plan) -> None:
    """Replace mm, bmm, convolution and convolution's gradients by their fixed-order kernels."""
    for node, place in sites(graph):
        wanted, rule = decided(place), rule_of(node) if place.kind == "contraction" else None
        if wanted is None or rule is None or not isinstance(wanted[0].accumulate, Accumulation):
            continue
        if float_value(node) is None or node.meta["val"].dtype not in STORAGES:
            continue
        tail = (str(wanted[0].accumulate), str(wanted[1]), rng_of(graph), place.number)
        become(graph, node, _CALLS[rule.lower](graph, node, tail))
    graph.graph.eliminate_dead_code(is_impure_node=lambda node: node.target is not _BACKWARD)


def _matmul(graph: fx.GraphModule, node: fx.Node, tail: Tail) -> Call[fx.Node]:
    return Matmul(argument(node, "self"), argument(node, "mat2"), *tail)


def _convolution(graph: fx.GraphModule, node: fx.Node, tail: Tail) -> Call[fx.Node]:
    x, weight = argument(node, "input"), argument(node, "weight")
    return Convolution(x, weight, _geometry(node, x), *tail)


def _input_gradient(graph: fx.GraphModule, node: fx.Node, tail: Tail) -> Call[fx.Node]:
    backward, size = _differentiated(graph, node, "input")
    gradient = argument(backward, "grad_output")
    return ConvolutionInputGradient(gradient, argument(backward, "weight"), size, _geometry(backward, gradient), *tail)


def _weight_gradient(graph: fx.GraphModule, node: fx.Node, tail: Tail) -> Call[fx.Node]:
    backward, size = _differentiated(graph, node, "weight")
    gradient = argument(backward, "grad_output")
    return ConvolutionWeightGradient(gradient, argument(backward, "input"), size, _geometry(backward, gradient), *tail)


def _differentiated(graph: fx.GraphModule, node: fx.Node, name: str) -> tuple[fx.Node, list[Any]]:
    """Return the convolution_backward of which ``node`` takes a result, and the size of the operand of this name."""
    backward = node.args[0]
    assert isinstance(backward, fx.Node)
    operand = argument(backward, name)
    return backward, [size_of(graph, node, operand, d) for d in range(operand.meta["val"].dim())]


def _geometry(convolution: fx.Node, image: fx.Node) -> Geometry:
    """Return the geometry with a number for each spatial dimension of an image: one may stand for all."""
    dims = image.meta["val"].dim() - 2
    given = [argument(convolution, field.name) for field in fields(Geometry)]
    return Geometry.of(*(list(g) * dims if isinstance(g, list | tuple) and len(g) == 1 else g for g in given))


_CALLS: Final = {
    Matmul.name: _matmul,
    Convolution.name: _convolution,
    ConvolutionInputGradient.name: _input_gradient,
    ConvolutionWeightGradient.name: _weight_gradient,
}

# The dimension over which an operation sums, by the names of its operands: of a convolution with a weight [out, in, .],
# and of one that is transposed, whose weight is [in, out, ...]. Convolutions sum over all spatial dimensions too.
_SUMMED: Final[dict[Any, dict[str, tuple[int, int]]]] = {
    aten.mm.default: {"self": (-1, -1), "mat2": (-2, -2)},
    aten.bmm.default: {"self": (-1, -1), "mat2": (-2, -2)},
    aten.convolution.default: {"input": (1, 1), "weight": (1, 0)},
}
_OF_INPUT: Final = {"grad_output": (1, 1), "weight": (0, 1)}
_OF_WEIGHT: Final = {"grad_output": (0, 0), "input": (0, 0)}


def summed_dims(node: fx.Node, operand: fx.Node) -> list[tuple[int, tuple[int, ...], int]]:
    """Return each position at which a node reads the operand, the dimensions over which the node sums, and groups.

    The first dimension is that of channels or columns; the spatial ones of a convolution follow. For an operation that
    is no contraction it is the last dimension. groups: the number of equal parts of the first dimension that are summed
    apart from each other.
    """
    declared = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    positions = [i for i, given in enumerate(node.args) if given is operand]
    rows = _SUMMED.get(node.target)
    if node.target is _BACKWARD:
        rows = _OF_INPUT if argument(node, "output_mask")[0] else _OF_WEIGHT
    if rows is None:
        return [(i, (-1,), 1) for i in positions]
    transposed = "transposed" in declared and bool(argument(node, "transposed"))
    spatial = tuple(range(2, operand.meta["val"].dim())) if "transposed" in declared else ()
    groups = argument(node, "groups") if "groups" in declared else 1
    found = [(i, rows[declared[i]][transposed], declared[i]) for i in positions if declared[i] in rows]
    # Channels of all groups are dimension 1 of an image, and dimension 0 of a weight.
    return [(i, (d, *spatial), groups if (d == 0) == (name == "weight") else 1) for i, d, name in found]
