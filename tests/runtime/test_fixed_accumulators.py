"""Accumulators in fixed point: every kernel steps as the specification and as integers do."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_operands import DRAW, KEY, OPS, RNG, same, stored, values
from product_operands import threads
from rationals import fma, mul
from torch import Tensor, nn

import fxround
from fxround import Policy, PolicyError, Rule, UnsupportedRounding
from fxround.kernels.contractions import contract_kernel
from fxround.kernels.kinds import Reduce
from fxround.kernels.reductions import cumprod_kernel, cumsum_kernel, scatter_kernel, sum_kernel
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.formats import Format
from fxround.numerics.modes import MODES, Rounding
from fxround.numerics.orders import Order
from fxround.numerics.specification.exact import round_exact, round_float
from fxround.runtime import reference
from fxround.runtime.cpu.code import instruction_set
from fxround.runtime.cpu.llvm.engine import instruction_sets
from fxround.runtime.run import run_product

BINARY32 = Rounding.parse("binary32")
# Both overflows, long and short words, quanta above and below one, with and without a sign, and every mode.
ACCUMULATORS = (
    *(f"fixed(8,3)/{mode}/{end}" for mode in MODES for end in ("saturate", "wrap")),
    *(
        "fixed(16,8)",
        "fixed(2,0)/nearest_even/wrap",
        "fixed(20,-3)/toward_negative/wrap",
        "ufixed(9,3)/nearest_even/wrap",
    ),
    *("fixed(48,30)/toward_negative/wrap", "fixed(48,30)/nearest_away/wrap", "fixed(52,20)/toward_zero", "ufixed(8,2)"),
)
OPTIONS = (
    "fixed(8,3)/nearest_even/wrap chunk=3 combine=fixed(12,3)",
    "bfloat16 chunk=4 combine=fixed(10,3)/toward_positive/wrap",
    "fixed(16,8) product=fixed(12,6)/toward_zero",
    "fixed(16,4)/nearest_away/wrap product=bfloat16",
)

# Those that are compiled too; the others differ from them in the mode and in constants, which NumPy has tested.
COMPILED = ("fixed(16,8)", "fixed(8,3)/toward_negative/wrap", "fixed(8,3)/stochastic/wrap", OPTIONS[0])


def operands(shape: tuple[int, ...], seed: int) -> Tensor:
    """Numbers of ordinary size, with a few that are huge, tiny or not finite."""
    x = values(shape, seed, special=True)
    x.view(-1)[::7] *= 2.0**30
    x.view(-1)[::11] *= 2.0**-40
    return x


class Words:
    """The random words of one element of a chain; a coin of 32 steps is one bit of a word."""

    def __init__(self, number: int, coins: bool = False) -> None:
        self.streams, self.coins, self.drawn = reference.Streams(np.array([number]), KEY, used=True), coins, 0
        self.word = 0

    def draw(self) -> int:
        if not self.coins:
            return int(self.streams.draw()[0])
        if self.drawn % 32 == 0:
            self.word = int(reference.coins_function().evaluate(self.streams.draw())[0][0])
        self.drawn += 1
        return self.word << (self.drawn - 1) % 32 & 0xFFFFFFFF


def contraction(a: Any, b: Any, how: Accumulation, words: Words) -> float:
    acc, total = 0.0, 0.0
    for k, (x, y) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
        if how.product is not None:
            x, y = mul(x, y, how.product), 1.0
        acc = fma(x, y, acc, how.step, True, words.draw() if how.random else 0)
        if how.combine is not None and ((k + 1) % (how.chunk or 1) == 0 or k + 1 == len(a)):
            total, acc = fma(acc, 1.0, total, how.combine, True), 0.0
    return round_float(acc if how.combine is None else total, BINARY32)


@pytest.mark.part(7)
@pytest.mark.parametrize("text", [*ACCUMULATORS, *OPTIONS])
def test_products_step_as_the_specification_says(text: str) -> None:
    how, a, b = Accumulation.parse(text), operands((1, 3, 11), 1), values((1, 11, 19), 2)
    kernel = contract_kernel(how, BINARY32, ("f32", "f32"), "f32")
    specified = [contraction(a[0, i // 19], b[0, :, i % 19], how, Words(i, kernel.coins)) for i in range(57)]
    want = np.array(specified, np.float32).reshape(1, 3, 19)
    same(torch.from_numpy(reference.contract(kernel, a.numpy(), b.numpy(), KEY)), want)
    for name in instruction_sets() if text in COMPILED else ():
        with instruction_set(name), threads(2):
            same(run_product(kernel, a, b, 0, DRAW), want)


@pytest.mark.parametrize("text", ["fixed(8,3)", "fixed(8,3)/stochastic/wrap"])
def test_sums_prefixes_and_scatters_step_as_the_specification_says(text: str) -> None:
    how, x = Accumulation.parse(text), operands((3, 13), 3)
    rows = x.tolist()

    def prefixes(i: int, product: bool) -> list[float]:
        words, acc, found = Words(i), float(product), []
        for value in rows[i]:
            word = words.draw() if how.random else 0
            factors = (acc, value, 0.0) if product else (value, 1.0, acc)
            acc = fma(*factors, how.step, True, word)
            found.append(round_float(acc, BINARY32))
        return found

    args = (text, "binary32/nearest_even/inf", RNG, DRAW.node)
    sums, products = (np.array([prefixes(i, p) for i in range(3)], np.float32) for p in (False, True))
    same(OPS.cumsum(x, 1, *args), sums)
    same(OPS.cumprod(x, 1, *args), products)
    same(OPS.prod(x, [1], False, *args), products[:, -1])
    for made, want, run in ((cumsum_kernel, sums, reference.scan), (cumprod_kernel, products, reference.scan)):
        same(torch.from_numpy(run(made(how, BINARY32, "f32", "f32"), stored(x), KEY)), want)
    lanes = sum_kernel(Order.parse("lanes:4"), how, BINARY32, "f32", "f32")
    assert isinstance(lanes, Reduce)
    same(OPS.sum(x, [1], False, "lanes:4", *args), reference.reduce(lanes, stored(x), KEY))
    # What a scatter adds to need not be in the accumulator's format.
    to, index = operands((5,), 4), torch.arange(39) % 5
    words, total = [Words(i) for i in range(5)], to.tolist()
    for place, value in zip(index.tolist(), x.reshape(-1).tolist(), strict=True):
        word = words[place].draw() if how.random else 0
        total[place] = fma(value, 1.0, total[place], how.step, True, word)
    want = np.array(total, np.float32)
    same(OPS.scatter_add(to, 0, index, x.reshape(-1), text, RNG, DRAW.node), want)
    kernel = scatter_kernel(how, "f32")
    same(torch.from_numpy(reference.scatter(kernel, stored(to), index.numpy(), stored(x.reshape(-1)), KEY)), want)


@settings(max_examples=200)
@given(
    mode=st.sampled_from([m for m in MODES.values() if not m.random_bits]),
    wraps=st.booleans(),
    dest=st.floats(width=32, allow_nan=False, allow_infinity=False),
    source=st.floats(width=32, allow_nan=False, allow_infinity=False),
    fraction=st.integers(-30, 30),
)
def test_any_two_numbers_are_added_exactly(mode: Any, wraps: bool, dest: float, source: float, fraction: int) -> None:
    text = f"fixed(9,{fraction})/{mode}/{'wrap' if wraps else 'saturate'}"
    kernel = scatter_kernel(Rounding.parse(text), "f32")
    exact = Fraction(dest) + Fraction(source)
    q = Fraction(2) ** -fraction
    found = kernel.step.evaluate(np.float64(dest), np.float32(source), np.uint32(0))[0]
    assert float(found) == round_exact(exact, exact < 0, Rounding.parse(text))
    if mode.name == "toward_negative":
        floor = exact // q  # what an adder of any length and a shift yield
        word = (floor + 256) % 512 - 256 if wraps else min(max(floor, -256), 255)
        assert float(found) == float(word * q)


@pytest.mark.parametrize("text", ["fixed(16,8)/nearest_odd", "ufixed(8,4)/to_odd/wrap"])
def test_values_of_a_tensor_are_rounded_as_an_accumulator_steps(text: str) -> None:
    """One addition to zero is ``fxround.round``, but for the sign of a zero."""
    x = operands((1, 4096), 5)
    x[~x.isfinite()] = 0.25
    want = fxround.round(x, text) + 0.0
    assert torch.equal(OPS.cumsum(x.reshape(-1, 1), 1, text, "binary32", RNG, 1).reshape(1, -1), want)
    assert torch.equal(fxround.round(x, Rounding.parse(text)) + 0.0, want)
    fmt = Rounding.parse(text).format
    assert fmt.span is not None
    assert fmt.contains(want.numpy()).all() and not fmt.contains([fmt.span[1] * 2, 0.1, math.inf]).any()


def test_a_layer_multiplies_as_integers_of_a_digital_signal_processor_do() -> None:
    """Operands of 8 bits, products of 16, an accumulator of 16 that wraps: NumPy's int16 has the same numbers."""
    layer, rng = nn.Linear(40, 9, bias=False), np.random.default_rng(6)
    x, w = (rng.integers(-128, 128, shape).astype(np.int16) for shape in ((5, 40), (9, 40)))
    layer.weight.data = torch.from_numpy(w).float() / 16
    with np.errstate(over="ignore"):
        want = np.add.reduce(x[:, None] * w[None], axis=-1, dtype=np.int16)
    policy = Policy("dsp", (Rule(rounding="dtype", accumulate="fixed(16, 8)/nearest_even/wrap"),))
    compiled = fxround.compile(layer, policy)
    assert np.array_equal(compiled(torch.from_numpy(x).float() / 16).detach().numpy() * 256, want)
    assert "fixed(16,8)/nearest_even/wrap" in str(compiled.summary())
    saturated = fxround.compile(layer, Policy("s", (Rule(accumulate="fixed(32,8)"),)))
    want = x.astype(np.int64) @ w.T.astype(np.int64)  # stock: NumPy's integers
    assert np.array_equal(saturated(torch.from_numpy(x).float() / 16).detach().numpy() * 256, want)


