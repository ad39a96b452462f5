"""Scans in machine code have the bits of the body run by Python, step by step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._higher_order_ops import scan
from torch._higher_order_ops.map import map as over_rows

import fxround
from fxround.runtime import buffers
from fxround.runtime.cpu.plans import machine_loops
from fxround.runtime.schedule import loops


@contextlib.contextmanager
def _watched() -> Iterator[list[bool]]:
    """Yield a list to which each scan of the block appends whether it ran in machine code."""
    ran: list[bool] = []

    def watched(*args: Any) -> Any:
        found = scanned(*args)
        ran.append(found is not None)
        return found

    scanned = loops.scanned
    with mock.patch.object(loops, "scanned", watched):
        yield ran


def _swapped(a: Tensor, b: Tensor, us: Tensor) -> Any:
    return scan(lambda s, u: ((s[1].clone(), s[0] * u), s[0] + u), (a, b), us)


def _stacked(a: Tensor, b: Tensor, us: Tensor) -> Any:
    def step(s: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        x, y, z = s.unbind(0)
        return torch.stack([y - x, x * z + u[0], y / 3]), torch.cat([s, u])

    return scan(step, a[:3], us)


def _products(a: Tensor, b: Tensor, us: Tensor) -> Any:
    w = torch.outer(a, b)

    def step(s: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        square = u.reshape(1, -1) @ w
        return s * 0.5 + square[0], square.t().reshape(-1) + (w @ s[:, None])[:, 0]

    return scan(step, a, us)


def _passed(a: Tensor, b: Tensor, us: Tensor) -> Any:
    return scan(lambda s, u: ((s[0].clone(), s[1] - u), (u.flip(0)[:0].sum() + u).t()), (a, b), us)


def _rows(a: Tensor, b: Tensor, us: Tensor) -> Any:
    return scan(lambda s, u: (s + u[:, 1::2].t().reshape(-1), u.square()), a[:4], us.reshape(-1, 2, 4))


def _rolled(a: Tensor, b: Tensor, us: Tensor) -> Any:
    def step(s: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        moved = s.roll(1, 0) * s.roll((-2, 5), (0, 1)) + s.roll(3)
        return moved / 4 + u[0], moved.roll((2, 0), (0, -1))

    return scan(step, torch.outer(a, b), us)


def _padded(a: Tensor, b: Tensor, us: Tensor) -> Any:
    def step(s: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        around = nn.functional.pad(s[None], (1, 2, 1, 0), mode="circular")[0]
        edge = nn.functional.pad(s, (2, 0, 0, 1), value=3.0)
        return around[1:, 3:] * u[0] + edge[1:, 2:] / 4, around + u[1]

    return scan(step, torch.outer(a, b), us)


def _replaced(a: Tensor, b: Tensor, us: Tensor) -> Any:
    def step(s: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        following, old = torch.empty_like(s), s + torch.zeros_like(s)
        following[:] = s * u[0]
        following[1:-1, 1:-1] = s[2:, 1:-1] - s[:-2, 1:-1]
        following[0], following[:, -1] = following[-1], u[0]
        following[2:] = following[:-2].clone()
        following[3] = 2.0
        return following, old + following

    return scan(step, torch.outer(a, b), us)


def _signs(a: Tensor, b: Tensor, us: Tensor) -> Any:
    return scan(lambda s, u: (-s + (s * u).abs(), -u[:3].abs()), a, us)


_MODELS: dict[str, tuple[Callable[..., Any], bool]] = {
    "parts of a state that change places": (_swapped, True),
    "stack and cat": (_stacked, True),
    "products with rows": (_products, True),
    "views of rows": (_rows, True),
    "a grid that is rolled": (_rolled, True),
    "a grid with a boundary": (_padded, True),
    "a grid of which parts are replaced": (_replaced, True),
    "signs": (_signs, True),
    "a flip, which Python runs": (_passed, False),
}


@pytest.mark.part(9)
@pytest.mark.parametrize("policy", ["reproducible", "stochastic", "bfloat16/stochastic/saturate", "identity"])
@pytest.mark.parametrize("name", _MODELS)
def test_machine_code_and_python_agree(name: str, policy: str) -> None:
    model, planned = _MODELS[name]
    torch.manual_seed(0)
    # Rows of every second column: their strides are those of a larger tensor.
    given = torch.rand(8), torch.rand(8), torch.rand(30, 16)[:, ::2]
    compiled = fxround.compile(model, policy, seed=3)
    with _watched() as ran, buffers.guarded():
        found = pytree.tree_leaves(compiled(*given))
    with mock.patch.object(loops, "scanned", return_value=None):
        expected = pytree.tree_leaves(compiled(*given))
    # PyTorch's own products are not those of a kernel.
    assert ran == [planned and not (policy == "identity" and model is _products)]
    assert len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    shown = pytree.tree_leaves(list(compiled.observe(*given))[-1][1])
    assert all(torch.equal(a, b) for a, b in zip(found, shown, strict=True))


@pytest.mark.part(2)
@pytest.mark.parametrize(
    "layer",
    [nn.LSTM(5, 6, 2), nn.GRU(5, 6), nn.RNN(5, 6), nn.GRU(5, 6, batch_first=True, bidirectional=True)],
    ids=["LSTM", "GRU", "RNN", "batch first"],
)
def test_recurrent_layers_run_in_machine_code(layer: nn.Module) -> None:
    compiled, x = fxround.compile(layer, "stochastic"), torch.rand(9, 3, 5)
    with _watched() as ran:
        found = compiled.evaluate(x)
    names = [name for name, _ in compiled._called().running.named_children()]
    assert len(ran) == sum(name.startswith("loop") for name in names) and all(ran)
    with mock.patch.object(loops, "scanned", return_value=None):
        expected = compiled.evaluate(x)
    assert torch.equal(found[0], expected[0])


class _Normed(nn.Module):
    """A cell with sums in each step, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)

    def forward(self, us: Tensor) -> Any:
        def step(s: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
            weights = (self.norm(s) + u).softmax(-1)
            return weights * u, s * weights

        return scan(step, us[0] + 1, us)


@pytest.mark.part("LSTM")
@pytest.mark.parametrize(
    "layer, policy",
    [(nn.LSTM(5, 6), "stochastic"), (nn.GRU(5, 6), "reproducible"), (_Normed(), "bfloat16")],
    ids=["LSTM", "GRU", "norm"],
)
def test_backward_loops_run_in_machine_code(layer: nn.Module, policy: str) -> None:
    compiled, x = fxround.compile(layer, policy), torch.rand(9, 3, 5)

    def gradients() -> list[Tensor]:
        compiled.reseed(4, 2)
        leaf = x.clone().requires_grad_()
        results = pytree.tree_leaves(compiled(leaf))
        weights = [torch.linspace(0, 1, r.numel()).reshape(r.shape) for r in results]
        loss = sum((r * w).sum() for r, w in zip(results, weights, strict=True))
        return [*results, *torch.autograd.grad(loss, [leaf, *compiled.parameters()])]

    with _watched() as ran:
        found = gradients()
    with mock.patch.object(loops, "scanned", return_value=None):
        expected = gradients()
    assert ran == [True, True]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def _arithmetic(state: Tensor) -> Tensor:
    x, y, z = state.unbind(-1)
    slope = torch.stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z], -1)
    return state + 0.01 * slope / (1 + torch.stack([x, x, x], -1) * 1e-3)


