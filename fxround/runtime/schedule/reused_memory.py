"""Graphs of PyTorch's operators alone, whose large results are written where memory is free.

An operator of PyTorch returns its result in new memory. Some megabytes that were freed have gone back to the system,
and to write to new memory takes as long as the arithmetic. ``reusing`` runs a graph once, one operator at a time, and
notes the layout and the memory of every value. A later call with inputs of the same layouts has the same layouts, and
so the same kernels: it differs only in where they write. A result that is not returned, and whose memory no returned
value shares, is written

- over the first operand, if nothing reads that memory afterwards, by operators whose results are exactly rounded or
  selected: their bits do not depend on where they are written. The operand has the layout of the result, and an
  operator in place keeps it;
- into a buffer (``runtime.buffers``), which is released after its last use, by operators with an argument ``out``. That
  is the same kernel on the same operands; the buffer is row-major, as the result was.

A ``where`` that chooses a constant or a value that nothing reads afterwards returns the value itself if the condition
is false everywhere.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx

from fxround.runtime import buffers
from fxround.runtime.call_programs import (
    SIZES,
    CallPlan,
    Computed,
    PythonCall,
    Slot,
    Strides,
    assumed,
    binding,
    expectation,
    parts_of,
    sees_calls,
)
from fxround.runtime.layouts import row_major
from fxround.runtime.schedule.aliasing import is_known, may_share
from fxround.runtime.torch_ops import CHOICES

_ATEN: Final = torch.ops.aten


def _copied(x: Tensor, *, out: Tensor, **_: Any) -> Tensor:
    return out.copy_(x)


# What computes in place, for operators whose results are exactly rounded or selected.
_IN_PLACE: Final[Mapping[Any, Callable[..., Tensor]]] = {
    _ATEN.add.Tensor: Tensor.add_,
    _ATEN.sub.Tensor: Tensor.sub_,
    _ATEN.mul.Tensor: Tensor.mul_,
    _ATEN.mul.Scalar: Tensor.mul_,
    _ATEN.div.Tensor: Tensor.div_,
    _ATEN.neg.default: Tensor.neg_,
    _ATEN.relu.default: Tensor.relu_,
}
# What computes into ``out``, by the kernel of the operator.
_INTO: Final[Mapping[Any, Callable[..., Tensor]]] = {
    **{getattr(_ATEN, name).default: getattr(torch, name) for name in ("bmm", "erf", "exp", "mm", "sigmoid", "tanh")},
    **{getattr(_ATEN, name).Tensor: getattr(torch, name) for name in ("add", "div", "mul", "sub")},
    _ATEN.mul.Scalar: torch.mul,
    _ATEN.clone.default: _copied,
}
# Tensors of one number, which their layouts decide.
_FILLED: Final = (_ATEN.full_like.default, _ATEN.zeros_like.default)
# What reads the layout of its operand alone.
_OF_LAYOUTS: Final = (*_FILLED, *SIZES)
_DTYPES: Final = (torch.float32, torch.float64)


def reusing(graph: fx.GraphModule, inputs: Sequence[Any]) -> Computed | None:
    """Run a graph that rounds nothing, and plan later calls; None for a graph that a plan cannot hold."""
    if not all(map(_is_planned, graph.graph.nodes)) or any(isinstance(x, Tensor) and not x.is_cpu for x in inputs):
        return None
    if sees_calls():
        return None
    run = _Run(graph, inputs)
    return Computed(run.results, _Planner(run).plan() if run.is_settled else None)


def _is_planned(node: fx.Node) -> bool:
    """Whether a node may be one of a plan: it is known what it returns, and it draws nothing."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return node.op != "call_module"
    return is_known(node) and torch.Tag.nondeterministic_seeded not in node.target.tags


@dataclass(eq=False)
class _Memory:
    """Memory that some values share.

    last      the position of the last node that reads it
    kept      whether it may be read after that, or is not just that of one result
    buffer    the place of the buffer that it is
    """

    last: int
    kept: bool
    buffer: Slot | None = None


@dataclass
class _Value:
    """What a run notes of a node.

    layout      that of a tensor (``assumed``); None for another value
    number      a number that is the same in every call; None for another value
    memory      that of the tensor, or of the tensors in a list
    is_whole    whether the tensor has as many bytes as its memory
    parts       the number of tensors in a list; None for a tensor
    function    what makes the call
    expected    what a later call has to compare
    constant    the place of a tensor without dimensions, of the number that the tensor is filled with
    """

    layout: Any = None
    number: Any = None
    memory: tuple[_Memory, ...] = ()
    is_whole: bool = False
    parts: int | None = None
    function: Any = None
    expected: Any = None
    constant: Slot | None = None


