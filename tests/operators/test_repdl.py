"""The preset ``repdl`` has the bits of RepDL's formulas (support/repdl.py), in both passes and an optimizer's step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from repdl import (
    Array,
    BatchNorm,
    adam,
    batch_norm_eval,
    conv2d,
    conv2d_backward,
    cross_entropy,
    cross_entropy_backward,
    linear,
    linear_backward,
    mean,
    mean_backward,
    sgd,
    softmax,
)
from torch import Tensor, nn
from torch.nn import functional as F

import fxround
from fxround import Policy
from fxround.training import compile_optimizer

POLICY = Policy.preset("repdl")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def seeded(build: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        module: nn.Module = build()
        for p in module.parameters():
            p.data = torch.randn(p.shape)
    return module


def same(found: Tensor | None, expected: Any) -> None:
    """Whether the bits are equal, including the signs of zeros."""
    assert found is not None
    got, want = found.detach().numpy(), np.asarray(expected, np.float32)
    assert got.shape == want.shape
    np.testing.assert_array_equal(got.view(np.int32), want.view(np.int32))


def run(module: nn.Module, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The result, and the gradient of the argument; those of the parameters are left in the module."""
    x = x.clone().requires_grad_()
    y = fxround.compile(module, POLICY)(x)
    y.backward(g)
    assert x.grad is not None
    return y, x.grad


def test_linear() -> None:
    module, x, g = seeded(lambda: nn.Linear(7, 3)), drawn(5, 7), drawn(5, 3, seed=1)
    y, on_x = run(module, x, g)
    same(y, linear(x.numpy(), module.weight.detach().numpy(), module.bias.detach().numpy()))
    expected = linear_backward(g.numpy(), x.numpy(), module.weight.detach().numpy())
    for found, want in zip((on_x, module.weight.grad, module.bias.grad), expected, strict=True):
        same(found, want)


@pytest.mark.parametrize(
    "kernel, stride, padding, height, width",
    [(3, 1, 1, 4, 5), (2, 3, 0, 7, 8), (2, 2, 2, 4, 3)],
)
def test_conv2d(kernel: int, stride: int, padding: int, height: int, width: int) -> None:
    """The cases include rows that no window covers, padding wider than the kernel, and an even kernel."""
    module = seeded(lambda: nn.Conv2d(2, 3, kernel, stride, padding))
    x = drawn(2, 2, height, width)
    w, b = module.weight.detach().numpy(), module.bias.detach().numpy()
    expected = conv2d(x.numpy(), w, b, stride, padding)
    g = drawn(*expected.shape, seed=1)
    y, on_x = run(module, x, g)
    same(y, expected)
    gradients = conv2d_backward(g.numpy(), x.numpy(), w, stride, padding)
    for found, want in zip((on_x, module.weight.grad, module.bias.grad), gradients, strict=True):
        same(found, want)


def test_the_kernel_of_an_input_gradient_is_visited_in_its_own_order() -> None:
    """``reproducible`` reverses the kernel; if the two orders agreed, the test above could not fail."""
    module, x, g = seeded(lambda: nn.Conv2d(2, 3, 3)), drawn(2, 2, 6, 6), drawn(2, 3, 4, 4, seed=1)
    on_x = run(module, x, g)[1]
    x.requires_grad_()
    fxround.compile(module, "reproducible")(x).backward(g)
    assert x.grad is not None and not torch.equal(on_x, x.grad)


def test_groups_are_convolutions_of_their_own() -> None:
    module = seeded(lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2))
    x, g = drawn(2, 4, 4, 4), drawn(2, 6, 4, 4, seed=1)
    y, on_x = run(module, x, g)
    w, b = module.weight.detach().numpy(), module.bias.detach().numpy()
    same(y, conv2d(x.numpy(), w, b, 1, 1, groups=2))
    for i, o in ((slice(0, 2), slice(0, 3)), (slice(2, 4), slice(3, 6))):
        parts = conv2d_backward(g.numpy()[:, o], x.numpy()[:, i], w[o], 1, 1)
        same(on_x[:, i].contiguous(), parts[0])
        same(module.weight.grad[o], parts[1])


@pytest.mark.parametrize("shape", [(4, 3, 3, 2), (7, 3)])
def test_batch_norm(shape: tuple[int, ...]) -> None:
    module = seeded(lambda: nn.BatchNorm2d(3) if len(shape) == 4 else nn.BatchNorm1d(3))
    assert isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d)
    x, g = drawn(*shape) * 3 + 1, drawn(*shape, seed=1)
    weight, bias = (p.detach().numpy() for p in (module.weight, module.bias))
    zero, one = np.zeros(3, np.float32), np.ones(3, np.float32)
    norm = BatchNorm(x.numpy(), weight, bias, module.eps)
    y, on_x = run(module, x, g)
    same(y, norm.y)
    for found, want in zip((on_x, module.weight.grad, module.bias.grad), norm.backward(g.numpy()), strict=True):
        same(found, want)
    for found, want in zip((module.running_mean, module.running_var), norm.running(zero, one, 0.1), strict=True):
        same(found, want)
    module.eval()
    found, on_x = run(module, x, g)
    mean, var = module.running_mean.numpy(), module.running_var.numpy()
    same(found, batch_norm_eval(x.numpy(), mean, var, weight, bias, module.eps))
    scale = weight / np.sqrt(var + np.float32(module.eps))
    same(on_x, scale.reshape(1, -1, *[1] * (len(shape) - 2)) * g.numpy())


