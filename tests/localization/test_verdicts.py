"""Verdicts: several runs per set, each done once; and the rate at which sets that fail sometimes are missed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxround.localization.checks import parse_check
from fxround.localization.masked_model import Masked
from fxround.localization.verdicts import Verdicts

P = 0.45


class Add(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b


@pytest.fixture(scope="module")
def masked() -> Masked:
    """One site, whose stochastic rounding goes up, to 1 + 2^-23, with probability P."""
    return Masked(Add(), "stochastic", (torch.tensor(1.0), torch.tensor(P * 2.0**-23)))


def verdicts(masked: Masked, seed: int, cache: Path | None = None) -> Verdicts:
    return Verdicts(masked, parse_check(lambda y: bool(y == 1)), runs=5, seed=seed, cache=cache)


def test_a_set_that_fails_in_a_share_p_of_samples_is_overlooked_as_often_as_said(masked: Masked) -> None:
    seeds = 1000
    seen = sum(verdicts(masked, seed).fails(tuple(masked.sites)) for seed in range(seeds))
    expected = 1 - (1 - P) ** 5
    sigma = (expected * (1 - expected) / seeds) ** 0.5
    assert abs(seen / seeds - expected) < 5 * sigma  # a false alarm in 1.7e6 choices of seeds


def test_a_run_is_asked_for_once_and_the_last_witness_first(masked: Masked, tmp_path: Path) -> None:
    on = tuple(masked.sites)
    asked = verdicts(masked, 3, tmp_path)
    failures = asked.failures(on)
    assert asked.executed == 5 and 0 < len(failures) < 5 and not asked.recalled
    assert asked.fails(on) and not asked.fails(()) and asked.executed == 10
    assert (asked.failing, asked.passing) == ({"1"}, {"0"})
    assert all((masked.run(on, seed=3, sample=i) != 1) == (i in failures) for i in range(5))
    later = verdicts(masked, 3, tmp_path)
    assert later.failures(on) == failures and (later.executed, later.recalled) == (0, 5)
    assert asked.file != verdicts(masked, 4, tmp_path).file
    told: list[int] = []
    fresh = verdicts(masked, 3)
    fresh.after_run = lambda: told.append(fresh.executed)
    assert fresh.fails(on) and told == list(range(1, failures[0] + 2))


def test_elements_are_part_of_a_set(masked: Masked, tmp_path: Path) -> None:
    (name,) = masked.sites
    asked = verdicts(masked, 3, tmp_path)
    everything: Any = {name: ((0, 1),)}
    assert asked.failures((name,), everything) == asked.failures((name,)) != ()
    assert asked.failures((name,), {name: ()}) == ()
    assert len({asked.key((name,), e) for e in (None, everything, {name: ()})}) == 3
