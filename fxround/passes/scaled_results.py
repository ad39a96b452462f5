"""Results and entries that a rule rounds to a scaled format, in blocks along their last dimension.

The value is rounded to its dtype first, and then in blocks: nodes for the scales and one for the elements follow it,
and every use of the value reads the elements, in the backward pass too. An operation that selects values rounds
nothing. A gradient passes unchanged, unless the policy zeroes it where an element was clamped (``rounding_gradients``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import torch
from torch import fx

from fxround.graph.dialect import Call
from fxround.graph.dtypes import STORAGES
from fxround.graph.site import META, PORT, Site, float_value
from fxround.graph.values import evaluate
from fxround.numerics.formats.scaled import ScaledRounding
from fxround.passes.rewrite import Plan, last_placeholder, locating, sites
from fxround.passes.scaling import NodeWriter, What, scaled

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
    writer = _After(graph, place, stream, node)
    value = node.meta["val"]
    x = node if value.dim() else writer.moved(torch.ops.aten.reshape.default, (node, [1]))
    made = scaled(x, max(1, value.dim()), value.dtype, rounding, (-1,), writer)
    if not value.dim():
        made = writer.moved(torch.ops.aten.reshape.default, (made, []))
    for reader in readers:
        if not isinstance(reader.meta.get("val"), torch.SymInt | int):
            reader.replace_input_with(node, made)
    return made


_NAMES: Final[dict[What, str]] = {
    "scale": "scale",
    "quotient": "elements",
    "elements": "rounded",
    "flipped_elements": "flipped",
    "flipped_scales": "flipped",
    "flipped_tensor": "flipped",
}


@dataclass
class _After(NodeWriter):
    """Appends nodes to the computation of a value, ``last``."""

    last: fx.Node

    KIND: ClassVar[str] = "pointwise"

    def __post_init__(self) -> None:
        self.origin = self.last
        if self.last.op == "placeholder":
            self.last = last_placeholder(self.graph)

    def call(self, call: Call[fx.Node]) -> fx.Node:
        """Return the node of an operator on blocks."""
        return self.moved(call.overload, call.arguments())

    def moved(self, target: object, arguments: Sequence[object]) -> fx.Node:
        """Return a node that rounds nothing."""
        quiet = replace(self.place, operator=str(target), kind="movement", status="movement", number=-1, reason="")
        return self._append(target, arguments, replace(quiet, assignment=None), "blocks")

    def write(self, call: Call[fx.Node], place: Site, what: What) -> fx.Node:
        """Return a new node that calls an operator."""
        return self._append(call.overload, call.arguments(), place, _NAMES[what])

    def multiplier(self, rounding: ScaledRounding) -> fx.Node:
        """Scales that are state belong to operands, which ``Rule`` requires."""
        raise ValueError(f"{rounding}: a scale that is state belongs to operands")

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
