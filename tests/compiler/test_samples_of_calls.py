"""Calls that advance the sample take one each, from whatever thread they come, and give it back if they raise."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxround

CALLS, THREADS = 400, 8
X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        return result

    def encode(self, x: Tensor) -> Tensor:
        """Call a submodule, which is compiled by itself, with samples of the whole."""
        result: Tensor = self.layer(x)
        return result


def module(model: Encoder, path: Path) -> Any:
    return fxround.compile(model, "stochastic")


def advancing(model: Encoder, path: Path) -> Any:
    return fxround.compile(model.eval(), "stochastic", advance=True)


def advancing_without_gradients(model: Encoder, path: Path) -> Any:
    return fxround.compile(model.eval().requires_grad_(False), "stochastic", advance=True)


def method(model: Encoder, path: Path) -> Any:
    return fxround.compile(model, "stochastic").encode


def loaded(model: Encoder, path: Path) -> Any:
    return fxround.load(fxround.compile(model, "stochastic").export(path / "m.pt2", X, gradients=True))


def backend(model: Encoder, path: Path) -> Any:
    # Dynamo uses one graph, with its samples, for each torch.compile of this code with equal options.
    torch.compiler.reset()
    return torch.compile(model, backend="fxround", options={"policy": "stochastic"})


@pytest.mark.part(2)
@pytest.mark.parametrize("made", [module, advancing, advancing_without_gradients, method, loaded, backend])
def test_calls_of_several_threads_have_the_samples_of_as_many_calls_in_turn(
    made: Callable[[Encoder, Path], Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Encoder()

    def bits(call: Any) -> bytes:
        return bytes(call(X).detach().numpy().tobytes())

    first = made(model, tmp_path)
    in_turn = [bits(first) for _ in range(CALLS)]
    second = made(model, tmp_path)
    assert bits(second) == in_turn[0]  # captured by one thread
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(lambda _: bits(second), range(CALLS - 1)))
    assert len(set(in_turn)) == CALLS and sorted(found) == sorted(in_turn[1:])


@pytest.mark.parametrize("made", [module, loaded])
def test_the_gradient_has_the_bits_of_its_own_call(made: Callable[[Encoder, Path], Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    called = made(Encoder(), tmp_path)
    weight = next(called.parameters())
    results = [called(X) for _ in range(3)]
    found = [torch.autograd.grad(results[sample].sum(), weight)[0] for sample in (2, 0, 1)]
    for sample, gradient in zip((2, 0, 1), found, strict=True):
        (again,) = torch.autograd.grad(called.reseed(0, sample)(X).sum(), weight)
        assert torch.equal(gradient, again)
    assert not torch.equal(found[0], found[1])


class Checked(nn.Module):
    """Refuses a call in which its two arguments share memory, of which it changes one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.add_(y)
        result: Tensor = self.layer(x)
        return result


def test_a_call_that_raises_gives_its_sample_back() -> None:
    compiled = fxround.compile(Checked(), "stochastic")
    compiled(X.clone(), X)
    before = compiled.rng
    with pytest.raises(fxround.FxroundError, match="shares its memory"):
        compiled(before := X.clone(), before)
    assert compiled.rng.tolist() == [0, 1]
    compiled(X.clone(), X)
    assert compiled.rng.tolist() == [0, 2]


def test_a_loaded_program_that_refuses_a_call_gives_its_sample_back(tmp_path: Path) -> None:
    program: Any = loaded(Encoder(), tmp_path)
    program(X)
    rng = program.program.get_buffer("fxround_rng")
    with pytest.raises(ValueError, match="not exported for these sizes"):
        program(torch.ones(4, 9))
    assert rng.tolist() == [0, 1]
    program(X)
    assert rng.tolist() == [0, 2]
