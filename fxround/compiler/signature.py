"""The arguments that a compiled module takes, and the part of them on which a captured graph depends.

A graph holds numbers and flags among its arguments as constants. They are part of the key under which the graph is
kept, so that other ones are captured again.
"""

from __future__ import annotations

import copy
import inspect
import sys
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.nn.utils.rnn import PackedSequence

from fxround.capture.processes import is_shared, mesh_of
from fxround.capture.torch_private import is_of_dynamo, is_optimized
from fxround.errors import CaptureError, shown, type_of
from fxround.graph.values import instances_in
from fxround.python_model.functions import Function

# The note that distinguishes an error of the model from one of fxround.
REFUSED: Final = "the model itself raises this for these arguments; fxround asked a copy of it"


def arguments(example: Any, name: str = "example_inputs") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of ``example_inputs``.

    Raises TypeError for another form; ``name`` is what the caller calls them.
    """
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, tuple) and tuple(map(type, example)) == (tuple, dict):
        return example[0], example[1]
    if isinstance(example, tuple | list):
        return tuple(example), {}
    if isinstance(example, Tensor):
        return (example,), {}
    raise TypeError(
        f"{name} is {type_of(example)}; expected a tensor, a tuple of arguments, a dict of "
        "keywords, or a tuple and a dict"
    )


def flattened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
    """Return what ``pytree.tree_flatten((args, kwargs))`` returns; for tensors alone without walking a tree."""
    if kwargs or not _TENSORS.issuperset(map(type, args)):
        return pytree.tree_flatten((args, kwargs))
    spec = _SPECS.get(len(args))
    if spec is None:
        spec = _SPECS[len(args)] = pytree.tree_structure((args, kwargs))
    return list(args), spec


_TENSORS: Final = frozenset((Tensor, nn.Parameter))
_SPECS: Final[dict[int, pytree.TreeSpec]] = {}


def signature_of(function: Any) -> inspect.Signature:
    """Return ``inspect.signature``, with annotations that cannot be evaluated left as they are written."""
    if sys.version_info >= (3, 14):  # evaluates annotations when they are asked for; imports for type checkers are none
        from annotationlib import Format

        return inspect.signature(function, annotation_format=Format.FORWARDREF)
    return inspect.signature(function)


def with_keywords(signature: inspect.Signature, names: Iterable[str]) -> inspect.Signature:
    """Return a signature with parameters of these names in place of ``**kwargs``, besides those that it has."""
    named, kinds = list(signature.parameters.values()), inspect.Parameter
    if not named or named[-1].kind is not kinds.VAR_KEYWORD:
        return signature
    more = [kinds(name, kinds.KEYWORD_ONLY) for name in names if name not in signature.parameters]
    return signature.replace(parameters=[*named[:-1], *more])


def require_module(model: Any) -> None:
    """Raise TypeError for what is no module: a study copies and converts its model, which a function's cannot be."""
    if not isinstance(model, nn.Module):
        if isinstance(model, type):
            raise TypeError(f"model is the class {model.__name__}; expected a torch.nn.Module: pass an instance")
        function = ": write a module whose forward calls the function" if callable(model) else ""
        raise TypeError(f"model is {type_of(model)}; expected a torch.nn.Module{function}")


def require_flag(name: str, value: Any, optional: bool = False) -> None:
    """Raise TypeError for a setting that is no bool; optional: None is allowed too."""
    if not isinstance(value, bool) and not (optional and value is None):
        raise TypeError(f"{name} is {shown(value)}; expected True or False{' or None' if optional else ''}")


def require_python(model: nn.Module) -> None:
    """Raise TypeError for a module that calls other code than its Python code: TorchScript's, or torch.compile's."""
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("model is a TorchScript module, whose code cannot be captured; pass the Python module")
    if is_optimized(model):
        raise TypeError(
            "model is a module that torch.compile returned: pass the module that torch.compile was given "
            '(model._orig_mod), or call torch.compile(module, backend="fxround", options={"policy": "stochastic"})'
        )


def require_arguments(model: nn.Module, args: Any, kwargs: Any) -> None:
    """Raise TypeError, as the model itself would, for arguments that its forward does not take."""
    try:
        signature_of(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{type(model).__name__}.forward: {error}") from None


def require_dtypes(model: nn.Module, args: Any, kwargs: Any) -> None:
    """Raise what the model itself raises for arguments of another floating dtype than its state.

    Tracing promotes dtypes where a kernel would refuse them; so if the dtypes differ, a copy of the model is called.
    Raises CaptureError if the model cannot be copied.
    """
    state = {t.dtype for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()}
    given = {t.dtype for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_floating_point()}
    if state and given - state and not asked(model, args, kwargs):
        raise CaptureError(
            f"{type(model).__name__} has state of {_listed(state)} and arguments of {_listed(given)}. Whether "
            "it accepts them is found by calling a copy, which cannot be done here. Convert the arguments or the model."
        )


# Operators of which PyTorch's kernels take two operands of one dtype, and tracing takes any.
_OF_ONE_DTYPE: Final = frozenset(
    (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.convolution.default)
)


def require_products(model: nn.Module, graph: fx.GraphModule, args: Any, kwargs: Any) -> None:
    """Raise what the model itself raises if its graph multiplies matrices of two dtypes, as integers by a weight.

    Raises CaptureError if the model cannot be copied, and for one that accepts what its graph cannot compute.
    """
    for node in graph.graph.nodes:
        if node.target not in _OF_ONE_DTYPE:
            continue
        dtypes = {operand.meta["val"].dtype for operand in node.all_input_nodes[:2]}
        if len(dtypes) > 1:
            asked(model, args, kwargs)
            raise CaptureError(
                f"{type(model).__name__} multiplies tensors of {_listed(dtypes)} ({node.name}), which no kernel does: "
                "convert the arguments or the model to one dtype."
            )


def _listed(dtypes: set[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype) for dtype in dtypes))


