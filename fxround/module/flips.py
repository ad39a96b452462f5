"""``RoundedModule.flips``: the bits that faults flip in a call, and the elements of the results that they change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from fxround.compiler.executable import Entry
from fxround.faults.accumulators import count_faults
from fxround.faults.flip_table import Flip, Flips, flips_of
from fxround.graph.dialect import BODIES, COND, SCAN, BlockExpand, Loop, Pointwise, loops_of, read
from fxround.graph.site import Site, site
from fxround.kernels.program import Program
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.faults import Fault, Faults, numbers_of
from fxround.passes.analyses.leaks import operand_source, unrounded
from fxround.passes.inject_faults import FLIP, before_flips
from fxround.passes.rewrite import rng_of
from fxround.policy import Policy, Rule
from fxround.views.leaks import value_name

# The integers that hold the encodings of dtypes.
_CODES = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def without_faults(policy: Policy) -> Policy:
    """Return the policy with faults of probability 0, which flip nothing; its rules still match what they matched."""

    def without(rule: Rule) -> Rule:
        kept = " ".join(word for word in (rule.accumulate or "").split() if not word.startswith("faults="))
        return replace(rule, faults=rule.faults and "any:0", accumulate=kept or None)

    return replace(policy, rules=tuple(map(without, policy.rules)))


def flips_in(
    entry: Entry, quiet: Entry, leaves: Sequence[Any], rng: Tensor, tangents: Mapping[int, Tensor] | None
) -> Flips:
    """Return the flips of a call of a graph, given the graph without faults.

    leaves: the flat arguments of the call. tangents: the gradient of each result, for a training step.
    """
    rows, output = _flips(entry, leaves, rng, tangents)
    *_, (_, expected) = quiet.steps(leaves, rng, tangents)
    pairs = zip(_tensors(output), _tensors(expected), strict=True)
    changed = sum(_differ(a, b) for a, b in pairs)
    return flips_of(rows, changed, sum(t.numel() for t in _tensors(output)))


def _flips(
    entry: Entry, leaves: Sequence[Any], rng: Tensor, tangents: Mapping[int, Tensor] | None
) -> tuple[list[Flip], Any]:
    """Return a row for each fault of a graph, and the results."""
    counts = _Counts(entry.lowered)
    for name, value in (entry.named(leaves, tangents) | {rng_of(entry.lowered).name: rng}).items():
        counts.see(name, value)
    output = None
    for name, value in entry.steps(leaves, rng, tangents):
        output = value
        counts.see(name, value)
    return counts.found(), output


class _Counts:
    """The rows of a graph's faults, to which each of its runs adds. The bodies of loops have their own."""

    def __init__(self, graph: fx.GraphModule, within: str = "", around: tuple[_Counts, Loop] | None = None) -> None:
        self.graph, self.within, self.around = graph, within, around
        nodes = graph.graph.nodes
        self.faults = {node.name: node for node in nodes if _is_fault(node)}
        self.chains = {node.name: node for node in nodes if _accumulation(node) is not None}
        self.loops = {loop.node.name: (loop, self._bodies(loop, bodies)) for loop, bodies in loops_of(graph)}
        self.read_by: dict[str, list[str]] = {}
        for node in self.faults.values():
            self.read_by.setdefault(node.args[0][0].name, []).append(node.name)
        readers = [*self.chains.values(), *(loop.node for loop, _ in self.loops.values())]
        self.operands = {used.name for node in readers for used in node.all_input_nodes}
        self.kept: dict[str, Any] = {}
        self.values: dict[str, Any] = {}
        self.rows: dict[str, list[Flip]] = {}

    def _bodies(self, loop: Loop, bodies: Sequence[fx.GraphModule]) -> list[_Counts]:
        names = (f"{self.within}{loop.node.name}.{name}." for name in BODIES[loop.node.target])
        return [_Counts(body, name, (self, loop)) for name, body in zip(names, bodies, strict=True)]

    @property
    def counts(self) -> bool:
        """Whether the graph has faults."""
        inner = [body for _, bodies in self.loops.values() for body in bodies]
        return bool(self.faults or self.chains) or any(body.counts for body in inner)

    def found(self) -> list[Flip]:
        """Return the rows in the order of the graph, those of a loop's bodies in its place."""
        rows: list[Flip] = []
        for node in self.graph.graph.nodes:
            rows += self.rows.get(node.name, ())
            for body in self.loops[node.name][1] if node.name in self.loops else ():
                rows += body.found()
        return rows

    def see(self, name: str, value: Any) -> None:
        """Take the value of a node, in the order of a run."""
        if name in self.operands:
            self.values[name] = value
        if name in self.chains:
            self._add(name, _rows_of_chain(self.chains[name], self.values))
        if name in self.faults:
            node = self.faults[name]
            self._add(name, [_row(node, self._name_of(_faulty(node)), self.kept.pop(name), value)])
        if name in self.loops:
            self._repeat(*self.loops[name])
        for reader in self.read_by.get(name, ()):
            self.kept[reader] = value

    def _add(self, name: str, rows: list[Flip]) -> None:
        rows = [replace(row, node=f"{self.within}{row.node}") for row in rows]
        old = self.rows.get(name)
        self.rows[name] = rows if old is None else list(map(_sum, old, rows))

    def _repeat(self, loop: Loop, bodies: Sequence[_Counts]) -> None:
        """Run the bodies of a loop again, if they have faults."""
        if not any(body.counts for body in bodies):
            return
        given = fx.map_arg((loop.operands, loop.predicate), lambda used: self.values[used.name])
        operands, predicate = given
        carries, others = list(operands[: len(loop.carries)]), operands[len(loop.carries) + len(loop.xs) :]
        if loop.node.target is COND:
            bodies[0 if bool(predicate) else 1].run(operands)
        elif loop.node.target is SCAN:
            xs = operands[len(carries) : len(carries) + len(loop.xs)]
            for row in zip(*(x.unbind(0) for x in xs), strict=True):
                carries = list(bodies[0].run([*carries, *row, *others])[: len(carries)])
        else:
            while bool(pytree.tree_leaves(bodies[0].run([*carries, *others]))[0]):
                carries = list(bodies[1].run([*carries, *others]))

    def run(self, operands: Sequence[Any]) -> Any:
        """Run a body once, and return its results."""
        interpreter = fx.Interpreter(self.graph)
        interpreter.args_iter = iter(operands)
        value = None
        for node in self.graph.graph.nodes:
            value = interpreter.env[node] = interpreter.run_node(node)
            for spent in interpreter.user_to_last_uses.get(node, ()):
                del interpreter.env[spent]
            self.see(node.name, value)
        return value

    def _name_of(self, source: fx.Node) -> str:
        """Return what a value is to the model; what a loop reads as it is has the name that it has outside."""
        place = site(source)
        assert place is not None
        if self.around is not None and source.op == "placeholder":
            outside, loop = self.around
            position = self.graph.graph.find_nodes(op="placeholder").index(source)
            operand = loop.operands[position]
            if position >= len(loop.carries) and isinstance(operand, fx.Node):
                return outside._name_of(operand_source(operand))
        return value_name(source, place)


