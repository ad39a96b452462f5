"""Faults of accumulators: every kernel flips the bits that the specification flips, step by step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from kernel_operands import DRAW, KEY, OPS, RNG, same, stored, values
from product_operands import threads
from rationals import add, fma, mul
from torch import Tensor, nn

import fxround
from fxround import Policy, PolicyError, Rule, UnsupportedRounding
from fxround.faults.accumulators import count_faults
from fxround.graph.dialect import Matmul
from fxround.graph.dialect.reductions import Cumsum, Sum
from fxround.graph.dialect.scatters import ScatterAdd
from fxround.kernels.contractions import contract_kernel
from fxround.kernels.reductions import cumprod_kernel, cumsum_kernel, prod_kernel, scatter_kernel, sum_kernel
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.arithmetic.flipping import word_of
from fxround.numerics.arithmetic.scalar import Function, param
from fxround.numerics.faults import Faults, words_per_bit
from fxround.numerics.formats import FORMATS
from fxround.numerics.formats.encodings import Encoding
from fxround.numerics.modes import Rounding
from fxround.numerics.orders import Order
from fxround.numerics.specification.exact import round_float
from fxround.numerics.specification.exact_faults import flip_step, word
from fxround.runtime import reference
from fxround.runtime.cpu.code import instruction_set
from fxround.runtime.cpu.llvm.engine import instruction_sets
from fxround.runtime.run import run_product

BINARY32 = Rounding.parse("binary32")
# Every type of accumulator and kind of format: with infinities, without, in full range; modes that draw; chunks.
ACCUMULATORS = (
    "binary32 faults=significand:0.1,exponent:0.05,sign:0.05",
    "binary32/stochastic faults=any:0.2",
    "binary64 faults=any:0.3",
    "binary64/stochastic faults=exponent:0.3",
    "bfloat16 faults=any:0.2",
    "bfloat16/up_down faults=exponent:0.1",
    "binary16/toward_zero/saturate faults=any:0.3",
    "e4m3fn/nearest_even/saturate faults=any:0.2",
    "e5m2/stochastic faults=exponent:0.2",
    "fixed(10,4)/toward_negative/wrap faults=significand:0.2,sign:0.1",
    "bfloat16 chunk=3 combine=binary32 faults=significand:0.2",
)
OF_SUMS = [a for a in ACCUMULATORS if "chunk" not in a]


class Stream:
    """The words of one element of one chain, in the order of the formula."""

    def __init__(self, number: int) -> None:
        self.streams = reference.Streams(np.array([number]), KEY, used=True)

    def draw(self) -> int:
        return int(self.streams.draw()[0])


def flipped(value: float, rounding: Rounding, how: Accumulation, word: int) -> float:
    assert how.faults is not None
    return flip_step(value, rounding.format, how.faults, word)


def step(a: float, b: float, acc: float, rounding: Rounding, how: Accumulation, stream: Stream) -> float:
    """acc = F(R(a b + acc)), with one word."""
    drawn = stream.draw()
    return flipped(fma(a, b, acc, rounding, True, drawn), rounding, how, drawn)


def contraction(a: Any, b: Any, how: Accumulation, stream: Stream) -> float:
    acc, total = 0.0, 0.0
    for k, (x, y) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
        acc = step(x, y, acc, how.step, how, stream)
        if how.combine is not None and ((k + 1) % (how.chunk or 1) == 0 or k + 1 == len(a)):
            total, acc = step(acc, 1.0, total, how.combine, how, stream), 0.0
    return round_float(acc if how.combine is None else total, BINARY32)


def specified(function: Any, shape: tuple[int, ...]) -> Any:
    return np.array([function(i) for i in range(math.prod(shape))], np.float32).reshape(shape)


@pytest.mark.part(
    without=(
        "binary32 faults=significand:0.1,exponent:0.05,sign:0.05",
        "bfloat16 chunk=3 combine=binary32 faults=significand:0.2",
        "binary64 faults=any:0.3",
        "e4m3fn/nearest_even/saturate faults=any:0.2",
    )
)
@pytest.mark.parametrize("text", ACCUMULATORS)
def test_products_flip_as_the_specification_says(text: str) -> None:
    how, a, b = Accumulation.parse(text), values((1, 7, 11), 1, special=True), values((1, 11, 37), 2)
    kernel = contract_kernel(how, BINARY32, ("f32", "f32"), "f32")
    want = specified(lambda i: contraction(a[0, i // 37], b[0, :, i % 37], how, Stream(i)), (1, 7, 37))
    same(torch.from_numpy(reference.contract(kernel, a.numpy(), b.numpy(), KEY)), want)
    # The loops differ between instruction sets, the roundings and flips do not.
    for name in instruction_sets() if text in (ACCUMULATORS[0], ACCUMULATORS[-1]) else ("host",):
        with instruction_set(name), threads(2):
            same(run_product(kernel, a, b, 0, DRAW), want)


@pytest.mark.part(3)
@pytest.mark.parametrize("text", OF_SUMS)
def test_sums_and_prefixes_flip_as_the_specification_says(text: str) -> None:
    how, x = Accumulation.parse(text), values((5, 14), 3, special=True)
    rows = x.tolist()

    def lanes(i: int) -> float:
        streams = [Stream(4 * i + c) for c in range(4)]
        acc = [0.0] * 4
        for k, value in enumerate(rows[i]):
            acc[k % 4] = step(value, 1.0, acc[k % 4], how.step, how, streams[k % 4])
        for width in (2, 1):
            for c in range(width):
                acc[c] = step(acc[c + width], 1.0, acc[c], how.step, how, streams[c])
        return round_float(acc[0], BINARY32)

    def prefixes(i: int, product: bool) -> list[float]:
        stream, acc, found = Stream(i), float(product), []
        for value in rows[i]:
            drawn = stream.draw()
            made = mul(acc, value, how.step) if product else add(acc, value, how.step, True)
            if how.step.mode.random_bits:
                made = math.nan if product else fma(acc, 1.0, value, how.step, True, drawn)
            acc = flipped(made, how.step, how, drawn)
            found.append(round_float(acc, BINARY32))
        return found

    sums = sum_kernel(Order.parse("lanes:4"), how, BINARY32, "f32", "f32")
    args = (text, "binary32/nearest_even/inf", RNG, DRAW.node)
    cases: list[tuple[Any, Any, Any]] = [
        (specified(lanes, (5,)), reference.reduce(sums, stored(x), KEY), OPS.sum(x, [1], False, "lanes:4", *args)),  # type: ignore[arg-type]
        (
            np.array([prefixes(i, False) for i in range(5)], np.float32),
            reference.scan(cumsum_kernel(how, BINARY32, "f32", "f32"), stored(x), KEY),
            OPS.cumsum(x, 1, *args),
        ),
    ]
    if not how.step.mode.random_bits:
        products = np.array([prefixes(i, True) for i in range(5)], np.float32)
        cases += [
            (
                products,
                reference.scan(cumprod_kernel(how, BINARY32, "f32", "f32"), stored(x), KEY),
                OPS.cumprod(x, 1, *args),
            ),
            (
                products[:, -1],
                reference.reduce(prod_kernel(how, BINARY32, "f32", "f32"), stored(x), KEY),
                OPS.prod(x, [1], False, *args),
            ),
        ]
    for want, in_numpy, compiled in cases:
        same(torch.from_numpy(in_numpy), want)
        same(compiled, want)


@pytest.mark.parametrize("text", OF_SUMS)
def test_scatters_flip_as_the_specification_says(text: str) -> None:
    how, x, source = Accumulation.parse(text), values((6,), 5), values((40,), 6, special=True)
    places = torch.randint(0, 6, (40,), generator=torch.Generator().manual_seed(0))
    streams, acc = [Stream(i) for i in range(6)], x.tolist()
    for place, value in zip(places.tolist(), source.tolist(), strict=True):
        acc[place] = step(acc[place], 1.0, value, how.step, how, streams[place])
    want = np.array([round_float(v, BINARY32) for v in acc], np.float32)
    kernel = scatter_kernel(how, "f32")
    same(torch.from_numpy(reference.scatter(kernel, x.numpy(), places.numpy(), source.numpy(), KEY)), want)
    same(OPS.scatter_add(x, 0, places, source, text, RNG, DRAW.node), want)


def test_words_of_faults_are_murmurhash3s_finalizer() -> None:
    """Its published value for 1, and the same words in the IR; each fault has a bijection of its own."""
    assert word(1 ^ 0x9E3779B9, 0) == 0x514E28B7
    random = param("random", "u32")
    drawn = np.random.default_rng(0).integers(0, 1 << 32, 1000, np.uint32)
    for number in (0, 1, 3):
        found = Function("word", (random,), (word_of(random, number),)).evaluate(drawn)[0]
        assert found.tolist() == [word(int(r), number) for r in drawn]


@pytest.mark.parametrize("mode", ["nearest_even", "stochastic"])
def test_counts_are_within_six_sigma(mode: str) -> None:
    """A prefix sum of ones whose sign flips differs from the one before by another number than one.

    All but a flip of zero, which no sum reaches: the walk begins at one million.
    """
    p, rows, length = 1e-3, 2000, 500
    x = torch.ones(rows, length).index_fill(1, torch.tensor(0), 2.0**20)
    sums = OPS.cumsum(x, 1, f"binary32/{mode} faults=sign:{p}", "binary32/nearest_even/inf", RNG, DRAW.node)
    hits, n = (sums.diff(dim=1) != 1).sum(0), rows * (length - 1)
    assert abs(int(hits.sum()) - n * p) < 6 * math.sqrt(n * p * (1 - p))
    assert abs(int(hits[: length // 2].sum()) - n * p / 2) < 6 * math.sqrt(n * p / 2)


def hits(how: Accumulation, rounding: Rounding, word_: int) -> list[int]:
    """Whether each fault of the accumulation hits a step of this rounding with this word."""
    assert how.flips is not None
    numbers = [(words_per_bit(f, Encoding(rounding.format).field(f.part)[1]), f) for f in how.flips.faults]
    counts = [Encoding(rounding.format).field(f.part)[1] for _, f in numbers]
    return [int(word(word_, i) < q * n) for i, ((q, _), n) in enumerate(zip(numbers, counts, strict=True))]


@pytest.mark.part(2)
@pytest.mark.parametrize("text", [ACCUMULATORS[0], ACCUMULATORS[-1], "bfloat16/stochastic faults=any:0.3,sign:1.0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_flips_of_accumulators_are_counted_as_the_specification_draws_them(text: str, dtype: torch.dtype) -> None:
    """Of products, batches of them, sums, prefixes and scatters: the words of each step, and the chunks' too."""
    how, rng, node = Accumulation.parse(text), RNG, DRAW.node
    assert how.flips is not None
    exact, places = str(BINARY32), torch.randint(0, 6, (40,), generator=torch.Generator().manual_seed(0))
    rounding = {torch.float32: exact, torch.float64: "binary64", torch.bfloat16: "bfloat16"}[dtype]
    a, b = torch.randn(3, 4, 10).to(dtype), torch.randn(3, 10, 5).to(dtype)
    chain = [how.step] * 10

    def words(number: int, steps: list[Rounding]) -> list[list[int]]:
        stream = Stream(number)
        return [hits(how, step, stream.draw()) for step in steps]

    chunked = chain
    if how.chunk is not None and how.combine is not None:
        chunked = [r for k in range(10) for r in ((how.step, how.combine) if k % 3 == 2 or k == 9 else (how.step,))]
    cases: list[tuple[Any, list[list[int]]]] = [
        (Matmul(a, b, text, rounding, rng, node), [w for i in range(60) for w in words(i, chunked)]),
        (Matmul(a[0], b[0], text, rounding, rng, node), [w for i in range(20) for w in words(i, chunked)]),
    ]
    if how.chunk is None:
        rows = a.reshape(12, 10)
        both = [words(2 * i + c, [how.step] * (5 + (c == 0))) for i in range(12) for c in range(2)]
        counts = [places.tolist().count(p) for p in range(6)]
        cases += [
            (Sum(rows, [1], False, "lanes:2", text, rounding, rng, node), [w for chain in both for w in chain]),
            (Cumsum(rows, 1, text, rounding, rng, node), [w for i in range(12) for w in words(i, chain)]),
            (
                ScatterAdd(torch.zeros(6, dtype=dtype), 0, places, torch.ones(40, dtype=dtype), text, rng, node),
                [w for p in range(6) for w in words(p, [how.step] * counts[p])],
            ),
        ]
    for call, expected in cases:
        assert count_faults(call, None) == len(expected), call.name
        for number in range(len(how.flips.faults)):
            assert count_faults(call, number) == sum(step[number] for step in expected), call.name


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.Softmax(-1), nn.Linear(32, 8))


