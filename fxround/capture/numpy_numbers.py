"""NumPy's scalars as the numbers that they are to PyTorch, in a trace of Dynamo's.

``x * np.float64(0.1)`` has the dtype of x: PyTorch takes a scalar of NumPy for a Python number. Dynamo makes a tensor
of no dimension of it, which takes part in the promotion of dtypes. Here it is a constant, with a guard for its value,
and what NumPy's functions make of constants alone is computed by NumPy. A truth value of NumPy is a bool. Since
torch 2.13 Dynamo refuses arithmetic of such constants; before, their own operators compute it.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, fx

from fxround.errors import CaptureError
from fxround.graph.site import located

_COMPARISONS: Final = (
    *((operator.eq, "=="), (operator.ne, "!="), (operator.lt, "<")),
    *((operator.le, "<="), (operator.gt, ">"), (operator.ge, ">=")),
)
# What NumPy computes of a tensor and an array on its right.
_BY_NUMPY: Final = (
    *(operator.add, operator.sub, operator.mul, operator.truediv),
    *(operator.pow, operator.floordiv, operator.mod),
)
# What takes an array as PyTorch does: the numbers of elements, and what makes a tensor.
_BY_PYTORCH: Final = (operator.getitem, operator.setitem, torch.as_tensor)


class _Thread(threading.local):
    """How many traces of the thread take scalars of NumPy for numbers, and whether one of them met a scalar."""

    traces = 0
    met = False


_THREAD: Final = _Thread()


@contextlib.contextmanager
def numpy_numbers() -> Iterator[None]:
    """Let Dynamo take scalars of NumPy for numbers, in traces of this thread in the block.

    The methods of Dynamo are wrapped once and for good, and do what they did in every other trace: the block is entered
    by every call of a model that runs by way of ``torch.compile``, and must cost such a call nothing.
    """
    _wrap()
    _THREAD.traces += 1
    try:
        yield
    finally:
        _THREAD.traces -= 1
        if _THREAD.met and not _THREAD.traces:
            _forget()


def _meet() -> None:
    """Let Dynamo take the types of NumPy's scalars for types of constants, until the outermost trace ends."""
    from torch._dynamo.utils import common_constant_types

    common_constant_types.update(_types())
    _THREAD.met = True


def _forget() -> None:
    from torch._dynamo.utils import common_constant_types

    common_constant_types.difference_update(_types())
    _THREAD.met = False


@cache
def _types() -> frozenset[type]:
    """Return the types of NumPy's scalars that Dynamo does not take for types of constants."""
    from torch._dynamo.utils import common_constant_types

    types = {each for each in np.sctypeDict.values() if issubclass(each, np.floating | np.integer)}
    return frozenset(types - common_constant_types)


