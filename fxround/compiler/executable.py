"""A captured graph with the modules that own its state, ready to run (``Entry``).

Parameters and buffers are read at every call, so that an assignment to a module takes effect. Values that the model
changes in place are written after the graph has run. A graph is functional; only this module writes to the caller's
tensors, and it refuses to if another input would show the change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, getitem, itemgetter
from typing import Any, Final

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from fxround.capture import Captured
from fxround.capture.aliases import Alias
from fxround.capture.numbers import as_operand
from fxround.capture.processes import local, own_shape
from fxround.capture.result_sizes import has_sizes, with_sizes
from fxround.compiler.agreement import Partners
from fxround.compiler.averages import Call
from fxround.compiler.delayed_state import DelayedState
from fxround.compiler.fully_sharded import FullySharded
from fxround.compiler.rounded_aliases import rounded_once
from fxround.compiler.training_step import TrainingStep, differentiable
from fxround.errors import FxroundError, type_of
from fxround.graph.site import PORT, Port
from fxround.numerics.lazy import cached_property
from fxround.passes.delayed_scales import DelayedScale
from fxround.python_model.call_context import refuse_tangents
from fxround.runtime.operands import resolved
from fxround.runtime.schedule.straight import Straight

_ONE: Final = pytree.tree_structure(0)
# The module and the attribute name that hold an input; None for an argument of the call.
Owner = tuple[Any, str] | None
_PARAMETERS: Final = attrgetter("_parameters")
_BUFFERS: Final = attrgetter("_buffers")


@dataclass(frozen=True)
class Entry:
    """A captured graph, its lowering, and the modules that own its parameters and buffers.

    fused       the lowering in fewer passes over memory, with the same bits
    running     the graph that a call runs
    step        if gradients are wanted, the two parts of the joint graph, which run in place of ``running``
    partners    the processes that share the model
    delayed     the delayed scales whose multipliers enter the graph, which ``state`` holds
    rounded     the results that share memory with an input or another result in the model, and are rounded here
    sharded     the processes of ``fully_shard``, which have parts of the parameters
    settings    what must be the same in all of them, in words
    """

    captured: Captured
    lowered: fx.GraphModule
    fused: fx.GraphModule
    running: fx.GraphModule
    owners: tuple[Owner, ...]
    step: TrainingStep | None = None
    delayed: tuple[DelayedScale, ...] = ()
    state: DelayedState = field(default_factory=DelayedState)
    rounded: frozenset[int] = frozenset()
    sharded: FullySharded | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    partners: Partners | None = None

    def run(self, leaves: Sequence[Any], rng: Tensor, trains: bool = False, aliased: bool = True) -> Any:
        """Return the model's result for flat arguments; write the buffers and arguments that the model changes.

        trains: whether delayed scales take the largest magnitudes of this call, and of its backward pass. aliased:
        whether results that share memory with an input or another result do so; if not, the graph's values are
        returned in their places, for ``with_aliases``.

        Raises FxroundError if such a change would be visible through another input, and for tangents of forward-mode
        differentiation.
        """
        if self.partners is not None:
            shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
            self.partners.meet("trains" if trains else "does not train", shapes, rng)
        inputs = self._gathered(leaves, rng, trains)
        if self.delayed:
            inputs = [*inputs, *self.multipliers()]
        refuse_tangents(inputs, self.captured.reads)
        if self.step:
            outputs = differentiable(self.step, resolved(inputs), rng, self.state.record if trains else None)
        elif torch.is_grad_enabled():
            # Stock kernels that the policy left alone must not record a graph of their own.
            with torch.no_grad():
                outputs = self._straight(*inputs, rng)
        else:
            # torch.export, which traces without gradients, would record a switch.
            outputs = self._straight(*inputs, rng)
        outputs, magnitudes = outputs[: self._count], outputs[self._count :]
        shown = leaves if aliased else None
        if not (trains or self._changed):
            return self._result(outputs, shown)
        with torch.no_grad():
            if trains and self.step:
                self.state.record(self.step.early, magnitudes)
            for port, output in zip(self.captured.results, outputs, strict=True):
                if port.mutation:
                    self._target(port, leaves).copy_(output)
        return self._result(outputs, shown)

    def evaluate(self, leaves: Sequence[Any], rng: Tensor) -> Any:
        """Return the same result without writing anything."""
        outputs = self._straight(*self._inputs(leaves), *self.multipliers(), rng)
        return self._result(outputs[: len(self.captured.results)])

    @cached_property
    def _count(self) -> int:
        """The number of results and of values that the model changes."""
        return len(self.captured.results)

    @cached_property
    def _straight(self) -> Straight:
        """The running graph, by way of plans for small inputs."""
        return Straight(self.running)

    def multipliers(self) -> list[Tensor]:
        """Return the multipliers of the delayed scales."""
        return self.state.multipliers(self.delayed)

    def steps(
        self, leaves: Sequence[Any], rng: Tensor, tangents: Mapping[int, Tensor] | None = None
    ) -> Iterator[tuple[str, Any]]:
        """Yield name and value of every operation as it runs, then ``("output", result)``; nothing is written.

        tangents: for a joint graph, the gradient of each result by its position.
        """
        interpreter = fx.Interpreter(self.lowered)
        interpreter.args_iter = iter([*self.entering(leaves, tangents), rng])
        for node in self.lowered.graph.nodes:
            value = interpreter.env[node] = interpreter.run_node(node)
            for spent in interpreter.user_to_last_uses.get(node, ()):
                del interpreter.env[spent]
            if node.op == "output":
                ports = zip(self.captured.outputs, value, strict=False)  # magnitudes follow
                yield node.name, self._result([v for port, v in ports if port.kind != "gradient"])
            elif node.op == "call_function":
                yield node.name, value

    def entering(self, leaves: Sequence[Any], tangents: Mapping[int, Tensor] | None = None) -> list[Any]:
        """Return what enters the lowered graph, but for (seed, sample): state, arguments, and gradients of results."""
        return [*self._inputs(leaves), *self._tangents(leaves, tangents), *self.multipliers()]

    def _tangents(self, leaves: Sequence[Any], given: Any) -> list[Tensor]:
        """Return the gradients of results in the order of the graph; TypeError or ValueError for others than these."""
        nodes = self.captured.graph.graph.find_nodes(op="placeholder")
        wanted = {node.meta[PORT].index: node.meta["val"] for node in nodes if node.meta[PORT].kind == "tangent"}
        if not wanted:
            return []
        if not isinstance(given, Mapping) or not wanted.keys() <= given.keys():
            has = f"{type_of(given)}" if not isinstance(given, Mapping) else f"a dict with {list(given) or 'nothing'}"
            raise TypeError(f"tangents is {has}; expected a dict with the gradients of the results {list(wanted)}")
        shapes = list(map(own_shape, leaves))
        for index, like in wanted.items():
            one, asked = given[index], self.captured.sizes.measured(like.shape, shapes)
            if not isinstance(one, Tensor):
                raise TypeError(f"tangents[{index}] is {type_of(one)}; expected a tensor shaped like result {index}")
            known = [(m, n) for m, n in zip(one.shape, asked, strict=False) if isinstance(n, int)]
            if one.dim() != like.dim() or any(m != n for m, n in known) or one.dtype != like.dtype:
                raise ValueError(
                    f"tangents[{index}] is a {one.dtype} tensor of shape {tuple(one.shape)}; result {index} is a "
                    f"{like.dtype} tensor of shape {asked}"
                )
        return [given[index] for index in wanted]

    def named(self, leaves: Sequence[Any], tangents: Mapping[int, Tensor] | None = None) -> dict[str, Any]:
        """Return what enters the lowered graph by the names of its nodes, the tensors that it holds among them."""
        nodes = self.lowered.graph.nodes
        placeholders = [node.name for node in nodes if node.op == "placeholder"]
        held = {node.name: getattr(self.lowered, str(node.target)) for node in nodes if node.op == "get_attr"}
        return held | dict(zip(placeholders, self.entering(leaves, tangents), strict=False))

    def _result(self, outputs: Sequence[Any], leaves: Sequence[Any] | None = None) -> Any:
        """Return the model's result. leaves: the flat arguments if results share memory as the model's do."""
        if self._returns_one:
            return outputs[0]
        results = self.placed([o for p, o in zip(self.captured.results, outputs, strict=True) if not p.mutation])
        if leaves is not None and self.captured.aliases:
            results = self.with_aliases(results, leaves)
        made = pytree.tree_unflatten(results, self.captured.out_spec)
        return with_sizes(made, self.captured.out_spec) if self._has_sizes else made

    def placed(self, results: Sequence[Any]) -> list[Any]:
        """Return the leaves of a result, given what this process has of each; some are DTensors."""
        made = list(results)
        for position, placement in self.captured.placements.items():
            assert self.partners is not None
            made[position] = placement.of(made[position], self.partners.mesh)
        return made

    def with_aliases(self, results: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        """Return the leaves of a result; those that share memory are made of the tensors of the call.

        One that the policy rounds has the rounded numbers, in memory of its own, and the gradient of the others.

        Raises FxroundError for one with a gradient that no policy rounds.
        """
        shapes = list(map(own_shape, leaves))
        aliases, made = self.captured.aliases, list(results)

        def base(alias: Alias) -> Tensor:
            if isinstance(alias.base, Tensor):
                return alias.base
            return self._target(alias.base, leaves) if isinstance(alias.base, Port) else made_at(alias.base)

        def made_at(position: int) -> Any:
            alias = waiting.pop(position, None)
            if alias is not None:
                tensor, rounds = base(alias), position in self.rounded
                if rounds and not (tensor.requires_grad and torch.is_grad_enabled()):
                    return made[position]
                view = alias.of(tensor, lambda size: self.captured.sizes.measured((size,), shapes)[0])
                made[position] = rounded_once(view, made[position]) if rounds else view
            return made[position]

        waiting = dict(aliases)
        for position in aliases:
            made_at(position)
        return made

    def depending(self, sources: Mapping[tuple[str, int], Any]) -> list[bool]:
        """Return, for each result, whether it shares no memory and is computed from a source with a gradient.

        sources: parameters, buffers and arguments by name and index.
        """
        wanted = {port for port, value in sources.items() if isinstance(value, Tensor) and value.requires_grad}
        shared = self.captured.aliases
        return [i not in shared and not wanted.isdisjoint(reached) for i, reached in enumerate(self._reached)]

    @cached_property
    def _reached(self) -> tuple[frozenset[tuple[str, int]], ...]:
        """The sources that each result is computed from."""
        output: Any = self.captured.graph.graph.output_node().args[0]
        pairs = zip(self.captured.outputs, output, strict=True)
        return tuple(_sources(node) for port, node in pairs if port.kind != "gradient" and not port.mutation)

    @cached_property
    def _has_sizes(self) -> bool:
        return has_sizes(self.captured.out_spec)

    @cached_property
    def _returns_one(self) -> bool:
        """Whether the graph has one result, and the model returns it as it is."""
        one = len(self.captured.results) == 1 and self.captured.out_spec == _ONE
        return one and not (self._changed or self.captured.aliases or self.captured.placements)

    def _inputs(self, leaves: Sequence[Any]) -> list[Any]:
        """Return state and arguments as they enter the graph, without negative bits."""
        return resolved(self._gathered(leaves))

    def _gathered(self, leaves: Sequence[Any], rng: Tensor | None = None, trains: bool = False) -> Sequence[Any]:
        """Return state and arguments in the order of the graph, as they are. rng, trains: those of a call."""
        try:
            inputs = self._read(leaves)
        except KeyError:  # a parameter or buffer that is held in another way now
            inputs = [leaves[port.index] if o is None else _tensor(*o) for port, o in self._owned]
        if self.sharded is not None:
            inputs = self.sharded.whole(inputs, self.settings, self._call(rng, trains))
        if self.is_shared:
            inputs = list(map(local, inputs))
        if self._changed:
            self._refuse_shared_memory(inputs)
        return inputs

    def _call(self, rng: Tensor | None, trains: bool) -> Call:
        """Return what the call of this process is in all processes. rng: that of this process."""
        if rng is None or self.sharded is None or not trains:
            return Call()
        seed, sample = rng.tolist()
        return Call(seed, sample - self.sharded.rank, True)

    @cached_property
    def is_shared(self) -> bool:
        """Whether other processes have parts of the model's parameters."""
        return any(port.shared for port in self.captured.entering)

    @cached_property
    def _read(self) -> Callable[[Sequence[Any]], Sequence[Any]]:
        """The function that reads the inputs of the graph, given the arguments."""
        return _reading(self._owned)

    def numbers(self) -> list[str]:
        """Return the numbers of the model that enter the graph as they are now, as they are written."""
        owners = (owner for port, owner in self._owned if port.kind == "number")
        return [repr(holder.number(name)) for holder, name in filter(None, owners)]

    @cached_property
    def _owned(self) -> list[tuple[Port, Owner]]:
        """The port of each input with its owner."""
        return list(zip(self.captured.entering, self.owners, strict=True))

    @cached_property
    def _changed(self) -> frozenset[int]:
        """The positions of the inputs that the model changes in place."""
        changed = {(port.name, port.index) for port in self.captured.results if port.mutation}
        return frozenset(i for i, p in enumerate(self.captured.entering) if (p.name, p.index) in changed)

    def _refuse_shared_memory(self, inputs: Sequence[Any]) -> None:
        """Raise FxroundError if another input shows a change in place: the graph treats inputs as separate."""
        memory: dict[int, list[int]] = {}
        for i, tensor in enumerate(inputs):
            if isinstance(tensor, Tensor):
                memory.setdefault(tensor.untyped_storage()._cdata, []).append(i)
        for i in sorted(self._changed):
            for other in memory[inputs[i].untyped_storage()._cdata]:
                if other != i and _overlap(inputs[i], inputs[other]):
                    changed, seen = (_described(self.captured.entering[k]) for k in (i, other))
                    raise FxroundError(
                        f"the model changes {changed} in place, and {seen} shares its memory: the captured graph takes "
                        f"them for separate tensors. Pass a copy of one of them (.clone())."
                    )

    def _target(self, port: Port, leaves: Sequence[Any]) -> Tensor:
        owner = next(o for p, o in self._owned if (p.name, p.index) == (port.name, port.index))
        target: Tensor = leaves[port.index] if owner is None else _tensor(*owner)
        return target


