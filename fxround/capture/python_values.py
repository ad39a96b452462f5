"""Results of Python's operations that Dynamo computes otherwise, in a trace for fxround: put right, or refused.

- ``f(*range(n))`` calls f with 0, n and 1;
- the text of an object with a ``__repr__`` and no ``__str__``, and a hash that a class computes in C, are constants;
- ``format(value, spec)`` ignores the spec;
- ``3 in x.shape`` leaves out sizes that are symbols, and ``==`` of objects;
- an object with an ``__eq__`` of its own is another key than an equal one;
- ``any(iterator)``, ``sum(iterator)`` and their like leave the iterator where it was.
"""

from __future__ import annotations

import collections
import dis
import operator
from collections.abc import Callable
from types import FunctionType
from typing import Any, Final, NoReturn

from fxround.capture.dict_keys import REPR_METHODS, all_kinds

# Comparisons that depend on which objects are compared, in some cases.
_IDENTITIES: Final = {"is": operator.is_, "is not": operator.is_not, "==": operator.eq, "!=": operator.ne}
# The instruction of a call ``f(*args, **kwargs)``.
_SPREAD: Final = dis.opmap["CALL_FUNCTION_EX"]


def wrap_values(is_tracing: Callable[[], bool]) -> None:
    """Wrap, once and for good, Dynamo's operations. is_tracing: whether a trace is for fxround."""
    from torch._dynamo import symbolic_convert, utils
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables import lists
    from torch._dynamo.variables.builtin import BuiltinVariable

    builtins: Any = BuiltinVariable
    for name, wrapped in (("call_str", _text), ("call_hash", _hash), ("call_format", _formatted)):
        if hasattr(builtins, name):
            setattr(builtins, name, wrapped(getattr(builtins, name), is_tracing))
    # Before torch 2.13, its texts of dicts, sets and views are for people.
    if not any(hasattr(kind, name) for kind in (_dicts().ConstDictVariable,) for name in REPR_METHODS):
        builtins.call_repr = _shown(builtins.call_repr, is_tracing)
    for translator in all_kinds(InstructionTranslatorBase):
        table: Any = vars(translator).get("dispatch_table")
        if table is not None:
            table[_SPREAD] = _spreading(table[_SPREAD], is_tracing)
    builtins.call_function = _compared(builtins.call_function, is_tracing)
    handlers = symbolic_convert.compare_op_handlers
    for operation, function in _IDENTITIES.items():
        handlers[operation] = _identifying(handlers[operation], function, is_tracing)
    contains = _contained(utils.iter_contains, is_tracing)
    for module in (utils, lists):
        vars(module)["iter_contains"] = contains
    iterator: Any = lists.ListIteratorVariable
    iterator.as_python_constant = _unconsumed(iterator.as_python_constant, is_tracing)
    keys: Any = _keys()
    keys.__init__ = _identified(keys.__init__, is_tracing)


def forget_slots() -> None:
    """Let Dynamo ask classes anew which methods Python calls for operations: one may have been set since."""
    from torch._dynamo import variables
    from torch._dynamo.variables import base

    # Since torch 2.12 in object_protocol, since 2.15 in base, too.
    for module in filter(None, (getattr(variables, "object_protocol", None), base)):
        for function in vars(module).values():
            if hasattr(function, "cache_clear") and getattr(function, "__module__", "") == module.__name__:
                function.cache_clear()


def refuse(what: str, explanation: str, remedy: str) -> NoReturn:
    """Refuse what a trace meets, as Dynamo does."""
    from torch._dynamo.exc import unimplemented

    unimplemented(gb_type=f"{what} in a graph", context=what, explanation=f"{explanation}.", hints=[f"{remedy}."])
    raise AssertionError


def _dicts() -> Any:
    from torch._dynamo.variables import dicts

    return dicts


def _keys() -> Any:
    """Return Dynamo's class of keys of dicts and items of sets, which torch 2.12 has moved."""
    from torch._dynamo import variables

    hashable: Any = getattr(variables, "hashable", None)
    return _dicts().ConstDictVariable._HashableTracker if hashable is None else hashable.HashableTracker


def _is_object(variable: Any) -> bool:
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

    return isinstance(variable, UserDefinedObjectVariable)


def _method(value: object, name: str) -> Any:
    """Return the method that Python calls for an operation on an object."""
    return getattr(type(value), name)


def _text(call: Any, is_tracing: Callable[[], bool]) -> Any:
    def text(self: Any, tx: Any, arg: Any) -> Any:
        # object.__str__ calls __repr__, which is traced here.
        if is_tracing() and _is_object(arg) and _method(arg.value, "__str__") is object.__str__:
            return self.call_repr(tx, arg)
        return call(self, tx, arg)

    return text


