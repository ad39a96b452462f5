"""Leaks: prove on every edge that a value is in the format that the policy declares there, or name the edge.

An edge leads from the operation that made a value, or from where it enters the graph, to an operation that computes
with it, or to a result; moving a value makes no edge. The policy declares the format of a value by the rule for its
operation or role, and that of an operand by ``operands``. A value of which it says nothing is to lie in the format of
the operation that reads it: an operation of e4m3fn takes numbers of e4m3fn. An edge is proved if all that is known of
the value (``passes.analyses.known``) lies in that format. Any other edge is a leak, with the rule that would close it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.utils._pytree as pytree
from torch import fx

from fxround.graph.dialect import BlockExpand, Call, HadamardTransform, Pointwise, graphs_of, is_loop, read
from fxround.graph.dtypes import FORMAT_OF, STORAGES
from fxround.graph.site import PORTS, float_value, site
from fxround.kernels.program import Program
from fxround.kernels.scaled import element_parts
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.formats import Format
from fxround.numerics.formats.scaled import ScaledRounding
from fxround.numerics.modes import MODES, Rounding
from fxround.numerics.specification.exact_scaled import round_block
from fxround.passes.analyses.known import Known, Origins, declaration, is_constant, joined, known, merged, passes_on
from fxround.passes.delayed_scales import DELAYED
from fxround.passes.inject_faults import FLIP, before_flips
from fxround.passes.kept_blocks import regrouping, sizes_of
from fxround.passes.rewrite import ROUND, decided, source_of
from fxround.passes.round_inputs import operands_of
from fxround.passes.scaled_results import LEFT
from fxround.passes.scaling import rounded_in_blocks
from fxround.policy import ENTERING, Policy, Rule

_CONVERSION: Final = "aten._to_copy.default"
# Operators that read the shape of their operand alone.
_SHAPE_ONLY: Final = ("aten.rand_like.default", "aten.randn_like.default", "aten.randint_like.default")


@dataclass(frozen=True)
class Edge:
    """A value that an operation reads, and what is declared of it.

    producer, consumer  nodes of the graph; the graph's output consumes results and gradients
    declared            the format, or the scaled rounding of an operand, a result or an entry; for an accumulator the
                        format of its steps
    known               what is known of the value
    proved              whether what is known lies in what is declared
    rule                the rule that closes the leak; None if the policy has one and it was not followed, or none can
    accumulator         whether the value is the accumulator of ``producer``, which is then the consumer as well
    """

    producer: fx.Node
    consumer: fx.Node
    declared: Format | ScaledRounding
    known: Known
    proved: bool
    rule: Rule | None = None
    accumulator: bool = False


@dataclass(frozen=True)
class Immediate:
    """A number in the program of a node that is no value of the format of the node's result."""

    node: fx.Node
    number: float
    declared: Format


def edges(graph: fx.GraphModule, policy: Policy, declared: Format | None = None) -> list[Edge]:
    """Return every edge of which the policy declares a format, in the order of the graph.

    declared: a format for all edges in place of the policy's declarations; None for the policy's own.
    """
    origins = known(graph)
    listed: list[Edge] = []
    nodes = [node for part in graphs_of(graph) for node in part.graph.nodes if node.op != "output" or part is graph]
    for node in nodes:
        if declared is None:
            listed += _accumulators(node)
        if _computes(node):
            listed += _read_by(node, origins, policy, declared)
    return _with_rules(listed)


def immediates(graph: fx.GraphModule, declared: Format | None = None) -> list[Immediate]:
    """Return the numbers in programs that are no values of the format of the program's result.

    They are part of an operation and cross no edge, and no rule rounds them.
    """
    listed = []
    for node in [node for part in graphs_of(graph) for node in part.graph.nodes]:
        call, own = read(node), declaration(node)
        if not isinstance(call, Pointwise) or _rounds_only(node) or (own is None and declared is None):
            continue
        wanted = declared or _format_of(own)
        assert wanted is not None
        numbers = {o for s in Program.parse(call.program).statements for o in s.operands if isinstance(o, float)}
        listed += [Immediate(node, n, wanted) for n in sorted(numbers) if not wanted.contains(n)]
    return listed


