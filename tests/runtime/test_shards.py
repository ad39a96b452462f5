"""Orders of shards: sums and products in a tree that several processes can share out, encoding for encoding."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from cuda_host import HostLauncher, assert_same, prepare
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_operands import BINARY32, DRAW, KEY, layouts, same, stored, values
from torch import Tensor, nn

import fxround
from fxround.errors import PolicyError
from fxround.kernels.contractions import contract_kernel
from fxround.kernels.kinds import Contract, Reduce
from fxround.kernels.reductions import sum_kernel
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.modes import MODES, Rounding
from fxround.numerics.orders import Order, Shard, shards_of
from fxround.numerics.specification.exact import round_exact
from fxround.runtime import reference
from fxround.runtime.contractions import Product, Right
from fxround.runtime.cpu.code import instruction_set
from fxround.runtime.cpu.llvm.engine import instruction_sets
from fxround.runtime.cpu.reduction import run_reduce
from fxround.runtime.cuda import contraction, reduction
from fxround.runtime.cuda.launcher import launching
from fxround.runtime.run import run_product

FIXED = [f"binary32/{mode}" for mode in MODES if Rounding.parse(f"binary32/{mode}").mode.deterministic]
DRAWN = ["binary32/stochastic", "binary32/up_down", "bfloat16/stochastic:5", "binary32 product=binary32/stochastic"]
OTHERS = ["bfloat16", "binary16/toward_zero/saturate", "tf32/to_odd", "binary32 product=bfloat16"]


def product_of(accumulate: str, shards: int) -> Contract:
    how = replace(Accumulation.parse(accumulate), shards=shards)
    return contract_kernel(how, BINARY32, ("f32", "f32"), "f32")


def sum_of(accumulate: str, order: str) -> Reduce:
    kernel = sum_kernel(Order.parse(order), Rounding.parse(accumulate), BINARY32, "f32", "f32")
    assert isinstance(kernel, Reduce)
    return kernel


# ---- the definition ----


@given(st.integers(0, 300), st.sampled_from([1, 2, 4, 8, 64]))
def test_a_part_of_the_length_has_the_shards_of_its_own(length: int, shards: int) -> None:
    """The rows of a half are those of an order of half as many shards, which is what a process must know."""
    rows = shards_of(length, shards)
    sizes = [row.end - row.begin for row in rows]
    assert [rows[0].begin, *(row.end for row in rows)] == [*(row.begin for row in rows), length]
    assert max(sizes) - min(sizes) <= 1 and (length == 0 or min(sizes) > 0) and len(rows) == max(1, min(length, shards))
    if shards > 1:
        half = -(-length // 2)
        first = [(row.number, row.begin, row.end) for row in shards_of(half, shards // 2)]
        second = [
            (row.number + shards // 2, row.begin + half, row.end + half)
            for row in shards_of(length - half, shards // 2)
        ]
        assert [(row.number, row.begin, row.end) for row in rows] == first + (second if half < length else [])


def test_shards_wait_on_the_levels_of_the_tree() -> None:
    assert shards_of(4, 4) == (Shard(0, 0, 1, 0, 0), Shard(1, 1, 2, 0, 1), Shard(2, 2, 3, 0, 0), Shard(3, 3, 4, 0, 2))
    # The last shard has no elements, so that the third sum is added as it is.
    assert shards_of(3, 4) == (Shard(0, 0, 1, 0, 0), Shard(1, 1, 2, 0, 1), Shard(2, 2, 3, 1, 2))
    assert shards_of(0, 4) == (Shard(0, 0, 0, 2, 2),)


@pytest.mark.parametrize("text", ["shards:3", "shards:128", "shards:4/exact", "shards:2/shards:2", "shards:"])
def test_an_order_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="shards"):
        Order.parse(text)


def test_texts_of_orders() -> None:
    assert str(Order.parse("shards")) == "shards:8/lanes:16" and str(Order.parse("shards:1/lanes:4")) == "lanes:4"
    for text in ("shards:2/sequential", "shards:64/lanes:2"):
        assert str(Order.parse(text)) == text
    assert str(Accumulation.parse("bfloat16 shards=4")) == "bfloat16/nearest_even/inf shards=4"


# ---- rational numbers: the specification, which shares no code with the kernels ----


def rounded(x: Fraction, rounding: Rounding) -> Fraction:
    return Fraction(round_exact(x, x < 0, rounding))


def tree(terms: list[Fraction], shards: int, chain: Callable[[list[Fraction]], Fraction], r: Rounding) -> Fraction:
    """The formula of docs/numerics.md."""
    if shards == 1 or len(terms) <= 1:
        return chain(terms)
    half = -(-len(terms) // 2)
    return rounded(tree(terms[:half], shards // 2, chain, r) + tree(terms[half:], shards // 2, chain, r), r)


@pytest.mark.part(4)
@pytest.mark.parametrize("accumulate", [*FIXED, "bfloat16", "bfloat16/toward_negative"])
@settings(max_examples=15)
@given(length=st.integers(0, 70), shards=st.sampled_from([2, 4, 8]), seed=st.integers(0, 1000))
def test_sums_and_products_are_the_formula_over_rational_numbers(
    accumulate: str, length: int, shards: int, seed: int
) -> None:
    r = Rounding.parse(accumulate)

    def chain(terms: list[Fraction]) -> Fraction:
        total = Fraction(0)
        for term in terms:
            total = rounded(total + term, r)
        return total

    a, b = values((1, 1, length), seed), values((1, length, 1), seed + 1)
    factors = [(Fraction(x), Fraction(y)) for x, y in zip(a.flatten().tolist(), b.flatten().tolist(), strict=True)]
    got = run_product(product_of(accumulate, shards), a, b, 0, DRAW)
    assert got.item() == tree([x * y for x, y in factors], shards, chain, r)
    got = run_reduce(sum_of(accumulate, f"shards:{shards}/sequential"), a[0], DRAW)
    assert got.item() == tree([x for x, _ in factors], shards, chain, r)


# ---- the reference, step by step, of every mode ----


@pytest.mark.part(8)
@pytest.mark.parametrize("accumulate", [*(f"binary32/{mode}" for mode in MODES), *DRAWN, *OTHERS])
@pytest.mark.parametrize("shards", [2, 8])
def test_products_equal_the_reference(accumulate: str, shards: int) -> None:
    kernel = product_of(accumulate, shards)
    # Rows read in place, packed tiles with ends, several blocks in a shard, fewer steps than shards, no steps.
    for batch, rows, length, columns in (
        (2, 3, 11, 5),
        (1, 33, 70, 40),
        (1, 9, 450 * shards, 3),
        (1, 2, 5, 7),
        (1, 9, 0, 4),
    ):
        a, b = values((batch, rows, length), 1, special=True), values((batch, length, columns), 2)
        want = reference.contract(kernel, a.numpy(), b.numpy(), KEY)
        same(run_product(kernel, a, b, 0, DRAW), want)
        same(run_product(kernel, a, b.transpose(1, 2).contiguous().transpose(1, 2), 0, DRAW), want)


@pytest.mark.part(10)
@pytest.mark.parametrize("accumulate", [*(f"binary32/{mode}" for mode in MODES), "bfloat16/up_down", *OTHERS[:3]])
@pytest.mark.parametrize("order", ["shards:2/lanes:4", "shards:8/lanes:16", "shards:8/sequential"])
def test_sums_equal_the_reference(accumulate: str, order: str) -> None:
    kernel = sum_of(accumulate, order)
    for count, length in ((1, 300), (3, 17), (40, 5), (150, 33), (20, 0)):
        want = reference.reduce(kernel, stored(values((count, length), length)), KEY)
        for x in layouts((count, length), length, torch.float32) if count * length else [torch.empty(count, 0)]:
            same(run_reduce(kernel, x, DRAW, [1]), want)
            same(run_reduce(kernel, x.t(), DRAW, [0]), want)


@pytest.mark.part(2)
@pytest.mark.parametrize("isa", instruction_sets())
def test_every_instruction_set_has_the_same_bits(isa: str) -> None:
    x, a, b = values((40, 75), 1), values((1, 30, 75), 2), values((1, 75, 37), 3)
    with instruction_set(isa):
        for accumulate in ("binary32", "binary32/stochastic", "binary32/up_down"):
            total, product = sum_of(accumulate, "shards:8/lanes:8"), product_of(accumulate, 8)
            same(run_reduce(total, x, DRAW, [1]), reference.reduce(total, x.numpy(), KEY))
            same(run_reduce(total, x.t(), DRAW, [0]), reference.reduce(total, x.numpy(), KEY))
            same(run_product(product, a, b, 0, DRAW), reference.contract(product, a.numpy(), b.numpy(), KEY))


def test_texts_of_a_gpu_have_the_same_bits(compiler: str, tmp_path: Path) -> None:
    host = HostLauncher(tmp_path, compiler, seed=5)
    orders = ("shards:8/lanes:16", "shards:2/sequential", "shards:4/lanes:2")
    steps = ("binary32", "binary32/stochastic", "bfloat16/up_down")
    sums = [
        (sum_of(how, order), x) for how in steps for order in orders for x in (values((9, 75), 1), values((5, 3), 2))
    ]
    products = [
        (product_of(how, shards), a, b)
        for how, shards in (("binary32", 8), ("binary32/stochastic", 4), ("binary32/up_down", 8))
        for a, b in ((values((1, 20, 150), 1), values((1, 150, 37), 2)), (values((2, 3, 5), 3), values((2, 5, 2), 4)))
    ]

    def product(kernel: Contract, a: Tensor, b: Tensor) -> Tensor:
        size = [*a.shape[:2], b.shape[2]]
        return contraction.run_product(Product(kernel, a, b, Right.matrices(b.shape, b.stride()), 0, DRAW, size))

    def run() -> list[Tensor]:
        along = [reduction.run_reduce(kernel, x, DRAW, [1]) for kernel, x in sums]
        across = [reduction.run_reduce(kernel, x.t().contiguous(), DRAW, [0]) for kernel, x in sums]
        return [*along, *across, *(product(*operands) for operands in products)]

    prepare(host, run)
    with launching(host):
        got = run()
    want = [reference.reduce(kernel, x.numpy(), KEY) for kernel, x in sums] * 2
    want += [reference.contract(kernel, a.numpy(), b.numpy(), KEY) for kernel, a, b in products]
    for result, expected in zip(got, want, strict=True):
        assert_same(result, expected)


# ---- what the order is for ----


def joined(parts: list[tuple[int, float]], r: Rounding) -> float:
    """Add the sums of equal parts of the shards, (elements, sum) each, as the tree does."""
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [(m + n, float(rounded(Fraction(a) + Fraction(b), r)) if n else a) for (m, a), (n, b) in pairs]
    return parts[0][1]


@pytest.mark.part(3)
@pytest.mark.parametrize("accumulate", ["binary32", "binary32/toward_positive", "bfloat16", "tf32/to_odd"])
@pytest.mark.parametrize("processes", [1, 2, 4, 8])
@pytest.mark.parametrize("length", [3, 9, 64, 200])
def test_the_sums_of_parts_give_the_bits_of_the_whole(accumulate: str, processes: int, length: int) -> None:
    """Each process has its part of k, and knows the number of shards that are left for it, nothing else."""
    r, own = Rounding.parse(accumulate), 8 // processes
    a, b, x = values((1, 2, length), 1), values((1, length, 3), 2), values((4, length), 3)
    bounds = [(row.begin, row.end) for row in shards_of(length, processes)]
    places = {row.number: bound for row, bound in zip(shards_of(length, processes), bounds, strict=True)}
    parts = [places.get(number, (0, 0)) for number in range(processes)]
    whole = run_product(product_of(accumulate, 8), a, b, 0, DRAW)
    products = [run_product(product_of(accumulate, own), a[:, :, i:j], b[:, i:j], 0, DRAW) for i, j in parts]
    order = "sequential" if own == 1 else f"shards:{own}/sequential"
    total = run_reduce(sum_of(accumulate, "shards:8/sequential"), x, DRAW, [1])
    sums = [run_reduce(sum_of(accumulate, order), x[:, i:j], DRAW, [1]) for i, j in parts]
    sizes = [j - i for i, j in parts]
    for every, each in ((whole, products), (total, sums)):
        roots = zip(*(part.flatten().tolist() for part in each), strict=True)
        got = [joined(list(zip(sizes, root, strict=True)), r) for root in roots]
        assert got == every.flatten().tolist()


# ---- policies ----


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.depthwise = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3, groups=6)
        self.norm, self.linear = nn.LayerNorm(96), nn.Linear(96, 40)

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(self.convolution(x).relu()).flatten(1)
        return torch.softmax(self.linear(self.norm(y)), 1).square().mean()


@pytest.mark.parametrize("how", ["nearest_even", "stochastic"])
def test_a_policy_has_the_same_bits_fused_and_node_by_node_forward_and_backward(how: str) -> None:
    rule = fxround.Rule(rounding=f"dtype/{how}", accumulate=f"wide/{how}", order="shards:4/lanes:8")
    net, x = Net(), torch.rand(70, 3, 8, 8)
    results = []
    for fuse in (True, False):
        compiled = fxround.compile(net, fxround.Policy("shards", (rule,)), seed=3, fuse=fuse)
        compiled.reseed(3, sample=0)
        loss = compiled(x)
        results.append([loss.detach(), *torch.autograd.grad(loss, list(compiled.parameters()))])
    for fused, alone in zip(*results, strict=True):
        same(fused, alone.numpy())


def test_the_preset_says_its_shards_and_differs_from_reproducible_in_sums_and_products_alone() -> None:
    net, x = Net(), torch.rand(2, 3, 8, 8)
    sharded = fxround.compile(net, "reproducible_sharded", example_inputs=(x,))
    plain = fxround.compile(net, "reproducible", example_inputs=(x,))
    pairs = list(zip(sharded.graph.graph.nodes, plain.graph.graph.nodes, strict=True))
    changed = [(str(a.target), str(a.args)) for a, b in pairs if str(a.args) != str(b.args)]
    kinds = {target.split(".")[1] for target, _ in changed}
    assert kinds == {"sum", "convolution", "matmul"}
    assert all("shards:8/lanes:16" in args or "binary32/nearest_even/inf shards=8" in args for _, args in changed)
    assert not sharded.coverage().unrounded


def test_chunks_in_shards_are_refused() -> None:
    with pytest.raises(ValueError, match="chunks or of shards"):
        Accumulation.parse("bfloat16 chunk=8 combine=binary32 shards=2")
    rule = fxround.Rule(accumulate="bfloat16 chunk=8 combine=binary32", order="shards:2/lanes:4")
    with pytest.raises(PolicyError, match="chunks or of shards"):
        fxround.compile(nn.Linear(4, 4), fxround.Policy("both", (rule,)))(torch.rand(2, 4))
    with pytest.raises(PolicyError, match="set order="):
        fxround.Rule(accumulate="binary32 shards=2")
    assert math.isfinite(fxround.compile(lambda v: v.sum(), fxround.Policy("both", (rule,)))(torch.rand(2, 4)).item())
