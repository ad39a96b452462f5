"""What Dynamo computes otherwise than Python is refused, or is what the model computes."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround.errors import CaptureError, UnsupportedOperator

X = torch.ones(2)


class Holding(nn.Module):
    """A model that applies a function to an object that it holds and its argument."""

    def __init__(self, held: Any, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.held, self.use = held, use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.held, x)


def pushed(name: str) -> Callable[[Any, Tensor], Tensor]:
    def use(held: Any, x: Tensor) -> Tensor:
        getattr(held, name)([5.0, 6.0] if name.startswith("extend") else 5.0)
        return x * sum(held)

    return use


def moved(held: Any, x: Tensor) -> Tensor:
    held.move_to_end("a")
    return x * next(iter(held.values()))


REFUSED: dict[str, Callable[[], nn.Module]] = {
    **{
        f"deque.{name}": lambda name=name: Holding(deque([1.0, 2.0], maxlen=2), pushed(name))
        for name in ("append", "appendleft", "extend", "extendleft")
    },
    "OrderedDict.move_to_end": lambda: Holding(OrderedDict(a=2.0, b=3.0), moved),
    "Random.random": lambda: Holding(random.Random(3), lambda held, x: x * held.random()),
    "Random.uniform": lambda: Holding(random.Random(3), lambda held, x: x * held.uniform(0, 1)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_another_number_is_refused(name: str) -> None:
    with pytest.raises(CaptureError, match=name):
        fxround.compile(REFUSED[name](), "reproducible")(X)


def test_a_deque_with_a_limit_is_read() -> None:
    """And one that the call makes, or that has no limit, is changed."""
    read = Holding(deque([1.0, 2.0], maxlen=2), lambda held, x: x * (sum(held) + held.maxlen))
    assert fxround.compile(read, "reproducible")(X).tolist() == [5.0, 5.0]

    def own(held: Any, x: Tensor) -> Tensor:
        window = deque([1.0], maxlen=2)
        window.extend([2.0, 3.0])
        return x * sum(window)

    assert fxround.compile(Holding(None, own), "reproducible")(X).tolist() == [5.0, 5.0]
    growing = fxround.compile(Holding(deque([1.0]), pushed("append")), "reproducible")
    assert [growing(X)[0].item() for _ in range(3)] == [6.0, 11.0, 16.0]


def test_numbers_of_pythons_generator_are_those_of_the_model() -> None:
    model = Holding(None, lambda held, x: x * random.randint(0, 1000))
    random.seed(3)
    expected = [model(X)[0].item() for _ in range(4)]
    random.seed(3)
    compiled = fxround.compile(model, "reproducible")
    assert [compiled(X)[0].item() for _ in range(4)] == expected


def added(*numbers: float, scale: float = 1.0) -> float:
    return scale * sum(numbers)


SPREAD: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "attribute": lambda held, x: x * added(*held),
    "numbers": lambda held, x: x * added(*range(7)),
    "none": lambda held, x: x * (1 + added(*range(0))),
    "keywords": lambda held, x: x * added(*held, scale=3.0),
    "method": lambda held, x: x.expand(1, 1, 2).permute(*range(x.dim() + 1, -1, -1)),
    "flip": lambda held, x: torch.stack([x, x * 2]).flip(*range(2)),
    "class": lambda held, x: x * slice(*held[:3]).stop,
    "builtin": lambda held, x: x * max(*held),
}


@pytest.mark.parametrize("use", SPREAD.values(), ids=SPREAD)
def test_a_range_is_spread_into_its_numbers(use: Callable[[Any, Tensor], Tensor]) -> None:
    model = Holding(range(2, 9, 2), use)
    compiled = fxround.compile(model, "reproducible")
    x = torch.tensor([1.0, 3.0])
    assert torch.equal(compiled(x), model(x))
    model.held = range(1, 4)
    assert torch.equal(compiled(x), model(x))


DRAWN: dict[str, Callable[[Tensor], Tensor]] = {
    "multinomial": lambda x: x * torch.multinomial(x, 1),
    "randperm": lambda x: x[torch.randperm(2)] * 2,
    "randint": lambda x: x * torch.randint(0, 9, (2,)),
    "randint_like": lambda x: x * torch.randint_like(x, 9, dtype=torch.int64),
}


@pytest.mark.parametrize("name", DRAWN)
def test_integers_from_the_global_generator_are_refused_under_strict(name: str) -> None:
    with pytest.raises(UnsupportedOperator, match=rf"aten\.{name}.*draws integers from PyTorch's global generator"):
        fxround.compile(DRAWN[name], "reproducible")(X)
    assert fxround.compile(DRAWN[name], "reproducible", strict=False)(X).shape == (2,)
