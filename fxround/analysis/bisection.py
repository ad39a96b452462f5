"""Delta debugging: the smallest sets of units that make a test fail, all of them, disjoint.

What is true here. ``minimal`` is ddmin (Zeller and Hildebrandt, Simplifying and isolating failure-inducing input,
IEEE TSE 28(2), 2002): of a failing set it returns a subset that fails, of which no unit can be left out. ``disjoint``
is rddmin as Verrou and Verificarlo do it: take the set found away, and search what is left until it passes. Sets are
divided along the branches of the data flow, so that a guilty branch is found whole before it is cut.

Why it is safe. Nothing is assumed of the test: not that a superset of a failing set fails, nor that one unit suffices.
The answer is a function of the test's answers alone; ``fails`` is asked in a fixed order.

    before   for module in modules: ...           # one at a time, which misses what needs two; or 2^n subsets
    after    minimal(units, fails, Branches(flow, sink).divide)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import networkx as nx

Units = tuple[str, ...]
Fails = Callable[[Units], bool]
Divide = Callable[[Units, int], list[Units]]


def minimal(units: Sequence[str], fails: Fails, divide: Divide) -> Units:
    """A subset of ``units`` (which must fail) that fails and of which no single unit can be left out.

    divide: splits a set into so many non-empty disjoint parts. The subset keeps the order of ``units``. The test is
    asked O(n^2) times at worst, O(log n) times for one culprit.
    """
    failing, parts = tuple(units), 2
    while len(failing) > 1:
        pieces = divide(failing, min(parts, len(failing)))
        rests = [_without(failing, piece) for piece in pieces] if len(pieces) > 2 else []
        found = next((tried for tried in (*pieces, *rests) if fails(tried)), None)
        if found is not None:
            failing, parts = found, 2 if found in pieces else max(len(pieces) - 1, 2)
        elif len(pieces) == len(failing):
            return failing
        else:
            parts = 2 * len(pieces)
    return failing


def disjoint(units: Sequence[str], fails: Fails, search: Callable[[Units], Units]) -> Iterator[Units]:
    """Failing sets without a common unit, each found by ``search`` in what the ones before left; then the rest
    passes.
    """
    rest = tuple(units)
    while rest and fails(rest):
        found = search(rest)
        yield found
        rest = _without(rest, found)


def halves(units: Units, parts: int) -> list[Units]:
    """A set in so many runs of its order, of sizes that differ by one at most."""
    edges = [i * len(units) // parts for i in range(parts + 1)]
    return [units[a:b] for a, b in pairwise(edges)]


class Branches:
    """The branches of a data flow: a vertex, and all from which every path to ``sink`` leads through it.

    They are the subtrees of the dominator tree of the reversed flow; in its preorder each is a run of neighbours. A
    vertex from which no path leads to the sink is a branch of its own.
    """

    def __init__(self, flow: nx.DiGraph, sink: str) -> None:
        parents = nx.immediate_dominators(flow.reverse(copy=False), sink)
        tree = nx.DiGraph()
        tree.add_nodes_from([sink])
        tree.add_edges_from((parents.get(v) or sink, v) for v in reversed(list(flow)) if v != sink)
        order = list(nx.dfs_preorder_nodes(tree, sink))
        self._place = {vertex: place for place, vertex in enumerate(order)}
        sizes = dict.fromkeys(order, 1)
        for vertex in reversed(order):
            for parent in tree.predecessors(vertex):
                sizes[parent] += sizes[vertex]
        self._spans = [(place, place + sizes[vertex]) for vertex, place in self._place.items()]

    def divide(self, units: Units, parts: int) -> list[Units]:
        """``units`` in so many parts: whole branches where one holds at least a quarter of a part, halves elsewhere."""
        pieces = [tuple(sorted(units, key=self._place.__getitem__))]
        while len(pieces) < parts:
            largest = max(pieces, key=len)
            place = pieces.index(largest)
            pieces[place : place + 1] = self._split(largest)
        order = {unit: i for i, unit in enumerate(units)}
        return [tuple(sorted(piece, key=order.__getitem__)) for piece in pieces]

    def _split(self, units: Units) -> list[Units]:
        """The branch nearest to half of the units and the rest, in preorder."""
        places = [self._place[unit] for unit in units]
        runs = {(bisect_left(places, a), bisect_left(places, b)) for a, b in self._spans}
        a, b = min(runs, key=lambda run: (abs(len(units) - 2 * (run[1] - run[0])), run))
        if 4 * (b - a) < len(units) or 4 * (b - a) > 3 * len(units):
            return halves(units, 2)
        return [units[a:b], units[:a] + units[b:]]


def _without(units: Units, removed: Sequence[str]) -> Units:
    gone = set(removed)
    return tuple(unit for unit in units if unit not in gone)
