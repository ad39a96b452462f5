"""Fuse: chains and small graphs of rounded pointwise operations become one program, which reads and writes memory once.

A group consists of operations over one shape and one carrier. Each is still rounded by its own rounding and draws the
bits of its own number, so the fused graph gives the bits of the original one. For example, a mul and an add become
``fxround.fused([a, b, d], "t0 = mul(x0, x1) @ R; t1 = add(t0, x2) @ R", "f32", rng, [4, 6])``. Values that are used
outside of the group are stored; nothing is computed twice. An exact operation (relu, clamp, neg, abs) joins the
operation that computes its operand. ``units`` keeps the merged graph free of cycles, and a value between two statements
is a value of the format that its tensor would have had.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from torch import fx

from fxround.graph.dialect import Fused, Pointwise, read_map
from fxround.graph.dtypes import STORAGES, literal
from fxround.graph.grouping import Unit, in_order, merged
from fxround.graph.site import META, float_value, site
from fxround.graph.values import copy_node, module_of
from fxround.kernels import from_text
from fxround.kernels.maps import draws, map_kernel
from fxround.kernels.program import Program
from fxround.numerics.formats.storage import CARRIER_OF, Storage
from fxround.numerics.lazy import cached_property
from fxround.operators.rules import argument, rule_of
from fxround.passes.rewrite import rng_of

# A program's values are held in registers: longer programs spill, and more operands leave no registers for values.
MAX_STATEMENTS: Final = 40
MAX_OPERANDS: Final = 12
# Operators of the scalar IR, of which an elementary function has up to 1,700; LLVM takes 0.1 ms for each.
MAX_OPERATORS: Final = 6000
# A statement takes LLVM about 20 ms. Equal layers share programs, but an unrolled loop of the model makes a new one in
# each iteration. Once the distinct programs have this many statements, further operations keep kernels of one
# statement, which are compiled already.
BUDGET: Final = 200


@dataclass(frozen=True)
class Fusible:
    """A node that can be part of a program, as one statement over ``operands``.

    ``numbers``: the node's number, if it draws. ``exact``: whether it rounds nothing.
    """

    node: fx.Node
    program: Program
    operands: tuple[fx.Node, ...]
    numbers: tuple[int, ...]
    exact: bool

    @cached_property
    def domain(self) -> tuple[str, str]:
        """The shape and carrier, which the steps of one program share."""
        value = self.node.meta["val"]
        return str(tuple(value.shape)), CARRIER_OF[STORAGES[value.dtype]]

    @cached_property
    def operators(self) -> int:
        """The number of scalar IR operators in its kernel."""
        carrier: Storage = "f64" if self.domain[1] == "f64" else "f32"
        return len(map_kernel(self.program, (carrier,) * self.program.arity, carrier).body.schedule)


def fuse(graph: fx.GraphModule) -> fx.GraphModule:
    """Return a new graph in which each group of pointwise operations is one node.

    It shares the attributes of ``graph``.
    """
    candidates = {node: _step(node) for node in graph.graph.nodes}
    steps = {node: step for node, step in candidates.items() if step is not None}
    fused = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    programs: dict[str, int] = {}
    for unit in in_order(merged(graph.graph, partial(_join, steps))):
        chain = FusedChain.of([steps[node] for node in unit.nodes], unit.results()) if len(unit.nodes) > 1 else None
        if chain is not None and not chain.stored:
            continue
        if chain is not None and sum((programs | {chain.text: len(chain.steps)}).values()) <= BUDGET:
            programs[chain.text] = len(chain.steps)
            _emit(graph, fused, chain, made)
            continue
        for node in unit.nodes:
            made[node] = copy_node(fused, node, made)
    return module_of(graph, fused)


@dataclass(frozen=True)
class FusedChain:
    """Steps that become one node: their operands, the values that are stored, and their program's text."""

    steps: tuple[Fusible, ...]
    operands: tuple[fx.Node, ...]
    stored: tuple[fx.Node, ...]
    text: str

    @staticmethod
    def of(steps: Sequence[Fusible], stored: Sequence[fx.Node]) -> FusedChain:
        """Return the chain of these steps, in this order."""
        operands = _operands(steps)
        return FusedChain(tuple(steps), tuple(operands), tuple(stored), _text(steps, operands, stored))


