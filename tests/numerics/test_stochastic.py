"""Stochastic rounding: probabilities counted exactly over all words, and statistics of the words that are used.

Statistical tests here compare a sum of N = 2^16 bounded terms with its expectation, six standard deviations allowed.
Under the hypothesis tested the false-alarm rate of one comparison is 2e-9 (two-sided normal tail at 6 sigma; the
binomials below are close enough to normal there to keep it under 1e-8); with fewer than 500 comparisons in this file a
change of the seed raises a false alarm with probability below 5e-6. The seeds are fixed, so a run is repeatable.
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from neighbours import Array, random_words

from fxround.numerics.arithmetic.randomness import (
    GAMMA,
    WIDTHS,
    random_function,
    seed_function,
    stream_functions,
    width_of,
)
from fxround.numerics.arithmetic.rounding import rounding_function
from fxround.numerics.formats import FORMATS, Format
from fxround.numerics.modes import Mode, Rounding
from fxround.numerics.specification.exact import quantum, round_float

N = 2**16
SIX_SIGMA = 6.0
ELEMENTS = np.arange(N, dtype=np.uint64)
KEY = (20240607, 0, 0, 3)
NARROW = [f for f in FORMATS.values() if f.precision <= 11]
LOST = [Fraction(1, 64), Fraction(1, 10), Fraction(1, 3), Fraction(1, 2), Fraction(9, 10), Fraction(1023, 1024)]


def stochastic(fmt: Format, bits: int = 32) -> Rounding:
    return Rounding(fmt, Mode.parse(f"stochastic:{bits}"), fmt.default_overflow)


@pytest.mark.parametrize("mode", ["stochastic", "stochastic_b:8", "stochastic_c:8", "stochastic_equal", "up_down"])
@pytest.mark.parametrize("name", ["binary16", "e4m3fn", "e5m2", "ieee(5,7)"])
def test_a_value_beyond_the_maximum_by_a_quantum_overflows_whatever_is_drawn(name: str, mode: str) -> None:
    """A value between the maximum and the quantum above it is drawn, except by up_down, which takes the nearest."""
    fmt = Format.parse(name)
    step = float(quantum(Fraction(fmt.maximum), fmt))
    far, near = fmt.maximum + step * np.float32([1, 1.5, 100]), np.float32(fmt.maximum + step / 4)
    words = [0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]
    for overflow, beyond in ((fmt.default_overflow, np.nan if not fmt.inf else np.inf), ("saturate", fmt.maximum)):
        function = rounding_function(Rounding(fmt, Mode.parse(mode), overflow), "f32")
        # up_down moves the maximum, too, by an ulp.
        expected = fmt.maximum - step if (overflow, mode) == ("saturate", "up_down") else beyond
        for sign in (1, -1):
            found = {str(sign * y) for w in words for y in function.evaluate(np.float32(sign * far), np.uint32(w))[0]}
            assert found == {str(np.float32(expected))}
        ends = {str(function.evaluate(near, np.uint32(w))[0]) for w in words}
        drawn = {str(np.float32(fmt.maximum)), str(np.float32(beyond))}
        assert ends == ({str(np.float32(fmt.maximum - step))} if mode == "up_down" else drawn)


def between(fmt: Format, lost: Fraction) -> tuple[float, float, float, float]:
    """(x, value below, value above, lost fraction), where x is a binary32 value in the binade of 2."""
    gap = float(quantum(Fraction(2), fmt))
    x = float(np.float32(2 + float(lost) * gap))
    return x, 2.0, 2.0 + gap, (x - 2.0) / gap


def words(width: int = 32, elements: Array = ELEMENTS, **changed: int) -> Array:
    """One word an element, as a kernel draws them; the arguments change the key."""
    key = dict(zip(("seed_low", "seed_high", "sample", "node"), KEY, strict=True)) | changed
    draw = key.pop("draw", 0)
    return random_function(draw, width).evaluate(elements, *key.values())[0]


def within_six_sigma(total: float, mean: float, variance: float) -> bool:
    return abs(total - mean) <= SIX_SIGMA * math.sqrt(variance)


# ---- exact counts: no statistics ----


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 12])
def test_few_bits_step_away_in_floor_of_lost_times_two_to_the_n_cases(n: int) -> None:
    """Every value of the n bits once: P(away) = floor(lost * 2^n) / 2^n, so the bias is less than 2^-n of a quantum,
    towards zero, and 0 where at most n bits are lost."""
    fmt = FORMATS["e5m2"]
    function = rounding_function(stochastic(fmt, n), "f32")
    draws = np.arange(2**n, dtype=np.uint32) << np.uint32(32 - n)
    for numerator in (1, 7, 100, 511, 512, 513, 1023):
        for sign in (1.0, -1.0):
            x, low, high, lost = between(fmt, Fraction(numerator, 1024))
            rounded = function.evaluate(np.float32(sign * x), draws)[0]
            assert set(rounded.tolist()) <= {sign * low, sign * high}
            away = int((rounded == sign * high).sum())
            assert away == math.floor(lost * 2**n)
            bias = away / 2**n - lost
            assert -(2.0**-n) < bias <= 0
            if (lost * 2**n).is_integer():
                assert bias == 0


CUTS = {
    "stochastic": math.floor,
    "stochastic_b": lambda x: math.floor(x + Fraction(1, 2)),
    "stochastic_c": round,
}


@pytest.mark.part(5)
@pytest.mark.parametrize(
    "target, carrier", [("e5m2", "f32"), ("e5m2", "f64"), ("bfloat16", "f32"), ("binary32", "f64")]
)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CUTS)
def test_the_bias_of_few_bits(name: str, n: int, target: str, carrier: str) -> None:
    """Every word of n bits and every lost part of m = n + 3 bits, the unused bits of the word all 0 or all 1.

    P(away) = I(lost 2^n) / 2^n. Over all lost parts the mean of P(away) - lost is -(1/2^n - 1/2^m) / 2 for I = floor,
    2^-(m+1) for ties up, and 0 for ties to even.
    """
    fmt, m = FORMATS[target], n + 3
    function = rounding_function(Rounding.parse(f"{target}/{name}:{n}"), carrier)
    draws = np.arange(2**n, dtype=np.uint32) << np.uint32(32 - n)
    gap, total = quantum(Fraction(2), fmt), Fraction(0)
    for k in range(2**m):
        lost = Fraction(k, 2**m)
        x, kind = float(2 + lost * gap), np.float32 if carrier == "f32" else np.float64
        assert Fraction(float(kind(x))) == 2 + lost * gap
        for word in (draws, draws | np.uint32(2 ** (32 - n) - 1)):
            for sign in (1, -1):
                rounded = function.evaluate(kind(sign * x), word)[0]
                away = [Fraction(float(v)) == sign * (2 + gap) for v in rounded]
                assert Fraction(sum(away), 2**n) == Fraction(CUTS[name](lost * 2**n), 2**n)
                assert all(a or Fraction(float(v)) == 2 * sign for a, v in zip(away, rounded, strict=True))
                assert away == [
                    round_float(sign * x, Rounding.parse(f"{target}/{name}:{n}"), int(w)) != 2 * sign for w in word
                ]
        mean = sum((Fraction(float(abs(v))) for v in rounded), Fraction(0)) / 2**n
        error = (mean - Fraction(x)) / gap
        assert abs(error) <= Fraction(1, 2 ** (n + 1)) or name == "stochastic"
        total += error
    expected = {"stochastic": (Fraction(1, 2**m) - Fraction(1, 2**n)) / 2, "stochastic_b": Fraction(1, 2 ** (m + 1))}
    assert total / 2**m == expected.get(name, 0)


def test_unused_low_bits_do_not_matter() -> None:
    fmt, x = FORMATS["bfloat16"], np.float32(1.2345)
    random = random_words(1000)
    for n in (1, 5, 14, 31):
        function = rounding_function(stochastic(fmt, n), "f32")
        top = random >> np.uint32(32 - n) << np.uint32(32 - n)
        np.testing.assert_array_equal(function.evaluate(x, random)[0], function.evaluate(x, top)[0])


@pytest.mark.parametrize("carrier", ["f32", "f64"])
@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_the_word_where_the_step_begins(fmt: Format, carrier: str) -> None:
    """32 bits: away exactly from word 2^32 - floor(lost * 2^32) on, hence P(away) = lost to 2^-32."""
    function = rounding_function(stochastic(fmt), carrier)
    for lost in LOST:
        x, low, high, really = between(fmt, lost)
        first = 2**32 - math.floor(really * 2**32)
        got = function.evaluate(x, np.array([0, first - 1, first, 2**32 - 1], np.uint32))[0].tolist()
        assert got == [low, low, high, high]


@pytest.mark.parametrize("n", [1, 3, 14, 32])
@pytest.mark.parametrize("fmt", [f for f in NARROW if f.precision <= 8], ids=str)
def test_exact_values_are_untouched(fmt: Format, n: int) -> None:
    values = np.array([*fmt.magnitudes()], np.float32)
    values = np.concatenate([values, -values]) if fmt.signed else values
    values = values if fmt.has_minus_zero else values[(values != 0) | ~np.signbit(values)]
    for word in (0, 2**31, 2**32 - 1):
        got = rounding_function(stochastic(fmt, n), "f32").evaluate(values, np.uint32(word))[0]
        np.testing.assert_array_equal(got.view(np.uint32), values.view(np.uint32))


def test_equal_and_up_down_are_one_fair_coin() -> None:
    fmt = FORMATS["e5m2"]
    x, low, high, _ = between(fmt, Fraction(1, 10))
    for word in (0, 2**31 - 1, 2**31, 2**32 - 1):
        heads = word >= 2**31
        equal, jump = (Rounding.parse(f"e5m2/{m}") for m in ("stochastic_equal", "up_down"))
        assert round_float(x, equal, word) == (high if heads else low)
        # Nearest is 2: up by a quantum of its binade, down by one of the binade below.
        assert round_float(x, jump, word) == (high if heads else low - (high - low) / 2)


# ---- statistics of the words that kernels draw ----


@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_unbiased(fmt: Format) -> None:
    for bits in (16, 32):
        function, random = rounding_function(stochastic(fmt, bits), "f32"), words(width_of(bits))
        for lost in LOST:
            x, _, high, really = between(fmt, lost)
            p = math.floor(really * 2**bits) / 2**bits
            up = int((function.evaluate(np.float32(x), random)[0] == high).sum())
            assert within_six_sigma(up, N * p, N * p * (1 - p)), (bits, lost, up)


def test_unbiased_over_many_values() -> None:
    """The errors of N random values, in quanta, add to 0: variance of one is lost * (1 - lost)."""
    fmt = FORMATS["bfloat16"]
    x = np.random.default_rng(5).uniform(1, 2, N).astype(np.float32)
    rounded = rounding_function(stochastic(fmt), "f32").evaluate(x, words())[0]
    scaled = x.astype(np.float64) * 128
    lost = scaled - np.floor(scaled)
    error = rounded.astype(np.float64) * 128 - scaled
    assert (np.abs(error) < 1).all()
    assert within_six_sigma(float(error.sum()), 0.0, float((lost * (1 - lost)).sum()))


@pytest.mark.parametrize("mode", ["stochastic_equal", "up_down"])
def test_fair_coins(mode: str) -> None:
    x, _, high, _ = between(FORMATS["e5m2"], Fraction(1, 10))
    rounded = rounding_function(Rounding.parse(f"e5m2/{mode}"), "f32").evaluate(np.float32(x), words(1))[0]
    assert within_six_sigma(int((rounded == high).sum()), N / 2, N / 4)


OTHERS = {
    "another node": {"node": 4},
    "another sample": {"sample": 1},
    "the next seed": {"seed_low": KEY[0] + 1},
    "a seed that differs above 32 bits": {"seed_high": 1},
    "the next draw": {"draw": 1},
}


def centred(random: Array) -> Array:
    """Words as numbers in [-1, 1) of mean 0 (to 2^-32) and variance 1/3."""
    return random.astype(np.float64) / 2**31 - 1


@pytest.mark.parametrize("other", OTHERS)
def test_uncorrelated_with(other: str) -> None:
    """Products of independent centred words: mean 0, variance 1/9; and products of their bits: variance 1."""
    a, b = words(), words(**OTHERS[other])
    assert within_six_sigma(float((centred(a) * centred(b)).sum()), 0.0, N / 9)
    for bit in range(32):
        agree = int((((a ^ b) >> np.uint32(bit)) & np.uint32(1)).sum())
        assert within_six_sigma(agree, N / 2, N / 4), bit


@pytest.mark.parametrize("other", OTHERS)
def test_roundings_uncorrelated_with(other: str) -> None:
    """An array is rounded twice; the two errors are independent, and each has mean 0."""
    x = np.random.default_rng(6).uniform(1, 2, N).astype(np.float32)
    function = rounding_function(stochastic(FORMATS["bfloat16"]), "f32")
    scaled = x.astype(np.float64) * 128
    variance = (scaled % 1) * (1 - scaled % 1)
    errors = [function.evaluate(x, w)[0].astype(np.float64) * 128 - scaled for w in (words(), words(**OTHERS[other]))]
    assert within_six_sigma(float((errors[0] * errors[1]).sum()), 0.0, float((variance**2).sum()))


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 16, 64, 1024])
def test_neighbouring_elements_are_uncorrelated(lag: int) -> None:
    """2, 4 and 64: the elements that share an output of SplitMix64."""
    a = centred(words())
    assert within_six_sigma(float((a[:-lag] * a[lag:]).sum()), 0.0, (N - lag) / 9)
    short, coins = centred(words(16)), centred(words(1)) + 0.5
    # 16 bits have mean -2^-16 and variance 1/3 to 2^-31: a product's mean of 2^-32 moves the sum by 2^-16.
    assert within_six_sigma(float((short[:-lag] * short[lag:]).sum()), 0.0, (N - lag) / 9)
    assert within_six_sigma(float((coins[:-lag] * coins[lag:]).sum()), 0.0, (N - lag) / 16)


def chi_square_sigmas(cells: Array, count: int) -> float:
    """How many sigma the chi-square statistic of equally likely cells is from its mean, by the normal approximation of
    its cube root (Wilson and Hilferty 1931); with 255 degrees of freedom and 6 sigma it is a false alarm in 1e8."""
    expected, free = len(cells) / count, count - 1
    statistic = float(((np.bincount(cells, minlength=count) - expected) ** 2 / expected).sum())
    return ((statistic / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))


MANY = np.arange(2**18, dtype=np.uint64)


def top(random: Array, bits: int) -> Array:
    return (random >> np.uint32(32 - bits)).astype(np.int64)


@pytest.mark.parametrize("width", WIDTHS)
def test_cells_are_equally_likely(width: int) -> None:
    """The highest byte of an element, the lowest, pairs of half-bytes of neighbours and of elements of two nodes, two
    samples, two seeds, two draws: 256 cells each. Of coins, eight neighbours, and four of each of a pair."""
    drawn = words(width, MANY)
    if width == 1:
        coins = top(drawn, 1)
        octets, four = coins.reshape(-1, 8) @ (1 << np.arange(8)), 1 << np.arange(4)
        assert abs(chi_square_sigmas(octets, 256)) < SIX_SIGMA
        halves = coins.reshape(-1, 4) @ four
        others = {name: top(words(1, MANY, **key), 1).reshape(-1, 4) @ four for name, key in OTHERS.items()}
    else:
        highest, lowest = top(drawn, 8), top(drawn, width) & 255
        assert abs(chi_square_sigmas(highest, 256)) < SIX_SIGMA and abs(chi_square_sigmas(lowest, 256)) < SIX_SIGMA
        halves = top(drawn, 4)
        others = {name: top(words(width, MANY, **key), 4) for name, key in OTHERS.items()}
    for lag in (1, 2, 3, 64):
        pairs = (16 * halves[:-lag] + halves[lag:])[:: 2 * lag]  # pairs that do not overlap
        assert abs(chi_square_sigmas(pairs, 256)) < SIX_SIGMA, lag
    for name, other in others.items():
        assert abs(chi_square_sigmas(16 * halves + other, 256)) < SIX_SIGMA, name


def test_the_chi_square_test_finds_what_is_not_random() -> None:
    """The states of SplitMix64 before they are mixed, whose highest bytes are too even and whose pairs are few."""
    weyl = ((MANY + np.uint64(1)) * np.uint64(GAMMA) >> np.uint64(32)).astype(np.uint32)
    assert chi_square_sigmas(top(weyl, 8), 256) < -SIX_SIGMA
    halves = top(weyl, 4)
    assert chi_square_sigmas((16 * halves[:-1] + halves[1:])[::2], 256) > SIX_SIGMA


def test_words_of_many_nodes_and_samples_at_one_element_are_uniform() -> None:
    """The seeds of draws, and what the first and the last of 64 elements draw from them."""
    node, sample = (x.ravel() for x in np.meshgrid(np.arange(2**10), np.arange(2**7), indexing="ij"))
    for element in (0, 63):
        for width in (16, 32):
            key = (np.uint32(KEY[0]), np.uint32(0), sample.astype(np.uint32), node.astype(np.uint32))
            drawn = random_function(0, width).evaluate(np.uint64(element), *key)[0]
            assert abs(chi_square_sigmas(top(drawn, 8), 256)) < SIX_SIGMA
            for step in (1, 2**7):  # the next sample of the node; the next node
                halves = top(drawn, 4)
                pairs = 16 * halves.reshape(-1, 2, step)[:, 0] + halves.reshape(-1, 2, step)[:, 1]
                assert abs(chi_square_sigmas(pairs.ravel(), 256)) < SIX_SIGMA, (element, width, step)


@pytest.fixture(scope="module")
def streams() -> Array:
    """(steps, elements): the words of 2^10 streams over 64 roundings."""
    start, advance = stream_functions()
    state, rows = start.evaluate(ELEMENTS[: 2**10], *seed_function().evaluate(*KEY))[0], []
    for _ in range(64):
        random, state = advance.evaluate(state)
        rows.append(random)
    return np.stack(rows)


def test_streams_are_uniform(streams: Array) -> None:
    for bit in range(32):
        ones = int(((streams >> np.uint32(bit)) & np.uint32(1)).sum())
        assert within_six_sigma(ones, streams.size / 2, streams.size / 4), bit
    assert within_six_sigma(float(centred(streams).sum()), 0.0, streams.size / 3)


def test_streams_are_uncorrelated_in_time_and_across_elements(streams: Array) -> None:
    a = centred(streams)
    for later in (1, 2, 7):
        pairs = a[:-later] * a[later:]
        assert within_six_sigma(float(pairs.sum()), 0.0, pairs.size / 9), later
    for further in (1, 16, 64):
        pairs = a[:, :-further] * a[:, further:]
        assert within_six_sigma(float(pairs.sum()), 0.0, pairs.size / 9), further


def test_first_word_of_a_stream_is_no_word_of_a_map(streams: Array) -> None:
    assert within_six_sigma(float((centred(streams[0]) * centred(words())[: 2**10]).sum()), 0.0, 2**10 / 9)


def test_a_long_sum_does_not_stagnate() -> None:
    """256 + 1024 * (1/64) with 8 bits: nearest-even never leaves 256, SR ends at 272 on average. With one quantum of 2
    at each step and p = 1/128, the result is 256 + 2 * Binomial(1024, 1/128), over 2^10 streams."""
    start, advance = stream_functions()
    state = start.evaluate(ELEMENTS[: 2**10], *seed_function().evaluate(*KEY))[0]
    exact, drawn = (rounding_function(Rounding.parse(f"bfloat16/{m}"), "f32") for m in ("nearest_even", "stochastic"))
    still, moving = np.float32(256), np.full(2**10, 256, np.float32)
    for _ in range(1024):
        random, state = advance.evaluate(state)
        still = exact.evaluate(still + np.float32(1 / 64), 0)[0]
        moving = drawn.evaluate(moving + np.float32(1 / 64), random)[0]
    assert float(still) == 256.0
    steps, p = moving.size * 1024, 1 / 128
    assert within_six_sigma(float((moving - 256).sum() / 2), steps * p, steps * p * (1 - p))


def test_adjacent_values_bracket_every_result() -> None:
    values = [*FORMATS["e4m3fn"].magnitudes()]
    function = rounding_function(stochastic(FORMATS["e4m3fn"]), "f32")
    for low, high in pairwise(values):
        x = np.linspace(low, high, 7, dtype=np.float32)
        got = function.evaluate(np.repeat(x, 9), random_words(63))[0]
        assert set(got.tolist()) <= {low, high}
