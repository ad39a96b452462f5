"""Fuse: chains and small graphs of rounded pointwise operations become one program, one pass over memory.

What is true here. A group is made of operations over one shape and one carrier; each is still rounded by its own
rounding and draws the bits of its own number, so that the fused graph gives the bits of the graph that it was made
from. What is used outside of the group is stored, nothing is computed twice. An operation that chooses (relu, clamp,
neg, abs) joins the operation that makes its operand.

Why it is safe. Two units are merged only if no path leaves one and enters the other through a third, so that the
merged graph has no circle; a value between two statements is a value of the format that its tensor would have had.

    before   %c = fxround.pointwise([%a, %b], "t0 = mul(x0, x1) @ R"); %e = fxround.pointwise([%c, %d], "t0 = add(...
    after    %fused = fxround.fused([%a, %b, %d], "t0 = mul(x0, x1) @ R; t1 = add(t0, x2) @ R", "f32", %rng, [4, 6])
"""

from __future__ import annotations

import heapq
import math
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import torch
from torch import fx

from fxround.graph import META, float_value, site
from fxround.numerics.storage import CARRIER_OF
from fxround.ops import argument, rule_of
from fxround.passes.pointwise import literal
from fxround.passes.rewrite import STORAGES, rng_of
from fxround.program import Program, Statement

# A program's values live in registers: longer ones spill, and more operands than this leave none for them.
MAX_STATEMENTS: Final = 40
MAX_OPERANDS: Final = 12


@dataclass(frozen=True)
class Step:
    """A node that can be a part of a program: its statements over ``operands``, and whether it rounds nothing."""

    node: fx.Node
    program: Program
    operands: tuple[fx.Node, ...]
    numbers: tuple[int, ...]
    exact: bool
    index: int

    @cached_property
    def domain(self) -> tuple[str, str]:
        """What the steps of one program share: shape and carrier."""
        value = self.node.meta["val"]
        return str(tuple(value.shape)), CARRIER_OF[STORAGES[value.dtype]]


def fuse(graph: fx.GraphModule) -> fx.GraphModule:
    """A new graph, sharing the attributes of ``graph``, in which groups of pointwise operations are one node each."""
    units = _merge(graph)
    fused = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for unit in _scheduled(graph, units):
        if len(unit.nodes) == 1:
            node = unit.nodes[0]
            made[node] = fused.node_copy(node, lambda used: made[used])
        else:
            _emit(graph, fused, unit, made)
    return fx.GraphModule(graph, fused)


@dataclass(eq=False)
class Unit:
    """Nodes that become one: a group of steps, or a single node of any kind."""

    nodes: list[fx.Node]
    steps: list[Step]
    first: int
    last: int

    def inputs(self) -> set[fx.Node]:
        """The nodes outside of the unit that it reads."""
        own = set(self.nodes)
        return {used for node in self.nodes for used in node.all_input_nodes if used not in own}

    def operands(self) -> list[fx.Node]:
        """The tensors that a program of the unit reads, each once, in order."""
        own = set(self.nodes)
        return list(dict.fromkeys(o for step in self.steps for o in step.operands if o not in own))


def _merge(graph: fx.GraphModule) -> dict[fx.Node, Unit]:
    units: dict[fx.Node, Unit] = {}
    for index, node in enumerate(graph.graph.nodes):
        step = _step(node, index)
        units[node] = unit = Unit([node], [step] if step else [], index, index)
        if step is None:
            continue
        for producer in dict.fromkeys(used for used in node.all_input_nodes if used in units):
            other = units[producer]
            if other is not unit and _may_merge(other, unit, units):
                unit = _union(other, unit, units)
        if step.exact and len(unit.nodes) == 1:
            unit.steps.clear()
    return units


def _may_merge(a: Unit, b: Unit, units: dict[fx.Node, Unit]) -> bool:
    if not a.steps or not b.steps or a.steps[0].domain != b.steps[0].domain:
        return False
    statements = sum(len(step.program.statements) for step in (*a.steps, *b.steps))
    if statements > MAX_STATEMENTS or len({*a.operands(), *b.operands()} - {*a.nodes, *b.nodes}) > MAX_OPERANDS:
        return False
    return not _leads_around(a, b, units) and not _leads_around(b, a, units)


def _leads_around(a: Unit, b: Unit, units: dict[fx.Node, Unit]) -> bool:
    """Whether a path leads from ``a`` to ``b`` through a third unit.

    A unit whose last node stands before the first of ``a`` cannot depend on it: the search stays between the two.
    """
    seen: set[int] = {id(a), id(b)}
    stack = [units[node] for node in b.inputs()]
    while stack:
        unit = stack.pop()
        if id(unit) in seen or unit.last < a.first:
            continue
        seen.add(id(unit))
        sources = [units[node] for node in unit.inputs()]
        if any(source is a for source in sources):
            return True
        stack += sources
    return False


