"""A dispatch mode that finds the floating-point operations which a model's method computes outside rounded calls.

A method runs under the mode, which sees each operator that the method itself runs. An operation that uses only results
and arguments is rounded by the policy (``method_operations``). One that uses the model's state (a call of a submodule),
or that is differentiated, raises an error or gives a warning. The mode is switched off while a compiled module
computes.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any, Final, Protocol

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from fxround.errors import UnsupportedOperator, callers
from fxround.operators.rules import RULES, OpRule, rule_of
from fxround.policy import Policy
from fxround.python_model.method_operations import Operations, functional_of, storages_of, uses

# In-place operators without arithmetic, whose functional forms have no row in RULES.
_HARMLESS: Final = frozenset(("zero", "normal", "random", "set", "resize_as", "detach", "requires_grad", "fill"))
_ARITHMETIC: Final = ("pointwise", "elementary", "contraction", "reduction", "opaque")


class _Thread(threading.local):
    """The watch of the innermost running method of a thread."""

    watch: Any = None


_THREAD: Final = _Thread()
_NOTHING: Final = contextlib.nullcontext()


class WatchedModule(Protocol):
    """The interface that a watch needs of its compiled module."""

    source: nn.Module
    policy: Policy
    rng: Tensor
    _is_strict: bool
    # The (method, operator) pairs for which a warning was given.
    _told: set[tuple[str, str]]
    _operations: Operations


@contextlib.contextmanager
def watching(compiled: WatchedModule, name: str) -> Iterator[None]:
    """Round the operators that the block, the model's method ``name``, computes outside compiled modules.

    A floating-point operation that cannot be rounded raises UnsupportedOperator if the module is strict, else it warns
    once per (name, operator).
    """
    outer, _THREAD.watch = _THREAD.watch, _Watch(compiled, name)
    try:
        with _THREAD.watch:
            yield
    finally:
        _THREAD.watch = outer


def is_watched() -> bool:
    """Whether a method runs in this thread, under a watch."""
    return _THREAD.watch is not None


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

    def __init__(self, compiled: WatchedModule, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._title, self._name = f"{type(compiled.source).__name__}.{name}", name
        self._compiled, self._strict, self._told = compiled, compiled._is_strict, compiled._told
        # A policy without rules leaves every operation unchanged, here as in the model's forward.
        self._leaves_all = not compiled.policy.rules
        self._state: frozenset[int] | None = None
        self._number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._leaves_all:
            return func(*args, **kwargs)
        functional = functional_of(func)
        in_place = functional is not None and functional is not func
        before = (args[0].clone(), *args[1:]) if in_place and args[0].is_floating_point() else args
        result = func(*args, **kwargs)
        if not rounds(func, args, kwargs, result):
            return result
        rounded = None if functional is None else self._rounded(functional, before, kwargs)
        if rounded is None:
            self._tell(str(func))
            return result
        return args[0].copy_(rounded) if in_place else rounded

    def _rounded(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the rounded result; None for an operation on the model's state, or one that is differentiated."""
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves):
            return None
        if self._state is None:
            self._state = storages_of(self._compiled.source)
        if uses(leaves, self._state):
            return None
        self._number += 1
        seed, sample = self._compiled.rng.tolist()
        return self._compiled._operations.rounded(func, args, kwargs, (seed, sample), self._number - 1)

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
