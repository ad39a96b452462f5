"""What shares memory in eager PyTorch and would not in a trace, by PyTorch's private interfaces.

A dropout that drops nothing returns its argument; PyTorch's decomposition returns a copy, which a later change in place
of the argument does not reach. ``x.T``, ``x.mT``, ``x.real`` and ``x.data`` are views; where a model returns them,
Dynamo would read them again from the arguments of the trace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._C import DispatchKey

from fxround.capture.attribute_reads import tensor_attribute_reads


@contextlib.contextmanager
def kept_dropouts() -> Any:
    """Let a dropout that drops nothing return its argument in traces."""
    operator = torch.ops.aten.dropout.default
    keys = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)
    with mock.patch.dict(operator.py_kernels, dict.fromkeys(keys, _dropout)):
        operator._dispatch_cache.clear()
        try:
            yield
        finally:
            operator._dispatch_cache.clear()


def _dropout(x: Tensor, p: float, train: bool | None) -> Tensor:
    if not train or p == 0:
        return x
    dropped: Tensor = torch.ops.aten.native_dropout.default(x, p, train)[0]
    return dropped


def computed_views() -> contextlib.AbstractContextManager[Any]:
    """Let Dynamo compute attributes of tensors that are views in its graph, also where they are results."""
    from torch._dynamo.variables import TensorVariable

    def computed(read: Callable[[], Any], holder: Any, name: str) -> Any:
        result = read()
        if type(result) is TensorVariable and result.proxy.node.op != "placeholder":
            result.source = None
        return result

    return tensor_attribute_reads(computed)
