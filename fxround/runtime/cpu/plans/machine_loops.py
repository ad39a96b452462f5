"""Scans in machine code: all kernels of all steps in one call, if a body is small maps, products, sums and views.

A body is planned once for operands of given layouts: its kernels are a list of launches (``cpu.launches``), and what a
step reads or writes in a row of a tensor moves by a row after each step. The kernels, the numbers of the elements and
the random bits are those of the body run one operation at a time, so the bits are the same. Where several threads would
gain something, or an operation is another one, there is no plan, and Python calls the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx

from fxround.graph.dialect import Matmul, read
from fxround.graph.dtypes import STORAGES
from fxround.graph.site import PORT
from fxround.graph.values import outputs_of
from fxround.runtime import buffers
from fxround.runtime.call_programs import SIZES
from fxround.runtime.cpu.launches import Launch, LaunchTable
from fxround.runtime.cpu.plans.copies import CopyingPlanner
from fxround.runtime.cpu.plans.planner import HELD, NoPlan, Value
from fxround.runtime.cpu.plans.stock_arithmetic import as_program
from fxround.runtime.cpu.pointwise import addresses
from fxround.runtime.draw import Draw

# The most bytes of an operand that is copied before the first step.
_COPIED_BYTES: Final = 1 << 18
_ROWS: Final = torch.contiguous_format
_COPIES: Final = HELD - 1


@dataclass(frozen=True)
class _Copy:
    """A row-major copy, made before the first step, of a view that is ``shift`` bytes from an operand's element 0."""

    operand: int
    shift: int
    shape: torch.Size
    strides: tuple[int, ...]

    def make(self, operands: Sequence[Any]) -> Tensor:
        """Copy the numbers of a call."""
        x = operands[self.operand].detach()
        begin = x.storage_offset() + self.shift // x.itemsize
        return torch.empty(self.shape, dtype=x.dtype, device="cpu").copy_(x.as_strided(self.shape, self.strides, begin))


@dataclass(frozen=True)
class ScanPlan:
    """The kernels of a scan.

    table     the launches of a step; the homes outside are operands, results, copies and the states
    states    the operand that has the (seed, sample) of each step
    outputs   the number of results
    results   for each result that is read its position, and the shape and the dtype of a row; those of the state first
    carries   how many results are the state, in memory that all steps read and write
    copies    what is copied before the first step
    held      what has to live as long as the plan
    in_place_of_stock   whether programs compute what the graph leaves to PyTorch's arithmetic
    """

    table: LaunchTable
    states: int
    outputs: int
    results: tuple[tuple[int, torch.Size, torch.dtype], ...]
    carries: int
    copies: tuple[_Copy, ...]
    held: tuple[Any, ...]
    in_place_of_stock: bool

    def run(self, operands: Sequence[Any]) -> list[Any] | None:
        """Run all steps; returns the last carries and the stacked results, None for a result that nothing reads.

        Returns None if the results do not count: PyTorch's NaNs have other signs and payloads.
        """
        states = operands[self.states].contiguous()
        outputs = list[Any]((None,) * self.outputs)
        for i, row, dtype in self.results:
            outputs[i] = buffers.empty(row if i < self.carries else (len(states), *row), dtype)
        for state, begun in zip(outputs[: self.carries], operands[: self.carries], strict=True):
            state.copy_(begun.detach())
        copies = [copy.make(operands) for copy in self.copies]
        given = iter(addresses([x for x in operands if isinstance(x, Tensor)]))
        homes = [next(given) if isinstance(x, Tensor) else 0 for x in operands]
        made = [outputs[i] for i, _, _ in self.results]
        self.table.run((*homes, *addresses((*made, *copies, states))), Draw(0, int(states[0, 1])), len(states))
        return None if self.in_place_of_stock and any(bool(x.isnan().any()) for x in made) else outputs


