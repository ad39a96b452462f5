"""Graphs of small values, whose consecutive kernels run in one call of machine code.

The planner computes every operation of a graph for inputs of given layouts. Every run of kernels that nothing
interrupts becomes a ``Segment``, which a call passes the addresses of its inputs and of new results. Values inside of a
segment are in its own memory. Other operations are called by Python between the segments. The kernels, the numbers of
elements and the random bits are those of the graph, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx

from fxround.graph.dialect import CALLS
from fxround.graph.values import outputs_of
from fxround.runtime.call_programs import (
    SIZES,
    CallPlan,
    Computed,
    PythonCall,
    Run,
    Slot,
    assumed,
    binding,
    expectation,
    number_of,
    parts_of,
    rounds_nothing,
    view_of,
)
from fxround.runtime.cpu.launches import Address, KeyAddress, Launch, LaunchTable
from fxround.runtime.cpu.plans.planner import NoPlan, Planner, Value
from fxround.runtime.cpu.pointwise import addresses
from fxround.runtime.cpu.pooling import LEAST
from fxround.runtime.draw import Draw

# The most elements of a result of Python, and the most bytes that the kernels of a graph write.
_ELEMENTS: Final = 1 << 18
_BYTES: Final = 1 << 19
_NO_DRAW: Final = Draw()


@dataclass(frozen=True)
class Segment:
    """Consecutive kernels, with values between them in memory of the call's own."""

    table: LaunchTable

    def run(self, outside: Sequence[Tensor], rng: Tensor | None) -> None:
        """Run all kernels. outside: the tensors of the homes outside. rng: None if nothing draws."""
        self.table.run(addresses(outside), _NO_DRAW if rng is None else Draw.of(rng, 0))


class _TooLarge(Exception):
    """A graph has values that are too large to gain anything."""


def program(
    graph: fx.GraphModule, inputs: Sequence[Any], functions: Mapping[Any, Callable[..., Any]]
) -> Computed | None:
    """Run a graph one operation at a time; None if there are large values, or tensors that are not on the CPU.

    functions: those of the operators of the dialect, and of operators that choose values.
    """
    if any(isinstance(x, Tensor) and not x.is_cpu for x in inputs):
        return None
    try:
        planner = StraightPlanner(graph, inputs, functions)
    except _TooLarge:
        return None
    plan = planner.program()
    return Computed(planner.results(), plan)


