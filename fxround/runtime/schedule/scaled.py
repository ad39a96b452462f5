"""Roundings to scaled formats: the maxima of blocks, their scales and the elements run as one kernel.

A graph says each step: the largest magnitudes, the program of the scales, the scales as wide as the elements, the
program of the elements. Here these four nodes are one module, which reads the tensor once (``cpu.blocks``). Tensors for
which there is no such code run as the graph says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from fxround.graph.dialect import BlockExpand, BlockMaximum, Pointwise, read
from fxround.graph.grouping import Unit
from fxround.graph.site import float_value
from fxround.graph.values import write_code
from fxround.kernels import from_text
from fxround.runtime import buffers
from fxround.runtime.run import run_blocks
from fxround.runtime.schedule.groups import Part, grouped, subgraph

Nodes = tuple[fx.Node, fx.Node, fx.Node, fx.Node]


def join_scaled(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph with the nodes of every rounding to a scaled format as one module, where a kernel may do them."""
    groups: dict[fx.Node, Nodes] = {}
    for node in graph.graph.nodes:
        group = _group(node)
        if group is not None and not any(part in groups for part in group):
            groups |= dict.fromkeys(group, group)

    def joins(a: Unit, b: Unit) -> bool:
        group = groups.get(a.nodes[0])
        return group is not None and groups.get(b.nodes[0]) is group

    def build(unit: Unit, inputs: Sequence[fx.Node]) -> Scaled | None:
        group = groups.get(unit.nodes[0])
        return Scaled(graph, group, inputs) if group is not None and set(group) == set(unit.nodes) else None

    return grouped(graph, joins, build, "scaled")


def _group(node: fx.Node) -> Nodes | None:
    """The maxima, scales, wide scales and elements of a rounding, given the elements; None for any other node."""
    elements = read(node)
    if not isinstance(elements, Pointwise) or len(elements.xs) != 2 or from_text.drawn(elements.program):
        return None
    x, wide = elements.xs
    expanded = read(wide)
    if not isinstance(expanded, BlockExpand) or expanded.x is not x:
        return None
    scales = read(expanded.scales)
    if not isinstance(scales, Pointwise) or not scales.xs or from_text.drawn(scales.program):
        return None
    maxima = read(scales.xs[0])
    if not isinstance(maxima, BlockMaximum) or maxima.x is not x or list(maxima.sizes) != list(expanded.sizes):
        return None
    value, result = float_value(x), float_value(node)
    same = value is not None and result is not None and value.dtype == result.dtype
    group = (scales.xs[0], expanded.scales, wide, node)
    inside = all(set(part.users) <= {*group} for part in group[:3])
    return group if same and inside and x not in group else None


class Scaled(Part):
    """A rounding to a scaled format as a module: (*inputs) -> a list of the rounded tensor."""

    def __init__(self, graph: fx.GraphModule, group: Nodes, inputs: Sequence[fx.Node]) -> None:
        super().__init__()
        self.whole = subgraph(graph, group, inputs)
        maxima, scales, elements = read(group[0]), read(group[1]), read(group[3])
        assert isinstance(maxima, BlockMaximum) and isinstance(scales, Pointwise) and isinstance(elements, Pointwise)
        place = {node: i for i, node in enumerate(inputs)}
        self.figure, self.elements = from_text.program(scales.program), from_text.program(elements.program)
        self.x, self.sizes = place[maxima.x], tuple(maxima.sizes)
        # Indices of the numbers that all blocks share among the inputs.
        self.shared = tuple(place[node] for node in scales.xs[1:])
        # Indices of inputs that nothing reaches after a call; the schedule sets them.
        self.spent: tuple[int, ...] = ()

    def forward(self, *inputs: Any) -> list[Tensor]:
        """Run one kernel, or as the graph says: the same bits."""
        shared = [inputs[i] for i in self.shared]
        result = run_blocks(self.figure, self.elements, inputs[self.x].detach(), self.sizes, shared)
        if result is None:
            write_code(self.whole)
            return list(self.whole.forward(*inputs))
        buffers.release(*(inputs[i] for i in self.spent))
        return [result]