class ScanPlanner(CopyingPlanner):
    """Plans the body of a scan. Raises NoPlan for a body that cannot be planned.

    A value's home is the number of an operand, of a result (after those of the operands), of a copy (_COPIES and less),
    or that of a memory of a step (``StepMemory``).

    launches  the kernels of a step
    copies    what is copied before the first step
    states    the operand that has the (seed, sample) of each step
    in_place_of_stock   whether programs compute what the graph leaves to PyTorch's arithmetic
    """

    def __init__(self, body: fx.GraphModule, operands: Sequence[Any], carries: int, xs: int):
        super().__init__(body)
        self.launches: list[Launch] = []
        self.copies: list[_Copy] = []
        self.in_place_of_stock = False
        self.operands = len(operands)
        entries = body.graph.find_nodes(op="placeholder")
        self.carries = [
            Value(torch.empty(x.shape, dtype=_stored(x), device="cpu"), self.operands + i, carried=True)
            for i, x in enumerate(operands[:carries])
        ]
        for i, (node, x) in enumerate(zip(entries, operands, strict=True)):
            if i < carries:
                self.env[node] = self.carries[i]
            elif i < carries + xs:
                self.env[node] = Value(x[0], i, growth=x.stride(0) * x.itemsize)
            else:
                self.env[node] = Value(x, i) if isinstance(x, Tensor) else x
            if carries <= i < carries + xs and node.meta[PORT].kind == "random":
                self.states = i
        for node in body.graph.nodes:
            if node.op not in ("placeholder", "output"):
                self.add(node)
                known = self.env[node]
                values = known if isinstance(known, list) else [known]
                self.memory.note(node, [x.tensor for x in values if isinstance(x, Value)])

    def plan(self, stacked: Sequence[int]) -> ScanPlan:
        """Return the plan, in which rows of results and then the next state follow the kernels of a step.

        stacked: the positions of the results that are stacked.
        """
        results = outputs_of(self.body)
        rows = [self.value(results[i]) for i in stacked]
        for home, row in enumerate(rows, self.operands + len(self.carries)):
            one = torch.empty_like(row.tensor, memory_format=_ROWS)
            self.move(row, Value(one, home, growth=one.nbytes))
        following = [self.value(node) for node in results[: len(self.carries)]]
        # A part of the state that a step only passes on may be read after it was written.
        following = [self._copied(value) if value.carried else value for value in following]
        for value, state in zip(following, self.carries, strict=True):
            self.move(value, state)
        made = [
            *((i, value.tensor.shape, value.tensor.dtype) for i, value in enumerate(self.carries)),
            *((i, row.tensor.shape, row.tensor.dtype) for i, row in zip(stacked, rows, strict=True)),
        ]
        states = self.operands + len(made)
        outside = *range(states), *(_COPIES - i for i in range(len(self.copies))), states
        memory = {home: owner.nbytes for home, owner in self.memory.held.items()}
        table = LaunchTable(self.launches, outside, memory, states)
        held = tuple(self.held)
        return ScanPlan(
            *(table, self.states, len(results), tuple(made), len(self.carries), tuple(self.copies), held),
            self.in_place_of_stock,
        )

    def add(self, node: fx.Node) -> None:
        """Plan a node. Raises NoPlan for one that is not planned."""
        call = read(node)
        if isinstance(call, Matmul):
            self.env[call.b] = self._arranged(self.value(call.b))
        if node.op == "call_function" and (node.target in SIZES or self._is_of_numbers(node)):
            target: Any = node.target
            self.env[node] = target(*self._argument(node.args))
        elif call is None and (program := as_program(node)) is not None:
            self._map(node, program)
            self.in_place_of_stock = True
        else:
            super().add(node)

    def _is_of_numbers(self, node: fx.Node) -> bool:
        """Whether a node is computed from sizes alone, which are the same in every call of the plan."""
        used = node.all_input_nodes
        number = not isinstance(node.meta.get("val"), Tensor)
        return number and bool(used) and all(isinstance(self.env.get(x), int) for x in used)

    def _arranged(self, value: Value) -> Value:
        """Return a product's second operand, as a row-major copy if all steps read it and its columns are not adjacent.

        Such a copy is made once for all steps; without it, every step would pack the operand.
        """
        x, operand = value.tensor, value.home
        if operand not in range(self.operands) or value.growth or x.dim() != 2 or x.stride(1) == 1:
            return value
        if x.nbytes > _COPIED_BYTES:
            return value
        self.copies.append(_Copy(operand, value.shift, x.shape, x.stride()))
        return Value(torch.empty(x.shape, dtype=x.dtype, device="cpu"), _COPIES - len(self.copies) + 1)

    def launch(self, launch: Launch) -> None:
        """Add a kernel to a step."""
        self.launches.append(launch)

    def state(self, rng: Any) -> tuple[int, int]:
        """Return seed and sample; each step brings its own seed, and each call its sample."""
        return 0, 0


def _stored(x: Any) -> torch.dtype:
    """Return the dtype of a part of a state."""
    if not isinstance(x, Tensor) or not x.is_cpu or x.dtype not in STORAGES:
        raise NoPlan
    return x.dtype


def plan_scan(
    body: fx.GraphModule, operands: Sequence[Any], carries: int, xs: int, stacked: Sequence[int]
) -> ScanPlan | None:
    """Return the plan for operands of these layouts, whatever the number of steps; None if there is none."""
    if not all(x.is_cpu for x in operands if isinstance(x, Tensor)):
        return None
    try:
        # What inference mode makes could not be written outside of it.
        with torch.inference_mode(False):
            return ScanPlanner(body, operands, carries, xs).plan(stacked)
    except NoPlan:
        return None
