"""The algorithm compared with the specification by encodings, which include signs of zero and the one NaN.

Three layers. Whole 16-bit spaces against the search of ``neighbours`` (itself equal to the specification, see
``test_exact``), and against the specification itself. The boundaries of every format x mode x overflow x
carrier. Random encodings.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from neighbours import (
    ALL_FORMATS,
    ALL_MODES,
    Array,
    boundaries,
    encodings,
    every_rounding,
    float_type,
    held,
    neighbours,
    random_words,
)

from fxround.numerics.arithmetic.rounding import round_expr, rounding_function
from fxround.numerics.arithmetic.scalar import param
from fxround.numerics.formats import FORMATS, Format
from fxround.numerics.formats.carriers import CARRIERS
from fxround.numerics.modes import MODES, Rounding
from fxround.numerics.specification.exact import round_float

PATTERNS = np.arange(2**16, dtype=np.uint16)
SIXTEEN_BITS = {
    "binary16": PATTERNS.view(np.float16).astype(np.float32),
    "bfloat16": (PATTERNS.astype(np.uint32) << 16).view(np.float32),
}
LISTED = [f for f in ALL_FORMATS if (f.emax - f.emin + 2) * 2 ** (f.precision - 1) <= 2**16]
ROUNDINGS = {carrier: every_rounding(carrier) for carrier in CARRIERS}


def specified(x: Array, rounding: Rounding, random: Array) -> Array:
    return np.array([round_float(float(v), rounding, int(r)) for v, r in zip(x, random, strict=True)], x.dtype)


def assert_same(x: Array, got: Array, want: Array, random: Array, rounding: Rounding) -> None:
    assert got.dtype == want.dtype
    wrong = np.nonzero(encodings(got) != encodings(want))[0]
    if wrong.size:
        i = wrong[0]
        first = f"R({float(x[i]).hex()}, {int(random[i]):#010x}) = {float(got[i]).hex()}"
        pytest.fail(f"{rounding}: {wrong.size} of {x.size} differ; {first}, expected {float(want[i]).hex()}")


@pytest.mark.part(8)
@pytest.mark.parametrize("fmt", [f for f in LISTED if held(f, "f32")], ids=str)
@pytest.mark.parametrize("source", SIXTEEN_BITS)
def test_all_sixteen_bit_patterns_are_what_a_search_finds(source: str, fmt: Format) -> None:
    x, oracle = SIXTEEN_BITS[source], neighbours(fmt)
    random = random_words(x.size)
    for mode in ALL_MODES:
        for overflow in fmt.overflows:
            rounding = Rounding(fmt, mode, overflow)
            got = rounding_function(rounding, "f32").evaluate(x, random)[0]
            assert_same(x, got, oracle.round(x, mode, overflow, random).astype(np.float32), random, rounding)


@pytest.mark.part(2)
@pytest.mark.parametrize("mode", ["nearest_even", "stochastic", "up_down"])
@pytest.mark.parametrize("source, target", [("binary16", "e4m3fn"), ("bfloat16", "e5m2")])
def test_all_sixteen_bit_patterns_are_as_specified(source: str, target: str, mode: str) -> None:
    x, rounding = SIXTEEN_BITS[source], Rounding.parse(f"{target}/{mode}")
    random = random_words(x.size)
    got = rounding_function(rounding, "f32").evaluate(x, random)[0]
    assert_same(x, got, specified(x, rounding, random), random, rounding)


@pytest.mark.part(7)
@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=str)
def test_boundaries(fmt: Format, carrier: str) -> None:
    mine = [r for r in ROUNDINGS[carrier] if r.format == fmt]
    points = boundaries(fmt, carrier) if mine else np.array([])
    for number, rounding in enumerate(mine):
        # Every point under the format's own overflow, a third of them under the others.
        x = points if rounding.overflow == fmt.default_overflow else points[number % 3 :: 3]
        random = random_words(x.size, seed=number)
        got = rounding_function(rounding, carrier).evaluate(x, random)[0]
        assert_same(x, got, specified(x, rounding, random), random, rounding)


@st.composite
def cases(draw: st.DrawFn, carrier: str) -> tuple[Rounding, Array, Array]:
    """A rounding, up to 24 encodings (half of them aimed at the format's range), and random words."""
    rounding = draw(st.sampled_from(ROUNDINGS[carrier]))
    fmt, kind = rounding.format, float_type(carrier)
    unsigned = np.uint32 if carrier == "f32" else np.uint64
    width = 8 * np.dtype(kind).itemsize
    raw = draw(st.lists(st.integers(0, 2**width - 1), min_size=1, max_size=12))
    exponent = st.integers(max(fmt.quantum_exponent - 3, -1070), min(fmt.emax + 1, 1022))
    aimed = draw(st.lists(st.tuples(exponent, st.integers(0, 2**54), st.booleans()), max_size=12))
    with np.errstate(over="ignore"):
        near = np.array([math.ldexp(1 + m / 2**54, e) * (-1 if s else 1) for e, m, s in aimed]).astype(kind)
    x = np.concatenate([np.array(raw, unsigned).view(kind), near])
    random = draw(st.lists(st.integers(0, 2**32 - 1), min_size=x.size, max_size=x.size))
    return rounding, x, np.array(random, np.uint32)


@pytest.mark.parametrize("carrier", CARRIERS)
@settings(max_examples=150)
@given(data=st.data())
def test_any_encoding(carrier: str, data: st.DataObject) -> None:
    rounding, x, random = data.draw(cases(carrier))
    got = rounding_function(rounding, carrier).evaluate(x, random)[0]
    assert_same(x, got, specified(x, rounding, random), random, rounding)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_every_nan_becomes_the_one_nan(carrier: str) -> None:
    kind = float_type(carrier)
    infinity = int(encodings(np.array([np.inf], kind))[0])
    sign = 1 << (8 * np.dtype(kind).itemsize - 1)
    codes = [infinity + k + s for s in (0, sign) for k in (1, 2, sign // 2, sign - infinity - 1) if k < sign - infinity]
    x = np.array(codes, encodings(np.zeros(1, kind)).dtype).view(kind)
    assert np.isnan(x).all()
    for rounding in ROUNDINGS[carrier]:
        got = rounding_function(rounding, carrier).evaluate(x, random_words(x.size))[0]
        assert (encodings(got) == CARRIERS[carrier].nan).all(), rounding


@pytest.mark.parametrize("name", [n for n, m in MODES.items() if not m.jitter])
def test_a_carrier_rounded_to_itself_keeps_every_value(name: str) -> None:
    for carrier in CARRIERS:
        rounding = Rounding(CARRIERS[carrier].format, MODES[name], "inf")
        x = boundaries(rounding.format, carrier)
        got = rounding_function(rounding, carrier).evaluate(x, random_words(x.size))[0]
        kept = np.where(np.isnan(x), float_type(carrier)(np.nan), x)
        assert_same(x, got, kept, x, rounding)


def test_what_a_carrier_does_not_hold_is_refused() -> None:
    refused = {f.name for f in ALL_FORMATS if not held(f, "f32")}
    assert refused == {"binary64", "ieee(11,12)", "ieee(11,40)"}
    assert all(held(f, "f64") for f in ALL_FORMATS)
    with pytest.raises(ValueError, match=r"precision 25, more than the 24 bits of the binary32 values.*wider dtype"):
        rounding_function(Rounding.parse("ieee(8,25)"), "f32")
    with pytest.raises(ValueError, match=r"has the range 2\^-1022 to .*, more than binary32 holds"):
        rounding_function(Rounding.parse("ieee(11,12)"), "f32")


def test_a_mode_that_draws_needs_random_bits() -> None:
    with pytest.raises(ValueError, match=r"bfloat16/stochastic/inf draws random bits; none were given"):
        round_expr(param("x", "f32"), Rounding.parse("bfloat16/stochastic"))


def test_a_deterministic_mode_draws_none() -> None:
    x = param("x", "f32")
    for fmt in FORMATS.values():
        if held(fmt, "f32"):
            rounding = Rounding(fmt, MODES["nearest_even"], fmt.default_overflow)
            assert round_expr(x, rounding) is round_expr(x, rounding, param("random", "u32"))
