"""Notes what a graph depends on besides tensors, while Dynamo traces the model: sources, flags of PyTorch, strides.

``guards`` compiles these notes with Dynamo's own guards, which name most of it: some objects have no guard, and no flag
has one of its own. ``memory_reads`` has what an ``as_strided`` depends on, ``unset_names`` and ``dict_keys`` the names
and keys that a trace does not find; ``outside_reads`` is about tensors.
"""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final
from unittest import mock

import torch

from fxround.capture.memory_reads import MemoryReads

_COMPARISONS: Final = {"is": operator.is_, "is not": operator.is_not, "==": operator.eq, "!=": operator.ne}
# The thread that traces, if one does.
TRACING: Final[list[int]] = []


@dataclass
class Readings:
    """What a trace has read.

    sources     where Python values were read, by the names that Dynamo's guards have for them
    flags       functions of PyTorch that gave a constant, with the arguments and the constant
    grad_mode   whether the grad mode was read
    strides     whether strides of a tensor were read
    memory      how ``as_strided`` reads memory (``memory_reads``)
    environ     whether the environment was read
    identities  the sources of objects that were compared by ``is``
    equalities  the sources of objects that were compared by ``==``
    """

    sources: dict[str, Any] = field(default_factory=dict)
    flags: list[tuple[Callable[..., Any], tuple[Any, ...], Any]] = field(default_factory=list)
    grad_mode: bool = False
    strides: bool = False
    memory: MemoryReads = field(default_factory=MemoryReads)
    environ: bool = False
    identities: list[Any] = field(default_factory=list)
    equalities: list[Any] = field(default_factory=list)

    def read(self, source: Any, value: Any) -> None:
        """Note that a value was read."""
        self.sources[str(source.name)] = source
        self.environ = self.environ or value is os.environ or value is getattr(os.environ, "_data", os.environ)

    def identify(self, comparison: Callable[..., Any], operands: Any) -> None:
        """Note that values from outside of the trace were compared by one of ``_COMPARISONS``, none of them to None."""
        if any(operand.is_python_constant() and operand.as_python_constant() is None for operand in operands):
            return
        sources = [operand.source for operand in operands if operand.source is not None]
        (self.identities if comparison in (operator.is_, operator.is_not) else self.equalities).extend(sources)

    def call(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note a call of one of PyTorch's functions, if it reads a flag: no tensor enters it, and it is a constant."""
        if kwargs or not all(arg.is_python_constant() for arg in args) or not result.is_python_constant():
            return
        values = tuple(arg.as_python_constant() for arg in args)
        if not all(isinstance(value, str | int) for value in values):
            return
        if function in (torch.is_grad_enabled, torch._C.is_grad_enabled):
            self.grad_mode = True
        else:
            self.flags.append((function, values, result.as_python_constant()))

    def lasting_flags(self) -> tuple[tuple[Callable[..., Any], tuple[Any, ...], Any], ...]:
        """Return the flags that have the same value outside of the trace."""
        return tuple(flag for flag in self.flags if _is_now(*flag))


def _is_now(function: Callable[..., Any], args: tuple[Any, ...], value: Any) -> bool:
    try:
        return bool(function(*args) == value)
    except Exception:  # a function that works in a trace alone
        return False


@contextlib.contextmanager
def readings() -> Iterator[Readings]:
    """Note what Dynamo reads in the block."""
    from torch._dynamo import symbolic_convert
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.builtin import BuiltinVariable
    from torch._dynamo.variables.tensor import TensorVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    noted = Readings()
    build, call = VariableBuilder.__call__, TorchInGraphFunctionVariable.call_function
    method = TensorVariable.call_method

    def built(self: Any, value: Any) -> Any:
        noted.read(self.get_source(), value)
        return build(self, value)

    def called(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        result = call(self, tx, args, kwargs)
        noted.call(self.value, args, kwargs, result)
        return result

    def compared(call: Any) -> Any:
        def called_builtin(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            if self.fn in _COMPARISONS.values():
                noted.identify(self.fn, args)
            return call(self, tx, args, kwargs)

        return called_builtin

    def asked_whether(operation: str) -> Any:
        handler = symbolic_convert.compare_op_handlers[operation]

        def handled(tx: Any, args: Any, kwargs: Any) -> Any:
            noted.identify(_COMPARISONS[operation], args)
            return handler(tx, args, kwargs)

        return handled

    def called_of_tensor(self: Any, tx: Any, name: str, *args: Any, **options: Any) -> Any:
        noted.strides = noted.strides or name in ("stride", "is_contiguous")
        return method(self, tx, name, *args, **options)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(VariableBuilder, "__call__", built))
        stack.enter_context(mock.patch.object(TorchInGraphFunctionVariable, "call_function", called))
        stack.enter_context(
            mock.patch.object(BuiltinVariable, "call_function", compared(BuiltinVariable.call_function))
        )
        handlers = {operation: asked_whether(operation) for operation in _COMPARISONS}
        stack.enter_context(mock.patch.dict(symbolic_convert.compare_op_handlers, handlers))
        stack.enter_context(mock.patch.object(TensorVariable, "call_method", called_of_tensor))
        yield noted
