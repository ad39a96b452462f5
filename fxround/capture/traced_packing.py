"""Packed sequences in a trace of Dynamo and AOTAutograd, by PyTorch's private interfaces.

Dynamo does not trace the functions of ``torch.nn.utils.rnn``. Inside of ``traced_packing`` it does, and the number of
sequences, which PyTorch reads from ``batch_sizes[0]`` again and again, is the same symbol or number each time.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, Final
from unittest import mock

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

# Of fake tensors of this trace: the first element, the largest size of the first dimension, and the tensor itself, so
# that no other tensor gets its memory.
_NUMBERS: Final[dict[Any, tuple[Any, Any, Any]]] = {}


@contextlib.contextmanager
def traced_packing(
    functions: Mapping[Any, Callable[..., Any]], known: Sequence[tuple[torch.Tensor, int]] = ()
) -> Iterator[None]:
    """Let Dynamo trace the functions of ``torch.nn.utils.rnn``, and call these functions in place of their kernels.

    known: arguments of the trace, each with the number that is its first element.
    """
    from torch._dynamo import trace_rules
    from torch._dynamo.utils import proxy_args_kwargs
    from torch._dynamo.variables import TorchInGraphFunctionVariable, UserFunctionVariable
    from torch._dynamo.variables.builder import wrap_fx_proxy

    def calls(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(_: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            return wrap_fx_proxy(
                tx, tx.output.create_proxy("call_function", function, *proxy_args_kwargs(args, kwargs))
            )

        return call

    def shapes(padded: Any, lengths: Any, batch_first: bool) -> Any:
        context = torch.library.get_ctx()
        rows, steps = context.new_dynamic_size(min=1), context.new_dynamic_size(min=1)
        return padded.new_empty((rows, *padded.shape[2:])), lengths.new_empty((steps,))

    inlined = {f: UserFunctionVariable for f in vars(torch.nn.utils.rnn).values() if isinstance(f, FunctionType)}
    called = {kernel: calls(function) for kernel, function in functions.items()}
    with (
        torch.library._scoped_library("aten", "FRAGMENT") as library,
        _same_numbers(known),
        mock.patch.dict(trace_rules.get_torch_obj_rule_map(), inlined),
        mock.patch.dict(TorchInGraphFunctionVariable._get_handlers(), called),
    ):
        torch.library.register_fake("aten::_pack_padded_sequence", shapes, lib=library)
        yield


@contextlib.contextmanager
def _same_numbers(known: Sequence[tuple[torch.Tensor, int]]) -> Iterator[None]:
    """Give the declared number, for instance of ``batch_sizes[0]``, to every ``.item()`` of the element."""
    implementations: Any = importlib.import_module("torch._subclasses.fake_impls").op_implementations_dict
    scalar = torch.ops.aten._local_scalar_dense.default
    original = implementations[scalar]

    def number(mode: Any, func: Any, arg: Any) -> Any:
        key = _element(arg)
        for tensor, first in known:
            if _element(mode.from_tensor(tensor)) == key:
                return first
        return _NUMBERS[key][0] if key in _NUMBERS else original(mode, func, arg)

    with mock.patch.dict(implementations, {scalar: number}):
        try:
            yield
        finally:
            _NUMBERS.clear()


def _element(tensor: Any) -> Any:
    """Return a key for the first element of a fake tensor, which changes when the tensor is written to."""
    version = -1 if tensor.is_inference() else tensor._version
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.dtype, version


def declare_batch_sizes(tensor: Any, first: Any, most: Any) -> None:
    """State the first element of a tensor whose size comes from data, and the largest value that this size may have."""
    plain = _plain(tensor)
    _NUMBERS[_element(plain)] = (first, most, plain)


def most_rows(tensor: Any) -> Any:
    """Return the largest size that the first dimension of a tensor may have."""
    size = tensor.shape[0]
    if isinstance(size, int) or not free_unbacked_symbols(size):
        return size
    known = _NUMBERS.get(_element(_plain(tensor)))
    return size if known is None else known[1]


def _plain(tensor: Any) -> Any:
    while hasattr(tensor, "elem"):
        tensor = torch._from_functional_tensor(tensor.elem)
    return tensor
