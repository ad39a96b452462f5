"""The search and its integer programs, on tables of numbers: equal to the enumeration of all assignments."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from fxround.choices import PASSES
from fxround.significance.metrics import METRICS
from fxround.tuning.goals import Goal, goal_of, require_budget
from fxround.tuning.parts import Assignment
from fxround.tuning.programs import Program
from fxround.tuning.search import Search
from fxround.tuning.trials import Stopped, Trial


def program(draw: random.Random, parts: int, formats: int, whole: bool = False) -> Program:
    """Costs and noise in which some formats cost the same, or are noisier and costlier than others."""
    costs = tuple(tuple(draw.randint(1, 12) for _ in range(formats)) for _ in range(parts))
    noise = tuple(tuple(2.0 ** draw.uniform(-20, 0) for _ in range(formats)) for _ in range(parts))
    return Program(costs, noise, whole)


def every(program: Program) -> list[Assignment]:
    return list(itertools.product(*(range(len(row)) for row in program.costs)))


class Runs:
    """Stands for ``Trials``: the value of an assignment is that of a function."""

    def __init__(self, value: Callable[[Assignment], float], limit: int | None, stop_at: int | None = None) -> None:
        self.value, self.limit, self.stop_at = value, limit, stop_at
        self.known: dict[Assignment, Trial] = {}
        self.passes_of_a_run, self.metric = 1, METRICS["accuracy"]
        self.formats = SimpleNamespace(names=())

    def stopping(self) -> bool:
        return self.stop_at is not None and len(self.known) >= self.stop_at

    def run(self, assignment: Assignment) -> Trial:
        if assignment not in self.known:
            if self.stopping() or (self.limit is not None and len(self.known) >= self.limit):
                raise Stopped
            value = self.value(assignment)
            self.known[assignment] = Trial((), (value,), 0.0, None, None, 0.0)
        return self.known[assignment]


def searched(
    program: Program, value: Callable[[Assignment], float], goal: Goal, most: int | None = None, **asked: Any
) -> tuple[Search, Runs]:
    runs: Any = Runs(value, asked.get("limit", 10**6), asked.get("stop_at"))
    runs.formats.names = "abc"[: len(program.costs[0])]
    search = Search(runs, program, goal, most, asked.get("proof", "monotone"))
    search.run()
    return search, runs


@pytest.mark.part(2)
@pytest.mark.parametrize("seed", range(40))
def test_programs_are_solved(seed: int) -> None:
    draw = random.Random(seed)
    p = program(draw, draw.randint(1, 4), draw.randint(2, 3), whole=True)
    some = every(p)
    # Of formats with the same cost and noise one is enough; these have none.
    bound = p.predicted(draw.choice(some)) * draw.choice((1 + 1e-6, 0.7))
    within = [one for one in some if p.predicted(one) <= bound]
    got = p.cheapest_within(bound)
    assert (got is None) == (not within)
    if got is not None:
        assert p.cost(got) == min(map(p.cost, within)) and p.predicted(got) <= bound * (1 + 1e-6)
    most = p.cost(draw.choice(some))
    coarse, tried = draw.sample(some, min(3, len(some))), draw.sample(some, min(4, len(some)))
    left = [
        one for one in some
        if p.cost(one) <= most and one not in tried and not any(p.is_coarser(one, other) for other in coarse)
    ]  # fmt: skip
    got = p.quietest(most, coarse, tried)
    assert (got is None) == (not left)
    if got is not None:
        assert got in left
        assert p.predicted(got) <= min(map(p.predicted, left)) * (1 + 1e-5)


@pytest.mark.part(7)
@pytest.mark.parametrize("seed", range(60))
def test_the_cheapest_is_that_of_an_enumeration_where_noise_decides(seed: int) -> None:
    """Up to eight parts; the true noise differs from the predicted one, by a factor of each part and format."""
    draw = random.Random(seed)
    parts, formats = (draw.randint(1, 4), 3) if seed % 2 else (draw.randint(5, 8), 2)
    p = program(draw, parts, formats)
    # In each part, what is predicted to be noisier is noisier.
    true = [sorted(2.0 ** draw.uniform(-20, 0) for _ in row) for row in p.noise]
    order = [sorted(range(formats), key=row.__getitem__) for row in p.noise]

    def value(one: Assignment) -> float:
        return -sum(true[i][order[i].index(given)] for i, given in enumerate(one))

    some = every(p)
    bound = value(draw.choice(some))
    search, runs = searched(p, value, Goal("higher", bound, None))
    keeping = [one for one in some if value(one) >= bound]
    assert search.best is not None and value(search.best) >= bound
    assert p.cost(search.best) == min(map(p.cost, keeping)) and search.minimal and search.proved
    check_minimal(p, search, runs, bound)


def check_minimal(p: Program, search: Search, runs: Runs, bound: float) -> None:
    """Each part with a next cheaper format ran, and did not keep the budget."""
    assert search.best is not None
    for part, given in enumerate(search.best):
        less = [cost for cost in p.costs[part] if cost < p.costs[part][given]]
        for i, cost in enumerate(p.costs[part]):
            if less and cost == max(less):
                step = (*search.best[:part], i, *search.best[part + 1 :])
                assert not runs.known[step].value >= bound


@pytest.mark.part(4)
@pytest.mark.parametrize("seed", range(40))
def test_a_search_of_all_is_an_enumeration_of_anything(seed: int) -> None:
    """Values that have nothing to do with noise: accuracies of few rows, and some that are NaN."""
    draw = random.Random(seed)
    p = program(draw, draw.randint(1, 4), draw.randint(2, 3), whole=True)
    table = {one: draw.choice((math.nan, *range(8))) for one in every(p)}
    search, runs = searched(p, table.__getitem__, Goal("higher", 5, None), proof="all")
    keeping = [one for one, value in table.items() if value >= 5]
    assert search.proved == "all" and bool(search.reason) == (not keeping)
    assert search.best is not None
    if keeping:
        assert p.cost(search.best) == min(map(p.cost, keeping)) and table[search.best] >= 5 and search.minimal
        check_minimal(p, search, runs, 5)
    else:
        numbers = [value for value in table.values() if not math.isnan(value)]
        assert table[search.best] == max(numbers) if numbers else math.isnan(table[search.best])
    bits, _ = searched(p, table.__getitem__, Goal("higher", None, 1.0), most=p.cost(p.lowest()) + 4, proof="all")
    within = [value for one, value in table.items() if p.cost(one) <= p.cost(p.lowest()) + 4]
    numbers = [value for value in within if not math.isnan(value)]
    assert bits.best is not None
    assert table[bits.best] == max(numbers) if numbers else math.isnan(table[bits.best])
    assert bits.proved == "all" and p.cost(bits.best) <= p.cost(p.lowest()) + 4


@pytest.mark.part(5)
@pytest.mark.parametrize("seed", range(20))
def test_the_best_within_bits_is_that_of_an_enumeration_where_noise_decides(seed: int) -> None:
    draw = random.Random(seed)
    p = program(draw, draw.randint(1, 5), draw.randint(2, 3))
    most = p.cost(draw.choice(every(p)))
    search, _ = searched(p, lambda one: -p.predicted(one), Goal("higher", None, 1.0), most)
    within = [one for one in every(p) if p.cost(one) <= most]
    assert search.best in within and search.proved and not search.reason
    assert p.predicted(search.best) <= min(map(p.predicted, within)) * (1 + 1e-5)


@pytest.mark.part(4)
@pytest.mark.parametrize("seed", range(10))
def test_without_a_limit_a_search_ends_near_forty_passes(seed: int) -> None:
    draw = random.Random(seed)
    p = program(draw, 14, 3)
    search, runs = searched(p, lambda one: -p.predicted(one), Goal("higher", -0.1, None), limit=None)
    assert search.minimal and len(runs.known) + 1 <= PASSES + len(p.costs)
    check_minimal(p, search, runs, -0.1)


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_a_limit_is_kept(limit: int) -> None:
    p = program(random.Random(3), 8, 3)
    search, runs = searched(p, lambda one: -p.predicted(one), Goal("higher", -0.01, None), limit=limit)
    assert len(runs.known) == limit and not search.minimal and not search.interrupted
    search, runs = searched(p, lambda one: -p.predicted(one), Goal("higher", -0.01, None), stop_at=limit)
    assert len(runs.known) == limit and not search.minimal and search.interrupted and search.best in runs.known


def test_a_next_cheaper_format_is_each_of_its_cost() -> None:
    p = Program(((8, 4, 4, 4, 2), (3, 3, 3, 3, 3)), ((0.0, 1.0, 2.0, 1.0, 3.0), (0.0,) * 5))
    assert p.cheaper(0, 0) == (1, 2) and p.cheaper(0, 1) == (4,) and p.cheaper(0, 4) == () == p.cheaper(1, 0)
    assert p.usable == ((0, 1, 4), (0,))
    assert Program(p.costs, p.noise, whole=True).usable == ((0, 1, 2, 4), (0,))


@pytest.mark.parametrize(
    "budget, bits, error, says",
    [
        (None, None, ValueError, "neither of"),
        (0.1, 4, ValueError, "both of"),
        (-0.1, None, ValueError, "a loss of 0 or more"),
        (math.nan, None, ValueError, "a loss of 0 or more"),
        (True, None, TypeError, "largest loss"),
        ("0.1", None, ValueError, "expected '>= 0.95'"),
        ("> 0.1", None, ValueError, "expected '>= 0.95'"),
        (">= x", None, ValueError, "expected '>= 0.95'"),
        (None, 0, ValueError, "positive"),
        (None, "4", TypeError, "a number of bits"),
    ],
)
def test_wrong_budgets(budget: Any, bits: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        require_budget(budget, bits)


def test_budgets() -> None:
    accuracy, kl, sqnr = METRICS["accuracy"], METRICS["kl"], METRICS["sqnr"]
    # 0.97 - 0.01 is not 0.96 in binary64, and a loss of 5 of 500 is one of 0.01.
    goal = goal_of(0.01, None, accuracy, 485 / 500)
    assert goal.keeps(480 / 500) and not goal.keeps(479 / 500) and not goal.keeps(math.nan)
    assert goal_of(0.01, None, kl, 0.0).keeps(0.01) and not goal_of(0.01, None, kl, 0.0).keeps(0.02)
    assert goal_of("<= 3", None, replace(accuracy, better=""), math.nan).keeps(2)
    for asked, metric, unrounded, says in (
        (">= 1", kl, 0.0, "expected '<= 1'"),
        (1.0, sqnr, math.inf, "expected a bound"),
        (1.0, kl, math.nan, "kl is nan without roundings"),
        (1.0, replace(kl, better=""), 0.0, "not known whether higher or lower values of kl are better"),
    ):
        with pytest.raises(ValueError, match=says):
            goal_of(asked, None, metric, unrounded)
