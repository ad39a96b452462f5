"""What Dynamo computes otherwise than Python, in a trace for fxround: refused, or put right.

A full ``deque`` loses its ``maxlen`` and grows; ``OrderedDict.move_to_end`` is not applied to an object that exists; a
generator of ``random`` that exists gives the same number in every call; a call of ``random.uniform`` is evaluated
while it is traced, which moves Python's generator; ``f(*range(n))`` calls f with 0, n and 1; and the text of an object
with a ``__repr__`` and no ``__str__`` is a constant. What needs a guard is in ``unset_names`` and ``dict_keys``. The
methods of Dynamo are wrapped once and for good, before anything else replaces them for a trace, and do what they did in
every other trace.
"""

from __future__ import annotations

import collections
import contextlib
import dis
import random
import threading
from collections.abc import Iterator
from functools import cache
from types import FunctionType
from typing import Any, Final, NoReturn

from fxround.capture.dict_keys import REPR_METHODS, all_kinds, wrap_dicts
from fxround.capture.unset_names import wrap_lookups

_GROWING: Final = ("append", "appendleft", "extend", "extendleft", "insert", "__iadd__")
# The instruction of a call ``f(*args, **kwargs)``.
_SPREAD: Final = dis.opmap["CALL_FUNCTION_EX"]


class _Thread(threading.local):
    """How many traces for fxround the thread is in."""

    traces = 0


_THREAD: Final = _Thread()


@contextlib.contextmanager
def python_gaps() -> Iterator[None]:
    """Refuse or put right, in traces of this thread in the block, what Dynamo computes otherwise than Python."""
    _wrap()
    _THREAD.traces += 1
    try:
        yield
    finally:
        _THREAD.traces -= 1


@contextlib.contextmanager
def unmoved_generator() -> Iterator[None]:
    """Set Python's generator back at the end: Dynamo draws where the model does, and runs what it has captured."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


@cache
def _wrap() -> None:
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables import dicts, misc, user_defined
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.builtin import BuiltinVariable
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.lists import DequeVariable, RangeVariable, TupleVariable
    from torch._dynamo.variables.misc import RandomVariable

    build, draw = VariableBuilder.__call__, user_defined.call_random_fn
    builtins: Any = BuiltinVariable
    text: Any = builtins.call_str
    show: Any = builtins.call_repr
    hash_of: Any = getattr(builtins, "call_hash", None)
    of_deque, of_generator = DequeVariable.call_method, RandomVariable.call_method

    def built(self: Any, value: Any) -> Any:
        result = build(self, value)
        if _THREAD.traces and type(value) is collections.deque and isinstance(result, DequeVariable):
            result.maxlen = ConstantVariable.create(value.maxlen)
        return result

    def drawn(*args: Any, **options: Any) -> Any:
        if not _THREAD.traces:
            return draw(*args, **options)
        with unmoved_generator():
            return draw(*args, **options)

    def called_of_deque(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        limited = _THREAD.traces and self.source is not None and self.maxlen.as_python_constant() is not None
        if limited and name in _GROWING:
            _refuse(f"deque.{name}", "a deque with maxlen that exists before the call is changed", "use a list")
        return of_deque(self, tx, name, args, kwargs)

    def ordered(of_dict: Any) -> Any:
        def called_of_dict(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            if _THREAD.traces and name == "move_to_end" and self.source is not None:
                _refuse(
                    "OrderedDict.move_to_end",
                    "the order of an OrderedDict that exists before the call is changed",
                    "use d[key] = d.pop(key), which has the same effect",
                )
            return of_dict(self, tx, name, args, kwargs)

        return called_of_dict

    def called_of_generator(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if _THREAD.traces and self.source is not None:
            _refuse(
                f"Random.{name}",
                "a generator of Python's random that exists before the call is used",
                "draw outside of the model, and pass the number as a tensor",
            )
        return of_generator(self, tx, name, args, kwargs)

    def text_of(self: Any, tx: Any, arg: Any) -> Any:
        """Trace the ``__repr__`` that ``object.__str__`` calls, whose text Dynamo takes for a constant."""
        is_object = isinstance(arg, user_defined.UserDefinedObjectVariable)
        if _THREAD.traces and is_object and _method(arg.value, "__str__") is object.__str__:
            return self.call_repr(tx, arg)
        return text(self, tx, arg)

    def shown(self: Any, tx: Any, arg: Any) -> Any:
        kind = getattr(arg, "user_cls", None)
        if not _THREAD.traces or not isinstance(arg, dicts.ConstDictVariable | dicts.DictViewVariable):
            return show(self, tx, arg)
        if kind is not dict and kind is not collections.OrderedDict:
            _refuse("repr", "Dynamo writes another text of a set or of a view", "pass sorted(...) of it")
        return ConstantVariable.create(repr(arg.as_python_constant()))

    def hashed(self: Any, tx: Any, arg: Any) -> Any:
        """Require the object whose hash its class computes in C, from what no guard knows."""
        is_object = isinstance(arg, user_defined.UserDefinedObjectVariable) and arg.source is not None
        if _THREAD.traces and is_object and not isinstance(_method(arg.value, "__hash__"), FunctionType):
            install_guard(arg.source.make_guard(GuardBuilder.ID_MATCH))
        return hash_of(self, tx, arg)

    def spreading(call: Any) -> Any:
        def called(self: Any, instruction: Any) -> None:
            if _THREAD.traces:
                # The last value of the stack is the arguments, or keywords, and then the last but one is.
                self.stack[-2:] = [
                    TupleVariable(value.unpack_var_sequence(self)) if isinstance(value, RangeVariable) else value
                    for value in self.stack[-2:]
                ]
            call(self, instruction)

        return called

    replaced: tuple[tuple[Any, str, Any], ...] = (
        (builtins, "call_str", text_of),
        (VariableBuilder, "__call__", built),
        (DequeVariable, "call_method", called_of_deque),
        (RandomVariable, "call_method", called_of_generator),
        (misc, "call_random_fn", drawn),
        (user_defined, "call_random_fn", drawn),
    )
    for owner, name, function in replaced:
        setattr(owner, name, function)
    if hash_of is not None:
        builtins.call_hash = hashed
    # Before torch 2.13, its texts of dicts, sets and views are for people.
    if not any(hasattr(dicts.ConstDictVariable, name) for name in REPR_METHODS):
        builtins.call_repr = shown
    for wrap in (wrap_lookups, wrap_dicts):
        wrap(lambda: _THREAD.traces > 0)
    for translator in all_kinds(InstructionTranslatorBase):
        table: Any = vars(translator).get("dispatch_table")
        if table is not None:
            table[_SPREAD] = spreading(table[_SPREAD])
    # The class of an OrderedDict is in one module or in another, or is that of all dicts: torch 2.11 to 2.15 differ.
    named = [vars(module).get("OrderedDictVariable") for module in (dicts, user_defined)]
    for kind in (dicts.ConstDictVariable, *filter(None, named)):
        kind.call_method = ordered(kind.call_method)


def _method(value: object, name: str) -> Any:
    """Return the method that Python calls for an operation on an object."""
    return getattr(type(value), name)


def _refuse(what: str, explanation: str, remedy: str) -> NoReturn:
    from torch._dynamo.exc import unimplemented

    unimplemented(gb_type=f"{what} in a graph", context=what, explanation=f"{explanation}.", hints=[f"{remedy}."])
    raise AssertionError


__all__ = ["python_gaps", "unmoved_generator"]
