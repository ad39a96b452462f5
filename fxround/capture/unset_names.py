"""Names that the usual lookup of an attribute does not find while Dynamo traces a model, and that may be set later.

Python then calls ``__getattr__`` of the class, or raises AttributeError. Dynamo guards what ``__getattr__`` reads, and
not that it is called: the name may be set on the object, in a slot, or on a class. Here the trace gets a guard for each
object and name, and each class is asked once for all of its objects.

Where a property, an empty slot or the class's own ``__getattribute__`` raises AttributeError, Dynamo calls no
``__getattr__``: it is called here.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from operator import contains
from pathlib import Path
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, Final

import torch
from torch import nn

from fxround.capture.attribute_reads import wrapped_reads
from fxround.errors import CaptureError

_MISSING: Final = object()
# The folder of PyTorch's own code.
_TORCH: Final = str(Path(torch.__file__).parent)
_LOOKUP: Final = "__getattribute__"
# Dynamo's method that answers hasattr, and getattr with a default.
_ASKED: Final = "call_obj_hasattr"
# Of a class whose attributes cannot be set: Py_TPFLAGS_IMMUTABLETYPE.
_IMMUTABLE: Final = 1 << 8


def is_unset(holder: Any, name: str) -> bool:
    """Whether the usual lookup of a name finds nothing: in an object, in its classes, in a slot."""
    found = inspect.getattr_static(holder, name, _MISSING)
    return _is_empty(found, holder) if found is not _MISSING else not _is_stored_elsewhere(holder, name)


def classes_without(guards: Iterable[Any], value_of: Callable[[Any], Any]) -> Iterator[tuple[type, tuple[str, ...]]]:
    """Yield the classes, and bases of them, that must not get attributes, and the names of these.

    guards: those of a trace. value_of: returns what the source of a guard gives.
    """
    names: dict[type, dict[str, None]] = {}
    for guard in guards:
        if guard.inner_create_fn() is not _lacks:
            continue
        holder, name = value_of(guard.originating_source), guard.create_fn.keywords["name"]
        for base in _searched(holder):
            if name not in vars(base) and not base.__flags__ & _IMMUTABLE:
                names.setdefault(base, {})[name] = None
    yield from ((cls, tuple(unset)) for cls, unset in names.items())


def has_any(unset: Iterable[tuple[type, Iterable[str]]]) -> Callable[[Any], bool]:
    """Return the function that says whether a class has an attribute of its own of one of its names, in few calls."""
    pairs = [(vars(cls), name) for cls, names in unset for name in names]
    # What vars returns shows the class as it is, later too.
    held, wanted = [own for own, _ in pairs], [name for _, name in pairs]
    return lambda _: any(map(contains, held, wanted))


def wrap_lookups(is_tracing: Callable[[], bool]) -> None:
    """Wrap, once and for good, Dynamo's lookups of attributes. is_tracing: whether a trace is for fxround."""
    from torch._dynamo import variables
    from torch._dynamo.exc import ObservedAttributeError
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables.user_defined import UserDefinedClassVariable, UserDefinedObjectVariable

    def attribute_of(read: Callable[[], Any], holder: Any, name: str) -> Any:
        try:
            return read()
        except ObservedAttributeError:  # of a module, a function, a tensor
            if is_tracing():
                _require_unset(holder.realize(), InstructionTranslator.current_tx(), name)
            raise

    # torch 2.14 has renamed it.
    reader = "tp_getattro_impl" if hasattr(UserDefinedObjectVariable, "tp_getattro_impl") else "var_getattr"
    kinds = (UserDefinedObjectVariable, UserDefinedClassVariable)
    lookups = [(kind, reader, _looked_up(getattr(kind, reader), is_tracing)) for kind in kinds]
    asked = [(kind, _ASKED, _has(vars(kind)[_ASKED], is_tracing)) for kind in _kinds_without_guards()]
    # Since torch 2.15, with a text and a comparison of its own.
    namespaces = [vars(variables)[kind] for kind in ("SimpleNamespaceVariable",) if kind in vars(variables)]
    names = [(kind, "get_dict_vt", _names_of(kind.get_dict_vt, is_tracing)) for kind in namespaces]
    for owner, name, function in (*wrapped_reads(attribute_of), *lookups, *asked, *names):
        setattr(owner, name, function)


def _looked_up(lookup: Any, is_tracing: Callable[[], bool]) -> Any:
    from torch._dynamo.exc import ObservedAttributeError, handle_observed_exception

    def looked_up(self: Any, tx: Any, name: str) -> Any:
        if not is_tracing():
            return lookup(self, tx, name)
        if is_unset(self.value, name):
            _require_unset(self, tx, name)
        if name == "__dict__":
            _require_names(self, tx)
        own, serve = (_of_type(self.value, method) for method in (_LOOKUP, "__getattr__"))
        try:
            return _called(own, self, tx, name) if isinstance(own, FunctionType) else lookup(self, tx, name)
        except ObservedAttributeError:
            # What the class has no descriptor of, the lookup has asked it for. That of a module knows no name of one.
            asked = not isinstance(own, FunctionType) and not _in_class(self.value, name)
            if asked or not isinstance(serve, FunctionType) or serve is nn.Module.__getattr__:
                raise
            handle_observed_exception(tx)
            return _called(serve, self, tx, name)

    return looked_up


