"""Contractions, encoding for encoding: against the reference and a second computation, whatever shapes, strides,
neighbours, threads and instruction sets."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from product_operands import KINDS, OPS, RNE, encodings, same, threads, values
from torch import Tensor

import fxround  # noqa: F401  registers the operators
from fxround.kernels.contractions import contract_kernel
from fxround.kernels.kinds import Contract
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.arithmetic.forms.truncation import neighbour, up_or_down
from fxround.numerics.arithmetic.rounding import round_expr
from fxround.numerics.arithmetic.scalar import Function, param
from fxround.numerics.formats import FORMATS
from fxround.numerics.modes import MODES, Rounding
from fxround.runtime import reference
from fxround.runtime.contractions import Product, Right
from fxround.runtime.cpu.code import instruction_set
from fxround.runtime.cpu.contraction import begin_product
from fxround.runtime.cpu.llvm.engine import instruction_sets
from fxround.runtime.draw import Draw
from fxround.runtime.run import run_product

DRAW = Draw(seed=0x1234_5678_9ABC_DEF0, sample=3, node=17)
KEY = (0x9ABC_DEF0, 0x1234_5678, 3, 17)
ACCUMULATORS = (
    *(f"binary32/{mode}" for mode in MODES),
    *(f"bfloat16/{mode}" for mode in ("nearest_even", "to_odd", "stochastic", "up_down")),
    "tf32",
    "ieee(8,23)",
    "ieee(8,2)/nearest_zero",
    "binary16/stochastic",
    "e5m2/up_down/saturate",
    "bfloat16 chunk=7 combine=binary32",
    "binary32/stochastic product=bfloat16",
)
# Those with a quick equal: see numerics.arithmetic.forms.truncation.
DIRECTED = (
    "binary32/toward_zero",
    "binary32/toward_positive",
    "binary32/toward_negative",
    "bfloat16/nearest_even",
    "bfloat16/nearest_away",
    "bfloat16/nearest_zero",
    "bfloat16/nearest_odd",
    "bfloat16/toward_zero",
    "bfloat16/toward_positive",
    "bfloat16/toward_negative",
    "tf32/nearest_even",
    "ieee(8,23)/nearest_even",
    "ieee(8,2)/nearest_zero",
    "binary32/up_down",
)


def kernel_of(accumulate: str) -> Contract:
    return contract_kernel(Accumulation.parse(accumulate), Rounding.parse(RNE), ("f32", "f32"), "f32")


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sliced": lambda x: torch.nn.functional.pad(x, (3, 2, 1, 1))[:, 1:-1, 3:-2],
    "strided": lambda x: torch.stack([x, x + 1], dim=3)[..., 0],
    "batch last": lambda x: x.permute(1, 2, 0).contiguous().permute(2, 0, 1),
}


@pytest.mark.part(7)
@pytest.mark.parametrize("accumulate", ACCUMULATORS)
@settings(max_examples=4)
@given(data=st.data())
def test_products_equal_the_reference(accumulate: str, data: st.DataObject) -> None:
    size = st.integers(0, 36)
    batch, rows, length, columns = data.draw(st.tuples(st.integers(1, 3), size, size, size))
    left, right = (LAYOUTS[data.draw(st.sampled_from(sorted(LAYOUTS)))] for _ in range(2))
    kind, seed = data.draw(st.sampled_from(KINDS)), data.draw(st.integers(0, 1000))
    a, b = values((batch, rows, length), seed, kind), values((batch, length, columns), seed + 1, kind)
    kernel = kernel_of(accumulate)
    with threads(data.draw(st.integers(1, 3))):
        got = run_product(kernel, left(a), right(b), 0, DRAW)
    same(got, reference.contract(kernel, a.numpy(), b.numpy(), KEY))


@pytest.mark.part(5)
@pytest.mark.parametrize("accumulate", [RNE, "binary32/stochastic", "binary32/up_down", "bfloat16/nearest_even"])
@pytest.mark.parametrize("length", [191, 192, 193, 1025, 5000])
def test_long_chains_equal_the_reference(accumulate: str, length: int) -> None:
    a, b = values((1, 3, length), 1), values((1, length, 2), 2)
    kernel = kernel_of(accumulate)
    want = reference.contract(kernel, a.numpy(), b.numpy(), KEY)
    same(run_product(kernel, a, b, 0, DRAW), want)
    same(run_product(kernel, a, b.transpose(1, 2).contiguous().transpose(1, 2), 0, DRAW), want)


@pytest.mark.part(13)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulate", DIRECTED)
def test_the_quick_kernel_counts_only_where_it_equals_the_general_one(accumulate: str, kind: str) -> None:
    kernel = kernel_of(accumulate)
    assert kernel.quick is not None
    a, b = values((1, 37, 230), 1, kind), values((1, 230, 70), 2, kind)
    for left, right in ((a, b), (a[:, :3, :9], b[:, :9, :50])):
        same(
            run_product(kernel, left, right, 0, DRAW),
            run_product(replace(kernel, quick=None), left, right, 0, DRAW),
        )


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("accumulate", ["binary32/up_down", "binary64/stochastic"])
def test_one_infinity_is_noticed(accumulate: str, isa: str) -> None:
    """Wherever it is, in products that are packed and in others: code that may not be trusted says so."""
    dtype, store = (torch.float64, "f64") if "64" in accumulate else (torch.float32, "f32")
    kernel = contract_kernel(Accumulation.parse(accumulate), Rounding.parse("binary32"), (store, store), store)
    shapes = ((1, 3, 9, 40), (1, 37, 50, 70))
    with instruction_set(isa):
        for batch, rows, length, columns in shapes:
            a, b = values((batch, rows, length), 1).to(dtype), values((batch, length, columns), 2).to(dtype)
            for place in (0, length // 2, length - 1):
                left = a.clone()
                left[0, rows // 2, place] = math.inf
                same(run_product(kernel, left, b, 0, DRAW), run_product(replace(kernel, quick=None), left, b, 0, DRAW))


def test_the_quick_up_down_is_not_trusted_where_binary32_ends() -> None:
    """Sums of few quanta, which are representable if they are subnormal, and sums that end near the maximum."""
    kernel = kernel_of("binary32/up_down")
    rng = np.random.default_rng(1)
    quanta = np.ldexp(rng.integers(-3, 4, (1, 300, 12)).astype(np.float32), rng.integers(-149, -124, (1, 300, 12)))
    largest = rng.choice(np.float32([3.4028235e38, -3.4028235e38, 1.7e38, 1e31, 0]), (1, 300, 12))
    ones = torch.ones(1, 12, 17)
    for a in (torch.from_numpy(quanta), torch.from_numpy(largest)):
        got = run_product(kernel, a, ones, 0, DRAW)
        same(got, reference.contract(kernel, a.numpy(), ones.numpy(), KEY))


def test_the_step_of_up_down_reaches_the_neighbour_of_every_significand() -> None:
    x, random = param("x", "f32"), param("random", "u32")
    step = Function("step", (x, random), (neighbour(x, random),))
    values = np.arange(1 << 23, (1 << 24) + 1, dtype=np.float32)
    for sign, coin, end in ((1, 1 << 31, math.inf), (1, 0, 0), (-1, (1 << 32) - 1, -math.inf), (-1, 0, 0)):
        got = step.evaluate(sign * values, np.uint32(coin))[0]
        assert np.array_equal(got, np.nextafter(sign * values, np.float32(end)))


OTHER_SETS = (
    "posit(16,2)/stochastic",
    "nf4/nearest_odd",
    "binary8p1se",
    "e4m3fnuz/stochastic_c:1",
    "bfloat16/stochastic_b:1",
)


@pytest.mark.part(2)
@pytest.mark.parametrize("accumulate", [*OTHER_SETS, f"table({','.join(map(str, range(-60, 80)))})/stochastic"])
def test_accumulators_in_tables_posits_and_few_random_bits_equal_the_reference(accumulate: str) -> None:
    kernel = kernel_of(accumulate)
    a, b = values((1, 5, 23), 1), values((1, 23, 19), 2)
    want = reference.contract(kernel, a.numpy(), b.numpy(), KEY)
    # The loops differ between instruction sets, the roundings do not.
    for isa in instruction_sets() if accumulate in OTHER_SETS[:1] else ("host",):
        with instruction_set(isa):
            same(run_product(kernel, a, b, 0, DRAW), want)


@pytest.mark.part(5)
@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("accumulate", ["binary32/toward_negative", "bfloat16", "binary32/up_down", RNE])
def test_quick_kernels_equal_the_reference_on_every_instruction_set(accumulate: str, isa: str) -> None:
    kernel = kernel_of(accumulate)
    with instruction_set(isa):
        for kind in KINDS:
            a, b = values((1, 9, 20), 5, kind), values((1, 20, 35), 6, kind)
            same(
                run_product(kernel, a, b, 0, DRAW),
                reference.contract(kernel, a.numpy(), b.numpy(), KEY),
            )


@pytest.mark.part(9)
@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("kind", ["normal", "cancelling", "special", "large", "small"])
@pytest.mark.parametrize(
    "accumulate",
    ["binary64/stochastic", "binary64/stochastic:5", "binary64/stochastic_b:9 chunk=7 combine=binary64/stochastic"],
)
def test_binary64_draws_the_same_without_a_look_at_the_range(accumulate: str, kind: str, isa: str) -> None:
    """Of the kernel for operands in the middle of the exponents, the general one, and the reference."""
    rng, shape = np.random.default_rng(3), (2, 9, 20)
    a, b = rng.standard_normal(shape), rng.standard_normal((2, 20, 35))
    if kind == "cancelling":
        a[:, :, 1::2], b[:, 1::2] = -a[:, :, ::2], b[:, ::2] * (1 + rng.choice([0, 2.0**-52, 2.0**-45], (2, 10, 35)))
    if kind == "special":
        a[rng.random(shape) < 0.05] = math.inf
        a[rng.random(shape) < 0.05] = math.nan
        a[rng.random(shape) < 0.3] = -0.0
    if kind in ("large", "small"):  # some products of which only together with the other operand
        powers = {"large": (390, 600), "small": (-600, -370)}[kind]
        a *= np.exp2(rng.integers(*powers, shape))
        b *= np.exp2(np.where(rng.random(b.shape) < 0.5, rng.integers(*powers, b.shape), 0))
    for loads in (("f64", "f64"), ("f32", "f64")) if kind != "large" else (("f64", "f64"),):
        kernel = contract_kernel(Accumulation.parse(accumulate), Rounding.parse("binary64"), loads, "f64")
        assert kernel.quick is not None and kernel.quick.bounded
        left = torch.from_numpy(a).to(torch.float32 if loads[0] == "f32" else torch.float64)
        right = torch.from_numpy(b)
        with instruction_set(isa):
            got = run_product(kernel, left, right, 0, DRAW)
            same(got, run_product(replace(kernel, quick=None), left, right, 0, DRAW))
            same(got[:1, :2], run_product(kernel, left[:1, :2], right[:1], 0, DRAW))
        if isa == instruction_sets()[0]:
            same(got, reference.contract(kernel, left.numpy(), right.numpy(), KEY))


@pytest.mark.part(5)
@pytest.mark.parametrize("isa", [isa for isa in instruction_sets() if isa != "sse2"])
@pytest.mark.parametrize(
    "accumulate", [RNE, "binary32/toward_zero", "binary32/stochastic", "bfloat16 chunk=7 combine=binary32"]
)
def test_a_product_is_the_same_with_and_without_packing(accumulate: str, isa: str) -> None:
    """Few rows or few steps are not packed (``llvm.direct``); columns that are not contiguous always are."""
    kernel = kernel_of(accumulate)
    with instruction_set(isa):
        shapes = ((1, 1, 700, 150), (3, 2, 9, 33), (2, 13, 17, 16), (1, 8, 1, 1), (2, 5, 40, 70))
        for batch, rows, length, columns in shapes:
            for kind in ("normal", "special"):
                a, b = values((batch, rows, length), 3, kind), values((batch, length, columns), 4, kind)
                where = Right.matrices(b.shape, b.stride())
                assert where.k_step is not None
                size = (where.batch, a.shape[1], where.n_offsets.numel())
                packed = begin_product(Product(kernel, a, b, replace(where, k_step=None), 0, DRAW, size)).finish()
                same(begin_product(Product(kernel, a, b, where, 0, DRAW, size)).finish(), packed)


@pytest.mark.parametrize("accumulate", [RNE, "binary32/up_down", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_times_a_vector_is_the_reference(accumulate: str, kind: str) -> None:
    a, b = values((2, 77, 30), 3, kind), values((2, 30, 1), 4, kind)
    want = reference.contract(kernel_of(accumulate), a.numpy(), b.numpy(), KEY)
    rng = torch.tensor([DRAW.seed, DRAW.sample])
    same(OPS.matmul(a, b, accumulate, RNE, rng, DRAW.node), want)
    same(OPS.matmul(a.transpose(1, 2).contiguous().transpose(1, 2), b, accumulate, RNE, rng, DRAW.node), want)


def test_an_exact_zero_is_positive_in_every_mode() -> None:
    a, b = torch.tensor([[[1.0, -1.0, 0.0]]]), torch.tensor([[[3.0], [3.0], [-1.0]]])
    for mode in MODES:
        if mode != "up_down":
            got = run_product(kernel_of(f"binary32/{mode}"), a, b, 0, DRAW)
            assert encodings(got).item() == 0, mode


@pytest.mark.parametrize("accumulate", [RNE, "binary32/toward_zero", "bfloat16", "binary32/nearest_away"])
def test_a_row_is_the_same_alone_and_in_company(accumulate: str) -> None:
    """Deterministic modes: the row's number does not matter either."""
    a, b = values((67, 300), 1), values((300, 90), 2)
    rng = torch.tensor([1, 2])

    def product(x: Tensor, y: Tensor) -> Tensor:
        result: Tensor = OPS.matmul(x, y, accumulate, RNE, rng, 1)
        return result

    whole = product(a, b)
    for row in (0, 13, 14, 66):
        same(product(a[row : row + 1], b)[0], whole[row])
        same(product(a[row : row + 1].expand(5, 300), b)[4], whole[row])
        same(product(b.t(), a[row][:, None])[:, 0], whole[row])
    same(product(a[3:50:2], b), whole[3:50:2])
    same(product(a, b[:, 5:6])[:, 0], whole[:, 5])
    same(OPS.matmul(a.expand(3, 67, 300), b.expand(3, 300, 90), accumulate, RNE, rng, 1)[2], whole)


