"""Pointwise: arithmetic and elementary functions become one-statement programs, whose exact value is rounded once.

For example, ``aten.mul.Tensor(x, 0.1)`` becomes
``fxround.pointwise([x], "t0 = mul(x0, 0x1.99999ap-4) @ binary32/stochastic/inf", float32, rng, 6)``. Tensor operands
are x0, x1, ... (the same tensor once); a Python number is a hexadecimal literal of the result's dtype; a number that is
known only at run time (a size) becomes a tensor of no dimensions. The pass builds the program's kernel, so that a
rounding that is not possible raises an error with the operator's module path and line before the graph runs. An
operator that numerics lacks keeps the stock kernel and records the reason.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import fx

from fxround.graph.dialect import Pointwise
from fxround.graph.dtypes import STORAGES, literal
from fxround.graph.site import META
from fxround.numerics.arithmetic.operators import OPERATORS
from fxround.numerics.modes import Rounding
from fxround.operators.rules import rule_of
from fxround.passes.rewrite import Plan, become, decided, insert, rng_of, sites

aten = torch.ops.aten


def lower_pointwise(graph: fx.GraphModule, plan: Plan) -> None:
    """Replace arithmetic, elementary functions and inexact casts by programs."""
    rng = rng_of(graph)
    for node, place in sites(graph):
        wanted, rule = decided(place), rule_of(node) if place.kind in ("pointwise", "elementary") else None
        if wanted is None or rule is None or node.meta["val"].dtype not in STORAGES:
            continue
        name = rule.body.partition("(")[0]
        if name not in OPERATORS:
            node.meta[META] = replace(place, reason=f"fxround has no kernel for {name} yet")
            continue
        dtype = node.meta["val"].dtype
        operands, text = _program(graph, node, rule.body, wanted[1])
        become(graph, node, Pointwise(operands, text, dtype, rng, place.number))


def _program(graph: fx.GraphModule, node: fx.Node, body: str, rounding: Rounding) -> tuple[list[fx.Node], str]:
    """Return the tensor operands, and the text of ``body`` over them."""
    operands: list[fx.Node] = []
    names: dict[int, str] = {}
    for position in sorted({int(p) for p in re.findall(r"\{(\d+)\}", body)}):
        argument = node.args[position]
        if not isinstance(argument, fx.Node):
            names[position] = literal(argument, node.meta["val"].dtype)
            continue
        tensor = _tensor(graph, node, argument)
        if tensor not in operands:
            operands.append(tensor)
        names[position] = f"x{operands.index(tensor)}"
    text = re.sub(r"\{(\d+)\}", lambda m: names[int(m[1])], body)
    return operands, f"t0 = {text} @ {rounding}"


def _tensor(graph: fx.GraphModule, node: fx.Node, argument: fx.Node) -> fx.Node:
    """Return the argument as a floating-point tensor: a size is made one, an integer tensor is widened to binary64.

    Integers up to 2^53 are exact in binary64; beyond that PyTorch's own conversion rounds first.
    """
    value, own = argument.meta.get("val"), node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return insert(graph, node, aten.scalar_tensor.default, (argument,), dtype=own.dtype, device=own.device)
    if value.is_floating_point():
        return argument
    return insert(graph, node, aten._to_copy.default, (argument,), dtype=torch.float64)
