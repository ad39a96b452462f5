"""How Dynamo reads an attribute while it traces, which differs between versions of PyTorch.

Since torch 2.14 one function does it, of which modules have copies by name. Before, ``getattr`` did, as a class of its
own in 2.13, and tensors had a method for their own attributes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

# Takes the function that reads the attribute, the holder, which may be lazy, and the name; returns what was read.
Around = Callable[[Callable[[], Any], Any, str], Any]


def wrapped_reads(around: Around) -> list[tuple[Any, str, Any]]:
    """Return what calls a function in place of each read of an attribute: owners, names, and what to put there.

    The holder and the value are Dynamo's.
    """
    from torch._dynamo import symbolic_convert
    from torch._dynamo.variables import builtin

    if hasattr(symbolic_convert, "generic_getattr"):
        from torch._dynamo.variables import object_protocol

        modules = (symbolic_convert, builtin, object_protocol)
        return [(module, "generic_getattr", _of_function(module, around)) for module in modules]
    if hasattr(builtin, "GetAttrBuiltinVariable"):
        reader = builtin.GetAttrBuiltinVariable
        return [(reader, "_call_getattr", _of_call(reader._call_getattr, around))]
    calls = builtin.BuiltinVariable.call_function
    getting = _of_call(calls, around)

    def called(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        return (getting if self.fn is getattr else calls)(self, tx, args, kwargs)

    return [(builtin.BuiltinVariable, "call_function", called)]


@contextlib.contextmanager
def tensor_attribute_reads(around: Around) -> Iterator[None]:
    """Call a function in place of each read of an attribute of a tensor in the block."""
    from torch._dynamo.variables import TensorVariable

    def of_tensor(read: Callable[[], Any], holder: Any, name: str) -> Any:
        return around(read, holder, name) if isinstance(holder.realize(), TensorVariable) else read()

    if not hasattr(TensorVariable, "var_getattr"):
        with contextlib.ExitStack() as stack:
            for owner, attribute, function in wrapped_reads(of_tensor):
                stack.enter_context(mock.patch.object(owner, attribute, function))
            yield
        return
    method = TensorVariable.var_getattr

    def var_getattr(self: Any, tx: Any, name: str) -> Any:
        return around(lambda: method(self, tx, name), self, name)

    with mock.patch.object(TensorVariable, "var_getattr", var_getattr):
        yield


def _of_function(module: Any, around: Around) -> Any:
    read = module.generic_getattr

    def generic_getattr(tx: Any, obj: Any, name: str, *default: Any, **options: Any) -> Any:
        return around(lambda: read(tx, obj, name, *default, **options), obj, name)

    return generic_getattr


def _of_call(call: Any, around: Around) -> Any:
    def called(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if not args[1].is_python_constant():
            return call(self, tx, args, kwargs)
        return around(lambda: call(self, tx, args, kwargs), args[0], args[1].as_python_constant())

    return called
