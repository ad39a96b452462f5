"""Which roundings of a chain draw, and in which order: docs/numerics.md, section 6, by a reader over Python integers.

The reader shares the specification of a rounding (``round_exact``) with the package, and nothing that draws. Operands
have so few bits that every sum is exact in binary64, where the modes that draw begin.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround import Policy, Rounding, Rule
from fxround.numerics.arithmetic.randomness import iteration_function
from fxround.numerics.specification.exact import round_exact

SEED, SAMPLE = 2**61 + 12345, 7
WORD, OUTPUT, STATE = 2**32, 2**64, 2**52


def philox(counter: int, draw: int, node: int) -> int:
    """(word 1) 2^32 + word 0 of Philox4x32-10."""
    (c0, c1, c2, c3), (k0, k1) = (counter, draw << 16, node, SAMPLE), (SEED % WORD, SEED // WORD)
    for i in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        r0, r1 = (k0 + i * 0x9E3779B9) % WORD, (k1 + i * 0xBB67AE85) % WORD
        c0, c1, c2, c3 = (p1 // WORD) ^ c1 ^ r0, p1 % WORD, (p0 // WORD) ^ c3 ^ r1, p0 % WORD
    return c1 * WORD + c0


def splitmix(seed: int, number: int) -> int:
    z = (seed + (number + 1) * 0x9E3779B97F4A7C15) % OUTPUT
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % OUTPUT
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % OUTPUT
    return z ^ (z >> 31)


def words(node: int, element: int) -> Iterator[int]:
    """The draws of the stream of an element, as section 6 says."""
    x = splitmix(philox(0, 0xFFFF, node), element) % STATE
    while True:
        yield x >> 20
        x = (0xCAC74EE5 * x + 0x9E3779B97F4A7) % STATE


def rounded(value: Fraction, rounding: str, word: int = 0) -> Fraction:
    return Fraction(round_exact(value, value < 0, Rounding.parse(rounding), word))


def drawn(value: Fraction, rounding: str, stream: Iterator[int], draws: bool) -> Fraction:
    return rounded(value, rounding, next(stream) if draws else 0)


def few_bits(*shape: int) -> Tensor:
    """Multiples of 1/64 between -4 and 4."""
    return torch.randint(-256, 257, shape, generator=torch.Generator().manual_seed(2)) / 64.0


def run(function: Any, inputs: tuple[Tensor, ...], rule: Rule, operator: str) -> tuple[list[Any], int]:
    """The results of a function under a rule, and the number of the operator's node."""

    class Model(nn.Module):
        def forward(self, *operands: Tensor) -> Tensor:
            result: Tensor = function(*operands)
            return result

    compiled = fxround.compile(Model(), Policy("streams", (rule,))).reseed(SEED, SAMPLE)
    result = compiled(*inputs).tolist()
    (number,) = re.findall(rf"fxround\.{operator}\.default\(.*, (\d+)\)", compiled.graph_text())
    return result, int(number)


# The rounding of a step, that of the store, and whether the store draws.
STORES = [
    ("ieee(5,7)/stochastic:16", "binary32/stochastic", False),
    ("ieee(5,7)/stochastic:16", "ieee(5,9)/stochastic", False),
    ("ieee(5,7)/stochastic:16", "ieee(5,6)/stochastic", True),
    ("ieee(5,7)/stochastic:16", "ieee(5,7)/up_down", True),
    ("ieee(5,7)/stochastic:16", "binary32/stochastic/saturate", True),
    ("ieee(5,7)/stochastic/saturate", "binary32/stochastic/saturate", False),
    ("binary32/stochastic", "binary32/stochastic", True),
    ("bfloat16/stochastic", "bfloat16/stochastic", True),
    ("ieee(5,7)", "binary32/stochastic", False),
    ("ieee(5,7)", "ieee(5,5)/stochastic", True),
]


@pytest.mark.parametrize("step, store, draws", STORES)
def test_a_store_that_can_change_nothing_draws_nothing(step: str, store: str, draws: bool) -> None:
    x = few_bits(3, 20)
    found, node = run(lambda x: x.cumsum(1), (x,), Rule(rounding=store, accumulate=step), "cumsum")
    for i, row in enumerate(x.tolist()):
        stream, acc = words(node, i), Fraction(0)
        for k, value in enumerate(row):
            acc = drawn(acc + Fraction(value), step, stream, "stochastic" in step)
            assert found[i][k] == drawn(acc, store, stream, draws)


