"""``fxround.attribute``: bits of the policy's run, exact enumerations, runs in binary64, and samples."""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from layers import Calls
from models import build
from torch import Tensor, nn
from torch.nn import functional as F

import fxround
from fxround.attribution.functions import function_of
from fxround.attribution.linearized import Linearized
from fxround.attribution.one_pass import MOVES
from fxround.attribution.report import noise_of
from fxround.attribution.subject import Subject
from fxround.errors import UnsupportedOperator, UnsupportedRounding
from fxround.fingerprint import hash as bits_of
from fxround.numerics.arithmetic.operators import OPERATORS
from fxround.numerics.modes import Rounding
from fxround.numerics.specification.exact import quantum, round_exact
from fxround.operators.rules import RULES

POLICIES = ("stochastic", "bfloat16", "up_down", "cestac", "e4m3fn/stochastic", "mxfp4", "reproducible")


@pytest.fixture
def ctrl_c(monkeypatch: pytest.MonkeyPatch) -> Callable[[type, str, int], None]:
    """Send Ctrl-C in the n-th call of a method."""

    def at(owner: type, name: str, number: int) -> None:
        method, calls = getattr(owner, name), itertools.count(1)

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGINT)
            return method(*args, **kwargs)

        monkeypatch.setattr(owner, name, interrupted)

    return at


def test_ctrl_c_keeps_the_random_directions_that_are_complete(ctrl_c: Any) -> None:
    net, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 300)), torch.rand(1, 4)
    ctrl_c(Linearized, "backward", 3)
    report = fxround.attribute(net, x, check=5)
    again = fxround.attribute(net, x)
    assert report.interrupted and "INTERRUPTED" in str(report) and report.to_dict()["interrupted"]
    assert (report.samples, report.measured, report.layers) == (0, None, ())
    assert report.uncertainty > 0
    # Each share is a quotient that is rounded to binary64, so that their sum need not be 1.
    assert sum(row.share for row in report.rows) == pytest.approx(1, rel=1e-12)
    assert not again.interrupted and "INTERRUPTED" not in str(again)


def test_ctrl_c_keeps_the_samples_that_are_complete(ctrl_c: Any) -> None:
    net, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh()), torch.rand(1, 4)
    whole = fxround.attribute(net, x, check=3)
    ctrl_c(Subject, "evaluated", 3)
    report = fxround.attribute(net, x, check=9)
    assert report.interrupted and (report.samples, report.layers) == (3, ())
    assert (report.rows, report.measured) == (whole.rows, whole.measured)


def test_ctrl_c_before_shares_are_complete_says_so(ctrl_c: Any) -> None:
    ctrl_c(Linearized, "backward", 2)
    with pytest.raises(KeyboardInterrupt, match="2 of 3 backward passes are complete, and shares need all"):
        fxround.attribute(nn.Linear(4, 3), torch.rand(1, 4))


def test_ctrl_c_leaves_out_formats_that_are_not_complete(ctrl_c: Any) -> None:
    net, x = nn.Linear(4, 3), torch.rand(1, 4)
    ctrl_c(Linearized, "backward", 2)
    report = fxround.attribute(net, x, "bfloat16", formats=["e4m3fn"])
    assert report.interrupted and report.formats == () and len(report.sensitivity) == len(report.rows)


@pytest.mark.parametrize("policy, steps", [("stochastic", 1 + 3), ("bfloat16", 1 + 1)])
def test_each_pass_is_a_step(policy: str, steps: int, caplog: pytest.LogCaptureFixture) -> None:
    """The run, then a pass for each of three elements, or one in the direction of the error."""
    with caplog.at_level(logging.INFO, "fxround"):
        fxround.attribute(nn.Linear(4, 3), torch.rand(1, 4), policy, progress=False)
    said = [record.getMessage() for record in caplog.records]
    assert [text.partition(" and ")[0] for text in said] == [f"Linear attribution: ended after {steps} steps"]


class Chain(nn.Module):
    """Four additions, each of which rounds what the ones before have drawn."""

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return (((a + b) + c) + b) + c


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 20), nn.Tanh(), nn.LayerNorm(20), nn.Linear(20, 6), nn.Softmax(-1)).eval()


@pytest.mark.part(3)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_run_has_the_bits_of_the_policy(policy: str) -> None:
    model, x = mlp(), torch.randn(5, 24)
    report = fxround.attribute(model, x, policy, seed=3, sample=2)
    compiled = fxround.compile(model, policy, unroll_loops=True).reseed(3, 2)
    with torch.no_grad():
        expected = compiled(x)
    assert report.result is not None and torch.equal(report.result, expected.double())


