"""Units: sets of nodes that become one node, chosen so that the merged graph has no cycle.

Every node is in exactly one unit. A producer's unit and its user's are merged if ``joins`` allows it and no path leaves
one of them and enters the other through a third. With edges a -> b -> c and a -> c, for example, {a, c} is not allowed:
it would need b, and b would need it. ``in_order`` visits every unit after all units that it reads, which is impossible
with a cycle; operations that draw from PyTorch's own generator keep their order.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import fx

from fxround.errors import VerificationError
from fxround.graph.site import site


@dataclass(eq=False)
class Unit:
    """Nodes in graph order, and the positions of the first and the last.

    horizon: the last position among the unit's nodes and all units that it depends on.
    """

    nodes: list[fx.Node]
    first: int
    last: int
    horizon: int

    def inputs(self) -> set[fx.Node]:
        """Return the nodes outside of the unit that it reads."""
        own = set(self.nodes)
        return {used for node in self.nodes for used in node.all_input_nodes if used not in own}

    def results(self) -> list[fx.Node]:
        """Return the nodes of the unit that are read outside of it."""
        own = set(self.nodes)
        return [node for node in self.nodes if any(user not in own for user in node.users)]


def merged(graph: fx.Graph, joins: Callable[[Unit, Unit], bool]) -> dict[fx.Node, Unit]:
    """Return the unit of every node. joins(a, b): whether a producer's unit a and its user's unit b may be merged."""
    units: dict[fx.Node, Unit] = {}
    position = {node: i for i, node in enumerate(graph.nodes)}
    for node, index in position.items():
        units[node] = unit = Unit([node], index, index, index)
        for producer in node.all_input_nodes:
            other = units[producer]
            if other is unit or not joins(other, unit):
                continue
            if not _leads_around(other, unit, units) and not _leads_around(unit, other, units):
                nodes = sorted((*other.nodes, *unit.nodes), key=position.__getitem__)
                unit = Unit(nodes, min(other.first, unit.first), index, index)
                units.update(dict.fromkeys(nodes, unit))
                _delay_users(unit, units)
    return units


def _delay_users(unit: Unit, units: dict[fx.Node, Unit]) -> None:
    """Raise the horizon of all units that depend on a merged unit to its horizon."""
    stack = [unit]
    while stack:
        users = {units[user] for node in stack.pop().nodes for user in node.users if user in units}
        for later in users:
            if later.horizon < unit.horizon:
                later.horizon = unit.horizon
                stack.append(later)


def _leads_around(a: Unit, b: Unit, units: dict[fx.Node, Unit]) -> bool:
    """Whether a path leads from ``a`` to ``b`` through a third unit.

    A unit whose horizon lies before the first node of ``a`` cannot depend on ``a``, so the search does not enter it.
    """
    seen = {a, b}
    stack = [units[node] for node in b.inputs()]
    while stack:
        unit = stack.pop()
        if unit in seen or unit.horizon < a.first:
            continue
        seen.add(unit)
        sources = [units[node] for node in unit.inputs()]
        if a in sources:
            return True
        stack += sources
    return False


def in_order(units: dict[fx.Node, Unit]) -> Iterator[Unit]:
    """Yield the units, each after what it reads, and otherwise in the order of their last nodes.

    Raises VerificationError if units depend on one another.
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
        del waiting[done]
        yield done
        for user in users.get(done, ()):
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, (user.last, user))
    if waiting:
        names = ", ".join(node.name for unit in waiting for node in unit.nodes)
        raise VerificationError(f"units of the graph depend on one another: {names}")
