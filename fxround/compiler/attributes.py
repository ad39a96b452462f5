"""Attributes of a compiled module: fxround's own names, and for all others the model's attributes and methods.

A name of fxround's (``policy``, ``source``, ``rng``, ``graph``, ...) is fxround's on the compiled module; the model's
attribute of that name is ``compiled.source.policy``. Any other name is read, set and deleted on the model. A method
gets as ``self`` an object of the model's class with the model's own attributes, whose calls and ``forward`` are those
of the compiled module. Floating-point operations that the method itself computes are rounded one by one, or reported
(``method_dispatch``).
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Generator
from types import MethodType
from typing import Any, Final

from torch import nn

from fxround.compiler.executable import Function, Sharing
from fxround.compiler.method_dispatch import watching

# The attributes that captured graphs depend on, and what to do instead of setting them.
_FIXED: Final = {
    "policy": "with_policy(...) makes a module of another policy",
    "source": "fxround.compile(...) makes a module of another model",
}


class Reaching(Sharing):
    """A compiled module whose attributes, except fxround's own, are the model's."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            source = self.__dict__.get("source")
            if source is None or (name.startswith("__") and name.endswith("__")):
                raise
        if isinstance(source, Function):
            return getattr(source.function, name)
        return reached(self, source, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            if name in _FIXED:
                raise AttributeError(
                    f"compiled.{name} is fxround's own and fixed: {_FIXED[name]}; an attribute {name!r} of the model "
                    f"is compiled.source.{name}"
                )
            # Not by nn.Module.__setattr__: a buffer of the model may have the name of an attribute of fxround's.
            self.__dict__[name] = value
        elif hasattr(type(self), name) or "source" not in self.__dict__:
            object.__setattr__(self, name, value)
        else:
            setattr(self.source, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__ or hasattr(type(self), name):
            object.__delattr__(self, name)
        else:
            delattr(self.source, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.source)})  # type: ignore[no-untyped-call]

    def train(self, mode: bool = True) -> Any:
        """Set the training flag by the model's own ``train``, which may leave some modules out; returns the module."""
        self.source.train(mode)
        return self

    # The (method, operator) pairs for which a warning was given.
    _told: set[tuple[str, str]]

    @property
    def _is_strict(self) -> bool:
        """Whether a method's own arithmetic is an error. ``RoundedModule`` defines it."""
        raise NotImplementedError


def reached(compiled: Any, model: nn.Module, name: str) -> Any:
    """Return the model's attribute; a method runs with rounded calls. Raises AttributeError."""
    known = inspect.getattr_static(type(model), name, None)
    # A class method keeps the model's class, whose name may select a checkpoint.
    if isinstance(known, classmethod | staticmethod):
        return getattr(model, name)
    stand_in = _stand_in(compiled, model)
    if isinstance(known, property | functools.cached_property):
        return _watched(compiled, name, lambda: getattr(stand_in, name))()
    value = getattr(stand_in, name)
    if isinstance(value, MethodType) and value.__self__ is stand_in:
        return functools.wraps(value)(_watched(compiled, name, value))
    return value


class _StandIn:
    """The first base of a stand-in's class; its calls are those of the compiled module."""

    _fxround_compiled: Any
    _fxround_model: nn.Module

    def __init_subclass__(cls, **named: Any) -> None:
        """Skip the hooks of the model's class, which must not register this subclass."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._fxround_compiled(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _itself, (self._fxround_model,)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self._fxround_model, memo)


def _itself(model: nn.Module) -> nn.Module:
    return model


def _stand_in(compiled: Any, model: nn.Module) -> Any:
    """Return an object of a subclass of the model's class that shares the model's ``__dict__``."""
    cls: Any = type(model)
    kept = compiled.__dict__.get("_stand_in")
    if kept is not None and type(kept).__mro__[2] is cls and kept.__dict__ is model.__dict__:
        return kept

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs)

    members = {"forward": forward, "_fxround_compiled": compiled, "_fxround_model": model}
    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    made = object.__new__(type(cls)(cls.__name__, (_StandIn, cls), members | names))
    object.__setattr__(made, "__dict__", model.__dict__)
    compiled.__dict__["_stand_in"] = made
    return made


def _watched(compiled: Any, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method with its own floating-point operations rounded, refused or warned of."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with watching(compiled, name):
            result = method(*args, **kwargs)
        if inspect.isgenerator(result):
            return _driven(result, compiled, name)
        return compiled if isinstance(result, _StandIn) and result._fxround_compiled is compiled else result

    return run


def _driven(generator: Any, compiled: Any, name: str) -> Generator[Any, Any, Any]:
    sent = None
    while True:
        with watching(compiled, name):
            try:
                item = generator.send(sent)
            except StopIteration as stop:
                return stop.value
        sent = yield item
