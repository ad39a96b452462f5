"""DiscQuant: a step against the published gradient, the corner that it ends at, and what it gains."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxround
from fxround.policy.policy import of_operands
from fxround.policy.rule import Rule
from fxround.tuning.choices import place_of
from fxround.tuning.discquant import DiscQuant, divergence
from fxround.tuning.grid import Grid

INT2 = of_operands("int2", Rule(role="weight", operands="int2:channel"))
SHORT: dict[str, Any] = {"steps": 64, "accumulate": 1, "warmup": 4}
FEW = {**SHORT, "steps": 6}


def classifier() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 10))


def data() -> Tensor:
    return torch.randn(128, 16, generator=torch.Generator().manual_seed(1))


def test_the_divergence_is_that_of_kullback_and_leibler() -> None:
    a, b = torch.randn(5, 3, 4), torch.randn(5, 3, 4)
    p, q = F.softmax(a.double(), -1), F.softmax(b.double(), -1)
    wanted = (p * (p / q).log()).sum(-1).mean()
    assert torch.isclose(divergence(a, b).double(), wanted, rtol=1e-5)  # float32 against float64
    assert divergence(a, a) == 0


@pytest.mark.parametrize("clamp", [1.0, 0.05])
def test_steps_are_the_published_ones(clamp: float) -> None:
    """The same steps by a loop over one layer in float64, from the same start and the same batches."""
    torch.manual_seed(0)
    layer, x = nn.Linear(6, 5), torch.randn(8, 6)
    # Alone, one batch: the order of batches does not matter.
    small = fxround.quantize_weights(
        layer, INT2, x, "discquant", steps=3, accumulate=1, warmup=1, rate=0.2, clamp=clamp, rho=1.0, seed=5
    )
    w = layer.weight.detach()
    grid = Grid.of(w, "int2:channel")
    down, up = grid.neighbours(w)
    y = place_of(w, down, up).double()
    z = torch.rand(w.shape, generator=torch.Generator().manual_seed(5)).double()
    scale = 12 * (grid.nearest(w).double() - w.double()).square().mean()
    mean, square, target = torch.zeros_like(z), torch.zeros_like(z), layer(x).detach().double()
    for t, factor in enumerate((0.0, 1.0, 0.5), 1):
        z.requires_grad_()
        value = down + z * (up.double() - down.double())
        p, q = F.log_softmax(target, 1), F.log_softmax(x.double() @ value.T + layer.bias.detach(), 1)
        (p.exp() * (p - q)).sum(1).mean().backward()
        assert z.grad is not None
        g = -(2 * y - 1) + (z.grad / scale).clamp(-clamp, clamp)
        mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g * g
        rate = 0.2 * factor
        z = z.detach() * (1 - rate * 0.01) - rate * (mean / (1 - 0.9**t)) / ((square / (1 - 0.999**t)).sqrt() + 1e-8)
        z = z.clamp(0, 1)
    sure = (z - 0.5).abs() > 1e-4  # the library computes in float32
    assert sure.float().mean() > 0.9
    assert torch.equal(small.weight[sure], torch.where(z > 0.5, up, down)[sure])
    open_ = ((z > 0.01) & (z < 0.99) & (up != down)).sum() / z.numel()
    left = small.quantization["weight"].left
    assert left is not None and abs(left - float(open_)) <= 0.1


def test_the_divergence_is_less_than_that_of_nearest_weights() -> None:
    model, x = classifier(), data()
    plain = fxround.quantize_weights(model, INT2, x)
    learned = fxround.quantize_weights(model, INT2, x, "discquant", batch_size=32, **SHORT)
    with torch.no_grad():
        assert divergence(model(x), learned(x)) < 0.5 * divergence(model(x), plain(x))
    assert all(row.left is not None and row.left < 0.5 for row in learned.quantization.weights)


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.inner(x), "more": x}


def test_recurrent_layers_and_results_with_several_tensors() -> None:
    torch.manual_seed(0)
    small = fxround.quantize_weights(nn.LSTM(8, 6), INT2, torch.randn(4, 3, 8), "discquant", **FEW)
    assert {row.method for row in small.quantization.weights} == {"discquant"}
    learned = fxround.quantize_weights(Wrapped(classifier()), INT2, data(), "discquant", **FEW)
    alone = fxround.quantize_weights(classifier(), INT2, data(), "discquant", **FEW)
    assert torch.equal(learned.get_parameter("inner.0.weight"), alone.get_parameter("0.weight"))


def test_an_interrupt_writes_the_corner_that_is_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = classifier(), data()
    differentiate, steps = DiscQuant._differentiate, []

    def pressed(self: DiscQuant, *rest: Any) -> None:
        differentiate(self, *rest)
        steps.append(1)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(DiscQuant, "_differentiate", pressed)
    small = fxround.quantize_weights(model, INT2, x, "discquant", **SHORT)
    assert small.quantization.interrupted and len(steps) == 3
    for name in ("0.weight", "2.weight"):
        w, kept = model.get_parameter(name).detach(), small.get_parameter(name)
        down, up = Grid.of(w, "int2:channel").neighbours(w)
        assert ((kept == down) | (kept == up)).all()


def test_refusals() -> None:
    x = data()
    with pytest.raises(ValueError, match="at least two classes"):
        fxround.quantize_weights(nn.Linear(16, 1), INT2, x, "discquant", **SHORT)
    broken = classifier()
    with torch.no_grad():
        broken[0].bias.fill_(torch.nan)
    with pytest.raises(ValueError, match="logits have NaNs"):
        fxround.quantize_weights(broken, INT2, x, "discquant", **SHORT)
    for option, said in (
        ({"warmup": 64}, "below 64"),
        ({"rho": 0.0}, "rho is 0.0"),
        ({"accumulate": 0}, "accumulate is 0"),
    ):
        with pytest.raises(ValueError, match=said):
            fxround.quantize_weights(classifier(), INT2, x, "discquant", **{**SHORT, **option})
