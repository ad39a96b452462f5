"""The distance of two distributions is scipy's at every point of a grid."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

import fxround


@pytest.mark.parametrize("n, m, grid", [(7, 7, (3, 4)), (7, 5, (3, 4)), (1, 6, (5,)), (1, 1, (2,)), (40, 100, ())])
def test_distances_are_those_of_scipy_at_every_point(
    n: int, m: int, grid: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A few points at a time, and equal numbers among the samples.
    monkeypatch.setattr(import_module("fxround.significance.wasserstein"), "_AT_ONCE", 30)
    a, b = torch.randn(n, *grid).mul(4).round(), torch.randn(m, *grid, dtype=torch.float64)
    found = fxround.wasserstein(a, b)
    assert found.shape == grid and found.dtype == torch.float64
    columns = zip(a.reshape(n, -1).T.numpy(), b.reshape(m, -1).T.numpy(), strict=True)
    expected = [stats.wasserstein_distance(x.astype(np.float64), y) for x, y in columns]
    # Bits cannot be compared: scipy adds the same areas in another order.
    assert found.flatten().tolist() == pytest.approx(expected, rel=1e-12)


def test_a_shift_is_the_distance_and_samples_have_no_order() -> None:
    a = torch.arange(6.0).reshape(6, 1) ** 2
    assert fxround.wasserstein(a, a.flip(0) + 3).item() == 3
    assert fxround.wasserstein(a[:1], a[:1] - 2).item() == 2
    assert fxround.wasserstein(torch.tensor([[0], [2]]), torch.tensor([[1]])).item() == 1


def test_the_largest_numbers_have_a_distance() -> None:
    """8 numbers of a size that a sum of two overflows: every figure is a power of two times a small whole number."""
    most = 2.0**1023
    a = torch.full((8, 2), most, dtype=torch.float64)
    a[:, 1] = 0.75
    assert fxround.wasserstein(a, a / 2).tolist() == [most / 2, 0.375]
    assert fxround.wasserstein(a, a[:3] / 2).tolist() == [most / 2, 0.375]
    mixed = torch.tensor([[most], [-most]], dtype=torch.float64)
    assert fxround.wasserstein(mixed, mixed[[0, 1, 1, 1]]).item() == most / 2
    assert fxround.wasserstein(mixed[:1], mixed[1:]).item() == math.inf


@pytest.mark.parametrize("m", [4, 3])
def test_a_run_that_diverged_shows_at_its_points_alone(m: int) -> None:
    a, b = torch.rand(4, 3), torch.rand(m, 3)
    a[1, 0], b[2, 1], b[0, 2] = math.nan, math.inf, -math.inf
    a[0, 2] = math.nan
    found = fxround.wasserstein(a, b)
    assert found[0].isnan() and found[1] == math.inf and found[2].isnan()


@pytest.mark.parametrize(
    "a, b, error, said",
    [
        (torch.rand(3, 4), torch.rand(3, 5), ValueError, r"a grid of shape \(4,\) and others one of \(5,\)"),
        (torch.rand(3, 4), torch.rand(0, 4), ValueError, r"others has shape \(0, 4\); expected at least one sample"),
        (torch.tensor(1.0), torch.rand(1), ValueError, r"samples has shape \(\)"),
        (torch.rand(3) > 0, torch.rand(3), TypeError, "samples has dtype torch.bool"),
        ([1.0], torch.rand(3), TypeError, "samples is .*list.*; expected a tensor"),
    ],
)
def test_other_arguments_are_errors(a: Any, b: Tensor, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        fxround.wasserstein(a, b)
