"""The order of keys, and names that ``hasattr`` does not find, may change between calls."""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround.errors import CaptureError

X = torch.arange(1.0, 4.0)
Use = Callable[[Any, Tensor], Tensor]


class Reading(nn.Module):
    """A model that applies a function to an object and its argument. counting: it changes Python state, too."""

    def __init__(self, held: Any, use: Use, counting: bool = False) -> None:
        super().__init__()
        self.held, self.use, self.counting, self.calls = held, use, counting, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.counting:
            self.calls += 1
        return self.use(self.held, x)


def folded(x: Tensor, values: Any) -> Tensor:
    for value in values:
        x = x * 2 + value
    return x


def of_keywords(x: Tensor, **values: float) -> Tensor:
    return folded(x, values.values())


ORDERED: dict[str, Use] = {
    "keywords": lambda d, x: of_keywords(x, **d),
    "unpacked": lambda d, x: folded(x, {**d, "c": 3.0}.values()),
    "union": lambda d, x: folded(x, (d | {"c": 3.0}).values()),
    "copy": lambda d, x: folded(x, d.copy().values()),
    "text": lambda d, x: x * (2 if str(d).startswith("{'a'") else 3),
    "joined": lambda d, x: x * (2 if "".join(d) == "ab" else 3),
    "greatest": lambda d, x: x * (2 if max(d, key=lambda key: 0) == "a" else 3),
    "values": lambda d, x: folded(x, d.values()),
}


@pytest.mark.part("keywords-False", "union-False", "text-False", "greatest-False", "values-True")
@pytest.mark.parametrize("counting", [False, True])
@pytest.mark.parametrize("use", ORDERED.values(), ids=ORDERED)
def test_the_order_of_keys_may_change(use: Use, counting: bool) -> None:
    for kind in (dict, OrderedDict) if counting else (dict,):
        model = Reading(kind(a=1.0, b=2.0), use, counting)
        compiled = fxround.compile(model, "reproducible")
        for _ in range(3):
            assert torch.equal(compiled(X), use(model.held, X)), (kind, *model.held)
            model.held["a"] = model.held.pop("a")
        assert torch.equal(compiled(X), use(model.held, X)) and len(compiled.captures()) == 2
        if kind is OrderedDict:
            model.held.move_to_end("b")
            assert torch.equal(compiled(X), use(model.held, X))


def named(held: list[Any], x: Tensor) -> Tensor:
    module, function, method = held
    x = x * getattr(module, "gain", 1.0) + (2 if hasattr(function, "bias") else 0)
    return x * getattr(method, "scale", 3.0)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("settings_of_a_user")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


@pytest.mark.parametrize("counting", [False, True])
def test_a_module_and_a_function_may_get_an_attribute(counting: bool, module: ModuleType) -> None:
    class Owner:
        def method(self) -> None: ...

    def function() -> None: ...

    model = Reading([module, function, Owner().method], named, counting)
    compiled = fxround.compile(model, "reproducible")
    for holder, name in ((None, ""), (module, "gain"), (function, "bias"), (Owner.method, "scale")):
        if holder is not None:
            setattr(holder, name, 4.0)
        assert torch.equal(compiled(X), named(model.held, X)), name


def test_an_attribute_of_a_partial_is_refused() -> None:
    model = Reading(functools.partial(torch.add), lambda held, x: x * (2 if hasattr(held, "bias") else 3))
    compiled = fxround.compile(model, "reproducible")
    assert torch.equal(compiled(X), 3 * X)
    model.held.bias = 1
    with pytest.raises(CaptureError, match=r"reads the attribute 'bias' of .*held, a functools\.partial"):
        compiled(X)
