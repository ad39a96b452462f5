"""What Dynamo computes otherwise than Python, in a trace for fxround: refused, or put right.

A full ``deque`` loses its ``maxlen`` and grows; ``OrderedDict.move_to_end`` is not applied to an object that exists; a
generator of ``random`` that exists gives the same number in every call; a call of ``random.uniform`` is evaluated
while it is traced, which moves Python's generator. Results of operations are in ``python_values``, and what needs a
guard in ``unset_names`` and ``dict_keys``. The
methods of Dynamo are wrapped once and for good, before anything else replaces them for a trace, and do what they did in
every other trace.
"""

from __future__ import annotations

import collections
import contextlib
import random
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

from fxround.capture.dict_keys import wrap_dicts
from fxround.capture.python_values import forget_slots, refuse, wrap_values
from fxround.capture.unset_names import wrap_lookups

_GROWING: Final = ("append", "appendleft", "extend", "extendleft", "insert", "__iadd__")


class _Thread(threading.local):
    """How many traces for fxround the thread is in."""

    traces = 0


_THREAD: Final = _Thread()


@contextlib.contextmanager
def python_gaps() -> Iterator[None]:
    """Refuse or put right, in traces of this thread in the block, what Dynamo computes otherwise than Python."""
    _wrap()
    forget_slots()
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
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables import dicts, misc, user_defined
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.lists import DequeVariable
    from torch._dynamo.variables.misc import RandomVariable

    build, draw = VariableBuilder.__call__, user_defined.call_random_fn
    of_deque, of_generator = DequeVariable.call_method, RandomVariable.call_method

    def built(self: Any, value: Any) -> Any:
        result = build(self, value)
        if _THREAD.traces and type(value) is collections.deque and isinstance(result, DequeVariable):
            result.maxlen = ConstantVariable.create(value.maxlen)
        if _THREAD.traces and type(value) is collections.defaultdict and self.source is not None:
            install_guard(AttrSource(self.source, "default_factory").make_guard(GuardBuilder.ID_MATCH))
        return result

    def drawn(*args: Any, **options: Any) -> Any:
        if not _THREAD.traces:
            return draw(*args, **options)
        with unmoved_generator():
            return draw(*args, **options)

    def called_of_deque(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        limited = _THREAD.traces and self.source is not None and self.maxlen.as_python_constant() is not None
        if limited and name in _GROWING:
            refuse(f"deque.{name}", "a deque with maxlen that exists before the call is changed", "use a list")
        return of_deque(self, tx, name, args, kwargs)

    def ordered(of_dict: Any) -> Any:
        def called_of_dict(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            if _THREAD.traces and name == "move_to_end" and self.source is not None:
                refuse(
                    "OrderedDict.move_to_end",
                    "the order of an OrderedDict that exists before the call is changed",
                    "use d[key] = d.pop(key), which has the same effect",
                )
            return of_dict(self, tx, name, args, kwargs)

        return called_of_dict

    def called_of_generator(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if _THREAD.traces and self.source is not None:
            refuse(
                f"Random.{name}",
                "a generator of Python's random that exists before the call is used",
                "draw outside of the model, and pass the number as a tensor",
            )
        return of_generator(self, tx, name, args, kwargs)

    replaced: tuple[tuple[Any, str, Any], ...] = (
        (VariableBuilder, "__call__", built),
        (DequeVariable, "call_method", called_of_deque),
        (RandomVariable, "call_method", called_of_generator),
        (misc, "call_random_fn", drawn),
        (user_defined, "call_random_fn", drawn),
    )
    for owner, name, function in replaced:
        setattr(owner, name, function)
    for wrap in (wrap_lookups, wrap_dicts, wrap_values):
        wrap(lambda: _THREAD.traces > 0)
    # The class of an OrderedDict is in one module or in another, or is that of all dicts: torch 2.11 to 2.15 differ.
    named = [vars(module).get("OrderedDictVariable") for module in (dicts, user_defined)]
    for kind in (dicts.ConstDictVariable, *filter(None, named)):
        kind.call_method = ordered(kind.call_method)


__all__ = ["python_gaps", "unmoved_generator"]