def _sum(old: Flip, new: Flip) -> Flip:
    """Return the row of two runs of the same fault."""
    elements, flipped = old.elements + new.elements, old.flipped + new.flipped
    return replace(old, elements=elements, flipped=flipped, expected=old.expected + new.expected)


def _is_fault(node: fx.Node) -> bool:
    place = site(node)
    return place is not None and place.operator == FLIP


def _faulty(node: fx.Node) -> fx.Node:
    """Return the value that a fault hits, or whose scales it hits."""
    place = site(node)
    assert place is not None
    if _is_of_scale(place):
        return _scaled_by(node)
    return operand_source(node) if place.kind == "operand" else unrounded(node)


def _is_of_scale(place: Site) -> bool:
    """Whether a fault is one of scales, of blocks or of the tensor."""
    fault = _fault_of(place)
    return fault.of_scale or fault.of_tensor


def _fault_of(place: Site) -> Fault:
    return Faults.parse(place.reason.rpartition(" ")[2]).faults[0]


def _row(node: fx.Node, name: str, before: Tensor, after: Tensor) -> Flip:
    """Return the row of a fault of the value of this name."""
    call, place, made = read(node), site(node), site(_faulty(node))
    assert isinstance(call, Pointwise) and place is not None and made is not None
    fault = _fault_of(place)
    (statement,) = Program.parse(call.program).statements
    numbers = numbers_of(statement.operator)
    assert numbers is not None and statement.rounding is not None
    _, count, q = numbers
    return Flip(
        value=f"{'scales of ' if _is_of_scale(place) else ''}{name}",
        node=node.name,
        module=place.path,
        source=place.source,
        format=str(statement.rounding.format),
        fault=str(fault),
        elements=after.numel(),
        flipped=_differ(before, after),
        expected=after.numel() * min(count * q, 1 << 32) / 2**32,
        direction=place.direction,
        role=place.role,
        operator=made.operator,
    )


def _accumulation(node: fx.Node) -> Accumulation | None:
    """Return how an operation accumulates if its accumulators have faults, else None."""
    text = getattr(read(node), "accumulate", "")
    return Accumulation.parse(text) if "faults=" in text else None


def _rows_of_chain(node: fx.Node, values: Mapping[str, Any]) -> list[Flip]:
    """Return a row for each fault of an operation's accumulators. values: those that the operation reads."""
    call, how, place = read(node), _accumulation(node), site(node)
    assert call is not None and how is not None and how.flips is not None and place is not None
    run: Any = type(call).of(fx.map_arg(call.arguments(), lambda used: values[used.name]))
    steps = count_faults(run, None)
    return [
        Flip(
            value=f"accumulators of {value_name(node, place)}",
            node=node.name,
            module=place.path,
            source=place.source,
            format=str(how.step.format),
            fault=str(fault),
            elements=steps,
            flipped=count_faults(run, number),
            expected=steps * fault.probability,
            direction=place.direction,
            role=place.role,
            operator=place.operator,
        )
        for number, fault in enumerate(how.flips.faults)
    ]


def _scaled_by(scale: fx.Node) -> fx.Node:
    """Return the value whose elements are multiplied by a scale."""
    user: fx.Node
    for user in scale.users:
        call = read(user)
        widened = any(isinstance(each := read(u), BlockExpand) and each.scales is user for u in user.users)
        if not isinstance(call, Pointwise) or call.xs[0] is scale or widened:
            return _scaled_by(user)
        elements = read(before_flips(call.xs[0]))
        assert isinstance(elements, Pointwise)
        return operand_source(elements.xs[0])
    raise AssertionError(f"{scale.name} scales nothing")


def _differ(a: Tensor, b: Tensor) -> int:
    """Return how many elements have other encodings; two NaNs are equal."""
    if not a.is_floating_point():
        return int((a != b).sum())
    code = _CODES[a.element_size()]
    return int(((a.contiguous().view(code) != b.contiguous().view(code)) & ~(a.isnan() & b.isnan())).sum())


def _tensors(results: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)]
