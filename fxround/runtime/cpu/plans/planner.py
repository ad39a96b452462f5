"""Planners: the launches that a graph of small operations makes, for operands of given layouts.

``Planner`` goes through nodes that are maps, contractions, sums, views and copies. It gives every result memory of its
own, and passes a ``Launch`` for every kernel to ``launch``: ``machine_loops`` and ``straight`` make tables of them.
"""

from __future__ import annotations

import ctypes
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, fx

from fxround.graph.dialect import Call, ContractionCall, Fused, Pointwise, Sum, read
from fxround.graph.dtypes import STORAGES, dtype_of
from fxround.kernels.kinds import Exact, Map, Reduce
from fxround.kernels.maps import map_kernel
from fxround.kernels.program import Program
from fxround.kernels.reductions import largest_kernel
from fxround.runtime.cpu.begin import begin
from fxround.runtime.cpu.code import native, signature
from fxround.runtime.cpu.contraction import Pending
from fxround.runtime.cpu.launches import Address, Flag, KeyAddress, Launch, Space, map_launch, reduction_launch
from fxround.runtime.cpu.llvm.row_copies import build_rows
from fxround.runtime.cpu.pointwise import ENOUGH, array, call_for
from fxround.runtime.cpu.reduction import reduction_for
from fxround.runtime.cpu.threads import pieces_of
from fxround.runtime.draw import NO_KEY, Draw
from fxround.runtime.operands import loads_of
from fxround.runtime.row_chains import LARGEST, is_largest_of_rows

aten = torch.ops.aten
VIEWS: Final = frozenset(
    {
        *(aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default),
        *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.permute.default, aten.t.default),
        *(aten.transpose.int, aten.expand.default, aten.slice.Tensor, aten.select.int, aten.unbind.int),
        *(aten.split_with_sizes.default, aten.split.Tensor, aten.alias.default, aten.detach.default),
    }
)
_ROWS: Final = signature(2, 4)
# The home of what a plan holds, whose addresses are numbers.
HELD: Final = -1


class NoPlan(Exception):
    """The node is not one that is planned."""


@dataclass(frozen=True)
class Value:
    """A value while a graph is planned.

    tensor    its layout, and the memory that it has while it is planned
    home      the number of the memory that it is in, from which ``shift`` bytes lead to element 0; HELD: what the plan
              holds
    growth    the bytes by which its address grows from one step to the next
    carried   whether it is in the memory of a loop's state
    """

    tensor: Tensor
    home: int = HELD
    shift: int = 0
    growth: int = 0
    carried: bool = False

    def view(self, tensor: Tensor) -> Value:
        """Return a value in the same memory."""
        return replace(self, tensor=tensor, shift=self.shift + tensor.data_ptr() - self.tensor.data_ptr())

    @property
    def address(self) -> int | Address:
        """The address of element 0, as launches have it."""
        return self.tensor.data_ptr() if self.home == HELD else Address(self.home, self.shift, self.growth)