def faulty(accumulate: str, **selectors: Any) -> Policy:
    return Policy("faulty", (Rule(rounding="dtype"), Rule(operator="contraction", accumulate=accumulate, **selectors)))


def bits(x: Tensor) -> list[int]:
    return x.view(torch.int32).flatten().tolist()


def test_a_policy_flips_accumulators_and_p_0_changes_no_bit() -> None:
    x = torch.rand(16, 64)
    clean = fxround.compile(net(), faulty("wide"), seed=1)(x)
    zero = fxround.compile(net(), faulty("wide faults=any:0"), seed=1)
    assert bits(zero(x)) == bits(clean) and not zero.policy.draws
    compiled = fxround.compile(net().eval(), faulty("wide faults=significand:1e-3"), seed=1)
    with threads(1):
        one = compiled(x)
    with threads(2):
        assert bits(compiled(x)) == bits(one) != bits(clean)
    assert bits(compiled.reseed(1, 1)(x)) != bits(one)
    found = compiled.flips(x)
    assert found.changed == sum(a != b for a, b in zip(bits(compiled(x)), bits(clean), strict=True)) > 0
    assert [row.value for row in found.flips] == [*["accumulators of aten.mm.default"] * 2]
    assert [row.elements for row in found.flips] == [16 * 32 * 64, 16 * 8 * 32]
    assert all(row.flipped > 0 and abs(row.flipped - row.expected) < 6 * math.sqrt(row.expected) for row in found.flips)
    assert not compiled.leaks()
    assert Policy.from_toml(compiled.policy.to_toml()) == compiled.policy


