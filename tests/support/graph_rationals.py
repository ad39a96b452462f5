"""A captured graph over rational numbers: arrays of ``Fraction``.

A function that has no rational values may be any function for a proof that two graphs are the same: ``rsqrt`` is
1 / (1 + v^2) here, which is positive and injective for positive v.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from fxround.graph.site import PORT
from fxround.module import compile

aten = torch.ops.aten


def exact(x: Any) -> Any:
    """Return an array of rational numbers."""
    return np.vectorize(Fraction, otypes=[object])(x.detach().double().numpy() if isinstance(x, Tensor) else x)


def convolution(x: Any, w: Any, bias: Any, stride: Any, padding: Any, *rest: Any) -> Any:
    """Return a convolution of one dimension without groups."""
    assert bias is None and list(stride) == [1] and rest[0] == [1] and not rest[1] and rest[3] == 1
    x = np.pad(x, [(0, 0), (0, 0), (padding[0], padding[0])], constant_values=Fraction(0))
    width = w.shape[2]
    sums = [np.tensordot(x[:, :, t : t + width], w, ([1, 2], [1, 2])) for t in range(x.shape[2] - width + 1)]
    return np.stack(sums, -1)


OPERATORS: dict[Any, Callable[..., Any]] = {
    aten.reshape.default: lambda x, size: x.reshape(size),
    aten.permute.default: lambda x, dims: x.transpose(dims),
    aten.clone.default: lambda x, **_: x,
    aten.sym_size.int: lambda x, d: x.shape[d],
    operator.mul: lambda a, b: a * b,
    aten.add.Tensor: lambda x, y: x + Fraction(y) if isinstance(y, float) else x + y,
    aten.add.Scalar: lambda x, y: x + Fraction(y),
    aten.sub.Tensor: lambda x, y: x - y,
    aten.mul.Tensor: lambda x, y: x * y,
    aten.div.Tensor: lambda x, y: x / Fraction(y) if not isinstance(y, np.ndarray) else x / y,
    aten.mm.default: lambda x, y: x @ y,
    aten.relu.default: lambda x: np.maximum(x, Fraction(0)),
    aten.rsqrt.default: lambda x: 1 / (1 + x * x),
    aten.sum.dim_IntList: lambda x, dims, keep=False: np.asarray(x.sum(axis=tuple(dims) or None, keepdims=keep)),
    aten.convolution.default: convolution,
}


def run_exactly(model: nn.Module, x: Tensor, state: Mapping[str, Any] | None = None) -> Any:
    """Return the result of a model's graph; state: arrays in place of parameters and buffers of these names."""
    with torch.no_grad():
        graph = compile(model, "identity")._entry((x,), {}).lowered
    known = {name: exact(tensor) for name, tensor in model.state_dict().items()} | dict(state or {})
    values: dict[fx.Node, Any] = {}
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            port = node.meta[PORT]
            values[node] = known.get(port.name) if port.kind in ("parameter", "buffer") else exact(x)
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            values[node] = OPERATORS[node.target](*args, **kwargs)
        else:
            (result,) = node.args[0]
    return values[result]
