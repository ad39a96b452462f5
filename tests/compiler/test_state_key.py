"""The key of a model's state: a remembered reading equals a new one after every kind of change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxround
from fxround.compiler.state_key import StateKeys
from fxround.errors import CaptureError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.scale = 0.5


def hook(*args: object) -> None:
    """A hook that does nothing."""


CHANGES: dict[str, Callable[[Model], object]] = {
    "eval mode": lambda m: m.eval(),
    "eval mode of a part": lambda m: m.norm.eval(),
    "a parameter": lambda m: setattr(m.first, "weight", nn.Parameter(torch.zeros(5, 3))),
    "no parameter": lambda m: setattr(m.first, "bias", None),
    "a parameter's dtype": lambda m: m.double(),
    "a parameter's data": lambda m: setattr(m.first.weight, "data", torch.zeros(2, 3)),
    "a parameter that is frozen": lambda m: m.first.weight.requires_grad_(False),
    "a buffer": lambda m: m.register_buffer("extra", torch.zeros(1)),
    "a module": lambda m: setattr(m, "first", nn.Linear(3, 4)),
    "one module more": lambda m: m.add_module("extra", nn.Identity()),
    "a hook": lambda m: m.norm.register_forward_hook(hook),
    "a hook before": lambda m: m.register_forward_pre_hook(hook),
    "a hook of gradients": lambda m: m.norm.register_full_backward_hook(hook),
    "other hooks": lambda m: setattr(m, "_forward_hooks", {7: hook}),
    "other modules": lambda m: setattr(m, "_modules", {"first": nn.Linear(3, 4)}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_read(change: str) -> None:
    model, keys = Model(), StateKeys()
    before = keys.of(model)
    # The first calls compare objects, later ones the versions of dicts.
    assert keys.of(model) == before == keys.of(model)
    CHANGES[change](model)
    after = keys.of(model)
    assert after == StateKeys().of(model)
    assert after != before
    assert keys.of(model) == after


def test_a_model_that_did_not_change_is_not_read_again() -> None:
    model, keys = Model(), StateKeys()
    (modules, state, *_) = keys.of(model)
    model.scale = 0.25  # which graphs that read it compare
    assert keys.of(model)[0] is modules and keys.of(model)[1] is state


def test_values_and_hooks_of_a_removed_kind_are_read() -> None:
    model, keys = Model(), StateKeys()
    handle = model.register_forward_hook(hook)
    before = keys.of(model)
    handle.remove()
    assert keys.of(model) == StateKeys().of(model) != before


def test_autocast_and_the_default_dtype_count() -> None:
    model, keys = Model(), StateKeys()
    before = keys.of(model)
    with torch.autocast("cpu"):
        assert keys.of(model) != before
    torch.set_default_dtype(torch.float64)
    try:
        assert keys.of(model) != before
    finally:
        torch.set_default_dtype(torch.float32)
    assert keys.of(model) == before


def test_globals_that_are_not_those_of_the_module_that_they_name_are_read_or_refused() -> None:
    names: dict[str, Any] = {"__name__": "torch", "factor": 2.0}
    exec("def scaled(x):\n    return x * factor\n", names)
    compiled = fxround.compile(names["scaled"], "reproducible")
    if torch.__version__ >= "2.14":  # Dynamo reads the globals of the function itself
        for names["factor"] in (2.0, 3.0):
            assert torch.equal(compiled(torch.ones(3)), torch.full((3,), names["factor"]))
        return
    with pytest.raises(CaptureError, match=r"cannot be read again .*'factor'.*the module that its __name__ says"):
        compiled(torch.ones(3))
