"""Rescaled channels: the same function over rational numbers, the same bits, and factors by independent formulas."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround.tuning.scaled_inputs import ScaledInputs
from tests.support.graph_rationals import exact, run_exactly


class Block(nn.Module):
    """A transformer block, with two large channels in its first norm."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        with torch.no_grad():
            self.norm1.weight[[3, 11]] *= 40
            self.norm2.weight[5] *= 60

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        scores = torch.softmax(self.q(y) @ self.k(y).transpose(1, 2) / 4, -1)
        x = x + self.out(scores @ self.v(y))
        result: Tensor = x + self.down(torch.relu(self.up(self.norm2(x))))
        return result


@cache
def block() -> tuple[Block, Tensor]:
    torch.manual_seed(0)
    return Block().eval(), torch.randn(8, 6, 16)


@cache
def fixed() -> Tensor:
    model, x = block()
    with torch.no_grad():
        y: Tensor = fxround.compile(model, "reproducible")(x)
    return y


@cache
def rescaled(method: Any) -> nn.Module:
    model, x = block()
    policy = {"policy": "int3:8", "grid": 4} if method == "awq" else {}
    return fxround.rescale_channels(model, x, method, **policy)  # type: ignore[arg-type]


def decibels(model: nn.Module, like: Tensor, policy: Any, x: Tensor) -> float:
    with torch.no_grad():
        y = fxround.compile(model, policy)(x)
    return float(10 * torch.log10(like.square().sum() / (y - like).square().sum()))