def _format_of(declared: Rounding | Format | None) -> Format | None:
    return declared.format if isinstance(declared, Rounding) else declared


def _computes(node: fx.Node) -> bool:
    """Whether edges lead to the node: it reads values, and does not only move them or read their shape."""
    if node.op == "output":
        return True
    tensors = any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(node.meta.get("val")))
    quiet = node.op != "call_function" or node.target is operator.getitem or is_constant(node) or is_loop(node)
    return tensors and not quiet and str(node.target) not in _SHAPE_ONLY and not passes_on(node)


def _rounds_only(node: fx.Node) -> bool:
    """Whether the node is a rounding or a fault that a pass inserted, which is no operation of the model."""
    place = site(node)
    return place is not None and place.operator in (ROUND, FLIP)


def _is_exempt(origin: fx.Node) -> bool:
    """Whether a value is a coordinate, which only chooses elements, or a size that a pass made a tensor."""
    place = site(origin)
    return place is not None and (place.kind == "coordinate" or (is_constant(origin) and place.number < 0))


def _read_by(
    node: fx.Node, origins: Mapping[fx.Node, Origins], policy: Policy, declared: Format | None
) -> Iterator[Edge]:
    """Yield the edges that lead to a node."""
    if _rounds_only(node):
        return
    wanted = {} if declared is not None else dict(_declared_operands(node, policy))
    for used, rounding in wanted.items():
        own = joined(origins[used])
        if isinstance(rounding, ScaledRounding):
            yield Edge(source_of(used), node, rounding, own, _is_on_grid(used, rounding))
        else:
            yield Edge(source_of(used), node, rounding.format, own, own.within(rounding.format))
    values = _returned(node) if node.op == "output" else node.all_input_nodes
    if declared is None:
        others = [used for used in values if used in origins and used not in wanted]
        yield from _in_blocks(others, node, origins)
        yield from _beside_blocks(merged(origins[used] for used in others), node)
    operands = [origins[used] for used in values if used in origins and used not in wanted]
    # A result is a value of its own, the operands of an operation meet in it.
    for together in operands if node.op == "output" else [merged(operands)]:
        for origin, own in together.items():
            required = None if _is_exempt(origin) else _required(origin, together, node, declared)
            if required is not None:
                fmt, rule = required
                proved = own.within(fmt)
                yield Edge(origin, node, fmt, own, proved, None if proved else rule)


def _in_blocks(values: list[fx.Node], consumer: fx.Node, origins: Mapping[fx.Node, Origins]) -> Iterator[Edge]:
    """Yield the edges of values that the policy rounds to scaled formats, in blocks along their last dimension.

    The producer of an edge whose blocks were regrouped is the operation that did it.
    """
    for used in values:
        for origin, own in origins[used].items():
            place = site(origin)
            rounding = None if place is None or place.assignment is None else place.assignment.blocks
            if rounding is None or place is None or place.kind in LEFT:
                continue
            if not _is_on_grid(origin, rounding, sizes_of(origin, rounding)):
                yield Edge(origin, consumer, rounding, own, False)
                continue
            regrouped = regrouping(used, origin, origins, rounding)
            yield Edge(regrouped or origin, consumer, rounding, own, regrouped is None)


def _beside_blocks(operands: Origins, consumer: fx.Node) -> Iterator[Edge]:
    """Yield the values of which the policy says nothing that meet in an operation whose result is rounded in blocks."""
    reader = site(consumer)
    wanted = None if reader is None or reader.assignment is None else reader.assignment.blocks
    if reader is None or wanted is None or reader.kind in LEFT or reader.operator == _CONVERSION:
        return
    for origin, own in operands.items():
        place = site(origin)
        said = declaration(origin) is not None or (place is not None and place.assignment is not None)
        if not (said or _is_exempt(origin) or _keeps(wanted, own, origin)):
            yield Edge(origin, consumer, wanted, own, False, _rule_for(origin, wanted))


