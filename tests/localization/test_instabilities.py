"""Numerical instabilities, in examples of which the counts are known."""

from __future__ import annotations

import json
import math
import statistics

import pytest
import torch
from torch import Tensor, nn

from fxround.localization.instabilities import STUDENT, common_digits, instabilities

# 0.1 + 0.2 - 0.3 is no number of binary32: with random rounding, the sum is on one side of 0.3 or on the other.
NOISE = torch.tensor([0.1, 0.2, 0.3])


def noise(x: Tensor) -> Tensor:
    """A number of rounding errors alone: no sample has a digit of it."""
    return (x[0] + x[1]) - x[2]


def totals(model: nn.Module, *inputs: Tensor, digits: int = 4, seed: int = 0) -> dict[str, int]:
    return {k: n for k, n in instabilities(model, inputs, digits=digits, seed=seed).totals.items() if n}


class Each(nn.Module):
    """One addition cancels. Its result divides two numbers, multiplies itself and 2, and is compared with 0 twice."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        z = noise(x)
        return x[:2] / z, z * z, z * 2.0, z > 0, x[0] < x[1], z.reciprocal(), 3.0 / x, z <= 0.0


def test_each_kind_is_counted_by_hand() -> None:
    seeds = [seed for seed in range(12) if len(set(draws(seed))) > 1]
    assert len(seeds) >= 4
    for seed in seeds:
        found = totals(Each(), NOISE, seed=seed)
        assert found == {"division": 3, "multiplication": 1, "branch": 2, "cancellation": 1}, seed


def draws(seed: int) -> list[float]:
    """The three samples of the number of errors."""
    import fxround

    class Noise(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            z = noise(x)
            return x[:2] / z, z * z, z * 2.0, z > 0, x[0] < x[1], z.reciprocal(), 3.0 / x, z <= 0.0, z

    compiled = fxround.compile(Noise(), "cestac")
    return [float(compiled.reseed(seed, sample=s)(NOISE)[-1]) for s in range(3)]


class Zero(nn.Module):
    """Exact zeros are computed zeros too: all samples are zero."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        z = x - x
        return z, z * x, z * z, z == 0, z + 1.0


def test_exact_zeros_are_computed_zeros() -> None:
    found = totals(Zero(), torch.tensor([1.5, 2.5]))
    assert found == {"cancellation": 2, "multiplication": 2, "branch": 2}


class Stable(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.where(x > 0, x, -x)
        return (y * 3 + 1) / (y + 2)


def test_a_stable_model_has_none() -> None:
    report = instabilities(Stable(), torch.rand(50) + 1)
    assert not report.nodes and str(report).endswith("No numerical instability.")


class Loses(nn.Module):
    """(1 + e) - 1 keeps the digits of e that are not below 2^-24: about 7 - k for e = 10^-k."""

    def forward(self, x: Tensor) -> Tensor:
        y = x / 3.0
        return (y + 1.0) - 1.0


@pytest.mark.parametrize("power, few, many", [(5, True, True), (1, False, False)])
def test_the_threshold_is_the_number_of_digits(power: int, few: bool, many: bool) -> None:
    x = torch.full((40,), 10.0**-power)
    counts = [totals(Loses(), x, digits=d).get("cancellation", 0) for d in (3, 7)]
    # Of 40 elements, some have equal samples by chance (1 in 4), which lose nothing that is seen.
    assert (counts[0] >= 20) == few and counts[0] >= counts[1]
    assert (counts[0] > 0) == many


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Each()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]  # type: ignore[no-any-return]


def test_places_and_the_line_of_totals() -> None:
    seed = next(s for s in range(12) if len(set(draws(s))) > 1)
    report = instabilities(Inner(), NOISE, seed=seed)
    (cancels, divides) = report.nodes
    assert (cancels.kind, cancels.module, cancels.operator) == ("cancellation", "layer", "aten.sub.Tensor")
    assert cancels.code == "return (x[0] + x[1]) - x[2]" and cancels.source.startswith("test_instabilities.py:")
    assert (divides.kind, divides.count, divides.elements, divides.index) == ("division", 2, 2, (0,))
    said = "3 numerical instabilities: unstable divisions 2, losses of accuracy by cancellation 1."
    assert str(report).endswith(said)
    assert json.loads(report.to_json())["totals"]["division"] == 2


def test_digits_are_those_of_students_distribution() -> None:
    samples = [1.00001, 1.00002, 0.99999]
    want = math.log10(3**0.5 * abs(statistics.mean(samples)) / (STUDENT * statistics.stdev(samples)))
    assert math.isclose(common_digits(torch.tensor(samples, dtype=torch.float64), 15).item(), want, rel_tol=1e-9)
    rows = torch.tensor([[1.0, 0.0, 1.0, -2.0], [1.0, 0.0, -1.0, -2.0], [1.0, 0.0, 0.5, -2.0]], dtype=torch.float64)
    assert common_digits(rows, 7).tolist() == [7, 0, 0, 7]
    # The digits do not depend on the exponent, whose square may be beyond the range.
    for power in (-1000, -560, 560, 1000):
        scaled = torch.tensor([1.0, 1.5, 2.0], dtype=torch.float64).ldexp(torch.tensor(power)).unsqueeze(1)
        assert common_digits(scaled, 15).item() == common_digits(scaled.ldexp(torch.tensor(-power)), 15).item()


@pytest.mark.parametrize("digits", [0, 16, 2.0, True])
def test_other_digits_are_refused(digits: object) -> None:
    with pytest.raises(ValueError, match="expected 1 to 15"):
        instabilities(Stable(), torch.ones(2), digits=digits)  # type: ignore[arg-type]


def test_a_policy_that_draws_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'reproducible' draws nothing.*use 'cestac'"):
        instabilities(Stable(), torch.ones(2), "reproducible")