def _kinds_without_guards() -> Iterator[Any]:
    """Yield Dynamo's variables of modules of Python, functions and partials, whose ``hasattr`` makes no guard."""
    from torch._dynamo import variables

    of_torch: Any = variables
    # Since torch 2.14 that of all variables is the one of modules of Python.
    for module in (of_torch.functions, of_torch.misc, of_torch.base):
        for kind in vars(module).values():
            if isinstance(kind, type) and kind.__module__ == module.__name__ and _ASKED in vars(kind):
                yield kind


def _has(ask: Any, is_tracing: Callable[[], bool]) -> Any:
    def has(self: Any, tx: Any, name: str) -> Any:
        answer = ask(self, tx, name)
        if is_tracing() and answer.is_python_constant() and not answer.as_python_constant():
            _require_unset(self, tx, name)
        return answer

    return has


def _names_of(read: Any, is_tracing: Callable[[], bool]) -> Any:
    def names_of(self: Any, tx: Any) -> Any:
        if is_tracing():
            _require_names(self, tx)
        return read(self, tx)

    return names_of


def _require_names(variable: Any, tx: Any) -> None:
    """Let the trace require that an object which exists before the call has the same attributes, in the same order.

    PyTorch's own code asks for names one by one.
    """
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource

    has_names = isinstance(getattr(variable.value, "__dict__", None), dict)
    if variable.source is None or not has_names or tx.f_code.co_filename.startswith(_TORCH):
        return
    source = AttrSource(variable.source, "__dict__")
    install_guard(source.make_guard(GuardBuilder.DICT_KEYS_MATCH))
    tx.output.guard_on_key_order.add(source)


def _require_unset(variable: Any, tx: Any, name: str) -> None:
    """Let the trace require that an object which exists before the call goes on to lack a name."""
    from torch._dynamo.guards import install_guard

    if variable.source is not None and not tx.output.side_effects.has_pending_mutation_of_attr(variable, name):
        install_guard(variable.source.make_guard(_guard_of(name)))


def _called(method: FunctionType, variable: Any, tx: Any, name: str) -> Any:
    """Return what ``__getattr__`` or ``__getattribute__`` returns in a trace."""
    from torch._dynamo import variables
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables import ConstantVariable, UserMethodVariable

    of_torch: Any = variables
    source = variable.source and AttrSource(variable.source, method.__name__)
    # Since torch 2.15 it takes a variable of the function.
    takes_variable = "im_func" in inspect.signature(UserMethodVariable.__init__).parameters
    function = of_torch.UserFunctionVariable(method) if takes_variable else method
    return UserMethodVariable(function, variable, source=source).call_function(tx, [ConstantVariable.create(name)], {})


@cache
def _guard_of(name: str) -> Any:
    """Return what makes the guard: one object for each name, by which Dynamo knows equal guards."""
    return functools.partial(_lacks, name=name)


def _lacks(builder: Any, guard: Any, name: str) -> None:
    """Let a guard require that an object lacks a name; ``classes_without`` has its classes."""
    holder, told = builder.get(guard), [f"{guard.name} has {name!r} now"]
    if isinstance(holder, functools.partial) and hasattr(holder, name):
        raise CaptureError(
            f"the model reads the attribute {name!r} of {guard.name}, a functools.partial, of which a graph reads "
            "func, args and keywords alone: keep the value in the model"
        )
    if isinstance(holder, type) or not is_unset(holder, name):  # a property that raises: the trace has read its code
        return
    if isinstance(holder, ModuleType | MethodType):
        builder.get_guard_manager(guard).add_lambda_guard(lambda held: not hasattr(held, name), told, guard.user_stack)
    elif isinstance(holder, dict):  # whose manager takes no such guard, or asks none of an empty dict
        code, scope = compile(guard.name, "<guard>", "eval"), builder.scope
        builder.guard_manager.root.add_lambda_guard(
            lambda variables: is_unset(eval(code, {**scope, "L": variables}), name), told, guard.user_stack
        )
    elif _in_class(holder, name) or isinstance(holder, threading.local):
        builder.get_guard_manager(guard).add_lambda_guard(lambda held: is_unset(held, name), told, guard.user_stack)
    elif hasattr(holder, "__dict__"):
        builder.NOT_PRESENT_IN_GENERIC_DICT(guard, attr=name)


def _searched(holder: Any) -> tuple[type, ...]:
    """Return the classes that a lookup in an object, or in a class, searches."""
    return (*(holder.__mro__ if isinstance(holder, type) else ()), *type(holder).__mro__)


def _in_class(holder: Any, name: str) -> bool:
    return any(name in vars(base) for base in _searched(holder))


def _of_type(holder: Any, name: str) -> Any:
    """Return what the type of an object has under a name; None without it."""
    return next((vars(base)[name] for base in type(holder).__mro__ if name in vars(base)), None)


def _is_stored_elsewhere(holder: Any, name: str) -> bool:
    """Whether an object without such an attribute in its dict has it all the same, as a ``threading.local`` may."""
    lookup = _of_type(holder, _LOOKUP)
    if isinstance(holder, type) or lookup is object.__getattribute__ or isinstance(lookup, FunctionType):
        return False
    look_up: Any = type(holder).__getattribute__
    try:
        look_up(holder, name)
    except AttributeError:
        return False
    return True


def _is_empty(found: Any, holder: Any) -> bool:
    """Whether what a class has under a name is a slot that is empty in the holder."""
    if not isinstance(found, MemberDescriptorType) or isinstance(holder, type):
        return False
    try:
        found.__get__(holder, type(holder))
    except AttributeError:
        return True
    return False