def _keeps(rounding: ScaledRounding, own: Known, origin: fx.Node) -> bool:
    """Whether a value of one magnitude and zeros, as a constant or a mask, has its own values in blocks."""
    sizes, value = {abs(number) for number in own.numbers if number}, float_value(origin)
    if own.formats or value is None or (len(sizes) > 1 and rounding.format.scaling is not None):
        return False
    plain, stored = replace(rounding, mode=MODES["nearest_even"]), Format.parse(FORMAT_OF[value.dtype])
    return all(math.isnan(number) or round_block([number], plain, stored) == [number] for number in own.numbers)


def _returned(output: fx.Node) -> list[fx.Node]:
    """Return the values that a graph returns to its caller: results and gradients, no magnitudes for scales."""
    pairs = zip(output.args[0], output.meta[PORTS], strict=True)  # type: ignore[arg-type]
    returned = dict.fromkeys(value for value, port in pairs if port.kind != "magnitude")
    return [value for value in returned if isinstance(value, fx.Node)]


def _required(
    origin: fx.Node, together: Origins, consumer: fx.Node, declared: Format | None
) -> tuple[Format, Rule | None] | None:
    """Return the format in which a value is to lie where it is read, and the rule that would round it.

    It is the policy's format for the value itself; for a value of which the policy says nothing, the format of the
    result of the operation that reads it; in a result of the graph, that of the values with which it was moved there.
    """
    if declared is not None:
        return declared, _rule_for(origin, Rounding.parse(str(declared)))
    own = _format_of(declaration(origin))
    if own is not None:
        return own, None
    reader = site(consumer)
    if reader is not None and reader.operator == _CONVERSION:
        return None  # a conversion may read wider values than it yields
    mixed = declaration(consumer)
    if consumer.op == "output":
        others = [d for o in together if o is not origin and isinstance(d := declaration(o), Rounding)]
        mixed = next((d for d in others if all(e.format.within(d.format) for e in others)), None)
    return (mixed.format, _rule_for(origin, mixed)) if isinstance(mixed, Rounding) else None


def _rule_for(origin: fx.Node, rounding: Rounding | ScaledRounding) -> Rule | None:
    """Return the rule that gives a value this rounding; None if no rule can."""
    origin = unrounded(origin)
    place = site(origin)
    if place is None:
        return None
    text = str(replace(rounding, mode=MODES["nearest_even"]) if rounding.mode.moves else rounding)
    if origin.op in ("placeholder", "get_attr") or is_constant(origin):
        return Rule(place.path or "*", role=place.role, rounding=text)
    if place.status == "movement":
        return None
    direction = "backward" if place.direction == "backward" else None
    return Rule(place.path, operator=place.operator, rounding=text, direction=direction)


def unrounded(node: fx.Node) -> fx.Node:
    """Return the value after which a pass inserted the node, a rounding or a fault; else the node itself."""
    place, call = site(node), read(node)
    after = _rounds_only(node) and place is not None and place.kind != "operand" and isinstance(call, Pointwise)
    return unrounded(call.xs[0]) if after else node  # type: ignore[union-attr]


def _declared_operands(node: fx.Node, policy: Policy) -> Iterator[tuple[fx.Node, Rounding | ScaledRounding]]:
    """Yield the operands of a node that a rule's ``operands`` rounds, with the rounding."""
    place = site(node)
    if place is None or node.op != "call_function" or all(rule.operands is None for rule in policy.rules):
        return
    kind = "contraction" if "convolution_backward" in place.operator else place.kind
    for used in operands_of(node):
        source = operand_source(used)
        own, value = site(source), float_value(source)
        if own is None or value is None or value.dtype not in STORAGES or _is_exempt(source):
            continue
        asked = {"path": place.path, "operator": place.operator, "kind": kind}
        asked |= {"role": own.role, "direction": own.direction, "result": place.role}
        assigned = policy.assign_operand(**asked, dtype=FORMAT_OF[value.dtype])
        if assigned is not None and assigned.rounding is not None:
            yield used, assigned.scaled or assigned.rounding


def operand_source(node: fx.Node) -> fx.Node:
    """Return the value of which an operand was made by a rounding and by moving it."""
    source = source_of(node)
    place, call = site(source), read(source)
    if place is None or place.kind != "operand":
        return source
    if isinstance(call, HadamardTransform):
        return operand_source(call.x)
    return operand_source(call.xs[0]) if isinstance(call, Pointwise) else source


