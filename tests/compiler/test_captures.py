"""A call that is like the one before is found by a comparison: whatever differs, it has the graph of its own kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxround


class Model(nn.Module):
    """A model of one or two tensors, which may be in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 6), 2.0

    def forward(self, x: Any, y: Any = None, turned: bool = False) -> Tensor:
        """Return a layer's result."""
        values = x if isinstance(x, list) else [x] if y is None else [x, y]
        total = sum(self.layer(value.float()) * self.scale for value in values)
        return total.t() if turned else total


def _compiled() -> tuple[Model, Any]:
    torch.manual_seed(0)
    model = Model().eval()
    return model, fxround.compile(model, "identity")


_X: Tensor = torch.randn(6, 6)
ARGUMENTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "other numbers": ((_X + 1,), {}),
    "other sizes": ((_X[:3],), {}),
    "other strides": ((_X.t(),), {}),
    "another dtype": ((_X.double(),), {}),
    "negative": ((torch._neg_view(_X),), {}),
    "a parameter": ((nn.Parameter(_X),), {}),
    "a gradient": ((_X.clone().requires_grad_(),), {}),
    "more dimensions": ((_X[None],), {}),
    "two": ((_X, _X + 1), {}),
    "one twice": ((_X, _X), {}),
    "a list": (([_X],), {}),
    "a list of two": (([_X, _X + 1],), {}),
    "by name": ((), {"x": _X}),
    "a flag": ((_X,), {"turned": True}),
    "no second": ((_X, None), {}),
}
CHANGES: dict[str, Callable[[Model], Any]] = {
    "an attribute": lambda model: setattr(model, "scale", 3.0),
    "a parameter": lambda model: setattr(model.layer, "weight", nn.Parameter(torch.ones(6, 6))),
    "a method": lambda model: setattr(model, "forward", lambda x: x * 7),
    "a hook": lambda model: model.layer.register_forward_hook(lambda module, args, result: result * 5),
}


@torch.no_grad()
@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_that_differ_have_their_own_graph(case: str) -> None:
    model, compiled = _compiled()
    args, kwargs = ARGUMENTS[case]
    expected = fxround.compile(model, "identity")(*args, **kwargs)
    usual = fxround.compile(model, "identity")(_X)
    for _ in range(4):
        assert torch.equal(compiled(_X), usual)
    for _ in range(4):
        assert torch.equal(compiled(*args, **kwargs), expected)
    for _ in range(2):
        assert torch.equal(compiled(_X), usual) and torch.equal(compiled(*args, **kwargs), expected)


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_calls_that_are_alike_is_noticed(change: str) -> None:
    model, compiled = _compiled()
    for _ in range(4):
        before = compiled(_X)
    CHANGES[change](model)
    expected = fxround.compile(model, "identity")(_X)
    assert torch.equal(compiled(_X), expected) and not torch.equal(before, expected)


def test_modes_and_contexts_are_noticed_between_calls_that_are_alike() -> None:
    model, compiled = _compiled()
    with torch.no_grad():
        for _ in range(4):
            plain = compiled(_X)
        with torch.autocast("cpu", torch.bfloat16):
            assert compiled(_X).dtype == model(_X).dtype == torch.bfloat16
        assert torch.equal(compiled(_X), plain)
        with pytest.raises(fxround.FxroundError, match="transforms a compiled module"):
            torch.func.vmap(compiled)(_X[None])
        torch.set_flush_denormal(True)
        try:
            with pytest.raises(fxround.FxroundError, match="subnormal"):
                compiled(_X)
        finally:
            torch.set_flush_denormal(False)
    assert not plain.requires_grad and compiled(_X).requires_grad
    with torch.no_grad():
        model.train()
        assert torch.equal(compiled(_X), plain) and not compiled(_X).requires_grad


@pytest.mark.parametrize(
    "model, x",
    [
        (nn.Linear(4, 3), torch.arange(8).view(2, 4)),
        (nn.Linear(4, 3), torch.ones(2, 4, dtype=torch.bool)),
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 3).double()), torch.ones(2, 4, dtype=torch.int32)),
        (nn.Conv2d(1, 2, 3), torch.ones(1, 1, 5, 5, dtype=torch.int64)),
        (nn.Bilinear(2, 2, 3), (torch.ones(4, 2), torch.ones(4, 2, dtype=torch.int64))),
    ],
    ids=["Linear", "bools", "binary64", "Conv2d", "Bilinear"],
)
def test_whole_numbers_that_a_model_refuses_are_refused_by_it(model: nn.Module, x: Any) -> None:
    """A trace promotes them, where PyTorch's kernels of products do not."""
    args = x if isinstance(x, tuple) else (x,)
    with pytest.raises(RuntimeError) as stock:
        model(*args)
    with pytest.raises(RuntimeError) as refused:
        fxround.compile(model, "identity")(*args)
    assert str(refused.value) == str(stock.value)
