"""Steps in place: an optimizer's step that is one kernel writes a parameter and its states in their own memory.

``in_place`` finds the one kernel that a step's graph consists of. ``InPlace.run`` calls it with the old tensors as
results; kernel, operands and random key are those of the graph, so the bits are the same. This is safe because a
kernel reads an element of every operand before it writes that element of its results, and never reads it again.
Operands that are not row-major, and graphs of several operators, take the general way.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxround.graph.dialect import POINTWISE, Fused, Pointwise, read_map
from fxround.graph.dtypes import dtype_of
from fxround.runtime.run import run_kernel
from fxround.runtime.schedule.groups import key_of, map_of


@dataclass(frozen=True)
class InPlace:
    """A map, the graph inputs that it reads, and which of its results is the first, second, ... output."""

    call: Pointwise[fx.Node] | Fused[fx.Node]
    operands: tuple[int, ...]
    results: tuple[int, ...]

    def run(self, inputs: Sequence[Tensor], old: Sequence[Tensor], rng: Tensor) -> bool:
        """Overwrite ``old`` with the outputs for ``inputs``, which include ``old``.

        Returns False, and changes nothing, if the kernel cannot do it: an input is not row-major, or a result has
        another dtype or shape.
        """
        operands = [inputs[i] for i in self.operands]
        shape = old[0].shape
        if not all(x.is_cpu and x.is_contiguous() and not x.is_neg() for x in (*operands, *old)):
            return False
        if any(x.shape not in (shape, ()) for x in operands) or any(x.shape != shape for x in old):
            return False
        kernel = map_of(self.call, operands)
        if kernel is None or len(kernel.results) != len(old):
            return False
        outs = [old[self.results.index(number)] for number in range(len(kernel.results))]
        if any(out.dtype != dtype_of(stored) for out, stored in zip(outs, kernel.results, strict=True)):
            return False
        run_kernel(kernel, operands, key_of(self.call, rng, bool(kernel.draws)), outs)
        torch.autograd.graph.increment_version(list(old))
        return True


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
