"""Reductions of operands of any layout: every loop nest, compared with the NumPy reference or rational sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_operands import DRAW, KEY, OPS, RNG, same, scattered, stored, values
from summation_trees import chain, check, masks, stated
from torch import Tensor

from fxround.graph.dtypes import FORMAT_OF
from fxround.kernels.kinds import Exact
from fxround.kernels.reductions import cumprod_kernel, cumsum_kernel, prod_kernel, sum_kernel
from fxround.numerics.modes import MODES, Rounding
from fxround.numerics.orders import Order
from fxround.numerics.specification.exact import round_exact
from fxround.runtime import reference
from fxround.runtime.cpu import exact_sum, reduction, scatter
from fxround.runtime.cpu.code import instruction_set
from fxround.runtime.cpu.llvm.engine import instruction_sets
from fxround.runtime.cpu.strides import Dim, Lines

BINARY32 = Rounding.parse("binary32")


@pytest.fixture
def many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads share even the smallest amount of work."""
    for module in (reduction, scatter, exact_sum):
        monkeypatch.setattr(module, "_ENOUGH", 1)


def by_reference(x: Tensor, dims: list[int], order: str, accumulate: str) -> Any:
    """The sum over ``dims`` of a float32 tensor: result dimensions first, then k, in row-major order."""
    kept = [d for d in range(x.dim()) if d not in dims]
    rows = stored(x.permute(*kept, *dims)).reshape(prod(x.shape[d] for d in kept), prod(x.shape[d] for d in dims))
    kernel = sum_kernel(Order.parse(order), Rounding.parse(accumulate), BINARY32, "f32", "f32")
    got = reference.exact(kernel, rows, KEY) if isinstance(kernel, Exact) else reference.reduce(kernel, rows, KEY)
    return got.reshape([x.shape[d] for d in kept])


def total(x: Tensor, dims: list[int], order: str, accumulate: str) -> Tensor:
    return OPS.sum(x, dims, False, order, accumulate, "binary32", RNG, DRAW.node)


# (operand, reduced dimensions) for each loop nest: by rows, neighbours few and many, any lines, dense lines, panels.
def lying(name: str) -> tuple[Tensor, list[int]]:
    x = values((4, 6, 5, 140), 7, special=True)
    return {
        "dense lines": (x, [3]),
        "dense lines, far apart": (x[:, ::2], [3]),
        "two runs a line": (x, [0, 3]),
        "three runs a line, outermost and innermost": (x, [0, 2, 3]),
        "panels of strided elements": (x[..., ::3], [1, 2, 3]),
        "panels turned": (x.permute(3, 0, 1, 2), [0, 1, 2]),
        "neighbours": (x[..., :21], [1]),
        "many neighbours": (x, [1]),
        "neighbours, results turned": (x.permute(3, 1, 0, 2), [1]),
        "neighbours over two dimensions": (x, [0, 2]),
        "any lines": (x[..., ::2], [1]),
        "any lines, few": (x[:2, :2, :2, :3], [2]),
        "short lines": (x[..., :3], [3]),
        "repeated lines": (x[:1].expand(4, 6, 5, 140), [2]),
        "repeated elements": (x[:, :, :1].expand(4, 6, 5, 140), [1, 2]),
        "all": (x.transpose(0, 3), [0, 1, 2, 3]),
        "nothing": (x, []),
    }[name]


LYING = """dense lines|dense lines, far apart|two runs a line|three runs a line, outermost and innermost
|panels of strided elements|panels turned|neighbours|many neighbours|neighbours, results turned
|neighbours over two dimensions|any lines|any lines, few|short lines|repeated lines|repeated elements|all""".replace(
    "\n", ""
).split("|")


@pytest.mark.part(3)
@pytest.mark.parametrize("name", LYING)
@pytest.mark.parametrize("order", ["sequential", "lanes:16", "exact"])
def test_sums_of_lines_that_lie_anyhow(name: str, order: str) -> None:
    x, dims = lying(name)
    for accumulate in ("binary32", "binary32/stochastic"):
        same(total(x, dims, order, accumulate), by_reference(x, dims, order, accumulate))


