"""What the guards of ``torch.compile`` leave out, as one more guard of a trace that ``torch.compile`` makes.

Dynamo takes the methods of classes for constant, and reads the environment without a guard. Of an attribute that a
class inherits, it guards the value in the class that has it, and not that the classes before that one have none. That
no class has a name which ``__getattr__`` serves, it does not guard (``unset_names``).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, Final

from torch import nn
from torch._guards import Guard, TracingContext

from fxround.capture.class_guards import all_names, constructors, methods_of, special_names
from fxround.capture.guards import (
    environment,
    inherited,
    is_replaced,
    ordered,
    require_digits,
    sources_of_keys,
    unset,
    value_of,
)
from fxround.capture.readings import TRACING

_OF_OS: Final = os.getenv.__code__.co_filename


def watch_more(model: nn.Module) -> None:
    """Add this guard to the trace that is under way. model: the model, whose modules have the methods.

    Guards live as long as the model's code: this one refers to classes and functions weakly.
    """
    from torch._dynamo.source import GlobalStateSource
    from torch._dynamo.symbolic_convert import InstructionTranslator

    guards = TracingContext.get().guards_context.dynamo_guards
    InstructionTranslator.current_tx().output.guard_on_key_order.update(sources_of_keys(guards))
    guards.add(Guard(GlobalStateSource(), partial(_watch, weakref.ref(model))))


def _watch(model: Callable[[], nn.Module | None], builder: Any, guard: Guard) -> None:
    """Build the guard. builder: Dynamo's, after the trace, when it has every other guard."""
    graph, living = builder.check_fn_manager.output_graph, model()
    scope = {"L": graph.local_scope, "G": graph.global_scope}
    sources = [other.originating_source for other in graph.guards if other.name]
    values = [*(() if living is None else living.modules()), *(value_of(source, scope) for source in sources)]
    codes = frozenset(graph.traced_code)
    classes = [value if isinstance(value, type) else type(value) for value in values]
    methods = [_Methods.read(cls, names) for cls, names in methods_of(values, codes)]
    before = [
        _Before(weakref.ref(cls), read, names)
        for cls, read, names in (
            *inherited(sources, scope),
            *unset(graph.guards, scope),
            *constructors(classes, codes),
            *special_names(classes),
            *all_names(values),
        )
    ]
    orders = [_Order(weakref.ref(value), tuple(value)) for _, value in ordered(graph.guards, scope)]
    variables = dict(environment()) if any(code.co_filename == _OF_OS for code in codes) else None

    def hold(_: Any) -> bool:
        same = all(row.holds() for row in methods) and all(row.holds() for row in before)
        same = same and all(row.holds() for row in orders)
        return same and variables in (None, environment())

    require_digits(builder, graph.guards)
    builder.guard_manager.root.add_lambda_guard(hold, [_TOLD], guard.user_stack)


_TOLD: Final = "a method or an attribute of a class, the order of an OrderedDict, or os.environ, has changed"


@dataclass(frozen=True)
class _Order:
    """The keys of an ``OrderedDict``, in its order."""

    held: weakref.ref[Any]
    keys: tuple[Any, ...] = field(repr=False)

    def holds(self) -> bool:
        held = self.held()
        return held is not None and tuple(held) == self.keys


@dataclass(frozen=True)
class _Before:
    """Which classes before the one that has an attribute have it, too; whether one has what the trace did not find."""

    cls: weakref.ref[type]
    read: Callable[[type], Any] = field(repr=False)
    names: Any

    def holds(self) -> bool:
        cls = self.cls()
        return cls is not None and bool(self.read(cls) == self.names)


@dataclass(frozen=True)
class _Methods:
    """The methods and properties of a class whose code was traced, by the expressions that read them."""

    cls: weakref.ref[type]
    parts: Mapping[str, weakref.ref[Any]] = field(repr=False)

    @staticmethod
    def read(cls: type, names: list[str]) -> _Methods:
        return _Methods(weakref.ref(cls), {name: weakref.ref(_part(cls, name)) for name in names})

    def holds(self) -> bool:
        cls = self.cls()
        if cls is None:
            return False
        try:
            same = all(_part(cls, name) is part() for name, part in self.parts.items())
        except AttributeError:
            return False
        return same or (bool(TRACING) and is_replaced(cls))


def _part(cls: type, name: str) -> Any:
    """Return what an expression reads from a class; the function of a property, which takes no weak reference."""
    held = attrgetter(name)(cls)
    return held.fget if isinstance(held, property) else held
