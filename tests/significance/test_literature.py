"""Reports on cases of the literature with known answers.

Statistical claims are about the harmonic sums alone: 2 modes, 5 lengths, a mean and a variance each. Both have known
distributions (below), and each comparison raises a false alarm with probability 2e-9 under normality, so the file does
with probability below 1e-7. Seeds are fixed, so a run is repeatable.
"""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from literature import (
    Cramer,
    LogSumExp,
    Muller,
    NaiveLogSumExp,
    PartialSums,
    RootsAndSquares,
    Rump,
    Textbook,
    Welford,
    cramer_system,
    exact_cramer,
    exact_muller,
    exact_rump,
    harmonic_terms,
    muller_start,
    rump_point,
)
from numpy.typing import NDArray
from scipy.stats import chi2, norm
from torch import Tensor

import fxround
from fxround.significance.bits import penalty
from fxround.significance.report import CheckFailed

Floats = NDArray[np.float64]
FALSE_ALARM = 2e-9


def tensor(*values: Fraction) -> Tensor:
    return torch.tensor([float(v) for v in values], dtype=torch.float64)


# ---- the harmonic series in binary32 ----

# The sum to nearest stays from 2^21 terms on.
ENDS = (1_000, 10_000, 100_000, 1_000_000, 4_000_000)
SAMPLES = 20
TERMS = harmonic_terms(ENDS[-1])


@cache
def partial_sums(policy: str) -> Floats:
    """[SAMPLES, ends]."""
    compiled = fxround.compile(PartialSums(*ENDS), policy)
    runs = [compiled.reseed(1989, sample=i)(TERMS) for i in range(SAMPLES)]
    return torch.stack(runs).double().numpy()


def nearest_sums(*ends: int) -> Floats:
    sums: Tensor = fxround.compile(PartialSums(*ends), "reproducible")(harmonic_terms(max(ends)))
    return sums.double().numpy()


def known(per_step: Floats) -> Floats:
    """Sums of a quantity of every addition, up to each of the ends."""
    sums: Floats = per_step.cumsum()[np.array(ENDS) - 1]
    return sums


TERMS64 = TERMS.double().numpy()
EXACT = TERMS64.cumsum()
QUANTUM = np.exp2(np.floor(np.log2(EXACT)) - 23)


def assert_distributed(samples: Floats, mean: Floats, variance: Floats, slack: float = 0.0) -> None:
    """A sum of many independent bounded steps is normal: its mean and variance over samples are as they must be."""
    apart = np.abs(samples.mean(0) - mean)
    assert (apart <= norm.isf(FALSE_ALARM / 2) * np.sqrt(variance / SAMPLES) + slack).all()
    spread = samples.var(0, ddof=1) * (SAMPLES - 1) / variance
    low, high = (chi2.ppf(p, SAMPLES - 1) for p in (FALSE_ALARM / 2, 1 - FALSE_ALARM / 2))
    assert ((low < spread) & (spread < high)).all()


def test_to_nearest_the_harmonic_series_ends_at_a_finite_sum() -> None:
    """1/n is at most half a quantum from n = 2^21 on, and the sum stays at 15.403683, a number of the folklore."""
    before, last, after, much_later = nearest_sums(2**21 - 2, 2**21 - 1, 2**21, 2**22)
    assert before < last == after == much_later == np.float32(15.403683)


def test_stochastic_rounding_follows_the_logarithm() -> None:
    """Unbiased, and of known variance: a partial sum is a multiple of the quantum q, so that the lost fraction f of an
    addition is that of the term, and the step's variance q^2 f (1 - f)."""
    lost = np.mod(TERMS64 / QUANTUM, 1.0)
    sums = partial_sums("stochastic")
    assert_distributed(sums, EXACT[np.array(ENDS) - 1], known(QUANTUM**2 * lost * (1 - lost)))
    asymptotic = np.log(ENDS) + np.euler_gamma + 0.5 / np.array(ENDS)
    # Not bits: the formula and the rounded terms are off by less than 1e-6, six deviations of a mean by less than 1e-3.
    assert (np.abs(sums.mean(0) - asymptotic) < 1e-3).all()
    assert abs(nearest_sums(*ENDS)[-1] - asymptotic[-1]) > 0.03


def test_up_down_walks_around_the_sum_to_nearest_and_so_not_along_the_logarithm() -> None:
    """Up-down rounds to nearest and steps one quantum away: what nearest loses is lost in its mean too, and a step's
    variance is q^2, however small the term. At the three new binades the lost fraction depends on the walk: a quantum
    each, at most."""
    sums, nearest = partial_sums("up_down"), nearest_sums(*ENDS)
    assert_distributed(sums, nearest, known(QUANTUM**2), slack=3 * float(QUANTUM[-1]))
    assert abs(sums.mean(0)[-1] - EXACT[-1]) > 0.03


def test_a_report_tells_the_two_apart() -> None:
    model = PartialSums(1_000_000)
    reports = {p: fxround.variability(model, TERMS, p, samples=10)["output"] for p in ("stochastic", "up_down")}
    right, wrong = reports["stochastic"].agreement["binary64"], reports["up_down"].agreement["binary64"]
    assert right.outside == 0 and wrong.outside == 1
    assert right.bits > 14 > 10 > wrong.bits


# ---- stable and wrong ----


def findings(report: fxround.VariabilityReport) -> str:
    return "\n".join(report.findings)


