"""Straight runs: a graph of small operations with all consecutive kernels in one call of machine code.

A call of a compiled model that is small costs what Python needs for each kernel: layouts, results, arguments. A graph
is therefore planned for inputs of given layouts when they come for the second time; the planner computes every
operation, so that call returns what it has computed. Every run of kernels that nothing interrupts becomes a
``Segment``, which a call passes the addresses of its inputs and of new results. Values inside of a segment are in its
own memory. Other operations are called by Python between the segments; if one gives a result of another layout than it
did while planning, the call starts again without the plan. The kernels, the numbers of elements and the random bits are
those of the graph, so the bits are the same. A graph with large values is not planned, because it gains nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx, nn

from fxround.graph.comparing import comparing
from fxround.graph.values import outputs_of
from fxround.runtime.cpu.code import current_set
from fxround.runtime.cpu.contraction import Code, Work
from fxround.runtime.cuda.launcher import forces_texts
from fxround.runtime.draw import Draw
from fxround.runtime.operands import resolved
from fxround.runtime.schedule.aliasing import is_kernel
from fxround.runtime.schedule.call_programs import (
    CallPlan,
    PythonCall,
    Run,
    Slot,
    assumed,
    binding,
    expectation,
    view_of,
)
from fxround.runtime.schedule.launches import SIZES, KeyAddress, Launch, NoPlan, Planner, Value
from fxround.runtime.schedule.segments import Segment
from fxround.runtime.torch_ops import KERNELS

# The key of a scheduled graph's ``meta`` for the graph that it was made of, with loops as modules.
SOURCE: Final = "fxround_source"
# The most elements of an input or of a result of Python, and the most bytes that the kernels of a graph write.
_ELEMENTS: Final = 1 << 18
_BYTES: Final = 1 << 19
_MANY: Final = 32


@dataclass(frozen=True)
class _Computed:
    """What a graph returns, which its planner has computed."""

    results: Any


@dataclass(frozen=True)
class _Planned:
    """The plan for inputs of one layout; False: there is none.

    settings: what it was made under. admits: the function that says whether inputs are like those that it was made for.
    """

    plan: CallPlan | bool
    settings: tuple[Any, ...]
    admits: Callable[..., bool]


def _settings() -> tuple[Any, ...]:
    """Return what a plan depends on besides its inputs."""
    return current_set(), torch.get_num_threads()


class Straight:
    """A scheduled graph, called by way of a plan for small inputs of layouts that were seen before."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self.graph = graph
        self._source: fx.GraphModule | None = graph.meta.get(SOURCE)
        # None: the layout was seen, and is planned when it comes again.
        self._plans: dict[Any, _Planned | None] = {}
        self._latest: _Planned | None = None

    def __call__(self, *inputs: Any) -> Any:
        """Return what the graph returns. Negative views among the inputs are resolved."""
        # Inside a transform of torch.func a tensor stands for several, whose layouts are others.
        if self._source is None or forces_texts() or torch._C._functorch.peek_interpreter_stack() is not None:
            return self.graph.forward(*resolved(inputs))
        latest = self._latest
        # To compare with the latest inputs takes less than to describe these; alike, they have no negative view either.
        plan: CallPlan | _Computed | bool
        if latest is not None and latest.admits(*inputs) and latest.settings == _settings():
            plan = latest.plan
        else:
            inputs = tuple(resolved(inputs))
            plan = self._plan(inputs)
        if isinstance(plan, CallPlan):
            result = plan.run(inputs)
            return self.graph.forward(*inputs) if result is None else result
        return plan.results if isinstance(plan, _Computed) else self.graph.forward(*inputs)

    def _plan(self, inputs: Sequence[Any]) -> CallPlan | _Computed | bool:
        """Return the plan for inputs, or what the graph returns if they have just been planned for."""
        try:
            # Everything that the plan depends on; addresses and numbers of Python are given with each call.
            layouts = [
                (x.shape, x.stride(), x.dtype, x.is_cpu, type(x)) if isinstance(x, Tensor) else x for x in inputs
            ]
            settings = _settings()
            key = (settings, *layouts)
            known = self._plans.get(key)
        except (RuntimeError, TypeError):  # a tensor without strides, a value without a hash
            return False
        if known is None:
            return self._planned(key, inputs)
        if known is self._latest:  # inputs differ from those before in what no plan depends on
            known = self._plans[key] = _Planned(known.plan, settings, comparing(inputs, strides=True))
        self._latest = known
        return known.plan

    def _planned(self, key: Any, inputs: Sequence[Any]) -> _Computed | bool:
        """Note a layout that is new, and plan one that was seen before, which computes what the graph returns."""
        assert self._source is not None
        alike = comparing(inputs, strides=True)
        if key not in self._plans:
            if len(self._plans) > _MANY:
                self._plans.clear()
            self._plans[key] = None if all(map(_is_small, inputs)) else _Planned(False, key[0], alike)
            return False
        with torch.no_grad():
            planner = _planner_of(self._source, inputs)
            plan = (planner and planner.program()) or False
        self._plans[key] = _Planned(plan, key[0], alike)
        return False if planner is None else _Computed(planner.results())


def _is_small(x: Any) -> bool:
    if not isinstance(x, Tensor):
        return True
    # Another class of tensors may define what an operator does.
    return type(x) in (Tensor, nn.Parameter) and x.is_cpu and x.numel() <= _ELEMENTS


