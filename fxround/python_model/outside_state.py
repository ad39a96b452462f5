"""The modules and tensors that a function's code reaches by name: what a compiled function takes as its state.

They are found in closures, globals, defaults, bound objects and the user's own helper functions, without calling the
function, so that a compiled function reads their current values and passes gradients to them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Final

from torch import Tensor, nn

from fxround.capture.guards import is_installed

# A function that reaches more objects than these (a data set in a list) has no more state.
_MOST: Final = 10_000
_MISSING: Final = object()


class OutsideState:
    """The modules and tensors of one function, by names that its author would recognize.

    found: for example ``{"model": model, "settings_weight": tensor}``
    """

    def __init__(self, function: Any) -> None:
        self.found: dict[str, nn.Module | Tensor] = {}
        self._places: list[tuple[Any, Any, Any]] = []
        self._seen: dict[int, Any] = {}
        self._walk("", function)
        held = {id(part) for value in self.found.values() if isinstance(value, nn.Module) for part in _parts(value)}
        self.found = {name: value for name, value in self.found.items() if id(value) not in held}
        del self._seen

    def is_current(self) -> bool:
        """Whether every name still means what it meant."""
        return all(_at(holder, key) is value for holder, key, value in self._places)

    def _walk(self, name: str, value: Any) -> bool:
        """Take note of what a value reaches; return whether that is a module, a tensor or code."""
        if isinstance(value, Tensor | nn.Module):
            if id(value) not in self._seen and not _is_compiled(value):
                self._seen[id(value)] = value
                self.found[self._named(name)] = value
            return True
        if id(value) in self._seen or len(self._seen) > _MOST:
            return False
        self._seen[id(value)] = value
        is_code = isinstance(value, FunctionType)
        reaches = [self._enter(name, *place, keep=is_code) for place in _places(value)]
        return is_code or any(reaches)

    def _enter(self, name: str, holder: Any, key: Any, label: str, *, keep: bool) -> bool:
        value = _at(holder, key)
        reaches = self._walk(f"{name}.{label}" if name and label else name or label, value)
        if reaches or keep:
            self._places.append((holder, key, value))
        return reaches

    def _named(self, path: str) -> str:
        name = re.sub(r"\W+", "_", path).strip("_") or "tensor"
        taken = name in self.found or name in _TAKEN
        return f"{name}_{len(self.found)}" if taken else name


# A module of this name would hide an attribute.
_TAKEN: Final = frozenset((*dir(nn.Module), "function", "training"))


def _places(value: Any) -> Iterator[tuple[Any, Any, str]]:
    """Yield where a value holds others: the holder, the key, and a name."""
    if isinstance(value, FunctionType):
        if is_installed(value.__globals__):
            return
        code = value.__code__
        cells = zip(code.co_freevars, value.__closure__ or (), strict=True)
        yield from ((cell, None, name) for name, cell in cells)
        yield from ((value.__globals__, name, name) for name in dict.fromkeys(_names(code)))
        yield from ((value.__defaults__, i, f"default_{i}") for i in range(len(value.__defaults__ or ())))
        yield from ((value.__kwdefaults__, name, name) for name in value.__kwdefaults__ or ())
    elif isinstance(value, MethodType):
        yield value, "__self__", ""
        yield value, "__func__", ""
    elif isinstance(value, functools.partial):
        yield value, "func", ""
        yield from ((value.args, i, f"args_{i}") for i in range(len(value.args)))
        yield from ((value.keywords, name, name) for name in value.keywords)
    elif isinstance(value, list | tuple):
        yield from ((value, i, str(i)) for i in range(len(value)))
    elif isinstance(value, dict):
        yield from ((value, key, str(key)) for key in value)
    elif _is_plain_object(value):
        yield from ((vars(value), key, key) for key in vars(value))
        if type(value) not in (SimpleNamespace,):
            yield type(value).__dict__, "__call__", ""


def _is_compiled(module: Any) -> bool:
    return type(module).__module__.partition(".")[0] == "fxround"


def _is_plain_object(value: Any) -> bool:
    """Whether a value is an object of the user's own class."""
    if isinstance(value, type | ModuleType | CellType | CodeType) or not hasattr(value, "__dict__"):
        return False
    if isinstance(value, SimpleNamespace):
        return True
    import sys

    module = sys.modules.get(type(value).__module__)
    return module is not None and hasattr(module, "__file__") and not is_installed(vars(module))


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names of a code's globals, of the functions inside of it too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _parts(module: nn.Module) -> Iterator[Any]:
    yield from (part for part in module.modules() if part is not module)
    yield from (*module.parameters(), *module.buffers())


def _at(holder: Any, key: Any) -> Any:
    """Return what a holder has at a key; a mark if it has nothing."""
    if isinstance(holder, CellType):
        try:
            return holder.cell_contents
        except ValueError:  # a variable without a value
            return _MISSING
    if isinstance(holder, Mapping):
        return holder.get(key, _MISSING)
    if isinstance(holder, list | tuple):
        return holder[key] if key < len(holder) else _MISSING
    return getattr(holder, key, _MISSING)