@pytest.mark.parametrize("step, store, draws", [*STORES[:3], STORES[-1]])
def test_an_exact_sum_draws_for_its_rounding_and_then_for_the_store(step: str, store: str, draws: bool) -> None:
    x = few_bits(5, 30)
    rule = Rule(rounding=store, accumulate=step, order="exact")
    found, node = run(lambda x: x.sum(1), (x,), rule, "sum")
    for i, row in enumerate(x.tolist()):
        stream = words(node, i)
        total = drawn(sum(map(Fraction, row), Fraction(0)), step, stream, "stochastic" in step)
        assert found[i] == drawn(total, store, stream, draws)


@pytest.mark.parametrize(
    "step, product, combine",
    [
        ("ieee(5,7)/stochastic", "", "binary32"),
        ("ieee(5,7)", "", "ieee(5,9)/stochastic_equal"),
        ("ieee(5,7)/stochastic_equal", "", "ieee(5,9)/stochastic_equal"),
        ("ieee(5,7)/up_down", "", "ieee(5,9)"),
        ("ieee(5,9)", "ieee(5,7)/stochastic:16", "ieee(5,9)"),
    ],
)
def test_every_step_and_combination_of_a_chunked_chain_draws_if_one_does(step: str, product: str, combine: str) -> None:
    a, b = few_bits(3, 11), few_bits(11, 2)
    accumulate = f"{step} {f'product={product} ' if product else ''}chunk=4 combine={combine}"
    found, node = run(torch.mm, (a, b), Rule(rounding="binary32", accumulate=accumulate), "matmul")
    for i, row in enumerate(a.tolist()):
        for j, column in enumerate(b.T.tolist()):
            stream, acc, total = words(node, 2 * i + j), Fraction(0), Fraction(0)
            for k, (left, right) in enumerate(zip(row, column, strict=True)):
                word, exact = next(stream), Fraction(left) * Fraction(right)
                # A product takes the lower half of a step's word.
                part = rounded(exact, product, word << 16 & 0xFFFFFFFF) if product else exact
                acc = rounded(part + acc, step, word)
                if (k + 1) % 4 == 0 or k + 1 == len(row):
                    acc, total = Fraction(0), rounded(acc + total, combine, next(stream))
            assert found[i][j] == total


@pytest.mark.parametrize("mode", ["stochastic_equal", "up_down"])
def test_thirty_two_steps_with_a_coin_each_share_a_word(mode: str) -> None:
    a, b = few_bits(2, 70), few_bits(70, 2)
    found, node = run(torch.mm, (a, b), Rule(rounding="binary32", accumulate=f"ieee(5,7)/{mode}"), "matmul")
    for i, row in enumerate(a.tolist()):
        for j, column in enumerate(b.T.tolist()):
            stream, acc, word = words(node, 2 * i + j), Fraction(0), 0
            for k, (left, right) in enumerate(zip(row, column, strict=True)):
                if k % 32 == 0:
                    word = next(stream)
                    word ^= word >> 16
                acc = rounded(Fraction(left) * Fraction(right) + acc, f"ieee(5,7)/{mode}", word << k % 32 & 0xFFFFFFFF)
            assert found[i][j] == acc


@pytest.mark.parametrize("mode, width", [("stochastic", 32), ("stochastic:7", 16), ("stochastic:1", 1), ("up_down", 1)])
def test_elements_of_a_map_share_an_output(mode: str, width: int) -> None:
    x = few_bits(100)
    found, node = run(lambda x: x * 1.25, (x,), Rule(rounding=f"ieee(5,4)/{mode}"), "pointwise")
    share, seed = 64 // width, philox(0, 0, node)
    for i, value in enumerate(x.tolist()):
        word = (splitmix(seed, i // share) >> width * (i % share)) % 2**width << (32 - width)
        assert found[i] == rounded(Fraction(value) * Fraction(5, 4), f"ieee(5,4)/{mode}", word)


def test_a_mask_of_dropout_is_a_draw_of_32_bits_under_every_policy() -> None:
    compiled = fxround.compile(nn.Dropout(0.3).train(), "reproducible").reseed(SEED, SAMPLE)
    kept = compiled(torch.ones(200)) != 0
    (number,) = re.findall(r"identity\(x0\) .*torch\.float32, (\d+)\)", compiled.graph_text())
    seed, p = philox(0, 0, int(number)), int(Fraction(float(np.float32(0.7))) * WORD)
    drawn = [splitmix(seed, i // 2) >> 32 * (i % 2) & (WORD - 1) for i in range(200)]
    assert kept.tolist() == [bits + p >= WORD for bits in drawn]


@pytest.mark.parametrize("iteration, node", [(0, 0), (1, 5), (2**31, 17)])
def test_an_iteration_has_a_seed_of_its_own(iteration: int, node: int) -> None:
    key = (np.uint32(word) for word in (SEED % WORD, SEED // WORD, SAMPLE, node))
    low, high = iteration_function().evaluate(np.uint64(iteration), *key)
    assert int(high) * WORD + int(low) == philox(iteration, 0xFFFE, node) % 2**63
