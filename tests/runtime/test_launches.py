"""A list of launches, run in steps by one call or by several threads, does what its kernels do one by one."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import scan

import fxround
from fxround.errors import VerificationError
from fxround.kernels.maps import map_kernel
from fxround.kernels.program import Program
from fxround.policy import Policy, Rule
from fxround.runtime.cpu import contraction, launches, threads
from fxround.runtime.cpu.launches import Address, KeyAddress, LaunchTable, map_launch
from fxround.runtime.cpu.pointwise import call_for
from fxround.runtime.draw import NO_KEY, Draw
from fxround.runtime.schedule import loops

_NO_KEY = KeyAddress(NO_KEY, draws=False)


def _call(text: str, *operands: Tensor) -> Any:
    call = call_for(map_kernel(Program.parse(text), ("f32",) * len(operands), "f32"), operands)
    assert call is not None
    return call


@pytest.mark.parametrize("at_once", [1, 7, 4096])
def test_steps_read_and_write_rows_that_grow_and_memory_of_the_call(at_once: int) -> None:
    torch.manual_seed(0)
    xs, rows, state = torch.rand(20, 3), torch.empty(20, 3), torch.rand(3)
    total = _call("t0 = add(x0, x1) @ binary32/nearest_even/inf", state, xs[0])
    square = _call("t0 = mul(x0, x1) @ binary32/nearest_even/inf", state, state)
    moving = [Address(i, growth=12) for i in (0, 1)]
    table = LaunchTable(
        [
            map_launch(total, [Address(2), moving[0]], [Address(3)], _NO_KEY),
            map_launch(square, [Address(3), Address(3)], [moving[1]], _NO_KEY),
            map_launch(square, [Address(3), moving[0]], [Address(2)], _NO_KEY),
        ],
        [0, 1, 2],
        {3: 12},
    )
    expected, s = [], state.numpy().copy()
    for x in xs.numpy():
        t = s + x
        expected.append(t * t)
        s = t * x
    with mock.patch.object(launches, "_AT_ONCE", at_once):
        table.run([x.data_ptr() for x in (xs, rows, state)], Draw(), 20)
    assert np.array_equal(rows.numpy(), np.stack(expected)) and np.array_equal(state.numpy(), s)


@pytest.mark.parametrize("pieces", [1, 5])
def test_steps_share_the_items_and_the_last_one_has_fewer(pieces: int) -> None:
    x, result = torch.rand(1000), torch.full((1064,), -1.0)
    double = _call("t0 = add(x0, x0) @ binary32/nearest_even/inf", x)
    # Blocks of 64 elements, of which the last one has 40; two blocks in a step, so that the last step has none.
    table = LaunchTable([map_launch(double, [Address(0)], [Address(1)], _NO_KEY, share=2)], [0, 1], {})
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        table.spread([x.data_ptr(), result.data_ptr()], Draw(), 9, pieces)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(result[:1000], x + x) and bool((result[1000:] == -1).all())


@torch.no_grad()
@pytest.mark.parametrize("module", [launches, contraction])
def test_scratch_outlives_a_signal_handler_that_needs_more(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler may run a model after the memory of the thread was taken, and before machine code is called."""
    shared, seen = module.spread, []

    def interrupted(*args: Any) -> None:
        memory = weakref.ref(threads._KEPT.scratch)
        threads.scratch(threads._KEPT.scratch.numel() + 1, shared=False)
        seen.append(memory() is not None)
        shared(*args)

    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64))
    compiled, x = fxround.compile(model, "reproducible"), torch.rand(2048, 64)
    expected = compiled(x)
    monkeypatch.setattr(module, "spread", interrupted)
    assert torch.equal(compiled(x), expected) and seen and all(seen)


def test_launches_that_the_loop_cannot_run_are_refused() -> None:
    x = torch.rand(3)
    double = map_launch(_call("t0 = add(x0, x0) @ binary32/nearest_even/inf", x), [Address(0)], [Address(1)], _NO_KEY)
    with pytest.raises(VerificationError, match=r"homes \[1\] are given by the call"):
        LaunchTable([double], [0, 1], {1: 12})
    with pytest.raises(VerificationError, match="a launch has 6 arguments; expected one of"):
        LaunchTable([replace(double, arguments=double.arguments[:6])], [0, 1], {})
    table = LaunchTable([double], [0, 1], {})
    table._works[0] = cast(Any, None)  # as that of a product has
    with pytest.raises(VerificationError, match="whose results may not count"):
        table.spread([x.data_ptr(), x.data_ptr()], Draw(), 1, 1)


@torch.no_grad()
@pytest.mark.parametrize("accumulate", ["binary32/toward_zero/inf", "bfloat16"])
def test_a_loop_goes_on_after_a_product_that_is_done_again(accumulate: str) -> None:
    """Quick results of infinities do not count: a step in the middle, the first and the last one, and all of them."""

    def model(w: Tensor, s: Tensor, us: Tensor) -> Any:
        return scan(lambda s, u: ((u @ w) * 0.5, s + u), s, us)

    compiled = fxround.compile(model, Policy("mine", (Rule(rounding="binary32", accumulate=accumulate),)))
    torch.manual_seed(0)
    w, s, us = torch.rand(4, 4), torch.rand(2, 4), torch.rand(9, 2, 4)
    counts = []
    for steps in ([], [4], [0, 8], range(9)):
        given = us.clone()
        given[list(steps), 0, 1] = torch.inf
        with mock.patch.object(LaunchTable, "_again", autospec=True, side_effect=LaunchTable._again) as again:
            found = compiled(w, s, given)
        with mock.patch.object(loops, "scanned", return_value=None):
            expected = compiled(w, s, given)
        assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(found, expected, strict=True))
        counts.append(again.call_count)
    assert counts == [0, 1, 2, 9]
