"""Complex numbers in the passes: operations without a formula are PyTorch's, and strict policies refuse them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround.errors import CaptureError, UnsupportedOperator
from fxround.localization.checks import agreement


class Mixer(nn.Module):
    """A layer of FNet's kind: the real part of a Fourier transform, and a filter in frequencies."""

    def __init__(self) -> None:
        super().__init__()
        # No bias: PyTorch may add one within the product, and the captured graph adds it afterwards.
        self.filter, self.out = nn.Parameter(torch.randn(9, 2)), nn.Linear(16, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        filtered = torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.filter))
        return self.out(filtered + torch.fft.fft(x).real)


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "sine": lambda x: torch.view_as_real(torch.sin(torch.complex(x, -x))),
    "root": lambda x: torch.view_as_real(torch.complex(x, -x).sqrt().t()),
    "variance": lambda x: torch.complex(x, x).var(1),
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
        "no formula for this operation on complex numbers; its result is rounded once" in line
        for line in rounded.coverage().unrounded
    )


def test_the_parts_of_a_stock_result_are_rounded_once() -> None:
    x = torch.randn(2, 16, 2)
    parts = fxround.compile(lambda x: torch.view_as_real(torch.sin(torch.view_as_complex(x))), "e5m2")(x)
    wanted = torch.view_as_real(torch.sin(torch.view_as_complex(fxround.round(x, "e5m2"))))
    assert torch.equal(parts, fxround.round(wanted, "e5m2"))  # stock: kept (the operation has no formula)


