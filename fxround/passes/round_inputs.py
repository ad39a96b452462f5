"""Roundings before operations: of values that enter the graph, and of operands.

The last placeholder is ``rng``, an int64 tensor (seed, sample): it is a run-time value, so a new seed needs no new
graph. A weight, input, buffer or constant with an assignment is rounded once, before its first use. An operand that a
rule's ``operands`` matches is rounded before the operation, in the tensor that it is a view of, and draws from that
tensor's stream: every operation that reads the value, forward or backward, sees the same bits. To a scaled format the
operand itself is rounded, in blocks along the dimension over which the operation sums, as hardware does: a product and
its gradients sum over different dimensions, and see different blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import torch
from torch import fx

from fxround.capture.processes import SUM_OF_PROCESSES
from fxround.errors import PolicyError, UnsupportedRounding
from fxround.graph.dialect import Call, HadamardTransform, graphs_of
from fxround.graph.dtypes import FORMAT_OF, STORAGES
from fxround.graph.site import META, ROLE, Site, float_value, site
from fxround.numerics.formats import Format
from fxround.numerics.formats.encodings import Encoding
from fxround.numerics.formats.hadamard import Hadamard
from fxround.numerics.formats.scaled import ScaledRounding
from fxround.operators.rules import argument
from fxround.passes import streams
from fxround.passes.contractions import keeps_stock_kernel, summed_dims
from fxround.passes.delayed_scales import DelayedScales
from fxround.passes.held_scales import HeldScales, Layout, Round
from fxround.passes.optimizations.choose import is_row_major
from fxround.passes.rewrite import (
    Plan,
    decided,
    insert,
    keeps,
    locating,
    moved_by,
    round_after,
    rounded,
    sites,
    size_of,
    source_of,
)
from fxround.passes.scaling import NodeWriter, What, rounded_in_blocks, scaled
from fxround.policy import ENTERING, Assignment

_BACKWARD: Final = torch.ops.aten.convolution_backward.default
_PRODUCTS: Final = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)


def round_entries(graph: fx.GraphModule, plan: Plan) -> None:
    """Round the weights, inputs, buffers and constants that the policy names."""
    for node, place in reversed(sites(graph)):
        wanted = decided(place)
        stored = place.role in ENTERING or node.meta.get(ROLE) == "state"
        enters = place.kind == "placeholder" or (place.status == "movement" and stored)
        if not enters or wanted is None or node.meta["val"].dtype not in STORAGES:
            continue
        if not keeps(wanted[1], Format.parse(FORMAT_OF[node.meta["val"].dtype])):
            round_after(graph, node, wanted[1], place.number)


def round_operands(graph: fx.GraphModule, plan: Plan) -> None:
    """Round the operands of operations that rules name; raise PolicyError for such a rule that matches nothing."""
    rules = [i for i, rule in enumerate(plan.policy.rules) if rule.operands is not None]
    if not rules:
        return
    roundings: dict[fx.Node, list[str]] = {}
    matched: set[int] = set()
    rounded_sites, scales = [(part, *pair) for part in graphs_of(graph) for pair in sites(part)], DelayedScales(graph)
    held = HeldScales(graph, scales)
    for part, node, place in rounded_sites:
        if node.op != "call_function" or place.kind in ("movement", "coordinate", "placeholder", "loop"):
            continue
        if node.target is SUM_OF_PROCESSES:  # it reads the sums of the parts, which one process has inside of a chain
            continue
        turned: list[Hadamard | None] = []
        for operand in operands_of(node):
            source = source_of(operand)
            own, value = site(source), float_value(source)
            if own is None or value is None or value.dtype not in STORAGES or own.kind == "coordinate":
                continue
            kind = "contraction" if node.target is _BACKWARD else place.kind
            asked = {"path": place.path, "operator": place.operator, "kind": kind}
            asked |= {"role": own.role, "direction": own.direction, "result": place.role}
            matched.update(plan.policy.matching_operand(**asked))
            wanted = plan.policy.assign_operand(**asked, dtype=FORMAT_OF[value.dtype])
            turned.append(wanted.scaled.hadamard if wanted is not None and wanted.scaled is not None else None)
            if wanted is None:
                continue
            assert wanted.rounding is not None
            placed = replace(place, role=own.role, assignment=wanted, number=-1)
            texts = roundings.setdefault(source, [])
            if wanted.scaled is None:
                writer = _Before(part, placed, _stream(own, texts, _said(wanted)), node)
                node.replace_input_with(operand, _rounded(operand, writer))
                continue
            how = wanted.scaled.format.scaling.how if wanted.scaled.format.scaling is not None else ""
            if part is not graph and how in ("delayed", "held"):
                raise UnsupportedRounding(
                    f"{place}: an operation inside of a loop cannot have a {how} scale, which all iterations would "
                    "share. Use a policy that scales by the values themselves, such as 'fp8'."
                )
            if how == "held":
                held.round(node, operand, placed, wanted.scaled, _with_held(part, placed, own, texts, node))
                continue
            multiplier = scales.multiplier(source, placed, wanted.scaled, node) if how == "delayed" else None
            for position, dims, groups in summed_dims(node, operand):
                writer = _Before(
                    part, placed, _stream(own, texts, f"{_said(wanted)} {dims} {groups}"), node, multiplier
                )
                node.update_arg(position, _in_layout(operand, dims, groups, writer))
        _require_one_transform(place, turned)
    others = set(range(len(plan.policy.rules))) - set(rules)
    at = [place for _, _, place in rounded_sites]
    paths, directions, operators = [p.path for p in at], {p.direction for p in at}, [(p.operator, p.kind) for p in at]
    plan.policy.require_matched(matched | others, paths, directions, operators)


def _require_one_transform(place: Site, turned: Sequence[Hadamard | None]) -> None:
    """Raise PolicyError if one operand of a product is transformed and another one is not, or in another way."""
    if len(set(turned)) > 1:
        said = " and ".join(dict.fromkeys(str(turn) if turn else "no transform" for turn in turned))
        raise PolicyError(
            f"{place}: its operands have {said}; a Hadamard transform cancels in a product only if both operands have "
            "the same one. Give both of them the rule, or neither"
        )


def _stream(source: Site, texts: list[str], text: str) -> int:
    """Return the stream of a rounding of a value's; ``texts`` are the roundings that the value has so far."""
    if text not in texts:
        texts.append(text)
    return streams.of_operand(source, texts.index(text))


