"""Scans in machine code: all kernels of all steps in one call, if a body is small maps, products and views.

A body is planned for operands of given layouts: every value has memory of its own, every kernel its arrays of
addresses, and what a step reads or writes in a row of a tensor moves by a row after each step. The kernels, the numbers
of the elements and the random bits are those of the body run one operation at a time, so the bits are the same. Where
several threads would gain something, or an operation is another one, there is no plan, and Python calls the kernels.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, fx

from fxround.graph.dialect import Fused, Matmul, Pointwise, read
from fxround.graph.dtypes import STORAGES
from fxround.graph.site import PORT
from fxround.graph.values import outputs_of
from fxround.kernels.maps import map_kernel
from fxround.kernels.program import Program
from fxround.kernels.shapes import Map
from fxround.runtime.cpu.code import address_of, native, signature
from fxround.runtime.cpu.llvm.repeat import FEW, HEADER, KERNEL, MOST, build_repeat
from fxround.runtime.cpu.matmul import bound_matmul
from fxround.runtime.cpu.pointwise import array, call_for
from fxround.runtime.cpu.threads import pieces_of
from fxround.runtime.cuda.launcher import runs_texts
from fxround.runtime.draw import NO_KEY, Draw
from fxround.runtime.operands import loads_of

aten = torch.ops.aten
_REPEAT: Final = signature(2, 2)
_VIEWS: Final = frozenset(
    {
        *(aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default),
        *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.permute.default, aten.t.default),
        *(aten.transpose.int, aten.expand.default, aten.slice.Tensor, aten.select.int, aten.unbind.int),
        *(aten.split_with_sizes.default, aten.split.Tensor, aten.alias.default, aten.detach.default),
    }
)
# Steps between which a signal is handled, and the elements that make another thread worth its start.
_AT_ONCE: Final = 4096
_ENOUGH: Final = 1 << 15


class NoPlan(Exception):
    """The body is not one that runs in machine code."""


@dataclass
class _Plan:
    """The kernels of a step, and everything that their addresses lead to.

    kernels   the function, the items and the arguments of each kernel
    moving    (array, index, bytes): numbers that grow after each step; None for the arguments of the latest kernel
    keys      the arrays of random keys of the kernels that draw
    held      what has to live as long as the plan
    """

    kernels: list[tuple[int, int, int, tuple[int, ...]]] = field(default_factory=list)
    moving: list[tuple[Any, int, int]] = field(default_factory=list)
    keys: list[Any] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)

    def run(self, steps: int, states: Tensor) -> None:
        """Run all steps. states: (seed, sample) of each."""
        size = len(HEADER) + len(self.kernels) * len(KERNEL)
        table = (ctypes.c_int64 * (size + 2 * len(self.moving) + len(self.keys)))()
        table[:3] = [len(self.kernels), len(self.moving), len(self.keys)]
        for k, (function, begin, end, arguments) in enumerate(self.kernels):
            at = len(HEADER) + k * len(KERNEL)
            padded = (*arguments, *(0,) * (MOST - len(arguments)))
            table[at : at + len(KERNEL)] = [function, int(len(arguments) > FEW), begin, end, *padded]
        for k, (numbers, index, growth) in enumerate(self.moving):
            # An int stands for the arguments of a kernel, which are in the table itself.
            kernel = len(HEADER) + numbers * len(KERNEL) + 4 if isinstance(numbers, int) else 0
            base = ctypes.addressof(table if isinstance(numbers, int) else numbers)
            table[size + 2 * k : size + 2 * k + 2] = [base + 8 * (kernel + index), growth]
        for k, key in enumerate(self.keys):
            table[size + 2 * len(self.moving) + k] = ctypes.addressof(key)
        repeat = native("repeat", build_repeat, None, "repeat", _REPEAT)
        states = states.contiguous()
        for begin in range(0, steps, _AT_ONCE):
            repeat(begin, min(steps, begin + _AT_ONCE), ctypes.addressof(table), states.data_ptr())


class Planner:
    """Plans a body node by node. Raises NoPlan for a body that cannot be planned."""

    def __init__(self, body: fx.GraphModule, carries: Sequence[Tensor], xs: Sequence[Tensor], others: Sequence[Any]):
        self.plan = _Plan()
        self.env: dict[fx.Node, Any] = {}
        # The bytes by which a value's address grows from step to step.
        self.growth: dict[fx.Node, int] = {}
        self.carried: set[fx.Node] = set()
        entries = body.graph.find_nodes(op="placeholder")
        self.state = [self._own(x) for x in carries]
        given = [*self.state, *(x[0] for x in xs), *others]
        for i, (node, value) in enumerate(zip(entries, given, strict=True)):
            self.env[node] = value
            if i < len(carries):
                self.carried.add(node)
            elif i < len(carries) + len(xs):
                x = xs[i - len(carries)]
                self.growth[node] = x.stride(0) * x.itemsize
                if node.meta[PORT].kind == "random":
                    self.states = x
        self.body = body
        for node in body.graph.nodes:
            if node.op not in ("placeholder", "output"):
                self._add(node)

    def finish(self, stacks: Sequence[tuple[int, Tensor]]) -> None:
        """Add what follows the kernels of a step: rows of results, then the next state.

        stacks: for each result that is stacked its position, and the tensor of all rows.
        """
        results = outputs_of(self.body)
        for i, stack in stacks:
            self._copy(results[i], stack[0], stack.stride(0) * stack.itemsize)
        following = results[: len(self.state)]
        # A part of the state that a step only passes on may be read after it was written.
        kept = [self.value(node).clone() if self._is_carried(node) else None for node in following]
        for node, copy in zip(following, kept, strict=True):
            if copy is not None:
                self._copy(node, copy)
        for node, copy, state in zip(following, kept, self.state, strict=True):
            if copy is None:
                self._copy(node, state)
            else:
                self._move(copy, 0, state, 0)
                self.plan.held.append(copy)

    def _is_carried(self, node: fx.Node) -> bool:
        return node in self.carried

    def value(self, node: Any) -> Tensor:
        """Return the tensor of a node in the first step."""
        value = self.env.get(node) if isinstance(node, fx.Node) else None
        if not isinstance(value, Tensor):
            raise NoPlan
        return value

    def _own(self, x: Any) -> Tensor:
        if not isinstance(x, Tensor) or not x.is_cpu or x.dtype not in STORAGES:
            raise NoPlan
        return x.detach().clone(memory_format=torch.contiguous_format)

    def _add(self, node: fx.Node) -> None:
        call = read(node)
        if node.target is operator.getitem:
            source: Any = node.args[0]
            self.env[node] = self.env[source][node.args[1]]
            self._follow(node, source)
        elif isinstance(call, Pointwise | Fused):
            self._map(node, call)
        elif isinstance(call, Matmul):
            self._product(node, call)
        elif node.target in _VIEWS:
            self._view(node)
        elif node.target is aten.clone.default:
            source = node.args[0]
            value = self.value(source)
            self.env[node] = torch.empty(value.shape, dtype=value.dtype)
            self._copy(source, self.env[node])
        elif node.target is aten.cat.default:
            self._cat(node)
        else:
            raise NoPlan

    def _follow(self, node: fx.Node, source: fx.Node) -> None:
        """Note that a value is in the memory of another one."""
        self.growth[node] = self.growth.get(source, 0)
        if source in self.carried:
            self.carried.add(node)

    def _view(self, node: fx.Node) -> None:
        source: Any = node.args[0]
        value = self.value(source)
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.env.__getitem__)
        target: Any = node.target
        found = target(*args, **kwargs)
        memory = value.untyped_storage().data_ptr()
        parts = [found] if isinstance(found, Tensor) else list(found)
        if all(part.untyped_storage().data_ptr() == memory for part in parts):
            self.env[node] = found
            self._follow(node, source)
            return
        # A reshape that copies: the copy is made in each step.
        copy = torch.empty(value.shape, dtype=value.dtype)
        self._copy(source, copy)
        self.env[node] = target(copy, *args[1:], **kwargs)

    def _cat(self, node: fx.Node) -> None:
        parts: Any = node.args[0]
        dim = int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]
        values = [self.value(part) for part in parts]
        made = torch.empty_like(torch.cat(values, dim), memory_format=torch.contiguous_format)
        first = 0
        for part, value in zip(parts, values, strict=True):
            place = made.narrow(dim, first, value.shape[dim])
            if not place.is_contiguous():
                raise NoPlan
            self._copy(part, place)
            first += value.shape[dim]
        self.env[node] = made

    def _copy(self, node: Any, place: Tensor, growth: int = 0) -> None:
        """Copy a value to row-major memory whose address grows."""
        self._move(self.value(node), self.growth.get(node, 0), place, growth)

    def _move(self, value: Tensor, grows: int, place: Tensor, growth: int) -> None:
        if value.dtype not in STORAGES or value.is_neg():
            raise NoPlan
        storage = STORAGES[value.dtype]
        kernel = map_kernel(Program.parse("t0 = identity(x0) @ exact"), (storage,), storage)
        self._kernel(kernel, [value], [grows], [place], [growth], NO_KEY)

    def _map(self, node: fx.Node, call: Pointwise[fx.Node] | Fused[fx.Node]) -> None:
        values = [self.value(x) for x in call.xs]
        kernel = call.kernel(loads_of(values))
        if kernel is None:
            raise NoPlan
        shape = torch.broadcast_shapes(*(x.shape for x in values))
        dtypes = node.meta["val"] if isinstance(node.meta["val"], list | tuple) else [node.meta["val"]]
        results = [torch.empty(shape, dtype=value.dtype) for value in dtypes]
        key = NO_KEY
        if kernel.draws:
            draw = Draw(0, int(self.states[0, 1]), 0 if isinstance(call, Fused) else call.node)
            key = draw.keys(call.nodes) if isinstance(call, Fused) else draw.key()
            self.plan.keys.append(key)
        self._kernel(kernel, values, [self.growth.get(x, 0) for x in call.xs], results, [0] * len(results), key)
        self.env[node] = results if isinstance(call, Fused) else results[0]

    def _kernel(
        self,
        kernel: Map,
        values: Sequence[Tensor],
        grows: Sequence[int],
        results: Sequence[Tensor],
        growing: Sequence[int],
        key: Any,
    ) -> None:
        call = call_for(kernel, values)
        if call is None or (call.total and pieces_of(call.blocks, _ENOUGH // call.unit) > 1):
            raise NoPlan
        if call.total == 0:
            return
        sources, targets = (array([x.data_ptr() for x in found]) for found in (values, results))
        self.plan.held += [values, results, sources, targets, key, call]
        self.plan.kernels.append((address_of(call.function), 0, call.blocks, call.arguments(sources, targets, key)))
        self.plan.moving += [(sources, i, grown) for i, grown in enumerate(grows) if grown]
        self.plan.moving += [(targets, i, grown) for i, grown in enumerate(growing) if grown]

    def _product(self, node: fx.Node, call: Matmul[fx.Node]) -> None:
        a, b = self.value(call.a), self.value(call.b)
        rng = self.states[0]
        bound = bound_matmul(Matmul(a, b, call.accumulate, call.rounding, rng, call.node))
        pending = bound.begin(a, b, rng, call.node)
        result = torch.empty(pending.shape, dtype=pending.dtype)
        self.env[node] = result
        work = pending.plan
        if work is None or pieces_of(work.items, work.enough) > 1:
            raise NoPlan
        code = work.general()
        space, flags = torch.empty(code.scratch + 64, dtype=torch.uint8), (ctypes.c_int32 * 1)()
        arguments = code.arguments((*pending.pointers, result.data_ptr()), space.data_ptr(), pending.key, flags)
        self.plan.held += [a, b, result, pending, code, space, flags]
        if pending.key is not None:
            self.plan.keys.append(pending.key)
        for factor, i in ((call.a, 0), (call.b, 1)):
            if grown := self.growth.get(factor, 0):
                self.plan.moving.append((len(self.plan.kernels), 1 + (1 - i if bound.turned else i), grown))
        self.plan.kernels.append((address_of(code.function), 0, work.items, arguments))


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
        planner = Planner(body, operands[:carries], rows, operands[carries + xs :])
        results = outputs_of(body)
        stacks = []
        for i in stacked:
            value = planner.value(results[i])
            stacks.append((i, empty((rows[0].shape[0], *value.shape), value.dtype)))
        planner.finish(stacks)
    except NoPlan:
        return None
    planner.plan.run(int(rows[0].shape[0]), planner.states)
    found: list[Any] = [None] * len(results)
    for i, state in enumerate(planner.state):
        found[i] = empty(state.shape, state.dtype)
        found[i].copy_(state)
    for i, stack in stacks:
        found[i] = stack
    return found
