"""Scans in machine code: all kernels of all steps in one call, if a body is small maps, products and views.

A body is planned for operands of given layouts: every value has memory of its own, every kernel its arrays of
addresses, and what a step reads or writes in a row of a tensor moves by a row after each step. The kernels, the numbers
of the elements and the random bits are those of the body run one operation at a time, so the bits are the same. Where
several threads would gain something, or an operation is another one, there is no plan, and Python calls the kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, fx

from fxround.graph.dtypes import STORAGES
from fxround.graph.site import PORT
from fxround.graph.values import outputs_of
from fxround.runtime.cpu.code import address_of, native, signature
from fxround.runtime.cpu.contraction import Code, Work
from fxround.runtime.cpu.llvm.repeat import HEADER, KERNEL, MOST, build_repeat
from fxround.runtime.cpu.pointwise import array
from fxround.runtime.cuda.launcher import runs_texts
from fxround.runtime.schedule.launches import Flag, Key, Launch, NoPlan, Planner, Space, Value

_REPEAT: Final = signature(2, 2)
# Steps between which a signal is handled.
_AT_ONCE: Final = 4096


class ScanPlanner(Planner):
    """Plans the body of a scan. Raises NoPlan for a body that cannot be planned.

    kernels   the function, the items and the arguments of each kernel
    moving    (array, index, bytes): numbers that grow after each step; an int in place of an array stands for the
              arguments of a kernel
    keys      the arrays of random keys of the kernels that draw
    held      what has to live as long as the plan
    """

    def __init__(self, body: fx.GraphModule, carries: Sequence[Any], xs: Sequence[Tensor], others: Sequence[Any]):
        super().__init__()
        self.kernels: list[tuple[int, int, tuple[int, ...]]] = []
        self.moving: list[tuple[Any, int, int]] = []
        self.keys: list[Any] = []
        self.held: list[Any] = []
        entries = body.graph.find_nodes(op="placeholder")
        self.carries = [Value(self._own(x), carried=True) for x in carries]
        rows = [Value(x[0], growth=x.stride(0) * x.itemsize) for x in xs]
        given = [Value(x) if isinstance(x, Tensor) else x for x in others]
        self.env.update(zip(entries, [*self.carries, *rows, *given], strict=True))
        for node, x in zip(entries[len(carries) :], xs, strict=False):
            if node.meta[PORT].kind == "random":
                self.states = x
        self.body = body
        for node in body.graph.nodes:
            if node.op not in ("placeholder", "output"):
                self.add(node)

    def finish(self, stacks: Sequence[tuple[int, Tensor]]) -> None:
        """Add what follows the kernels of a step: rows of results, then the next state.

        stacks: for each result that is stacked its position, and the tensor of all rows.
        """
        results = outputs_of(self.body)
        for i, stack in stacks:
            self.move(self.value(results[i]), Value(stack[0], growth=stack.stride(0) * stack.itemsize))
        following = [self.value(node) for node in results[: len(self.carries)]]
        # A part of the state that a step only passes on may be read after it was written.
        kept = [
            replace(value, tensor=value.tensor.clone(), carried=False) if value.carried else None for value in following
        ]
        for value, copy in zip(following, kept, strict=True):
            if copy is not None:
                self.move(value, copy)
        for value, copy, state in zip(following, kept, self.carries, strict=True):
            self.move(value if copy is None else copy, state)

    def launch(self, launch: Launch) -> None:
        """Add a kernel to a step."""
        arguments: list[int] = []
        for argument in launch.arguments:
            arguments.append(self._word(argument, len(arguments)))
        self.held.append(launch)
        self.kernels.append((address_of(launch.function), launch.items, tuple(arguments)))

    def _word(self, argument: Any, index: int) -> int:
        """Return an argument of the next kernel as it is in the first step."""
        if isinstance(argument, int):
            return argument
        if isinstance(argument, Value):
            self.held.append(argument)
            if argument.growth:
                self.moving.append((len(self.kernels), index, argument.growth))
            return argument.tensor.data_ptr()
        if isinstance(argument, Space):
            space = torch.empty(argument.size + 64, dtype=torch.uint8)
            self.held.append(space)
            return space.data_ptr()
        if isinstance(argument, tuple):
            made: Any = array([value.tensor.data_ptr() for value in argument])
            self.moving += [(made, i, value.growth) for i, value in enumerate(argument) if value.growth]
        elif isinstance(argument, Key):
            made = argument.words
            if argument.draws:
                self.keys.append(made)
        else:
            assert isinstance(argument, Flag)
            made = (ctypes.c_int32 * 1)()
        self.held += [argument, made]
        return ctypes.addressof(made)

    def made(self, shape: Sequence[int], dtype: torch.dtype) -> Value:
        """Return a value that every step writes."""
        return Value(torch.empty(shape, dtype=dtype))

    def state(self, rng: Any) -> tuple[int, int]:
        """Return seed and sample; each step brings its own seed."""
        return 0, int(self.states[0, 1])

    def code(self, work: Work) -> Code:
        """Return the code whose results always count."""
        return work.general()

    def _own(self, x: Any) -> Tensor:
        if not isinstance(x, Tensor) or not x.is_cpu or x.dtype not in STORAGES:
            raise NoPlan
        return x.detach().clone(memory_format=torch.contiguous_format)

    def run(self, steps: int) -> None:
        """Run all steps."""
        size = len(HEADER) + len(self.kernels) * len(KERNEL)
        table = (ctypes.c_int64 * (size + 2 * len(self.moving) + len(self.keys)))()
        table[:3] = [len(self.kernels), len(self.moving), len(self.keys)]
        for k, (function, items, arguments) in enumerate(self.kernels):
            at = len(HEADER) + k * len(KERNEL)
            padded = (*arguments, *(0,) * (MOST - len(arguments)))
            table[at : at + len(KERNEL)] = [function, len(arguments), 0, items, *padded]
        for k, (numbers, index, growth) in enumerate(self.moving):
            # An int stands for the arguments of a kernel, which are in the table itself.
            kernel = len(HEADER) + numbers * len(KERNEL) + 4 if isinstance(numbers, int) else 0
            base = ctypes.addressof(table if isinstance(numbers, int) else numbers)
            table[size + 2 * k : size + 2 * k + 2] = [base + 8 * (kernel + index), growth]
        for k, key in enumerate(self.keys):
            table[size + 2 * len(self.moving) + k] = ctypes.addressof(key)
        repeat = native("repeat", build_repeat, None, "repeat", _REPEAT)
        states = self.states.contiguous()
        for begin in range(0, steps, _AT_ONCE):
            repeat(begin, min(steps, begin + _AT_ONCE), ctypes.addressof(table), states.data_ptr())


def scanned(
    body: fx.GraphModule,
    operands: Sequence[Any],
    carries: int,
    xs: int,
    stacked: Sequence[int],
    empty: Any,
) -> list[Any] | None:
    """Return the last carries and the stacked results of a scan; None if the body does not run in machine code.

    empty: makes a tensor of a shape and a dtype.
    """
    if runs_texts(operands) or not all(x.is_cpu for x in operands if isinstance(x, Tensor)):
        return None
    rows = operands[carries : carries + xs]
    try:
        planner = ScanPlanner(body, operands[:carries], rows, operands[carries + xs :])
        results = outputs_of(body)
        stacks = []
        for i in stacked:
            value = planner.value(results[i]).tensor
            stacks.append((i, empty((rows[0].shape[0], *value.shape), value.dtype)))
        planner.finish(stacks)
    except NoPlan:
        return None
    planner.run(int(rows[0].shape[0]))
    found: list[Any] = [None] * len(results)
    for i, state in enumerate(planner.carries):
        found[i] = empty(state.tensor.shape, state.tensor.dtype)
        found[i].copy_(state.tensor)
    for i, stack in stacks:
        found[i] = stack
    return found