@cache
def _wrap() -> None:
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.misc import NumpyVariable

    _types()  # before the first trace adds to them
    wrap, call = VariableBuilder._wrap, NumpyVariable.call_function
    make, passed = ConstantVariable.__init__, ConstantVariable.as_proxy

    def wrapped(self: Any, value: Any) -> Any:
        if _THREAD.traces and isinstance(value, np.bool_):  # one of two objects
            self.install_guards(GuardBuilder.ID_MATCH)
            return ConstantVariable.create(bool(value), source=self.source)
        if not _THREAD.traces or not _is_real(value):
            return wrap(self, value)
        _meet()
        self.install_guards(GuardBuilder.EQUALS_MATCH)
        return ConstantVariable.create(value, source=self.source)

    def made(self: Any, value: Any, **options: Any) -> None:
        make(self, value, **options)
        if _THREAD.traces:
            self.value = value

    def as_proxy(self: Any) -> Any:
        return _named(self.value.dtype.type)(self.value.item()) if _is_real(self.value) else passed(self)

    def called(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        pure = isinstance(self.value, np.ufunc) or (isinstance(self.value, type) and issubclass(self.value, np.generic))
        if _THREAD.traces and pure and all(each.is_python_constant() for each in (*args, *kwargs.values())):
            given = [each.as_python_constant() for each in args]
            result = self.value(*given, **{name: each.as_python_constant() for name, each in kwargs.items()})
            if _is_real(result):
                _meet()
                return ConstantVariable.create(result)
        return call(self, tx, args, kwargs)

    replaced: tuple[tuple[Any, str, Any], ...] = (
        (VariableBuilder, "_wrap", wrapped),
        (NumpyVariable, "call_function", called),
        (ConstantVariable, "__init__", made),
        (ConstantVariable, "as_proxy", as_proxy),
    )
    for owner, name, function in replaced:
        setattr(owner, name, function)


@cache
def _named(dtype: type) -> Any:
    """Return a class of Python numbers that has the name of one of NumPy's.

    PyTorch's operators take its objects for numbers. Symbolic sizes refuse arithmetic with them, because NumPy computes
    with a size in its own dtype; then the model is captured for each size. A comparison with a size is exact for
    integers and float64, and refused for narrower floats.
    """
    kind: Any = float if issubclass(dtype, np.floating) else int
    exact = kind is int or dtype is np.float64

    def comparing(compare: Any, sign: str) -> Any:
        def compared(self: Any, other: Any) -> Any:
            if isinstance(other, torch.SymInt | torch.SymFloat) and not exact:
                told = type(other).__name__, dtype.__name__
                raise TypeError("unsupported operand type(s) for {}: {!r} and {!r}".format(sign, *told))
            return compare(kind(self), other)

        return compared

    own = {f"__{compare.__name__}__": comparing(compare, sign) for compare, sign in _COMPARISONS}
    return type(dtype.__name__, (kind,), {**own, "__hash__": kind.__hash__})


def _is_real(value: Any) -> bool:
    return isinstance(value, np.floating | np.integer)


def refuse_numpy_numbers(graph: fx.GraphModule) -> None:
    """Raise CaptureError where NumPy's scalars or arrays in Dynamo's graph meet a tensor in a way that Python has not.

    A scalar that NumPy's functions compute would change the dtype. NumPy takes no tensor that requires gradients,
    PyTorch's functions take no array, and a tensor on the right of an array is no operand of NumPy's.
    """
    for part in (part for part in graph.modules() if isinstance(part, fx.GraphModule)):
        for node in part.graph.nodes:
            computed = any(_is_numpy(each) and _is_number(each) for each in node.all_input_nodes)
            if computed and len(node.all_input_nodes) > 1 and not _is_numpy(node):
                raise CaptureError(
                    f"{located(node)}: NumPy computes a number from a size or an array in the forward, which would "
                    "change the dtype of the result: compute it by math, as float(...) in __init__, or by torch."
                )
            if node.op in ("call_function", "call_method") and node.target not in _BY_PYTORCH:
                _refuse_arrays(node)


def _refuse_arrays(node: fx.Node) -> None:
    arrays = [each for each in node.all_input_nodes if _is_array(each)]
    tensors = [each for each in node.all_input_nodes if not _is_array(each) and _is_tensor(each)]
    if not tensors or not (arrays or _is_numpy(node)):
        return
    if any(each.meta["example_value"].requires_grad for each in tensors):
        told = "computes with a tensor that requires gradients, which PyTorch refuses"
    elif not _is_numpy(node) and (node.target not in _BY_NUMPY or node.args[0] not in tensors):
        told = "meets an array where PyTorch takes none"
    else:
        return
    raise CaptureError(
        f"{located(node)}: NumPy {told}: make a tensor of the array (torch.from_numpy(array), or a buffer of the "
        "module), or detach the tensor (x.detach().numpy())."
    )


def _is_numpy(node: fx.Node) -> bool:
    return type(node.target).__name__.startswith("numpy_") or getattr(node.target, "__name__", "").startswith("numpy_")


def _is_array(node: fx.Node) -> bool:
    """Whether a node of Dynamo's graph, which has a tensor for it, is an array to the model."""
    source = str(getattr(getattr(node, "_dynamo_source", None), "name", ""))
    return _is_numpy(node) or source.startswith("___from_numpy(")


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), Tensor)


def _is_number(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    value = getattr(value, "tensor", value)  # torch._numpy's array has the tensor
    return isinstance(value, Tensor) and value.dim() == 0
