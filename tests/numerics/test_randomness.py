"""Random bits: published vectors of Philox and SplitMix64, both and the streams over Python integers, the lattices of
the streams' multiplier, and the layout of words."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxround.numerics.arithmetic.randomness import (
    BLOCK,
    GAMMA,
    STREAM_BITS,
    STREAM_DRAW,
    STREAM_INCREMENT,
    STREAM_MULTIPLIER,
    WIDTHS,
    coins_function,
    draw_function,
    mix_function,
    philox_function,
    random_function,
    seed_function,
    shared_function,
    stream_functions,
    width_of,
)
from fxround.numerics.modes import MODES

MASK = 2**32 - 1
MODULUS = 2**52

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


def word(element: int, draw: int, width: int, seed_low: int, seed_high: int, sample: int, node: int) -> int:
    """The layout that the module states, over Python integers."""
    words, share = philox((0, draw << 16, node, sample), (seed_low, seed_high)), 64 // width
    output = splitmix64(words[1] << 32 | words[0], element // share)
    return (output >> width * (element % share)) % 2**width << (32 - width)


@pytest.mark.parametrize("counter, key, result", KNOWN_ANSWERS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], result: tuple[int, ...]) -> None:
    assert tuple(int(w) for w in philox_function().evaluate(*counter, *key)) == result
    assert philox(counter, key) == result


@given(
    st.lists(u48, min_size=1, max_size=20),
    st.integers(0, STREAM_DRAW - 1),
    st.sampled_from(WIDTHS),
    st.tuples(u32, u32, u32, u32),
)
def test_words_of_elements(elements: list[int], draw: int, width: int, key: tuple[int, int, int, int]) -> None:
    array = np.array(elements, np.uint64)
    expected = [word(e, draw, width, *key) for e in elements]
    assert random_function(draw, width).evaluate(array, *key)[0].tolist() == expected
    (seed,) = draw_function().evaluate(*key, draw)
    assert shared_function(width).evaluate(array, seed)[0].tolist() == expected


def test_the_least_width_that_has_the_bits() -> None:
    assert [width_of(bits) for bits in (1, 2, 16, 17, 31, 32)] == [1, 16, 16, 32, 32, 32]
    assert {mode.name: width_of(mode.random_bits) for mode in MODES.values() if mode.random_bits} == {
        "stochastic": 32,
        "stochastic_b": 32,
        "stochastic_c": 32,
        "stochastic_equal": 1,
        "up_down": 1,
    }


def test_bits_do_not_depend_on_order_or_neighbours() -> None:
    function, key = random_function(3), (1, 2, 3, 4)
    elements = np.arange(1000, dtype=np.uint64)
    whole = function.evaluate(elements, *key)[0]
    shuffled = np.random.default_rng(0).permutation(1000)
    np.testing.assert_array_equal(function.evaluate(elements[shuffled], *key)[0], whole[shuffled])
    assert [int(function.evaluate(np.uint64(i), *key)[0]) for i in (0, 17, 63, 64, 999)] == whole[
        [0, 17, 63, 64, 999]
    ].tolist()


@pytest.mark.parametrize("width", WIDTHS)
def test_every_bit_of_an_output_belongs_to_one_element(width: int) -> None:
    """The words of the elements that share an output, put side by side, are the output."""
    elements, key = np.arange(15 * BLOCK, 16 * BLOCK, dtype=np.uint64), (1, 2, 3, 4)
    words = random_function(5, width).evaluate(elements, *key)[0].astype(np.uint64) >> np.uint64(32 - width)
    share = 64 // width
    joined = [sum(int(w) << width * i for i, w in enumerate(row)) for row in words.reshape(-1, share)]
    seed = int(draw_function().evaluate(*key, 5)[0])
    assert joined == [splitmix64(seed, int(elements[0]) // share + n) for n in range(width)]


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
def test_streams_follow_their_recurrence(element: int, key: tuple[int, int, int, int]) -> None:
    start, advance = stream_functions()
    seed_low, seed_high, sample, node = key
    words = philox((0, STREAM_DRAW << 16, node, sample), (seed_low, seed_high))
    seed = words[1] << 32 | words[0]
    assert int(seed_function().evaluate(*key)[0]) == seed
    x = splitmix64(seed, element) % MODULUS
    state = start.evaluate(np.uint64(element), np.uint64(seed))[0]
    for _ in range(5):
        assert int(state) % MODULUS == x
        bits, state = advance.evaluate(state)
        assert int(bits) == x >> 20
        x = (STREAM_MULTIPLIER * x + STREAM_INCREMENT) % MODULUS


def splitmix64(seed: int, number: int) -> int:
    """Output ``number`` of java.util.SplittableRandom's sequence, over Python integers."""
    x = (seed + (number + 1) * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def test_first_states_are_splitmix64s() -> None:
    """The outputs for seed 1234567 that Rosetta Code gives ("Pseudo-random numbers/Splitmix64")."""
    start, _ = stream_functions()
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert start.evaluate(np.arange(5, dtype=np.uint64), np.uint64(1234567))[0].tolist() == known
    assert [splitmix64(1234567, i) for i in range(5)] == known
    states = np.uint64(1234567) + np.arange(1, 6, dtype=np.uint64) * np.uint64(GAMMA)
    assert mix_function().evaluate(states)[0].tolist() == known
    # Words of a map are the halves of the outputs, the lower one first.
    halves = shared_function(32).evaluate(np.arange(10, dtype=np.uint64), np.uint64(1234567))[0].tolist()
    assert halves == [half for x in known for half in (x % 2**32, x >> 32)]


def test_streams_have_the_full_period() -> None:
    """Modulo a power of two, from any state: C odd and A = 1 modulo 4 (Knuth, TAOCP 2, 3.2.1.2, theorem A)."""
    assert 2**STREAM_BITS == MODULUS
    assert STREAM_INCREMENT % 2 == 1
    assert STREAM_MULTIPLIER % 4 == 1


# The densest lattices' constants of Hermite, dimensions 2 to 8.
HERMITE = {
    2: (4 / 3) ** 0.5,
    3: 2 ** (1 / 3),
    4: 2**0.5,
    5: 8 ** (1 / 5),
    6: (64 / 3) ** (1 / 6),
    7: 64 ** (1 / 7),
    8: 2.0,
}


@pytest.mark.parametrize("dimension", HERMITE)
def test_consecutive_states_fill_space_evenly(dimension: int) -> None:
    """The spectral test (Knuth, 3.3.4): planes that hold all points (x[n], x[n+1], ...) are 1/length of the dual's
    shortest vector apart; 1 is the best that any lattice of this density has. RANDU has 0.01 in three dimensions."""
    assert merit(STREAM_MULTIPLIER, MODULUS, dimension) > 0.7


def test_the_spectral_test_finds_bad_multipliers() -> None:
    assert merit(65539, 2**29, 3) < 0.02
    # Knuth's table 3.3.4, line 1: a = 23, m = 10^8 + 1: nu_2 squared is 530.
    assert round((merit(23, 10**8 + 1, 2) * HERMITE[2] ** 0.5) ** 2 * (10**8 + 1)) == 530


def merit(multiplier: int, modulus: int, dimension: int) -> float:
    """The length of the shortest vector of the dual lattice, over the longest that is possible."""
    rows = [[modulus] + [0] * (dimension - 1)]
    rows += [[-pow(multiplier, i, modulus)] + [int(i == j) for j in range(1, dimension)] for i in range(1, dimension)]
    shortest = math.sqrt(shortest_square(reduced(rows)))
    return shortest / (HERMITE[dimension] ** 0.5 * modulus ** (1 / dimension))


def orthogonal(basis: Sequence[Sequence[int]]) -> tuple[list[list[float]], list[float]]:
    """The coefficients of Gram and Schmidt, and the squares of what is left."""
    found: list[list[float]] = []
    mu, squares = [[0.0] * len(basis) for _ in basis], []
    for i, row in enumerate(basis):
        rest = [float(x) for x in row]
        for j, other in enumerate(found):
            mu[i][j] = math.fsum(x * y for x, y in zip(row, other, strict=True)) / squares[j]
            rest = [x - mu[i][j] * y for x, y in zip(rest, other, strict=True)]
        found.append(rest)
        squares.append(math.fsum(x * x for x in rest))
    return mu, squares


def reduced(basis: list[list[int]]) -> list[list[int]]:
    """A basis of the same lattice that is reduced in the sense of Lenstra, Lenstra and Lovasz (1982)."""
    k = 1
    while k < len(basis):
        for j in reversed(range(k)):
            times = round(orthogonal(basis)[0][k][j])
            basis[k] = [x - times * y for x, y in zip(basis[k], basis[j], strict=True)]
        mu, squares = orthogonal(basis)
        if squares[k] >= (0.99 - mu[k][k - 1] ** 2) * squares[k - 1]:
            k += 1
            continue
        basis[k], basis[k - 1] = basis[k - 1], basis[k]
        k = max(k - 1, 1)
    return basis


def shortest_square(basis: list[list[int]]) -> int:
    """The square of the shortest vector, by enumeration (Fincke and Pohst 1985)."""
    mu, squares = orthogonal(basis)
    best = min(sum(x * x for x in row) for row in basis)

    def visit(level: int, chosen: list[int], left: float) -> int:
        if level < 0:
            vector = [sum(c * row[d] for c, row in zip(chosen, basis, strict=True)) for d in range(len(basis))]
            return sum(x * x for x in vector) or best
        center = -math.fsum(chosen[j] * mu[j][level] for j in range(level + 1, len(basis)))
        radius = math.sqrt(max(left, 0) / squares[level]) + 1e-9
        found = best
        for c in range(math.ceil(center - radius), math.floor(center + radius) + 1):
            taken = [*chosen[:level], c, *chosen[level + 1 :]]
            found = min(found, visit(level - 1, taken, left - (c - center) ** 2 * squares[level]))
        return found

    return visit(len(basis) - 1, [0] * len(basis), float(best))


def test_coins_do_not_follow_the_low_bits_of_a_state() -> None:
    """Streams whose states share their 36 lowest bits share those for ever, the lower half of every word among
    them. Each of 32 coins agrees in half of 2^16 such pairs: within six sigma, 32 times 2e-9 of false alarm."""
    _, advance = stream_functions()
    high = np.random.default_rng(5).integers(0, 2**16, (2, 2**16), dtype=np.uint64)
    state = (high << np.uint64(36)) + np.random.default_rng(6).integers(0, 2**36, 2**16, dtype=np.uint64)
    for _ in range(3):
        words, state = advance.evaluate(state)
    assert ((words[0] ^ words[1]) % 2**16 == 0).all()
    differ = np.bitwise_xor(*coins_function().evaluate(words)[0])
    for bit in range(32):
        assert abs(int((differ >> np.uint32(bit) & np.uint32(1)).sum()) - 2**15) < 6 * 2**7, bit


def test_streams_of_one_node_are_distinct() -> None:
    start, _ = stream_functions()
    state = start.evaluate(np.arange(20000, dtype=np.uint64), *seed_function().evaluate(1, 2, 3, 4))[0]
    # 20000 states of 52 random bits: P(a collision) < 2e8 / 2^52 < 2^-24.
    assert np.unique(state % np.uint64(MODULUS)).size == state.size
