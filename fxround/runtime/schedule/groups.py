"""Groups: nodes of a graph that run as one module, and what such modules have in common.

``grouped`` makes a graph in which every unit that a module is built for is a call of that module: the call takes what
the unit reads, and returns a list of what is read outside of it, as in ``%group = group_0(%x, %w, %b, %rng); %y =
%group[0]``. ``subgraph`` is the unit as a graph of its own. ``units`` keeps the new graph free of cycles, and a unit
without a module is copied.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxround.graph.grouping import Unit, in_order, merged
from fxround.graph.site import float_value
from fxround.graph.values import copy_node, module_of, write_code
from fxround.runtime.schedule.plan_cache import PlanCache
from fxround.runtime.target import Plan, Target


class Part(nn.Module):
    """A module of a scheduled graph, whose call is its ``forward`` alone: hooks of all modules are for the model's."""

    def __call__(self, *inputs: Any) -> Any:
        """Return what ``forward`` returns."""
        return self.forward(*inputs)


class PlannedPart(Part):
    """A part that runs by a target's plan for inputs of given layouts; where there is none, as its graph says.

    whole       the graph
    spent       the indices of inputs that nothing reaches after a call; the schedule sets them
    """

    def __init__(self, whole: fx.GraphModule) -> None:
        super().__init__()
        self.whole = whole
        self.spent: tuple[int, ...] = ()
        self.plans = PlanCache[Plan | None]()

    @abstractmethod
    def plan(self, target: Target, inputs: Sequence[Any]) -> Plan | None:
        """Return the plan for inputs of these layouts; None if the part is to run as its graph says."""

    def forward(self, *inputs: Any) -> list[Tensor]:
        """Run by the plan, or as the graph says: the same bits."""
        plan = self.plans.of(inputs, self.plan)
        results = None if plan is None else plan.run(inputs)
        if results is not None:
            return results
        write_code(self.whole)
        return list(self.whole.forward(*inputs))


def grouped(
    graph: fx.GraphModule,
    joins: Callable[[Unit, Unit], bool],
    build: Callable[[Unit, Sequence[fx.Node]], nn.Module | None],
    name: str,
) -> fx.GraphModule:
    """A graph in which units are modules; the graph itself if no two nodes are one unit.

    ``joins`` says whether two units may be one; ``build`` makes the module of a unit from the unit and the nodes that
    it reads, in order, or returns None to leave the unit as it is.
    """
    units = merged(graph.graph, joins)
    if len(set(units.values())) == len(units):
        return graph
    made: dict[fx.Node, fx.Node] = {}
    parts: dict[str, Any] = {
        str(node.target): operator.attrgetter(str(node.target))(graph)
        for node in graph.graph.nodes
        if node.op in ("get_attr", "call_module")
    }
    outer = fx.Graph()
    for unit in in_order(units):
        used = unit.inputs() if len(unit.nodes) > 1 else set()
        inputs = [node for node in graph.graph.nodes if node in used] if used else []
        module = build(unit, inputs) if inputs else None
        if module is None:
            for node in unit.nodes:
                made[node] = copy_node(outer, node, made)
            continue
        target = f"{name}_{sum(n.op == 'call_module' for n in outer.nodes)}"
        parts[target] = module
        whole = outer.call_module(target, tuple(made[node] for node in inputs))
        for i, old in enumerate(unit.results()):
            made[old] = outer.call_function(operator.getitem, (whole, i))
            made[old].meta = dict(old.meta)
    return module_of(parts, outer)


def subgraph(graph: fx.GraphModule, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> fx.GraphModule:
    """The nodes as a graph of their own, from the inputs to the values that are used outside."""
    own, inside = set(nodes), fx.Graph()
    made = {node: inside.placeholder(node.name) for node in inputs}
    for node in nodes:
        made[node] = copy_node(inside, node, made)
    inside.output([made[n] for n in nodes if any(user not in own for user in n.users)])
    return module_of(graph, inside)


def is_operand(node: fx.Node) -> bool:
    """Whether a kernel can read the node: a float or a mask."""
    value = node.meta.get("val")
    return float_value(node) is not None or (isinstance(value, Tensor) and value.dtype == torch.bool)
