"""Gradients: the backward graph's bits, what reaches whom, and what autograd may ask."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxround
from fxround.entry import Entry


class Small(nn.Module):
    """Convolutions, batch norm, a pool, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm, self.conv2 = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, 2)
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.conv1(x)))
        return self.fc(F.max_pool2d(F.relu(self.conv2(y)), 2).flatten(1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 2))


def seeded(build: Any, *shape: int) -> tuple[nn.Module, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return build(), torch.randn(*shape)


def gradients(module: nn.Module, x: Tensor, **kwargs: Any) -> tuple[Tensor, list[Tensor]]:
    """The result, and the gradients of the argument and the parameters, for the loss sum(result * ramp)."""
    x = x.clone().requires_grad_()
    y = module(x)
    weight = torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape) / 8 - 1
    found = torch.autograd.grad((y * weight).sum(), [x, *module.parameters()], **kwargs)
    return y.detach(), list(found)


@pytest.mark.parametrize("build, shape", [(mlp, (4, 5)), (Small, (3, 1, 8, 8))])
def test_identity_gives_the_gradients_of_the_captured_graph(build: Any, shape: tuple[int, ...]) -> None:
    model, x = seeded(build, *shape)
    compiled = fxround.compile(model, "identity")
    y, found = gradients(compiled, x)
    entry = compiled._latest
    assert isinstance(entry, Entry)
    tangent = torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape) / 8 - 1
    with torch.no_grad():
        model.load_state_dict(seeded(build, *shape)[0].state_dict())
        outputs = entry.captured.graph(*entry._inputs([x]), tangent)
    kept = [v for v, port in zip(outputs, entry.captured.outputs, strict=True) if not port.mutation]
    assert torch.equal(kept[0], y)
    assert all(torch.equal(a, b) for a, b in zip(kept[1:], [*found[1:], found[0]], strict=True))


def test_a_rounded_policy_gives_the_gradients_of_hand_composed_roundings() -> None:
    """linear, relu, mse, with bfloat16 results and exact (short) accumulations: every operation rounded by hand."""
    model, x = seeded(lambda: nn.Linear(2, 3), 4, 2)
    target = torch.full((4, 3), 0.25)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = model

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            d = F.relu(self.fc(x)) - target
            return (d * d).sum()

    compiled = fxround.compile(Loss(), fxround.Policy("b", (fxround.Rule(rounding="bfloat16", order="sequential"),)))
    compiled(x, target).backward()

    def r(value: Tensor) -> Tensor:
        return fxround.round(value, "bfloat16")

    def chain(a: Tensor, b: Tensor) -> Tensor:
        """a @ b, k ascending, a fused binary32 step each: the product is exact in float64."""
        acc = torch.zeros(a.shape[0], b.shape[1])
        for k in range(a.shape[1]):
            acc = (a[:, k : k + 1].double() * b[k : k + 1].double() + acc.double()).float()
        return r(acc)

    w, b = model.weight.detach(), model.bias.detach()
    y = F.relu(r(chain(x, w.T) + b))
    d = r(y - target)
    error = r(r(torch.ones(()) * d) + r(torch.ones(()) * d))
    error = torch.where(y <= 0, torch.zeros(()), error)
    acc = torch.zeros(3)
    for row in error:
        acc = acc + row
    assert model.weight.grad is not None and model.bias.grad is not None
    assert torch.equal(model.weight.grad, chain(error.T, x))
    assert torch.equal(model.bias.grad, r(acc))


def test_a_call_with_gradients_gives_the_bits_of_one_without() -> None:
    model, x = seeded(Small, 3, 1, 8, 8)
    model.eval()
    compiled = fxround.compile(model, "stochastic", seed=4)
    with torch.no_grad():
        plain = compiled(x)
    first, found = gradients(compiled, x)
    again, repeated = gradients(compiled, x)  # now with the backward in mind
    assert torch.equal(plain, first) and torch.equal(plain, again)
    assert all(torch.equal(a, b) for a, b in zip(found, repeated, strict=True))


def test_gradients_are_those_of_the_model() -> None:
    model, x = seeded(Small, 3, 1, 8, 8)
    reference = copy.deepcopy(model)
    _, found = gradients(fxround.compile(model, "reproducible"), x)
    _, expected = gradients(reference, x)
    for a, b in zip(found, expected, strict=True):
        # A tolerance: sums run in another order than the stock kernels'.
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_nothing_of_a_step_is_left_unrounded_and_a_short_batch_needs_no_graph_of_its_own() -> None:
    model, x = seeded(Small, 3, 1, 8, 8)
    compiled = fxround.compile(model, "reproducible")
    for batch in (x, x[:2], x[:1].expand(7, -1, -1, -1)):
        compiled(batch).sum().backward()
    assert compiled.coverage().unrounded == () and len(compiled._entries) == 1
    assert "fxround.convolution_weight_gradient" in compiled.graph_text(backward=True)


def test_a_training_step_advances_the_sample_and_a_call_without_gradients_does_not() -> None:
    model, x = seeded(mlp, 4, 5)
    compiled = fxround.compile(model, "stochastic", seed=3)
    first = gradients(compiled, x)[1]
    assert compiled.rng.tolist() == [3, 1]
    assert not torch.equal(gradients(compiled, x)[1][1], first[1])
    with torch.no_grad():
        compiled(x)
    assert compiled.rng.tolist() == [3, 2]
    repeated = gradients(compiled.reseed(3), x)[1]
    assert all(torch.equal(a, b) for a, b in zip(first, repeated, strict=True))
    compiled.eval()
    gradients(compiled, x)
    assert compiled.rng.tolist() == [3, 1]
