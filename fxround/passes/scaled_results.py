"""Results and entries that a rule rounds to a scaled format, in blocks along their last dimension.

The value is rounded to its dtype first, and then in blocks: nodes for the scales and one for the elements follow it,
and every use of the value reads the elements, in the backward pass too. An operation that selects values rounds
nothing. A gradient passes unchanged, unless the policy zeroes it where an element was clamped (``rounding_gradients``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from fxround.graph.dialect import Call, Pointwise
from fxround.graph.dtypes import FORMAT_OF, STORAGES
from fxround.graph.site import META, PORT, Site, float_value
from fxround.graph.values import evaluate
from fxround.kernels.program import Program
from fxround.kernels.scaled import element_parts
from fxround.numerics.faults import Fault
from fxround.numerics.formats import Format
from fxround.numerics.formats.encodings import Encoding
from fxround.numerics.formats.scaled import ScaledRounding
from fxround.passes import streams
from fxround.passes.inject_faults import flip_of, site_of
from fxround.passes.rewrite import ROUND, Plan, last_placeholder, locating, rng_of, sites
from fxround.passes.scaling import scaled
from fxround.passes.streams import Part

# They yield operands, or numbers that only choose elements.
LEFT = ("exact", "movement", "integer", "coordinate", "random", "operand")


def round_scaled_results(graph: fx.GraphModule, plan: Plan) -> None:
    """Round the values for which a rule's ``rounding`` is a scaled format."""
    for node, place in sites(graph):
        value, wanted = float_value(node), place.assignment
        if wanted is None or wanted.blocks is None or value is None or value.dtype not in STORAGES:
            continue
        if place.kind not in LEFT:
            with locating(place):
                round_in_blocks(graph, node, place, wanted.blocks, place.number)


def round_in_blocks(
    graph: fx.GraphModule, node: fx.Node, place: Site, rounding: ScaledRounding, stream: int
) -> fx.Node:
    """Insert the scaled rounding of a value after it, let every use read the elements, and return them."""
    readers = list(node.users)
    writer = _After(graph, node, replace(place, operator=ROUND, status="rounded", reason=""), stream)
    value = node.meta["val"]
    x = node if value.dim() else writer.moved(torch.ops.aten.reshape.default, (node, [1]))
    made = scaled(x, max(1, value.dim()), value.dtype, rounding, (-1,), writer)
    if not value.dim():
        made = writer.moved(torch.ops.aten.reshape.default, (made, []))
    for reader in readers:
        if not isinstance(reader.meta.get("val"), torch.SymInt | int):
            reader.replace_input_with(node, made)
    return made


@dataclass
class _After:
    """A Writer (``passes.scaling``) that appends nodes to the computation of a value."""

    graph: fx.GraphModule
    last: fx.Node
    place: Site
    stream: int

    def __post_init__(self) -> None:
        self.origin = self.last
        if self.last.op == "placeholder":
            self.last = last_placeholder(self.graph)

    def call(self, call: Call[fx.Node]) -> fx.Node:
        """Return the node of an operator on blocks."""
        return self.moved(call.overload, call.arguments())

    def moved(self, target: object, arguments: Sequence[object]) -> fx.Node:
        """Return a node that rounds nothing."""
        quiet = replace(self.place, operator=str(target), kind="movement", status="movement", number=-1)
        return self._append(target, arguments, replace(quiet, assignment=None), "blocks")

    def program(self, program: Program, operands: Sequence[fx.Node], dtype: torch.dtype) -> fx.Node:
        """Return the node of a program for scales, which draws nothing."""
        made = Pointwise(list(operands), str(program), dtype, rng_of(self.graph), 0)
        return self._append(made.overload, made.arguments(), replace(self.place, kind="operand"), "scale")

    def elements(self, program: Program, operands: Sequence[fx.Node], held: Sequence[fx.Node]) -> fx.Node:
        """Return the node of the elements."""
        dtype, rng = self.origin.meta["val"].dtype, rng_of(self.graph)
        wanted, xs = self.place.assignment, list(operands)
        if wanted is not None and wanted.faults is not None and wanted.blocks is not None:
            first, program = element_parts(wanted.blocks, Format.parse(FORMAT_OF[dtype]))
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            quotient = Pointwise(xs, str(first), wide, rng, self.stream)
            quotient.kernel(quotient.loads())
            at = replace(self.place, kind="operand")
            elements = self._append(quotient.overload, quotient.arguments(), at, "elements")
            encoding = Encoding.of_elements(wanted.blocks.format)
            xs = [self._with_flips(elements, wanted.faults.of_elements, encoding), *held]
        made = Pointwise(xs, str(program), dtype, rng, self.stream)
        made.kernel(made.loads())
        return self._append(made.overload, made.arguments(), replace(self.place, kind="pointwise"), "rounded")

    @property
    def flips_scales(self) -> bool:
        """Whether the policy flips bits of the scales."""
        wanted = self.place.assignment
        faults = wanted.faults if wanted is not None else None
        return faults is not None and bool(faults.of_scales or faults.of_tensors)

    def flipped(self, scale: fx.Node, fmt: Format, whole: bool = False) -> fx.Node:
        """Return the scales with flipped bits."""
        wanted = self.place.assignment
        assert wanted is not None and wanted.faults is not None
        if whole:
            return self._with_flips(scale, wanted.faults.of_tensors, Encoding(fmt), "tensor")
        return self._with_flips(scale, wanted.faults.of_scales, Encoding(fmt), "scales")

    def _with_flips(
        self, node: fx.Node, faults: Sequence[Fault], encoding: Encoding, part: Part = "elements"
    ) -> fx.Node:
        for i, fault in enumerate(faults):
            call = flip_of(self.graph, node, self.place, fault, encoding, streams.of_fault(self.stream, i, part))
            at = replace(site_of(self.place, fault, encoding.format), kind="operand")
            node = self._append(call.overload, call.arguments(), at, "flipped")
        return node

    def multiplier(self, rounding: ScaledRounding) -> fx.Node:
        """Delayed scales belong to operands, which ``Rule`` requires."""
        raise ValueError(f"{rounding}: a delayed scale belongs to operands")

    def _append(self, target: object, arguments: Sequence[object], place: Site, name: str) -> fx.Node:
        with self.graph.graph.inserting_after(self.last):
            new = self.graph.graph.create_node(
                "call_function",
                target,  # type: ignore[arg-type]
                tuple(arguments),  # type: ignore[arg-type]
                name=f"{self.origin.name}_{name}",
            )
        new.meta = {**self.origin.meta, META: place}
        new.meta.pop(PORT, None)
        evaluate(self.graph, new)
        self.last = new
        return new
