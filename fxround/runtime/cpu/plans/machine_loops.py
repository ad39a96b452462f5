"""Scans in machine code: all kernels of all steps in one call, if a body is small maps, products, sums and views.

A body is planned once for operands of given layouts: every value has memory of its own, every kernel its arrays of
addresses, and what a step reads or writes in a row of a tensor moves by a row after each step. A call puts the
addresses of its operands and results into the plan. The kernels, the numbers of the elements and the random bits are
those of the body run one operation at a time, so the bits are the same. Where several threads would gain something, or
an operation is another one, there is no plan, and Python calls the kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, fx

from fxround.graph.dialect import Matmul, read
from fxround.graph.dtypes import STORAGES
from fxround.graph.site import PORT
from fxround.graph.values import outputs_of
from fxround.runtime.cpu.code import address_of, current_set, native, signature
from fxround.runtime.cpu.contraction import Code, Work
from fxround.runtime.cpu.llvm.repeat import HEADER, KERNEL, MOST, build_repeat
from fxround.runtime.cpu.plans.copies import CopyingPlanner
from fxround.runtime.cpu.plans.launches import SIZES, Flag, KeyAddress, Launch, NoPlan, Space, Value
from fxround.runtime.cpu.plans.stock_arithmetic import as_program
from fxround.runtime.cpu.pointwise import addresses, array

_REPEAT: Final = signature(2, 2)
# Steps between which a signal is handled.
_AT_ONCE: Final = 4096
# The most bytes of a plan that is kept for the next call: planning costs little beside the steps of a larger one.
_KEPT_BYTES: Final = 1 << 23
# The most bytes of an operand that is copied before the first step.
_COPIED_BYTES: Final = 1 << 18
# The most layouts that plans are kept for, and the most plans of a layout, one for each call at a time.
_LAYOUTS: Final = 16
_AT_A_TIME: Final = 4
_SAMPLE: Final = 2
_ROWS: Final = torch.contiguous_format


@dataclass(frozen=True)
class _Place:
    """A number of an array that a call sets to the address of an operand or result plus ``shift``."""

    numbers: Any
    index: int
    home: int
    shift: int


@dataclass(frozen=True)
class _Copy:
    """A row-major copy, made before the first step, of a view that is ``shift`` bytes from an operand's element 0."""

    operand: int
    shift: int
    strides: tuple[int, ...]
    copy: Tensor

    def make(self, operands: Sequence[Any]) -> None:
        """Copy the numbers of a call."""
        x = operands[self.operand].detach()
        begin = x.storage_offset() + self.shift // x.itemsize
        self.copy.copy_(x.as_strided(self.copy.shape, self.strides, begin))


@dataclass(frozen=True)
class ScanPlan:
    """The kernels of a scan with memory of their own, which serve one call at a time.

    table     what ``repeat`` is passed
    places    the numbers that a call sets
    keys      the random keys of the kernels that draw
    states    the operand that has the (seed, sample) of each step
    carries   the memory of the state
    copies    what is copied before the first step
    stacks    for each result that is stacked its position, and the shape and the dtype of a row
    held      what has to live as long as the plan
    bytes     the bytes of all values
    in_place_of_stock   whether programs compute what the graph leaves to PyTorch's arithmetic
    """

    table: Any
    places: tuple[_Place, ...]
    keys: tuple[Any, ...]
    states: int
    carries: tuple[Tensor, ...]
    copies: tuple[_Copy, ...]
    stacks: tuple[tuple[int, torch.Size, torch.dtype], ...]
    held: tuple[Any, ...]
    bytes: int
    in_place_of_stock: bool

    def run(self, operands: Sequence[Any], results: int, empty: Callable[..., Tensor]) -> list[Any]:
        """Run all steps; returns the last carries and the stacked results, None for a result that nothing reads.

        results: the number of results. empty: makes a tensor of a shape and a dtype.
        """
        addresses([x for x in operands if isinstance(x, Tensor)])  # an error names a tensor whose memory is gone
        states = operands[self.states].contiguous()
        steps, outputs = len(states), list[Any]((None,) * results)
        for i, row, dtype in self.stacks:
            outputs[i] = empty((steps, *row), dtype)
        homes = [0, *(x.data_ptr() if isinstance(x, Tensor) else 0 for x in operands)]
        homes += [outputs[i].data_ptr() for i, _, _ in self.stacks]
        for place in self.places:
            place.numbers[place.index] = homes[place.home] + place.shift
        if self.keys:
            sample = int(states[0, 1])
            for key in self.keys:
                key[_SAMPLE] = sample
        for state, begun in zip(self.carries, operands, strict=False):
            state.copy_(begun.detach())
        for copy in self.copies:
            copy.make(operands)
        repeat = native("repeat", build_repeat, None, "repeat", _REPEAT)
        for begin in range(0, steps, _AT_ONCE):
            repeat(begin, min(steps, begin + _AT_ONCE), ctypes.addressof(self.table), states.data_ptr())
        for i, state in enumerate(self.carries):
            outputs[i] = empty(state.shape, state.dtype)
            outputs[i].copy_(state)
        return outputs