@pytest.mark.part(4)
@pytest.mark.parametrize("isa", instruction_sets())
def test_every_loop_is_the_same_in_every_width_and_number_of_threads(isa: str, many_pieces: None) -> None:
    before = torch.get_num_threads()
    try:
        for name in ("dense lines", "two runs a line", "many neighbours", "any lines", "panels turned"):
            x, dims = lying(name)
            for order in ("sequential", "lanes:16", "exact"):
                want = by_reference(x, dims, order, "bfloat16/stochastic")
                for threads in (1, 2, 3):
                    torch.set_num_threads(threads)
                    with instruction_set(isa):
                        same(total(x, dims, order, "bfloat16/stochastic"), want)
    finally:
        torch.set_num_threads(before)


@pytest.mark.part(3)
@pytest.mark.parametrize("isa", instruction_sets())
def test_scans_products_and_scatters_are_the_same_in_every_width_and_number_of_threads(
    isa: str, many_pieces: None
) -> None:
    x, index = values((40, 37), 1), torch.arange(60) * 7 % 40
    source, accumulate = values((60, 37), 2), "binary32/stochastic"
    rounding = Rounding.parse(accumulate)
    prefixes = reference.scan(cumsum_kernel(rounding, BINARY32, "f32", "f32"), stored(x), KEY)
    products = reference.scan(cumprod_kernel(rounding, BINARY32, "f32", "f32"), stored(x), KEY)
    product = reference.reduce(prod_kernel(rounding, BINARY32, "f32", "f32"), stored(x), KEY)
    put = scattered(x, index[:, None] * 37 + torch.arange(37), source, accumulate)
    tail, before = (accumulate, "binary32", RNG, DRAW.node), torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            with instruction_set(isa):
                for view, dim in ((x, 1), (x.t(), 0), (x.t().contiguous(), 0)):
                    same(OPS.cumsum(view, dim, *tail).movedim(dim, 1), prefixes)
                    same(OPS.cumprod(view, dim, *tail).movedim(dim, 1), products)
                    same(OPS.prod(view, [dim], False, *tail), product)
                same(OPS.index_put(x, [index], source, accumulate, RNG, DRAW.node), put)
                repeated = index[:, None].expand(60, 37)
                same(OPS.scatter_add(x, 0, repeated, source, accumulate, RNG, DRAW.node), put)
                single = OPS.scatter_add(x, 0, repeated.contiguous(), source, accumulate, RNG, DRAW.node)
                same(single, put)
    finally:
        torch.set_num_threads(before)


@settings(max_examples=40)
@given(st.data())
def test_sums_over_any_dimensions_of_any_view(data: st.DataObject) -> None:
    x, dims = data.draw(st.integers(1, 4).flatmap(views))
    order = data.draw(st.sampled_from(["sequential", "lanes:2", "lanes:16", "exact"]))
    accumulate = f"binary32/{data.draw(st.sampled_from(list(MODES)))}"
    if dims:
        same(total(x, dims, order, accumulate), by_reference(x, dims, order, accumulate))
        same(total(x.contiguous(), dims, order, accumulate), by_reference(x, dims, order, accumulate))


@st.composite
def views(draw: Any, rank: int) -> tuple[Tensor, list[int]]:
    """A tensor with ``rank`` dimensions, permuted, sliced or repeated, and some of its dimensions."""
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 17, 20]), min_size=rank, max_size=rank))
    steps = draw(st.lists(st.integers(1, 2), min_size=rank, max_size=rank))
    x = values(tuple(n * s for n, s in zip(shape, steps, strict=True)), 1, special=draw(st.booleans()))
    x = x[tuple(slice(None, None, s) for s in steps)].permute(draw(st.permutations(range(rank))))
    if draw(st.booleans()):
        x = x[:1].expand(3, *x.shape[1:]) if x.shape[0] else x
    return x, sorted(draw(st.sets(st.integers(0, rank - 1))))


