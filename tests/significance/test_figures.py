"""Figures of one place: batches are added, extremes are found, and 'outside' has a known false-alarm rate."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fxround.significance.bits import contributing_bits, significant_bits
from fxround.significance.figures import BINS, Figures, Options, Place, Tally
from fxround.significance.moments import Moments
from fxround.significance.report import OUTSIDE

PLACE = Place("here", "layer")


def taken(samples: Tensor) -> Moments:
    moments = Moments(tuple(samples.shape[1:]), samples.dtype)
    for sample in samples:
        moments.add(sample)
    return moments


def tallied(*batches: Tensor, options: Options = Options(), reference: Tensor | None = None) -> Figures:  # noqa: B008
    tally, row = Tally(PLACE, options), 0
    for samples in batches:
        moments = taken(samples)
        tally.add(moments, row)
        if reference is not None:
            tally.compare("reference", moments, reference[row : row + samples.shape[1]], row)
        row += samples.shape[1]
    return tally.figures()


def noisy(samples: int, rows: int, columns: int, spread: float, seed: int) -> tuple[Tensor, Tensor]:
    """Samples (binary32) around true values (binary64)."""
    generator = torch.Generator().manual_seed(seed)
    true = torch.randn(rows, columns, dtype=torch.float64, generator=generator)
    noise = torch.randn(samples, rows, columns, dtype=torch.float64, generator=generator)
    return (true * (1 + noise * spread)).float(), true


def test_figures_are_those_of_all_elements() -> None:
    samples, _ = noisy(8, 50, 30, 2.0**-14, 1)
    samples[:, 3] = 1.0
    found = tallied(samples[:, :20], samples[:, 20:])
    bits = significant_bits(samples.numpy())
    seen = bits[~np.isnan(bits)]
    assert (found.elements, found.evidence, found.samples, found.dtype) == (1500, 1470, 8, "binary32")
    # Other formulas and sums, in binary64.
    assert found.bits == pytest.approx(seen.mean(), rel=1e-9)
    assert found.worst == pytest.approx(seen.min(), rel=1e-9)
    assert found.contributing == pytest.approx(np.nanmean(contributing_bits(samples.numpy())), rel=1e-9)
    assert found.worst_at == np.unravel_index(np.nanargmin(bits), bits.shape)
    for q, value in found.quantiles.items():
        assert abs(value - np.quantile(seen, float(q))) <= 1 / BINS + 0.05
    assert sum(found.histogram) == 1470
    assert list(found.histogram) == np.bincount(seen.astype(int), minlength=25).tolist()


def test_the_bits_of_the_whole_are_from_norms() -> None:
    samples, _ = noisy(10, 20, 20, 2.0**-10, 2)
    samples[:, 0, 0] = torch.randn(10) * 1e-9  # one element of noise alone spoils the worst, not the whole
    found = tallied(samples)
    assert found.worst == 0 and found.norm is not None and 7 < found.norm < 9


def test_non_finite_elements_are_counted_and_have_no_bits() -> None:
    samples, _ = noisy(5, 4, 4, 2.0**-10, 3)
    samples[2, 1, 1], samples[4, 0, 0], samples[:, 3, 3] = torch.nan, torch.inf, -torch.inf
    found = tallied(samples)
    assert (found.nonfinite, found.first_nonfinite, found.evidence, found.worst) == (3, 0, 15, 0)


def test_a_sound_mean_is_hardly_ever_outside() -> None:
    """The truth is beyond the bound of 10 samples in fewer than 1 of 1,000 elements; OUTSIDE is 50 times that."""
    samples, true = noisy(10, 200, 500, 2.0**-12, 4)
    found = tallied(samples, reference=true).agreement["reference"]
    # |mean - truth| is sigma / sqrt(10) and the bound at least 1.96 sigma; binomial, 100,000 elements.
    assert found.outside_share < 1e-3 < OUTSIDE / 10
    assert found.elements == 100_000 and found.bits > 11


@pytest.mark.parametrize("spread, shift, share", [(2.0**-12, 2.0**-8, 0.99), (0.0, 2.0**-20, 0.99), (0.0, 0.0, 0.0)])
def test_a_shifted_mean_is_outside_whether_or_not_it_spreads(spread: float, shift: float, share: float) -> None:
    samples, true = noisy(10, 30, 40, spread, 5)
    found = tallied(samples, reference=true * (1 + shift)).agreement["reference"]
    assert (found.outside_share >= share) if share else (found.outside_share == 0)


def test_agreement_counts_what_is_not_a_number() -> None:
    samples = torch.tensor([[1.0, torch.nan, torch.inf, 2.0]]).repeat(3, 1)[:, None]
    reference = torch.tensor([[1.0, torch.nan, torch.inf, torch.nan]], dtype=torch.float64)
    found = tallied(samples, reference=reference).agreement["reference"]
    assert found.bits == pytest.approx(3 * 24 / 4) and found.worst == 0 and found.worst_at == (0, 3)


def test_a_stored_reference_may_be_an_ulp_away() -> None:
    samples = torch.ones(5, 8, 1)
    beside = torch.full((8, 1), 1 + 2.0**-23)
    assert tallied(samples, reference=beside).agreement["reference"].outside == 0
    assert tallied(samples, reference=beside.double()).agreement["reference"].outside == 8
    assert tallied(samples, reference=torch.full((8, 1), 1 + 2.0**-21)).agreement["reference"].outside == 8