class _Run:
    """A run of a graph, one operator at a time, and what later calls have in common with it.

    values      what is noted of each node
    places      those of the inputs, and of what the graph holds
    held        what the graph holds, and constants
    is_settled  whether the layouts of the inputs decide everything that a plan takes for given, but for strides
    """

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self.graph, self.position = graph, {node: i for i, node in enumerate(graph.graph.nodes)}
        self.values: dict[fx.Node, _Value] = {}
        self.places: dict[fx.Node, Slot] = {}
        self.inputs, self.held = len(inputs), list[Any]()
        self.is_settled = True
        self._env: dict[fx.Node, Any] = {}
        dying: dict[int, list[fx.Node]] = {}
        for node, position in self.position.items():
            dying.setdefault(max((self.position[user] for user in node.users), default=position), []).append(node)
        given = iter(enumerate(inputs))
        for node, position in self.position.items():
            if node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                self.results = fx.map_arg(node.args[0], self._env.__getitem__)
                for memory in self.read(node):
                    memory.kept = True
            else:
                self._enter(node, *(next(given) if node.op == "placeholder" else self._hold(_attribute(graph, node))))
            for dead in dying.get(position, ()):
                self._env.pop(dead, None)

    def read(self, node: fx.Node) -> list[_Memory]:
        """Return the memory of what a node reads."""
        return [memory for used in node.all_input_nodes for memory in self.values[used].memory]

    def _hold(self, x: Any) -> tuple[int, Any]:
        self.held.append(x)
        return self.inputs + len(self.held) - 1, x

    def _enter(self, node: fx.Node, place: int, x: Any) -> None:
        self._env[node], self.places[node] = x, Slot(place)
        self.values[node] = _Value(memory=(_Memory(self.position[node], kept=True),))

    def _call(self, node: fx.Node) -> None:
        target: Any = node.target
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._env.__getitem__)
        result = self._env[node] = target(*args, **kwargs)
        value = self.values[node] = _Value(function=CHOICES.get(target, binding(target, args)))
        parts = parts_of(result)
        # A tensor of another layout has no strides, and no storage of its own.
        self.is_settled &= all(x.layout == torch.strided for x in parts if isinstance(x, Tensor))
        if not self.is_settled:
            return
        for memory in () if target in _OF_LAYOUTS else self.read(node):
            memory.last = self.position[node]
        if not all(isinstance(part, Tensor) for part in parts):
            # A size, or what is computed from sizes and numbers, is the same in every call of the plan.
            numbers = all(isinstance(self._env[used], int) for used in node.all_input_nodes)
            value.number = result
            self.is_settled &= isinstance(result, int) and (target in SIZES or numbers)
            return
        value.memory = tuple(self._memory(node, part) for part in parts)
        value.parts = None if isinstance(result, Tensor) else len(parts)
        value.expected = None if target is operator.getitem else expectation(target, result)
        self.is_settled &= value.expected is None or isinstance(value.expected, Strides)
        if not isinstance(result, Tensor):
            for memory in value.memory:
                memory.kept = True
            return
        value.layout, value.is_whole = assumed(result), _is_whole(result)
        if target in _FILLED and result.numel():
            place, _ = self._hold(result.reshape(-1)[0].clone())
            value.constant = Slot(place)

    def _memory(self, node: fx.Node, made: Tensor) -> _Memory:
        """Return the memory of a result: that of an operand, or its own."""
        storage = made.untyped_storage()._cdata
        for used in node.all_input_nodes:
            if self.values[used].number is not None:
                continue
            for memory, operand in zip(self.values[used].memory, parts_of(self._env[used]), strict=True):
                if isinstance(operand, Tensor) and operand.untyped_storage()._cdata == storage:
                    return memory
        return _Memory(self.position[node], kept=may_share(node) or not _is_whole(made))


def _attribute(graph: fx.GraphModule, node: fx.Node) -> Any:
    return fx.graph_module._get_attr(graph, str(node.target))


def _is_whole(x: Tensor) -> bool:
    return not x.storage_offset() and x.untyped_storage().nbytes() == x.numel() * x.itemsize