class _TooLarge(Exception):
    """A graph has values that are too large to gain anything."""


def plan_of(graph: fx.GraphModule, inputs: Sequence[Any]) -> CallPlan | None:
    """Run a graph one operation at a time, and return its program; None if no kernel is in it, or large values are."""
    planner = _planner_of(graph, inputs)
    return None if planner is None else planner.program()


def _planner_of(graph: fx.GraphModule, inputs: Sequence[Any]) -> _StraightPlanner | None:
    """Run a graph one operation at a time; None if there are large values."""
    try:
        return _StraightPlanner(graph, inputs)
    except _TooLarge:
        return None


class _StraightPlanner(Planner):
    """Plans a graph while it computes each node, since some results decide what comes after them.

    homes     the tensor of each home: inputs, what the graph holds, results of kernels and of Python
    events    launches, and nodes that Python calls, in order
    """

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> None:
        super().__init__()
        self.graph = graph
        self.homes: list[Tensor] = []
        self.slots: dict[int, int] = {}
        self.events: list[Launch | fx.Node] = []
        self.bytes = 0
        # The homes that kernels make.
        self.makes = set[int]()
        # Nothing is rounded: PyTorch's operators compute everything, copies included.
        self.unrounded = not any(map(is_kernel, graph.graph.nodes))
        self.rng: Any = None
        self.places: dict[fx.Node, int] = {}
        self.held: list[Any] = []
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
        result = self._function(node)(*self._argument(node.args), **self._argument(node.kwargs))
        if isinstance(result, int) and (node.target in SIZES or not any(map(self._is_tensor, node.all_input_nodes))):
            # A size, or what is computed from sizes and numbers, is the same in every call of the plan.
            self.env[node] = result
            return
        self.events.append(node)
        parts = [self._at_home(x) if isinstance(x, Tensor) else x for x in _parts(result)]
        if any(isinstance(x, Value) and x.tensor.numel() > _ELEMENTS for x in parts):
            raise _TooLarge
        self.env[node] = parts if isinstance(result, list | tuple) else parts[0]

    def _is_tensor(self, node: fx.Node) -> bool:
        return node in self.places or not isinstance(self.env[node], int)

    def _function(self, node: fx.Node) -> Any:
        if node.op == "call_module":
            return self.graph.get_submodule(str(node.target))
        return KERNELS.get(node.target, node.target)

    def launch(self, launch: Launch) -> None:
        """Run a launch, and note it."""
        homes = _homes([launch])
        rng = None if self.rng is None or not _draws(launch) else self.env[self.rng].tensor
        Segment([launch], homes, ()).run([self.homes[home] for home in homes], rng)
        self.events.append(launch)

    def made(self, shape: Sequence[int], dtype: torch.dtype) -> Value:
        """Return a result of a kernel."""
        if self.unrounded:
            raise NoPlan
        made = torch.empty(tuple(shape), dtype=dtype)
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

    def code(self, work: Work) -> Code:
        """Return quick code where there is some: its results are seldom refused."""
        return work.quick or work.general()

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
        return {x.home for x in _parts(self.env[node]) if isinstance(x, Value)}

    def _is_view(self, node: fx.Node) -> bool:
        """Whether a node is a view of another one, or several, that no event has made."""
        return any(isinstance(x, Value) and x.tensor is not self.homes[x.home] for x in _parts(self.env[node]))

    def _segment(self, launches: Sequence[Launch], outside: set[int]) -> None:
        homes = _homes(launches)
        reads = [home for home in homes if home in self.slots]
        makes = [home for home in homes if home not in self.slots and home in outside]
        inside = [Value(self.homes[home], home) for home in homes if home not in self.slots and home not in outside]
        before = tuple(self.slots[home] for home in reads)
        for home in makes:
            self.slots[home] = self._room()
        described = tuple((self.slots[h], tuple(self.homes[h].shape), self.homes[h].dtype) for h in makes)
        rng = None if self.rng is None or not any(map(_draws, launches)) else self.places[self.rng]
        self.steps.append(Run(Segment(launches, (*reads, *makes), inside), before, described, rng))

    def _step(self, node: fx.Node) -> None:
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._emitted)
        value = self.env[node]
        parts = _parts(value)
        results = tuple(self._room() for _ in parts)
        for slot, part in zip(results, parts, strict=True):
            if isinstance(part, Value):
                self.slots[part.home] = slot
        expected = expectation(node.target, _tensors(value))
        function = binding(self._function(node), self._argument(node.args))
        self.steps.append(PythonCall(function, _plain(args), dict(kwargs), results, isinstance(value, list), expected))
        if not isinstance(value, list):
            self.places[node] = results[0]

    def _emitted(self, node: fx.Node) -> Any:
        """The slot that has a node's value; a view of a kernel's result is computed when Python first needs it."""
        if node not in self.places and self._is_view(node):
            self.places[node] = self._viewed(node)
        if node in self.places:
            return Slot(self.places[node])
        emitted = [Slot(self.slots[x.home]) if isinstance(x, Value) else x for x in _parts(self.env[node])]
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
    return tuple(dict.fromkeys(x.home for x in flat if isinstance(x, Value)))


def _draws(launch: Launch) -> bool:
    return any(isinstance(arg, KeyAddress) and arg.draws for arg in launch.arguments)


def _parts(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


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