def asked(model: nn.Module, args: Any, kwargs: Any, traced: bool = False) -> bool:
    """Call a copy of the model, and raise what it raises for these arguments; return False if there is no answer.

    A copy is called because a call may change buffers and arguments. It records gradients, which a model may ask for.
    traced: whether Dynamo has refused the model already. PyTorch traces the bodies of its loops with Dynamo even in a
    plain call, so that what Dynamo raises then is no answer of the model; nor has a model that cannot be copied one, or
    that several processes share: all of them would have to call it.
    """
    if mesh_of(model) is not None:
        return False
    try:
        copied = copy.deepcopy(model)
    except Exception:  # a model's own __deepcopy__ may raise anything: False says that there is no answer
        return False
    args, kwargs = pytree.tree_map_only(Tensor, _alone, (args, kwargs))
    with torch.random.fork_rng(), torch.enable_grad():
        try:
            copied(*args, **kwargs)
        except Exception as error:
            if traced and is_of_dynamo(error):
                return False
            error.add_note(REFUSED)
            raise
    return True


def _alone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def is_opaque(leaf: Any) -> bool:
    """Whether an argument is an object that may change while it stays the same and equal, so that no key holds it."""
    return not isinstance(leaf, _LASTING)


_LASTING: Final = (
    Tensor
    | bool
    | int
    | float
    | complex
    | str
    | bytes
    | None
    | torch.dtype
    | torch.device
    | torch.layout
    | torch.memory_format
    | Enum
    | type
    | range
    | slice
    | FunctionType
    | BuiltinFunctionType
    | np.generic
)


def kind(leaf: Any) -> Any:
    """Return the part of a leaf that the graph depends on: a tensor's dtype and rank, anything else itself.

    Of a DTensor that is also its shape, and how processes share it. A float is represented by its digits, because
    0.0 == -0.0 and no NaN equals itself.
    """
    if is_shared(leaf):
        return *_kind_of(leaf), tuple(leaf.shape), leaf.placements, leaf.device_mesh
    if isinstance(leaf, Tensor):
        return _kind_of(leaf)
    if isinstance(leaf, float):
        return type(leaf), leaf.hex()
    if isinstance(leaf, slice):  # has no hash before Python 3.12
        return type(leaf), leaf.start, leaf.stop, leaf.step
    return type(leaf), leaf


def _kind_of(tensor: Any) -> tuple[Any, ...]:
    return tensor.dtype, tensor.dim(), tensor.requires_grad, tensor.device


def packed_kinds(values: Iterable[Any]) -> tuple[PackedKind, ...]:
    """Return what a graph depends on of each packed sequence among arguments: the number of its sequences."""
    return tuple(PackedKind(int(packed.batch_sizes[0])) for packed in instances_in(tuple(values), PackedSequence))


@dataclass(frozen=True)
class PackedKind:
    """The number of sequences of a packed sequence, which is data."""

    sequences: int


def class_of(model: nn.Module, base: type[nn.Module]) -> Any:
    """Return a subclass of ``base`` whose ``forward`` has the signature of the model's, for ``inspect.signature``."""
    function = model.function if isinstance(model, Function) else model.forward
    key: Any = getattr(function, "__func__", function)
    cls = _CLASSES.get(key)
    if cls is None:
        try:
            signature = signature_of(key)
        except (TypeError, ValueError):  # a builtin function without a signature
            return base
        parameters = list(signature.parameters.values())
        if key is function:  # not a method, so that there is no parameter for the instance
            name = next(n for n in ("self", "compiled", "compiled_") if all(n != p.name for p in parameters))
            parameters.insert(0, inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY))

        # The function itself under another signature: one that calls it takes a part of a small model's call.
        own = base.forward
        forward: Any = FunctionType(own.__code__, own.__globals__, "forward", own.__defaults__, own.__closure__)
        forward.__doc__, forward.__signature__ = own.__doc__, signature.replace(parameters=parameters)
        names = {"forward": forward, "__module__": base.__module__, "__doc__": base.__doc__}
        cls = type(base.__name__, (base,), names)
        try:
            _CLASSES[key] = cls
        except TypeError:  # an object without weak references is not cached
            return cls
    return cls


_CLASSES: Final[weakref.WeakKeyDictionary[Any, type[nn.Module]]] = weakref.WeakKeyDictionary()