def _union(a: Unit, b: Unit, units: dict[fx.Node, Unit]) -> Unit:
    steps = sorted((*a.steps, *b.steps), key=lambda step: step.index)
    merged = Unit([step.node for step in steps], steps, min(a.first, b.first), max(a.last, b.last))
    units.update(dict.fromkeys(merged.nodes, merged))
    return merged


def _step(node: fx.Node, index: int) -> Step | None:
    value = float_value(node) if node.op == "call_function" else None
    if value is None or value.dtype not in STORAGES:
        return None
    if node.target is torch.ops.fxround.pointwise.default:
        operands, text, _, _, number = node.args
        program = Program.parse(text)  # type: ignore[arg-type]
        if len(program.statements) > 1:
            return None
        drawn = (number,) if _draws(program.statements[0]) else ()
        return Step(node, program, tuple(operands), drawn, False, index)  # type: ignore[arg-type]
    return _choice(node, index)


def _draws(statement: Statement) -> bool:
    return statement.rounding is not None and statement.rounding.mode.random_bits > 0


def _choice(node: fx.Node, index: int) -> Step | None:
    """An exact operator with a body: it can follow the operation that computes its operand."""
    rule, place = rule_of(node), site(node)
    if rule is None or rule.kind != "exact" or not rule.body or place is None or place.status != "exact":
        return None
    operand, value = node.args[0], node.meta["val"]
    if not isinstance(operand, fx.Node) or float_value(operand) is None or operand.meta["val"].dtype not in STORAGES:
        return None
    bounds = {p: argument(node, p) for p in map(int, re.findall(r"\{(\d+)\}", rule.body)) if p}
    if any(isinstance(n, fx.Node) or (n is not None and math.isnan(n)) for n in bounds.values()):
        return None
    texts = {p: _UNBOUNDED[p] if n is None else literal(n, value.dtype) for p, n in bounds.items()}
    body = re.sub(r"\{(\d+)\}", lambda m: texts.get(int(m[1]), "x0"), rule.body)
    return Step(node, Program.parse(f"t0 = {body} @ exact"), (operand,), (), True, index)


# A clamp's bound that is None.
_UNBOUNDED: Final = {1: "-inf", 2: "inf"}


# ---- the new graph ----


def _scheduled(graph: fx.GraphModule, units: dict[fx.Node, Unit]) -> Iterator[Unit]:
    """The units, each after what it reads, and otherwise in the order of their last nodes.

    Operators that draw from PyTorch's generator keep their order among themselves.
    """
    waiting: dict[Unit, int] = {}
    users: dict[Unit, list[Unit]] = {}
    ready: list[tuple[int, Unit]] = []
    drawn: Unit | None = None
    for unit in dict.fromkeys(units.values()):
        sources = {units[node] for node in unit.inputs()}
        place = site(unit.nodes[0])
        if place is not None and place.kind == "random":
            sources |= {drawn} if drawn is not None else set()
            drawn = unit
        waiting[unit] = len(sources)
        for source in sources:
            users.setdefault(source, []).append(unit)
        if not sources:
            heapq.heappush(ready, (unit.last, unit))
    while ready:
        _, done = heapq.heappop(ready)
        yield done
        for user in users.get(done, ()):
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, (user.last, user))


def _emit(graph: fx.GraphModule, fused: fx.Graph, unit: Unit, made: dict[fx.Node, fx.Node]) -> None:
    """One node of the unit's program, and one for each value that is used outside of it."""
    own, operands = set(unit.nodes), unit.operands()
    stored = [node for node in unit.nodes if any(user not in own for user in node.users)]
    text = _text(unit, operands, stored)
    numbers = [number for step in unit.steps for number in step.numbers]
    results = " ".join(STORAGES[node.meta["val"].dtype] for node in stored)
    args = ([made[o] for o in operands], text, results, made[rng_of(graph)], numbers)
    node = fused.create_node("call_function", torch.ops.fxround.fused.default, args, name=f"{stored[-1].name}_fused")
    node.meta = _origin(unit.nodes[-1])
    node.meta["val"] = [n.meta["val"] for n in stored]
    for i, old in enumerate(stored):
        made[old] = fused.create_node("call_function", operator.getitem, (node, i), name=old.name)
        made[old].meta = dict(old.meta)


def _origin(node: fx.Node) -> dict[str, Any]:
    place = site(node)
    assert place is not None
    return {**node.meta, META: replace(place, operator="fxround.fused", status="rounded", reason="", number=-1)}


def _text(unit: Unit, operands: Sequence[fx.Node], stored: Sequence[fx.Node]) -> str:
    names = {node: f"x{i}" for i, node in enumerate(operands)}
    names |= {step.node: f"t{i}" for i, step in enumerate(unit.steps)}
    statements = []
    for step in unit.steps:
        (statement,) = step.program.statements
        inner = {f"x{i}": names[o] for i, o in enumerate(step.operands)}
        renamed = tuple(inner[o] if isinstance(o, str) else o for o in statement.operands)
        statements.append(replace(statement, target=names[step.node], operands=renamed))
    return str(Program(tuple(statements), tuple(names[node] for node in stored)))
