"""Contractions: matrix products and convolutions accumulate in a fixed order, and each step is rounded.

acc = +0; acc = R_acc(a_k * b_k + acc), k ascending, in the shards of the policy's order; then R. For example,
``aten.mm(x, w)`` becomes ``fxround.matmul(x, w, "binary32/nearest_even/inf", "bfloat16/stochastic/inf", rng, 8)``. A
bias is an addition of its own. The stock kernel computes products under ``accumulate="native"`` and products of
integers.
"""

from __future__ import annotations

import operator
from dataclasses import fields
from typing import Any, Final, cast

import torch
from torch import fx

from fxround.graph.dialect import CALLS, ContractionCall
from fxround.graph.dtypes import STORAGES
from fxround.graph.geometry import Geometry
from fxround.graph.site import Site, float_value
from fxround.operators.rules import argument, rule_of
from fxround.passes.rewrite import Plan, become, decided, drop_dead, rng_of, sites, size_of

_BACKWARD: Final = torch.ops.aten.convolution_backward.default
_CALLS: Final = {cls.name: cls for cls in CALLS.values() if issubclass(cls, ContractionCall)}


def lower_contractions(graph: fx.GraphModule, plan: Plan) -> None:
    """Replace mm, bmm, convolution and convolution's gradients by their fixed-order kernels."""
    for node, place in sites(graph):
        wanted, cls = decided(place), _call_of(node) if place.kind == "contraction" else None
        if wanted is None or cls is None or (how := wanted[0].of_products) is None:
            continue
        if float_value(node) is None or node.meta["val"].dtype not in STORAGES:
            continue
        tail = (str(how), str(wanted[1]), rng_of(graph), place.number)
        become(graph, node, cls(*_arguments(graph, node, cls), *tail))
    drop_dead(graph, lambda node: node.target is _BACKWARD)


def keeps_stock_kernel(node: fx.Node, place: Site) -> bool:
    """Whether PyTorch computes a contraction, under ``accumulate="native"`` or because no rule names it."""
    wanted = decided(place)
    return _call_of(node) is not None and (wanted is None or wanted[0].of_products is None)


def _call_of(node: fx.Node) -> Any:
    """Return the class of the contraction that the rule of the node names, None if it names none."""
    rule = rule_of(node)
    return None if rule is None else _CALLS.get(rule.lower)


def _arguments(graph: fx.GraphModule, node: fx.Node, cls: type[ContractionCall[fx.Node]]) -> list[Any]:
    """Return the arguments before ``accumulate``: the operands, a gradient's size, a convolution's geometry."""
    source = cast(fx.Node, node.args[0]) if node.target is operator.getitem else node
    named = {field.name for field in fields(cls)}
    arguments = [argument(source, name) for name in cls.sums]
    image = arguments[0]
    if "size" in named:
        # A gradient has the size of the operand that it does not read.
        operand = argument(source, "weight" if "input" in cls.sums else "input")
        arguments.append([size_of(graph, node, operand, d) for d in range(operand.meta["val"].dim())])
    return [*arguments, _geometry(source, image)] if "geometry" in named else arguments


def _geometry(convolution: fx.Node, image: fx.Node) -> Geometry:
    """Return the geometry with a number for each spatial dimension of an image: one may stand for all."""
    dims = image.meta["val"].dim() - 2
    given = [argument(convolution, field.name) for field in fields(Geometry)]
    return Geometry.of(*(list(g) * dims if isinstance(g, list | tuple) and len(g) == 1 else g for g in given))


def summed_dims(node: fx.Node, operand: fx.Node) -> list[tuple[int, tuple[int, ...], int]]:
    """Return each position at which a node reads the operand, the dimensions over which the node sums, and groups.

    The first dimension is that of channels or columns; the spatial ones of a convolution follow. For an operation that
    is no contraction it is the last dimension. groups: the number of equal parts of the first dimension that are summed
    apart from each other.
    """
    declared = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    positions = [i for i, given in enumerate(node.args) if given is operand]
    cls = _call_of(node)
    if cls is None:
        return [(i, (-1,), 1) for i in positions]
    if "transposed" not in declared:
        return [(i, (cls.sums[declared[i]],), 1) for i in positions if declared[i] in cls.sums]
    transposed, groups = bool(argument(node, "transposed")), argument(node, "groups")
    spatial = tuple(range(2, operand.meta["val"].dim()))
    summed = []
    for i, name in ((i, declared[i]) for i in positions if declared[i] in cls.sums):
        weight = name == "weight"
        channels = 1 - cls.sums[name] if weight and transposed else cls.sums[name]
        # Channels of all groups are dimension 1 of an image, and dimension 0 of a weight.
        summed.append((i, (channels, *spatial), groups if (channels == 0) == weight else 1))
    return summed
