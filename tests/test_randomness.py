"""Random bits: the published Philox vectors, Philox and MWC64X over Python integers, and the layout of words."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxround.numerics.randomness import (
    BLOCK,
    STREAM_DRAW,
    STRIDE,
    philox_function,
    random_function,
    stream_functions,
)

MASK = 2**32 - 1
A = 4294883355

# Random123 1.14, tests/kat_vectors: philox4x32, 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (MASK, MASK, MASK, MASK),
        (MASK, MASK),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

u32 = st.integers(0, MASK)
u48 = st.integers(0, 2**48 - 1)


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10 as its paper states it, over Python integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for i in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        r0, r1 = (k0 + i * 0x9E3779B9) & MASK, (k1 + i * 0xBB67AE85) & MASK
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ r0, p1 & MASK, (p0 >> 32) ^ c3 ^ r1, p0 & MASK
    return c0, c1, c2, c3


def word(element: int, draw: int, seed_low: int, seed_high: int, sample: int, node: int) -> int:
    """The layout that the module states, over Python integers."""
    counter = (element // BLOCK) * STRIDE + element % STRIDE
    block = philox((counter & MASK, (counter >> 32) + (draw << 16), node, sample), (seed_low, seed_high))
    return block[(element % BLOCK) // STRIDE]


@pytest.mark.parametrize("counter, key, result", KNOWN_ANSWERS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], result: tuple[int, ...]) -> None:
    assert tuple(int(w) for w in philox_function().evaluate(*counter, *key)) == result
    assert philox(counter, key) == result


@given(st.lists(u48, min_size=1, max_size=20), st.integers(0, STREAM_DRAW - 1), st.tuples(u32, u32, u32, u32))
def test_words_of_elements(elements: list[int], draw: int, key: tuple[int, int, int, int]) -> None:
    got = random_function(draw).evaluate(np.array(elements, np.uint64), *key)[0]
    assert got.tolist() == [word(e, draw, *key) for e in elements]


def test_bits_do_not_depend_on_order_or_neighbours() -> None:
    function, key = random_function(3), (1, 2, 3, 4)
    elements = np.arange(1000, dtype=np.uint64)
    whole = function.evaluate(elements, *key)[0]
    shuffled = np.random.default_rng(0).permutation(1000)
    np.testing.assert_array_equal(function.evaluate(elements[shuffled], *key)[0], whole[shuffled])
    assert [int(function.evaluate(np.uint64(i), *key)[0]) for i in (0, 17, 63, 64, 999)] == whole[
        [0, 17, 63, 64, 999]
    ].tolist()


def test_no_two_uses_share_a_philox_input() -> None:
    """Elements, draws and streams map to distinct (counter, draw) pairs and words: nothing is used twice."""
    elements = [*range(300), 2**40, 2**48 - 1]
    places = {((e // BLOCK) * STRIDE + e % STRIDE, (e % BLOCK) // STRIDE) for e in elements}
    assert len(places) == len(elements)
    assert max(c for c, _ in places) < 2**48


@pytest.mark.parametrize("changed", range(4))
def test_every_part_of_the_key_matters(changed: int) -> None:
    key = [5, 6, 7, 8]
    elements = np.arange(256, dtype=np.uint64)
    before = random_function().evaluate(elements, *key)[0]
    key[changed] += 1
    # 256 pairs of independent words: P(one equal pair) < 2^-24.
    assert not (before == random_function().evaluate(elements, *key)[0]).any()


def test_draws_of_an_element_differ() -> None:
    elements = np.arange(256, dtype=np.uint64)
    # 256 pairs of independent words: P(one equal pair) < 2^-24.
    assert not (
        random_function(0).evaluate(elements, 1, 2, 3, 4)[0] == random_function(1).evaluate(elements, 1, 2, 3, 4)[0]
    ).any()


@given(u48, st.tuples(u32, u32, u32, u32))
def test_streams_follow_mwc64x(element: int, key: tuple[int, int, int, int]) -> None:
    start, advance = stream_functions()
    seed_low, seed_high, sample, node = key
    words = philox((element & MASK, (element >> 32) + (STREAM_DRAW << 16), node, sample), (seed_low, seed_high))
    x, carry = words[0], words[1] & 0x7FFFFFFF | 1
    state = start.evaluate(np.uint64(element), *key)[0]
    assert int(state) == carry << 32 | x
    for _ in range(5):
        bits, state = advance.evaluate(state)
        assert int(bits) == x ^ carry
        total = A * x + carry
        x, carry = total & MASK, total >> 32
        assert int(state) == total


def test_streams_never_start_at_a_fixed_point() -> None:
    """The fixed points of (x, c) -> A x + c are 0 and A 2^32 - 1. No start state can be either: its c is odd, so the
    state is not 0, and c < 2^31 <= A - 1, the c of the other; later states stay clear of both because the step is a
    bijection on states below A 2^32."""
    start, advance = stream_functions()
    fixed = np.array([0, A * 2**32 - 1], np.uint64)
    np.testing.assert_array_equal(advance.evaluate(fixed)[1], fixed)
    state = start.evaluate(np.arange(4096, dtype=np.uint64), 1, 2, 3, 4)[0]
    assert ((state >> np.uint64(32)) % np.uint64(2) == 1).all()
    assert (state >> np.uint64(32)).max() < 2**31 < A - 1
    for _ in range(64):
        state = advance.evaluate(state)[1]
        assert not np.isin(state, fixed).any()
        assert (state < np.uint64(A * 2**32 - 1)).all()


def test_streams_of_one_node_are_distinct() -> None:
    start, _ = stream_functions()
    state = start.evaluate(np.arange(20000, dtype=np.uint64), 1, 2, 3, 4)[0]
    # 20000 states of 62 random bits: P(a collision) < 2e8 / 2^62 < 2^-34.
    assert np.unique(state).size == state.size
