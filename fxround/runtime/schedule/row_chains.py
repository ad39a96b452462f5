"""Rows: a chain of maps and row reductions runs on a few rows at a time, so that its values stay in the cache.

A softmax or a normalization reads and writes whole tensors several times. Here every kernel of the chain runs for one
range of rows, then for the next one, and a value between two kernels is a small buffer that every range uses again. The
kernels, the numbers of the elements and the order of every sum are those of the whole tensor, so the bits are the same.

What runs is data (``runtime.row_chains``), which a target plans for inputs of given layouts: the CPU in ranges of rows,
a GPU in one launch. Where this gains nothing (few rows, very long rows, a reduced operand that is not row-major) the
chain runs as the graph says.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import fx

from fxround.graph.dialect import FUSED, MAPS, POINTWISE, Fused, Pointwise, Sum, read, read_map
from fxround.graph.grouping import Unit
from fxround.graph.site import float_value
from fxround.kernels import from_text
from fxround.runtime.row_chains import LARGEST, Chain, ChainedKernel, is_largest_of_rows, is_last
from fxround.runtime.schedule.groups import PlannedPart, grouped, is_operand, subgraph
from fxround.runtime.target import Plan, Target

_LONGEST: Final = 32


# ---- which nodes ----


@dataclass(frozen=True)
class RowShape:
    """The rows that a node's tensors have in common, and their length (None: the node has statistics of rows alone)."""

    rows: str
    length: int | None


def _shape(node: fx.Node) -> RowShape | None:
    """The rows of a node that can be a part of a chain, else None."""
    value = float_value(node)
    if node.op != "call_function" or not all(is_operand(n) for n in _tensors(node)):
        return None
    if node.target is FUSED:
        value = node.meta["val"][0]
    elif node.target in (Sum.overload, LARGEST):
        value = node.all_input_nodes[0].meta["val"]
        if not _reduces_rows(node, value.dim()):
            return None
    elif node.target is operator.getitem:
        source = node.args[0]
        return _shape(source) if isinstance(source, fx.Node) and source.target is FUSED else None
    elif node.target is not POINTWISE:
        return None
    if value is None or value.dim() < 2 or not isinstance(value.shape[-1], int):
        return None
    return RowShape(str(tuple(value.shape[:-1])), value.shape[-1] if value.shape[-1] > 1 else None)


def _tensors(node: fx.Node) -> list[fx.Node]:
    """The operands of one of our nodes, without the random state."""
    call = read_map(node)
    if call is not None:
        return list(call.xs)
    return [] if node.target is operator.getitem else node.all_input_nodes[:1]


def _reduces_rows(node: fx.Node, dims: int) -> bool:
    """Whether a node reduces the last dimension alone and keeps it with size 1."""
    call = read(node)
    if isinstance(call, Sum):
        rows = call.keepdim and is_last(call.dims, dims)
        return rows and from_text.order(call.order).kind != "exact"
    return is_largest_of_rows(node, dims)


def gather_rows(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph with every chain over rows as one module that runs a few rows at a time."""
    shapes = {node: _shape(node) for node in graph.graph.nodes}

    def joins(a: Unit, b: Unit) -> bool:
        joined = [shapes[node] for node in (*a.nodes, *b.nodes)]
        known = [shape for shape in joined if shape is not None]
        lengths = {shape.length for shape in known} - {None}
        return len(known) == len(joined) <= _LONGEST and len({s.rows for s in known}) == 1 and len(lengths) <= 1

    def build(unit: Unit, inputs: Sequence[fx.Node]) -> RowsPart | None:
        return RowsPart(graph, unit.nodes, inputs) if _is_chain(unit) else None

    return grouped(graph, joins, build, "rows")


def _is_chain(unit: Unit) -> bool:
    """Whether a unit has a row sum and a map over whole rows, and takes all its own lists of results apart alone."""
    if any(node.target is operator.getitem and node.args[0] not in unit.nodes for node in unit.nodes):
        return False
    reduced = any(node.target is Sum.overload for node in unit.nodes)
    mapped = any(node.target in MAPS and not _is_statistic(node) for node in unit.nodes)
    return reduced and mapped and all(node.target is not FUSED for node in unit.results())


def _is_statistic(node: fx.Node) -> bool:
    """Whether a node has one value for each row."""
    shape = _shape(node)
    return shape is None or shape.length is None


# ---- how they run ----


class RowsPart(PlannedPart):
    """A chain over rows as a module: (*inputs) -> a list of the values that are used outside of it."""

    def __init__(self, graph: fx.GraphModule, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> None:
        super().__init__(subgraph(graph, nodes, inputs))
        rng = next(i for i, n in enumerate(inputs) if not is_operand(n))
        own = set(nodes)
        values = [*inputs, *(n for n in nodes if n.target is not FUSED)]
        place = {node: i for i, node in enumerate(values)}
        stages = tuple(_stage(node, place) for node in nodes if node.target is not operator.getitem)
        stored = tuple(place[n] for n in nodes if n in place and any(user not in own for user in n.users))
        self.chain = Chain(stages, len(inputs), rng, stored)

    def plan(self, target: Target, inputs: Sequence[Any]) -> Plan | None:
        """Return the plan for inputs of these layouts; None if the chain is to run kernel by kernel."""
        return target.rows(self.chain, inputs, self.spent)


def _stage(node: fx.Node, place: dict[fx.Node, int]) -> ChainedKernel:
    """A node as a stage; ``place`` gives the index of each value."""
    operands = tuple(place[n] for n in _tensors(node))
    call = read(node)
    assert call is None or isinstance(call, Pointwise | Fused | Sum)
    if not isinstance(call, Fused):
        return ChainedKernel(call, operands, (place[node],))
    taken = sorted((user.args[1], place[user]) for user in node.users)
    return ChainedKernel(call, operands, tuple(at for _, at in taken))