def _with_held(part: fx.GraphModule, placed: Site, own: Site, texts: list[str], node: fx.Node) -> Round:
    """Return what rounds an operand of a node with held scales; texts: the roundings that the value has so far."""
    assert placed.assignment is not None
    said = _said(placed.assignment)

    def rounded(operand: fx.Node, layout: Layout, scales: fx.Node) -> fx.Node:
        stream = _stream(own, texts, f"{said} {layout.dims} {layout.groups}")
        writer = _Before(part, placed, stream, node, scales, layout)
        return _copied(_in_groups(operand, layout.dims, layout.groups, writer), operand, writer)

    return rounded


def _in_layout(operand: fx.Node, dims: tuple[int, ...], groups: int, writer: _Before) -> fx.Node:
    """Return ``_in_groups``; a matrix of a product that is transposed in memory is rounded as it lies there.

    The other way round, memory would be read in one order and written in another one, which takes three times as long.
    """
    if writer.near.target not in _PRODUCTS or not _is_turned(operand) or not _may_turn(writer.place):
        return _copied(_in_groups(operand, dims, groups, writer), operand, writer)
    last = operand.meta["val"].dim() - 1
    swapped = {last: last - 1, last - 1: last}
    turned = tuple(swapped.get(d % (last + 1), d) for d in dims)
    return _turned(_in_groups(_turned(operand, writer), turned, groups, writer), writer)


def _may_turn(place: Site) -> bool:
    """Whether a matrix may be rounded in place of the transposed one, with blocks along its other dimension."""
    wanted = place.assignment
    assert wanted is not None and wanted.rounding is not None and wanted.scaled is not None
    # Random bits are numbered by the elements of the operand in their row-major order.
    if wanted.rounding.mode.random_bits or wanted.faults is not None:
        return False
    scaling = wanted.scaled.format.scaling
    tile = () if scaling is None or isinstance(scaling.block, str) else scaling.block
    return len(set(tile)) < 2


def _copied(rounded: fx.Node, operand: fx.Node, writer: _Before) -> fx.Node:
    """Return the rounded operand of a product of PyTorch's as a matrix that is transposed in memory if the operand is.

    PyTorch's products of 16-bit formats take ten times as long with a row-major right operand as with a transposed one.
    """
    product = site(writer.near)
    is_native = product is not None and keeps_stock_kernel(writer.near, product)
    if not is_native or operand.meta["val"].dtype.itemsize != 2 or not _is_turned(operand):
        return rounded
    clone, turned = torch.ops.aten.clone.default, _turned(rounded, writer)
    copied = insert(writer.graph, writer.near, clone, (turned,), memory_format=torch.contiguous_format)
    return _turned(copied, writer)


def _is_turned(operand: fx.Node) -> bool:
    """Whether an operand is a matrix, or several, that is transposed in memory."""
    value = operand.meta["val"]
    return value.dim() > 1 and not is_row_major(value) and is_row_major(value.mT)


def _turned(matrix: fx.Node, writer: _Before) -> fx.Node:
    """Return the transposed matrix, a view."""
    last = matrix.meta["val"].dim() - 1
    order = [*range(last - 1), last, last - 1]
    return insert(writer.graph, writer.near, torch.ops.aten.permute.default, (matrix, order))