@pytest.mark.part(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3,), (20, 3)], ids=str)
def test_loops_of_arithmetic_that_stays_stock_run_in_machine_code(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The bits are those of PyTorch's own operations, one after the other: each is rounded once, to nearest."""
    integers = torch.int32 if dtype == torch.float32 else torch.int64
    members = torch.arange(math.prod(shape) // 3, dtype=dtype).reshape(*shape[:-1], 1)
    begun = torch.linspace(-1, 2, 3, dtype=dtype) + members
    # The second state grows until infinities meet, and ends as NaNs with the processor's sign.
    for state, planned in ((begun, True), (begun * torch.finfo(dtype).max ** 0.8, False)):
        expected = state
        for _ in range(50):
            expected = _arithmetic(expected)
        with _watched() as ran:
            found = fxround.iterate(_arithmetic, state, 50, "identity")
        assert set(ran) == {planned}  # planned when the layout comes for the second time, and then run
        assert bool(expected.isnan().any()) == (not planned)
        assert torch.equal(found.view(integers), expected.view(integers))


@torch.no_grad()
def test_a_plan_serves_calls_of_other_tensors_lengths_and_samples() -> None:
    """One plan is made for a layout, and holds neither numbers nor addresses nor the random state of a call."""

    def model(a: Tensor, w: Tensor, v: Tensor, us: Tensor) -> Any:
        return scan(lambda s, u: (s @ w[:, :4] * 0.3 + u, (s @ v[:, ::2].t()) * u), a, us)

    compiled = fxround.compile(model, "stochastic", seed=1)
    w, us = torch.rand(4, 8), torch.rand(9, 2, 4)
    with mock.patch.object(machine_loops, "ScanPlanner", wraps=machine_loops.ScanPlanner) as planner:
        # The last call passes one tensor twice.
        for sample, steps, v in ((0, 9, w + 1), (0, 9, w + 2), (5, 3, w[0] + w), (2, 9, w)):
            compiled.reseed(sample + 7, sample)
            given = torch.rand(2, 4), w, v, us[:steps].clone()
            found = compiled(*given)
            with mock.patch.object(loops, "scanned", return_value=None):
                expected = compiled(*given)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert planner.call_count == 1


@torch.no_grad()
def test_values_without_elements_are_no_memory_of_an_operand() -> None:
    def model(xs: Tensor, w: Tensor) -> Any:
        return over_rows(lambda x, w: torch.cat([(x[:0] + 1).exp(), x * w]), xs, w)

    given = torch.rand(5, 4), torch.rand(4)
    compiled = fxround.compile(model, "reproducible")
    with _watched() as ran:
        assert torch.equal(compiled(*given), given[0] * given[1])
    assert ran == [True]


@torch.no_grad()
def test_calls_at_the_same_time_share_a_plan() -> None:
    compiled = fxround.compile(lambda a, us: scan(lambda s, u: (s * u, s + u), a, us), "reproducible")
    given = [(torch.rand(8), torch.rand(20_000, 8)) for _ in range(3)]
    expected = [compiled(*args) for args in given]
    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            found = list(pool.map(lambda args: compiled(*args), given))
            for one, other in zip(found, expected, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_large_bodies_leave_the_threads_to_their_kernels() -> None:
    def model(a: Tensor, us: Tensor) -> Any:
        return scan(lambda s, u: (s * u, u + 1), a, us)

    compiled = fxround.compile(model, "reproducible")
    given = torch.rand(1 << 17), torch.rand(2, 1 << 17)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(compiled(*given))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_plans_that_inference_mode_made_serve_other_calls() -> None:
    model, x = nn.LSTM(3, 4), torch.randn(5, 2, 3)
    compiled, other = fxround.compile(model, "reproducible"), fxround.compile(model, "reproducible")
    with torch.inference_mode():
        inside = [compiled(x)[0].clone() for _ in range(3)]
    for found in (*inside, *(compiled(x)[0] for _ in range(3))):
        assert torch.equal(found, other(x)[0])
    compiled(x)[0].sum().backward()