def _shown(call: Any, is_tracing: Callable[[], bool]) -> Any:
    from torch._dynamo.variables import ConstantVariable

    def shown(self: Any, tx: Any, arg: Any) -> Any:
        kind = getattr(arg, "user_cls", None)
        if not is_tracing() or not isinstance(arg, _dicts().ConstDictVariable | _dicts().DictViewVariable):
            return call(self, tx, arg)
        if kind is not dict and kind is not collections.OrderedDict:
            refuse("repr", "Dynamo writes another text of a set or of a view", "pass sorted(...) of it")
        return ConstantVariable.create(repr(arg.as_python_constant()))

    return shown


def _hash(call: Any, is_tracing: Callable[[], bool]) -> Any:
    from torch._dynamo.guards import GuardBuilder, install_guard

    def hashed(self: Any, tx: Any, arg: Any) -> Any:
        is_known = isinstance(_method(getattr(arg, "value", None), "__hash__"), FunctionType)
        if is_tracing() and _is_object(arg) and arg.source is not None and not is_known:
            install_guard(arg.source.make_guard(GuardBuilder.ID_MATCH))
        return call(self, tx, arg)

    return hashed


def _formatted(call: Any, is_tracing: Callable[[], bool]) -> Any:
    from torch._dynamo.variables import ConstantVariable

    def formatted(self: Any, tx: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        # The same method serves str.format.
        if not is_tracing() or self.fn is not format or not args:
            return call(self, tx, value, *args, **kwargs)
        if not (value.is_python_constant() and args[0].is_python_constant()):
            refuse("format", "Dynamo ignores the spec of format(value, spec)", "use an f-string of a constant")
        return ConstantVariable.create(format(value.as_python_constant(), args[0].as_python_constant()))

    return formatted


def _spreading(call: Any, is_tracing: Callable[[], bool]) -> Any:
    from torch._dynamo.variables.lists import RangeVariable, TupleVariable

    def called(self: Any, instruction: Any) -> None:
        if is_tracing():
            # The last value of the stack is the arguments, or keywords, and then the last but one is.
            self.stack[-2:] = [
                TupleVariable(value.unpack_var_sequence(self)) if isinstance(value, RangeVariable) else value
                for value in self.stack[-2:]
            ]
        call(self, instruction)

    return called


def _compared(call: Any, is_tracing: Callable[[], bool]) -> Any:
    def compared(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if is_tracing() and self.fn in _IDENTITIES.values():
            _require_objects(self.fn, args)
        return call(self, tx, args, kwargs)

    return compared


def _identifying(handler: Any, function: Any, is_tracing: Callable[[], bool]) -> Any:
    def compared(tx: Any, args: Any, kwargs: Any) -> Any:
        if is_tracing():
            _require_objects(function, args)
        return handler(tx, args, kwargs)

    return compared


def _require_objects(comparison: Callable[..., Any], operands: Any) -> None:
    """Let the trace require that these are the same objects, if a comparison depends on it, and on no value."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.variables import ConstantVariable

    values = [operand.realize() for operand in operands]
    if any(isinstance(value, ConstantVariable) for value in values):  # whose type is guarded, as that of the other is
        return
    for value in values:
        if value.source is None or value.is_tensor():
            continue
        by_identity = _is_object(value) and _method(value.value, "__eq__") is object.__eq__
        if comparison in (operator.is_, operator.is_not) or by_identity:
            install_guard(value.source.make_guard(GuardBuilder.ID_MATCH))


def _contained(call: Any, is_tracing: Callable[[], bool]) -> Any:
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables.builder import SourcelessBuilder

    def contained(items: Any, search: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        items = list(items)
        if not is_tracing() or not search.is_python_constant() or all(x.is_python_constant() for x in items):
            return call(items, search, tx, *args, **kwargs)
        equal, either = (SourcelessBuilder.create(tx, function) for function in (operator.eq, operator.or_))
        result: Any = ConstantVariable.create(False)
        for item in items:
            same = equal.call_function(tx, [item, search], {})
            if same.is_python_constant() and same.as_python_constant():
                return ConstantVariable.create(True)
            if not same.is_python_constant():
                undecided = result.is_python_constant()
                result = same if undecided else either.call_function(tx, [result, same], {})
        return result

    return contained


def _unconsumed(constant: Any, is_tracing: Callable[[], bool]) -> Any:
    def constant_of(self: Any) -> Any:
        if is_tracing():  # what reads a constant would not consume it
            raise NotImplementedError
        return constant(self)

    return constant_of


def _identified(make: Any, is_tracing: Callable[[], bool]) -> Any:
    from torch._dynamo.variables.user_defined import FrozenDataClassVariable

    def made(self: Any, variable: Any) -> None:
        if is_tracing():
            value = getattr(variable.realize(), "value", None) if _is_object(variable.realize()) else None
            compares = value is not None and isinstance(_method(value, "__eq__"), FunctionType)
            if compares and not isinstance(variable.realize(), FrozenDataClassVariable):
                refuse(
                    "a key with __eq__",
                    f"{type(value).__name__} has an __eq__ of its own, and a graph compares keys by identity",
                    "use a key of a tuple, a string or a number",
                )
        make(self, variable)

    return made


__all__ = ["forget_slots", "refuse", "wrap_values"]