@settings(max_examples=8)
@given(
    st.sampled_from([0, 63, 700, 5000]),
    st.integers(1, 20),
    st.sampled_from(["binary32", "bfloat16/stochastic", "tf32/to_odd"]),
)
def test_long_lines_equal_the_reference(length: int, lines: int, accumulate: str) -> None:
    x = values((lines, length), length)
    for order in ("sequential", "lanes:16"):
        want = by_reference(x, [1], order, accumulate)
        for operand, dim in ((x, 1), (x.t(), 0), (x.t().contiguous(), 0), (x.repeat_interleave(2, 1)[:, ::2], 1)):
            same(total(operand, [dim], order, accumulate), want)


@settings(max_examples=12)
@given(st.integers(0, 5000), st.integers(0, 2**31))
def test_every_order_agrees_where_partial_sums_are_exact(length: int, seed: int) -> None:
    x = torch.randint(-99, 100, (2, length), generator=torch.Generator().manual_seed(seed)).float()
    want = x.sum(1).numpy()  # stock: small integers, exact in any order
    for order in ("sequential", "lanes:4", "lanes:64", "exact"):
        for operand, dims in ((x, [1]), (x.t().contiguous(), [0]), (x[:, :, None].expand(2, length, 1), [1, 2])):
            got = total(operand, dims, order, "binary32/stochastic")
            same(got.reshape(2), want)
    if length:
        same(OPS.cumsum(x, 1, "binary32/stochastic", "binary32", RNG, 1)[:, -1].contiguous(), want)
    index = torch.zeros(length, dtype=torch.int64)
    same(OPS.index_put(torch.zeros(1, 2), [index], x.t(), "binary32/stochastic", RNG, 1)[0], want)


# ---- exact sums: what blocks take, what bins take ----


def spread(shape: tuple[int, int], low: float, high: float, dtype: torch.dtype) -> Tensor:
    rng = np.random.default_rng(1)
    x = torch.from_numpy(rng.standard_normal(shape) * np.exp2(rng.uniform(low, high, shape)))
    return x.to(dtype)


# Binades that one unit holds, that two do, that three do, and that only bins do; changing from block to block.
RANGES = {
    torch.float32: [(-3, 3), (-60, 0), (-148, 126)],
    torch.float64: [(-3, 3), (-40, 0), (-90, 0), (-1070, 1019)],
    torch.bfloat16: [(-3, 3), (-130, 120)],
    torch.float16: [(-23, 14)],
}


