"""Delta debugging: find disjoint minimal sets of units that make a test fail.

``minimal`` is ddmin (Zeller and Hildebrandt, Simplifying and isolating failure-inducing input, IEEE TSE 28(2), 2002):
it returns a subset of a failing set that fails and of which no unit can be left out. ``disjoint`` is rddmin, as in
Verrou and Verificarlo: it removes the set found and searches the rest until the rest passes. Sets are divided along
the branches of the data flow, so that a guilty branch is found whole before it is cut. Nothing is assumed of the test:
a superset of a failing set may pass, and a failure may need several units. The answer depends on the answers of the
test alone, which is called in a fixed order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import networkx as nx

Units = tuple[str, ...]
Fails = Callable[[Units], bool]
# Returns the first of several sets that fails, or None. Sets after that may have been tried, without effect.
FirstFailing = Callable[[Sequence[Units]], Units | None]
Divide = Callable[[Units, int], list[Units]]


def minimal(units: Sequence[str], first: FirstFailing, divide: Divide) -> Units:
    """Return a subset of ``units`` (which must fail) that fails and of which no single unit can be left out.

    divide: splits a set into a number of non-empty disjoint parts. The subset keeps the order of ``units``. O(n^2) sets
    are tried at worst, O(log n) for one culprit.
    """
    failing, parts = tuple(units), 2
    while len(failing) > 1:
        pieces = divide(failing, min(parts, len(failing)))
        rests = [_without(failing, piece) for piece in pieces] if len(pieces) > 2 else []
        smaller = first((*pieces, *rests))
        if smaller is not None:
            failing, parts = smaller, 2 if smaller in pieces else max(len(pieces) - 1, 2)
        elif len(pieces) == len(failing):
            return failing
        else:
            parts = 2 * len(pieces)
    return failing


def one_by_one(fails: Fails) -> FirstFailing:
    """Return the search for the first failing set that tries one after the other."""
    return lambda sets: next((units for units in sets if fails(units)), None)


def likely(units: Units, shares: Mapping[str, float], first: FirstFailing) -> Units:
    """Return the first failing set of the 1, 2, 4, ... units with the largest shares; ``units`` if none of them fails.

    A set has at most half of the units, in their order. Nothing is tried without shares.
    """
    order = sorted((unit for unit in units if shares.get(unit)), key=lambda unit: -shares[unit])
    tried, count = list[Units](), 1
    while 2 * count <= len(units) and count <= len(order):
        chosen = set(order[:count])
        tried.append(tuple(unit for unit in units if unit in chosen))
        count *= 2
    return (first(tried) if tried else None) or units


def disjoint(units: Sequence[str], fails: Fails, search: Callable[[Units], Units]) -> Iterator[Units]:
    """Yield failing sets without a common unit, found by ``search`` in the units that remain, until the rest passes."""
    rest = tuple(units)
    while rest and fails(rest):
        failing = search(rest)
        yield failing
        rest = _without(rest, failing)


def halves(units: Units, parts: int) -> list[Units]:
    """Split a set into ``parts`` runs of its order, of sizes that differ by at most one."""
    edges = [i * len(units) // parts for i in range(parts + 1)]
    return [units[a:b] for a, b in pairwise(edges)]


class Branches:
    """The branches of a data flow: a vertex with all vertices whose every path to ``sink`` passes through it.

    They are the subtrees of the dominator tree of the reversed flow; in its preorder each is a contiguous run. A vertex
    without a path to the sink is a branch of its own.
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
        """Split ``units`` into ``parts`` parts: the largest is split along a branch, or in halves if none fits."""
        pieces = [tuple(sorted(units, key=self._place.__getitem__))]
        while len(pieces) < parts:
            largest = max(pieces, key=len)
            place = pieces.index(largest)
            pieces[place : place + 1] = self._split(largest)
        order = {unit: i for i, unit in enumerate(units)}
        return [tuple(sorted(piece, key=order.__getitem__)) for piece in pieces]

    def _split(self, units: Units) -> list[Units]:
        """Split off the branch whose size is nearest to half of the units."""
        places = [self._place[unit] for unit in units]
        runs = {(bisect_left(places, a), bisect_left(places, b)) for a, b in self._spans}
        a, b = min(runs, key=lambda run: (abs(len(units) - 2 * (run[1] - run[0])), run))
        if 4 * (b - a) < len(units) or 4 * (b - a) > 3 * len(units):
            return halves(units, 2)
        return [units[a:b], units[:a] + units[b:]]


def _without(units: Units, removed: Sequence[str]) -> Units:
    gone = set(removed)
    return tuple(unit for unit in units if unit not in gone)