def _join(steps: dict[fx.Node, Fusible], a: Unit, b: Unit) -> bool:
    if not all(node in steps for node in (*a.nodes, *b.nodes)) or steps[a.nodes[0]].exact:
        return False
    inner = [steps[node] for node in (*a.nodes, *b.nodes)]
    if inner[0].domain != inner[-1].domain or len(inner) > MAX_STATEMENTS:
        return False
    return len(_operands(inner)) <= MAX_OPERANDS and sum(step.operators for step in inner) <= MAX_OPERATORS


def _operands(steps: Sequence[Fusible]) -> list[fx.Node]:
    """Return the tensors that a program of the steps reads, each once, in order."""
    own = {step.node for step in steps}
    return list(dict.fromkeys(o for step in steps for o in step.operands if o not in own))


def _step(node: fx.Node) -> Fusible | None:
    value = float_value(node) if node.op == "call_function" else None
    if value is None or value.dtype not in STORAGES:
        return None
    call = read_map(node)
    if not isinstance(call, Pointwise):
        return _choice(node)
    program = from_text.program(call.program)
    if len(program.statements) > 1:
        return None
    drawn = (call.node,) if draws(program.statements[0]) else ()
    return Fusible(node, program, tuple(call.xs), drawn, False)


def _choice(node: fx.Node) -> Fusible | None:
    """Return the step of an exact operator that has a body: it can follow the operation that computes its operand."""
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
    return Fusible(node, Program.parse(f"t0 = {body} @ exact"), (operand,), (), True)


# The text of a clamp's bound that is None.
_UNBOUNDED: Final = {1: "-inf", 2: "inf"}


# ---- the new graph ----


def _emit(graph: fx.GraphModule, fused: fx.Graph, chain: FusedChain, made: dict[fx.Node, fx.Node]) -> None:
    """Add a node for the chain's program, and one for each value that is used outside of it."""
    numbers = [number for step in chain.steps for number in step.numbers]
    results = " ".join(STORAGES[node.meta["val"].dtype] for node in chain.stored)
    call = Fused([made[o] for o in chain.operands], chain.text, results, made[rng_of(graph)], numbers)
    name = f"{chain.stored[-1].name}_fused"
    node = fused.create_node("call_function", call.overload, call.arguments(), name=name)
    node.meta = _origin(chain.steps[-1].node)
    node.meta["val"] = [n.meta["val"] for n in chain.stored]
    for i, old in enumerate(chain.stored):
        made[old] = fused.create_node("call_function", operator.getitem, (node, i), name=old.name)
        made[old].meta = dict(old.meta)


def _origin(node: fx.Node) -> dict[str, Any]:
    place = site(node)
    assert place is not None
    return {**node.meta, META: replace(place, operator="fxround.fused", status="rounded", reason="", number=-1)}


def _text(steps: Sequence[Fusible], operands: Sequence[fx.Node], stored: Sequence[fx.Node]) -> str:
    names = {node: f"x{i}" for i, node in enumerate(operands)}
    names |= {step.node: f"t{i}" for i, step in enumerate(steps)}
    statements = []
    for step in steps:
        (statement,) = step.program.statements
        inner = {f"x{i}": names[o] for i, o in enumerate(step.operands)}
        renamed = tuple(inner[o] if isinstance(o, str) else o for o in statement.operands)
        statements.append(replace(statement, target=names[step.node], operands=renamed))
    return str(Program(tuple(statements), tuple(names[node] for node in stored)))
