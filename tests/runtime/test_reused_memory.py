"""Large graphs that round nothing write over dead memory, with the bits and layouts of the operators one by one."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxround
from fxround.runtime import buffers
from fxround.runtime.call_programs import CallPlan, PythonCall
from fxround.runtime.schedule.straight import Straight


def _equal(found: Any, expected: Any) -> bool:
    """Whether all tensors have the same bits and strides."""
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
    return all(a.stride() == b.stride() and fxround.hash(a) == fxround.hash(b) for a, b in pairs)


def _plan(compiled: Any) -> CallPlan:
    """The plan of the latest graph, which overwrites results."""
    straight: Straight = compiled._called()._straight
    plans = [known.plan for known in straight._plans.values() if known and isinstance(known.plan, CallPlan)]
    assert plans and plans[-1].overwrites
    return plans[-1]


def _functions(compiled: Any) -> list[Any]:
    return [step.function for step in _plan(compiled).steps if isinstance(step, PythonCall)]


def _expected(compiled: Any, *leaves: Any) -> Any:
    """What the operators of the graph return, called one by one."""
    entry = compiled._called()
    return entry._result(entry.lowered(*entry.entering(leaves), compiled.rng))


@torch.no_grad()
def _check(model: Any, *inputs: Tensor) -> Any:
    """Compare calls with the operators; no released memory is read, and no input changes."""
    compiled = fxround.compile(model, "identity")
    given = [x.clone() for x in inputs]
    expected = None
    for call in range(4):
        with buffers.guarded() if call == 2 else torch.no_grad():
            found = compiled(*inputs)
        expected = _expected(compiled, *inputs) if expected is None else expected
        assert _equal(found, expected), call
    assert all(fxround.hash(a) == fxround.hash(b) for a, b in zip(given, inputs, strict=True))
    others = [x.flip(0) for x in inputs]
    assert _equal(compiled(*others), _expected(compiled, *others))
    return compiled


def _encoder(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, dtype=dtype)
    return nn.TransformerEncoder(layer, 2).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_transformer(dtype: torch.dtype) -> None:
    compiled = _check(_encoder(dtype), torch.randn(8, 128, 64, dtype=dtype))
    functions = _functions(compiled)
    assert {Tensor.add_, Tensor.relu_, Tensor.div_, torch.mm, torch.bmm, torch.exp, buffers.release} <= {*functions}
    assert torch.ops.aten.full_like.default not in functions
    assert functions.count(buffers.release) <= functions.count(buffers.empty)


def test_rows_without_a_key() -> None:
    """A ``where`` that selects nothing in most calls selects something in others."""
    q, k, v = (torch.randn(2, 4, 64, 32) for _ in range(3))
    mask = torch.ones(64, 64, dtype=torch.bool)
    compiled = _check(lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask) * 2, q, k, v, mask)
    mask[3] = False
    with torch.no_grad():
        assert _equal(compiled(q, k, v, mask), _expected(compiled, q, k, v, mask))
        assert (compiled(q, k, v, mask)[:, :, 3] == 0).all()


def test_selections_of_constants() -> None:
    """A constant may be what is chosen, what is chosen from, or the condition."""

    def model(x: Tensor) -> Any:
        one, two, always = torch.full_like(x, 1.0), torch.full_like(x, 2.0), torch.ones_like(x, dtype=torch.bool)
        return torch.where(x > 0, one, two).exp(), torch.where(always, one, x * 3) + 1

    _check(model, torch.randn(520, 520))


def _convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU()).eval()


def test_convolutions() -> None:
    _check(_convolutions(), torch.randn(4, 3, 40, 40))


def _shared(x: Tensor) -> Any:
    """Results that are returned, seen through views, read twice, or read after they could be overwritten."""
    a = x * 2
    b = a + 1
    c = b.t()
    d = (b * b).relu()
    e = d.reshape(-1)[5:]
    f = (x - 1) * (x - 1)
    g = f.sub(f.t()) if f.shape[0] == f.shape[1] else f
    h = (x + 3).reshape(-1)
    i = (h * 2).reshape(x.shape) + h.reshape(x.shape)
    return a, c, e * 2, e, g.neg(), i.sum(1), x.t() + 1


def _selected(x: Tensor) -> Any:
    zero = torch.zeros_like(x)
    y = x * 2
    z = torch.where(y > 0, zero, y)  # y is read by the condition as well
    w = torch.where(x > 9, torch.full_like(x, float("nan")), z * 3)
    return w - 1, torch.where(x > 0, zero, x), torch.where(x[:, :1] > 9, zero, x + 1), zero


@pytest.mark.parametrize("model", [_shared, _selected])
def test_what_is_read_later_stays(model: Callable[[Tensor], Any]) -> None:
    x = torch.randn(600, 600)
    x[0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    _check(model, x)
    _check(model, x.t())
    _check(model, torch.randn(1300, 500)[::2, 1:])


_UNARY: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x * 1.5,
    lambda x: -x,
    lambda x: x.relu(),
    lambda x: x.exp(),
    lambda x: x.tanh(),
    lambda x: x.sigmoid(),
    lambda x: x.t(),
    lambda x: x.reshape(x.shape[1], x.shape[0]),
    lambda x: x.contiguous(),
    lambda x: x.t().contiguous(),
    lambda x: x.amax(1, keepdim=True).expand(x.shape),
    lambda x: x - x.sum(0, keepdim=True) / 7,
    lambda x: torch.where(x > 2, torch.zeros_like(x), x),
    lambda x: torch.where(x > 0, torch.full_like(x, 1.0), torch.full_like(x, 2.0)).exp(),
    lambda x: torch.where(torch.ones_like(x, dtype=torch.bool), torch.full_like(x, 3.0), x * 2) + 1,
    lambda x: torch.where(x > 0, torch.zeros_like(x), torch.where(x > 9, torch.full_like(x, 2.0), x * 3)) * x,
    lambda x: torch.where(x[:1] > 2, torch.full_like(x, 3.0), x / 3),
    lambda x: torch.cat(x.chunk(2)[::-1]),
    lambda x: x.clone()[:, torch.arange(x.shape[1])],
)
_BINARY: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda x, y: x + y,
    lambda x, y: x - y,
    lambda x, y: x * y,
    lambda x, y: x / (y * y + 1),
    lambda x, y: x @ y / 520,
    lambda x, y: x + y[:1],
    lambda x, y: torch.add(x, y, alpha=0.3),
    lambda x, y: torch.where(y > 0, x, y),
)


def _program(seed: int) -> Callable[[Tensor, Tensor], Any]:
    """A program of operators chosen at random, which returns some of its values."""
    chosen = random.Random(seed)
    steps: list[tuple[Any, list[int]]] = []
    for i in range(2, 16):
        functions = chosen.choice((_UNARY, _BINARY))
        operands = [chosen.randrange(max(0, i - 4), i) for _ in range(1 if functions is _UNARY else 2)]
        steps.append((chosen.choice(functions), operands))
    returned = [15, *chosen.sample(range(2, 15), chosen.randrange(3))]

    def program(x: Tensor, y: Tensor) -> Any:
        values = [x, y]
        for function, operands in steps:
            values.append(function(*[values[i] for i in operands]))
        return [values[i] for i in returned]

    return program


@pytest.mark.parametrize("seed", range(12))
def test_programs(seed: int) -> None:
    torch.manual_seed(seed)
    x, y = torch.randn(520, 520), torch.randn(520, 520)
    _check(_program(seed), x, y.t() if seed % 2 else y)


def test_training_has_the_gradients_of_the_operators() -> None:
    model, x = _encoder(torch.float32).train(), torch.randn(8, 128, 64)
    found = []
    for calls in (1, 4):
        compiled = fxround.compile(model, "identity")
        for _ in range(calls):
            model.zero_grad()
            loss = compiled(x).square().sum()
            loss.backward()
        found.append([loss, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert _equal(*found)


class _Kept(TorchDispatchMode):
    """Keeps every result, and what it was."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        self.kept += [(t, t.clone()) for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        return result