def _is_on_grid(node: fx.Node, rounding: ScaledRounding, sizes: Sequence[int] | None = None) -> bool:
    """Whether an operand was made by the operations of the scaled rounding, all of them on the same operand.

    sizes: of its blocks; None for any, because the dimensions of a sum are known to the pass alone.
    """
    made = source_of(node)
    call = read(made)
    if not isinstance(call, Pointwise):
        return False
    # With faults, the value is a product with elements, which a program of their own made of the operand.
    elements = read(before_flips(call.xs[0]))
    operands = [call.xs[0], *(elements.xs[:1] if isinstance(elements, Pointwise) else ())]
    return any(_is_made_of(made, x, rounding, sizes) for x in operands)


def _is_made_of(made: fx.Node, x: fx.Node, rounding: ScaledRounding, sizes: Sequence[int] | None) -> bool:
    turned, wanted = read(x), rounding.hadamard
    if wanted is not None and not (
        isinstance(turned, HadamardTransform) and (turned.size, turned.seed) == (wanted.size, wanted.seed)
    ):
        return False
    value = x.meta["val"]
    if sizes is not None:
        return _is_made(made, x, value.dtype, rounding, sizes)
    blocks = [call.sizes for user in x.users if isinstance(call := read(user), BlockExpand) and call.x is x]
    return any(_is_made(made, x, value.dtype, rounding, each) for each in [*blocks, None])


def _is_made(
    made: fx.Node, x: fx.Node, dtype: torch.dtype, rounding: ScaledRounding, sizes: Sequence[int] | None
) -> bool:
    try:
        return _alike(rounded_in_blocks(x, dtype, rounding, sizes, _Existing(made, rounding)), made)
    except LookupError:
        return False


def _alike(a: fx.Node, b: fx.Node) -> bool:
    """Whether two nodes are made by the same operations of the same values, but for their numbers: one value may be
    rounded for each of its readers.
    """
    if a is b:
        return True
    if a.op != "call_function" or a.target is not b.target or len(a.all_input_nodes) != len(b.all_input_nodes):
        return False
    one, other = read(a), read(b)
    if isinstance(one, Pointwise) and isinstance(other, Pointwise):
        own = one.program == other.program and one.dtype == other.dtype
    else:
        own = str(fx.map_arg(a.args, lambda n: None)) == str(fx.map_arg(b.args, lambda n: None))
    return own and all(map(_alike, a.all_input_nodes, b.all_input_nodes))


