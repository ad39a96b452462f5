"""WAGE: weights, activations, gradients and errors equal the formulas of the paper over rational numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround import PolicyError
from fxround.policy import wage
from fxround.training import compile_optimizer
from fxround.training.wage import initial_weights, normalize_gradients, shift

Matrix = list[list[Fraction]]


class Net(nn.Module):
    """Two layers with a ReLU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 9, bias=False), nn.Linear(9, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


def rational(x: Tensor) -> Matrix:
    return [[Fraction(v) for v in row] for row in x.tolist()]


def q(x: Fraction, bits: int) -> Fraction:
    """Equation 2 of the paper."""
    s = Fraction(2, 2**bits)
    return min(max(s * round(x / s), -1 + s), 1 - s)


def shifted(x: Fraction) -> Fraction:
    """2^round(log2 x): the k for which x^2 is between 2^(2k - 1) and 2^(2k + 1)."""
    return next(
        Fraction(2) ** k for k in range(-60, 60) if Fraction(2) ** (2 * k - 1) < x * x < Fraction(2) ** (2 * k + 1)
    )


def q_error(e: Matrix, bits: int) -> Matrix:
    unit = shifted(max(abs(v) for row in e for v in row))
    return [[unit * q(v / unit, bits) for v in row] for row in e]


def product(a: Matrix, b: Matrix) -> Matrix:
    columns = transposed(b)
    return [[sum((x * y for x, y in zip(row, col, strict=True)), Fraction(0)) for col in columns] for row in a]


def transposed(a: Sequence[Sequence[Fraction]]) -> Matrix:
    return [list(row) for row in zip(*a, strict=True)]


def make(seed: int = 0) -> tuple[Net, dict[str, float], Tensor, Tensor]:
    """A network, its scales, an input with numbers beyond 1, and an error with large and small elements."""
    generator = torch.Generator().manual_seed(seed)
    net = Net()
    scales = initial_weights(net, seed=seed)
    x = torch.randn(20, 12, generator=generator)
    error = torch.randn(20, 5, generator=generator) * torch.rand(20, 5, generator=generator) ** 4
    return net, scales, x, error


def test_weights_activations_and_errors_are_the_paper_s() -> None:
    net, scales, x, error = make()
    # A scale of its own: the parameter of the first layer is w / 2.
    scales["first"] = 2.0
    compiled = fxround.compile(net, wage("last", scales=scales))
    y = compiled(x)
    y.backward(error)

    # Each sum is one of a few multiples of 2^-20 or so, and exact in binary32, whatever its order.
    parts = zip(("first", "last"), (net.first, net.last), strict=True)
    w1, w2 = (
        [[q(v * int(scales[name]), 2) / int(scales[name]) for v in row] for row in rational(layer.weight)]
        for name, layer in parts
    )
    a0 = [[q(v, 8) for v in row] for row in rational(x)]
    z1 = [[max(v, Fraction(0)) for v in row] for row in product(a0, transposed(w1))]
    a1 = [[q(v, 8) for v in row] for row in z1]
    assert rational(y) == product(a1, transposed(w2))
    e2 = q_error(rational(error), 8)
    assert rational(net.last.weight.grad) == product(transposed(e2), a1)
    inside = [[v < 1 - Fraction(1, 256) for v in row] for row in z1]
    assert not all(kept for row in inside for kept in row)
    through = [[v * kept for v, kept in zip(*rows, strict=True)] for rows in zip(product(e2, w2), inside, strict=True)]
    # The derivative of ReLU is that at the rounded result: the paper has that before Q.
    e1 = [[v * (a > 0) for v, a in zip(*rows, strict=True)] for rows in zip(q_error(through, 8), a1, strict=True)]
    assert rational(net.first.weight.grad) == product(transposed(e1), a0)


def test_updates_are_integers_drawn_between_their_neighbours_and_weights_are_clipped() -> None:
    net, rate = nn.Sequential(nn.Linear(64, 64, bias=False)), 8
    policy = wage("0", scales={"0": 2.0})
    generator = torch.Generator().manual_seed(1)
    start = torch.randint(-127, 128, (64, 64), generator=generator) / 256
    gradient = torch.randn(64, 64, generator=generator) / 1000
    optimizer = compile_optimizer(torch.optim.SGD(net.parameters(), lr=rate * 2.0**-7), policy, model=net, seed=3)
    net[0].weight.data.copy_(start)
    net[0].weight.grad = gradient.clone()
    normalize_gradients(net, {"0": 2.0})
    optimizer.step()

    unit = shifted(max(abs(v) for row in rational(gradient) for v in row))
    up = wanted = variance = Fraction(0)
    clipped = 0
    for w, g, new in zip(*(t.flatten().tolist() for t in (start, gradient, net[0].weight)), strict=True):
        steps = rate * Fraction(g) / unit
        least = math.floor(steps)
        # In integers: the weight is w / 2 in units of 2^-7.
        choices = [min(max(Fraction(w) * 256 - n, Fraction(-127)), Fraction(127)) for n in (least, least + 1)]
        assert Fraction(new) * 256 in choices
        if choices[0] != choices[1]:
            share = steps - least
            up += Fraction(new) * 256 == choices[1]
            wanted += share
            variance += share * (1 - share)
        else:
            clipped += 1
    # Five standard deviations: one seed in a million is further away, and this one is not.
    assert clipped > 10 and abs(up - wanted) < 5 * math.sqrt(variance)


def test_gradients_that_are_multiples_move_weights_exactly() -> None:
    net = nn.Sequential(nn.Linear(4, 1, bias=False))
    optimizer = compile_optimizer(torch.optim.SGD(net.parameters(), lr=4 * 2.0**-7), wage("0"), model=net)
    net[0].weight.data.copy_(torch.tensor([[0.5, -0.25, 126 / 128, -126 / 128]]))
    net[0].weight.grad = torch.tensor([[2.0, -0.5, -2.0, 2.0]])
    normalize_gradients(net)
    optimizer.step()
    assert (net[0].weight * 128).tolist() == [[64 - 4, -32 + 1, 127, -127]]


def test_shift_initial_weights_and_what_is_refused() -> None:
    for x in (1.0, math.sqrt(2), 1.4142, 1.4143, 3.0, 2.0**-30, 0.7):
        assert Fraction(shift(float(torch.tensor(x)))) == shifted(Fraction(float(torch.tensor(x))))
    net = Net()
    # sqrt(6 / 12) is below 0.75, and Shift(0.75 / 0.71) = 1; sqrt(6 / 96) = 0.25, and Shift(3) = 4.
    assert initial_weights(net) == {"first": 1.0, "last": 1.0} and net.first.weight.abs().max() <= 0.75
    wide = nn.Sequential(nn.Linear(96, 3, bias=False))
    assert initial_weights(wide) == {"0": 4.0} and wide[0].weight.abs().max() <= 0.75 / 4
    with pytest.raises(ValueError, match="0 has a bias, and WAGE has none; make the layer with bias=False"):
        initial_weights(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="no linear or convolutional layers"):
        initial_weights(nn.ReLU())
    wrong: list[dict[str, Any]] = [{"weights": 1}, {"errors": 17}, {"gradients": 2.5}]
    for arguments in (*wrong, {"scales": {"0": 3.0}}, {"scales": {"0": 0.5}}):
        with pytest.raises(PolicyError, match=r"expected (2 to 16 bits|a power of two from 1 on)"):
            wage("0", **arguments)
    net.first.weight.grad = torch.tensor([[0.0] * 12] * 9)
    net.last.weight.grad = torch.full((5, 9), math.inf)
    normalize_gradients(net)
    assert net.first.weight.grad.eq(0).all() and net.last.weight.grad.isinf().all()
