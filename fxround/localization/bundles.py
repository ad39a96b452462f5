"""Bundles: the nodes of a lowered graph that together compute one node of the captured graph.

A lowered node names the captured node that it computes (``ORIGIN``). A bundle reads only values of captured nodes, the
random state and the graph's own inputs, and its last node yields the value. Sizes may be read before the rounding of a
value, because a rounding does not change them. For example, the captured ``%add = aten.add.Tensor(%mm, %bias)`` becomes
``%cast = aten._to_copy(%bias); %add = fxround.pointwise([%mm, %cast], "t0 = add(x0, x1) @ ...")``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import Tensor, fx

from fxround.graph.site import ORIGIN, Site, site
from fxround.numerics.accumulation import Accumulation
from fxround.passes.rewrite import decided, is_random_state


@dataclass(frozen=True)
class Bundle:
    """The nodes of one origin, in the order of their graph."""

    graph: fx.GraphModule
    nodes: tuple[fx.Node, ...]

    @property
    def text(self) -> str:
        """The computation with names of captured nodes alone: equal texts compute equal bits."""
        places = {node: f"%{i}" for i, node in enumerate(self.nodes)}

        def named(used: fx.Node) -> Any:
            return places.get(used) or origin(used)

        return "; ".join(str((n.target, *fx.map_arg((n.args, n.kwargs), named))) for n in self.nodes)

    @property
    def site(self) -> Site | None:
        """The Site of the captured node."""
        return next((place for place in map(site, self.nodes) if place is not None and place.number >= 0), None)

    @property
    def random(self) -> bool:
        """Whether any of its roundings draws random bits."""
        places = [own for own in map(site, self.nodes) if own is not None and own.status == "rounded"]
        return any(_draws(place) for place in places)

    def run(self, value: Callable[[str], Any], given: Callable[[fx.Node], Any], rng: Tensor) -> Any:
        """Compute the value from the values of captured nodes, by name, and of placeholders (``given``)."""
        own: dict[fx.Node, Any] = {}

        def used(node: fx.Node) -> Any:
            if node in own:
                return own[node]
            return rng if is_random_state(node) else value(origin(node))

        for node in self.nodes:
            if node.op == "placeholder":
                own[node] = given(node)
            elif node.op == "get_attr":
                own[node] = attrgetter(str(node.target))(self.graph)
            else:
                target: Any = node.target
                own[node] = target(*fx.map_arg(node.args, used), **fx.map_arg(node.kwargs, used))
        return own[self.nodes[-1]]


def origin(node: fx.Node) -> str:
    """Return the name of the captured node that a lowered node computes."""
    return str(node.meta.get(ORIGIN, node.name))


def bundles(graph: fx.GraphModule) -> dict[str, Bundle]:
    """Return the bundles of a lowered graph by the name of their origin."""
    grouped: dict[str, list[fx.Node]] = {}
    for node in graph.graph.nodes:
        if node.op != "output" and ORIGIN in node.meta:
            grouped.setdefault(origin(node), []).append(node)
    return {name: Bundle(graph, tuple(nodes)) for name, nodes in grouped.items()}


def _draws(place: Site) -> bool:
    wanted = decided(place)
    if wanted is None:
        return False
    accumulate = wanted[0].accumulate
    return bool(wanted[1].mode.random_bits) or (isinstance(accumulate, Accumulation) and accumulate.random)
