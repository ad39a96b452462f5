"""Random models: fused, unfused, in another call and by the NumPy reference the same bits, and near binary64."""

from __future__ import annotations

import random
from collections.abc import Iterator
from unittest import mock

import pytest
import random_graphs
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_graphs import FREQUENT, OPERATIONS, POLICIES, STEPS, Recipe, build
from random_judge import Maps, as_if_large, judge, numpy_maps, quickly

from fxround.passes import Plan, lower, optimize
from fxround.policy import Policy
from fxround.runtime import buffers, schedule
from fxround.runtime.epilogues import Epilogue
from fxround.runtime.rows import Rows

SMALL = st.integers(0, 7)
RECIPES = st.builds(
    Recipe,
    steps=st.tuples(*[st.tuples(st.sampled_from(FREQUENT), SMALL, SMALL, SMALL)] * STEPS),
    returned=st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple),
    policy=st.integers(0, len(POLICIES) - 1),
    dtype=st.sampled_from((0, 0, 0, 1, 2, 3)),
    tangents=st.sampled_from((0, 0, 1, 2)),
    layout=st.integers(0, 3),
    small=st.integers(0, 2),
    seed=st.integers(0, 99),
)
QUIET = (HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large)


@pytest.fixture(scope="module")
def maps() -> Iterator[Maps]:
    with quickly(), numpy_maps() as found:
        yield found


@settings(max_examples=400, deadline=None, suppress_health_check=QUIET, print_blob=True)
@given(recipe=RECIPES)
def test_every_way_of_running_a_graph_has_the_bits_of_the_reference(maps: Maps, recipe: Recipe) -> None:
    maps.errors.clear()
    with as_if_large(recipe.small):
        judge(recipe, maps)