class StraightPlanner(Planner):
    """Plans a graph while it computes each node, since some results decide what comes after them.

    homes     the tensor of each home: inputs, what the graph holds, results of kernels and of Python
    events    launches, and nodes that Python calls, in order
    """

    def __init__(
        self, graph: fx.GraphModule, inputs: Sequence[Any], functions: Mapping[Any, Callable[..., Any]]
    ) -> None:
        super().__init__()
        self.graph, self.functions = graph, functions
        self.homes: list[Tensor] = []
        self.slots: dict[int, int] = {}
        self.events: list[Launch | fx.Node] = []
        self.bytes = 0
        # The homes that kernels make.
        self.makes = set[int]()
        # Nothing is rounded: PyTorch's operators compute everything, copies included.
        self.unrounded = rounds_nothing(graph)
        self.rng: Any = None
        self.places: dict[fx.Node, int] = {}
        self.held: list[Any] = []
        # The places of numbers, by the nodes whose second operands they are.
        self.numbers: dict[fx.Node, Slot] = {}
        self.makers: dict[int, Launch] = {}
        entries = graph.graph.find_nodes(op="placeholder")
        for i, (node, x) in enumerate(zip(entries, inputs, strict=True)):
            self._given(node, x, i)
        self.inputs = len(entries)
        for node in graph.graph.nodes:
            if node.op == "get_attr":
                self._given(node, fx.graph_module._get_attr(graph, str(node.target)), self.inputs + len(self.held))
                self.held.append(self.env[node].tensor if isinstance(self.env[node], Value) else self.env[node])
            elif node.op in ("call_function", "call_module"):
                self._next(node)

    def _given(self, node: fx.Node, x: Any, slot: int) -> None:
        self.env[node] = self._at_home(x) if isinstance(x, Tensor) else x
        self.places[node] = slot
        if isinstance(x, Tensor):
            self.slots[len(self.homes) - 1] = slot

    def _at_home(self, x: Tensor) -> Value:
        self.homes.append(x)
        return Value(x, len(self.homes) - 1)

    def _next(self, node: fx.Node) -> None:
        try:
            self.add(node)
        except NoPlan:
            self._call(node)

    def _call(self, node: fx.Node) -> None:
        """Call a node by Python."""
        args, kwargs = self._argument((node.args, node.kwargs))
        number = number_of(node.target, args, kwargs)
        if number is not None:
            self.numbers[node] = Slot(self.inputs + len(self.held))
            self.held.append(number)
        result = self._function(node)(*args, **kwargs)
        if isinstance(result, int) and (node.target in SIZES or not any(map(self._is_tensor, node.all_input_nodes))):
            # A size, or what is computed from sizes and numbers, is the same in every call of the plan.
            self.env[node] = result
            return
        self.events.append(node)
        parts = [self._at_home(x) if isinstance(x, Tensor) else x for x in parts_of(result)]
        if any(isinstance(x, Value) and x.tensor.numel() > _ELEMENTS for x in parts):
            raise _TooLarge
        self.env[node] = parts if isinstance(result, list | tuple) else parts[0]

    def _is_tensor(self, node: fx.Node) -> bool:
        return node in self.places or not isinstance(self.env[node], int)

    def _function(self, node: fx.Node) -> Any:
        if node.op == "call_module":
            return self.graph.get_submodule(str(node.target))
        return self.functions.get(node.target, node.target)

    def launch(self, launch: Launch) -> None:
        """Run a launch, and note it."""
        homes = _homes([launch])
        rng = None if self.rng is None or not _draws(launch) else self.env[self.rng].tensor
        Segment(LaunchTable([launch], homes, {})).run([self.homes[home] for home in homes], rng)
        self.events.append(launch)

    def made(self, shape: Sequence[int], dtype: torch.dtype) -> Value:
        """Return a result of a kernel."""
        if self.unrounded:
            raise NoPlan
        made = torch.empty(tuple(shape), dtype=dtype, device="cpu")
        if not made.numel():
            raise NoPlan  # no kernel writes it
        self.bytes += made.nbytes
        if self.bytes > _BYTES:
            raise _TooLarge
        self.makes.add(len(self.homes))
        return self._at_home(made)

    def state(self, rng: Any) -> tuple[int, int]:
        """Return seed and sample; all kernels that are planned draw from one input."""
        if rng.op != "placeholder" or self.rng not in (None, rng):
            raise NoPlan
        self.rng = rng
        draw = Draw.of(self.env[rng].tensor, 0)
        return draw.seed, draw.sample

    def results(self) -> Any:
        """Return what the graph returns for the inputs."""
        returned = self.graph.graph.output_node().args[0]
        return _plain(fx.map_arg(returned, lambda node: _tensors(self.env[node])))

    def program(self) -> CallPlan | None:
        """Return the program; None if there is no launch in a graph that rounds."""
        if not (self.unrounded or any(isinstance(event, Launch) for event in self.events)):
            return None
        self.steps: list[Run | PythonCall] = []
        self.next = self.inputs + len(self.held)
        self._make_as_returned()
        runs = self._runs()
        outside = self._outside(runs)
        for run in runs:
            if isinstance(run, fx.Node):
                self._step(run)
            else:
                self._segment(run, outside)
        output = self.graph.graph.output_node().args[0]
        returned = fx.map_arg(output, self._emitted)
        return CallPlan(tuple(self.steps), self.inputs, tuple(self.held), _plain(returned))

    def _make_as_returned(self) -> None:
        """Let kernels make results in the shapes in which they are returned, so that these are no views."""
        for node in outputs_of(self.graph):
            value = self.env[node] if isinstance(node, fx.Node) else None
            if not isinstance(value, Value) or value.home not in self.makes:
                continue
            home = self.homes[value.home]
            if value.tensor.is_contiguous() and value.tensor.nbytes == home.nbytes and value.tensor.dtype == home.dtype:
                self.homes[value.home] = value.tensor
                self.makes.discard(value.home)

    def _runs(self) -> list[fx.Node | list[Launch]]:
        """The events, with consecutive launches together."""
        runs: list[fx.Node | list[Launch]] = []
        for event in self.events:
            if isinstance(event, fx.Node):
                runs.append(event)
            elif runs and isinstance(runs[-1], list):
                runs[-1].append(event)
            else:
                runs.append([event])
        return runs

    def _outside(self, runs: Sequence[fx.Node | list[Launch]]) -> set[int]:
        """The homes of kernels' results that another run, Python or the caller reads."""
        outside, made = set[int](), dict[int, int]()
        for number, run in enumerate(runs):
            if isinstance(run, fx.Node):
                for node in run.all_input_nodes:
                    outside |= self._needed(node)
                continue
            for home in _homes(run):
                if made.setdefault(home, number) != number:
                    outside.add(home)
        for node in outputs_of(self.graph):
            if isinstance(node, fx.Node):
                outside |= self._needed(node)
        return outside

    def _needed(self, node: fx.Node) -> set[int]:
        """The homes that have to be tensors for Python to read a node."""
        return {x.home for x in parts_of(self.env[node]) if isinstance(x, Value)}

    def _is_view(self, node: fx.Node) -> bool:
        """Whether a node is a view of another one, or several, that no event has made."""
        return any(isinstance(x, Value) and x.tensor is not self.homes[x.home] for x in parts_of(self.env[node]))

    def _segment(self, launches: Sequence[Launch], outside: set[int]) -> None:
        homes = _homes(launches)
        reads = [home for home in homes if home in self.slots]
        makes = [home for home in homes if home not in self.slots and home in outside]
        inside = {home: self.homes[home].nbytes for home in homes if home not in self.slots and home not in outside}
        before = tuple(self.slots[home] for home in reads)
        for home in makes:
            self.slots[home] = self._room()
        described = tuple((self.slots[h], tuple(self.homes[h].shape), self.homes[h].dtype) for h in makes)
        rng = None if self.rng is None or not any(map(_draws, launches)) else self.places[self.rng]
        self.steps.append(Run(Segment(LaunchTable(launches, (*reads, *makes), inside)), before, described, rng))

    def _step(self, node: fx.Node) -> None:
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._emitted)
        value = self.env[node]
        parts = parts_of(value)
        results = tuple(self._room() for _ in parts)
        for slot, part in zip(results, parts, strict=True):
            if isinstance(part, Value):
                self.slots[part.home] = slot
        expected = expectation(node.target, _tensors(value))
        # To ask the function whether a small result is worth its code takes as long as PyTorch's operator.
        chooses = node.target in self.functions and node.target not in CALLS
        few = chooses and all(part.tensor.numel() < LEAST for part in parts if isinstance(part, Value))
        function = binding(node.target if few else self._function(node), self._argument(node.args))
        given = (args[0], self.numbers[node]) if node in self.numbers else _plain(args)
        self.steps.append(PythonCall(function, given, dict(kwargs), results, isinstance(value, list), expected))
        if not isinstance(value, list):
            self.places[node] = results[0]

    def _emitted(self, node: fx.Node) -> Any:
        """The slot that has a node's value; a view of a kernel's result is computed when Python first needs it."""
        if node not in self.places and self._is_view(node):
            self.places[node] = self._viewed(node)
        if node in self.places:
            return Slot(self.places[node])
        emitted = [Slot(self.slots[x.home]) if isinstance(x, Value) else x for x in parts_of(self.env[node])]
        return emitted if isinstance(self.env[node], list) else emitted[0]

    def _viewed(self, node: fx.Node) -> int:
        """The slot of a view, which Python computes."""
        value = self.env[node]
        if isinstance(value, Value):
            home = self.homes[value.home]
            unchanged = assumed(value.tensor) == assumed(home) and value.shift == 0
            # What the caller gets is a tensor of its own.
            if unchanged and not self._is_returned(node):
                return self.slots[value.home]
            view = view_of(home, value.tensor, Slot(self.slots[value.home]))
            if view is not None:
                slot = self._room()
                self.steps.append(PythonCall(*view, {}, (slot,)))
                return slot
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._emitted)
        slot = self._room()
        self.steps.append(PythonCall(node.target, _plain(args), dict(kwargs), (slot,), False, assumed(_tensors(value))))
        return slot

    def _is_returned(self, node: fx.Node) -> bool:
        return any(user.op == "output" for user in node.users)

    def _room(self) -> int:
        self.next += 1
        return self.next - 1


def _homes(launches: Sequence[Launch]) -> tuple[int, ...]:
    """The homes that launches read and write."""
    values = [arg for launch in launches for arg in launch.arguments]
    flat = [x for arg in values for x in (arg if isinstance(arg, tuple) else (arg,))]
    return tuple(dict.fromkeys(x.home for x in flat if isinstance(x, Address)))


def _draws(launch: Launch) -> bool:
    return any(isinstance(arg, KeyAddress) and arg.draws for arg in launch.arguments)


def _tensors(value: Any) -> Any:
    """Return tensors in place of values."""
    if isinstance(value, list):
        return [_tensors(part) for part in value]
    return value.tensor if isinstance(value, Value) else value


def _plain(arg: Any) -> Any:
    """Return an argument with plain lists and tuples in place of those of fx, which cannot be changed."""
    if isinstance(arg, list | tuple):
        return (list if isinstance(arg, list) else tuple)(_plain(part) for part in arg)
    return arg
