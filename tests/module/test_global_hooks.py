"""Hooks of all modules run for the model and its submodules as in eager mode, and not for the compiled module."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from layers import Calls
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import fxround
from fxround.runtime.schedule.epilogues import Epilogue

X = torch.arange(15.0).reshape(5, 3) / 8


@pytest.fixture
def registered() -> Iterator[Callable[..., Any]]:
    """Register a hook of all modules until the end of the test."""
    handles = []

    def register(how: Callable[..., Any], hook: Callable[..., Any]) -> Any:
        handles.append(how(hook))
        return handles[-1]

    yield register
    for handle in handles:
        handle.remove()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("how", [register_module_forward_hook, register_module_forward_pre_hook])
def test_a_hook_that_counts_sees_the_calls_of_eager_mode(
    registered: Callable[..., Any], how: Callable[..., Any], captured: bool
) -> None:
    calls: list[str] = []
    plain = model()
    compiled = fxround.compile(plain, "reproducible")
    if captured:
        compiled(X)
    handle = registered(how, lambda module, *_: calls.append(type(module).__name__))
    plain(X)
    eager = calls[:]
    assert len(eager) == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            calls.clear()
            compiled(X)
            assert calls == eager
    handle.remove()
    calls.clear()
    compiled(X)
    assert calls == []


def test_a_hook_that_changes_the_result_changes_it_once(registered: Callable[..., Any]) -> None:
    registered(register_module_forward_hook, lambda module, args, result: result * 2)
    compiled = fxround.compile(Calls(lambda x: x + 1.0), "reproducible")
    assert compiled(X).tolist() == ((X + 1) * 2).tolist()


@pytest.mark.parametrize("kept", [1, 2])
def test_a_hook_may_drop_and_replace_arguments(registered: Callable[..., Any], kept: int) -> None:
    def product(x: Tensor, y: Tensor | None = None) -> Tensor:
        return x * 2 if y is None else x * y

    registered(register_module_forward_pre_hook, lambda module, args: (args[0] * 4, *args[1:kept]))
    compiled = fxround.compile(Calls(product), "reproducible")
    for _ in range(3):
        assert compiled(X, X).tolist() == (X * 8 if kept == 1 else 4 * X * X).tolist()


def test_hooks_of_all_modules_and_of_the_compiled_module_run_together(registered: Callable[..., Any]) -> None:
    seen: list[str] = []
    compiled = fxround.compile(Calls(lambda x: x + 1.0), "reproducible")
    registered(register_module_forward_hook, lambda module, args, result: result * 2)
    own = compiled.register_forward_hook(lambda module, args, result: seen.append(type(module).__name__) or result * 8)
    assert compiled(X).tolist() == ((X + 1) * 16).tolist() and seen == ["RoundedModule"]
    own.remove()
    assert compiled(X).tolist() == ((X + 1) * 2).tolist()


def test_a_part_without_a_plan_is_no_module_to_a_hook(
    registered: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, x = nn.Sequential(nn.Linear(300, 200), nn.ReLU()), torch.randn(128, 300)
    planned = fxround.compile(plain, "reproducible")(x)
    calls: list[str] = []
    asked: list[Any] = []
    monkeypatch.setattr(Epilogue, "plan", lambda *given: asked.append(given))
    compiled = fxround.compile(plain, "reproducible", example_inputs=(x,))
    registered(register_module_forward_hook, lambda module, *_: calls.append(type(module).__name__))
    assert torch.equal(compiled(x), planned) and len(asked) == 1
    assert calls == ["Linear", "ReLU", "Sequential"]
