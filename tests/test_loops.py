"""Loops have the bits of their unrolled code, forward and backward, and random bits of their own for each iteration."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._higher_order_ops import cond, scan, while_loop
from torch._higher_order_ops import map as mapped

import fxround
from fxround.errors import CaptureError, UnsupportedOperator
from fxround.graph.dialect import loops_of, read_map
from fxround.kernels.maps import map_kernel
from fxround.kernels.program import Program
from fxround.runtime import buffers, reference


class Cell(nn.Module):
    """A recurrent cell over a sequence, as a scan or unrolled."""

    def __init__(self, unrolled: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.unrolled = unrolled

    def forward(self, state: Tensor, xs: Tensor) -> Any:
        def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            new = torch.tanh(self.linear(h) + x)
            return new, torch.softmax(new * 2, -1)

        if not self.unrolled:
            return scan(step, state, xs)
        results = []
        for x in xs.unbind(0):
            state, y = step(state, x)
            results.append(y)
        return state, torch.stack(results)


class Mapped(nn.Module):
    """A map, or unrolled."""

    def __init__(self, unrolled: bool) -> None:
        super().__init__()
        self.unrolled = unrolled

    def forward(self, xs: Tensor, y: Tensor) -> Any:
        def f(x: Tensor, y: Tensor) -> Tensor:
            return torch.softmax(x * y, -1)

        return torch.stack([f(x, y) for x in xs.unbind(0)]) if self.unrolled else mapped(f, xs, y)


class Chosen(nn.Module):
    """One of two functions."""

    def __init__(self, unrolled: bool, first: bool = True) -> None:
        super().__init__()
        self.unrolled, self.first = unrolled, first

    def forward(self, x: Tensor, w: Tensor) -> Any:
        def one(x: Tensor, w: Tensor) -> Tensor:
            return torch.softmax(x, -1) * w

        def other(x: Tensor, w: Tensor) -> Tensor:
            return torch.exp(x) * x

        if self.unrolled:
            return one(x, w) if self.first else other(x, w)
        return cond(x.sum() > 0, one, other, (x, w))


class Halving(nn.Module):
    """A while_loop."""

    def forward(self, x: Tensor) -> Any:
        def test(i: Tensor, x: Tensor) -> Tensor:
            return x.abs().max() > 0.01

        def step(i: Tensor, x: Tensor) -> Any:
            return i + 1, x * 0.3 - x * x * 0.25

        return while_loop(test, step, (torch.tensor(0), x))


def _same(found: Any, expected: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def _grad(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad


def _gradients(compiled: nn.Module, given: tuple[Tensor, ...]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in given]
    results = pytree.tree_leaves(compiled(*leaves))
    torch.manual_seed(1)
    sum((r * torch.rand_like(r)).sum() for r in results).backward()
    return [*results, *(_grad(x) for x in (*leaves, *compiled.parameters()))]


_CASES = {
    "scan": (Cell(False), Cell(True), (torch.rand(4, 3), torch.rand(5, 4, 3) - 0.5)),
    "map": (Mapped(False), Mapped(True), (torch.rand(5, 4, 3), torch.rand(3))),
    "cond, true": (Chosen(False), Chosen(True), (torch.rand(4, 3), torch.rand(3))),
    "cond, false": (Chosen(False), Chosen(True, False), (-torch.rand(4, 3), torch.rand(3))),
}


@pytest.mark.part(3)
@pytest.mark.parametrize("policy", ["reproducible", "fp8"])
@pytest.mark.parametrize("case", _CASES)
def test_loops_have_the_bits_of_their_unrolled_code(case: str, policy: str) -> None:
    loop, unrolled, given = _CASES[case]
    unrolled.load_state_dict(loop.state_dict())
    unrolled.zero_grad(), loop.zero_grad()
    found = _gradients(fxround.compile(loop, policy), given)
    assert _same(found, _gradients(fxround.compile(unrolled, policy), given))
    with torch.no_grad(), buffers.guarded():
        alone = pytree.tree_leaves(fxround.compile(loop, policy)(*given))
    assert _same(alone, found[: len(alone)])
    if "cond" not in case:
        loop.zero_grad()
        one_by_one = fxround.compile(loop, policy, unroll_loops=True)
        assert _same(_gradients(one_by_one, given), found) and not list(loops_of(one_by_one.lowered))


class Parts(nn.Module):
    """Steps whose gradient reads one part of what an operation returns: of a norm, a maximum, views of a state."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, state: Tensor, xs: Tensor) -> Any:
        def step(s: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            first, second = self.norm(s).split(2, 1)
            third, fourth = (s * x).unbind(0)
            return torch.cat([first * second, first + second], 1), third * fourth * (s + x).max(0).values

        return scan(step, state, xs)


def test_a_gradient_reads_parts_of_results() -> None:
    given = torch.rand(2, 4), torch.rand(3, 2, 4)
    model = Parts()
    found = _gradients(fxround.compile(model, "reproducible"), given)
    model.zero_grad()
    assert _same(_gradients(fxround.compile(model, "reproducible", unroll_loops=True), given), found)


def test_a_scan_is_numpys_arithmetic() -> None:
    def model(x: Tensor, us: Tensor) -> Any:
        return scan(lambda c, u: (c * u + u, c - u), x, us)

    x, us = torch.randn(6), torch.randn(50, 6)
    last, rows = fxround.compile(model, "reproducible")(x, us)
    state = x.numpy()
    for u, row in zip(us.numpy(), rows.numpy(), strict=True):
        assert (state - u).tobytes() == row.tobytes()
        state = state * u + u
    assert state.tobytes() == last.numpy().tobytes()


def test_random_bits_are_those_of_the_iteration() -> None:
    def model(x: Tensor, us: Tensor) -> Any:
        return scan(lambda c, u: (c * u, c + u), x, us)

    x, us = torch.rand(40) + 1, torch.rand(9, 40)
    compiled = fxround.compile(model, "stochastic", seed=2**40 + 5).reseed(2**40 + 5, 3)
    last, rows = compiled(x, us)
    ((_, (body,)),) = loops_of(compiled._called().lowered)
    (states,) = [n for n in compiled._called().lowered.graph.nodes if "iterations" in str(n.target)]
    table = torch.ops.fxround.iterations(torch.arange(9), compiled.rng, states.args[2])
    assert len({int(seed) for seed, _ in table}) == 9 and all(sample == 3 for _, sample in table)
    numbers = {call.program: call.node for n in body.graph.nodes if (call := read_map(n)) is not None}
    state = x.numpy()
    for (seed, sample), u, row in zip(table.tolist(), us.numpy(), rows.numpy(), strict=True):
        found = []
        for name in ("mul", "add"):
            text = f"t0 = {name}(x0, x1) @ binary32/stochastic/inf"
            key = (seed & 0xFFFFFFFF, seed >> 32, sample, numbers[text])
            words = tuple(np.uint32(word) for word in key)
            kernel = map_kernel(Program.parse(text), ("f32", "f32"), "f32")
            found.append(reference.map_(kernel, [state, u], words))  # type: ignore[arg-type]
        assert found[1].tobytes() == row.tobytes()
        (state,) = found[:1]
    assert state.tobytes() == last.numpy().tobytes()


@pytest.mark.part(2)
@pytest.mark.parametrize("case", _CASES)
def test_random_bits_depend_on_the_seed_alone(case: str) -> None:
    loop, _, given = _CASES[case]
    compiled = fxround.compile(loop, "stochastic", seed=4)
    with torch.no_grad():
        first = pytree.tree_leaves(compiled(*given))
        threads = torch.get_num_threads()
        torch.set_num_threads(threads + 1)
        try:
            again = pytree.tree_leaves(compiled(*given))
        finally:
            torch.set_num_threads(threads)
        other = pytree.tree_leaves(compiled.reseed(5)(*given))
        shown = pytree.tree_leaves(list(compiled.reseed(4).observe(*given))[-1][1])
    assert _same(first, again) and _same(first, shown)
    assert not _same(first, other)
    trained = _gradients(compiled.reseed(4), given)
    assert _same(first, trained[: len(first)])


def test_equal_rows_are_rounded_differently_in_each_iteration() -> None:
    rows = fxround.compile(lambda xs: mapped(lambda x, y: x / y, xs, torch.full((), 3.0)), "stochastic")(
        torch.ones(16, 8)
    )
    assert len({row.numpy().tobytes() for row in rows}) > 8


def test_one_capture_serves_every_length() -> None:
    compiled = fxround.compile(Cell(False), "reproducible")
    for length in (5, 3, 17, 1):
        _, rows = compiled(torch.rand(4, 3), torch.rand(length, 4, 3))
        assert rows.shape == (length, 4, 3)
    assert len(compiled.captures()) <= 2  # a length of one may be a graph of its own
    with pytest.raises(RuntimeError, match="scan dimension > 0"):  # PyTorch's own error
        compiled(torch.rand(4, 3), torch.rand(0, 4, 3))


def test_a_while_loop_runs_as_long_as_its_test_is_true() -> None:
    x = torch.rand(4, 3)
    with torch.no_grad():
        count, found = fxround.compile(Halving(), "reproducible")(x)
    state, steps = x.numpy(), 0
    while np.abs(state).max() > np.float32(0.01):
        state, steps = state * np.float32(0.3) - state * state * np.float32(0.25), steps + 1
    assert (int(count), found.numpy().tobytes()) == (steps, state.tobytes())
    with torch.no_grad():
        drawn = fxround.compile(Halving(), "stochastic")
        assert _same(drawn(x), list(drawn.observe(x))[-1][1])


def test_a_while_loop_has_no_gradient() -> None:
    with pytest.raises(CaptureError, match=r"while_loop has no gradient.*write the loop as a scan"):
        fxround.compile(Halving(), "reproducible")(torch.rand(3, requires_grad=True))


def test_loops_within_loops() -> None:
    def nested(x: Tensor, us: Tensor) -> Any:
        def inner(c: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
            c = cond(u.sum() > 0, lambda c, u: c * u, lambda c, u: c - u, (c, u))
            return c, c * 3

        def outer(c: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
            last, rows = scan(inner, c, u)
            return last, rows.sum(0)

        return scan(outer, x, us)

    def unrolled(x: Tensor, us: Tensor) -> Any:
        results = []
        for block in us.unbind(0):
            rows = []
            for u in block.unbind(0):
                x = x * u if u.sum() > 0 else x - u
                rows.append(x * 3)
            results.append(torch.stack(rows).numpy())
        return x, results

    x, us = torch.rand(5), torch.randn(3, 4, 5)
    compiled = fxround.compile(nested, "reproducible")
    last, _ = compiled(x, us)
    expected, _ = unrolled(x, us)
    assert torch.equal(last, expected)
    drawn = fxround.compile(nested, "stochastic")
    assert _same(drawn(x, us), drawn(x, us))


def test_loops_within_loops_have_gradients() -> None:
    def inner(c: Tensor, u: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return c * u, c * w

    def nested(x: Tensor, us: Tensor, w: Tensor) -> Any:
        def outer(c: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
            last, rows = scan(lambda c, u: inner(c, u, w), c, block)  # PyTorch differentiates no scan of this one
            return last, rows.sum(0)

        return scan(outer, x, us)

    def unrolled(x: Tensor, us: Tensor, w: Tensor) -> Any:
        results = []
        for block in us.unbind(0):
            rows = []
            for u in block.unbind(0):
                x, row = inner(x, u, w)
                rows.append(row)
            results.append(torch.stack(rows).sum(0))
        return x, torch.stack(results)

    whole = torch.Generator().manual_seed(0)  # small integers, on which PyTorch's own arithmetic is exact
    given = tuple(torch.randint(-2, 3, s, generator=whole).float() for s in ((5,), (2, 3, 5), (5,)))
    gradients = []
    for function in (fxround.compile(nested, "reproducible"), unrolled):
        leaves = [x.clone().requires_grad_() for x in given]
        last, rows = function(*leaves)
        (last.sum() + rows.sum()).backward()
        gradients.append([_grad(x) for x in leaves])
    assert _same(*gradients) and all(x.any() for x in gradients[0])


def test_views_show_the_body(tmp_path: Path) -> None:
    compiled = fxround.compile(Cell(False), "bfloat16")
    given = torch.rand(4, 3), torch.rand(6, 4, 3)
    compiled(*given)
    rows = {row.node: row for row in compiled.summary().operations}
    assert rows["scan.step.mm"].rounding.startswith("bfloat16") and rows["scan.step.mm"].module == "linear"
    assert rows["scan.step.mm"].operations == 6 * 2 * 4 * 3 * 3
    assert not compiled.coverage().unrounded
    assert "# step of scan" in compiled.graph_text() and "fxround.matmul" in compiled.graph_text()
    assert "tanh" in compiled.draw(tmp_path / "loop.svg").read_text()
    assert ("scan.step.tanh" in compiled.to_networkx()) is True


def test_files_copies_and_backends_have_the_same_bits(tmp_path: Path) -> None:
    model, given, longer = Cell(False), (torch.rand(4, 3), torch.rand(6, 4, 3)), (torch.rand(4, 3), torch.rand(8, 4, 3))
    compiled = fxround.compile(model, "stochastic", seed=7)
    with torch.no_grad():
        loaded = fxround.load(compiled.export(tmp_path / "loop.pt2", given))
        for args in (given, longer):
            for other in (loaded, copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):
                assert _same(compiled(*args), other(*args))
        narrow = compiled.with_policy("bfloat16")
        again = fxround.compile(model, "bfloat16", seed=7)
        assert _same(narrow(*given), again(*given))


def test_a_state_that_changes_and_an_if_in_a_step_are_refused_with_the_line() -> None:
    def longer(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, torch.cat([x, x])

    def branch(c: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        return (c if c.sum() > 0 else -c), u * 2

    x, us = torch.rand(3), torch.rand(4, 3)
    with pytest.raises(CaptureError, match=r"part 0 .* dtype torch.float32 before a step and torch.float64 after it"):
        fxround.compile(lambda x, us: scan(lambda c, u: (c.double(), u * 2), x, us), "bfloat16")(x, us)
    with pytest.raises(CaptureError, match=r"part 1 of the state of a loop has the shape"):
        fxround.compile(lambda x: while_loop(lambda i, _: i < 3, longer, (torch.tensor(0), x)), "bfloat16")(x)
    with pytest.raises(CaptureError, match=r"(?s)test_loops.py:\d+: return \(c if .*reason  Data-dep.*torch.where"):
        fxround.compile(lambda x, us: scan(branch, x, us), "bfloat16")(x, us)


def test_strict_policies_refuse_what_a_body_cannot_round() -> None:
    with pytest.raises(UnsupportedOperator, match="test_loops"):
        fxround.compile(lambda xs: mapped(torch.special.erfcx, xs), "reproducible")(torch.rand(3, 4))


def test_a_rule_is_matched_in_bodies_too() -> None:
    policy = fxround.Policy("cell", (fxround.Rule("linear", operator="mm", rounding="e4m3fn/nearest_even/saturate"),))
    compiled = fxround.compile(Cell(False), policy)
    compiled(torch.rand(4, 3), torch.rand(6, 4, 3))
    assert [row.node for row in compiled.summary().operations if row.status == "rounded"] == ["scan.step.mm"]
    with pytest.raises(fxround.PolicyError):
        fxround.compile(Cell(False), fxround.Policy("none", (fxround.Rule("nowhere", rounding="bfloat16"),)))(
            torch.rand(4, 3), torch.rand(6, 4, 3)
        )


def test_a_selection_of_one_number_and_a_choice_that_broadcasts() -> None:
    x = torch.arange(30.0).reshape(5, 6)
    one = lambda s: s * 0.5 + s.index_select(0, torch.arange(3)[1]) * 0.25  # noqa: E731
    wide = lambda s: torch.where((torch.arange(6) == 2).unsqueeze(0), s * 0.5, s[:1]) * 0.75  # noqa: E731
    for step in (one, wide):
        state = x
        compiled = fxround.compile(step, "reproducible")
        for _ in range(4):
            state = compiled(state)
        assert torch.equal(fxround.iterate(step, x, 4, "reproducible"), state)


def test_a_loop_over_complex_numbers_has_gradients() -> None:
    def factors(w: Tensor, x: Tensor) -> Tensor:
        return w * torch.view_as_complex(x)

    def looped(state: Tensor, w: Tensor, xs: Tensor) -> tuple[Tensor, Tensor]:
        def step(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            state = state * factors(w, x)
            return state, state * 2

        return scan(step, state, xs)  # type: ignore[no-any-return]

    def unrolled(state: Tensor, w: Tensor, xs: Tensor) -> tuple[Tensor, Tensor]:
        rows = []
        for x in xs:
            state = state * factors(w, x)
            rows.append(state * 2)
        return state, torch.stack(rows)

    generator = torch.Generator().manual_seed(1)
    state, w = (torch.randn(3, dtype=torch.complex64, generator=generator) for _ in range(2))
    xs = torch.randn(4, 3, 2, generator=generator)
    results = []
    for function in (looped, unrolled):
        leaves = [x.clone().requires_grad_() for x in (state, w, xs)]
        last, rows = fxround.compile(function, "bfloat16")(*leaves)
        gradients = torch.autograd.grad(torch.view_as_real(rows).square().sum() + last.real.sum(), leaves)
        results.append((last, rows, *gradients))
    for of_loop, of_steps in zip(*results, strict=True):
        assert torch.equal(of_loop, of_steps)
    inputs = torch.view_as_complex(xs).requires_grad_()
    with pytest.raises(fxround.CaptureError, match=r"complex inputs with gradients as torch\.view_as_real"):
        fxround.compile(lambda s, x: scan(lambda s, x: (s * x, s), s, x), "bfloat16")(state, inputs)
