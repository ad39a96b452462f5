"""Results of Python's operations in a model are Python's, or the model is refused."""

from __future__ import annotations

import copy
import math
import operator
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround.errors import CaptureError

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
Use = Callable[[Any, Tensor], Any]
COUNTING = pytest.mark.parametrize("counting", [False, True], ids=["captured", "replayed"])


class Reading(nn.Module):
    """A model that multiplies by what a function makes of it and of the argument. counting: it changes Python state."""

    def __init__(self, use: Use, counting: bool, **held: Any) -> None:
        super().__init__()
        self.use, self.counting, self.calls = use, counting, 0
        for name, value in held.items():
            setattr(self, name, copy.deepcopy(value))

    def forward(self, x: Tensor) -> Tensor:
        if self.counting:
            self.calls += 1
        y: Tensor = x * self.use(self, x)
        return y


def misfits(model: nn.Module, arguments: Sequence[Any]) -> list[Any]:
    """Return the calls with another result than the model's; a function among the arguments changes the model."""
    compiled, wrong, x = fxround.compile(model, "reproducible"), [], torch.ones(2)
    for i, each in enumerate(arguments):
        if callable(each):
            each(model)
        x = x if callable(each) else torch.ones(each)
        expected = model(x)
        if not torch.equal(compiled(x), expected):
            wrong.append(i)
    return wrong


SIZES = [(2, 4), (3, 4), (5, 4)]
CONTAINED: dict[str, Use] = {
    "shape": lambda m, x: 2 if 3 in x.shape else 3,
    "absent": lambda m, x: 2 if 3 not in x.size() else 3,
    "list": lambda m, x: 2 if 3 in [x.shape[0], 7] else 3,
    "deque": lambda m, x: 2 if 3 in deque([x.shape[0]]) else 3,
    "stride": lambda m, x: 2 if 3 in x.t().contiguous().stride() else 3,
    "half": lambda m, x: 2 if 1.5 in [x.shape[0] / 2] else 3,
    "tuple": lambda m, x: 2 if (3, 4) in [tuple(x.shape)] else 3,
    "nested": lambda m, x: 2 if [3] in [[x.shape[0]]] else 3,
}


@pytest.mark.part(2)
@COUNTING
@pytest.mark.parametrize("use", CONTAINED.values(), ids=CONTAINED)
def test_a_number_is_among_sizes_that_are_symbols(use: Use, counting: bool) -> None:
    assert not misfits(Reading(use, counting), SIZES)


@COUNTING
def test_a_number_is_among_numbers_that_change(counting: bool) -> None:
    model = Reading(lambda m, x: 2 if 3 in m.numbers else 3, counting, numbers=[1, 2])
    assert not misfits(model, [2, *(lambda m, n=n: m.numbers.__setitem__(0, n) for n in (3, 4, 3))])


class Key:
    """A key that equals another of the same value."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and other.value == self.value

    def __hash__(self) -> int:
        return hash(self.value)


KEYED: dict[str, Use] = {
    "set": lambda m, x: len({Key(1), Key(1)}),
    "get": lambda m, x: {Key(1): 3}.get(Key(1), 7),
    "held": lambda m, x: m.held.get(Key(1), 7),
    "in": lambda m, x: 2 if Key(1) in m.held else 5,
    "fromkeys": lambda m, x: len(dict.fromkeys([Key(1), Key(1)])),
}


@COUNTING
@pytest.mark.parametrize("use", KEYED.values(), ids=KEYED)
def test_equal_keys_are_refused(use: Use, counting: bool) -> None:
    with pytest.raises(CaptureError, match="Key has an __eq__ of its own" if VERSION >= (2, 13) else ""):
        fxround.compile(Reading(use, counting, held={Key(1): 3}), "reproducible")(torch.ones(2))


CONSUMED: dict[str, Callable[[Any], Any]] = {
    "any": lambda it: (any(it), next(it))[1],
    "all": lambda it: (all(it), next(it, 9))[1],
    "sum": lambda it: (sum(it), next(it, 9))[1],
    "product": lambda it: (math.prod(it), next(it, 9))[1],
    "count": lambda it: (operator.countOf(it, 1), next(it, 9))[1],
    "list": lambda it: (list(it), next(it, 9))[1],
}


@pytest.mark.parametrize("use", CONSUMED.values(), ids=CONSUMED)
def test_an_iterator_is_where_its_reader_left_it(use: Callable[[Any], Any]) -> None:
    model = Reading(lambda m, x: use(iter([1, 2, 3])), False)
    try:
        assert not misfits(model, [2])
    except CaptureError:
        assert use in (CONSUMED["product"],) or VERSION < (2, 13)


@COUNTING
def test_a_spec_formats_a_value(counting: bool) -> None:
    def use(model: Any, x: Tensor) -> int:
        return len(format(3, ".2f") + format(5, "b") + format("ab", ">5") + format(7) + f"{3:.3f}")

    assert not misfits(Reading(use, counting), [2])


def _negative(model: Any) -> None:
    model.zero, model.zeros = -0.0, [-0.0]


@COUNTING
@pytest.mark.parametrize("use", [lambda m, x: math.copysign(1, m.zero), lambda m, x: math.copysign(1, m.zeros[0])])
def test_the_sign_of_zero_may_change(use: Use, counting: bool) -> None:
    assert not misfits(Reading(use, counting, zero=0.0, zeros=[0.0]), [2, _negative])


def test_the_factory_of_a_defaultdict_may_change() -> None:
    def another(model: Any) -> None:
        model.held.clear()
        model.held.default_factory = lambda: 7

    model = Reading(lambda m, x: m.held["q"], False, held=defaultdict(lambda: 2))
    assert not misfits(model, [2, lambda m: m.held.clear(), lambda m: m.held.clear(), another])