@pytest.mark.parametrize("size", [1e-22, 3e18, 1e20])
@pytest.mark.parametrize(
    "model", [Calls(torch.mm), Calls(lambda a, b: (a * b).sum(1)), Calls(lambda a, b: (a @ b).exp())]
)
def test_sums_beyond_the_range_have_the_bits_of_the_policy(model: nn.Module, size: float) -> None:
    """A store that draws, because sums are subnormal or overflow, runs by the policy's own kernel."""
    a, b = torch.randn(32, 32) * size, torch.randn(32, 32) * size
    report = fxround.attribute(model, (a, b), "stochastic", seed=3, sample=2)
    with torch.no_grad():
        expected = fxround.compile(model, "stochastic").reseed(3, 2)(a, b)
    assert report.result is not None and bits_of(report.result) == bits_of(expected.double())


# ---- exact answers ----


def paths(values: list[float], rounding: Rounding) -> dict[tuple[float, ...], tuple[Fraction, Fraction]]:
    """For every path of partial sums: its probability, and the sum of the variances of its roundings, exactly."""
    known: dict[tuple[float, ...], tuple[Fraction, Fraction]] = {(values[0],): (Fraction(1), Fraction(0))}
    for value in values[1:]:
        longer: dict[tuple[float, ...], tuple[Fraction, Fraction]] = {}
        for path, (probability, variance) in known.items():
            x = Fraction(path[-1]) + Fraction(value)
            low, high = (round_exact(x, x < 0, rounding, word) for word in (0, (1 << 32) - 1))
            gap = Fraction(high) - Fraction(low)
            p = (x - Fraction(low)) / gap if gap else Fraction(0)
            for outcome, own in ((low, 1 - p), (high, p)):
                if own:
                    before = longer.get((*path, outcome), (Fraction(0), Fraction(0)))
                    longer[*path, outcome] = before[0] + probability * own, variance + p * (1 - p) * gap * gap
        known = longer
    return known


@pytest.mark.part(2)
@pytest.mark.parametrize("fmt", ["ieee(5,3)", "bfloat16", "binary16"])
def test_the_variance_of_a_path_is_exact_and_its_mean_is_the_variance_of_the_result(fmt: str) -> None:
    a, b, c = 1.0, 0.3720703125, -0.21240234375
    values, rounding = [a, b, c, b, c], Rounding.parse(f"{fmt}/stochastic/inf")
    known = paths(values, rounding)
    # The law of total variance: each step is unbiased, so that the mean of the paths' sums is the result's variance.
    mean = sum(p * Fraction(path[-1]) for path, (p, _) in known.items())
    of_result = sum(p * (Fraction(path[-1]) - mean) ** 2 for path, (p, _) in known.items())
    assert sum(p * v for p, v in known.values()) == of_result > 0
    # The operands themselves are values of the format: only the sums draw.
    policy = fxround.Policy("sums", (fxround.Rule(rounding=rounding, accumulate="binary32"),))
    operands = [torch.tensor([value]) for value in (a, b, c)]
    if fmt == "ieee(5,3)":
        operands = [fxround.round(operand, f"{fmt}/nearest_even") for operand in operands]
        values = [float(operands[i]) for i in (0, 1, 2, 1, 2)]
        known = paths(values, rounding)
    compiled = fxround.compile(Chain(), policy, unroll_loops=True)
    seen = set()
    for sample in range(12):
        report = fxround.attribute(Chain(), tuple(operands), policy, sample=sample)
        with torch.no_grad():
            steps = [
                float(value)
                for name, value in compiled.reseed(0, sample)._entry(tuple(operands), {}).steps(operands, compiled.rng)
                if name.startswith("add") and isinstance(value, Tensor)
            ]
        path = (values[0], *(s for s in steps))
        matching = [v for p, (_, v) in known.items() if p[-1] == path[-1] and set(p[1:]) <= set(path)]
        assert any(report.deviation**2 == pytest.approx(float(v), rel=1e-6) for v in matching), (path, report)
        seen.add(path)
    assert len(seen) > 1


def test_the_only_rounding_has_all_of_the_variance() -> None:
    x, y = torch.rand(50) + 0.5, torch.rand(50) + 0.5
    report = fxround.attribute(Calls(torch.mul), (x, y), "stochastic", elements=True)
    assert report.elements is not None
    for a, b, deviation in zip(x.tolist(), y.tolist(), report.elements.tolist(), strict=True):
        product = Fraction(a) * Fraction(b)
        q = quantum(product, fxround.formats["binary32"])
        lost = product % q
        assert deviation**2 == pytest.approx(float(lost * (q - lost)), rel=1e-6)
    assert [row.share for row in report.rows] == [1.0]
    assert report.rows[0].operator == "aten.mul.Tensor"


