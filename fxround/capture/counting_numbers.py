"""Which whole numbers of a model's modules are symbols, where ``torch.compile`` traces a model with symbolic sizes.

PyTorch makes either none of them symbols or all. A symbol for each number that never changes, such as the number of
heads of a layer, makes sizes of the graph products and quotients of symbols, which takes several times as long to
trace. Here a number is a symbol if a method of a module stores an attribute of its name (a counter), or once it has
another value than in the first trace that read it, unless the model cannot be traced then (``x ** self.k``).
"""

from __future__ import annotations

import contextlib
import dis
import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any
from unittest import mock

from torch import nn


class CountingNumbers:
    """The numbers of one model that are symbols."""

    def __init__(self, model: nn.Module) -> None:
        kinds = {base for module in model.modules() for base in type(module).__mro__ if issubclass(base, nn.Module)}
        self._stored = {name for kind in kinds - {nn.Module} for name in _stored_by(kind)}
        # By the source of a number: its value in the first trace, None once it was another one.
        self._first: dict[str, int | None] = {}
        self._settled = False

    def is_symbol(self, source: Any, value: int) -> bool:
        """Whether the number that Dynamo reads from a source is a symbol."""
        guarded = source.guard_source() if callable(source.guard_source) else source.guard_source
        if not guarded.is_unspecialized_nn_module() or getattr(source, "member", None) in self._stored:
            return True
        name = source.name() if callable(source.name) else source.name
        if self._first.setdefault(name, value) != value:
            self._first[name] = None
        return self._first[name] is None and not self._settled

    def may_settle(self) -> bool:
        """Whether a number that no method stores is a symbol."""
        return not self._settled and None in self._first.values()

    def settle(self) -> bool:
        """Take the numbers that no method stores for constants from now on. Returns whether one was a symbol."""
        settles, self._settled = self.may_settle(), True
        return settles

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Let Dynamo make symbols of these numbers of modules, and constants of the others."""
        from torch._dynamo import config
        from torch._dynamo.variables.builder import VariableBuilder

        original = VariableBuilder.wrap_symint

        def wrap_symint(builder: Any, value: int, *args: Any, **kwargs: Any) -> Any:
            if self.is_symbol(builder.source, value):
                return original(builder, value, *args, **kwargs)
            with config.patch(assume_static_by_default=True, automatic_dynamic_shapes=False):
                return original(builder, value, *args, **kwargs)

        with mock.patch.object(VariableBuilder, "wrap_symint", wrap_symint):
            yield


def _stored_by(kind: type[nn.Module]) -> Iterator[str]:
    """Yield the names of the attributes that the methods of a class store, but for its constructor."""
    for name, member in vars(kind).items():
        functions = (member.fget, member.fset) if isinstance(member, property) else (member,)
        for function in functions:
            code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
            if code is not None and name != "__init__":
                yield from _stores(code)


def _stores(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_ATTR":
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _stores(constant)
