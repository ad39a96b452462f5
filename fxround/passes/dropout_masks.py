"""Masks of dropout: they come from (seed, sample), not from PyTorch's generator.

A coin that is 1 with probability p is p rounded stochastically to an integer, whatever the policy says about roundings:
``fxround.pointwise([p], "t0 = identity(x0) @ custom(2,1,...)/stochastic/saturate", ...)``. It takes one draw of the
node's own stream, which is the same on every machine, with and without gradients. A backward graph gets the mask of its
forward graph. P(1) = floor(p 2^32) / 2^32 for the binary32 value p, as in every stochastic rounding. Other
distributions keep PyTorch's generator; their reason says so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch
from torch import fx

from fxround.graph.dialect import Pointwise
from fxround.graph.dtypes import STORAGES
from fxround.graph.site import META
from fxround.numerics.formats import Format
from fxround.passes.rewrite import Plan, become, insert, rng_of, sites, size_of

aten = torch.ops.aten

# The integers 0, 1, 2, 3.
INTEGERS: Final = Format.custom(precision=2, emin=1, maximum=3.0, inf=False)
_COIN: Final = f"t0 = identity(x0) @ {INTEGERS}/stochastic/saturate"


def lower_draws(graph: fx.GraphModule, plan: Plan) -> None:
    """Replace Bernoulli draws by stochastic roundings."""
    for node, place in sites(graph):
        if place.kind != "random" or node.target not in _PROBABILITIES or node.meta["val"].dtype not in STORAGES:
            continue
        probability = _PROBABILITIES[node.target](graph, node)
        shape: Any = node.args[0]
        become(graph, node, Pointwise([probability], _COIN, node.meta["val"].dtype, rng_of(graph), place.number))
        node.meta[META] = replace(place, status="exact", reason="")
        if not shape.users and shape.op == "call_function":
            graph.graph.erase_node(shape)


def _number(graph: fx.GraphModule, node: fx.Node) -> fx.Node:
    """Return the number p of bernoulli.p(x, p) in the shape of x."""
    like: Any = node.args[0]
    own = node.meta["val"]
    scalar = insert(graph, node, aten.scalar_tensor.default, (node.args[1],), dtype=own.dtype, device=own.device)
    shape = [size_of(graph, node, like, d) for d in range(like.meta["val"].dim())]
    return insert(graph, node, aten.expand.default, (scalar, shape))


def _tensor(graph: fx.GraphModule, node: fx.Node) -> fx.Node:
    """Return the tensor p of bernoulli(p): a probability for each element."""
    assert isinstance(node.args[0], fx.Node)
    return node.args[0]


_PROBABILITIES: Final[dict[Any, Any]] = {aten.bernoulli.p: _number, aten.bernoulli.default: _tensor}
