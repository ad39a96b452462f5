"""Steps in place: an optimizer's step that is one kernel writes parameters and their states in their own memory.

``in_place`` finds the one kernel that a step's graph consists of. ``InPlace.several`` is its call for many parameters,
with the old tensors as results; kernel, operands and random key are those of the graph, so the bits are the same. This
is safe because a kernel reads an element of every operand before it writes that element of its results, and never reads
it again. Operands that are not row-major, and graphs of several operators, take the general way.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from fxround.graph.dialect import POINTWISE, Fused, Pointwise, read_map
from fxround.graph.dtypes import dtype_of
from fxround.runtime.operands import map_of
from fxround.runtime.several import Several


@dataclass(frozen=True)
class InPlace:
    """A map, the graph inputs that it reads, and which of its results is the first, second, ... output."""

    call: Pointwise[fx.Node] | Fused[fx.Node]
    operands: tuple[int, ...]
    results: tuple[int, ...]

    def several(
        self, entries: Sequence[Sequence[Tensor]], numbers: Sequence[Tensor], seeds: Sequence[int], sample: int
    ) -> Several | None:
        """The call that overwrites parameters and states with their step.

        entries: parameter, gradient and states of each step, all of one dtype. numbers: the graph's further inputs, on
        the CPU. Returns None if the kernel cannot do it: it runs in parts, or a result has another dtype.
        """
        width, whole = len(entries[0]), entries[0]
        operands = [whole[i] if i < width else numbers[i - width] for i in self.operands]
        kernel = map_of(self.call, operands)
        # The outputs are the parameter and the states, which the gradient is between.
        places = [0, *range(2, width)]
        if kernel is None or len(kernel.results) != len(places):
            return None
        targets = tuple(places[self.results.index(number)] for number in range(len(places)))
        if any(whole[t].dtype != dtype_of(stored) for t, stored in zip(targets, kernel.results, strict=True)):
            return None
        columns = tuple(i if i < width else -1 for i in self.operands)
        given = tuple(None if i < width else numbers[i - width] for i in self.operands)
        nodes = tuple(self.call.nodes) or (0,) if isinstance(self.call, Fused) else (self.call.node,)
        return Several(kernel, columns, targets, given, entries, seeds, sample, nodes)


def is_row_major(tensors: Sequence[Tensor]) -> bool:
    """Whether a kernel can overwrite these tensors, which have one shape, where they are: all are on one device."""
    device = tensors[0].device
    return all(x.is_contiguous() and not x.is_neg() and x.device == device for x in tensors)


def in_place(graph: fx.GraphModule) -> InPlace | None:
    """Return the kernel of a lowered graph; None for several operators, or an output that no kernel makes."""
    inputs = {node: i for i, node in enumerate(n for n in graph.graph.nodes if n.op == "placeholder")}
    calls = [n for n in graph.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    call = read_map(calls[0]) if len(calls) == 1 else None
    if call is None:
        return None
    outputs: Any = graph.graph.output_node().args[0]
    results = [_number(output, calls[0]) for output in outputs]
    if sorted(results) != list(range(len(results))) or not all(node in inputs for node in call.xs):
        return None
    return InPlace(call, tuple(inputs[node] for node in call.xs), tuple(results))


def _number(output: Any, call: fx.Node) -> int:
    """Return which result of the call an output is; -1 if it is none."""
    if call.target is POINTWISE:
        return 0 if output is call else -1
    is_result = isinstance(output, fx.Node) and output.target is operator.getitem and output.args[0] is call
    return int(output.args[1]) if is_result else -1
