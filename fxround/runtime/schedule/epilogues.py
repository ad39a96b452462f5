"""Epilogues: a contraction and the map after it run as one, a few items at a time, in the memory of one result.

A bias, a normalization, an activation or a residual addition reads the whole result of a product or a convolution and
writes another tensor. Here the map follows the contraction step by step: some items of the contraction, then the map
over the blocks that these completed, which are still in the cache. If nothing else reads the contraction's result, the
map writes its own result over it, so that one tensor is enough.

What runs is data (``runtime.epilogues``), which a target plans for inputs of given layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx

from fxround.graph.dialect import (
    CONTRACTIONS,
    FUSED,
    MAPS,
    POINTWISE,
    Call,
    ContractionCall,
    Fused,
    Matmul,
    Pointwise,
    read,
    read_map,
)
from fxround.graph.grouping import Unit
from fxround.graph.values import copy_node
from fxround.runtime.epilogues import CONTRACTION, Followed
from fxround.runtime.schedule.groups import PlannedPart, grouped, subgraph
from fxround.runtime.target import Plan, Target

_ATEN: Final = torch.ops.aten
# Operators that may only give a row-major tensor another shape; ``Followed.map_over`` checks that they did, on real
# shapes.
_VIEWS: Final = frozenset(
    {
        *(_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.reshape.default, _ATEN.unsqueeze.default),
        *(_ATEN.squeeze.default, _ATEN.squeeze.dim, _ATEN.squeeze.dims),
    }
)


# ---- which nodes ----


def join_epilogues(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph with every contraction and the map after it as one module."""
    position = {node: i for i, node in enumerate(graph.graph.nodes)}
    groups: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in position:
        if node.target in MAPS:
            group = _group(node, position)
            if group and not any(part in groups for part in group):
                groups |= dict.fromkeys(group, group)

    def joins(a: Unit, b: Unit) -> bool:
        group = groups.get(a.nodes[0])
        return group is not None and groups.get(b.nodes[0]) is group

    def build(unit: Unit, inputs: Sequence[fx.Node]) -> Epilogue | None:
        # If another path connects two nodes of a group, the group is not one unit, and stays as it is.
        whole = groups.get(unit.nodes[0], frozenset()) == set(unit.nodes)
        return Epilogue(graph, unit.nodes, inputs) if whole else None

    return grouped(graph, joins, build, "epilogue")


def _group(node: fx.Node, position: dict[fx.Node, int]) -> frozenset[fx.Node]:
    """A map and its results, the latest contraction that it reads, and the views between; empty if there is none."""
    chains = [tuple(_back(operand, node)) for operand in _map(node).xs]
    known = [chain for chain in chains if chain[-1].target in CONTRACTIONS]
    if not known:
        return frozenset()
    return frozenset((*max(known, key=lambda chain: position[chain[-1]]), node, *_taken(node)))


def _back(operand: fx.Node, user: fx.Node) -> Iterator[fx.Node]:
    """The nodes from an operand back over views that nothing else reads."""
    node = operand
    while True:
        yield node
        if node.target not in _VIEWS or set(node.users) != {user}:
            return
        node, user = node.all_input_nodes[0], node


def _map(node: fx.Node) -> Pointwise[fx.Node] | Fused[fx.Node]:
    """The call of a node that is known for a map."""
    call = read_map(node)
    assert call is not None
    return call


def _taken(node: fx.Node) -> tuple[fx.Node, ...]:
    """The results of a map that returns a list."""
    return tuple(node.users) if node.target is FUSED else ()


# ---- how they run ----


class Epilogue(PlannedPart):
    """A contraction and its map as a module: (*inputs) -> a list of the values that are used outside."""

    def __init__(self, graph: fx.GraphModule, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> None:
        super().__init__(subgraph(graph, nodes, inputs))
        own = set(nodes)
        (contraction,) = (node for node in nodes if node.target in CONTRACTIONS)
        (mapped,) = (node for node in nodes if node.target in MAPS)
        call, product = _map(mapped), read(contraction)
        assert isinstance(product, ContractionCall)
        views = [node for node in nodes if node.target in _VIEWS]
        place = {node: i for i, node in enumerate(inputs)}
        self.followed = Followed(
            _function(graph, inputs, contraction),
            _operands(graph, inputs, contraction, views, call.xs),
            call,
            tuple(place.get(node) for node in call.xs),
            place[call.rng],
            product.rng is call.rng,
            (place[product.a], place[product.b]) if isinstance(product, Matmul) else None,
            tuple(_number(node) for node in nodes if any(user not in own for user in node.users)),
        )

    def plan(self, target: Target, inputs: Sequence[Any]) -> Plan | None:
        """Return the plan for inputs of these layouts; None if contraction and map are to run one after the other."""
        return target.followed(self.followed, inputs, self.spent)


def _number(node: fx.Node) -> int:
    """The number of the map's result that a node is; ``CONTRACTION`` for the contraction."""
    if node.target in CONTRACTIONS:
        return CONTRACTION
    return 0 if node.target is POINTWISE else int(node.args[1])  # type: ignore[arg-type]


def _function(graph: fx.GraphModule, inputs: Sequence[fx.Node], contraction: fx.Node) -> Any:
    """The function (*inputs) -> the contraction's call."""
    cls = type(read(contraction))
    assert issubclass(cls, ContractionCall)

    def call_of(*arguments: Any) -> Call[Tensor]:
        return cls.of(arguments)

    inside = fx.Graph()
    made = {node: inside.placeholder(node.name) for node in inputs}
    begun = inside.node_copy(contraction, lambda used: made[used])
    begun.target = call_of
    inside.output(begun)
    return fx.GraphModule(graph, inside).forward


def _operands(
    graph: fx.GraphModule,
    inputs: Sequence[fx.Node],
    contraction: fx.Node,
    views: Sequence[fx.Node],
    operands: Sequence[fx.Node],
) -> Any:
    """The function (the contraction's result, *inputs) -> the operands of the map."""
    inside = fx.Graph()
    made = {node: inside.placeholder(node.name) for node in (contraction, *inputs)}
    for view in views:
        made[view] = copy_node(inside, view, made)
    inside.output([made[node] for node in operands])
    return fx.GraphModule(graph, inside).forward
