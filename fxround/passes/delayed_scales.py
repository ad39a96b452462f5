"""Scales that enter a graph as state: held ones, and delayed ones with the magnitudes of which later ones are made.

A delayed scale belongs to a value and a scaled format: every product that reads the value, forward or backward, rounds
it with the same multiplier. A joint graph also returns the largest finite magnitude of the value, and
``compiler.delayed_state`` makes the next multiplier of it. Names are those of modules and roles, ``first.weight0``, so
that the graphs of one model share their state.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

import torch
from torch import fx

from fxround.graph.dialect import BlockMaximum
from fxround.graph.site import PORT, PORTS, Port, Site
from fxround.graph.values import fake_mode
from fxround.numerics.formats.scaled import ScaledRounding
from fxround.passes.rewrite import insert, rng_of

DELAYED: Final = "fxround_delayed"


@dataclass(frozen=True)
class DelayedScale:
    """A multiplier: the name of the value, the rounding that it serves, and dtype and device of the multiplier.

    shape: that of held scales, with one number for each block; None for the multiplier of a delayed scale.
    """

    name: str
    rounding: ScaledRounding
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...] | None = None


class DelayedScales:
    """The delayed scales of one graph, which is changed."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self.graph = graph
        self._multipliers: dict[tuple[fx.Node, ScaledRounding], fx.Node] = {}
        self._names: Counter[str] = Counter()
        placeholders = graph.graph.find_nodes(op="placeholder")
        self._trains = any(node.meta[PORT].kind == "tangent" for node in placeholders)

    def multiplier(self, source: fx.Node, place: Site, rounding: ScaledRounding, near: fx.Node) -> fx.Node:
        """Return the placeholder of the multiplier of a value, which ``near`` reads; place: as ``near``'s operand."""
        key = source, rounding
        if key not in self._multipliers:
            name = numbered(self._names, place.path, place.role)
            self._multipliers[key] = self.entering(source, name, rounding)
            if self._trains:
                self._return_magnitude(source, name, near)
        return self._multipliers[key]

    def entering(
        self, source: fx.Node, name: str, rounding: ScaledRounding, shape: tuple[int, ...] | None = None
    ) -> fx.Node:
        """Return a new placeholder for the scale of a value; shape: as for ``DelayedScale``."""
        value = source.meta["val"]
        wide = torch.float64 if value.dtype == torch.float64 else torch.float32
        with self.graph.graph.inserting_before(rng_of(self.graph)):
            node = self.graph.graph.placeholder("delayed_multiplier")
        node.target = node.name
        node.meta[PORT], node.meta[DELAYED] = (
            Port("multiplier", name),
            DelayedScale(name, rounding, wide, value.device, shape),
        )
        node.meta["val"] = fake_mode(self.graph).from_tensor(
            torch.ones(shape or (), dtype=wide, device=value.device), static_shapes=True
        )
        return node

    def _return_magnitude(self, source: fx.Node, name: str, near: fx.Node) -> None:
        call = BlockMaximum(source, [0] * source.meta["val"].dim())
        largest = insert(self.graph, near, call.overload, call.arguments())
        output = self.graph.graph.output_node()
        output.args = ((*output.args[0], largest),)  # type: ignore[misc]
        output.meta[PORTS] = (*output.meta[PORTS], Port("magnitude", name))


def numbered(names: Counter[str], path: str, role: str) -> str:
    """Return the name of the next value with this role that products of a module read."""
    kind = f"{path}.{role}".lstrip(".")
    names[kind] += 1
    return f"{kind}{names[kind] - 1}"


def delayed_scales(graph: fx.GraphModule) -> tuple[DelayedScale, ...]:
    """Return the delayed scales whose multipliers enter a lowered graph, in order."""
    placeholders = graph.graph.find_nodes(op="placeholder")
    return tuple(node.meta[DELAYED] for node in placeholders if DELAYED in node.meta)
