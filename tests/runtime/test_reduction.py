"""Reductions against the NumPy reference, encoding for encoding: exact sums, products, scatters, wide rows."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_operands import ACCUMULATORS, BINARY32, DRAW, KEY, OPS, RNG, layouts, same, scattered, stored, values
from torch import Tensor

import fxround
from fxround.graph.dtypes import FORMAT_OF, STORAGES
from fxround.kernels.kinds import Exact, Reduce
from fxround.kernels.reductions import cumprod_kernel, cumsum_kernel, prod_kernel, sum_kernel
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.modes import MODES, Rounding
from fxround.numerics.orders import Order
from fxround.numerics.specification.exact import round_exact
from fxround.runtime import reference
from fxround.runtime.cpu.code import instruction_set
from fxround.runtime.cpu.exact_sum import run_exact
from fxround.runtime.cpu.llvm.engine import instruction_sets
from fxround.runtime.cpu.llvm.reduce import WIDE
from fxround.runtime.cpu.reduction import run_reduce, run_scan

STEPS = [a for a in ACCUMULATORS if str(Accumulation.parse(a)) == str(Accumulation.parse(a).step)]


def exact_kernel(accumulate: str, dtype: torch.dtype = torch.float32) -> Exact:
    kernel = sum_kernel(
        Order.parse("exact"),
        Rounding.parse(accumulate),
        Rounding.parse(FORMAT_OF[dtype]),
        STORAGES[dtype],
        STORAGES[dtype],
    )
    assert isinstance(kernel, Exact)
    return kernel


def chains(order: str, accumulate: str) -> Reduce:
    kernel = sum_kernel(Order.parse(order), Rounding.parse(accumulate), BINARY32, "f32", "f32")
    assert isinstance(kernel, Reduce)
    return kernel


# Reading, summing and rounding are parts of their own: every mode in binary32, and three kinds of mode in each dtype.
EXACT = [(mode, torch.float32) for mode in MODES]
EXACT += [(mode, t) for t in STORAGES for mode in ("nearest_even", "stochastic", "up_down") if t != torch.float32]


@pytest.mark.part(8)
@pytest.mark.parametrize("mode, dtype", EXACT)
def test_exact_sums_equal_rational_arithmetic(mode: str, dtype: torch.dtype) -> None:
    own = "tf32" if dtype == torch.float64 else FORMAT_OF[dtype]
    kernel = exact_kernel(f"{own}/{mode}", dtype)
    for length in (0, 1, 7, 8, 17, 100):
        x = values((11, length), length, dtype, special=length > 1)
        # Most rows would hold an infinity: keep some of them finite.
        x[::3] = torch.nan_to_num(x[::3].double(), 1.0, 1.0, -1.0).to(dtype)
        want = reference.exact(kernel, stored(x), KEY)
        same(run_exact(kernel, x[:, :, None], DRAW)[:, 0], want)
        same(run_exact(kernel, x.t()[None], DRAW)[0], want)


@pytest.mark.parametrize("isa", instruction_sets())
def test_exact_sums_are_the_same_in_every_width(isa: str) -> None:
    kernel, x = exact_kernel("binary32/stochastic"), values((9, 1000), 5)
    with instruction_set(isa):
        same(run_exact(kernel, x[:, :, None], DRAW)[:, 0], reference.exact(kernel, stored(x), KEY))


@settings(max_examples=60)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=40), st.sampled_from(list(MODES)))
def test_an_exact_sum_is_one_rounding_of_the_sum(row: list[float], mode: str) -> None:
    """Against ``round_exact`` alone, for the modes that draw nothing."""
    rounding = Rounding.parse(f"binary32/{mode}")
    total = sum(map(Fraction, row), Fraction(0))
    got = run_exact(exact_kernel(str(rounding)), torch.tensor(row).reshape(1, -1, 1), DRAW)
    if rounding.mode.deterministic:
        same(got, np.array([[round_exact(total, total < 0, rounding)]], np.float32))
        return
    with np.errstate(over="ignore"):
        nearest = np.float32(float(total)).item()
    # Infinity equals no fraction.
    if total == nearest and not rounding.mode.jitter:
        assert got.item() == total, "an exact result stays"


@settings(max_examples=40)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=30))
def test_an_exact_sum_of_binary64_is_correctly_rounded(row: list[float]) -> None:
    total = sum(map(Fraction, row), Fraction(0))
    want = round_exact(total, total < 0, Rounding.parse("binary64"))
    x = torch.tensor(row, dtype=torch.float64).reshape(1, -1, 1)
    same(run_exact(exact_kernel("binary64", torch.float64), x, DRAW), np.array([[want]]))


def test_an_exact_sum_knows_no_order() -> None:
    x = values((1, 5000), 3) * torch.exp2(torch.arange(5000) % 200 - 100.0)
    kernel = exact_kernel("binary32")
    first = run_exact(kernel, x[:, :, None], DRAW)
    shuffled = x[:, torch.randperm(5000, generator=torch.Generator().manual_seed(1))]
    same(run_exact(kernel, shuffled[:, :, None], DRAW), first.numpy())
    both = torch.cat([x, -shuffled], 1)
    assert run_exact(kernel, both[:, :, None], DRAW).item() == 0.0


def test_exact_sums_of_binary64_refuse_what_they_cannot_round() -> None:
    with pytest.raises(ValueError, match="cannot be rounded to binary64/stochastic"):
        exact_kernel("binary64/stochastic", torch.float64)


@pytest.mark.part(4)
@pytest.mark.parametrize("accumulate", STEPS)
def test_products_equal_the_reference(accumulate: str) -> None:
    kernel = prod_kernel(Rounding.parse(accumulate), BINARY32, "f32", "f32")
    scan = cumprod_kernel(Rounding.parse(accumulate), BINARY32, "f32", "f32")
    for length in (0, 1, 9, 60):
        x = values((5, length), length, special=length == 9)
        want = reference.reduce(kernel, stored(x), KEY)
        same(run_reduce(kernel, x[:, :, None], DRAW)[:, 0], want)
        same(run_reduce(kernel, x.t()[None], DRAW)[0], want)
        same(run_scan(scan, x[:, :, None], DRAW)[:, :, 0], reference.scan(scan, stored(x), KEY).astype(np.float32))


@pytest.mark.part(2)
@pytest.mark.parametrize("accumulate", ["binary32", "binary32/stochastic", "bfloat16/up_down"])
def test_rows_of_many_results_equal_the_reference(accumulate: str) -> None:
    """Several registers per row, of which the last one overlaps its neighbour."""
    for inner in (16 * WIDE - 1, 16 * WIDE, 16 * WIDE + 5, 300):
        x = values((2, 37, inner), inner, special=True)
        rows = x.transpose(1, 2).reshape(-1, 37)
        for order in ("sequential", "lanes:4", "lanes:16"):
            kernel = chains(order, accumulate)
            same(run_reduce(kernel, x, DRAW).reshape(-1), reference.reduce(kernel, stored(rows), KEY))
        scan = cumsum_kernel(Rounding.parse(accumulate), BINARY32, "f32", "f32")
        same(run_scan(scan, x, DRAW).transpose(1, 2).reshape(-1, 37), reference.scan(scan, stored(rows), KEY))


@pytest.mark.part("bfloat16/up_down")
@pytest.mark.parametrize("accumulate", ["binary32", "binary32/stochastic", "bfloat16/up_down"])
def test_many_rows_side_by_side_equal_the_reference(accumulate: str) -> None:
    """Square blocks transposed in registers, the rest of k one by one, and a last group that overlaps its neighbour."""
    for dtype in STORAGES:
        storage, own = STORAGES[dtype], Rounding.parse(FORMAT_OF[dtype])
        if dtype == torch.float64 and accumulate == "binary32/stochastic":
            own = Rounding.parse("binary32")
        for rows, length in ((16, 16), (19, 37), (40, 3), (15, 20)):
            x = values((rows, length), rows, dtype, special=True)
            kernel = sum_kernel(Order.parse("sequential"), Rounding.parse(accumulate), own, storage, storage)
            assert isinstance(kernel, Reduce)
            same(run_reduce(kernel, x[:, :, None], DRAW)[:, 0], reference.reduce(kernel, stored(x), KEY))
            scan = cumsum_kernel(Rounding.parse(accumulate), own, storage, storage)
            same(run_scan(scan, x[:, :, None], DRAW)[:, :, 0], reference.scan(scan, stored(x), KEY))


@settings(max_examples=25)
@given(st.integers(0, 5000), st.sampled_from(["sequential", "lanes:2", "lanes:16", "lanes:64", "exact"]))
def test_orders_agree_where_partial_sums_are_exact(length: int, order: str) -> None:
    x = torch.randint(-99, 100, (2, length), generator=torch.Generator().manual_seed(length)).float()
    for accumulate in ("binary32", "binary32/stochastic", "binary32/toward_zero"):
        for operand, dim in ((x, 1), (x.t(), 0), (x.t().contiguous(), 0)):
            got = OPS.sum(operand, [dim], False, order, accumulate, "binary32", RNG, 1)
            same(got, x.sum(1).numpy())  # stock: small integers, exact in any order


@pytest.mark.parametrize("order", ["sequential", "lanes:16", "exact"])
def test_a_row_alone_equals_the_row_in_any_company(order: str) -> None:
    x = values((40, 333), 1)
    alone = torch.cat([OPS.sum(row[None], [1], False, order, "binary32", "binary32", RNG, 1) for row in x])
    for view in layouts((40, 333), 1, torch.float32):
        same(OPS.sum(view, [1], False, order, "binary32", "binary32", RNG, 1), alone.numpy())
    same(OPS.sum(x[5:17], [1], False, order, "binary32", "binary32", RNG, 1), alone[5:17].numpy())


@pytest.mark.parametrize("order", ["sequential", "lanes:16", "exact"])
def test_threads_change_no_sum(order: str) -> None:
    x, before, found = values((300, 1000), 1), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append([OPS.sum(x, [d], False, order, "binary32/stochastic", "binary32", RNG, 1) for d in (0, 1)])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


# ---- scatters ----

PLACES: dict[str, list[Any]] = {
    "first": [torch.tensor([0, 3, 3, -1, 0])],
    "middle": [None, torch.tensor([0, 4, -1, 0])],
    "last": [None, None, None, torch.tensor([5, 5, 0, -6])],
    "apart": [torch.tensor([0, 1, 0]), None, torch.tensor([[2], [1], [2]])],
    "neighbours": [None, torch.tensor([1, 1, 0]), torch.tensor([2, -1, 2])],
    "mask": [torch.arange(60).reshape(4, 5, 3) % 3 == 0],
    "scalar": [torch.tensor(2)],
    "empty": [torch.tensor([], dtype=torch.int64)],
}


@pytest.mark.part(7)
@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("accumulate", ["binary32", "binary32/stochastic", "bfloat16/up_down", "e5m2"])
def test_index_put_equals_the_reference(name: str, accumulate: str) -> None:
    places = PLACES[name]
    for dtype in STORAGES:
        x = values((4, 5, 3, 6), 1, dtype)
        where = tuple(slice(None) if p is None else p for p in places)
        elements = torch.arange(x.numel()).reshape(x.shape)[where]
        source = values(tuple(elements.shape), 2, dtype)
        want = scattered(x, elements, source, accumulate)
        same(OPS.index_put(x, places, source, accumulate, RNG, DRAW.node), want)
        turned = x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
        same(OPS.index_put(turned, places, source, accumulate, RNG, DRAW.node), want)
        one = values((1,), 3, dtype)
        want = scattered(x, elements, one.expand(elements.numel()), accumulate)
        same(OPS.index_put(x, places, one, accumulate, RNG, DRAW.node), want)


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@pytest.mark.parametrize("accumulate", ["binary32", "binary32/stochastic", "binary16/toward_zero"])
def test_scatter_add_equals_the_reference(dim: int, accumulate: str) -> None:
    x, source, shape = values((5, 7, 6), 1), values((10, 10, 10), 2), [4, 6, 5]
    shape[dim] = 9
    index = torch.randint(-x.shape[dim], x.shape[dim], shape, generator=torch.Generator().manual_seed(dim))
    grid = list(torch.meshgrid(*map(torch.arange, shape), indexing="ij"))
    grid[dim] = index % x.shape[dim]
    used = source[: shape[0], : shape[1], : shape[2]]
    want = scattered(x, (grid[0] * 7 + grid[1]) * 6 + grid[2], used, accumulate)
    same(OPS.scatter_add(x, dim, index, source, accumulate, RNG, DRAW.node), want)


def test_an_expanded_index_moves_rows() -> None:
    x, index, source = values((5, 19), 1), torch.tensor([[4], [0], [4], [-1], [0]]), values((5, 19), 2)
    want = scattered(x, index % 5 * 19 + torch.arange(19), source, "binary32/stochastic")
    for form in (index.expand(5, 19), index.expand(5, 19).contiguous()):
        same(OPS.scatter_add(x, 0, form, source, "binary32/stochastic", RNG, DRAW.node), want)


def test_scatters_check_their_indices_before_any_pointer() -> None:
    x, two = torch.zeros(3, 4), torch.zeros(2, 4)
    with pytest.raises(IndexError, match="index 3 is out of range for dimension 0 of size 3"):
        OPS.index_put(x, [torch.tensor([0, 3])], two, "binary32", RNG, 1)
    with pytest.raises(IndexError, match="index -5 is out of range for dimension 1"):
        OPS.scatter_add(x, 1, torch.tensor([[-5]]), two, "binary32", RNG, 1)
    with pytest.raises(ValueError, match="exceeds src"):
        OPS.scatter_add(x, 0, torch.zeros(3, 4, dtype=torch.int64), two, "binary32", RNG, 1)
    with pytest.raises(TypeError, match="expected one dtype"):
        OPS.index_put(x, [torch.tensor([0])], two[:1].double(), "binary32", RNG, 1)
    with pytest.raises(IndexError, match="a mask of shape"):
        OPS.index_put(x, [torch.ones(4, dtype=torch.bool)], two, "binary32", RNG, 1)


def test_scatters_of_nothing_and_into_nothing() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert torch.equal(OPS.scatter_add(torch.ones(3), 0, none, torch.ones(0), "binary32", RNG, 1), torch.ones(3))
    assert OPS.index_put(torch.ones(3, 0), [torch.tensor([1])], torch.ones(1, 0), "binary32", RNG, 1).shape == (3, 0)
    assert OPS.scatter_add(torch.tensor(1.0), 0, torch.tensor(0), torch.tensor(2.0), "binary32", RNG, 1).item() == 3.0


def test_a_model_that_scatters_and_multiplies_is_rounded() -> None:
    class Net(torch.nn.Module):
        def forward(self, x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
            rows = x[i]
            added = x.index_add(0, i, rows), torch.index_put(x, (i,), rows, accumulate=True)
            return *added, x.scatter_add(0, i[:, None].expand(-1, 6), rows), x.prod(1), x.prod(), x.cumprod(0)

    x, i = torch.randint(1, 4, (5, 6)).float(), torch.tensor([4, 0, 4])
    compiled = fxround.compile(Net(), fxround.Policy.parse("stochastic"), strict=True)
    for got, want in zip(compiled(x, i), Net()(x, i), strict=True):
        assert torch.equal(got, want), "integers: every order is exact"
    text = compiled.graph_text()
    assert all(f"fxround.{name}" in text for name in ("scatter_add", "index_put", "prod", "cumprod"))


def added_in_turn(x: Tensor, index: Tensor, rows: Tensor) -> Any:
    """x with rows added at index by binary32 additions, in the order of the rows."""
    found = x.detach().numpy().copy()
    for place, row in zip(index.reshape(-1).tolist(), rows.detach().reshape(-1, x.shape[1]).numpy(), strict=True):
        found[place] += row
    return found


def test_index_add_and_an_embeddings_gradient_add_in_the_order_of_their_source() -> None:
    tokens, x, rows = torch.arange(600).reshape(4, 150) * 7 % 5, values((5, 6), 1), values((600, 6), 2)
    order = torch.randperm(600, generator=torch.Generator().manual_seed(1))
    assert (added_in_turn(x, tokens, rows) != added_in_turn(x, tokens.reshape(-1)[order], rows[order])).any()

    class Add(torch.nn.Module):
        def forward(self, x: Tensor, i: Tensor, rows: Tensor) -> Tensor:
            return x.index_add(0, i, rows)

    got = fxround.compile(Add(), "reproducible")(x, tokens.reshape(-1), rows)
    same(got, added_in_turn(x, tokens, rows))
    embedding = torch.nn.Embedding(5, 6)
    fxround.compile(embedding, "reproducible")(tokens).backward(rows.reshape(4, 150, 6))
    assert embedding.weight.grad is not None
    same(embedding.weight.grad, added_in_turn(torch.zeros(5, 6), tokens, rows))
    bag = torch.nn.EmbeddingBag(5, 6, mode="sum")
    found = fxround.compile(bag, "reproducible")(tokens)
    bags = torch.arange(4).repeat_interleave(150)
    same(found.detach(), added_in_turn(torch.zeros(4, 6), bags, bag.weight[tokens]))
    found.backward(rows[:4])
    assert bag.weight.grad is not None
    same(bag.weight.grad, added_in_turn(torch.zeros(5, 6), tokens, rows[:4].repeat_interleave(150, 0)))


@pytest.mark.parametrize("length", [63, 64, 200])
def test_a_statistic_of_a_row_meets_its_row(length: int) -> None:
    """One number repeated along the innermost dimension, in blocks within a row and across rows."""
    for dtype in STORAGES:
        x, y = values((9, length), 1, dtype), values((9, 1), 2, dtype)
        program = f"t0 = sub(x0, x1) @ {FORMAT_OF[dtype]}"
        want = OPS.pointwise([x, y.expand(9, length).contiguous()], program, dtype, RNG, 1)
        same(OPS.pointwise([x, y], program, dtype, RNG, 1), stored(want))
