"""Unrounded methods: detect floating-point operations that a model's method computes outside rounded calls.

Such a method runs under a dispatch mode that sees each operator that it runs itself. The mode is switched off while a
compiled module computes, forward or backward.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any, Final

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from fxround.compiler.repeated_bits import callers
from fxround.errors import UnsupportedOperator
from fxround.operators.rules import RULES, OpRule, rule_of

# In-place operators without arithmetic, whose functional forms have no row in RULES.
_HARMLESS: Final = frozenset(("zero", "normal", "random", "set", "resize_as", "detach", "requires_grad", "fill"))
_ARITHMETIC: Final = ("pointwise", "elementary", "contraction", "reduction", "opaque")


class _Thread(threading.local):
    """The watch of the innermost running method of a thread."""

    watch: Any = None


_THREAD: Final = _Thread()
_NOTHING: Final = contextlib.nullcontext()


@contextlib.contextmanager
def watching(model: nn.Module, name: str, strict: bool, told: set[tuple[str, str]]) -> Iterator[None]:
    """Watch the operators that the block, the model's method ``name``, computes outside compiled modules.

    A floating-point operation raises UnsupportedOperator if ``strict``, else it warns once per (name, operator) in
    ``told``.
    """
    outer, _THREAD.watch = _THREAD.watch, _Watch(f"{type(model).__name__}.{name}", name, strict, told)
    try:
        with _THREAD.watch:
            yield
    finally:
        _THREAD.watch = outer


def unwatched() -> contextlib.AbstractContextManager[None]:
    """Return a context that switches the watch off, for the computation of a compiled module."""
    return _NOTHING if _THREAD.watch is None else _without(_THREAD.watch)


@contextlib.contextmanager
def _without(watch: Any) -> Iterator[None]:
    current: Any = _get_current_dispatch_mode()
    if current is not watch:
        yield
        return
    _THREAD.watch = None
    watch.__exit__(None, None, None)
    try:
        yield
    finally:
        watch.__enter__()
        _THREAD.watch = watch


class _Watch(TorchDispatchMode):
    """A dispatch mode that sees every operator that a method runs itself."""

    def __init__(self, title: str, name: str, strict: bool, told: set[tuple[str, str]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._title, self._name, self._strict, self._told = title, name, strict, told

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if rounds(func, args, kwargs, result):
            self._tell(str(func))
        return result

    def _tell(self, operator: str) -> None:
        if not self._strict and (self._name, operator) in self._told:
            return
        self._told.add((self._name, operator))
        level = callers()
        frame = sys._getframe(level - 1)
        message = (
            f"{self._title} computes {operator} itself, outside of the model's forward, at "
            f"{frame.f_code.co_filename}:{frame.f_lineno}: PyTorch's kernel rounds it, not the policy. To round all of "
            f"the method, compile it: fxround.compile(model.{self._name}, policy)"
        )
        if self._strict:
            raise UnsupportedOperator(f"{message}; to leave it to PyTorch, pass strict=False to fxround.compile.")
        warnings.warn(f"{message}.", UserWarning, stacklevel=level)


def rounds(func: Any, args: Any, kwargs: Any, result: Any) -> bool:
    """Whether an operator that was run may have rounded a number."""
    floats = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor) and x.is_floating_point()]
    name = str(func)
    if not floats or name.startswith("fxround."):
        return False
    namespace, operator, *overload = name.split(".")
    if operator.endswith("_") and not operator.endswith("__"):
        operator = operator.removesuffix("_")
        if operator in _HARMLESS:
            return False
        if operator == "copy":
            return _narrows(args[1], args[0])
        name = ".".join([namespace, operator, *overload])
    if name == "aten._to_copy.default":
        return _narrows(args[0], floats[0])
    rule = RULES.get(name)
    if rule is None or rule.kind in ("integer", "opaque"):
        rule = _refined(getattr(getattr(torch.ops.aten, operator, None), overload[0], func), args, kwargs, result)
    return rule is None or rule.kind in _ARITHMETIC


def _narrows(source: Tensor, target: Tensor) -> bool:
    """Whether a conversion may round."""
    wide = torch.promote_types(source.dtype, target.dtype)
    return source.dtype != torch.bool and not (source.dtype.is_floating_point and wide == target.dtype)


def _refined(func: Any, args: Any, kwargs: Any, result: Any) -> OpRule | None:
    """Return the rule of a call, from a graph of one node; None if there is none."""
    graph = fx.Graph()

    def entering(x: Tensor) -> fx.Node:
        node = graph.placeholder("x")
        node.meta["val"] = x
        return node

    node = graph.call_function(func, *pytree.tree_map_only(Tensor, entering, (args, kwargs)))
    node.meta["val"] = result
    return rule_of(node)
