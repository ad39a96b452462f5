"""Loops as modules: (*operands) -> a list of the results, each on memory of its own.

``own_loops`` replaces the loops of a graph. A body is scheduled as a graph of its own and called once for each
iteration. Rows of results are written into one tensor, of which ``every`` keeps each k-th row if nothing reads others.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from fxround.errors import FxroundError
from fxround.graph.dialect import COND, SCAN, loops_of, read_loop
from fxround.graph.values import module_of, outputs_of
from fxround.runtime import buffers
from fxround.runtime.schedule.groups import Part
from fxround.runtime.schedule.plan_cache import PlanCache
from fxround.runtime.target import Plan


def own_loops(graph: fx.GraphModule, schedule: Callable[[fx.GraphModule], Body]) -> fx.GraphModule:
    """Return the graph with every loop as a call of a module; ``schedule`` prepares a body."""
    bodies = {loop.node: [schedule(body) for body in own] for loop, own in loops_of(graph)}
    if not bodies:
        return graph
    parts: dict[str, Any] = {}
    for node in graph.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            parts[str(node.target)] = operator.attrgetter(str(node.target))(graph)
    made: dict[fx.Node, fx.Node] = {}
    outer = fx.Graph()
    for node in graph.graph.nodes:
        if node.op == "get_attr" and isinstance(parts[str(node.target)], fx.GraphModule):
            continue  # the body of a loop
        if node not in bodies:
            made[node] = outer.node_copy(node, made.__getitem__)
            continue
        loop = read_loop(node)
        used = {int(user.args[1]) for user in node.users}
        target = f"loop_{len(parts)}"
        given = loop.operands
        if node.target is SCAN:
            parts[target] = ScanPart(bodies[node][0], len(loop.carries), len(loop.xs), used)
        elif node.target is COND:
            parts[target], given = ChoicePart(bodies[node]), (loop.predicate, *given)
        else:
            parts[target] = RepetitionPart(bodies[node], len(loop.carries))
        made[node] = outer.call_module(target, fx.map_arg(tuple(given), made.__getitem__))
    return module_of(parts, outer)


@dataclass(frozen=True)
class Body:
    """A scheduled body.

    own     whether each result is memory that a kernel has just made and that nothing else reaches
    source  the graph before it was scheduled
    """

    graph: fx.GraphModule
    own: tuple[bool, ...]
    source: fx.GraphModule

    @property
    def run(self) -> Callable[..., Any]:
        """The function of the body's inputs that returns its results."""
        return self.graph.forward


class RepeatedPart(Part):
    """What loops have in common. The bodies were verified when they were scheduled; no operand is released."""

    spent: tuple[int, ...] = ()


class ScanPart(RepeatedPart):
    """A body for every row of ``xs``."""

    def __init__(self, body: Body, carries: int, xs: int, used: set[int]) -> None:
        super().__init__()
        self.body, self.carries, self.xs = body, carries, xs
        self.stacked = tuple(i for i in range(carries, len(body.own)) if i in used)
        self.plans = PlanCache[Plan | None](range(carries, carries + xs))

    def forward(self, *operands: Any) -> list[Any]:
        """Return the last carries and the stacked results; None for a result that nothing reads."""
        count = self.carries + self.xs
        carries, xs, others = list(operands[: self.carries]), operands[self.carries : count], operands[count:]
        length = int(xs[0].shape[0])
        if length == 0:
            raise FxroundError("a loop over tensors of length 0 has no result: expected at least one step")
        whole = scanned(self, operands)
        if whole is not None:
            return whole
        run, own = self.body.run, self.body.own
        results: list[Any] = [None] * len(own)
        rows: list[tuple[Tensor, ...]] = []
        mine = [False] * self.carries
        for i, row in enumerate(zip(*(x.unbind(0) for x in xs), strict=True)):
            produced = run(*carries, *row, *others)
            if i == 0:
                for j in self.stacked:
                    results[j] = buffers.empty((length, *produced[j].shape), produced[j].dtype, produced[j].device)
                rows = [results[j].unbind(0) for j in self.stacked]
            for stack, j in zip(rows, self.stacked, strict=True):
                stack[i].copy_(produced[j])
            buffers.release(*(c for c, m in zip(carries, mine, strict=True) if m))
            buffers.release(*(produced[j] for j in range(self.carries, len(own)) if own[j]))
            carries[:] = produced[: self.carries]
            mine = list(own[: self.carries])
        results[: self.carries] = [c if m else _copied(c) for c, m in zip(carries, mine, strict=True)]
        return results


def scanned(part: ScanPart, operands: Sequence[Any]) -> list[Any] | None:
    """Return the results of a scan that a target does as a whole; None if its body is to be called for each step."""
    plan = part.plans.of(
        operands, lambda target, _: target.scan_of(part.body.source, operands, part.carries, part.xs, part.stacked)
    )
    return None if plan is None else plan.run(operands)


class ChoicePart(RepeatedPart):
    """One of two bodies."""

    def __init__(self, bodies: Sequence[Body]) -> None:
        super().__init__()
        self.bodies = tuple(bodies)

    def forward(self, predicate: Any, *operands: Any) -> list[Any]:
        """Return the results of the first body if the predicate is true, else of the second."""
        body = self.bodies[0 if bool(predicate) else 1]
        return [r if own else _copied(r) for r, own in zip(body.run(*operands), body.own, strict=True)]


class RepetitionPart(RepeatedPart):
    """A body as long as a test is true."""

    def __init__(self, bodies: Sequence[Body], carries: int) -> None:
        super().__init__()
        self.test, self.body, self.carries = bodies[0], bodies[1], carries

    def forward(self, *operands: Any) -> list[Any]:
        """Return the last carries."""
        carries, others = operands[: self.carries], operands[self.carries :]
        mine: tuple[bool, ...] = (False,) * self.carries
        while bool(_only(self.test.run(*carries, *others))):
            produced = self.body.run(*carries, *others)
            buffers.release(*(c for c, m in zip(carries, mine, strict=True) if m))
            carries, mine = tuple(produced), self.body.own
        return [c if m else _copied(c) for c, m in zip(carries, mine, strict=True)]


def _only(result: Any) -> Any:
    return result[0] if isinstance(result, list | tuple) else result


def _copied(x: Any) -> Any:
    """Return a tensor on memory of its own."""
    if not isinstance(x, Tensor):
        return x
    made = buffers.empty(x.shape, x.dtype, x.device)
    made.copy_(x)
    return made


def owned(
    body: fx.GraphModule, sharing: Callable[[fx.Node], set[fx.Node]], owns: Callable[[fx.Node], bool]
) -> tuple[bool, ...]:
    """Return for each result whether it is alone on memory that a kernel of ours made."""
    results = outputs_of(body)

    def alone(result: Any) -> bool:
        if not isinstance(result, fx.Node) or not owns(result) or results.count(result) > 1:
            return False
        return not any(other in sharing(result) for other in results if other is not result)

    return tuple(map(alone, results))