def _in_groups(operand: fx.Node, dims: tuple[int, ...], groups: int, writer: _Before) -> fx.Node:
    """Return ``_scaled`` with blocks that begin anew in each of the groups of the first of ``dims``."""
    graph, near = writer.graph, writer.near
    if not operand.meta["val"].dim():
        # A number alone is a block of one.
        reshape = torch.ops.aten.reshape.default
        row = _scaled(insert(graph, near, reshape, (operand, [1])), (-1,), 0, writer)
        return insert(graph, near, reshape, (row, []))
    # Images and weights of a convolution have tiles of both kinds of channels, or of images and channels.
    other = 1 - dims[0]
    if groups == 1:
        return _scaled(operand, dims, other, writer)
    reshape, first = torch.ops.aten.reshape.default, dims[0]
    other += other > first
    size = [size_of(graph, near, operand, d) for d in range(operand.meta["val"].dim())]
    each = operand.meta["val"].shape[first] // groups
    split = insert(graph, near, reshape, (operand, [*size[:first], groups, each, *size[first + 1 :]]))
    rounded = _scaled(split, tuple(d + 1 for d in dims), other, writer)
    return insert(graph, near, reshape, (rounded, size))


def _scaled(operand: fx.Node, dims: tuple[int, ...], other: int, writer: _Before) -> fx.Node:
    """Return the operand rounded to a scaled format, in blocks along ``dims``, before ``near`` and for it alone.

    other: the dimension of a convolution's tile beside the first of ``dims``.
    """
    near, place = writer.near, writer.place
    assert place.assignment is not None and place.assignment.scaled is not None
    rounding, value = place.assignment.scaled, operand.meta["val"]
    block = rounding.format.scaling.block if rounding.format.scaling is not None else "tensor"
    is_tile = not isinstance(block, str) and len(block) == 2 and len(dims) > 1
    along = dims if block == "channel" else (other, dims[0]) if is_tile else dims[:1]
    if rounding.hadamard is not None:
        turned = HadamardTransform(operand, dims[0] % value.dim(), rounding.hadamard.size, rounding.hadamard.seed)
        operand = writer.write_rounded(turned, "elements")
        operand._rename(f"{near.name}_hadamard")
    with locating(place):
        if writer.layout is not None and rounding.format.scaling is not None:
            grouped = writer.layout.groups > 1
            sizes = writer.layout.sizes(block, value.dim() - grouped, place.role == "weight")
            return rounded_in_blocks(operand, value.dtype, rounding, sizes, writer)
        return scaled(operand, value.dim(), value.dtype, rounding, along, writer)


_NAMES: Final[dict[What, str]] = {
    "scale": "scale",
    "quotient": "operand",
    "elements": "operand",
    "flipped_elements": "operand_flipped",
    "flipped_scales": "scale_flipped",
    "flipped_tensor": "tensor_flipped",
}


@dataclass
class _Before(NodeWriter):
    """Inserts nodes before ``near``, for it alone; given: the multiplier of a delayed scale, or held scales,
    with their layout.
    """

    near: fx.Node
    given: fx.Node | None = None
    layout: Layout | None = None

    KIND: ClassVar[str] = "operand"

    def multiplier(self, rounding: ScaledRounding) -> fx.Node:
        """Return the placeholder of the multiplier."""
        assert self.given is not None
        return self.given

    def call(self, call: Call[fx.Node]) -> fx.Node:
        """Return a node that calls an operator on blocks."""
        return insert(self.graph, self.near, call.overload, call.arguments())

    def write(self, call: Call[fx.Node], place: Site, what: What) -> fx.Node:
        """Return a new node that calls an operator."""
        new = self.call(call)
        new._rename(f"{self.near.name}_{_NAMES[what]}")
        new.meta[META] = place
        return new


def operands_of(node: fx.Node) -> list[fx.Node]:
    """Return the floating-point operands, in order.

    A convolution's bias is not one: its addition is an operation of its own.
    """
    given: Sequence[Any] = node.all_input_nodes
    if node.target is _BACKWARD:
        by_input, by_weight, _ = argument(node, "output_mask")
        given = [argument(node, "grad_output")]
        given += [argument(node, "weight")] * by_input + [argument(node, "input")] * by_weight
    elif node.target is torch.ops.aten.convolution.default:
        given = [argument(node, "input"), argument(node, "weight")]
    return [n for n in dict.fromkeys(given) if float_value(n) is not None]


def _rounded(operand: fx.Node, writer: _Before) -> fx.Node:
    """Return the operand with its source rounded as the writer's place is assigned."""
    before, wanted = moved_by(operand), decided(writer.place)
    assert wanted is not None
    if before is not None:
        moved = _rounded(before, writer)
        args = fx.map_arg(operand.args, lambda n: moved if n is before else n)
        return insert(writer.graph, writer.near, operand.target, args, **operand.kwargs)
    call = rounded(writer.graph, operand, wanted[1], writer.stream, operand.meta["val"].dtype)
    result = writer.write_rounded(call, "elements")
    with locating(writer.place):
        encoding = Encoding(wanted[1].format)
    return writer.write_flipped(result, encoding)


def _said(wanted: Assignment) -> str:
    """Return what is done to an operand."""
    return f"{wanted.said} {wanted.faults}" if wanted.faults else wanted.said
