"""Delta debugging: minimal and disjoint sets on tests with known answers, and the branches of known graphs."""

from __future__ import annotations

import itertools
import random

import networkx as nx
import pytest

from fxround.localization.delta_debugging import Branches, Units, disjoint, halves, minimal, one_by_one

UNITS: Units = tuple(f"u{i:03}" for i in range(100))


class Test:
    """Fails if all members of a culprit set are on; counts the different sets that were tried."""

    __test__ = False

    def __init__(self, *culprits: set[str]) -> None:
        self.culprits, self.asked = culprits, set[Units]()

    def __call__(self, units: Units) -> bool:
        self.asked.add(units)
        return any(culprit <= set(units) for culprit in self.culprits)


@pytest.mark.parametrize("culprit", [{"u000"}, {"u099"}, {"u037"}, {"u003", "u097"}, {"u010", "u050", "u051"}])
def test_the_only_culprit_is_found_with_few_questions(culprit: set[str]) -> None:
    test = Test(culprit)
    assert set(minimal(UNITS, one_by_one(test), halves)) == culprit
    assert len(test.asked) <= (14 if len(culprit) == 1 else 60 * len(culprit))


def test_the_answer_fails_and_no_unit_can_be_left_out_whatever_the_test() -> None:
    units = UNITS[:6]
    subsets = [tuple(c) for n in range(1, 7) for c in itertools.combinations(units, n)]
    for seed in range(300):
        chosen = random.Random(seed)
        failing = {subset for subset in subsets if chosen.random() < 0.3} | {units}
        found = minimal(units, one_by_one(failing.__contains__), halves)
        assert found in failing
        assert all(tuple(u for u in found if u != left) not in failing for left in found if len(found) > 1)


def test_disjoint_sets_are_all_found_and_the_rest_passes() -> None:
    culprits = ({"u004"}, {"u020", "u080"}, {"u081", "u082", "u083"})
    test = Test(*culprits)
    found = list(disjoint(UNITS, test, lambda rest: minimal(rest, one_by_one(test), halves)))
    assert sorted(map(sorted, found)) == sorted(map(sorted, culprits))
    rest = tuple(u for u in UNITS if not any(u in f for f in found))
    assert not test(rest)


@pytest.mark.parametrize("parts", range(2, 12))
def test_halves_are_a_partition_of_even_sizes(parts: int) -> None:
    pieces = halves(UNITS[:11], parts)
    assert [u for piece in pieces for u in piece] == list(UNITS[:11])
    assert max(map(len, pieces)) - min(map(len, pieces)) <= 1 and len(pieces) == parts


def towers() -> nx.DiGraph:
    """Two chains of five, joined: in -> a0..a4 -> out, in -> b0..b4 -> out; and a vertex that leads nowhere."""
    flow = nx.DiGraph([("a4", "out"), ("b4", "out"), ("in", "dead")])
    for tower in "ab":
        flow.add_edges_from(itertools.pairwise(["in", *(f"{tower}{i}" for i in range(5))]))
    return flow


def test_branches_are_divided_off_whole() -> None:
    units = tuple(f"{tower}{i}" for i in range(5) for tower in "ab")
    branches = Branches(towers(), "out")
    first, second = branches.divide(units, 2)
    assert {first, second} == {tuple(f"{t}{i}" for i in range(5)) for t in "ab"}


@pytest.mark.parametrize("seed", range(20))
def test_any_division_is_a_partition_into_non_empty_parts(seed: int) -> None:
    flow = nx.gnp_random_graph(30, 0.1, seed=seed, directed=True)
    flow = nx.relabel_nodes(nx.DiGraph((a, b) for a, b in flow.edges if a < b), str)
    sink = list(nx.topological_sort(flow))[-1]
    units = tuple(v for v in flow if v != sink)
    for parts in range(2, len(units) + 1):
        pieces = Branches(flow, sink).divide(units, parts)
        assert len(pieces) == parts and all(pieces)
        assert sorted(u for piece in pieces for u in piece) == sorted(units)


def test_a_guilty_branch_is_found_with_few_questions() -> None:
    units = tuple(f"{tower}{i}" for i in range(5) for tower in "ab")
    test = Test({"a3", "a4"})
    assert set(minimal(units, one_by_one(test), Branches(towers(), "out").divide)) == {"a3", "a4"}
    assert len(test.asked) <= 8