def test_cross_entropy_as_a_module_and_as_a_function() -> None:
    x, target = drawn(6, 5) * 4, torch.tensor([0, 4, 2, 2, 1, 3])
    expected = cross_entropy(x.numpy(), target.numpy())
    gradient = cross_entropy_backward(np.float32(1.5), x.numpy(), target.numpy())
    for loss in (nn.CrossEntropyLoss(), F.cross_entropy):
        x = x.detach().clone().requires_grad_()
        found = fxround.compile(loss, POLICY)(x, target)
        found.backward(torch.tensor(1.5))
        same(found, expected)
        same(x.grad, gradient)


def test_softmax_and_mean() -> None:
    x = drawn(4, 9) * 3
    same(fxround.compile(nn.Softmax(1), POLICY)(x), softmax(x.numpy()))
    x.requires_grad_()
    for function in (torch.mean, lambda x: x.mean((0, 1))):
        x.grad = None
        found = fxround.compile(function, POLICY)(x)
        found.backward(torch.tensor(0.3))
        same(found, mean(x.detach().numpy()))
        same(x.grad, mean_backward(np.float32(0.3), x.detach().numpy()))


def test_what_repdl_refuses_has_fxrounds_own_formula() -> None:
    x, target = drawn(6, 5), torch.tensor([0, 4, 2, 2, 1, 3])
    own = replace(POLICY, definitions="fxround")
    loss = partial(F.cross_entropy, label_smoothing=0.1, ignore_index=2)
    smoothed, plain = fxround.compile(loss, POLICY), fxround.compile(F.cross_entropy, POLICY)
    assert smoothed(x, target) == smoothed.with_policy(own)(x, target)
    nodes = [len(c.graph.graph.nodes) for c in (plain.prepare(x, target), plain.with_policy(own).prepare(x, target))]
    assert nodes[0] != nodes[1]
    with pytest.raises(RuntimeError, match="-100 is out of bounds"):
        plain(x, torch.full_like(target, -100))


class Net(nn.Module):
    """The modules that RepDL converts, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(1, 2, 3, 2, 1), nn.BatchNorm2d(2), nn.Linear(8, 3)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y: Tensor = F.cross_entropy(self.fc(F.relu(self.norm(self.conv(x))).flatten(1)), target)
        return y


def reference_step(p: dict[str, Array], x: Array, target: Any) -> tuple[np.float32, dict[str, Array]]:
    h = conv2d(x, p["conv.weight"], p["conv.bias"], 2, 1)
    norm = BatchNorm(h, p["norm.weight"], p["norm.bias"], 1e-5)
    a = np.maximum(norm.y, np.float32(0))
    flat = a.reshape(len(x), -1)
    z = linear(flat, p["fc.weight"], p["fc.bias"])
    on_flat, *on_fc = linear_backward(cross_entropy_backward(np.float32(1), z, target), flat, p["fc.weight"])
    on_norm = np.where(norm.y > 0, on_flat.reshape(a.shape), np.float32(0))
    on_h, *on_norms = norm.backward(on_norm)
    on_conv = conv2d_backward(on_h, x, p["conv.weight"], 2, 1)[1:]
    return cross_entropy(z, target), dict(zip(p, (*on_conv, *on_norms, *on_fc), strict=True))


def test_a_network_is_trained_with_the_bits_of_the_formulas() -> None:
    net, x, target = seeded(Net), drawn(3, 1, 4, 4), torch.tensor([0, 2, 1])
    compiled = fxround.compile(net, POLICY)
    optimizer = compile_optimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), "repdl")
    state = {name: p.detach().numpy().copy() for name, p in net.named_parameters()}
    buffers: dict[str, Array | None] = dict.fromkeys(state)
    for _ in range(3):
        optimizer.zero_grad()
        loss = compiled(x, target)
        loss.backward()
        optimizer.step()
        expected, gradients = reference_step(state, x.numpy(), target.numpy())
        same(loss, expected)
        for name, p in net.named_parameters():
            same(p.grad, gradients[name])
            state[name], buffers[name] = sgd(state[name], gradients[name], buffers[name], 0.1, 0.9)
            same(p, state[name])


def test_adam_is_repdls() -> None:
    p = nn.Parameter(drawn(40))
    optimizer = compile_optimizer(torch.optim.Adam([p], lr=0.01), "repdl")
    value = p.detach().numpy().copy()
    m = v = np.zeros_like(value)
    for step in (1, 2, 3):
        p.grad = drawn(40, seed=step)
        optimizer.step()
        value, m, v = adam(value, p.grad.numpy(), m, v, step, 0.01, 0.9, 0.999, 1e-8)
        same(p, value)
