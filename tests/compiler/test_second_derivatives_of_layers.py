"""Second derivatives of the layers of the suite, in binary64, against stock PyTorch's.

Both differentiate twice by formulas of their own, so that the numbers differ by rounding errors: a part in 1e9 of the
largest one is far above these, and far below a term that is missing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from layers import LAYERS, Calls, Together
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fxround


def _distances(x: Tensor, y: Tensor) -> Tensor:
    return (x[:, None] - y[None]).square().sum(-1).sqrt()


class _Normed(nn.Module):
    """Weight norm by its definition."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        parts = self.layer.parametrizations.weight
        v = parts.original1
        return nn.functional.linear(x, parts.original0 * v / v.norm(dim=1, keepdim=True), self.layer.bias)


# PyTorch has no second derivative of cdist, and a wrong one of weight norm: definitions are the oracle.
_DEFINED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "cdist": lambda module: Calls(_distances),
    "weight_norm": _Normed,
}


# All of them take minutes: a quarter with different operators, in four captures.
_CHOSEN = [
    "Conv2d",
    "ConvTranspose1d",
    "MaxPool2d",
    "AvgPool1d_ceil",
    "BatchNorm2d_train",
    "InstanceNorm1d",
    "LPPool1d",
    "ReplicationPad2d",
    "Upsample2d_bilinear",
    "grid_sample",
    "Bilinear",
    "LayerNorm",
    "GroupNorm",
    "weight_norm",
    "spectral_norm",
    "Embedding",
    "LSTM_projected",
    "GRUCell",
    "MultiheadAttention",
    "causal_attention",
    "CrossEntropyLoss",
    "KLDivLoss",
    "CosineSimilarity",
    "cdist",
    "binary",
    "unary",
    "reduced",
    "powers",
    "products",
    "scatter_add",
    "index_put",
    "sorts",
    "masked_softmax",
    "in_place",
]


def _weighted(values: list[Tensor]) -> Tensor:
    """A sum in which no two numbers have the same weight."""
    terms = [(v * torch.linspace(1, 2, v.numel(), dtype=v.dtype).reshape(v.shape)).sum() for v in values if v.numel()]
    return torch.stack(terms).sum()


def second(call: Callable[..., Any], sources: list[Tensor], args: list[Any]) -> tuple[list[Any], list[Any]]:
    """First and second derivatives of sums of results and of squares of first derivatives."""
    results = [r for r in pytree.tree_leaves(call(*args)) if isinstance(r, Tensor) and r.requires_grad]
    first = torch.autograd.grad(_weighted(results), sources, create_graph=True, allow_unused=True)
    squares = [g.square() for g in first if g is not None and g.requires_grad]
    return list(first), list(torch.autograd.grad(_weighted(squares), sources, allow_unused=True))


@pytest.mark.part("0")
@pytest.mark.parametrize("names", [_CHOSEN[i::4] for i in range(4)], ids=["0", "1", "2", "3"])
def test_second_derivatives_of_layers(names: list[str]) -> None:
    layers, arguments, oracles = [], [], []
    for name in names:
        module, args = copy.deepcopy(LAYERS[name])
        layers.append(module.double())
        arguments.append([x.double().requires_grad_() if x.is_floating_point() else x for x in args])
        oracles.append(_DEFINED.get(name, lambda module: module)(layers[-1]))
    together = Together(layers, [len(args) for args in arguments])
    flat = [x for args in arguments for x in args]
    owned = [
        (name, x)
        for name, layer, args in zip(names, layers, arguments, strict=True)
        for x in (*args, *layer.parameters())
        if x.requires_grad
    ]
    sources = [x for _, x in owned]
    found = second(fxround.compile(together, "identity"), sources, flat)
    with sdpa_kernel(SDPBackend.MATH):
        wanted = second(Together(oracles, together.numbers), sources, flat)
    for order, (values, others) in enumerate(zip(found, wanted, strict=True), 1):
        for (name, source), value, other in zip(owned, values, others, strict=True):
            value, other = (torch.zeros_like(source) if x is None else x for x in (value, other))
            scale = max(1.0, float(other.abs().max())) if other.numel() else 1.0
            assert torch.allclose(value, other, rtol=0, atol=1e-9 * scale, equal_nan=True), f"{name}, order {order}"