def test_what_is_moved_keeps_its_deviation_and_a_choice_its_doubt() -> None:
    assert {RULES[name].kind for name in MOVES - {"aten.where.self"}} == {"movement"}

    def moved(x: Tensor, y: Tensor) -> Tensor:
        sums = (x + y).reshape(4, 6).t().unsqueeze(0).expand(2, 6, 4)
        first, second = torch.cat([sums, y.reshape(1, 6, 4)]).flip(1).split([2, 1])
        chosen = torch.where(torch.ones(6, 4, dtype=torch.bool), first[1], second[0])
        return torch.relu(torch.stack([first[0], second[0], chosen.clone()]))

    x, y = torch.rand(24) + 1, torch.rand(24)
    report = fxround.attribute(Calls(moved), (x, y), "stochastic", elements=True)
    alone = fxround.attribute(Calls(torch.add), (x, y), "stochastic", elements=True)
    assert report.elements is not None and alone.elements is not None
    sums = alone.elements.reshape(4, 6).t().flip(0)
    assert torch.equal(report.elements, torch.stack([sums, torch.zeros(6, 4), sums])) and report.trusted


def test_the_sensitivity_of_a_result_is_the_error_of_the_format() -> None:
    x = torch.randn(60)
    report = fxround.attribute(Calls(torch.tanh), x, "reproducible", formats=("bfloat16", "e4m3fn"))
    (row,) = report.rows
    result = report.result
    assert result is not None
    for fmt, deviation in zip(report.formats, row.sensitivity, strict=True):
        error = fxround.round(result.float(), fmt).double() - result
        assert deviation == pytest.approx(float(error.square().mean().sqrt()), rel=1e-12)


