"""Kernels that run in one call of machine code have the bits of the same operations, called one by one."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxround
from fxround.policy import Policy, Rule
from fxround.runtime import buffers
from fxround.runtime.call_programs import _BINDINGS, CallPlan, Run, number_of
from fxround.runtime.cpu.launches import LaunchTable
from fxround.runtime.cpu.llvm.engine import instruction_sets
from fxround.runtime.cpu.plans.straight import program
from fxround.runtime.schedule.loops import ScanPart
from fxround.runtime.schedule.straight import SOURCE, Straight
from fxround.runtime.torch_ops import KERNELS


class Views(nn.Module):
    """Results that are views of inputs and of results of kernels, and one that is returned twice."""

    def forward(self, x: Tensor) -> Any:
        y = x * 3
        first, second = (y + 1).split(2)
        return y.t(), first[:, ::2], second.reshape(-1), y, torch.cat([y, x], 1), x.t()


def _copies(x: Tensor) -> Any:
    """Results that are copies, because no view has their shapes, returned and read by Python."""
    y = (x * 2).t().reshape(3, 8)
    return (x + 1).t().reshape(3, 8), y.sort(1)[0], y.reshape(2, 12), (y + 1).reshape(24), (x * 3).reshape(6, 4)


class Attention(nn.Module):
    """A layer with a softmax, norms and products of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.heads, self.out = nn.LayerNorm(12), nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.reshape(2, 5, 3, 4).transpose(1, 2) for part in self.heads(self.norm(x)).chunk(3, -1))
        weights = torch.softmax(q @ k.transpose(-1, -2) / 2, -1)
        return x + self.out((weights @ v).transpose(1, 2).reshape(2, 5, 12))


def _layers(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers).eval()


def _reductions(x: Tensor) -> Any:
    return x.sum(), x.sum(0), (x - x.amax(1, keepdim=True)).exp().sum(1), x.mean((0, 1), keepdim=True), x.prod(1)


_MODELS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "linear": (lambda: _layers(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 33), nn.GELU(), nn.Linear(33, 1)), (3, 6)),
    "convolution": (
        lambda: _layers(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 7, 1)),
        (2, 3, 8, 8),
    ),
    "padded": (lambda: _layers(nn.Conv2d(3, 8, 3, padding=1), nn.MaxPool2d(2), nn.Flatten()), (2, 3, 8, 8)),
    "planes": (lambda: _layers(nn.Conv2d(4, 4, 3, groups=4, padding=1), nn.Sigmoid()), (2, 4, 7, 9)),
    "transposed": (lambda: _layers(nn.ConvTranspose2d(3, 5, 3, stride=2), nn.ReLU()), (2, 3, 4, 4)),
    "attention": (Attention, (2, 5, 12)),
    "views": (Views, (4, 6)),
    "copies": (lambda: _copies, (4, 6)),
    "reductions": (lambda: _reductions, (5, 40)),
    "empty": (lambda: lambda x: (x[:0] * 2, x[:0].sum(0) + x[0]), (4, 6)),
}
_POLICIES = {
    "identity": "identity",
    "reproducible": "reproducible",
    "stochastic": "stochastic",
    "up_down": "up_down",
    "bfloat16": "bfloat16",
    "toward_zero": Policy("toward_zero", (Rule(rounding="binary32/toward_zero/inf"),)),
}


def _made(name: str) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    build, shape = _MODELS[name]
    return build(), torch.randn(shape)


def _straight(compiled: Any) -> Straight:
    found: Straight = compiled._called()._straight
    return found


def _programs(straight: Straight) -> list[CallPlan]:
    return [known.plan for known in straight._plans.values() if known and isinstance(known.plan, CallPlan)]


def _equal(found: Any, expected: Any) -> bool:
    """Whether all tensors have the same bits and strides."""
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
    return all(a.stride() == b.stride() and torch.equal(*map(_bytes, (a, b))) for a, b in pairs)


def _bytes(t: Tensor) -> Tensor:
    return t.resolve_neg().reshape(-1).contiguous().view(torch.uint8)