@pytest.mark.part("dtype0", "dtype2")
@pytest.mark.parametrize("dtype", RANGES)
def test_exact_sums_of_any_spread_equal_rational_sums(dtype: torch.dtype) -> None:
    own = FORMAT_OF[dtype]
    for low, high in RANGES[dtype]:
        for shape in ((4500, 2), (520, 70), (600, 9)):
            x = spread(shape, low, high, dtype)
            if high == 3:
                x[: shape[0] // 3] *= 2.0**60 if dtype != torch.bfloat16 else 1.0
                x[shape[0] // 2] *= 2.0**-70
            sums = [rational(x[:, c].tolist(), own) for c in range(shape[1])]
            want = torch.tensor(sums, dtype=torch.float64).to(dtype)
            for operand, dim in ((x, 0), (x.t().contiguous(), 1), (x.repeat_interleave(2, 1)[:, ::2], 0)):
                same(OPS.sum(operand, [dim], False, "exact", own, own, RNG, 1), stored(want))


def rational(column: list[float], own: str) -> float:
    units = sum(int(Fraction(v) * 2**1074) for v in column)
    return float(round_exact(Fraction(units, 2**1074), units < 0, Rounding.parse(own)))


@pytest.mark.parametrize("special", [float("inf"), float("-inf"), float("nan")])
def test_a_special_number_in_a_late_block_decides_an_exact_sum(special: float) -> None:
    x = values((40, 6000), 1)
    x[3, 5999] = x[17, 0] = x[17, 5000] = special
    want = x.double().sum(1)
    finite = [r for r in range(40) if r not in (3, 17)]
    for operand, dim in ((x, 1), (x.t().contiguous(), 0)):
        got = total(operand, [dim], "exact", "binary32")
        same(got[[3, 17]], stored(want[[3, 17]].float()))
        assert got[finite].isfinite().all()
    x[3, 0] = -special
    assert total(x, [1], "exact", "binary32")[3].isnan(), "opposite infinities"


def test_an_exact_sum_that_cancels_is_plus_zero() -> None:
    x = spread((20, 9000), -148, 126, torch.float32)
    for operand, dim in ((torch.cat([x, -x], 1), 1), (torch.cat([x, -x], 1).t().contiguous(), 0)):
        same(total(operand, [dim], "exact", "binary32"), np.zeros(20, np.float32))


# ---- order, revealed from outside ----


def loops(x: Tensor) -> Iterator[Callable[[Callable[[Tensor, int], Tensor]], Tensor]]:
    """Ways to pass the rows of x to f(operand, dim), one per loop nest; each returns the results of all rows."""
    apart = torch.zeros(2 * x.shape[0], 2 * x.shape[1])
    apart[::2, ::2] = x
    yield lambda f: f(x, 1)
    yield lambda f: f(x.t().contiguous(), 0)
    yield lambda f: f(apart[::2, ::2], 1)
    yield lambda f: torch.cat([f(rows, 1) for rows in x.split(5)])
    yield lambda f: torch.cat([f(rows, 1) for rows in apart[::2, ::2].split(5)])


@pytest.mark.parametrize("length", [2, 17, 40])
@pytest.mark.parametrize("order", ["sequential", "lanes:4", "lanes:16", "lanes:32"])
def test_every_loop_follows_the_tree_of_its_order(order: str, length: int) -> None:
    tree = stated(Order.parse(order), length)
    for way in loops(masks(length)):
        found = way(lambda x, d: OPS.sum(x, [d], False, order, "binary32", "binary32", RNG, 1))
        check(found, tree, length)


@pytest.mark.parametrize("length", [2, 17, 40])
def test_every_loop_of_prefixes_ascends(length: int) -> None:
    for way in loops(masks(length)):
        found = way(lambda x, d: OPS.cumsum(x, d, "binary32", "binary32", RNG, 1).select(d, -1))
        check(found, chain(list(range(length))), length)


# ---- descriptions ----


def test_lines_are_sorted_by_steps_and_merged() -> None:
    x = torch.empty(2, 3, 4, 5)
    assert Lines.of(x, [3]) == Lines((Dim(24, 5, 1, 1),), (Dim(5, 1, 0, 0),))
    assert Lines.of(x, [0, 1]) == Lines((Dim(20, 1, 1, 1),), (Dim(6, 20, 0, 0),))
    assert Lines.of(x, [0, 2]) == Lines((Dim(3, 20, 5, 5), Dim(5, 1, 1, 1)), (Dim(2, 60, 0, 0), Dim(4, 5, 0, 0)))
    turned = x.permute(3, 0, 1, 2)
    assert Lines.of(turned, [3]) == Lines((Dim(6, 20, 1, 1), Dim(5, 1, 6, 6)), (Dim(4, 5, 0, 0),))
    assert Lines.of(turned, [0, 3]).k == (Dim(5, 1, 0, 0), Dim(4, 5, 0, 0)), "k keeps its order"
    assert Lines.of(turned, [0, 3], ordered=False).k == (Dim(20, 1, 0, 0),)
    assert Lines.of(x[:0], [0]).k == (Dim(0, 0, 0, 0),)
    assert Lines.of(x, [1], scan=True).k == (Dim(3, 20, 20, 0),)


def test_more_dimensions_than_a_description_holds_are_copied() -> None:
    x = values((2,) * 20, 1).permute(*range(1, 20, 2), *range(0, 20, 2))
    assert not Lines.of(x, list(range(0, 20, 2))).fits
    dims = list(range(0, 20, 2))
    for order in ("lanes:4", "exact"):
        same(total(x, dims, order, "binary32"), by_reference(x, dims, order, "binary32"))
    scan = OPS.cumsum(x, 7, "binary32", "binary32", RNG, DRAW.node)
    same(scan, stored(OPS.cumsum(x.contiguous(), 7, "binary32", "binary32", RNG, DRAW.node)))
    assert torch.equal(scan.select(7, 1), x.select(7, 0) + x.select(7, 1))