class _Planner:
    """Writes the steps of a call.

    places      those of values: of a tensor, or of the tensors in a list
    within      the memory that a result is written over, by the memory that it had in the run
    """

    def __init__(self, run: _Run) -> None:
        self.run, self.values, self.position = run, run.values, run.position
        self.places: dict[fx.Node, Any] = dict(run.places)
        self.within: dict[_Memory, _Memory] = {}
        self.steps: list[PythonCall] = []
        self.next = run.inputs + len(run.held)

    def plan(self) -> CallPlan:
        """Return the plan."""
        calls = [node for node in self.run.graph.graph.nodes if node.op == "call_function"]
        # Before any memory is written over: what is read last in the run is read last in a plan.
        replaced = {node for node in calls if self._may_be_an_operand(node)}
        for node in calls:
            value = self.values[node]
            if value.number is None and not (value.constant and self._is_only_chosen(node, replaced)):
                self._select(node) if node in replaced else self._call(node)
                self._release(node)
        returned = fx.map_arg(self.run.graph.graph.output_node().args[0], self._given)
        return CallPlan(tuple(self.steps), self.run.inputs, tuple(self.run.held), returned, overwrites=True)

    def _select(self, node: fx.Node) -> None:
        condition, chosen, other = node.all_input_nodes
        args = self._given(condition), self.values[chosen].constant, self._given(other)
        self._write_over(node, other, _where_it_holds, args, {})

    def _call(self, node: fx.Node) -> None:
        value = self.values[node]
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._given)
        if node.target in _IN_PLACE and self._may_write_over(node, node.args[0]):
            self._write_over(node, node.args[0], _IN_PLACE[node.target], args, kwargs)
        elif node.target in _INTO and self._own(node.args[0]) and self._takes_a_buffer(value):
            (memory,) = value.memory
            shape, _, dtype, *_ = value.layout
            memory.buffer = self._step(buffers.empty, (tuple(shape), dtype), {})
            self.places[node] = self._step(_INTO[node.target], args, {**kwargs, "out": memory.buffer})
        elif value.parts is None:
            self.places[node] = self._step(value.function, args, kwargs, value.expected)
        else:
            slots = [self._room() for _ in range(value.parts)]
            self.places[node] = slots
            indices = tuple(slot.index for slot in slots)
            self.steps.append(PythonCall(value.function, args, dict(kwargs), indices, True, value.expected))

    def _given(self, node: fx.Node) -> Any:
        value = self.values[node]
        return self.places[node] if value.number is None else value.number

    def _room(self) -> Slot:
        self.next += 1
        return Slot(self.next - 1)

    def _step(self, function: Any, args: Any, kwargs: Mapping[str, Any], expected: Any = None) -> Slot:
        slot = self._room()
        self.steps.append(PythonCall(function, args, dict(kwargs), (slot.index,), False, expected))
        return slot

    def _own(self, node: Any) -> _Memory | None:
        """Return the memory of a tensor; None for anything else."""
        if not isinstance(node, fx.Node) or len(self.values[node].memory) != 1:
            return None
        (memory,) = self.values[node].memory
        while memory in self.within:
            memory = self.within[memory]
        return memory

    def _may_write_over(self, node: fx.Node, operand: Any) -> bool:
        """Whether a result can be written over an operand: it has its layout, and nothing else needs its memory.

        Each element of a new result has a place of its own, and so has that of an operand of this layout.
        """
        memory, made = self._own(operand), self._own(node)
        if memory is None or made is None or memory.kept or made.kept or memory.last != self.position[node]:
            return False
        others = [used for used in node.all_input_nodes if used is not operand]
        if any(self._own(used) in (memory, None) for used in others if self.values[used].number is None):
            return False
        value, result = self.values[operand], self.values[node]
        return value.is_whole and value.layout == result.layout and result.layout[2] in _DTYPES

    def _may_be_an_operand(self, node: fx.Node) -> bool:
        """Whether a node selects from a constant and a tensor that the result can be written over."""
        if node.target is not _ATEN.where.self or len(node.all_input_nodes) != 3:
            return False
        _, chosen, other = node.all_input_nodes
        if self.values[chosen].constant is None:
            return False
        return self.values[chosen].layout[2] == self.values[node].layout[2] and self._may_write_over(node, other)

    def _is_only_chosen(self, node: fx.Node, replaced: Collection[fx.Node]) -> bool:
        """Whether a tensor of one number is just what replaced selections choose, and none is written over it."""
        return all(user in replaced and user.all_input_nodes[1] is node for user in node.users)

    def _takes_a_buffer(self, value: _Value) -> bool:
        shape, stride, dtype, is_cpu, is_neg = value.layout
        is_large = math.prod(shape) * dtype.itemsize >= buffers.WORTHWHILE
        is_plain = is_cpu and not is_neg and dtype in _DTYPES and list(stride) == row_major(shape)
        return is_large and is_plain and not value.memory[0].kept

    def _write_over(self, node: fx.Node, operand: Any, function: Any, args: Any, kwargs: Any) -> None:
        memory, made = self._own(operand), self._own(node)
        assert memory is not None and made is not None
        self.places[node] = self._step(function, args, kwargs)
        self.within[made], memory.last = memory, made.last

    def _release(self, node: fx.Node) -> None:
        """Release the buffers that nothing reads after a node."""
        for memory in dict.fromkeys(map(self._own, (*node.all_input_nodes, node))):
            if memory is not None and memory.buffer is not None and memory.last == self.position[node]:
                self.steps.append(PythonCall(buffers.release, (memory.buffer,), {}, ()))


def _where_it_holds(condition: Tensor, number: Tensor, other: Tensor) -> Tensor:
    """Return ``other`` with a number where a condition holds."""
    return torch.where(condition, number, other, out=other) if condition.any() else other