def test_a_model_with_a_fourier_transform_trains() -> None:
    torch.manual_seed(0)
    model, x = Mixer(), torch.randn(4, 16, requires_grad=True)
    model(x).square().sum().backward()
    assert x.grad is not None
    wanted = [x.grad.clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    compiled = fxround.compile(model, "identity")
    for policy, bound in (("identity", 1e-5), ("reproducible", 1e-5), ("stochastic", 1e-5), ("mxfp8", 0.3)):
        x.grad = None
        model.zero_grad()
        compiled.with_policy(policy)(x).square().sum().backward()
        got = [x.grad, *(p.grad for p in model.parameters())]
        for a, b in zip(got, wanted, strict=True):
            assert a is not None
            # A tolerance: other orders of additions, and products of eight bits.
            assert (a - b).norm() < bound * b.norm()


def test_a_strict_policy_names_the_operation_and_the_line() -> None:
    told = r"aten\.pow.*z\*\*0\.5.*: torch\.pow \(node torch_pow_parts\) .*no formula for this operation on complex"
    with pytest.raises(UnsupportedOperator, match=told):
        fxround.compile(lambda z: z**0.5, "reproducible")(torch.randn(2, 8, dtype=torch.cfloat))  # fmt: skip


class Spectral(nn.Module):
    """A layer of a Fourier neural operator, whose weights are complex, and the spectrum that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, dtype=torch.complex64))
        self.register_buffer("phase", torch.randn(5, dtype=torch.complex64))

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        spectrum = (z @ self.weight) * self.phase
        return spectrum, torch.fft.irfft(spectrum)


def parts(*tensors: Tensor | None) -> list[Tensor]:
    return [torch.view_as_real(t.detach().resolve_conj()) for t in tensors if t is not None]


@pytest.fixture
def spectral() -> tuple[Spectral, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Spectral(), torch.randn(4, 3, dtype=torch.complex64, requires_grad=True)


def test_parts_of_complex_arguments_and_parameters_are_rounded(spectral: tuple[Spectral, Tensor]) -> None:
    class Read(Spectral):
        def forward(self, z: Tensor) -> Any:
            return [torch.view_as_real(x) for x in (z, self.weight, self.phase)], (z @ self.weight) * self.phase

    model, z = Read(), spectral[1]
    read, spectrum = fxround.compile(model, "bfloat16")(z)
    rounded = [fxround.round(x, "bfloat16") for x in parts(z, model.weight, model.phase)]
    assert all(map(torch.equal, read, rounded))
    given = [torch.view_as_complex(x) for x in rounded]
    assert torch.equal(spectrum, fxround.compile(lambda z, w, p: (z @ w) * p, "bfloat16")(*given))


def test_complex_parameters_have_gradients(spectral: tuple[Spectral, Tensor]) -> None:
    model, z = spectral

    def gradients(module: Callable[..., Any]) -> list[Tensor]:
        spectrum, signal = module(z)
        (spectrum.abs().sum() + signal.square().sum()).backward()
        found = parts(z.grad, model.weight.grad)
        z.grad = model.weight.grad = None
        return found

    wanted = gradients(model)
    for found, want in zip(gradients(fxround.compile(model, "identity")), wanted, strict=True):
        # Bits cannot be compared: stock transforms and products of complex numbers add in another order.
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
    for found, want in zip(gradients(fxround.compile(model, "bfloat16")), wanted, strict=True):
        assert torch.equal(found, fxround.round(found, "bfloat16")) and not torch.equal(found, want)
        # A tolerance: a few roundings to 8 bits.
        torch.testing.assert_close(found, want, rtol=0.1, atol=0.1)


def test_complex_tensors_have_every_layout_size_and_width(spectral: tuple[Spectral, Tensor]) -> None:
    rounded = fxround.compile(lambda z: (z * z, torch.view_as_real(z)), "bfloat16")
    z = spectral[1].detach()
    for given in (z, z.conj(), z.t(), z[:0], z[0, 0], z[::2, 1:], z.to(torch.complex128)):
        square, numbers = rounded(given)
        narrow = [fxround.round(x, "bfloat16") for x in parts(given)]
        assert torch.equal(numbers, *narrow) and square.dtype == given.dtype
        a, b = narrow[0].double().unbind(-1)  # products of bfloat16 numbers and most of their sums are exact
        aa, bb, ab = (fxround.round(x, "bfloat16") for x in (a * a, b * b, a * b))
        want = torch.stack([aa - bb, ab + ab], -1)
        assert torch.equal(parts(square)[0].double(), fxround.round(want, "bfloat16"))


def test_studies_count_the_parts_of_complex_results(spectral: tuple[Spectral, Tensor], tmp_path: Path) -> None:
    model, z = spectral
    compiled = fxround.compile(model, "bfloat16")
    compiled.evaluate(z)
    assert compiled.leaks().leaks == ()
    report = fxround.variability(model, (z,), policy="bfloat16/stochastic", samples=10)
    assert {figures.place.name: figures.elements for figures in report.outputs} == {"output[0]": 40, "output[1]": 32}
    assert not any("binary64" in note for note in report.notes)
    assert report.outputs[0].bits is not None and 3 < report.outputs[0].bits < 9
    assert agreement(torch.tensor([1 + 1j]), torch.tensor([1 + 1.5j])) < 2
    compiled.export(tmp_path / "model.pt2", (z,))
    assert all(map(torch.equal, fxround.load(tmp_path / "model.pt2")(z), compiled.evaluate(z)))


def test_a_strict_policy_moves_complex_numbers_and_refuses_numbers_of_the_program(
    spectral: tuple[Spectral, Tensor],
) -> None:
    model, z = spectral
    assert torch.equal(fxround.compile(lambda z: torch.view_as_real(z).clone(), "reproducible")(z), *parts(z))
    with pytest.raises(CaptureError, match="a complex number as a tensor"):
        fxround.compile(lambda x, k: (x * k).real, "bfloat16")(torch.ones(2), 2j)
    optimizer = fxround.compile_optimizer(torch.optim.SGD(model.parameters(), 0.1), "bfloat16")
    model.weight.grad = torch.zeros_like(model.weight)
    with pytest.raises(ValueError, match=r"\(3, 5\) is complex; expected a dense real tensor"):
        optimizer.step()


def test_shapes_that_depend_on_data_are_captured() -> None:
    x = torch.randn(4, 8)
    assert fxround.compile(lambda x: x[x > 0].sum(), "identity")(x) == x[x > 0].sum()  # stock: identity


@pytest.mark.parametrize("policy", ["identity", "stochastic"])
def test_a_gradient_of_any_strides_comes_into_complex_numbers(policy: str) -> None:
    x = torch.randn(2, 2, requires_grad=True)
    # A sum expands one number to the gradient of the result.
    fxround.compile(lambda x: torch.view_as_real(torch.view_as_complex(x) * 2j), policy)(x).sum().backward()
    assert torch.equal(x.grad, torch.tensor([[2.0, -2.0], [2.0, -2.0]]))


class Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x * 2) * 2j)


@pytest.mark.part("model0-shape0", "model1-shape1")
@pytest.mark.parametrize("model, shape", [(Turned(), (2, 2)), (nn.RNN(4, 3), (2, 4, 4)), (nn.LSTM(4, 3), (2, 4, 4))])
def test_what_the_policy_leaves_alone_has_gradients_in_eval_mode(model: nn.Module, shape: tuple[int, ...]) -> None:
    found = []
    for compiled in (fxround.compile(model.train(), "identity"), fxround.compile(model.eval(), "identity").eval()):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
        result = compiled(x)
        first = result if isinstance(result, Tensor) else result[0]
        (first * first).sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)
