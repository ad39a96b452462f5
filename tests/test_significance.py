"""Significant bits: the published bound, and no evidence where nothing was seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fxround.significance import penalty, require, significant_bits


@pytest.mark.parametrize("n, bits", [(3, 3.62), (5, 2.49), (10, 1.84), (20, 1.52), (30, 1.40), (50, 1.29), (100, 1.19)])
def test_the_penalty_of_few_samples_is_the_published_one(n: int, bits: float) -> None:
    assert round(penalty(n), 2) == bits


def test_bits_are_the_formula_of_the_paper() -> None:
    samples = 1 + np.random.default_rng(1).normal(size=(10, 50)) * 2.0**-12
    z = samples / samples.mean(axis=0) - 1
    # Two float64 evaluations of one formula, in another order: equal but for their own roundings.
    np.testing.assert_allclose(significant_bits(samples), -np.log2(z.std(axis=0)) - penalty(10), rtol=1e-9)


def test_equal_samples_are_no_evidence() -> None:
    values = np.array([3.0, 0.0, -0.0, np.nan, np.inf])
    assert np.isnan(significant_bits(np.stack([values] * 4))).all()


def test_a_zero_mean_or_a_sample_that_is_not_finite_leaves_no_bits() -> None:
    samples = np.array([[1.0, 1.0, np.nan, 2.0], [-1.0, np.inf, 1.0, 2.0]])
    np.testing.assert_array_equal(significant_bits(samples), [0, 0, 0, np.nan])


def test_bits_stay_within_the_format() -> None:
    samples = np.array([[1.0, 1.0]] * 4 + [[1 + 2.0**-50, -100.0]])
    np.testing.assert_array_equal(significant_bits(samples, precision=24), [24, 0])
    assert significant_bits(samples, precision=53)[0] > 24


@pytest.mark.parametrize("samples", [1.0, [1.0], np.empty((0, 3))])
def test_fewer_than_two_samples_are_refused(samples: Any) -> None:
    with pytest.raises(ValueError, match="at least two samples"):
        significant_bits(samples)


def test_a_missing_package_is_named_with_its_extra() -> None:
    with pytest.raises(ImportError, match=r"nosuchpackage is needed.*pip install 'fxround\[report\]'"):
        require("nosuchpackage.module", "report")