def _reading(owned: Sequence[tuple[Port, Owner]]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return the function that reads inputs by their owners, given the arguments, in few calls of C.

    It raises KeyError if a parameter or buffer is not where it was.
    """
    state = [owner for _, owner in owned if owner is not None]
    parameters = [pair for pair in state if pair[1] in pair[0]._parameters]
    buffers = [pair for pair in state if pair[1] not in pair[0]._parameters]
    (holders, names), (others, labels) = _columns(parameters), _columns(buffers)
    places = {(id(holder), name): i for i, (holder, name) in enumerate([*parameters, *buffers])}
    order = [places[id(o[0]), o[1]] if o else len(state) + port.index for port, o in owned]
    pick: Callable[[Sequence[Any]], Sequence[Any]] = itemgetter(*order) if len(order) > 1 else _picking(order)

    def read(leaves: Sequence[Any]) -> Sequence[Any]:
        held = map(getitem, map(_PARAMETERS, holders), names)
        return pick([*held, *map(getitem, map(_BUFFERS, others), labels), *leaves])

    return read


def _columns(pairs: Sequence[tuple[nn.Module, str]]) -> tuple[tuple[nn.Module, ...], tuple[str, ...]]:
    return tuple(holder for holder, _ in pairs), tuple(name for _, name in pairs)


def _picking(order: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    return lambda row: [row[place] for place in order]


def _tensor(module: nn.Module, name: str) -> Tensor:
    parameter = module._parameters.get(name)  # a module's own __getattr__ takes several times as long
    tensor: Tensor = getattr(module, name) if parameter is None else parameter
    return tensor


def _sources(result: Any) -> frozenset[tuple[str, int]]:
    """Return the names and indices of what enters a graph and reaches a result."""
    waiting = [result] if isinstance(result, fx.Node) else []
    seen = set(waiting)
    while waiting:
        used = [node for node in waiting.pop().all_input_nodes if node not in seen]
        seen.update(used)
        waiting.extend(used)
    ports = [node.meta[PORT] for node in seen if PORT in node.meta]
    return frozenset((port.name, port.index) for port in ports)


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the ranges of two tensors in one storage overlap, gaps between elements included."""
    (first, end), (begin, last) = _range(a), _range(b)
    return first < last and begin < end


def _range(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte and the end of a tensor's range, from the beginning of its storage."""
    extent = sum((int(size) - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    first = int(tensor.storage_offset())
    return first * tensor.itemsize, (first + (extent if tensor.numel() else 0)) * tensor.itemsize


def _described(port: Port) -> str:
    return f"{port.kind} {port.name or port.index}"


def owner_of(model: nn.Module, port: Port, dtype: torch.dtype | None = None) -> Owner:
    """Return the module and the attribute name that hold a parameter, buffer or number; None for an argument.

    dtype: that of a number in the graph.
    """
    if port.kind == "argument":
        return None
    path, _, name = port.name.rpartition(".")
    module = model.get_submodule(path)
    return (module if dtype is None or port.kind != "number" else NumbersOf(module, dtype)), name


class NumbersOf:
    """The numbers that a module has as attributes, as tensors of no dimension, read like its buffers."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype
        self._parameters: dict[str, Tensor] = {}
        self._buffers = self

    def number(self, name: str) -> int | float:
        """Return a number as it is."""
        value: int | float = vars(self._module)[name]
        return value

    def __getitem__(self, name: str) -> Tensor:
        return as_operand(self.number(name), self._dtype)

    def __getattr__(self, name: str) -> Tensor:
        return self[name]