def test_mullers_recurrence_is_stable_at_the_wrong_limit() -> None:
    """After 12 steps the exact value is 4.997; binary32 has bits of 100: over 300 seeds, 10.9 to 21 at the median."""
    start, right = muller_start(torch.float32), exact_muller(12)
    assert 4.99 < float(right) < 5
    report = fxround.variability(Muller(12), start, capture="nodes", reference=tensor(right)[0])
    output = report["output"]
    # A tolerance: the mean of random samples of 10 bits or more, 100 (1 + 2^-10).
    assert output.bits is not None and output.bits > 10 and output.worst_mean == pytest.approx(100, abs=0.1)
    assert output.agreement["reference"].bits == 0 and "output: STABLE AND WRONG" in findings(report)
    assert min(f.bits for f in report.places if f.bits is not None) < 2  # on the way from 5 to 100 nothing is known


def test_roots_then_squares_are_stable_and_wrong() -> None:
    """45 roots of binary32 numbers end at 1, however they are rounded; in binary64 8 bits of them are left."""
    x = torch.linspace(1, 2, 20)[1:]
    report = fxround.variability(RootsAndSquares(45), x, samples=5, capture="nodes")
    output = report["output"]
    assert output.bits is None and output.evidence == 0 and output.agreement["binary64"].outside == 19
    assert "output: no evidence" in findings(report) and "output: STABLE AND WRONG: 100% of elements" in findings(
        report
    )
    with pytest.raises(CheckFailed, match=r"no evidence.*100\.0% of elements are beyond their spread"):
        report.check(min_bits=1, max_outside=0.0)


# ---- unstable ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rumps_polynomial_has_no_bit(dtype: torch.dtype) -> None:
    """Its terms are near 2^123, and their sum is less than 1."""
    assert exact_rump() == Fraction(-54767, 66192)
    report = fxround.variability(Rump(), rump_point(dtype), reference=tensor(exact_rump())[0], keep_samples=True)
    output, samples = report["output"], torch.stack(report.kept[0]["output", "output"]).double()
    assert output.bits == 0 and output.agreement["reference"].bits == 0
    assert output.worst_sigma is not None and 2.0**50 < output.worst_sigma * 2.0 ** (output.precision - 53) < 2.0**76
    assert bool((samples < 0).any()) and bool((samples > 0).any())  # not even the sign


def test_cramers_rule_loses_the_bits_of_the_condition_number() -> None:
    a, b = cramer_system()
    right = exact_cramer(a, b)
    condition = float(torch.linalg.cond(a))
    assert 2.4e8 < condition < 2.6e8 and [round(float(v), 6) for v in right] == [2, -2]
    report = fxround.variability(Cramer(), (a, b), samples=30, reference=tensor(*right))
    output = report["output"]
    assert output.bits is not None and output.agreement["reference"].outside == 0
    # A lower bound, the cost of 30 samples below -log2(sigma / mean); a handful of roundings may add 3 bits to u.
    kept = 53 - np.log2(condition)
    assert kept - 3 < output.bits + penalty(30) < kept + 6
    assert output.agreement["reference"].bits > output.bits


# ---- two ways to write it ----

ROWS = 1000 + torch.rand(8, 8, generator=torch.Generator().manual_seed(1))


def test_the_variance_by_the_textbook_has_no_bits_and_welfords_has() -> None:
    """Chan, Golub and LeVeque: with kappa = norm / deviation the textbook loses log2(kappa^2) bits, the update at most
    log2(kappa). Here kappa is 3,500: 23.5 bits and 11.8."""
    textbook, welford = (fxround.variability(m, ROWS, samples=10, capture="nodes") for m in (Textbook(), Welford()))
    few, many = textbook["output"], welford["output"]
    assert few.bits is not None and many.bits is not None and many.worst is not None
    assert few.bits < 1 and many.bits + penalty(10) > 24 - 11.8
    assert many.agreement["binary64"].outside == 0
    cancelling = [f for f in textbook.places if f.place.operator == "aten.sub.Tensor"]
    assert [f.bits for f in cancelling] == [few.bits]
    assert all(f.bits is not None and f.bits > 18 for f in textbook.places if f not in cancelling)


def test_log_sum_exp_as_written_overflows_in_its_exp_and_well_written_has_its_bits() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 100.0]])
    naive, well = (fxround.variability(m, x, samples=5, capture="nodes") for m in (NaiveLogSumExp(), LogSumExp()))
    assert naive["output"].nonfinite == 1
    assert "First NaN or infinity: exp (aten.exp.default, literature.py:" in findings(naive)
    with pytest.raises(CheckFailed, match="1 elements are not finite, first in sample 0"):
        naive.check()
    assert well.check(min_bits=18) is well and well["output"].agreement["binary64"].outside == 0


def culprits(model: torch.nn.Module, x: Tensor) -> Any:
    found = fxround.localize(model, x, lambda y: bool(y.isfinite().all()), "binary16")
    return {site.operator.split(".")[1] for each in found.sets for site in each.sites}


def test_localize_names_the_exp_or_the_sum() -> None:
    """exp(12) is beyond binary16; exp(10.5) is not, and four of them are."""
    assert culprits(NaiveLogSumExp(), torch.full((1, 4), 12.0)) == {"exp", "sum"}
    assert culprits(NaiveLogSumExp(), torch.full((1, 4), 10.5)) == {"sum"}