@pytest.mark.part(6)
@torch.no_grad()
@pytest.mark.parametrize(
    "name, policy",
    [
        *((name, policy) for name in _MODELS for policy in ("stochastic", "identity")),
        *(("linear", policy) for policy in ("reproducible", "up_down", "bfloat16", "toward_zero")),
        *(("attention", policy) for policy in ("reproducible", "bfloat16")),
        *(("convolution", policy) for policy in ("up_down", "toward_zero")),
    ],
)
def test_a_planned_call_has_the_bits_of_the_operations(name: str, policy: str) -> None:
    model, x = _made(name)
    compiled = fxround.compile(model, _POLICIES[policy], seed=7)
    first = compiled(x)
    compiled(x)
    assert len(_programs(_straight(compiled))) == 1
    with buffers.guarded():
        assert _equal(compiled(x), first)
    # A plan holds neither the numbers of its inputs nor the seed.
    compiled.reseed(8, 3)
    other = torch.randn_like(x)
    with buffers.guarded():
        found = compiled(other)
    (shown,) = [value for name, value in compiled.observe(other) if name == "output"]
    assert _equal(found, compiled._called()._result(compiled._called().running(*_inputs(compiled, other))))
    assert all(torch.equal(a, b) for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(shown), strict=True))


def _inputs(compiled: Any, x: Tensor) -> list[Any]:
    return [*compiled._called()._inputs([x]), compiled.rng]


@torch.no_grad()
def test_arguments_that_were_one_tensor_may_be_two() -> None:
    """A plan made for equal arguments reads both of them."""
    x, y = torch.rand(4, 4), torch.rand(4, 4)

    def model(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b) * 2

    compiled = fxround.compile(model, "reproducible")
    for _ in range(3):
        compiled(x, x)
    assert torch.equal(compiled(x, y), fxround.compile(model, "reproducible")(x, y))


@torch.no_grad()
def test_consecutive_kernels_are_one_call() -> None:
    for name, steps in (("linear", 1), ("convolution", 1), ("attention", 1)):
        model, x = _made(name)
        compiled = fxround.compile(model, "stochastic")
        for _ in range(2):
            compiled(x)
        (program,) = _programs(_straight(compiled))
        assert [type(step) for step in program.steps] == [Run] * steps, name