class Small(nn.Module):
    """Every place for factors: a norm, a layer behind a ReLU, a convolution, and the inputs of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(3), nn.Linear(3, 2), nn.Linear(3, 2, bias=False)
        self.c, self.d = nn.Conv1d(2, 3, 1), nn.Conv1d(3, 2, 2, padding=1)
        self.e = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        z = torch.relu(self.a(y)) + self.b(y)
        z = self.d(self.c(z.transpose(1, 2))).transpose(1, 2)
        result: Tensor = self.e(z) + z.sum()
        return result


def test_the_function_is_the_same_over_rational_numbers() -> None:
    torch.manual_seed(1)
    model, x = Small().eval(), torch.randint(-3, 4, (2, 2, 3)).float() / 4
    before = run_exactly(model, x)
    result = fxround.rescale_channels(model, x, alpha=0.7)
    report: Any = result.rescaling
    assert [(row.weights, row.into) for row in report.groups] == [
        (("a.weight", "b.weight"), ("norm.weight", "norm.bias")),
        (("c.weight",), ("a.weight", "a.bias", "b.weight")),
        (("d.weight",), ("c.weight", "c.bias")),
        (("e.weight",), ()),
    ]
    assert all((row.least, row.greatest) != (1, 1) for row in report.groups)
    assert isinstance(result.e, ScaledInputs) and result.state_dict().keys() >= model.state_dict().keys()
    assert (run_exactly(result, x) == before).all()
    # Factors that are no powers of two, by the places that the report names.
    rng, state = np.random.default_rng(0), {name: exact(t) for name, t in model.state_dict().items()}
    for row in report.groups:
        factors = exact(rng.integers(1, 9, row.channels)) / exact(rng.integers(1, 9, row.channels))
        for name in row.weights:
            weight = state[name]
            state[name] = (weight.swapaxes(1, -1) / factors).swapaxes(1, -1)
        for name in row.into:
            state[name] = (state[name].T * factors).T
        if not row.into:
            name = row.weights[0].replace("weight", "input_factor")
            state[name] = factors.reshape(result.get_buffer(name).shape)
    assert (run_exactly(result, x, state) == before).all()


@pytest.mark.parametrize("method", ["smoothquant", "awq"])
def test_powers_of_two_keep_every_bit(method: str) -> None:
    x, result = block()[1], rescaled(method)
    report: Any = result.rescaling
    assert all(math.frexp(f)[0] == 0.5 for row in report.groups for f in (row.least, row.greatest))
    assert report["q.weight"].weights == ("q.weight", "k.weight", "v.weight")
    assert report["q.weight"].into == ("norm1.weight", "norm1.bias")
    assert report["down.weight"].into == ("up.weight", "up.bias")
    with torch.no_grad():
        assert torch.equal(fxround.compile(result, "reproducible")(x), fixed())


def test_outliers_cost_less_in_eight_bits_and_in_three() -> None:
    model, x = block()
    before, after = (decibels(m, fixed(), "int8", x) for m in (model, rescaled("smoothquant")))
    assert after > before + 2
    report: Any = rescaled("awq").rescaling
    assert report["q.weight"].error < 0.3 and report["up.weight"].error < 0.3
    assert all(row.error <= 1 for row in report.groups)


def test_factors_are_those_of_the_papers_formula() -> None:
    model, x = block()
    result: Any = fxround.rescale_channels(model, [(x[:5],), (x[5:],)], alpha=0.25, power_of_two=False)
    with torch.no_grad():
        most = model.norm1(x).abs().amax((0, 1)).double().numpy()
    weights = [getattr(model, name).weight.detach().abs().amax(0).double().numpy() for name in "qkv"]
    scales = most**0.25 / np.max(weights, 0) ** 0.75
    row = result.rescaling["k.weight"]
    # NumPy's powers and PyTorch's norm differ in the last bits.
    assert np.allclose([row.least, row.greatest], [1 / scales.max(), 1 / scales.min()], rtol=1e-6)
    ratio = (result.norm1.weight / model.norm1.weight).detach().numpy()
    assert np.allclose(ratio, 1 / scales, rtol=1e-6)
    assert np.allclose(result.k.weight.detach().numpy(), model.k.weight.detach().numpy() * scales, rtol=1e-6)


def test_awq_takes_the_exponent_with_the_least_error() -> None:
    torch.manual_seed(3)
    layer, x = nn.Linear(12, 5, bias=False), torch.randn(40, 12)
    x[:, [2, 7]] *= 30
    mean, w = x.double().abs().mean(0), layer.weight.detach().double()
    errors = []
    for i in range(11):
        scales = mean ** (i / 10)
        scales = 2 ** torch.round(torch.log2(scales / (scales.max() * scales.min()).sqrt()))
        rounded = fxround.round((w * scales).float(), "int3:4").double() / scales
        errors.append(float((x.double() @ (rounded - w).T).square().sum()))
    result: Any = fxround.rescale_channels(layer, x, "awq", "int3:4", grid=10)
    row = result.rescaling["weight"]
    assert row.alpha == int(np.argmin(errors)) / 10 > 0
    assert math.isclose(row.error, min(errors) / errors[0], rel_tol=1e-9)  # sums of 200 squares in another order


def test_a_subnormal_weight_keeps_its_channel() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 3), torch.rand(5, 4)
    with torch.no_grad():
        layer.weight[:, 1] *= 1e-4
        layer.weight[1, 2] = 3 * 2.0**-149
        layer.weight[:, 3] = 0.0
        x[:, 2] *= 1e-6  # weights would be divided by a factor above 1
    result: Any = fxround.rescale_channels(layer, x)
    factors = result.input_factor.tolist()
    assert factors[2] == factors[3] == 1.0 != factors[1]
    assert torch.equal(result.weight * result.input_factor, layer.weight)  # stock: powers of two


class Others(nn.Module):
    """Products whose channels can have no factors."""

    def __init__(self) -> None:
        super().__init__()
        self.groups, self.back = nn.Conv1d(4, 8, 1, groups=2), nn.ConvTranspose1d(8, 8, 1)
        self.attention, self.tied = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 8)
        self.norm, self.again = nn.LayerNorm(8), nn.Linear(8, 8)
        self.again.weight = self.tied.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.back(self.groups(x)).transpose(1, 2))
        z: Tensor = self.again(self.tied(y + self.attention(y, y, y, need_weights=False)[0]))
        return z


def test_what_stays_has_a_reason() -> None:
    model, x = Others().eval(), torch.rand(2, 4, 3)
    result: Any = fxround.rescale_channels(model, x)
    for weight, said in (
        ("groups.weight", "a convolution of groups"),
        ("back.weight", "a transposed convolution"),
        ("attention.in_proj_weight", "no parameter can take the factors"),
        ("attention.out_proj.weight", "no parameter can take the factors"),
        ("tied.weight", "several products or modules read the weight"),
    ):
        assert said in result.rescaling[weight].reason, weight
    assert all(torch.equal(a, b) for a, b in zip(result.parameters(), model.parameters(), strict=True))
    assert "kept because" in str(result.rescaling) and result.rescaling.to_dict()["method"] == "smoothquant"


def test_wrong_arguments_are_said() -> None:
    layer, x = nn.Linear(3, 2), torch.rand(4, 3)
    for options, error, said in (
        ({"method": "gptq"}, ValueError, "expected 'smoothquant' or 'awq'"),
        ({"method": "awq"}, TypeError, "needs the policy that rounds the weights"),
        ({"policy": "int4"}, TypeError, "does not read a policy"),
        ({"alpha": 1.5}, ValueError, "expected a number from 0 to 1"),
        ({"alpha": "0"}, TypeError, "alpha is a str"),
        ({"grid": 0}, ValueError, "grid is 0"),
        ({"power_of_two": 1}, TypeError, "expected True or False"),
    ):
        with pytest.raises(error, match=said):
            fxround.rescale_channels(layer, x, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="inputs hold no batch"):
        fxround.rescale_channels(layer, [])
    with pytest.raises(ValueError, match="have NaNs or infinities"):
        fxround.rescale_channels(layer, x * math.nan)
    with pytest.raises(ValueError, match="the name of the report"):
        fxround.rescale_channels(fxround.rescale_channels(layer, x), x)
