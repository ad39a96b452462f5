"""Stand-ins: what a model's method gets as ``self``, and in place of each submodule that it reaches from there.

A stand-in is an object of a subclass of the module's class that shares the module's ``__dict__``. Its calls, and its
``forward``, are those of the compiled model, or of the submodule compiled by itself. The model does not change, so that
every other thread finds it as it is. Stand-ins do not leave a method: modules are assigned and returned as themselves.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import nn

from fxround.python_model.functions import Sharing


def stand_in(compiled: Any, module: nn.Module) -> Any:
    """Return the object of a subclass of the module's class that shares the module's ``__dict__``.

    The module itself is returned if it is compiled already, or if its class has no subclasses.
    """
    cls: Any = type(module)
    if isinstance(module, _StandIn | Sharing | torch.jit.ScriptModule):
        return module
    known = compiled.__dict__.setdefault("_stand_ins", {})
    kept = known.get(id(module))
    if kept is not None and type(kept).__mro__[2] is cls and kept.__dict__ is module.__dict__:
        return kept

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _call(self, cls.forward, args, kwargs)

    members: dict[str, Any] = {"forward": forward, "_fxround_compiled": compiled, "_fxround_model": module}
    if module is compiled.source:
        members["state_dict"] = _state_dict
    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    try:
        made = object.__new__(_class_of(type(cls))(cls.__name__, (_StandIn, cls), members | names))
    except TypeError:
        return module
    object.__setattr__(made, "__dict__", module.__dict__)
    known[id(module)] = made
    return made


def plain(value: Any) -> Any:
    """Return what a method returns, with compiled modules and modules in place of their stand-ins."""
    if isinstance(value, _StandIn):
        compiled, module = value._fxround_compiled, _itself(value)
        return compiled if module is compiled.source else module
    if type(value) is dict:
        items = {key: plain(item) for key, item in value.items()}
        return items if any(items[key] is not item for key, item in value.items()) else value
    if type(value) in (list, tuple):
        parts = [plain(item) for item in value]
        return type(value)(parts) if any(a is not b for a, b in zip(parts, value, strict=True)) else value
    return value


def _class_of(kind: Any) -> Any:
    """Return the class of a stand-in's class, for which an object is an instance if it is one of the model's class.

    A method may ask ``isinstance(other, self.__class__)``, as Lightning's do.
    """

    def holds(cls: Any, value: Any) -> bool:
        return isinstance(value, cls.__mro__[2])

    return type(kind.__name__, (kind,), {"__instancecheck__": holds})


class _StandIn:
    """The first base of a stand-in's class."""

    _fxround_compiled: Any
    _fxround_model: nn.Module

    def __init_subclass__(cls, **named: Any) -> None:
        """Skip the hooks of the module's class, which must not register this subclass."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call: Any = super().__call__  # type: ignore[misc]
        return _call(self, lambda _, *args, **kwargs: call(*args, **kwargs), args, kwargs)

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)  # type: ignore[misc]
        return stand_in(self._fxround_compiled, value) if isinstance(value, nn.Module) else value

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, _itself(value))

    @property
    def _modules(self) -> Any:
        return _Modules(self)

    @_modules.setter
    def _modules(self, modules: Any) -> None:
        self.__dict__["_modules"] = modules

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _itself, (_itself(self),)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(_itself(self), memo)


class _Modules(MutableMapping[str, Any]):
    """The submodules of a stand-in, as stand-ins."""

    def __init__(self, owner: _StandIn) -> None:
        self._compiled, self._held = owner._fxround_compiled, owner.__dict__["_modules"]

    def __getitem__(self, name: str) -> Any:
        held = self._held[name]
        return held if held is None else stand_in(self._compiled, held)

    def __setitem__(self, name: str, module: Any) -> None:
        self._held[name] = _itself(module)

    def __delitem__(self, name: str) -> None:
        del self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


def _call(caller: Any, own: Any, args: Any, kwargs: Any) -> Any:
    """Call the compiled module; ``own`` for another object that a method has made of a stand-in's class."""
    if not _is_original(caller):
        return own(caller, *args, **kwargs)
    compiled, module = caller._fxround_compiled, caller._fxround_model
    return compiled(*args, **kwargs) if module is compiled.source else compiled.call_submodule(module, args, kwargs)


def _state_dict(caller: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the state with the (seed, sample) of the compiled module, so that a method that saves it saves all."""
    held: Any = caller._fxround_compiled if _is_original(caller) else super(_StandIn, caller)
    return held.state_dict(*args, **kwargs)


def _is_original(value: _StandIn) -> bool:
    return value.__dict__ is value._fxround_model.__dict__


def _itself(value: Any) -> Any:
    """Return the module of a stand-in, any other value as it is.

    An object that a method has made of a stand-in's class, such as a slice of a list of modules, gets the module's
    class.
    """
    if not isinstance(value, _StandIn):
        return value
    if _is_original(value):
        return value._fxround_model
    object.__setattr__(value, "__class__", type(value).__mro__[2])
    return value