class _Calls(TorchDispatchMode):
    """Keeps the operators that are called, and their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **kwargs or {})


def test_a_function_of_torch_makes_the_call_of_the_operator_that_it_stands_for() -> None:
    x, y = torch.rand(2, 4, 4), torch.rand(2, 4, 4)
    given = {
        "amax": [(x, [-1], True), (x,)],
        "amin": [(x, [-1], True), (x,)],
        "bmm": [(x, y)],
        "mm": [(x[0], y[0])],
        "clone": [(x,)],
        "convolution": [(x, y[..., :2], None, [1], [0], [1], False, [0], 1)],
        "embedding": [(x[0], torch.tensor([1, 0])), (x[0], torch.tensor([1]), 0, False, True)],
        "sum": [(x, [-1], True), (x, [0, 1])],
        "where": [(x > y, x, y)],
    }
    for operator, function in _BINDINGS.items():
        name = operator._schema.name.partition("::")[2]
        pairs = [(x, y), (x, 2), (x, 0.1), (x, y[0, 0])] if operator._overloadname == "Tensor" else [(x,)]
        for args in given.get(name, pairs):
            found = []
            for call in (operator, function):
                with _Calls() as seen:
                    call(*args)
                found.append(seen.calls)
            assert len(found[0]) == 1 and repr(found[0]) == repr(found[1]), operator


@torch.no_grad()
def test_a_number_is_a_tensor_with_which_a_call_has_the_same_bits() -> None:
    numbers = (16, -3, 0.1, -0.0, 1e-45, 1e300, float("inf"), float("nan"), (1 << 24) + 1, (1 << 53) + 1, (1 << 62) + 1)
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(40, 3, dtype=dtype)
        x[0] = torch.tensor([float("nan"), float("inf"), -0.0])
        values = (x, x.t(), x[::2], x[:1].expand(7, 3), x[3, 0])
        for name, number, value in itertools.product(("add", "div", "mul", "sub"), numbers, values):
            call = getattr(torch.ops.aten, name).Tensor
            made = number_of(call, (value, number), {})
            assert made is not None and _equal(call(value, made), call(value, number)), (name, number)
    add = torch.ops.aten.add.Tensor
    for value, number in ((x.half(), 2), (x.bfloat16(), 0.1), (x.int(), 2), (x, True), (x, 1 << 70), (x, x), (2, x)):
        assert number_of(add, (value, number), {}) is None
    assert (
        number_of(add, (x, 2), {"alpha": 2}) is None and number_of(torch.ops.aten.pow.Tensor_Scalar, (x, 2), {}) is None
    )


class _Other(Tensor):
    """A class of tensors of its own."""


@torch.no_grad()
def test_a_graph_that_rounds_nothing_is_planned_for_plain_tensors() -> None:
    def model(x: Tensor) -> Any:
        same = x.expand(4, 6)
        y = (same * 2).reshape(4, 6)
        kept = y.masked_select(y > 0)
        return same, y, y.sum(), kept * 2, x.t() + 1

    x = torch.randn(4, 6)
    compiled = fxround.compile(model, "identity")
    for value in (x, x, x, -x, x.abs(), -x.abs(), torch._neg_view(x), x):
        found = compiled(value)
        assert _equal(found, compiled._called()._result(compiled._called().running(*_inputs(compiled, value))))
        assert found[0] is not value and found[0].is_neg() == value.is_neg()
    (program,) = _programs(_straight(compiled))
    assert not any(isinstance(step, Run) for step in program.steps)
    other = torch.randn(4, 6).as_subclass(_Other)
    for _ in range(3):
        assert _equal(_straight(compiled)(other, compiled.rng), compiled._called().running(other, compiled.rng))


@torch.no_grad()
def test_a_transform_does_not_use_a_plan() -> None:
    compiled = fxround.compile(lambda x: x.t() * 2, "identity")
    x = torch.randn(4, 6)
    for _ in range(2):
        compiled(x)
    assert _programs(_straight(compiled))
    several = torch.randn(3, 4, 6).transpose(0, 1).contiguous().transpose(0, 1)
    with mock.patch.object(CallPlan, "run", side_effect=AssertionError):
        (found,) = torch.func.vmap(lambda x: _straight(compiled)(x, compiled.rng))(several)
    assert torch.equal(found, torch.stack([x.t() * 2 for x in several]))


@torch.no_grad()
def test_results_stay_when_the_model_is_called_again() -> None:
    model, x = _made("views")
    compiled = fxround.compile(model, "reproducible")
    for _ in range(2):
        compiled(x)
    before = compiled(x)
    kept = [t.clone() for t in before]
    compiled(x + 1)
    assert all(torch.equal(a, b) for a, b in zip(before, kept, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("accumulate", ["binary32/toward_zero/inf", "bfloat16"])
def test_products_whose_quick_results_do_not_count_are_done_again(accumulate: str) -> None:
    policy = Policy("mine", (Rule(rounding="binary32", accumulate=accumulate),))
    model, x = _made("linear")
    compiled = fxround.compile(model, policy)
    for _ in range(2):
        compiled(x)
    with mock.patch.object(LaunchTable, "_again", autospec=True, side_effect=LaunchTable._again) as again:
        for scale in (1e-38, 1e38, float("inf"), float("nan"), 1e-45, 1.0):
            # Subnormal numbers and infinities, first in one row, then in all.
            for other in (torch.cat([x[:1] * scale, x[1:]]), x * scale):
                assert _equal(compiled(other), compiled._called().running(*_inputs(compiled, other))[0]), scale
    assert again.call_count > 5


@torch.no_grad()
def test_a_plan_is_for_one_layout_one_instruction_set_and_one_number_of_threads() -> None:
    model, x = _made("attention")
    compiled = fxround.compile(model, "stochastic", seed=2)
    expected = compiled(x)
    strided = torch.empty(2, 12, 5).transpose(1, 2).copy_(x)
    for given in (x, strided, x):
        for _ in range(3):
            assert torch.equal(compiled(given), expected)
    assert len(_programs(_straight(compiled))) == 2
    for isa in instruction_sets():
        with fxround.instruction_set(isa):
            for _ in range(3):
                assert torch.equal(compiled(x), expected)
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            for _ in range(3):
                assert torch.equal(compiled(x), expected)
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def test_parameters_may_be_replaced() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.rand(2, 4)
    compiled = fxround.compile(model, "reproducible")
    for _ in range(2):
        compiled(x)
    model[0].weight.data = torch.rand(8, 4)[::2]
    model[0].bias = nn.Parameter(torch.rand(4))
    for _ in range(3):
        assert torch.equal(compiled(x), compiled._called().running(*_inputs(compiled, x))[0])
    model[0].weight.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="its storage was freed"):
        compiled(x)


def test_threads_share_a_plan() -> None:
    model, x = _made("attention")
    compiled = fxround.compile(model, "stochastic")
    given = [torch.randn_like(x) for _ in range(4)]
    with torch.no_grad():
        expected = [compiled(x) for x in given]
    wrong: list[int] = []

    def calls(number: int) -> None:
        with torch.no_grad():
            wrong.extend(number for _ in range(50) if not torch.equal(compiled(given[number]), expected[number]))

    threads = [threading.Thread(target=calls, args=(number,)) for number in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("name", ["padded", "attention"])
def test_training_steps_are_planned(name: str) -> None:
    def steps(planned: bool) -> list[Tensor]:
        model, x = _made(name)
        compiled = fxround.compile(model.train(), "stochastic", seed=1)
        found: list[Tensor] = []
        with mock.patch.object(Straight, "_plan", Straight._plan if planned else lambda self, inputs: None):
            for _ in range(4):
                result = compiled(x)
                result.square().sum().backward()
                found += [result.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.01 * p.grad
        step = compiled._called().step
        assert planned == bool(_programs(step.forwards) and _programs(step.backwards))
        return found

    assert _equal(steps(planned=True), steps(planned=False))


def _numbered(x: Tensor) -> int:
    return int(x.sum())


def test_a_call_without_its_assumptions_starts_again() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    number = graph.call_function(_numbered, (x,))
    filled = graph.call_function(torch.full, ((2,), number))
    y = graph.call_function(torch.ops.fxround.pointwise.default, ([x], "t0 = add(x0, x0) @ binary32/nearest_even/inf"))
    y.args = (*y.args, torch.float32, graph.placeholder("rng"), 0)
    graph.output((y, filled))
    whole = fx.GraphModule({}, graph)
    rng = torch.zeros(2, dtype=torch.int64)
    computed = program(whole, (torch.ones(2), rng), KERNELS)
    assert computed is not None and computed.plan is not None
    assert computed.plan.run((torch.ones(2), rng)) is not None
    assert computed.plan.run((torch.full((2,), 4.0), rng)) is None
    whole.meta[SOURCE] = whole
    straight = Straight(whole)
    for value in (1.0, 1.0, 4.0):
        doubled, filled_with = straight(torch.full((2,), value), rng)
        assert torch.equal(doubled, torch.full((2,), 2 * value)) and filled_with.tolist() == [2 * value] * 2


def test_large_values_are_not_planned() -> None:
    compiled = fxround.compile(lambda x: (F.relu(x * 2) + 1).sum(), "reproducible")
    for size in (1 << 19, 1 << 18):
        x = torch.rand(size)
        assert len({float(compiled(x)) for _ in range(3)}) == 1
    assert not _programs(_straight(compiled))


def test_a_call_that_plans_computes_once() -> None:
    def step(x: Tensor) -> Tensor:
        return (x.sort().values + x) * 0.5

    with mock.patch.object(ScanPart, "forward", autospec=True, side_effect=ScanPart.forward) as scans:
        results, counts, state = [], [], torch.rand(5)
        for _ in range(3):
            results.append(fxround.iterate(step, state, 4, "bfloat16"))
            counts.append(scans.call_count)
    assert counts == [1, 2, 3]
    assert len({fxround.hash(x) for x in results}) == 1


def test_a_call_that_plans_returns_results_that_share_memory_as_in_other_calls() -> None:
    compiled, x = fxround.compile(Views(), "reproducible"), torch.rand(4, 6)

    def sharing(results: list[Tensor]) -> list[tuple[bool, bool]]:
        pairs = [(a, b) for a in (x, *results) for b in (x, *results)]
        return [(a is b, a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()) for a, b in pairs]

    first, *others = [list(compiled(x)) for _ in range(3)]
    assert _programs(_straight(compiled))
    for found in others:
        assert sharing(found) == sharing(first) and _equal(found, first)
        assert [y.stride() for y in found] == [y.stride() for y in first]


def test_zeros_without_memory_are_refused_by_their_name() -> None:
    compiled = fxround.compile(torch.nn.Linear(3, 3), "bfloat16")
    zeros = torch._efficientzerotensor((2, 3))
    x = torch.ones(2, 3, requires_grad=True)
    for call in (lambda: compiled(zeros), lambda: torch.autograd.grad(compiled(x), x, zeros)):
        with pytest.raises(ValueError, match=r"\(2, 3\) is zeros without memory.*torch\.zeros\(x\.shape"):
            call()
