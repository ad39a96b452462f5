"""Tensors of PyTorch's 8-bit dtypes in models: weights that are stored so, conversions, and their rounding."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround.errors import PolicyError
from fxround.policy import Policy, Rule

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -1e-9, 3e38, 449.0, 464.0, 465.0, 240.0, 248.0, 61440.0)


def spread(count: int) -> Tensor:
    x = torch.randn(count, generator=torch.Generator().manual_seed(0))
    return torch.cat([x * torch.exp2(torch.linspace(-20, 20, count)), torch.tensor(SPECIAL)])


def codes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


class Quantized(nn.Module):
    """A linear layer whose weights are stored in 8 bits, with a scale for each output."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        weight = torch.randn(16, 40, generator=torch.Generator().manual_seed(1))
        scale = weight.abs().amax(1, keepdim=True) / torch.finfo(dtype).max
        self.register_buffer("weight", (weight / scale).to(dtype))
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)


@pytest.mark.part(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_a_conversion_has_the_bits_of_pytorch(dtype: torch.dtype, source: torch.dtype) -> None:
    """Overflow included: e4m3fn saturates, e5m2 has infinities, the others become NaN. The sign of a NaN is free."""
    x = spread(2000).to(source)
    convert = fxround.compile(lambda t: t.to(dtype), "reproducible")
    # PyTorch saturates since 2.13; before, overflow was NaN. fxround's bits do not depend on the version.
    saturates = dtype == torch.float8_e4m3fn and torch.__version__ < "2.13"
    got, want = convert(x), (x.clamp(-448, 448) if saturates else x).to(dtype)
    different = (codes(got) != codes(want)) & ~(x.isnan() & got.float().isnan())
    assert got.dtype == dtype and not different.any(), (x[different][:5], got[different][:5])
    assert not convert.coverage().unrounded


@pytest.mark.part(3)
@pytest.mark.parametrize("mode", ["toward_zero", "toward_positive", "nearest_away", "to_odd"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_conversion_has_the_mode_of_the_policy(dtype: torch.dtype, mode: str) -> None:
    x = spread(300)
    overflow = {torch.float8_e4m3fn: "saturate", torch.float8_e5m2: "inf"}.get(dtype, "nan")
    name = str(dtype).removeprefix("torch.float8_")
    got = fxround.compile(lambda t: t.to(dtype), Policy("p", (Rule(rounding=f"dtype/{mode}"),)))(x)
    want = fxround.round(x, f"{name}/{mode}/{overflow}")
    assert torch.equal(codes(got), codes(want.to(dtype)))


def test_a_stochastic_conversion_is_unbiased() -> None:
    """2^16 draws of one number that lies 5/16 of a quantum above its lower neighbour.

    The count of the upper one is binomial; 5 standard deviations have a false-alarm rate below 6e-7.
    """
    count, share = 1 << 16, Fraction(5, 16)
    x = torch.full((count,), 1.0 + float(share) / 8)
    got = fxround.compile(lambda t: t.to(torch.float8_e4m3fn), "stochastic").reseed(3)(x).float()
    assert set(got.tolist()) == {1.0, 1.125}
    upper = int((got == 1.125).sum())
    assert abs(upper - count * share) < 5 * math.sqrt(count * share * (1 - share))


@pytest.mark.part(3)
@pytest.mark.parametrize("policy", ["identity", "reproducible", "bfloat16", "stochastic", "e4m3fn", "mxfp8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_with_weights_of_8_bits_computes_as_with_the_same_weights_widened(
    dtype: torch.dtype, policy: str
) -> None:
    """Reading 8 bits is exact, so that the model has the bits of one that stores the same numbers in binary32."""
    if policy == "e4m3fn" and dtype != torch.float8_e4m3fn:
        with pytest.raises(PolicyError, match="cannot represent all of its values"):
            fxround.compile(Quantized(dtype), policy)(torch.randn(3, 40))
        return
    stored, widened = Quantized(dtype), Quantized(dtype)
    widened.weight = widened.weight.float()
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(2))
    compiled = fxround.compile(stored, policy)
    if policy in ("identity", "reproducible", "bfloat16", "e4m3fn"):
        assert torch.equal(compiled(x), fxround.compile(widened, policy)(x))
    assert torch.isfinite(compiled(x)).all() and compiled(x).dtype == torch.float32
    if policy in ("reproducible", "stochastic", "bfloat16"):
        assert not compiled.coverage().unrounded
        assert compiled.leaks(x).proved


def test_a_conversion_and_its_gradient_are_those_of_pytorch() -> None:
    """Straight through: the gradient of a conversion is the converted gradient."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 8, generator=torch.Generator().manual_seed(0)))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight.to(torch.float8_e5m2).float()

    model, x = Model(), torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    gradients = []
    for f in (model, fxround.compile(model, "reproducible")):
        f(x).sum().backward()
        gradients.append(model.weight.grad)
        model.weight.grad = None
    assert torch.equal(*gradients)


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "product": lambda x: x * x,
    "cat": lambda x: torch.cat([x, x]).t().contiguous().reshape(-1)[::3],
    "pad": lambda x: nn.functional.pad(x, (1, 2)),
    "lookup": lambda x: nn.functional.embedding(torch.tensor([2, 0, 2]), x).float() * 2,
    "view": lambda x: x.view(torch.uint8).view(x.dtype).float() * 2,
    "where": lambda x: torch.where(x == x.t(), x, x.t()),
    "16 bits": lambda x: x.half() + x.half(),
    "expanded": lambda x: x[:1].expand(8, 8).float() + x.float(),
}


@pytest.mark.part(3)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_operations_that_pytorch_has_keep_its_bits(dtype: torch.dtype, name: str) -> None:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    got, want = fxround.compile(OPERATIONS[name], "reproducible")(x), OPERATIONS[name](x)
    assert got.dtype == want.dtype and torch.equal(codes(got), codes(want))


def test_a_product_of_8_bits_is_computed_where_pytorch_has_no_kernel() -> None:
    a = torch.randn(3, 70, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    got = fxround.compile(lambda x: x @ x.t(), "reproducible")(a)
    want = fxround.compile(lambda x: x @ x.t(), "reproducible")(a.float())
    assert torch.equal(codes(got), codes(want.to(torch.float8_e4m3fn)))


def test_a_saved_program_keeps_weights_of_8_bits(tmp_path: Path) -> None:
    x = torch.randn(5, 40)
    compiled = fxround.compile(Quantized(torch.float8_e4m3fn), "stochastic").eval().reseed(4)
    compiled.export(tmp_path / "model.pt2", x)
    loaded = fxround.load(tmp_path / "model.pt2").reseed(4)
    assert torch.equal(loaded(x), compiled.reseed(4)(x))


def test_single_roundings_take_tensors_of_8_bits() -> None:
    x = spread(100).to(torch.float8_e5m2)
    assert torch.equal(codes(fxround.round(x, "e5m2")), codes(x))
    narrow = fxround.round(x, "ieee(5,2)/toward_zero")
    assert torch.equal(codes(narrow), codes(fxround.round(x.float(), "ieee(5,2)/toward_zero").to(x.dtype)))
    with pytest.raises(ValueError, match=r"that a e5m2 tensor cannot store"):
        fxround.round(x, "bfloat16")