@pytest.mark.parametrize("accumulate", ["binary32/stochastic", "binary32/up_down", "bfloat16/stochastic"])
def test_a_stream_belongs_to_its_element(accumulate: str) -> None:
    """The first rows of a product are those of any longer product, for every division into pieces and threads."""
    a, b = values((300, 200), 1), values((200, 130), 2)
    rng = torch.tensor([1, 2])
    whole = OPS.matmul(a, b, accumulate, RNE, rng, 1)
    for number in (1, 2, 3):
        with threads(number):
            same(OPS.matmul(a, b, accumulate, RNE, rng, 1), whole)
            same(OPS.matmul(a[:7], b, accumulate, RNE, rng, 1), whole[:7])


def windows(x: Tensor, w: Tensor, stride: int, padding: int, dilation: int, groups: int) -> tuple[Tensor, Tensor]:
    """A convolution's operands as the matrices of its definition, (image, group) by (image, group)."""
    images, channels, taps = x.shape[0], x.shape[1] // groups, w.shape[2:]
    columns = torch.nn.functional.unfold(x, taps, dilation, padding, stride)
    right = columns.reshape(images * groups, channels * taps.numel(), -1)
    left = w.reshape(groups, w.shape[0] // groups, -1).repeat(images, 1, 1)
    return left, right


@pytest.mark.part(5)
@pytest.mark.parametrize("accumulate", [RNE, "binary32/stochastic", "binary32/up_down", "bfloat16", "binary16"])
@settings(max_examples=12)
@given(
    images=st.integers(1, 3),
    group=st.sampled_from([(1, 3, 5), (2, 4, 6), (4, 4, 4), (5, 5, 10), (3, 3, 3)]),
    size=st.tuples(st.integers(5, 40), st.integers(5, 40)),
    taps=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    kind=st.sampled_from(["normal", "integers", "special"]),
)
def test_convolutions_are_products_of_their_windows(
    accumulate: str,
    images: int,
    group: tuple[int, int, int],
    size: tuple[int, int],
    taps: tuple[int, int],
    stride: int,
    padding: int,
    dilation: int,
    kind: str,
) -> None:
    groups, channels, out = group
    x, w = values((images, channels, *size), 1, kind), values((out, channels // groups, *taps), 2, kind)
    geometry = ([stride] * 2, [padding] * 2, [dilation] * 2, False, [0, 0], groups)
    rng = torch.tensor([3, 1])
    got = OPS.convolution(x, w, *geometry, accumulate, RNE, rng, 5)
    left, right = windows(x, w, stride, padding, dilation, groups)
    same(got.reshape(-1), OPS.matmul(left, right, accumulate, RNE, rng, 5).reshape(-1))


def test_up_or_down_equals_the_general_rounding() -> None:
    """Every binade that a chain can reach, midpoints and their neighbours, zero, infinities and NaN."""
    x, random = param("x", "f64"), param("random", "u32")
    wide = Rounding(
        FORMATS["binary32"].with_range_of(FORMATS["binary64"]), Rounding.parse("binary32/up_down").mode, "inf"
    )
    quick = Function("quick", (x, random), (up_or_down(x, 24, random),))
    general = Function("general", (x, random), (round_expr(x, wide, random, any_nan=True),))
    rng = np.random.default_rng(1)
    exponents = rng.integers(-900, 900, 20_000)
    kept, lost = (
        rng.integers(2**23, 2**24, 20_000),
        rng.choice([0, 1, 2**27, 2**28 - 1, 2**28, 2**28 + 1, 2**29 - 1], 20_000),
    )
    kept[::7], kept[1::7] = 2**23, 2**24 - 1
    t = np.ldexp((kept * 2**29 + lost).astype(np.float64), exponents - 52) * rng.choice([1, -1], 20_000)
    t[:4] = 0.0, math.inf, -math.inf, math.nan
    bits = rng.integers(0, 2**32, 20_000, dtype=np.uint32)
    got, want = quick.evaluate(t, bits)[0], general.evaluate(t, bits)[0]
    assert np.array_equal(got.view(np.uint64), want.view(np.uint64))


@pytest.mark.parametrize(
    "accumulate, first, expected",
    [
        # The first step gives 1 or 1 + 2 quanta, the second one a neighbour of 1 or 3 more than 1.
        ("binary32/up_down", 1, {0.0, 2.0, 4.0}),
        ("tf32/nearest_even", 0, {1.0}),
        ("ieee(8,23)/nearest_even", 0, {1.0}),
    ],
)
def test_a_sum_next_to_a_midpoint_is_rounded_once(accumulate: str, first: int, expected: set[float]) -> None:
    """An even value + half a quantum + 2^-47 quanta: binary64 rounds the sum to the midpoint, and it is above it."""
    kernel = kernel_of(accumulate)
    quantum = 2.0 ** (1 - Rounding.parse(accumulate).format.precision)
    # 8392705 * 8384513 = 2^46 + 1.
    a = np.float32([[[1 + first * quantum, 8392705 * 2.0**-23]]]).repeat(8, 1)
    b = np.float32([[[1.0], [8384513 * 2.0**-24 * quantum]]]).repeat(64, 2)
    want = reference.contract(kernel, a, b, KEY)
    right = torch.from_numpy(b)
    sides = Right.matrices(right.shape, right.stride())
    got = begin_product(Product(kernel, torch.from_numpy(a), right, sides, 0, DRAW, (1, 8, 64))).finish()
    np.testing.assert_array_equal(encodings(got.numpy()), encodings(want))
    assert set(((want.astype(np.float64) - 1) / quantum).ravel()) == expected
