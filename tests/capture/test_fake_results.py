"""What Dynamo computes with fake tensors once for equal calls: each result is what another computation gives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fxround.capture import capture, dynamo, fake_results
from fxround.operators.formulas import decompositions

X = torch.randn(3, 5, 8)
LAYERS = 5


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.norm(x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))


def layers(x: Tensor, modules: nn.ModuleList) -> Tensor:
    for module in modules:
        x = module(x)
    return x


def written(x: Tensor, modules: nn.ModuleList) -> Tensor:
    """Results that are changed in place, of which none shares memory with another."""
    results = [F.linear(x, modules[0].out.weight)]
    for _ in range(3):
        results[-1].add_(1)
        results[-1].transpose_(0, 1)
        results.append(F.linear(x, modules[0].out.weight))
    return torch.cat([r.flatten() for r in results])


def narrowed(x: Tensor, modules: nn.ModuleList) -> Tensor:
    """Equal calls with and without autocast."""
    a, b = modules[0].out(x), modules[0].out(x)
    with torch.autocast("cpu", torch.bfloat16):
        c = modules[0].out(x)
    return a + b + c.float() + modules[0].out(x)


def conditional(x: Tensor, modules: nn.ModuleList) -> Tensor:
    """Equal calls before and after a condition on sizes."""
    a = F.linear(x, modules[0].out.weight)
    if x.shape[0] == x.shape[1]:
        return a
    b = F.linear(x, modules[0].out.weight)
    return a + b + F.linear(x, modules[0].out.weight)


def transposed(x: Tensor, modules: nn.ModuleList) -> Tensor:
    """Calls that differ in the order of their argument in memory, or in an option."""
    norm = modules[0].norm
    y = x.transpose(0, 1).contiguous().transpose(0, 1)
    weights = norm.weight, norm.bias
    results = [F.layer_norm(z, (8,), *weights, eps=eps) for z in (x, x, y, y) for eps in (1e-5, 1e-3)]
    return torch.stack([*results, F.linear(x, modules[0].out.weight), F.linear(y, modules[0].out.weight)])


class Model(nn.Module):
    def __init__(self, function: Callable[[Tensor, nn.ModuleList], Tensor]) -> None:
        super().__init__()
        self.blocks, self.function = nn.ModuleList(Attention() for _ in range(LAYERS)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.blocks)


class Ended(BaseException):
    """Ends a capture after Dynamo's part of it."""


def values_of(model: nn.Module, *args: Any) -> list[Any]:
    """Return what each value of Dynamo's graph is, and which share memory."""
    found: list[Any] = []

    def noted(graph: Any) -> Any:
        memories: dict[int, int] = {}
        for node in graph.graph.nodes:
            value = node.meta.get("example_value")
            if isinstance(value, Tensor):
                base = value._base
                memory = memories.setdefault(fake_results.memory_of(value), len(memories))
                shown = fake_results.described(value)[1:]
                found.append((node.name, shown, memory, None if base is None else fake_results.described(base)[1:]))
        raise Ended

    with mock.patch.object(dynamo, "memory_reads", noted), pytest.raises(Ended):
        capture(model, args, {}, decompositions())
    assert found
    return found


@pytest.mark.parametrize("function", [layers, written, narrowed, conditional, transposed])
@pytest.mark.parametrize("gradients", [False, True])
def test_remembered_results_are_those_of_a_computation(function: Any, gradients: bool) -> None:
    model = Model(function)
    with torch.set_grad_enabled(gradients):
        remembered = values_of(model, X)
        with mock.patch.object(dynamo, "remembered_results", contextlib.nullcontext):
            assert str(remembered) == str(values_of(model, X))


def test_equal_calls_are_computed_once_or_twice() -> None:
    made: list[Any] = []
    again = fake_results._Result.again

    def counted(self: Any) -> Tensor:
        made.append(self)
        return again(self)

    with torch.no_grad(), mock.patch.object(fake_results._Result, "again", counted):
        values_of(Model(layers), X)
    # The first of four calls may add conditions on sizes.
    assert 4 * (LAYERS - 2) <= len(made) <= 4 * (LAYERS - 1)


def test_a_result_is_remembered_for_its_modes_alone() -> None:
    class Tracer:
        fake_mode = torch._subclasses.FakeTensorMode(shape_env=torch.fx.experimental.symbolic_shapes.ShapeEnv())
        shape_env = fake_mode.shape_env

    graph = torch.fx.Graph()
    node = graph.call_function(F.linear)

    def key(*args: Any, **kwargs: Any) -> Any:
        with Tracer.fake_mode:
            return fake_results._key(Tracer, node, args, kwargs)

    x = Tracer.fake_mode.from_tensor(X)
    usual = key(x, x)
    assert usual is not None and usual == key(x, x)
    others = [key(x, x.double()), key(x.transpose(0, 1), x), key(x, bias=x), key(x[:, 1:], x), key([x, x])]
    for change in (torch.no_grad, torch.inference_mode, lambda: sdpa_kernel(SDPBackend.MATH)):
        with change():
            others.append(key(x, x))
    assert None not in others and usual not in others
    with torch.autocast("cpu", torch.bfloat16):
        assert key(x, x) is None
    with torch.device("cpu"):
        assert key(x, x) is None
    with torch._functorch.eager_transforms.grad_increment_nesting():
        assert key(x, x) is None
    assert key(x, {1}) is None
    assert fake_results._key(Tracer, node, (x, x), {}) is None
    assert fake_results._key(Tracer, graph.call_function(F.dropout), (x,), {}) is None