def test_what_cannot_be_an_accumulator_is_refused_with_its_reason() -> None:
    for text, said in (
        ("mxfp8", "a scale depends on values that are not known before a sum has ended"),
        ("int8:scale=0.1", "a power of two"),
        ("int32/stochastic", r"int32 is scaled, .* is fixed\(32,0\), .*; fixed\(32,0\)/nearest_even/wrap wraps"),
        ("uint64", r"is ufixed\(52,0\), .*; ufixed\(48,0\)/nearest_even/wrap wraps"),
        ("fixed(24,12) product=int8", r"is fixed\(8,0\)"),
        ("fixed(53,3)", "expected 2 to 52 bits"),
        ("fixed(16,8)/nearest_even/inf", "it can: saturate, wrap"),
        ("fixed(16,8)-flush", "no subnormals"),
    ):
        with pytest.raises(PolicyError, match=said):
            Rule(accumulate=text)
    with pytest.raises(ValueError, match=r"write it alone, or int2 to int16"):
        fxround.round(torch.rand(4), "scaled(fixed(8,4);32,e8m0fnu,floor)")
    for text, dtype, said in (
        ("fixed(16,8)/nearest_even/wrap", torch.float64, "use float32 operands"),
        ("fixed(50,8)/nearest_even/wrap", torch.float32, "at most 48 bits can wrap"),
    ):
        layer, x = nn.Linear(4, 4, dtype=dtype), torch.rand(2, 4, dtype=dtype)
        with pytest.raises(UnsupportedRounding, match=said):
            fxround.compile(layer, Policy("p", (Rule(accumulate=text),)))(x)
    with pytest.raises(ValueError, match="no steps that could wrap"):
        OPS.sum(torch.rand(4), [0], False, "exact", "fixed(16,8)/nearest_even/wrap", "binary32", RNG, 1)


def test_formats_of_fixed_point_know_what_they_contain() -> None:
    fixed, short, unsigned = map(Format.parse, ("fixed(16,8)", "fixed(8, 4)", "ufixed(8,4)"))
    assert (fixed.span, unsigned.span) == ((-128.0, 128 - 2.0**-8), (0.0, 16 - 2.0**-4))
    assert short.within(fixed) and not fixed.within(short) and not short.within(unsigned) and unsigned.within(fixed)
    assert not Format.parse("binary16").within(fixed) and fixed.within(Format.parse("binary32"))
    assert "from 0 to 15.9375" in unsigned.describe()
