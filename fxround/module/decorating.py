"""``@fxround.compile(policy=...)``: functions, and methods of modules, that are compiled where they are defined.

A compiled function that is found through an instance is a method: each module has its own compiled function, with its
own (seed, sample), which shares the module's state.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, Final

from torch import nn

from fxround.errors import CaptureError
from fxround.module.attributes import Reaching
from fxround.python_model.functions import Function, Method

_KEPT: Final = "_fxround_methods"
_NAMES: Final = ("__name__", "__qualname__", "__doc__", "__module__")


class _Methods(dict[Any, Any]):
    """The compiled methods of one module; a copy of the module compiles its own."""

    def __reduce__(self) -> Any:
        return _Methods, ()


def names_of(function: Any) -> dict[str, Any]:
    """Return the attributes that ``functools.wraps`` would give to a compiled function."""
    named = {name: getattr(function, name) for name in _NAMES if hasattr(function, name)}
    return named | {"__wrapped__": function} if named else {}


def is_plain(source: nn.Module) -> bool:
    """Whether the module is a function that becomes a method when it is found through an instance."""
    return isinstance(source, Function) and not isinstance(source, Method) and isinstance(source.function, FunctionType)


def bound(compiled: Any, instance: Any, make: Callable[[Method], Any]) -> Any:
    """Return the compiled function as a method of ``instance``; ``make`` compiles a module's method."""
    if not isinstance(instance, nn.Module):
        return MethodType(compiled, instance)
    methods = instance.__dict__.setdefault(_KEPT, _Methods())
    if compiled not in methods:
        methods[compiled] = make(Method(MethodType(compiled.source.function, instance)))
    return methods[compiled]


def global_name(compiled: Any) -> str | None:
    """Return the name under which a decorated function is found in its module, by which it is pickled."""
    function = compiled.source.function if is_plain(compiled.source) else None
    held: Any = sys.modules.get(getattr(function, "__module__", None) or "")
    name: str = getattr(function, "__qualname__", "")
    for part in name.split("."):
        held = getattr(held, part, None)
    return name if held is compiled else None


def refuse_compiled(model: nn.Module) -> None:
    """Raise CaptureError for a module that is compiled already, or whose forward is: graphs do not nest."""
    for path, module in model.named_modules():
        decorated = isinstance(inspect.getattr_static(type(module), "forward", None), Reaching)
        if decorated or isinstance(module, Reaching):
            what = "has a forward that is decorated with fxround.compile" if decorated else "is compiled already"
            raise CaptureError(
                f"{type(model).__name__}: {path or 'the model itself'} {what}, and is captured by itself. Compile the "
                "whole model, of modules that are not compiled, or leave the outer one as it is."
            )