@torch.no_grad()
def test_a_mode_keeps_results_that_nothing_overwrites() -> None:
    model, x = _encoder(torch.float32), torch.randn(8, 128, 64)
    compiled = fxround.compile(model, "identity")
    for _ in range(3):
        expected = compiled(x)
    with _Kept() as mode:
        assert _equal(compiled(x), expected)
    assert len(mode.kept) > 50 and all(torch.equal(*pair) for pair in mode.kept)


def test_autocast_has_no_plan() -> None:
    """Autocast does not see an operator with ``out``."""
    model, x = _encoder(torch.float32), torch.randn(8, 128, 64)
    compiled = fxround.compile(model, "identity")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = compiled(x)
        assert all(_equal(compiled(x), expected) for _ in range(3))
    straight: Straight = compiled._called()._straight
    assert not any(isinstance(known.plan, CallPlan) for known in straight._plans.values() if known)


def test_a_plan_is_used_in_inference_mode_and_outside() -> None:
    model, x = _encoder(torch.float32), torch.randn(8, 128, 64)
    compiled = fxround.compile(model, "identity")
    with torch.inference_mode():
        found = [compiled(x).clone() for _ in range(3)]
    with torch.no_grad():
        found += [compiled(x).clone() for _ in range(3)]
        expected = _expected(compiled, x)
    assert all(_equal(each, expected) for each in found)


@torch.no_grad()
def test_memory_is_used_again() -> None:
    """After a few calls no buffer is new."""
    model, x = _encoder(torch.float32), torch.randn(8, 128, 64)
    compiled = fxround.compile(model, "identity")
    buffers.forget()
    kept = []
    for _ in range(5):
        compiled(x)
        kept.append(buffers.kept())
    assert kept[-1] == kept[-2] > 0
    buffers.forget()


@torch.no_grad()
def test_layouts_that_data_decide_have_no_plan() -> None:
    compiled = fxround.compile(lambda x: (x * 2).masked_select(x > 0) + 1, "identity")
    x = torch.randn(600, 600)
    for _ in range(3):
        found = compiled(x)
    assert _equal(found, _expected(compiled, x))
    straight: Straight = compiled._called()._straight
    assert not any(isinstance(known.plan, CallPlan) for known in straight._plans.values() if known)