class Blurring(nn.Module):
    """Means of convolutions: errors of many elements are added up with their signs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.sigmoid(self.first(x))).exp().mean((2, 3))


@pytest.mark.part(3)
@pytest.mark.parametrize("fmt, most", [("bfloat16", 0.02), ("e4m3fn", 0.2)])
@pytest.mark.parametrize(
    "model, shape, sites",
    [
        (mlp(), (7, 24), ["0 aten.mm", "0 aten.add", "1 aten.tanh", "2 aten.rsqrt", "3 aten.mm"]),
        (
            Blurring(),
            (2, 2, 8, 8),
            ["first aten.convolution", " aten.sigmoid", "second aten.convolution", " aten.exp", " aten.sum"],
        ),
    ],
    ids=["mlp", "blurring"],
)
def test_the_sensitivity_to_a_format_is_what_a_rule_of_that_format_does(
    model: nn.Module, shape: tuple[int, ...], sites: list[str], fmt: str, most: float
) -> None:
    x = torch.randn(*shape)
    report = fxround.attribute(model, x, "reproducible", formats=(fmt,))
    everywhere = fxround.Rule(rounding="binary32", accumulate="binary32")
    with torch.no_grad():
        plain = fxround.compile(model, fxround.Policy("plain", (everywhere,)), unroll_loops=True)(x).double()
        for site in sites:
            module, operator = site.split(" ")
            (row,) = [r for r in report.rows if r.operator.startswith(f"{operator}.") and r.module == module]
            name = operator.removeprefix("aten.")
            rule = fxround.Rule(module or "*", operator=name, rounding=fmt, accumulate="binary32")
            policy = fxround.Policy("one site", (everywhere, rule))
            error = fxround.compile(model, policy, unroll_loops=True)(x).double() - plain
            # Not bits: a prediction of first order differs by terms of second order in the format's error, and by the
            # errors of binary32; probes add 9 % where more than 64 elements have one site.
            assert row.sensitivity[0] == pytest.approx(float(error.square().mean().sqrt()), rel=most), site


def test_formats_that_draw_have_a_sensitivity() -> None:
    x = torch.rand(40) + 0.5
    (row,) = fxround.attribute(Calls(torch.tanh), x, "reproducible", formats=("bfloat16/stochastic",)).rows
    sampled = fxround.attribute(Calls(torch.tanh), x, "bfloat16/stochastic", check=200)
    own = [one.deviation for one in sampled.rows if one.node == "tanh"]
    # Not bits: the second one reads the residuals of inputs that are rounded, 40 of them, each uniform: their root mean
    # square varies by 10 %.
    assert row.sensitivity[0] == pytest.approx(own[0], rel=0.3)


def test_exact_sums_and_products_lose_nothing() -> None:
    numbers = torch.randint(-8, 9, (6, 6)).float()
    report = fxround.attribute(Calls(torch.mm), (numbers, numbers), "stochastic")
    assert report.deviation == 0 and all(row.share == 0 for row in report.rows)


# ---- runs in binary64 ----


@pytest.mark.part(2)
@pytest.mark.parametrize("name", ["digits_cnn", "unet", "recurrent", "encoder"])
def test_the_error_of_a_deterministic_policy_is_that_against_binary64(name: str) -> None:
    example = build(name)
    report = fxround.attribute(example.model, (example.args, example.kwargs), "bfloat16", output=example.result)
    assert report.measured is not None and report.ratio is not None and report.gained is not None
    assert report.ratio == pytest.approx(1, abs=0.02)  # of second order: a hundredth of 2^-8 at most
    assert report.gained > 4
    # Forward and backward derivatives are computed apart: the shares add up only if both are right.
    assert sum(row.share for row in report.rows) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("policy", ["mxfp4", "nvfp4", "e4m3fn", "fixed(16,10)", "int8:channel"])
def test_scaled_and_narrow_formats_have_an_error(policy: str) -> None:
    # One product: every rounding enters it linearly, so that only products of two errors are missed.
    report = fxround.attribute(nn.Linear(64, 8).eval(), torch.randn(16, 64), policy)
    assert report.ratio == pytest.approx(1, abs=0.1)
    assert sum(row.share for row in report.rows) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("policy", ["reproducible", "bfloat16"])
def test_the_gradients_of_a_loss_are_attributed(policy: str) -> None:
    model, x, target = mlp()[:4].train(), torch.randn(9, 24), torch.randint(0, 6, (9,))
    report = fxround.attribute(model, x, policy, loss=lambda y: F.cross_entropy(y, target))
    assert report.ratio == pytest.approx(1, abs=0.02)
    assert report.gained is not None and report.gained > 4
    assert sum(row.share for row in report.rows) == pytest.approx(1, abs=1e-4)
    assert {"mm_4", "loss_0"} <= {row.node for row in report.rows}
    compiled = fxround.compile(model, policy, unroll_loops=True)
    F.cross_entropy(compiled(x), target).backward()
    gradients = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    assert report.result is not None and torch.equal(report.result, gradients.double())


@pytest.mark.parametrize(
    "loss",
    [
        lambda y: F.binary_cross_entropy(torch.sigmoid(y), torch.linspace(0, 1, 54).reshape(9, 6)),
        lambda y: F.huber_loss(y.float(), torch.ones(9, 6)),
        lambda y: (y.to(torch.float32) - torch.ones(9, 6)).abs_().square().mean(),
    ],
    ids=["binary cross entropy", "huber", "in place"],
)
def test_a_loss_with_targets_of_its_own_dtype(loss: Any) -> None:
    model, x = mlp()[:4].train(), torch.randn(9, 24)
    report = fxround.attribute(model, x, "reproducible", loss=loss)
    # Of second order, as above; the second figure is one of samples.
    assert report.ratio == pytest.approx(1, abs=0.02) and report.gained is not None and report.gained > 4
    sampled = fxround.attribute(mlp()[:4], x, "stochastic", output=loss, check=200)
    assert sampled.ratio == pytest.approx(1, abs=SAMPLED)


def test_a_function_that_writes_into_a_tensor_of_its_own() -> None:
    def output(y: Tensor) -> Tensor:
        made = torch.zeros(9, 6)
        torch.mul(y.float(), 2, out=made)
        return made

    with pytest.raises(RuntimeError, match="out="):
        fxround.attribute(mlp()[:4].eval(), torch.randn(9, 24), "stochastic", output=output)


def test_values_that_are_written_into_slices_keep_their_deviation() -> None:
    def written(x: Tensor, y: Tensor) -> Tensor:
        sums, made = x + y, x.new_zeros(4, 6)
        made[:, 1:3] = sums.reshape(4, 2)
        made[:, 4] = sums[5]
        made[2] = y[:6]
        return made

    x, y = torch.rand(8) + 1, torch.rand(8)
    report = fxround.attribute(Calls(written), (x, y), "stochastic", elements=True)
    alone = fxround.attribute(Calls(torch.add), (x, y), "stochastic", elements=True).elements
    assert report.elements is not None and alone is not None
    expected = torch.zeros(4, 6, dtype=torch.float64)
    expected[:, 1:3], expected[:, 4] = alone.reshape(4, 2), alone[5]
    expected[2] = 0
    assert torch.equal(report.elements, expected) and report.trusted


@pytest.mark.parametrize("loss", [None, lambda y: y.pow(3).sum()], ids=["a derivative", "gradients"])
def test_derivatives_of_values_that_are_written_into_slices(loss: Any) -> None:
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frequencies = nn.Parameter(torch.tensor([1.0, 2.0]))

        def forward(self, x: Tensor) -> Tensor:
            made = x.new_zeros(len(x), 4)
            made[:, :2] = torch.sin(torch.outer(x, self.frequencies))
            made[:, 2:] = torch.cos(torch.outer(x, self.frequencies))
            if loss is not None:
                return made
            (slope,) = torch.autograd.grad(made.pow(3).sum(), x, create_graph=True)
            return slope

    x = torch.linspace(0.1, 1.3, 9).requires_grad_(loss is None)
    report = fxround.attribute(Waves(), x, "bfloat16", loss=loss)
    assert report.ratio == pytest.approx(1, abs=0.02)  # of second order: a hundredth of 2^-8 at most


def test_the_gradient_of_an_index_behind_a_whole_dimension() -> None:
    class Picking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4, 5))

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.tanh(self.weight)[:, :, torch.tensor([0, 3, 3, 1])]

    report = fxround.attribute(Picking(), torch.randn(3, 4, 4), "bfloat16", loss=lambda y: y.square().sum())
    assert report.ratio == pytest.approx(1, abs=0.02)  # of second order: a hundredth of 2^-8 at most


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_training_step_is_attributed_and_changes_nothing(kind: Any) -> None:
    model, x, target = mlp()[:4].train(), torch.randn(9, 24), torch.randint(0, 6, (9,))
    optimizer = fxround.compile_optimizer(kind(model.parameters(), lr=0.01), "bfloat16/stochastic", seed=4)
    compiled = fxround.compile(model, "bfloat16/stochastic", seed=5, unroll_loops=True)
    before = bits_of(model), torch.get_rng_state(), repr(optimizer.state_dict())
    report = fxround.attribute(
        model, x, "bfloat16/stochastic", loss=lambda y: F.cross_entropy(y, target), optimizer=optimizer, seed=5
    )
    assert (bits_of(model), repr(optimizer.state_dict())) == (before[0], before[2])
    assert torch.equal(torch.get_rng_state(), before[1]) and all(p.grad is None for p in model.parameters())
    assert any(row.node.startswith("3.bias.") for row in report.rows)
    F.cross_entropy(compiled(x), target).backward()
    optimizer.step()
    after = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    assert report.result is not None and torch.equal(report.result, after.double())


# ---- samples ----

# The deviation of n samples of m independent elements has a relative error of 1 / sqrt(2 n m): 0.05 for 200 samples of
# one element, the worst case. A prediction reads the residuals of one run, which adds as much where few roundings
# dominate. A figure that is right exceeds 0.15 with a probability below 0.3 %, and the draws are those of every run.
SAMPLED = 0.15
# The logarithm of a sum near one, whose deviation is as large as its distance from one.
DOUBTED = [("digits_cnn", "cestac")]


@pytest.mark.part(4)
@pytest.mark.parametrize("policy", ["stochastic", "up_down", "cestac", "bfloat16/stochastic", "stochastic:6"])
@pytest.mark.parametrize("name", ["mlp", "digits_cnn", "encoder"])
def test_predicted_deviations_are_those_of_samples(name: str, policy: str) -> None:
    if policy == "stochastic:6":
        policy = "bfloat16/stochastic:6"
    if name == "mlp":
        model, inputs, output = mlp(), torch.randn(5, 24), None
    else:
        example = build(name)
        model, inputs, output = example.model, (example.args, example.kwargs), example.result
    report = fxround.attribute(model, inputs, policy, output=output, probes=8, check=200)
    assert report.ratio == pytest.approx(1, abs=SAMPLED)
    assert len(report.layers) > 3


def test_a_store_without_random_bits_after_drawn_steps() -> None:
    # The steps draw more than the store rounds: its error varies with them.
    rule = fxround.Rule(rounding="binary32/nearest_even", accumulate="bfloat16/stochastic")
    report = fxround.attribute(
        nn.Linear(64, 12).eval(), torch.randn(6, 64), fxround.Policy("mixed", (rule,)), probes=16, check=400
    )
    assert report.ratio == pytest.approx(1, abs=SAMPLED)


@pytest.mark.part(without=("gru",))
@pytest.mark.parametrize(
    "model",
    [
        nn.LSTM(5, 6, batch_first=True),
        nn.GRU(5, 6, batch_first=True),
        Calls(lambda x: x.cumsum(1)),
        Calls(lambda x: (x + 2).cumprod(1)),
        Calls(lambda x: (x + 2).prod(1)),
        Calls(lambda x: torch.zeros(3, 5).index_add(0, torch.tensor([0, 1, 1, 2]), x[0, :4])),
        Calls(lambda x: F.conv_transpose1d(x, torch.ones(4, 3, 2) / 3)),
    ],
    ids=["lstm", "gru", "cumsum", "cumprod", "prod", "scatter", "transposed"],
)
def test_chains_of_every_kind(model: nn.Module) -> None:
    report = fxround.attribute(model.eval(), torch.randn(6, 4, 5), "bfloat16/stochastic", probes=8, check=200)
    assert report.ratio == pytest.approx(1, abs=SAMPLED)


# ---- doubt ----


class AtZero(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(torch.sin(x) * torch.sin(x) + torch.cos(x) * torch.cos(x) - 1.0)


class Cancelling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 1 / ((x + 1e6) - 1e6 - x + 0.05)


class Saturated(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(torch.stack([x.sum(1), x.flip(1).sum(1)], 1) * 1e7, 1)


class Deciding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        s = torch.sin(x) * torch.sin(x) + torch.cos(x) * torch.cos(x)
        return torch.where(s > 1.0, x, -x)


def near_one(x: Tensor) -> Tensor:
    """Ones, but for rounding errors."""
    return torch.sin(x) * torch.sin(x) + torch.cos(x) * torch.cos(x)


class Gathering(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.gather(1, near_one(x).argmax(1, keepdim=True))


class Experts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = near_one(x).topk(2, 1)
        return (x.gather(1, chosen) * weights).sum(1)


class Masked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (near_one(x) > 1)


@pytest.mark.parametrize(
    "model, node",
    [
        (AtZero(), "relu"),
        (Cancelling(), "reciprocal"),
        (Saturated(), ""),
        (Deciding(), "where"),
        (Gathering(), "gather"),
        (Experts(), "gather"),
        (Masked(), ""),
    ],
)
def test_what_derivatives_miss_is_said(model: nn.Module, node: str) -> None:
    report = fxround.attribute(model, torch.randn(16, 32), "stochastic")
    assert not report.trusted and report.doubtful
    assert not node or report.doubtful[0].node == node
    assert "Do not rely on these figures" in str(report) and "Doubtful: at" in str(report)


class Rooted(nn.Module):
    """The square root has an infinite derivative at 0, which no rounding error meets for the input 0 or -1."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(x * x + x)


