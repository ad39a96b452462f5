"""What roundings lose, compared with the specification over fractions: every random word of short ones, every step."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from fxround.kernels import from_text
from fxround.kernels.kinds import Contract, Reduce
from fxround.kernels.losses import (
    contract_losses,
    has_losses,
    loss_kernel,
    reduce_losses,
    scan_losses,
    scatter_losses,
    unpacked,
)
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.modes import Rounding
from fxround.numerics.specification.exact import round_exact
from fxround.runtime.contributions import Contributions
from fxround.runtime.cpu.reduction import run_reduce, run_scan
from fxround.runtime.cpu.scatter import run_scatter
from fxround.runtime.draw import NO_KEY, Draw
from fxround.runtime.run import run_kernel, run_product

FORMATS = ("binary32", "bfloat16", "binary16", "e4m3fn", "e5m2", "ieee(4,3)", "fixed(8,4)", "e2m1fn")
MODES = (
    "nearest_even",
    "toward_zero",
    "stochastic",
    "stochastic:3",
    "stochastic:8",
    "stochastic_b:3",
    "stochastic_c:3",
    "stochastic_equal",
    "up_down",
)


def moments(x: Fraction, rounding: Rounding) -> tuple[Fraction, Fraction]:
    """Mean and variance of R(x) - x over all random words; of 32 bits, where the probability is the lost fraction."""
    n = rounding.mode.random_bits
    if n <= 8:
        words = [k << (32 - n) for k in range(1 << n)] if n else [0]
        weights = [Fraction(1, len(words))] * len(words)
    else:
        words = [0, (1 << 32) - 1]
        low, high = (Fraction(round_exact(x, x < 0, rounding, word)) for word in words)
        # The probability has 32 bits; the test's tolerance is wider.
        p = (x - low) / (high - low) if high != low else Fraction(0)
        weights = [1 - p, p]
    errors = [Fraction(round_exact(x, x < 0, rounding, word)) - x for word in words]
    mean = sum(w * e for w, e in zip(weights, errors, strict=True))
    return Fraction(mean), Fraction(sum(w * (e - mean) ** 2 for w, e in zip(weights, errors, strict=True)))


def square(x: Fraction, rounding: Rounding) -> Fraction:
    """The mean of (R(x) - x)^2 over all random words."""
    mean, variance = moments(x, rounding)
    return variance + mean * mean


def close(measured: float, exact: Fraction, scale: Fraction, part: float) -> bool:
    """Whether a figure is within a part of a scale: sums of squares are rounded, they are no bits of a model."""
    return abs(Fraction(measured) - exact) <= Fraction(part) * scale


@pytest.mark.part(4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_mean_and_variance_are_those_over_all_random_words(fmt: str, mode: str) -> None:
    rounding = Rounding.parse(f"{fmt}/{mode}")
    edge = rounding.format.maximum if rounding.format.maximum < 1e4 else 100.0
    values = torch.randn(40, dtype=torch.float64) * edge / 5
    values = torch.cat([values.clamp(-0.9 * edge, 0.9 * edge), values[:8].bfloat16().double() / 64, torch.zeros(1)])
    mean, variance = run_kernel(loss_kernel(rounding), [values], NO_KEY)
    for x, m, v in zip(values.tolist(), mean.tolist(), variance.tolist(), strict=True):
        expected_mean, expected = moments(Fraction(x), rounding)
        gap = Fraction(round_exact(Fraction(x), x < 0, rounding, (1 << 32) - 1)) - Fraction(
            round_exact(Fraction(x), x < 0, rounding, 0)
        )
        assert close(m, expected_mean, max(abs(expected_mean), abs(gap)), 2.0**-30), (x, m, float(expected_mean))
        assert close(v, expected, max(expected, gap * gap), 2.0**-30), (x, v, float(expected))


ACCUMULATIONS = (
    "binary32/stochastic/inf",
    "bfloat16/stochastic/inf",
    "binary16/stochastic/inf",
    "bfloat16/stochastic:5/inf",
    "binary32/up_down/inf",
    "bfloat16/stochastic_equal/inf",
    "binary32/stochastic/inf product=bfloat16/stochastic/inf",
    "bfloat16/stochastic/inf chunk=4 combine=binary32/nearest_even/inf",
    "bfloat16/stochastic/inf chunk=4 combine=binary32/stochastic/inf",
)


def contracted(kernel: Contract, a: Tensor, b: Tensor) -> Tensor:
    return run_product(kernel, a[None], b[None], 1, Draw(3, 1, 5))[0]


@pytest.mark.part(2)
@pytest.mark.parametrize("text", ACCUMULATIONS)
def test_a_chain_carries_the_variance_of_every_step_on_its_own_path(text: str) -> None:
    how, length = Accumulation.parse(text), 11
    kernel = from_text.contract(text, "binary32", ("f32", "f32"), "f32")
    a, b = torch.randn(3, length), torch.randn(length, 4)
    a[0, 2] = 0
    values, variance = unpacked(contracted(contract_losses(how, kernel), a, b))
    assert torch.equal(values.float(), contracted(kernel, a, b))
    if how.chunk or how.product:
        return  # the prefixes of the chain are not results; the samples below judge these
    expected = [[Fraction(0)] * 4 for _ in range(3)]
    before = torch.zeros(3, 4)
    for k in range(length):
        after = contracted(kernel, a[:, : k + 1].contiguous(), b[: k + 1].contiguous())
        for i in range(3):
            for j in range(4):
                x = Fraction(float(before[i, j])) + Fraction(float(a[i, k])) * Fraction(float(b[k, j]))
                expected[i][j] += square(x, how.step)
        before = after
    for i in range(3):
        for j in range(4):
            # Each step rounds the sum to 20 bits.
            assert close(float(variance[i, j]), expected[i][j], expected[i][j], length * 2.0**-19), (i, j)


@pytest.mark.parametrize("text", ACCUMULATIONS[6:])
def test_samples_of_a_chain_have_the_mean_of_the_variances_of_their_paths(text: str) -> None:
    # Each step is unbiased, so that the variance of the result is the mean of the sums of variances over paths. Of
    # 4,000 samples of 60 elements, the ratio of both has a deviation of less than 0.01; 0.05 is never exceeded.
    kernel = from_text.contract(text, "binary32", ("f32", "f32"), "f32")
    losses = contract_losses(Accumulation.parse(text), kernel)
    a, b = torch.randn(6, 12), torch.randn(12, 10)
    packed = [unpacked(run_product(losses, a[None], b[None], 1, Draw(1, i, 2))[0]) for i in range(4000)]
    values, variances = (torch.stack(parts).double() for parts in zip(*packed, strict=True))
    assert abs(float(variances.mean() / values.var(0).mean()) - 1) < 0.05


@pytest.mark.parametrize("order", ["sequential", "lanes:16"])
def test_a_sum_carries_its_variance_in_every_order(order: str) -> None:
    text = "bfloat16/stochastic/inf"
    how = Accumulation.parse(text)
    kernel = from_text.total(order, text, "binary32", "f32")
    assert isinstance(kernel, Reduce)
    losses, x = reduce_losses(how, kernel), torch.randn(20, 50)
    packed = [unpacked(run_reduce(losses, x, Draw(1, i, 2))) for i in range(2000)]
    values, variances = (torch.stack(parts).double() for parts in zip(*packed, strict=True))
    assert torch.equal(values[7].float(), run_reduce(kernel, x, Draw(1, 7, 2)))
    assert abs(float(variances.mean() / values.var(0).mean()) - 1) < 0.05


def test_a_product_multiplies_what_was_lost_by_the_factors_that_follow() -> None:
    from fxround.kernels.reductions import prod_kernel

    how = Accumulation.parse("bfloat16/stochastic/inf")
    kernel = prod_kernel(how, Rounding.parse("binary32"), "f32", "f32")
    losses, x = reduce_losses(how, kernel), 1 + torch.rand(20, 12)
    packed = [unpacked(run_reduce(losses, x, Draw(1, i, 2))) for i in range(2000)]
    values, variances = (torch.stack(parts).double() for parts in zip(*packed, strict=True))
    assert torch.equal(values[7].float(), run_reduce(kernel, x, Draw(1, 7, 2)))
    assert abs(float(variances.mean() / values.var(0).mean()) - 1) < 0.05


def test_a_scan_has_the_variance_of_each_step() -> None:
    from fxround.kernels.reductions import cumsum_kernel

    how = Accumulation.parse("bfloat16/stochastic/inf")
    kernel = cumsum_kernel(how, Rounding.parse("binary32"), "f32", "f32")
    x = torch.randn(5, 9)
    values, variance = unpacked(run_scan(scan_losses(how, kernel), x, Draw(1, 3, 2)))
    assert torch.equal(values.float(), run_scan(kernel, x, Draw(1, 3, 2)))
    for i in range(5):
        before = Fraction(0)
        for k in range(9):
            expected = square(before + Fraction(float(x[i, k])), how.step)
            assert close(float(variance[i, k]), expected, expected, 2.0**-18)
            before = Fraction(float(values[i, k]))


def test_a_scatter_carries_the_variance_of_its_additions() -> None:
    how = Accumulation.parse("bfloat16/stochastic/inf")
    kernel = from_text.scatter(str(how), "f32")
    x, source = torch.randn(4, 3), torch.randn(10, 3)
    rows = torch.tensor([0, 1, 1, 3, 0, 0, 2, 3, 3, 0])
    packed = run_scatter(scatter_losses(how, kernel), x, Contributions(rows, source), Draw(1, 3, 2))
    values, variance = unpacked(packed)
    assert torch.equal(values.float(), run_scatter(kernel, x, Contributions(rows, source), Draw(1, 3, 2)))
    one = torch.zeros_like(values)
    expected = [[Fraction(0)] * 3 for _ in range(4)]
    one.copy_(x)
    for k in range(10):
        after = run_scatter(kernel, x, Contributions(rows[: k + 1], source[: k + 1]), Draw(1, 3, 2))
        for j in range(3):
            r = int(rows[k])
            expected[r][j] += square(Fraction(float(one[r, j])) + Fraction(float(source[k, j])), how.step)
        one = after
    for r in range(4):
        for j in range(3):
            assert close(float(variance[r, j]), expected[r][j], expected[r][j], 2.0**-16)


def test_the_variance_is_not_finite_where_the_accumulator_is_not() -> None:
    text = "binary32/stochastic/inf"
    kernel = contract_losses(Accumulation.parse(text), from_text.contract(text, "binary32", ("f32", "f32"), "f32"))
    values, variance = unpacked(contracted(kernel, torch.full((1, 4), torch.inf), torch.ones(4, 1)))
    assert bool(values.isinf().all()) and not bool(variance.isfinite().any())


def test_a_chain_beyond_binary32_keeps_its_path() -> None:
    # A step of a chain has the exponents of binary64.
    text = "binary32/stochastic/inf"
    kernel = from_text.contract(text, "binary32", ("f32", "f32"), "f32")
    a, b = torch.tensor([[3e38, 3e38, -3e38, -3e38, 1e-30, 1e-30]]), torch.tensor([[1.0, 1, 1, 1, 1.1e-12, 1.7e-12]]).T
    values, variance = unpacked(contracted(contract_losses(Accumulation.parse(text), kernel), a, b.contiguous()))
    assert torch.equal(values.float(), contracted(kernel, a, b.contiguous())) and bool(variance.isfinite().all())


@pytest.mark.parametrize(
    "text",
    [
        "bfloat16/nearest_even product=bfloat16/stochastic",
        "binary64/stochastic",
        "bfloat16/stochastic faults=sign:1e-3",
    ],
)
def test_chains_whose_losses_are_not_known_are_named(text: str) -> None:
    assert not has_losses(Accumulation.parse(text))


def test_formats_whose_losses_binary64_does_not_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="what it loses is not a binary64 number"):
        loss_kernel(Rounding.parse("binary64/stochastic"))
