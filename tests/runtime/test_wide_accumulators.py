"""Accumulators of 16-bit models: binary32, rounded once to the dtype, as numpy.float32 and ml_dtypes compute it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround import Policy, Rule

DTYPES = {torch.bfloat16: ml_dtypes.bfloat16, torch.float16: np.float16}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def linear(dtype: torch.dtype) -> nn.Linear:
    layer = nn.Linear(4096, 5, bias=False).to(dtype)
    layer.weight.data = torch.rand(5, 4096, generator=seeded(1)).to(dtype) / 16
    return layer


def ascending(x: Any, w: Any) -> Any:
    """acc = acc + a_k b_k in binary32, which holds products of 16-bit numbers: a step rounds once, as an fma."""
    acc = np.zeros((len(x), len(w)), np.float32)
    for k in range(x.shape[1]):
        acc += x[:, k, None] * w[None, :, k]
    return acc


def bits(x: Tensor) -> Any:
    return x.detach().view(torch.int16).numpy()


@pytest.mark.parametrize("dtype", DTYPES)
def test_contractions_and_sums_accumulate_in_binary32_and_round_once(dtype: torch.dtype) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = linear(dtype)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self.fc(x), x.cumsum(1), x.prod(1)

    net, x = Net(), (torch.rand(3, 4096, generator=seeded(2)) + 0.5).to(dtype)
    a, w = x.float().numpy(), net.fc.weight.detach().float().numpy()
    products = ascending(a, w).astype(DTYPES[dtype])
    for policy in ("reproducible", "repdl"):
        y, prefixes, _ = fxround.compile(net, policy)(x)
        assert np.array_equal(bits(y), products.view(np.int16)), policy
        expected = np.cumsum(a, 1, dtype=np.float32).astype(DTYPES[dtype])
        assert np.array_equal(bits(prefixes), expected.view(np.int16)), policy


@pytest.mark.part("stochastic")
@pytest.mark.parametrize("policy", ["stochastic", "up_down", "cestac"])
def test_perturbed_accumulators_of_bfloat16_models_are_binary32s(policy: str) -> None:
    layer, x = linear(torch.bfloat16), torch.rand(3, 4096, generator=seeded(2)).bfloat16()
    exact = x.double() @ layer.weight.detach().double().T

    def error(text: str | Policy) -> float:
        return float(((fxround.compile(layer, text)(x).detach().double() - exact) / exact).abs().max())

    # The store moves a result by less than two quanta of 2^-7; four thousand steps of binary32, by far less than one.
    assert error(policy) < 2.0**-6 + 2.0**-9
    # What was asked for by its word: eight bits stand still where a product is below half a quantum of the sum.
    assert error(Policy("narrow", (Rule(accumulate="dtype"),))) > 0.5


def test_dtype_asks_for_accumulators_of_16_bits() -> None:
    layer, x = linear(torch.bfloat16), torch.rand(3, 4096, generator=seeded(2)).bfloat16()
    said, named = (
        fxround.compile(layer, Policy("p", (Rule(accumulate=text),)))(x) for text in ("dtype", "bfloat16/nearest_even")
    )
    assert torch.equal(said, named) and not torch.equal(said, fxround.compile(layer, "reproducible")(x))


def test_scatters_round_a_wide_accumulator_once_in_the_results_mode() -> None:
    """1 + 2^-9 + 2^-9 is halfway between 1 and 1 + 2^-7: stochastic rounding gives both, nearest the even one."""
    table = nn.Embedding(1, 4096).bfloat16()
    g = torch.tensor([1, 2.0**-9, 2.0**-9]).bfloat16()[:, None].expand(3, 4096)
    for policy, above in (("reproducible", 0.0), ("stochastic", 0.5)):
        table.weight.grad = None
        fxround.compile(table, policy)(torch.zeros(3, dtype=torch.int64)).backward(g)
        assert (
            table.weight.grad is not None and table.weight.grad.unique().tolist() == [1, 1 + 2.0**-7][: 1 + (above > 0)]
        )
        # Six sigma: a false alarm in 5e8 seeds.
        share = (table.weight.grad > 1).double().mean()
        assert abs(share - above) <= 6 * (0.25 / 4096) ** 0.5 * (above > 0)


@pytest.mark.part(2)
@pytest.mark.parametrize("mode", ["nearest_even", "up_down", "stochastic"])
@pytest.mark.parametrize("name", ["sum", "prod", "cumsum", "cumprod", "scatter_add"])
def test_float32_accumulates_in_binary64_as_float64_does(name: str, mode: str) -> None:
    """Every binary32 number is a binary64 one; the kernels of float64 operands are compared with the specification."""
    x, index = torch.rand(3, 40, generator=seeded(1)) + 0.5, torch.zeros(3, 40, dtype=torch.int64)
    accumulate, rng = f"binary64/{mode}/inf", torch.tensor([5, 0])
    tail = (accumulate, "binary64/nearest_even/inf", rng, 7)
    narrow = (accumulate, "binary32/nearest_even/inf", rng, 7)
    between: dict[str, tuple[Any, ...]] = {"sum": ([1], False, "lanes:16"), "prod": ([1], False)}
    between |= {"cumsum": (1,), "cumprod": (1,)}
    operator = getattr(torch.ops.fxround, name)
    if name == "scatter_add":
        got = operator(torch.zeros(3, 40), 1, index, x, accumulate, rng, 7)
        wide = operator(torch.zeros(3, 40).double(), 1, index, x.double(), accumulate, rng, 7)
    else:
        got, wide = operator(x, *between[name], *narrow), operator(x.double(), *between[name], *tail)
    assert torch.equal(got, wide.float()) and (wide != wide.float()).any()
