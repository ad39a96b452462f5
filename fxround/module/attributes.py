"""Attributes of a compiled module: fxround's own names, and for all others the model's attributes and methods.

A name of fxround's (``policy``, ``source``, ``rng``, ``graph``, ...) is fxround's on the compiled module; the model's
attribute of that name is ``compiled.source.policy``. Any other name is read, set and deleted on the model. A method
gets as ``self`` a stand-in for the model (``stand_ins``), whose calls are those of the compiled module; a submodule
that the method calls is compiled by itself. Floating-point operations that the method itself computes are rounded one
by one, or reported (``method_dispatch``).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from types import MethodType
from typing import Any, Final

from torch import nn

from fxround.capture.dynamo import is_of_a_trace
from fxround.capture.fully_sharded import is_of_fsdp
from fxround.capture.refusals import UNSHARDED
from fxround.errors import CaptureError
from fxround.module.stand_ins import plain, stand_in
from fxround.python_model.functions import Function, Sharing
from fxround.python_model.method_dispatch import watching

# The attributes that captured graphs depend on, and what to do instead of setting them.
_FIXED: Final = {
    "policy": "with_policy(...) makes a module of another policy",
    "source": "fxround.compile(...) makes a module of another model",
    "unroll_loops": "fxround.compile(..., unroll_loops=True) makes a module of it",
}


class CallSignature:
    """The signature of a compiled module's call: that of the model's ``forward``, or of the function.

    ``inspect.signature`` asks an object for ``__signature__``. It takes a callable object with ``__get__``, which a
    compiled function has to be a method, for one of C, and finds none.
    """

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        if instance is None:  # the class has that of its constructor
            raise AttributeError("__signature__")
        source = instance.source
        return inspect.signature(source.function if isinstance(source, Function) else source.forward)


class Reaching(Sharing):
    """A compiled module whose attributes, except fxround's own, are the model's."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            own = getattr(type(self), name, None)
            if isinstance(own, property):  # its getter has raised an AttributeError, and says what is missing
                return own.__get__(self)
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
        return sorted({*dir(type(self)), *self.__dict__, *dir(self.source)})

    def _class(self) -> Any:
        """Return the model's class, so that ``isinstance`` finds it as that of the compiled module, beside its own.

        Libraries choose by it how to save a model, for example. Dynamo would trace the ``forward`` of that class.
        """
        source = self.__dict__.get("source")
        itself = source is None or isinstance(source, Function) or is_of_a_trace()
        return type(self) if itself else type(source)

    def _refuse_class(self, kind: type) -> None:
        """Raise CaptureError: ``fully_shard`` gives the modules that it shards another class."""
        raise CaptureError(f"a compiled module keeps its class, and was given {kind.__name__}. {UNSHARDED}")

    __class__ = property(_class, _refuse_class)

    def train(self, mode: bool = True) -> Any:
        """Set the training flag by the model's own ``train``, which may leave some modules out; returns the module."""
        self.source.train(mode)
        return self


def reached(compiled: Any, model: nn.Module, name: str) -> Any:
    """Return the model's attribute; a method runs with rounded calls. Raises AttributeError."""
    known = inspect.getattr_static(type(model), name, None)
    # A class method keeps the model's class, whose name may select a checkpoint.
    # A method of FSDPModule sets how processes share the model itself.
    if isinstance(known, classmethod | staticmethod) or is_of_fsdp(model, name):
        return getattr(model, name)
    itself = stand_in(compiled, model)
    if isinstance(known, property | functools.cached_property):
        return _watched(compiled, name, lambda: getattr(itself, name))()
    value = getattr(itself, name)
    if isinstance(value, MethodType) and value.__self__ is itself:
        return functools.wraps(value)(_watched(compiled, name, value))
    return plain(value)


def _watched(compiled: Any, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method with its own floating-point operations rounded, refused or warned of."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with watching(compiled, name):
            result = method(*args, **kwargs)
        return _driven(result, compiled, name) if inspect.isgenerator(result) else plain(result)

    return run


def _driven(generator: Any, compiled: Any, name: str) -> Generator[Any, Any, Any]:
    sent = None
    while True:
        with watching(compiled, name):
            try:
                item = generator.send(sent)
            except StopIteration as stop:
                return plain(stop.value)
        sent = yield plain(item)
