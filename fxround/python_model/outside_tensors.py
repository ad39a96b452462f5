"""The tensors that a function reads from outside: neither its arguments nor results of its own operations.

A call of the function under ``Watched`` finds them by the operations that read them, however the function reaches
them: a closure, a global, an attribute, a module, a default. Their order of use tells them apart from call to call.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fxround.graph.values import instances_in, memory_of

_FRESH: Final = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


class Watched(TorchDispatchMode):
    """Record the tensors from outside that the operations in the block read, in the order of their first use.

    found       the tensors
    signature   the operations with their numbers and the tensors from outside that each reads, and the numbers and
                strings that the code names: two calls with the same signature use the tensors of ``found`` alike
    """

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Tensor]) -> None:
        """Watch a function of these arguments; the parameters and buffers of a module are not outside."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Tensor] = []
        self._function, self._operations = function, list[Any]()
        # The tensors themselves are kept, so that no other one takes the id of one that is gone.
        held = (*function.parameters(), *function.buffers()) if isinstance(function, nn.Module) else ()
        self._seen: dict[int, tuple[Tensor, int]] = {id(x): (x, -1) for x in (*arguments, *held)}
        self._own = {memory_of(x) for x in arguments}

    @property
    def signature(self) -> tuple[Any, ...]:
        """A hashable summary of the operations."""
        kinds = tuple((isinstance(x, nn.Parameter), x.requires_grad) for x in self.found)
        return kinds, tuple(self._operations), tuple(_plain("step", self._function, {}))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record what it reads.

        Raises ValueError if it changes a tensor from outside in place.
        """
        kwargs = kwargs or {}
        tensors = [] if func in _FRESH else list(instances_in((args, kwargs), Tensor))
        for x in _written(func, args, kwargs):
            if memory_of(x) not in self._own:
                raise ValueError(
                    f"the step changes {self._said(x)} in place, which a loop cannot do: make it part of the state and "
                    "return its next value (a batch norm: call eval() on it)"
                )
        places = tuple(self._place(x) for x in tensors)
        self._operations.append((func, places, _numbers(func, args)))
        given = {memory_of(x) for x in tensors} - self._own
        result = func(*args, **kwargs)
        for x in instances_in(result, Tensor):
            self._seen.setdefault(id(x), (x, -1))
            if memory_of(x) not in given:
                self._own.add(memory_of(x))
        return result

    def _place(self, x: Tensor) -> int:
        if id(x) not in self._seen:
            self._seen[id(x)] = (x, len(self.found))
            self.found.append(x)
        return self._seen[id(x)][1]

    def names(self) -> list[str]:
        """Return a name for each tensor, an identifier: ``w`` for a variable, ``m_weight`` for that of a module."""
        names: list[str] = []
        for i, x in enumerate(self.found):
            name = re.sub(r"\W+", "_", _name_of(self._function, x)).strip("_") or "tensor"
            names.append(name if name not in names else f"{name}_{i}")
        return names

    def _said(self, x: Tensor) -> str:
        name = _name_of(self._function, x)
        return f"{name}, a tensor from outside," if name else f"a tensor from outside of shape {tuple(x.shape)}"


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for i, argument in enumerate(func._schema.arguments if func._schema.is_mutable else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from instances_in(value, Tensor)


def _numbers(func: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """Return the numbers of a call by their type and digits, without sizes, which one capture leaves open."""
    pairs = zip(func._schema.arguments, args, strict=False)
    chosen = [x for argument, x in pairs if isinstance(x, float | bool) or str(argument.type) in ("number", "Tensor")]
    return tuple((type(x), repr(x)) for x in chosen if isinstance(x, bool | int | float | complex))


def _plain(name: str, value: Any, seen: dict[int, Any]) -> Iterator[tuple[str, str]]:
    """Yield the numbers and strings that a function's code reaches by name: also through objects and its helpers."""
    if value is None or isinstance(value, bool | int | float | complex | str):
        yield name, repr(value)
        return
    if id(value) in seen or isinstance(value, Tensor | type | ModuleType):
        return
    seen[id(value)] = value
    if isinstance(value, list | tuple | dict):
        inner: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else enumerate(value)
    elif isinstance(value, FunctionType | MethodType | functools.partial):
        inner = visible(value)
    else:
        inner = getattr(value, "__dict__", {}).items()
    for key, part in inner:
        yield from _plain(f"{name}.{key}", part, seen)


def _name_of(function: Any, tensor: Tensor) -> str:
    """Return how the function's code spells a tensor; the empty text if it is reached in another way."""
    pairs = (pair for name, value in visible(function) for pair in _tensors(name, value))
    return next((name for name, x in pairs if x is tensor), "")


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, nn.Module):
        yield from ((f"{name}.{inner}", x) for inner, x in (*value.named_parameters(), *value.named_buffers()))
    else:
        yield from ((name + pytree.keystr(path), x) for path, x in pytree.tree_flatten_with_path(value)[0])


def visible(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the variables of a function's code that are not its arguments, with their values."""
    if isinstance(function, nn.Module):
        yield "self", function
    elif isinstance(function, functools.partial):
        yield from ((f"args_{i}", x) for i, x in enumerate(function.args))
        yield from function.keywords.items()
        yield from visible(function.func)
    elif isinstance(function, MethodType):
        yield from [("self", function.__self__), *getattr(function.__self__, "__dict__", {}).items()]
        yield from visible(function.__func__)
    elif isinstance(function, FunctionType):
        seen = inspect.getclosurevars(function)
        yield from (*seen.nonlocals.items(), *seen.globals.items())
        signature = inspect.signature(function)
        yield from ((p.name, p.default) for p in signature.parameters.values() if p.default is not p.empty)
    else:
        yield from getattr(function, "__dict__", {}).items()