@dataclass(frozen=True)
class _Existing:
    """A Writer (``passes.scaling``) that finds the operations of ``made`` in the graph; LookupError for one that is not
    there.
    """

    made: fx.Node
    rounding: ScaledRounding

    @property
    def flips_scales(self) -> bool:
        """Whether ``made`` reads scales of which bits have flipped."""
        return any(_is_flipped_scale(x) for x in read(self.made).xs[1:])  # type: ignore[union-attr]

    def flipped(self, scale: fx.Node, fmt: Format, whole: bool = False) -> fx.Node:
        """Return the node of the last fault of the scales."""
        for node in scale.graph.find_nodes(op="call_function", target=Pointwise.overload):
            place, call = site(node), read(node)
            is_flip = place is not None and place.operator == FLIP and isinstance(call, Pointwise)
            if is_flip and call.xs[0] is not node and _alike(call.xs[0], scale):  # type: ignore[union-attr]
                return self.flipped(node, fmt, whole)
        return scale

    def multiplier(self, rounding: ScaledRounding) -> fx.Node:
        """Return the multiplier of a delayed scale that ``made`` reads, or the held scales."""
        wide = [call.scales for node in self.made.all_input_nodes if isinstance(call := read(node), BlockExpand)]
        for node in map(before_flips, [*self.made.all_input_nodes, *wide]):
            if DELAYED in node.meta and node.meta[DELAYED].rounding == rounding:
                return node
        return _missing(f"a multiplier of {rounding}")

    def call(self, call: Call[fx.Node]) -> fx.Node:
        """Return the node of an operator on blocks."""
        arguments = call.arguments()
        operands = [a for a in arguments if isinstance(a, fx.Node)]
        said = str([None if isinstance(a, fx.Node) else a for a in arguments])
        node: fx.Node
        for node in operands[0].graph.find_nodes(op="call_function", target=call.overload):
            same = said == str([None if isinstance(a, fx.Node) else a for a in node.args])
            if same and all(map(_alike, node.all_input_nodes, operands)):
                return node
        return _missing(str(call.overload))

    def program(self, program: Program, operands: Sequence[fx.Node], dtype: torch.dtype) -> fx.Node:
        """Return the node of a program on these operands."""
        user: fx.Node
        for user in operands[0].graph.find_nodes(op="call_function", target=Pointwise.overload):
            call = read(user)
            same = isinstance(call, Pointwise) and call.program == str(program) and len(call.xs) == len(operands)
            if same and all(map(_alike, call.xs, operands)):  # type: ignore[union-attr]
                return user
        return _missing(str(program))

    def elements(self, program: Program, operands: Sequence[fx.Node], held: Sequence[fx.Node]) -> fx.Node:
        """Return the node of the elements, which may be the one of their scales after bits have flipped."""
        call, dtype = read(self.made), operands[0].meta["val"].dtype
        assert isinstance(call, Pointwise)
        if call.program == str(program):
            return self.program(program, operands, dtype)
        first, rest = element_parts(self.rounding, Format.parse(FORMAT_OF[dtype]))
        quotient = before_flips(call.xs[0])
        same = call.program == str(rest) and all(map(_alike, call.xs[1:], held))
        if same and _alike(self.program(first, operands, quotient.meta["val"].dtype), quotient):
            return self.made
        return _missing(str(program))


def _is_flipped_scale(node: fx.Node) -> bool:
    """Whether bits of a scale have flipped, or of one that was multiplied by the scale of the tensor afterwards."""
    call = read(node)
    if isinstance(call, BlockExpand):
        return _is_flipped_scale(call.scales)
    inner = call.xs if isinstance(call, Pointwise) else ()
    return any(before_flips(scale) is not scale for scale in (node, *inner))


def _missing(what: str) -> fx.Node:
    raise LookupError(what)


def _accumulators(node: fx.Node) -> Iterator[Edge]:
    """Yield the accumulator of an operation whose steps the policy declares."""
    place = site(node)
    wanted = decided(place) if place is not None and place.kind in ("contraction", "reduction") else None
    if wanted is None or not isinstance(wanted[0].accumulate, Accumulation) or _rounds_only(node):
        return
    text = getattr(read(node), "accumulate", None)
    if text is None or float_value(node) is None:
        return
    declared, steps = wanted[0].accumulate.step.format, Known(frozenset([Accumulation.parse(text).step.format]))
    yield Edge(node, node, declared, steps, steps.within(declared), accumulator=True)


def _with_rules(listed: list[Edge]) -> list[Edge]:
    """Return the edges with rules that together close every leak that a rule can close.

    One rule for a role serves all of its values if they need one format. A value that is read in two formats is rounded
    as an operand.
    """
    needed: dict[fx.Node, set[str | None]] = {}
    by_role: dict[str | None, set[str | None]] = {}
    for edge in listed:
        if edge.rule is not None:
            needed.setdefault(edge.producer, set()).add(edge.rule.rounding)
            by_role.setdefault(edge.rule.role, set()).add(edge.rule.rounding)

    def general(edge: Edge, rule: Rule) -> Rule:
        own, reader = site(edge.producer), site(edge.consumer)
        as_operand = len(needed[edge.producer]) > 1 or (own is not None and own.kind == "operand")
        if as_operand and own is not None and reader is not None:
            return Rule(reader.path, operator=reader.operator, role=own.role, operands=rule.rounding)
        return replace(rule, match="*") if rule.role in ENTERING and len(by_role[rule.role]) == 1 else rule

    return [edge if edge.rule is None else replace(edge, rule=general(edge, edge.rule)) for edge in listed]