@pytest.mark.parametrize("policy", ["stochastic", "bfloat16"])
def test_an_infinite_derivative_where_nothing_is_lost_costs_nothing(policy: str) -> None:
    x = torch.tensor([0.0, -1.0, 1.3, 2.6])
    whole = fxround.attribute(Rooted(), x, policy, formats=("e4m3fn",), check=200)
    rest = fxround.attribute(Rooted(), x[2:], policy, formats=("e4m3fn",), check=200)
    assert whole.trusted and whole.ratio == pytest.approx(1, abs=SAMPLED)
    # The root mean square is over twice as many elements. Not bits: the runs draw other bits, and the residuals of two
    # elements decide each figure.
    assert whole.deviation == pytest.approx(rest.deviation / 2**0.5, rel=0.3)
    for row in whole.rows:
        assert all(0 < tried < 1 for tried in row.sensitivity), row


def test_an_infinite_derivative_that_meets_an_error_is_a_doubt_and_no_nan() -> None:
    x, y = torch.rand(40) + 1, torch.rand(40) + 1
    model = Calls(lambda a, b: torch.cat([a * b, torch.sqrt(torch.abs(a * b - (a * b).detach()))]))
    report = fxround.attribute(model, (x, y))
    # Shares are quotients in binary64, which are added here.
    assert sum(row.share for row in report.rows) == pytest.approx(1)
    assert report.deviation > 0 and all(row.doubt >= 0 for row in report.rows)
    assert not report.trusted and report.doubtful[0].doubt == float("inf")
    assert "an unknown part of the deviation" in str(report)