class ScanPlanner(CopyingPlanner):
    """Plans the body of a scan. Raises NoPlan for a body that cannot be planned.

    A value's home is 0 for the plan's own memory; those of operands, then of stacked results, begin at 1.

    kernels   the function, the items and the arguments of each kernel
    places    the numbers that a call sets; an int in place of an array stands for the arguments of a kernel
    moving    (array, index, bytes): those of them that grow after each step
    keys      the arrays of random keys of the kernels that draw
    held      what has to live as long as the plan
    copies    what is copied before the first step
    in_place_of_stock   whether programs compute what the graph leaves to PyTorch's arithmetic
    """

    def __init__(self, body: fx.GraphModule, operands: Sequence[Any], carries: int, xs: int):
        super().__init__(body)
        self.kernels: list[tuple[int, int, tuple[int, ...]]] = []
        self.places: list[_Place] = []
        self.moving: list[tuple[Any, int, int]] = []
        self.keys: list[Any] = []
        self.held: list[Any] = []
        self.copies: list[_Copy] = []
        self.bytes = 0
        self.in_place_of_stock = False
        self.homes = len(operands) + 1
        entries = body.graph.find_nodes(op="placeholder")
        self.carries = [
            replace(self.kept(torch.empty(x.shape, dtype=_stored(x))), carried=True) for x in operands[:carries]
        ]
        for i, (node, x) in enumerate(zip(entries, operands, strict=True)):
            if i < carries:
                self.env[node] = self.carries[i]
            elif i < carries + xs:
                self.env[node] = Value(x[0], i + 1, growth=x.stride(0) * x.itemsize)
            else:
                self.env[node] = Value(x, i + 1) if isinstance(x, Tensor) else x
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
        for home, row in enumerate(rows, self.homes):
            one = torch.empty_like(row.tensor, memory_format=_ROWS)
            self.move(row, Value(one, home, growth=one.nbytes))
        following = [self.value(node) for node in results[: len(self.carries)]]
        # A part of the state that a step only passes on may be read after it was written.
        kept = [self.kept(torch.empty_like(x.tensor, memory_format=_ROWS)) if x.carried else None for x in following]
        for value, copy in zip(following, kept, strict=True):
            if copy is not None:
                self.move(value, copy)
        for value, copy, state in zip(following, kept, self.carries, strict=True):
            self.move(value if copy is None else copy, state)
        table, places = self._table()
        stacks = tuple((i, row.tensor.shape, row.tensor.dtype) for i, row in zip(stacked, rows, strict=True))
        carries = tuple(value.tensor for value in self.carries)
        return ScanPlan(
            *(table, places, tuple(self.keys), self.states, carries, tuple(self.copies), stacks),
            *((*self.held, self.memory), self.bytes + self.memory.bytes, self.in_place_of_stock),
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
        x = value.tensor
        if value.home == 0 or value.growth or x.dim() != 2 or x.stride(1) == 1 or x.nbytes > _COPIED_BYTES:
            return value
        made = self.kept(torch.empty(x.shape, dtype=x.dtype))
        self.copies.append(_Copy(value.home - 1, value.shift, x.stride(), made.tensor))
        return made

    def launch(self, launch: Launch) -> None:
        """Add a kernel to a step."""
        arguments: list[int] = []
        for argument in launch.arguments:
            arguments.append(self._word(argument, len(arguments)))
        self.held += [launch.function, launch.held]
        self.kernels.append((address_of(launch.function), launch.items, tuple(arguments)))

    def _word(self, argument: Any, index: int) -> int:
        """Return an argument of the next kernel; 0 for one that a call sets."""
        if isinstance(argument, int):
            return argument
        if isinstance(argument, Value):
            return self._address(argument, len(self.kernels), index)
        if isinstance(argument, Space):
            space = torch.empty(argument.size + 64, dtype=torch.uint8)
            self.bytes += argument.size
            self.held.append(space)
            return space.data_ptr()
        if isinstance(argument, tuple):
            made: Any = array([0] * len(argument))
            for i, value in enumerate(argument):
                made[i] = self._address(value, made, i)
        elif isinstance(argument, KeyAddress):
            made = argument.words
            if argument.draws:
                self.keys.append(made)
        else:
            assert isinstance(argument, Flag)
            made = (ctypes.c_int32 * 1)()
        self.held.append(made)
        return ctypes.addressof(made)

    def _address(self, value: Value, numbers: Any, index: int) -> int:
        """Return the address of a value, which is a number of an array; 0 if a call sets it."""
        if value.home == 0:
            return value.tensor.data_ptr()
        self.places.append(_Place(numbers, index, value.home, value.shift))
        if value.growth:
            self.moving.append((numbers, index, value.growth))
        return 0

    def kept(self, tensor: Tensor) -> Value:
        """Return a tensor as a value that nodes do not write."""
        self.bytes += tensor.nbytes
        self.held.append(tensor)
        return Value(tensor)

    def state(self, rng: Any) -> tuple[int, int]:
        """Return seed and sample; each step brings its own seed, and each call its sample."""
        return 0, 0

    def code(self, work: Work) -> Code:
        """Return the code whose results always count."""
        return work.general()

    def _table(self) -> tuple[Any, tuple[_Place, ...]]:
        """Return what ``repeat`` is passed, and the places with arrays alone."""
        size = len(HEADER) + len(self.kernels) * len(KERNEL)
        table = (ctypes.c_int64 * (size + 2 * len(self.moving) + len(self.keys)))()

        def placed(numbers: Any, index: int) -> tuple[Any, int]:
            # An int stands for the arguments of a kernel, which are in the table itself.
            if isinstance(numbers, int):
                return table, len(HEADER) + numbers * len(KERNEL) + 4 + index
            return numbers, index

        table[:3] = [len(self.kernels), len(self.moving), len(self.keys)]
        for k, (function, items, arguments) in enumerate(self.kernels):
            at = len(HEADER) + k * len(KERNEL)
            padded = (*arguments, *(0,) * (MOST - len(arguments)))
            table[at : at + len(KERNEL)] = [function, len(arguments), 0, items, *padded]
        for k, (numbers, index, growth) in enumerate(self.moving):
            base, first = placed(numbers, index)
            table[size + 2 * k : size + 2 * k + 2] = [ctypes.addressof(base) + 8 * first, growth]
        for k, key in enumerate(self.keys):
            table[size + 2 * len(self.moving) + k] = ctypes.addressof(key)
        return table, tuple(_Place(*placed(p.numbers, p.index), p.home, p.shift) for p in self.places)


def _stored(x: Any) -> torch.dtype:
    """Return the dtype of a part of a state."""
    if not isinstance(x, Tensor) or not x.is_cpu or x.dtype not in STORAGES:
        raise NoPlan
    return x.dtype


class ScanPlans:
    """A scan's plans by the layouts of its operands; a plan that a call uses is not among them.

    stacked: the positions of the results that are stacked.
    """

    def __init__(self, body: fx.GraphModule, carries: int, xs: int, stacked: Sequence[int]) -> None:
        self.body, self.carries, self.xs, self.stacked = body, carries, xs, tuple(stacked)
        self.results = len(outputs_of(body))
        # None: there is no plan for this layout.
        self._plans: dict[Any, list[ScanPlan] | None] = {}

    def run(self, operands: Sequence[Any], empty: Callable[..., Tensor]) -> list[Any] | None:
        """Return the last carries and the stacked results; None if there is no plan.

        empty: makes a tensor of a shape and a dtype.
        """
        if not all(x.is_cpu for x in operands if isinstance(x, Tensor)):
            return None
        key = (current_set(), torch.get_num_threads(), *map(self._layout, range(len(operands)), operands))
        if key not in self._plans:
            if len(self._plans) >= _LAYOUTS:
                self._plans.clear()
            self._plans[key] = self._planned(operands)
        kept = self._plans.get(key)
        if kept is None:
            return None
        try:
            plan = kept.pop()
        except IndexError:  # other calls use all of them, or it is too large to be kept
            made = self._planned(operands)
            if made is None:
                return None
            plan = made.pop()
        outputs = plan.run(operands, self.results, empty)
        # PyTorch's NaNs have other signs and payloads.
        counts = not plan.in_place_of_stock or not any(bool(x.isnan().any()) for x in outputs if x is not None)
        if plan.bytes <= _KEPT_BYTES and len(kept) < _AT_A_TIME:
            kept.append(plan)
        return outputs if counts else None

    def _layout(self, i: int, x: Any) -> Any:
        """What a plan depends on in an operand: not the number of steps."""
        if not isinstance(x, Tensor):
            return x
        begin = 1 if self.carries <= i < self.carries + self.xs else 0
        return x.shape[begin:], x.stride(), x.dtype, x.is_neg()

    def _planned(self, operands: Sequence[Any]) -> list[ScanPlan] | None:
        try:
            # What inference mode makes could not be written outside of it.
            with torch.inference_mode(False):
                return [ScanPlanner(self.body, operands, self.carries, self.xs).plan(self.stacked)]
        except NoPlan:
            return None
