"""Significant bits: the published bound, and no evidence if all samples are equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from fxround.significance import bits
from fxround.significance.bits import (
    above,
    bits_from,
    contributing_bits,
    decimal,
    general_probability,
    penalty,
    require,
    same,
    significant_bits,
)


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


# ---- from streamed statistics ----


def streamed(samples: Any, **options: Any) -> Any:
    values = np.asarray(samples, np.float64)
    mean, sigma = values.mean(0), values.std(0)
    return bits_from(mean, sigma, values.min(0), values.max(0), same(values), samples=len(values), **options)


def cases() -> Any:
    random = np.random.default_rng(3)
    spreads = 2.0 ** random.integers(-30, 3, 400)
    return random.normal(size=400) * 10 ** random.uniform(-6, 6, 400) * (1 + random.normal(size=(12, 400)) * spreads)


@pytest.mark.parametrize("probability, confidence", [(0.95, 0.95), (0.9, 0.99), (0.999, 0.75)])
def test_streamed_cnh_bits_are_the_packages(probability: float, confidence: float) -> None:
    samples = cases()
    options = {"probability": probability, "confidence": confidence}
    ours, theirs = np.clip(streamed(samples, **options), 0, 53), significant_bits(samples, 53, **options)
    # The package forms x / mean - 1, and so loses to cancellation up to 2^-53 of what is left, 2^-30 at the least here.
    np.testing.assert_allclose(ours, theirs, atol=2.0**-22)
    ours = np.clip(streamed(samples, kind="contributing"), 0, 53)
    np.testing.assert_allclose(ours, contributing_bits(samples, 53), atol=2.0**-22)


def test_streamed_general_bits_are_the_packages() -> None:
    samples = cases()
    samples[:, :3] = 1.0
    samples[0, :3] = [1 + 2.0**-10, 1 - 2.0**-10, 1 + 2.0**-20]  # on and beside the powers of two
    ours, theirs = np.clip(streamed(samples, method="general"), 0, 24), significant_bits(samples, 24, method="general")
    np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(ValueError, match="need the samples"):
        streamed(samples, method="general", kind="contributing")
    assert contributing_bits(samples, 24, method="general").shape == (400,)


def test_streamed_bits_know_no_evidence_and_no_number() -> None:
    samples = np.array([[1.0, 1.0, 1.0, np.nan], [-1.0, np.inf, 1.0, np.nan]])
    np.testing.assert_array_equal(streamed(samples), [-np.inf, -np.inf, np.nan, np.nan])


def test_the_bound_holds_as_often_as_it_says() -> None:
    """Another sample agrees with the true mean to s bits with probability p, for a fraction c of the bounds."""
    random, n, trials = np.random.default_rng(7), 10, 4000
    samples = 1 + random.normal(size=(n, trials)) * 2.0**-10
    bits = significant_bits(samples, 53)
    # Each bound says that |z| <= 2^-s for 95 % of further samples: it holds if 2^-s is at least 1.96 sigma.
    held = (2.0**-bits >= 1.959964 * 2.0**-10).mean()
    # CNH takes one end of a two-sided interval, so 97.5 % hold; four standard errors: a false alarm in 30,000 seeds.
    assert abs(held - 0.975) < 4 * np.sqrt(0.975 * 0.025 / trials) + 0.001


@pytest.mark.parametrize("n", [2, 3, 5, 10, 40])
@pytest.mark.parametrize("confidence", [0.95, 0.75])
def test_the_interval_of_one_element_holds_as_often_as_it_says(n: int, confidence: float) -> None:
    random, trials = np.random.default_rng(n), 20_000
    samples = 1 + random.normal(size=(n, trials)) * 2.0**-20
    bits, true = streamed(samples, confidence=confidence), 20 - np.log2(1.959964)
    covered = ((bits <= true) & (true <= bits + above(n, confidence))).mean()
    # Four standard errors: a false alarm in 15,000 seeds.
    assert abs(covered - confidence) <= 4 * np.sqrt(confidence * (1 - confidence) / trials)


def test_the_general_method_needs_59_samples_for_95_percent() -> None:
    assert general_probability(58) < 0.95 - 0.001 < general_probability(59)
    assert general_probability(2) == 0.0
    assert decimal(24) == pytest.approx(7.22, abs=0.005)
    with pytest.raises(ValueError, match="method is 'normal'"):
        significant_bits([[1.0], [2.0]], method="normal")  # type: ignore[arg-type]


@pytest.mark.parametrize("freedom", [1, 2, 4, 9, 19, 199, 65_535])
@pytest.mark.parametrize("probability", [0.0005, 0.025, 0.25, 0.5, 0.95, 0.9999])
def test_quantiles_are_those_of_scipys_distributions(freedom: int, probability: float) -> None:
    assert bits._chi_square_quantile(probability, freedom) == stats.chi2.ppf(probability, freedom)
    assert bits.student_quantile(probability, freedom) == stats.t.ppf(probability, freedom)
