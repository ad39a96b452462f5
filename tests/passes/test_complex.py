"""Complex numbers: PyTorch's kernels compute them, their parts are rounded once, and strict policies refuse them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround.errors import UnsupportedOperator


class Mixer(nn.Module):
    """A layer of FNet's kind: the real part of a Fourier transform, and a filter in frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.filter, self.out = nn.Parameter(torch.randn(9, 2)), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        filtered = torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.filter))
        return self.out(filtered + torch.fft.fft(x).real)


def made(x: Tensor) -> Tensor:
    return torch.view_as_real(torch.complex(x, x * 2).conj() * torch.complex(x, x)).sum(-1)


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "spectrum": lambda x: torch.fft.rfft(x).abs(),
    "phase": lambda x: torch.angle(torch.fft.rfft(x)),
    "made": made,
    "stft": lambda x: torch.stft(x, 8, window=torch.ones(8), return_complex=True).abs().square(),
}


@pytest.mark.parametrize("name", CASES)
def test_parts_are_rounded_once_and_identity_has_the_bits_of_pytorch(name: str) -> None:
    torch.manual_seed(0)
    x, function = torch.randn(3, 16), CASES[name]
    assert torch.equal(fxround.compile(function, "identity")(x), function(x))
    rounded = fxround.compile(function, "bfloat16")
    y = rounded(x)
    assert torch.equal(y, y.bfloat16().float())
    # A tolerance: a few roundings to 8 bits.
    torch.testing.assert_close(y, function(x), rtol=0.05, atol=0.5)
    assert any(
        "no kernels for complex numbers; its result is rounded once" in line for line in rounded.coverage().unrounded
    )


def test_the_parts_of_a_spectrum_are_those_of_a_rounded_spectrum() -> None:
    x = torch.randn(2, 16)
    parts = fxround.compile(lambda x: torch.view_as_real(torch.fft.rfft(x)), "e5m2")(x)
    wanted = torch.view_as_real(torch.fft.rfft(fxround.round(x, "e5m2")))
    assert torch.equal(parts, fxround.round(wanted, "e5m2"))


def test_a_model_with_a_fourier_transform_trains() -> None:
    torch.manual_seed(0)
    model, x = Mixer(), torch.randn(4, 16, requires_grad=True)
    model(x).square().sum().backward()
    assert x.grad is not None
    wanted = [x.grad.clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    for policy, exact in (("identity", True), ("stochastic", False), ("mxfp8", False)):
        x.grad = None
        model.zero_grad()
        fxround.compile(model, policy)(x).square().sum().backward()
        got = [x.grad, *(p.grad for p in model.parameters())]
        for a, b in zip(got, wanted, strict=True):
            assert a is not None
            if exact:
                assert torch.equal(a, b)
            else:
                # A tolerance: products of eight bits.
                assert (a - b).norm() < 0.3 * b.norm()


def test_a_strict_policy_names_the_operation_and_the_line() -> None:
    with pytest.raises(UnsupportedOperator, match=r"aten\._fft_r2c.*rfft\(x\).*no kernels for complex numbers"):
        fxround.compile(lambda x: torch.fft.rfft(x).abs(), "reproducible")(torch.randn(2, 8))


def test_shapes_that_depend_on_data_are_captured() -> None:
    x = torch.randn(4, 8)
    assert fxround.compile(lambda x: x[x > 0].sum(), "identity")(x) == x[x > 0].sum()