@pytest.mark.parametrize("rounding", ["bfloat16/stochastic", "bfloat16"])
def test_a_step_of_adam_where_gradients_are_zero(rounding: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    with torch.no_grad():
        # A relu that is off for every input: its weights have gradients of zero, and their second moments are zero.
        first: Any = model[0]
        first.weight[0], first.bias[0] = 0.0, -0.3
    optimizer = fxround.compile_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01), rounding)
    report = fxround.attribute(
        model, torch.rand(6, 4), rounding, loss=lambda y: y.square().mean(), optimizer=optimizer, check=200
    )
    # Forward and backward derivatives are computed apart; the ratio is one of samples.
    assert sum(row.share for row in report.rows) == pytest.approx(1, abs=1e-4)
    assert report.trusted and report.ratio == pytest.approx(1, abs=SAMPLED)


class Largest(nn.Module):
    """The largest of rounded values; with ``ties``, of which three at a time are the same numbers."""

    def __init__(self, ties: int, nearly: bool = False) -> None:
        super().__init__()
        self.linear, self.ties, self.nearly = nn.Linear(8, 8), ties, nearly

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.linear(x))
        h = near_one(h) * h.detach().sum() if self.nearly else h
        return torch.cat([h] * self.ties, 1).amax(1)


class Aggregating(Largest):
    """The largest of the values of three equal neighbours and others, as in a graph network."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.linear(x))
        source, target = torch.tensor([0, 0, 0, 1, 2, 2, 2, 3]), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
        into = target[:, None].expand(-1, 8)
        return torch.zeros(2, 8).scatter_reduce(0, into, h[source], "amax", include_self=False)


@pytest.mark.parametrize("model", [Largest(1), Largest(3), Aggregating(1)], ids=["alone", "three", "aggregated"])
@pytest.mark.parametrize("policy", ["stochastic", "reproducible"])
def test_a_maximum_stays_equal_to_what_it_was_chosen_from(model: nn.Module, policy: str) -> None:
    report = fxround.attribute(model, torch.randn(8, 8), policy, loss=lambda y: y.square().sum())
    assert report.trusted and not report.doubtful, report.doubtful


def test_a_maximum_of_nearly_equal_values_is_doubted() -> None:
    report = fxround.attribute(Largest(1, nearly=True), torch.randn(8, 8), loss=lambda y: y.square().sum())
    assert not report.trusted


class Rare(nn.Module):
    """A sum, and a large multiple of its error where that is large: one run and one perturbation do not meet it."""

    def __init__(self, exact: float, least: float) -> None:
        super().__init__()
        self.exact, self.least = exact, least

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        total = (x * y).sum()
        return total + 10000 * F.relu((total - self.exact).abs() - self.least)


def test_samples_that_contradict_the_prediction_are_said() -> None:
    # The sum is small beside its partial sums, so that its errors have many values.
    x, y = torch.rand(256) - 0.5, torch.rand(256) * 8
    alone = fxround.attribute(Calls(lambda a, b: (a * b).sum()), (x, y), check=200)
    assert alone.agrees and alone.trusted and alone.noise is not None and alone.ratio is not None
    assert alone.noise[0] < alone.ratio < alone.noise[1]
    exact = torch.tensor(float((x.double() * y.double()).sum())).item()
    report = fxround.attribute(Rare(exact, 9 * alone.deviation), (x, y), check=200)
    model = Rare(exact, 2.2 * alone.deviation)
    quiet = next(i for i in range(20) if fxround.attribute(model, (x, y), sample=i).doubt < 0.1)
    rare = fxround.attribute(model, (x, y), check=200, sample=quiet)
    assert report.trusted
    # No derivative of the run misses anything; but some samples are far away.
    assert rare.doubt < 0.1 and rare.ratio is not None and rare.ratio < 0.3
    assert not rare.agrees and not rare.trusted
    assert "200 samples contradict the prediction, where chance explains" in str(rare)


def f_distribution(x: float, first: float, second: float) -> float:
    """The probability that a variable of the F distribution with two degrees of freedom is below x."""
    import mpmath

    share = first * x / (first * x + second)
    return float(mpmath.betainc(first / 2, second / 2, 0, share, regularized=True))


def test_the_ratios_that_chance_explains_are_quantiles() -> None:
    for variation, samples in itertools.product((0.03, 0.1, 0.2), (20, 60, 200, 1000)):
        low, high = noise_of(variation, samples)
        predicted, measured = 1 / (2 * variation**2), samples - 1
        # Not bits: Paulson's approximation of the quantiles of F, both of whose tails have 0.0005.
        assert f_distribution(low**2, predicted, measured) == pytest.approx(0.0005, rel=0.3)
        assert f_distribution(high**-2, measured, predicted) == pytest.approx(0.0005, rel=0.3)
    assert noise_of(0.1, 2)[1] == float("inf")


def test_few_probes_of_few_independent_elements_become_more() -> None:
    # All elements have one error: a square of a sum of random signs, which is uncertain by a factor.
    model = Calls(lambda a, b: (a * b).sum() * torch.tensor([2.0, 1.0]).repeat(400))
    report = fxround.attribute(model, (torch.rand(64), torch.rand(64)), probes=2, check=200)
    assert report.uncertainty < 0.15 * report.deviation
    # Two standard errors of the probes, 0.15 each, and those of samples.
    assert report.trusted and report.ratio == pytest.approx(1, abs=0.35)


def test_smooth_models_are_trusted() -> None:
    assert fxround.attribute(mlp(), torch.randn(5, 24)).trusted


def test_a_coarse_store_after_fine_steps_is_doubted() -> None:
    rule = fxround.Rule(rounding="bfloat16/nearest_even", accumulate="binary32/stochastic")
    report = fxround.attribute(nn.Linear(64, 12).eval(), torch.randn(6, 64), fxround.Policy("coarse", (rule,)))
    assert not report.trusted


# ---- what comes in and what goes out ----


@pytest.mark.parametrize("name", list(OPERATORS))
def test_every_scalar_operator_has_its_function(name: str) -> None:
    arity = OPERATORS[name].arity
    grid = [0.3, 0.75, 0.9] if name in ("atanh", "asin", "acos", "erfinv") else [1.25, 2.5, 3.75]
    grid = torch.tensor(grid).tolist()  # binary32 numbers
    for operands in itertools.islice(itertools.product(grid, repeat=arity), 9):
        operands = tuple(sorted(operands)) if name == "clamp" else operands
        computed = function_of(name)(*(torch.tensor(o, dtype=torch.float64) for o in operands))
        bits = [torch.tensor([o]) for o in operands]
        named = ", ".join(f"x{i}" for i in range(arity))
        text = f"t0 = {name}({named}) @ binary32/nearest_even/inf"
        rounded = torch.ops.fxround.pointwise(bits, text, torch.float32, torch.zeros(2, dtype=torch.int64), 0)
        # Rounded correctly to binary32; PyTorch's binary64 is nearer than half an ulp, but at a tie.
        assert abs(float(computed) - float(rounded)) <= abs(float(computed)) * 2.0**-24


def test_the_report_as_text_table_json_and_drawing(tmp_path: Path) -> None:
    report = fxround.attribute(mlp(), torch.randn(5, 24), formats=("bfloat16",), check=5, elements=True)
    text = str(report)
    assert "what each rounding costs" in text and "Measured by 5 samples" in text and "layer" in text
    assert len(report.sites) == len(report.rows)
    assert sum(row["share %"] for row in report.modules) == pytest.approx(100)  # type: ignore[misc]
    assert report.sensitivity.columns[-1] == "bfloat16/nearest_even/inf"
    data = json.loads(report.to_json())
    assert data["trusted"] and len(data["sites"]) == len(report.rows) and data["layers"][0]["bits"] > 15
    assert report.elements is not None and report.elements.shape == (5, 6)
    assert "50 %" in report.draw(tmp_path / "shares.svg").read_text()
    assert "<table" in report._repr_html_()
    assert "share" in report.to_html(tmp_path / "shares.html").read_text()


def test_an_output_function_and_its_kinks() -> None:
    model, x = mlp(), torch.randn(5, 24)
    margin = fxround.attribute(model, x, output=lambda y: y[0, 0] - y[0, 1])
    assert margin.shape == () and margin.uncertainty == 0 and margin.trusted
    assert margin.result is not None and margin.result.shape == ()
    with torch.no_grad():
        same = fxround.compile(model, "stochastic", unroll_loops=True)(x)
    assert fxround.attribute(model, x, output=lambda y: (y - same).abs().sum()).doubtful[0].node == "output"


@pytest.mark.parametrize(
    "arguments, kind, message",
    [
        ({"output": 3}, TypeError, "expected a function of the model's result"),
        ({"output": lambda y: "no"}, TypeError, "output returned a str; expected a floating-point tensor"),
        ({"check": 1}, ValueError, "at least 2 samples"),
        ({"probes": 0}, ValueError, "probes"),
        ({"optimizer": 3}, TypeError, "what fxround.compile_optimizer returns"),
        ({"loss": lambda y: y}, TypeError, "expected a floating-point tensor of one element"),
        ({"formats": ("nonsense",)}, ValueError, "nonsense"),
        ({"formats": ("binary64",)}, UnsupportedRounding, "model.float"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        fxround.attribute(mlp(), torch.randn(5, 24), **arguments)


def test_what_cannot_be_attributed_is_refused() -> None:
    with pytest.raises(UnsupportedRounding, match=r"^posit.*use a mode without random bits"):
        fxround.attribute(mlp(), torch.randn(5, 24), formats=("posit16/stochastic",))
    with pytest.raises(UnsupportedRounding, match=r"^fxround\.round in .*: posit.*use a mode without"):
        fxround.attribute(Chain(), (torch.rand(3),) * 3, "posit16/stochastic")
    with pytest.raises(UnsupportedRounding, match=r"model\.float"):
        fxround.attribute(nn.Linear(3, 2).double(), torch.randn(4, 3, dtype=torch.float64), "stochastic")
    with pytest.raises(UnsupportedOperator, match="complex"):
        fxround.attribute(Calls(lambda x: torch.fft.fft(x).sin().abs()), torch.randn(8), "stochastic")
    assert fxround.attribute(Calls(lambda x: torch.fft.fft(x).abs()), torch.randn(8), "stochastic").rows
    flips = fxround.Policy("flips", (fxround.Rule(rounding="bfloat16", faults="any:0.1"),))
    with pytest.raises(UnsupportedOperator, match="bits that flip are no roundings"):
        fxround.attribute(mlp(), torch.randn(5, 24), flips)
    target = torch.tensor([0, 1, 2, 3])
    with pytest.raises(UnsupportedOperator, match="loss: the derivative for aten::multi_margin_loss_backward"):
        fxround.attribute(nn.Linear(3, 4), torch.randn(4, 3), loss=lambda y: F.multi_margin_loss(y, target))
    with pytest.raises(ValueError, match="at most 4,096"):
        fxround.attribute(Calls(lambda x: x * x), torch.randn(5000), elements=True)
    with pytest.raises(ValueError, match="no result of the model depends on a parameter"):
        fxround.attribute(Calls(lambda x: x * x), torch.randn(5), loss=lambda y: y.sum())
    other = fxround.compile_optimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), "stochastic")
    with pytest.raises(ValueError, match="none of the model's parameters"):
        fxround.attribute(mlp()[:4], torch.randn(5, 24), loss=lambda y: y.sum(), optimizer=other)


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.turn).abs()


def test_complex_parameters_and_arguments_are_named() -> None:
    with pytest.raises(UnsupportedOperator, match=r"^parameter turn yields complex numbers"):
        fxround.attribute(Turned(), torch.randn(4))
    with pytest.raises(UnsupportedOperator, match=r"^argument 0 yields complex numbers"):
        fxround.attribute(Calls(torch.abs), torch.randn(4, dtype=torch.complex64))