class Planner(ABC):
    """Plans nodes one after the other; ``env`` has what they are: values, lists of values, numbers."""

    def __init__(self) -> None:
        self.env: dict[fx.Node, Any] = {}

    @abstractmethod
    def launch(self, launch: Launch) -> None:
        """Take the next launch."""

    @abstractmethod
    def made(self, shape: Sequence[int], dtype: torch.dtype) -> Value:
        """Return a new row-major value that a kernel is going to write."""

    @abstractmethod
    def state(self, rng: Any) -> tuple[int, int]:
        """Return seed and sample of a node's random state for the key in the plan. Raises NoPlan for another state."""

    def value(self, node: Any) -> Value:
        """Return the value of a node."""
        value = self.env.get(node) if isinstance(node, fx.Node) else None
        if not isinstance(value, Value):
            raise NoPlan
        return value

    def add(self, node: fx.Node) -> None:
        """Plan a node. Raises NoPlan for one that is not planned."""
        call = read(node)
        if node.target is operator.getitem:
            source: Any = node.args[0]
            if not isinstance(self.env.get(source), list):
                raise NoPlan
            self.env[node] = self.env[source][node.args[1]]
        elif isinstance(call, Pointwise | Fused):
            self._map(node, call)
        elif isinstance(call, ContractionCall):
            self._contraction(node, call)
        elif isinstance(call, Sum) or node.target is LARGEST:
            self._reduction(node, call)
        elif node.target in VIEWS:
            self._view(node)
        elif node.target is aten.clone.default:
            self._clone(node)
        elif node.target is aten.cat.default:
            self._cat(node)
        else:
            raise NoPlan

    def move(self, value: Value, place: Value) -> None:
        """Copy a value to row-major memory."""
        if value.tensor.dtype not in STORAGES or value.tensor.is_neg():
            raise NoPlan
        storage = STORAGES[value.tensor.dtype]
        kernel = map_kernel(Program.parse("t0 = identity(x0) @ exact"), (storage,), storage)
        self._kernel(kernel, (value,), (place,), KeyAddress(NO_KEY, draws=False))

    def _clone(self, node: fx.Node) -> None:
        value, wanted = self.value(node.args[0]), node.kwargs.get("memory_format")
        if not (value.tensor.is_contiguous() or wanted is torch.contiguous_format):
            raise NoPlan
        self.env[node] = self._copied(value)

    def _copied(self, value: Value) -> Value:
        copy = self.made(value.tensor.shape, value.tensor.dtype)
        self.move(value, copy)
        return copy

    def _view(self, node: fx.Node) -> None:
        value = self.value(node.args[0])
        place: Any = node.args[0]
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: None if used is place else self._number(used))
        target: Any = node.target
        viewed = target(value.tensor, *args[1:], **kwargs)
        memory = value.tensor.untyped_storage().data_ptr()
        parts = [viewed] if isinstance(viewed, Tensor) else list(viewed)
        if any(part.untyped_storage().data_ptr() != memory for part in parts):
            # A reshape that copies.
            value = self._copied(value)
            viewed = target(value.tensor, *args[1:], **kwargs)
        self.env[node] = value.view(viewed) if isinstance(viewed, Tensor) else [value.view(part) for part in viewed]

    def _number(self, node: fx.Node) -> Any:
        """Return the number that a node is."""
        value = self.env.get(node)
        if not isinstance(value, int):
            raise NoPlan
        return value

    def _cat(self, node: fx.Node) -> None:
        parts: Any = node.args[0]
        dim = int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]
        self.env[node] = self._joined([self.value(part) for part in parts], dim)

    def _joined(self, values: Sequence[Value], dim: int) -> Value:
        """Return values behind each other along a dimension, in memory of their own."""
        whole = torch.cat([value.tensor for value in values], dim)
        dim %= whole.dim()
        if any(value.tensor.dtype != whole.dtype or value.tensor.dtype not in STORAGES for value in values):
            raise NoPlan
        made = self.made(whole.shape, whole.dtype)
        sizes = [value.tensor.shape[dim] if value.tensor.dim() == whole.dim() else 0 for value in values]
        places = [made.view(place) for place in made.tensor.split_with_sizes(sizes, dim)]
        for value, place in zip(values, places, strict=True):
            self._put(value, place, made.tensor, dim)
        return made

    def _put(self, value: Value, place: Value, whole: Tensor, dim: int) -> None:
        """Copy a value to a part of ``whole``, which is row-major, along a dimension."""
        if place.tensor.is_contiguous():
            self.move(value, place)
        else:
            self._rows(value, place, whole, dim)

    def _rows(self, value: Value, place: Value, whole: Tensor, dim: int) -> None:
        """Copy a value to a part of ``whole`` along a dimension: a piece of each of its rows."""
        if value.tensor.is_neg() or not value.tensor.is_contiguous():
            value = self._copied(value)
        rows, size = math.prod(whole.shape[:dim]), value.tensor.nbytes
        layout = array((size // rows, size // rows, whole.nbytes // rows))
        function = native("rows", build_rows, None, "rows", _ROWS)
        self.launch(Launch(function, rows, (ctypes.addressof(layout), value.address, place.address, 0), (layout,)))

    def _map(self, node: fx.Node, call: Pointwise[fx.Node] | Fused[fx.Node]) -> None:
        values = tuple(self.value(x) for x in call.xs)
        tensors = [value.tensor for value in values]
        kernel = call.kernel(loads_of(tensors))
        if kernel is None:
            raise NoPlan
        draw = Draw(*self.state(call.rng), 0 if isinstance(call, Fused) else call.node) if kernel.draws else None
        map_call = call_for(kernel, tensors)
        if map_call is None:
            raise NoPlan
        results = tuple(self.made(map_call.shape, dtype_of(storage)) for storage in kernel.results)
        key = NO_KEY if draw is None else draw.keys(call.nodes) if isinstance(call, Fused) else draw.key()
        self._kernel(kernel, values, results, KeyAddress(key, draw is not None))
        self.env[node] = list(results) if isinstance(call, Fused) else results[0]

    def _kernel(self, kernel: Map, values: tuple[Value, ...], results: tuple[Value, ...], key: KeyAddress) -> None:
        call = call_for(kernel, [value.tensor for value in values])
        if call is None or (call.total and pieces_of(call.blocks, ENOUGH // call.unit) > 1):
            raise NoPlan
        if call.total == 0:
            return
        sources, targets = ([value.address for value in given] for given in (values, results))
        self.launch(map_launch(call, sources, targets, key))

    def _contraction(self, node: fx.Node, call: Call[fx.Node]) -> None:
        operands = [self.value(x) for x in call.operands]
        if any(x.tensor.numel() == 0 for x in operands):
            raise NoPlan  # empty operands have no addresses by which to tell them apart
        given: Any = type(call).of([self._argument(arg) for arg in node.args])
        pending = begin(given)
        work = pending.plan
        if work is None or pieces_of(work.items, work.enough) > 1:
            raise NoPlan
        key: KeyAddress | int = 0
        if pending.key is not None:
            key = KeyAddress(Draw(*self.state(call.rng), call.node).key(), draws=True)  # type: ignore[attr-defined]
        factors = self._factors(pending, operands)
        # Quick code where there is some: its results are seldom refused.
        code, result = work.quick or work.general(), self.made(pending.shape, pending.dtype)
        arguments = (ctypes.addressof(code.layout), *factors, result.address, Space(code.scratch), key, Flag())
        again = work if code is work.quick else None
        # A plan outlives the call, so that it holds the tables and not the operands.
        held = work, pending.held[len(operands) :], code
        self.launch(Launch(code.function, work.items, arguments, held, again))
        self.env[node] = result

    def _factors(self, pending: Pending, operands: Sequence[Value]) -> list[int | Address]:
        """Return the addresses of a contraction's operands, which may have changed places, and of its tables."""
        factors: list[int | Address] = []
        for i, (address, tensor) in enumerate(zip(pending.pointers, pending.held, strict=True)):
            if i >= len(operands):
                factors.append(address)
                continue
            values = [x for x in operands if x.tensor.data_ptr() == address]
            # None is at the address of a copy. Values of several homes are at it if arguments are one tensor, which
            # they need not be in another call.
            if len({x.home for x in values}) != 1:
                raise NoPlan
            assert tensor.untyped_storage().data_ptr() == values[0].tensor.untyped_storage().data_ptr()
            factors.append(values[0].address)
        return factors

    def _argument(self, arg: Any) -> Any:
        """Return an argument of a node with tensors in place of nodes."""

        def tensor(node: fx.Node) -> Any:
            value = self.env.get(node)
            return value.tensor if isinstance(value, Value) else value

        return fx.map_arg(arg, tensor)

    def _reduction(self, node: fx.Node, call: Call[fx.Node] | None) -> None:
        if isinstance(call, Sum):
            x = self.value(call.x)
            tensor: Sum[Tensor] = Sum.of([self._argument(arg) for arg in node.args])
            kernel: Reduce | Exact = call.kernel((STORAGES[x.tensor.dtype],))
            dims, size = tensor.reduced(), tensor.size()
        else:
            x = self.value(node.args[0])
            if not is_largest_of_rows(node, x.tensor.dim()) or x.tensor.dtype not in STORAGES:
                raise NoPlan
            kernel, dims, size = (
                largest_kernel(STORAGES[x.tensor.dtype]),
                [x.tensor.dim() - 1],
                [*x.tensor.shape[:-1], 1],
            )
        if not isinstance(kernel, Reduce) or x.tensor.is_neg() or not math.prod(x.tensor.shape):
            raise NoPlan
        reduction = reduction_for(kernel, x.tensor, dims)
        if reduction is None or pieces_of(reduction.items, reduction.enough) > 1:
            raise NoPlan
        draws = kernel.draws or kernel.finish_draws
        key = NO_KEY
        if draws and isinstance(call, Sum):
            key = Draw(*self.state(call.rng), call.node).key()
        elif isinstance(call, Sum):
            key = Draw(0, 0, call.node).key()
        result = self.made(size, dtype_of(kernel.result))
        self.launch(reduction_launch(reduction, x.address, result.address, KeyAddress(key, draws)))
        self.env[node] = result
