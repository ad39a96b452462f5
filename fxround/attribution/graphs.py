"""Lowered graphs as the runs of an attribution read them: the order of nodes, what each is, and how it is called.

What a graph alone decides is found once (``plan_of``), because a run asks for it at every node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, Final

import torch
import torch.utils._pytree as pytree
from torch import fx

from fxround.attribution.functions import DIFFERENTIABLE, exact_of, is_differentiated
from fxround.errors import UnsupportedOperator
from fxround.graph.dialect import CALLS, Call, Pointwise, loops_of
from fxround.graph.site import PORT, PORTS, Site, float_values, is_complex, located, placed, site
from fxround.kernels import from_text
from fxround.kernels.program import Statement
from fxround.operators.rules import rule_of

# A function of an operation's operands, by node or name, and of the dtype in which it computes a dtype's values.
Get = Callable[[Any], Any]
Widened = Callable[[torch.dtype], torch.dtype]
Function = Callable[[Get, Widened], Any]

_PLAN: Final = "fxround_attribution"


@dataclass(frozen=True, eq=False)
class Step:
    """A node, with what a run asks of it.

    reads    the nodes that it reads
    numbers  those of them that yield floating-point tensors
    floats   whether it yields floating-point tensors
    several  whether it yields a tuple
    scale    whether it yields scales of a format or counts: parameters of a rounding, without a derivative
    kind     of its rule; "" for an operator of the dialect, or without a rule
    body     the scalar operator of its rule, "" if it has none
    call     the call of the dialect that it makes, of nodes; None for another operator
    """

    node: fx.Node
    reads: tuple[fx.Node, ...]
    numbers: tuple[fx.Node, ...]
    floats: bool
    several: bool
    scale: bool
    kind: str
    body: str
    call: Call[fx.Node] | None
    _dtypes: bool = field(repr=False)
    _places: tuple[tuple[int, bool], ...] = field(repr=False)

    @staticmethod
    def of(node: fx.Node, scale: bool) -> Step:
        """Return the step of a node."""
        computes = node.op == "call_function"
        cls = CALLS.get(node.target) if computes else None
        rule = rule_of(node) if computes and cls is None else None
        kind, body = ("", "") if rule is None else (rule.kind, rule.body)
        call = None if cls is None else cls.of(node.args)
        dtypes = any(isinstance(x, torch.dtype) for x in pytree.tree_leaves((list(node.args), dict(node.kwargs))))
        used = [(i, isinstance(argument, fx.Node)) for i, argument in enumerate(node.args)]
        nested = [any(isinstance(x, fx.Node) for x in pytree.tree_leaves(argument)) for argument in node.args]
        places = tuple((i, alone) for i, alone in used if nested[i] or isinstance(node.args[i], slice))
        reads, values = tuple(node.all_input_nodes), bool(float_values(node))
        numbers = tuple(used for used in reads if float_values(used))
        several = isinstance(node.meta.get("val"), list | tuple)
        return Step(node, reads, numbers, values, several, scale, kind, body, call, dtypes, places)

    @property
    def chooses(self) -> bool:
        """Whether values are chosen from those of operands, or moved: nothing is rounded."""
        return self.floats and self.kind in ("exact", "movement")

    @cached_property
    def name(self) -> str:
        """The operator."""
        return str(self.node.target)

    @cached_property
    def place(self) -> Site:
        """Where the operation is."""
        place = site(self.node)
        assert place is not None
        return place

    @cached_property
    def statement(self) -> tuple[str, Statement] | None:
        """The text and the statement of a pointwise operation that has one statement; None for any other."""
        if isinstance(self.call, Pointwise):
            text = self.call.program
        elif self.kind == "exact" and self.body and len(self.node.args) == 1:
            text = f"t0 = {self.body.format('x0')} @ exact"
        else:
            return None
        statement, *more = from_text.program(text).statements
        return None if more else (text, statement)

    def call_with(self, get: Get, widened: Widened | None = None) -> Any:
        """Return the result for operands; with ``widened``, that of PyTorch's function, without roundings."""
        target: Any = DIFFERENTIABLE.get(self.node.target, self.node.target)
        args: Any = self._filled(get)
        kwargs: Any = {name: _filled(argument, get) for name, argument in self.node.kwargs.items()}
        if widened is None:
            return target(*args, **kwargs)
        if self._dtypes:
            args, kwargs = _with_dtypes(args, widened), _with_dtypes(kwargs, widened)
        return exact_of(CALLS[target].of(args)) if self.call is not None else target(*args, **kwargs)

    def _filled(self, get: Get) -> list[Any]:
        """Return the arguments with values in place of nodes."""
        filled: list[Any] = list(self.node.args)
        for place, alone in self._places:
            filled[place] = get(filled[place]) if alone else _filled(filled[place], get)
        return filled

    def read(self, get: Get) -> Any:
        """Return the call of the dialect that the node makes, of operands."""
        return CALLS[self.node.target].of(self._filled(get))


