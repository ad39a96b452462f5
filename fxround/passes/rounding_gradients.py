"""What a rounding does to the gradient that passes it, if the policy does not say straight_through.

A rounding that zeroes the gradient of what it clamps becomes two: one of the same precision and unbounded range,
followed by the policy's own, which changes only what overflowed. The gradient is filled with zeros where the first
result exceeds the maximum (``masked_fill(g, |m| > 448, 0)`` for e4m3fn), and is then rounded if the policy says so. An
estimated derivative is a program of the value before it is rounded, by which the gradient is multiplied. The pass
removes all marks. The result has the bits of the single rounding: the first of the two draws the same random bits
and rounds to the same multiples, and the second does not move exact values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from fxround.capture.gradient_marks import MARKED, MARKED_GRADIENT
from fxround.errors import UnsupportedRounding
from fxround.graph.dialect import Pointwise, loops_of, read
from fxround.graph.dtypes import FORMAT_OF, STORAGES
from fxround.graph.site import META, Site, site
from fxround.kernels.scaled import clamped_program, estimated_program
from fxround.numerics.formats import Format
from fxround.numerics.formats.scaled import ScaledRounding
from fxround.numerics.gradients import Gradient, clamps, clamps_elements, unclamped
from fxround.numerics.modes import MODES, Rounding
from fxround.passes.inject_faults import before_flips
from fxround.passes.rewrite import ROUND, Plan, become, decided, insert, rng_of, round_after, rounded
from fxround.passes.scaled_results import round_in_blocks
from fxround.policy import Assignment

aten = torch.ops.aten


@dataclass(frozen=True)
class _Rounded:
    """A value that is rounded, its assignment, and the movements from it to its mark, the last first.

    nested: whether one of these movements is another mark, of which the gradient is a part of that mark's.
    """

    node: fx.Node
    place: Site
    assignment: Assignment
    rounding: Rounding
    moves: tuple[fx.Node, ...]

    @property
    def nested(self) -> bool:
        return any(move.target is MARKED for move in self.moves)


def treat_gradients(graph: fx.GraphModule, plan: Plan) -> None:
    """Zero and round the gradients of rounded values as the policy says, and remove the marks."""
    places = [site(loop.node) for loop, _ in loops_of(graph)]
    if plan.policy.treats_gradients and any(p is not None and p.direction == "backward" for p in places):
        raise UnsupportedRounding(
            f"policy {plan.policy.name!r} treats gradients of roundings, which is not possible inside of a loop: "
            "unroll the loop, or use a policy without gradient="
        )
    gradients = {node.args[1]: node for node in graph.graph.nodes if node.target is MARKED_GRADIENT}
    for mark in [node for node in graph.graph.nodes if node.target is MARKED]:
        gradient, value = gradients.get(mark.args[1]), _rounded(mark)
        if gradient is None or value is None:
            continue
        how = value.assignment.gradient
        blocks = value.assignment.blocks
        if how.zero_clamped and blocks is not None:
            _zero_clamped_elements(graph, value, gradient, blocks)
        elif how.zero_clamped and clamps(value.rounding):
            _zero_clamped(graph, value, gradient)
        # Zeros may be filled in twice; a factor belongs to the sum over all uses, which is the innermost mark's.
        if how.estimated and not value.nested:
            _estimated(graph, value, gradient)
        if how.rounding is not None:
            _round(graph, gradient, value, how.rounding)
    for node in [node for node in graph.graph.nodes if node.target in (MARKED, MARKED_GRADIENT)]:
        node.replace_all_uses_with(node.args[0])
        graph.graph.erase_node(node)


def _rounded(mark: fx.Node) -> _Rounded | None:
    """Return the marked value where it is rounded: the value itself, or the only tensor that was moved to make it."""
    value = mark.args[0]
    moves: list[fx.Node] = []
    while isinstance(value, fx.Node) and (place := site(value)) is not None:
        wanted = decided(place)
        if wanted is not None:
            return _Rounded(value, place, *wanted, tuple(moves)) if value.meta["val"].dtype in STORAGES else None
        if place.kind != "movement" or value.op != "call_function" or len(_tensors(value)) != 1:
            return None
        moves.append(value)
        value = value.args[0]
    return None


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [used for used in node.all_input_nodes if isinstance(used.meta.get("val"), torch.Tensor)]


def _zero_clamped(graph: fx.GraphModule, value: _Rounded, gradient: fx.Node) -> None:
    """Round in two steps, and fill the gradient with zeros where the second one clamps."""
    final = round_after(graph, value.node, value.rounding, value.place.number)
    final.meta[META] = replace(final.meta[META], kind="pointwise")
    wide = replace(value.assignment, rounding=unclamped(value.rounding))
    value.node.meta[META] = replace(value.place, assignment=wide)
    source = _moved(graph, value, value.node, final, gradient)
    magnitude = insert(graph, gradient, aten.abs.default, (source,))
    clamped = insert(graph, gradient, aten.gt.Scalar, (magnitude, value.rounding.format.maximum))
    gradient.update_arg(0, insert(graph, gradient, aten.masked_fill.Scalar, (gradient.args[0], clamped, 0.0)))


def _moved(graph: fx.GraphModule, value: _Rounded, source: fx.Node, last: fx.Node, near: fx.Node) -> fx.Node:
    """Return ``source`` after the movements that lead from ``last`` to the mark, before ``near``."""
    for move in reversed(value.moves):
        sizes = {used: used for used in move.all_input_nodes}
        args = fx.map_arg(move.args, {**sizes, last: source}.__getitem__)
        source, last = insert(graph, near, move.target, args, **move.kwargs), move
    return source


def _zero_clamped_elements(graph: fx.GraphModule, value: _Rounded, gradient: fx.Node, blocks: ScaledRounding) -> None:
    """Fill the gradient with zeros where an element of a block was clamped."""
    elements, dtype = _elements(value), value.node.meta["val"].dtype
    if elements is None or not clamps_elements(blocks):
        return
    program = clamped_program(blocks, Format.parse(FORMAT_OF[dtype]))
    flags = Pointwise(elements.xs, str(program), dtype, elements.rng, elements.node)
    flag = _written(graph, gradient, value.place, flags)
    clamped = insert(graph, gradient, aten.gt.Scalar, (_moved(graph, value, flag, value.node, gradient), 0.0))
    gradient.update_arg(0, insert(graph, gradient, aten.masked_fill.Scalar, (gradient.args[0], clamped, 0.0)))


def _elements(value: _Rounded) -> Pointwise[fx.Node] | None:
    """Return the call that rounds the elements of a value in blocks, before bits of them flip."""
    call = read(value.node)
    if isinstance(call, Pointwise) and value.assignment.faults is not None:
        call = read(before_flips(call.xs[0]))
    return call if isinstance(call, Pointwise) else None


def _estimated(graph: fx.GraphModule, value: _Rounded, gradient: fx.Node) -> None:
    """Multiply the gradient by the estimated derivative of a rounding."""
    blocks, node = value.assignment.blocks, value.node
    rounding, dtype, xs = blocks or value.rounding, node.meta["val"].dtype, [node]
    if value.assignment.gradient.refusal(rounding) or (value.place.kind == "exact" and _chooses(node, rounding)):
        return
    final = node
    if blocks is not None:
        elements = _elements(value)
        if elements is None:
            return
        xs = list(elements.xs)
    elif node.op == "placeholder":
        # It enters as it is, and every reader has the rounded one.
        final = round_after(graph, node, value.rounding, value.place.number)
        final.meta[META] = replace(final.meta[META], kind="pointwise")
        node.meta[META] = replace(value.place, assignment=_to_nearest(value.assignment, dtype))
    else:
        xs = [_unrounded(graph, value)]
    program = estimated_program(rounding, Format.parse(FORMAT_OF[dtype]))
    slope = _written(graph, gradient, value.place, Pointwise(xs, str(program), dtype, rng_of(graph), 0))
    slope = _moved(graph, value, slope, final, gradient)
    at, own, source = site(gradient), gradient.meta["val"].dtype, gradient.args[0]
    assert at is not None and isinstance(source, fx.Node)
    once = _to_nearest(value.assignment, own)
    product = Pointwise(
        [source, slope],
        f"t0 = mul(x0, x1) @ {once.rounding}; t1 = where_eq(x1, 0x0.0p+0, 0x0.0p+0, t0) @ exact",
        own,
        rng_of(graph),
        0,
    )
    gradient.update_arg(0, _written(graph, gradient, replace(at, assignment=once), product))


def _chooses(node: fx.Node, rounding: Rounding | ScaledRounding) -> bool:
    """Whether a selection chooses among values that were rounded in the same way, so that it rounds nothing."""
    operands = [operand for operand in _tensors(node) if operand.meta["val"].is_floating_point()]
    return all(_is_rounded(operand, rounding) for operand in operands)


def _is_rounded(node: fx.Node, rounding: Rounding | ScaledRounding) -> bool:
    """Whether a value was rounded in this way, itself or before it was moved or chosen."""
    place = site(node)
    if place is None:
        return False
    wanted = None if place.kind == "movement" else decided(place)
    if wanted is not None and (wanted[0].blocks or wanted[1]) == rounding:
        return True
    return place.kind in ("movement", "exact") and _chooses(node, rounding)


def _to_nearest(assignment: Assignment, dtype: torch.dtype) -> Assignment:
    """Return the assignment of a value that is rounded to its own dtype, and no further."""
    rounding = Rounding(Format.parse(FORMAT_OF[dtype]), MODES["nearest_even"], "inf")
    return replace(assignment, rounding=rounding, gradient=Gradient(), blocks=None, faults=None)


def _unrounded(graph: fx.GraphModule, value: _Rounded) -> fx.Node:
    """Insert the operation of a value again, which rounds to its dtype, and return it."""
    node = value.node
    with graph.graph.inserting_after(node):
        again = graph.graph.node_copy(node)
    again.meta[META] = replace(value.place, assignment=_to_nearest(value.assignment, node.meta["val"].dtype))
    return again


def _written(graph: fx.GraphModule, near: fx.Node, place: Site, call: Pointwise[fx.Node]) -> fx.Node:
    """Insert a call of a program that draws nothing before a node."""
    new = insert(graph, near, call.overload, call.arguments())
    new.meta[META] = replace(place, operator=ROUND, kind="operand", status="rounded", reason="")
    return new


def _round(graph: fx.GraphModule, gradient: fx.Node, value: _Rounded, rounding: Rounding | ScaledRounding) -> None:
    place, dtype = site(gradient), gradient.meta["val"].dtype
    assert place is not None
    source = gradient.args[0]
    assert isinstance(source, fx.Node)
    if isinstance(rounding, ScaledRounding):
        kept = Rounding(Format.parse(FORMAT_OF[dtype]), MODES["nearest_even"], "inf")
        said = replace(value.assignment, rounding=kept, gradient=Gradient(), faults=None, blocks=rounding)
        round_in_blocks(graph, gradient, replace(place, assignment=said), rounding, place.number)
        return
    become(graph, gradient, rounded(graph, source, rounding, place.number, dtype))
    own = replace(value.assignment, rounding=rounding, gradient=Gradient(), faults=None, blocks=None)
    gradient.meta[META] = replace(place, operator=ROUND, kind="pointwise", assignment=own, status="rounded")