def test_faults_of_both_passes_are_those_of_their_rules() -> None:
    """Only the gradient's products are hit: results are clean, gradients are not."""
    x, policy = torch.rand(16, 64), faulty("binary32 faults=exponent:1e-2", direction="backward")
    made = []
    for chosen in (policy, faulty("binary32")):
        model = net()
        result = fxround.compile(model, chosen, seed=3)(x)
        result.backward(torch.ones_like(result))
        made.append((result, model[0].weight.grad))
    assert bits(made[0][0]) == bits(made[1][0]) and bits(made[0][1]) != bits(made[1][1])


def test_what_has_no_faults_is_refused() -> None:
    with pytest.raises(PolicyError, match="no field is named 'mantissa'"):
        Rule(accumulate="binary32 faults=mantissa:0.1")
    with pytest.raises(PolicyError, match="accumulate"):
        Rule(accumulate="native faults=any:0.1")
    with pytest.raises(PolicyError, match="commas separate faults"):
        Rule(accumulate="binary32 faults=any:0.1 sign:0.1")
    with pytest.raises(ValueError, match=r"elements of scaled.* cannot overflow to 'inf'; they can: saturate"):
        fxround.round(torch.rand(3), "int8/nearest_even/inf")
    x = torch.rand(4, 64)
    for policy in (
        faulty("nf4 faults=sign:0.1"),
        faulty("binary32 faults=any:1e-12"),
        Policy("exact", (Rule(rounding="dtype", accumulate="wide faults=any:0.1", order="exact"),)),
    ):
        with pytest.raises(UnsupportedRounding):
            fxround.compile(net(), policy)(x)


def test_texts_are_kept() -> None:
    text = "binary32/nearest_even/inf chunk=4 combine=binary32/nearest_even/inf faults=significand:1e-06,sign:0.5"
    assert str(Accumulation.parse(text)) == text
    assert Accumulation.parse(text).faults == Faults.parse("significand:1e-6 sign:.5")
    assert FORMATS["binary32"] == Accumulation.parse(text).step.format
