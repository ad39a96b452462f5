"""The specification against a search in the list of values: every code, every midpoint, and their neighbours, for every
format of eight bits or fewer, every mode, every overflow."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from neighbours import ALL_FORMATS, ALL_MODES, Array, neighbours, random_words

from fxround.numerics.formats import FORMATS, Format
from fxround.numerics.modes import MODES, Rounding
from fxround.numerics.specification.exact import floor_log2, round_exact, round_float

# At most 2^8 values: binades times the values of one.
SMALL = [f for f in ALL_FORMATS if (f.emax - f.emin + 2) * 2 ** (f.precision - 1) <= 300]
RANDOM = (0, 1, 2**30, 2**31 - 1, 2**31, 2**32 - 1)


def codes_and_midpoints(fmt: Format) -> Array:
    """Every value, every midpoint, and values beyond the maximum, of both signs."""
    magnitudes = sorted({0.0, *fmt.magnitudes()})
    last = magnitudes[-1] - magnitudes[-2]
    magnitudes += [fmt.maximum + last, fmt.maximum * 4]
    points = np.array([p for a, b in pairwise(magnitudes) for p in (a, (a + b) / 2)])
    return np.concatenate([points, -points, [np.inf, -np.inf, np.nan]])


def a_hair_away(points: Array) -> Array:
    """The binary64 neighbours of some values."""
    return np.concatenate([np.nextafter(points, np.inf), np.nextafter(points, -np.inf)])


def specified(x: Array, rounding: Rounding, random: Array) -> Array:
    return np.array([round_float(float(v), rounding, int(r)) for v, r in zip(x, random, strict=True)]).view(np.uint64)


def test_every_format_of_eight_bits_or_fewer_is_among_the_small_ones() -> None:
    assert {"e5m2", "e4m3fn", "e4m3", "e3m2fn", "e2m3fn", "e2m1fn", "e8m0fnu", "ue5m3"} <= {f.name for f in SMALL}


@pytest.mark.part(5)
@pytest.mark.parametrize("fmt", SMALL, ids=str)
def test_specification_is_what_a_search_finds(fmt: Format) -> None:
    oracle = neighbours(fmt)
    points = codes_and_midpoints(fmt)
    x = np.concatenate([points, a_hair_away(points[:: 1 + points.size // 50])])
    random = random_words(x.size, seed=len(fmt.name))
    for mode in ALL_MODES:
        for overflow in fmt.overflows:
            rounding = Rounding(fmt, mode, overflow)
            want = oracle.round(x, mode, overflow, random).view(np.uint64)
            np.testing.assert_array_equal(specified(x, rounding, random), want, err_msg=str(rounding))


@pytest.mark.parametrize("fmt", SMALL, ids=str)
def test_a_hair_from_every_code_and_midpoint(fmt: Format) -> None:
    x = a_hair_away(codes_and_midpoints(fmt))
    random = random_words(x.size)
    for name in ("nearest_even", "stochastic"):
        rounding = Rounding(fmt, MODES[name], fmt.default_overflow)
        want = neighbours(fmt).round(x, rounding.mode, rounding.overflow, random).view(np.uint64)
        np.testing.assert_array_equal(specified(x, rounding, random), want)


@pytest.mark.part(3)
@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("fmt", [FORMATS[n] for n in ("e4m3fn", "e5m2", "e2m1fn", "ue5m3")], ids=str)
def test_every_value_is_kept_by_every_mode_but_up_down(fmt: Format, name: str) -> None:
    for overflow in fmt.overflows:
        rounding = Rounding(fmt, MODES[name], overflow)
        for value in fmt.magnitudes():
            for random in RANDOM:
                kept = round_float(value, rounding, random) == value
                assert kept == (not rounding.mode.jitter or value == 0), (rounding, value, random)


@pytest.mark.parametrize(
    "text, x, random, result",
    [
        ("e4m3fn", 464.0, 0, 448.0),  # a tie: 448 has the even significand 14
        ("e4m3fn", 464.1, 0, math.nan),
        ("e4m3fn/nearest_even/saturate", math.inf, 0, 448.0),
        ("e4m3", 248.0, 0, math.inf),
        ("e5m2/toward_zero", 1e30, 0, 57344.0),
        ("e5m2/toward_zero", math.inf, 0, math.inf),
        ("e5m2/toward_positive", -1e30, 0, -57344.0),
        ("e5m2/toward_negative", -1e30, 0, -math.inf),
        ("e5m2/to_odd", 1e30, 0, 57344.0),
        ("binary16", 65519.996, 0, 65504.0),
        ("binary16", 65520.0, 0, math.inf),
        ("binary16/nearest_zero", 65520.0, 0, 65504.0),
        ("binary16", 2.0**-25, 0, 0.0),
        ("binary16/nearest_away", -(2.0**-25), 0, -(2.0**-24)),
        ("binary16-flush", 2.0**-15, 0, 0.0),
        ("binary16-flush", 1.5 * 2.0**-15, 0, 2.0**-14),
        ("e2m1fn", -0.0, 0, -0.0),
        ("ue5m3", -0.0, 0, 0.0),
        ("ue5m3", -1.0, 0, math.nan),
        ("ue5m3/nearest_even/saturate", -1.0, 0, 0.0),
        ("e8m0fnu", 0.0, 0, math.nan),
        ("e8m0fnu/nearest_even/saturate", 0.0, 0, 2.0**-127),
        ("e8m0fnu", 3.0, 0, 4.0),
        ("e2m1fn/stochastic", 2.25, 0, 2.0),
        ("e2m1fn/stochastic", 2.25, 2**32 - 2**30 - 1, 2.0),
        ("e2m1fn/stochastic", 2.25, 2**32 - 2**30, 3.0),
        ("e2m1fn/stochastic_equal", 2.001, 2**31, 3.0),
        ("e2m1fn/stochastic_equal", 2.0, 2**31, 2.0),
        ("e2m1fn/up_down", 2.0, 2**31, 3.0),
        ("e2m1fn/up_down", 2.0, 0, 1.5),
        ("e2m1fn/up_down", 6.0, 2**31, 4.0),
        ("e2m1fn/up_down", 0.1, 2**31, 0.0),
        # Without a zero the smallest value has nothing below it: it stays.
        ("e8m0fnu/up_down", 2.0**-127, 0, 2.0**-127),
        ("e8m0fnu/up_down", 2.0**-127, 2**31, 2.0**-126),
        ("custom(2,-4,12,signed)-flush/nearest_even/saturate", -(2.0**-9), 0, -(2.0**-4)),
    ],
)
def test_by_hand(text: str, x: float, random: int, result: float) -> None:
    got = round_float(x, Rounding.parse(text), random)
    assert got.hex() == result.hex()


def test_a_value_that_no_carrier_holds() -> None:
    assert round_exact(1 + Fraction(1, 2**60), False, Rounding.parse("binary32/toward_positive")) == 1 + 2.0**-23
    assert round_exact(1 + Fraction(1, 2**60), False, Rounding.parse("binary32")) == 1.0
    assert round_exact(Fraction(1, 3), False, Rounding.parse("binary64")) == 1 / 3
    assert round_exact(Fraction(1, 3), False, Rounding.parse("binary32")) == float(np.float32(1) / np.float32(3))


def test_floor_log2() -> None:
    for e in (-1074, -150, -1, 0, 1, 52, 1023):
        two = Fraction(2) ** e
        assert floor_log2(two) == floor_log2(two * Fraction(3, 2)) == e
        assert floor_log2(two * Fraction(2**60 - 1, 2**60)) == e - 1