@dataclass(frozen=True, eq=False)
class Plan:
    """A lowered graph for runs.

    steps       its nodes, in an order in which nothing that follows from gradients of results precedes a result
    tangents    the placeholders of the gradients of results
    results     the nodes of its results, without those of values that the model changes and of gradients
    returned    what it returns, None for what is no node
    """

    graph: fx.Graph
    steps: tuple[Step, ...]
    tangents: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    returned: tuple[Any, ...]

    @staticmethod
    def of(graph: fx.GraphModule) -> Plan:
        """Return the plan of a graph."""
        late: set[fx.Node] = set()
        for node in graph.graph.nodes:
            if any(is_tangent(used) or used in late for used in node.all_input_nodes):
                late.add(node)
        scales = _scales(graph)
        nodes = sorted(graph.graph.nodes, key=lambda node: node in late)
        steps = tuple(Step.of(node, node in scales) for node in nodes if node.op != "output")
        output: Any = graph.graph.output_node()
        returned = output.args[0]
        listed = tuple(returned) if isinstance(returned, list | tuple) else (returned,)
        ports = zip(listed, output.meta[PORTS], strict=False)
        results = tuple(node for node, port in ports if port.kind == "result" and not port.mutation)
        tangents = tuple(node for node in graph.graph.find_nodes(op="placeholder") if is_tangent(node))
        return Plan(graph.graph, steps, tangents, results, listed)

    @cached_property
    def by_node(self) -> Mapping[fx.Node, Step]:
        """The steps by their nodes."""
        return {step.node: step for step in self.steps}

    @cached_property
    def spent(self) -> Mapping[fx.Node, list[fx.Node]]:
        """For each node, the nodes that no later node reads."""
        return self._last_uses(attrgetter("reads"))

    @cached_property
    def spent_by_decisions(self) -> Mapping[fx.Node, list[fx.Node]]:
        """The same where a decision also reads what its operands have chosen from."""
        return self._last_uses(self._read_again)

    def _last_uses(self, read: Callable[[Step], Iterable[fx.Node]]) -> dict[fx.Node, list[fx.Node]]:
        last = {used: step.node for step in self.steps for used in (step.node, *read(step))}
        for used in self.returned:
            last.pop(used, None)
        spent: dict[fx.Node, list[fx.Node]] = {}
        for used, node in last.items():
            spent.setdefault(node, []).append(used)
        return spent

    def _read_again(self, step: Step) -> Iterable[fx.Node]:
        if step.node.op != "call_function" or step.floats:
            return step.reads
        read, waiting = set(step.reads), list(step.reads)
        while waiting:
            chosen = self.by_node[waiting.pop()]
            if chosen.chooses:
                waiting += [one for one in chosen.reads if one not in read]
                read.update(chosen.reads)
        return read


def plan_of(graph: fx.GraphModule) -> Plan:
    """Return the plan of a graph, made once for each."""
    plan: Plan | None = graph.meta.get(_PLAN)
    # A copy of a graph has the entries of the original.
    if plan is None or plan.graph is not graph.graph:
        plan = graph.meta[_PLAN] = Plan.of(graph)
    return plan


def is_tangent(node: fx.Node) -> bool:
    """Whether a node is the placeholder of the gradient of a result."""
    port = node.meta.get(PORT)
    return port is not None and port.kind == "tangent"


def require_plain(graph: fx.GraphModule) -> None:
    """Raise UnsupportedOperator for a graph with loops or complex numbers."""
    for loop, _ in loops_of(graph):
        place = located(loop.node)
        raise UnsupportedOperator(
            f"{placed(place.operator, place.path, place.source, place.code)} chooses at run time what it computes: "
            "attribute a function of one branch or one iteration."
        )
    for node in graph.graph.nodes:
        if is_complex(node):
            port = node.meta.get(PORT)
            what = located(node) if port is None else f"{port.kind} {port.name or port.index}"
            raise UnsupportedOperator(
                f"{what} yields complex numbers, whose roundings are not attributed; use real ones "
                "(torch.view_as_real)."
            )


def _filled(argument: Any, get: Get) -> Any:
    """Return an argument with values in place of nodes."""
    if isinstance(argument, fx.Node):
        return get(argument)
    if isinstance(argument, list | tuple):
        return [_filled(one, get) for one in argument]
    return fx.map_arg(argument, get) if isinstance(argument, dict | slice) else argument


def _with_dtypes(arguments: Any, widened: Widened) -> Any:
    """Return arguments whose floating-point dtypes are those in which values are computed."""
    if isinstance(arguments, torch.dtype):
        return widened(arguments) if arguments.is_floating_point else arguments
    if isinstance(arguments, list):
        return [_with_dtypes(one, widened) for one in arguments]
    if isinstance(arguments, dict):
        return {name: _with_dtypes(one, widened) for name, one in arguments.items()}
    return arguments


def _scales(graph: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes that yield scales of a format or counts: parameters of a rounding, without a derivative."""
    scales: set[fx.Node] = set()
    for node in graph.graph.nodes:
        cls = CALLS.get(node.target) if node.op == "call_function" else None
        numbers = [used for used in node.all_input_nodes if float_values(used)]
        if cls is not None and (not is_differentiated(cls) or (numbers and scales.issuperset(numbers))):
            scales.add(node)
    return scales
