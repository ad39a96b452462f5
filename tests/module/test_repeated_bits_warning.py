"""A module applied to its own result: its calls draw other bits with ``advance=True``, and warn without it."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import Tensor, nn

import fxround


class Step(nn.Module):
    def forward(self, u: Tensor) -> Tensor:
        return u + (u * 2.0**-8 - u * u * 2.0**-9)


def iterate(step: nn.Module, count: int) -> Tensor:
    u = torch.rand(64, generator=torch.Generator().manual_seed(1))
    found = []
    for _ in range(count):
        u = step(u)
        found.append(u)
    return torch.stack(found)


def test_an_advancing_step_draws_other_bits_at_every_call_and_the_same_again_after_reseeding() -> None:
    step = fxround.compile(Step(), "stochastic", seed=4, advance=True)
    fixed = fxround.compile(Step(), "stochastic", seed=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = iterate(step, 6)
    assert step.rng.tolist() == [4, 6]
    # Every call has the bits of its (seed, sample), and others than its neighbours'.
    u = torch.rand(64, generator=torch.Generator().manual_seed(1))
    for i, after in enumerate(found):
        assert torch.equal(fixed.reseed(4, sample=i)(u), after)
        assert not torch.equal(fixed.reseed(4, sample=i + 1)(u), after)
        u = after
    assert torch.equal(iterate(step.reseed(4), 6), found)
    assert not torch.equal(iterate(step.reseed(5), 6), found)
    assert all(other.advance for other in (copy.deepcopy(step), pickle.loads(pickle.dumps(step))))
    assert step.with_policy("up_down").advance and not fixed.advance


def test_with_gradients_in_eval_mode_the_backward_draws_with_the_sample_of_its_forward() -> None:
    step = fxround.compile(Step().eval(), "stochastic", seed=4, advance=True)
    fixed = fxround.compile(Step().eval(), "stochastic", seed=4)
    u = torch.rand(64, generator=torch.Generator().manual_seed(1))
    v, w = u.clone().requires_grad_(), u.clone().requires_grad_()
    first, second = step(v), step(u)
    first.sum().backward()
    fixed.reseed(4, sample=0)(w).sum().backward()
    assert v.grad is not None and w.grad is not None and torch.equal(v.grad, w.grad)
    assert torch.equal(second, fixed.reseed(4, sample=1)(u)) and step.rng.tolist() == [4, 2]


def test_iterating_with_the_same_bits_warns_once_and_only_where_bits_are_drawn() -> None:
    step = fxround.compile(Step(), "stochastic")
    with pytest.warns(UserWarning, match="Step is applied to its own result with the same seed 0 and sample 0") as told:
        iterate(step, 4)
    assert len(told) == 1 and told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        iterate(step, 4)
        iterate(fxround.compile(Step(), "reproducible"), 3)
        other, u = fxround.compile(Step(), "stochastic"), torch.rand(64)
        for sample in range(3):
            u = other.reseed(0, sample=sample)(u)


def test_arguments_that_are_returned_and_integers_do_not_warn() -> None:
    step = fxround.compile(lambda x, y, n: (x * y, y, n + 1), "stochastic")
    y, n = torch.rand(64), torch.arange(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x in torch.rand(4, 64):
            _, y, n = step(x, y, n)
    with pytest.warns(UserWarning, match="is applied to its own result"):
        step(step(torch.rand(64), y, n)[0], y, n)
