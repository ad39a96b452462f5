"""Random models have the same bits fused, unfused, in another call and in NumPy, and are near binary64."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import random_graphs
from hypothesis import HealthCheck, example, given, settings
from random_builder import STEPS, Recipe
from random_graphs import FREQUENT, OPERATIONS, RECIPES, build
from random_judge import Maps, as_if_large, judge, numpy_maps
from random_reference import quickly

from fxround.errors import FxroundError
from fxround.passes import Plan, lower, optimize
from fxround.policy import Policy
from fxround.runtime import buffers, schedule
from fxround.runtime.cpu import epilogues, row_chains
from fxround.runtime.schedule.epilogues import Epilogue
from fxround.runtime.schedule.row_chains import RowsPart

QUIET = (HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large)


@pytest.fixture(scope="module")
def maps() -> Iterator[Maps]:
    with quickly(), numpy_maps() as found:
        yield found


def step(function: random_graphs.Operation, first: int = 0, second: int = 0, p: int = 0) -> tuple[int, int, int, int]:
    return OPERATIONS.index(function), first, second, p


# Models that were wrong or refused once.
FOUND = {
    # A cat of two results is an epilogue's operand: its memory was released twice.
    "skip": Recipe(
        (step(random_graphs.skip), *[step(random_graphs.convolved, p=1)] * 4, step(random_graphs.arithmetic, 0, 2))
    ),
    # bfloat16 cannot store what a clamp between two numbers was held to yield.
    "clamp": Recipe((step(random_graphs.arithmetic), step(random_graphs.choice, p=3)), dtype=1),
    # A number of another dtype is converted, and rounded, before the product.
    "converted": Recipe((step(random_graphs.converted, p=1), step(random_graphs.scaled)), policy=6),
    # Two operations that nobody reads were fused without a result.
    "dead end": Recipe((step(random_graphs.number, p=1), step(random_graphs.number)), (2,)),
    # A selection on a channels-last tensor became row-major, and PyTorch's convolution gradient took another kernel.
    "layout": Recipe((step(random_graphs.masked), step(random_graphs.convolution_gradient, p=1)), policy=2, layout=1),
}


# .ci/run draws 1,000 more, from a fixed seed.
@pytest.mark.long
@settings(max_examples=80, suppress_health_check=QUIET)
@example(recipe=FOUND["skip"])
@example(recipe=FOUND["clamp"])
@example(recipe=replace(FOUND["clamp"], dtype=3))
@example(recipe=FOUND["converted"])
@example(recipe=FOUND["dead end"])
@example(recipe=FOUND["layout"])
@given(recipe=RECIPES)
def test_every_way_of_running_a_graph_has_the_bits_of_the_reference(maps: Maps, recipe: Recipe) -> None:
    maps.errors.clear()
    with as_if_large(recipe.small):
        judge(recipe, maps)


def drawn(count: int, seed: int) -> list[Recipe]:
    chosen = random.Random(seed)
    return [
        Recipe(
            tuple((chosen.choice(FREQUENT), *(chosen.randrange(8) for _ in range(3))) for _ in range(STEPS)),
            policy=3 + chosen.randrange(2),
            tangents=chosen.randrange(2),
        )
        for _ in range(count)
    ]


def test_every_operation_is_drawn_and_every_way_is_taken(maps: Maps) -> None:
    targets: set[str] = set()
    ways: set[type] = set()
    with as_if_large():
        for i, recipe in enumerate(drawn(150, 1)):
            graph = build(recipe).graph
            targets |= {str(node.target) for node in graph.graph.nodes}
            if i < 20:
                running = schedule.schedule(optimize(lower(graph, Plan(Policy.parse("reproducible"), False))))
                ways |= {type(module) for module in running.modules()}
    wanted = """convolution convolution_backward mm bmm cat stack split.Tensor view permute expand slice.Tensor
        select.int index.Tensor gather where.self sum.dim_IntList amax cumsum scatter_add index_put slice_scatter exp
        sort"""
    missing = {name for name in wanted.split() if f"aten.{name if '.' in name else name + '.default'}" not in targets}
    assert not missing and {RowsPart, Epilogue} <= ways


def _one_buffer_twice(pool: Any, size: int) -> Any:
    found = pool.waiting.get(size)
    return found[-1] if found else None


FUSE = importlib.import_module("fxround.passes.optimizations.fuse")
_STEPS, _TEXT = epilogues._steps, FUSE._text


def _swapped(steps: Any, operands: Any, stored: Any) -> str:
    return _TEXT(steps, operands[::-1], stored)


def _over_what_is_read(chain: Any, spent: Any, table: Any) -> dict[int, int]:
    """Results over inputs of their layout, whether or not these are read later: no write leaves its memory."""
    return {
        i: j
        for i in chain.stored
        for j in range(chain.inputs)
        if (table[j].shape, table[j].dtype) == (table[i].shape, table[i].dtype) and table[j].is_contiguous()
    }


@pytest.mark.part(2)
@pytest.mark.parametrize(
    "place, name, fault",
    [
        (buffers._Pool, "take", _one_buffer_twice),
        (FUSE, "_text", _swapped),
        (epilogues, "_steps", lambda *a: [(items, blocks[1:]) for items, blocks in _STEPS(*a)]),
        (row_chains, "_overwritten", _over_what_is_read),
    ],
    ids=["a buffer lent twice", "operands that change places", "a block that is left out", "an input written over"],
)
def test_the_judge_sees_a_fault(maps: Maps, place: Any, name: str, fault: Any) -> None:
    with as_if_large(), mock.patch.object(place, name, fault):
        for recipe in drawn(60, 2):
            maps.errors.clear()
            try:
                judge(recipe, maps)
            except (AssertionError, FxroundError):
                return
    raise AssertionError("nobody noticed")
