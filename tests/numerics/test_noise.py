"""The modes of floating-point formats alone: Monte Carlo arithmetic with its moments, and ``farthest``."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

import fxround
from fxround import Rounding
from fxround.kernels.maps import map_kernel
from fxround.kernels.program import Program
from fxround.numerics.modes import Mode
from fxround.numerics.specification.exact import round_exact

EXACT = {
    "identity": lambda a: a,
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "fma": lambda a, b, c: a * b + c,
}
RNG = np.random.default_rng(3)
COUNT = 300


def simulated(value: Fraction, precision: int, random: int, carrier: str, sparing: bool) -> float:
    """Monte Carlo arithmetic written out: inexact(x, t, xi) = x + 2^(e - t) xi, 2^(e-1) <= |x| < 2^e, then one
    conversion to the carrier. It shares nothing with the package."""
    if value == 0:
        return 0.0
    e = 0
    while Fraction(2) ** e <= abs(value):
        e += 1
    while Fraction(2) ** (e - 1) > abs(value):
        e -= 1
    unit = Fraction(2) ** (e - precision)
    xi = Fraction(2 * random + 1 - 2**32, 2**33)
    if not (sparing and (value / unit).denominator == 1):
        value += unit * xi * (1 if value > 0 else -1)
    if carrier == "f64":
        return float(value)
    # An integer of 24 bits or more at this exponent, by Python's rounding of fractions, which takes ties to even.
    digits = 24 if abs(value) >= Fraction(2) ** (e - 1) else 25
    digits -= int(abs(value) >= Fraction(2) ** e)
    quantum = Fraction(2) ** (e - digits)
    return float(round(value / quantum) * quantum)


@pytest.mark.part(5)
@pytest.mark.parametrize("precision", [1, 2, 11, 20, 23, 24])
@pytest.mark.parametrize("carrier", ["f32", "f64"])
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("mode", ["mca", "mca_rr"])
def test_bits_of_a_simulation_that_has_the_same_random_numbers(
    name: str, carrier: str, precision: int, mode: str
) -> None:
    precision += 29 if carrier == "f64" and precision > 20 else 0
    fmt = "binary32" if carrier == "f32" else "binary64"
    rounding = Rounding.parse(f"{fmt}/{mode}:{precision}")
    arity = EXACT[name].__code__.co_argcount
    arguments = ", ".join(f"x{i}" for i in range(arity))
    kernel = map_kernel(Program.parse(f"t0 = {name}({arguments}) @ {rounding}"), (carrier,) * arity, carrier)
    dtype = np.float32 if carrier == "f32" else np.float64
    values = [(RNG.standard_normal(COUNT) * np.exp2(RNG.integers(-9, 9, COUNT))).astype(dtype) for _ in range(arity)]
    for v in values:
        v[: COUNT // 3] = np.round(v[: COUNT // 3] * 8) / 8 + 1 / 16
    random = RNG.integers(0, 2**32, COUNT, dtype=np.uint32)
    random[:4] = [0, 1, 2**31, 2**32 - 1]
    body = kernel.body
    got = np.asarray(body.evaluate(*values, random)[0])
    for i in range(COUNT):
        exact = EXACT[name](*(Fraction(float(v[i])) for v in values))
        want = simulated(exact, precision, int(random[i]), carrier, mode == "mca_rr")
        assert float(got[i]) == want, (str(rounding), name, [float(v[i]).hex() for v in values], random[i])
        assert round_exact(exact, exact < 0, rounding, int(random[i])) == want


@pytest.mark.parametrize("precision", [5, 12, 20])
def test_moments(precision: int) -> None:
    """Mean x and variance 2^(2 (e - t)) / 12, e = 1 for 1 <= x < 2: beyond 6 sigma once in 5e8 runs each."""
    count, x = 200_000, 1.5 + 2.0**-20
    noisy = fxround.round(np.full(count, x), f"binary64/mca:{precision}", seed=2)
    unit = 2.0 ** (1 - precision)
    scaled = (noisy - x) / unit
    assert abs(scaled.mean()) < 6 * (1 / 12 / count) ** 0.5
    # The fourth central moment of a uniform number is 1 / 80, that of the variance's estimate (1/80 - 1/144) / n.
    assert abs(scaled.var() - 1 / 12) < 6 * ((1 / 80 - 1 / 144) / count) ** 0.5
    assert np.abs(scaled).max() <= 0.5


def test_random_rounding_at_the_formats_precision_is_stochastic_rounding() -> None:
    """Between powers of two, noise of one ulp and a rounding to nearest choose a neighbour by the lost part."""
    count, lost = 200_000, 0.3
    x = np.full(count, 1.5 + lost * 2.0**-23)
    for mode in ("mca", "mca_rr", "stochastic"):
        up = (fxround.round(x, f"binary32/{mode}", seed=1) > 1.5).mean()
        assert abs(up - lost) < 6 * (lost * (1 - lost) / count) ** 0.5


@pytest.mark.parametrize("fmt", ["binary64", "ieee(11,52)", "ieee(11,24)", "binary32"])
def test_noise_beyond_the_largest_number_overflows(fmt: str) -> None:
    row = Rounding.parse(fmt).format
    largest = float(row.maximum)
    x = np.full(2000, largest)
    unbounded, bounded = (fxround.round(s * x, f"{fmt}/mca:4{end}", seed=2) for s, end in ((1, ""), (-1, "/saturate")))
    # Half of the noise is upwards, of a sixteenth of the number at most, so that what overflows is infinite.
    upwards = int(np.count_nonzero(np.isinf(unbounded)))
    assert abs(upwards - 1000) < 6 * (2000 / 4) ** 0.5
    assert not np.isnan(unbounded).any() and (unbounded >= largest * 0.9).all()
    assert (bounded >= -largest).all() and (bounded == -largest).mean() > 0.4


def test_what_gets_no_noise() -> None:
    special = np.array([0.0, -0.0, np.inf, -np.inf, 2.0**-901])
    np.testing.assert_array_equal(fxround.round(special, "binary64/mca:10"), special)
    assert np.isnan(fxround.round(np.array([np.nan]), "binary64/mca:10"))[0]
    few = np.arange(1, 17, dtype=np.float32)
    np.testing.assert_array_equal(fxround.round(few, "binary32/mca_rr:4"), few)
    assert (fxround.round(few, "binary32/mca:4") != few).mean() > 0.8


@pytest.mark.parametrize("text", ["binary32/mca:0", "binary32/mca:x", "binary64/mca:54", "binary32/mca:1.5"])
def test_a_virtual_precision_that_does_not_exist(text: str) -> None:
    with pytest.raises(ValueError, match="1 to 53 bits, as in mca:24"):
        Rounding.parse(text)


def test_a_virtual_precision_beyond_the_format_and_formats_without_noise() -> None:
    with pytest.raises(ValueError, match="more than the 24 bits of binary32; expected 1 to 24"):
        Rounding.parse("binary32/mca:25")
    for text in ("posit16/mca", "nf4/farthest", "nf4/mca_rr:2", "fixed(16,8)/mca:3"):
        with pytest.raises(ValueError, match="is a mode of floating-point formats"):
            Rounding.parse(text)
    assert str(Mode.parse("mca:7")) == "mca:7" and str(Mode.parse("mca_rr")) == "mca_rr"
    assert math.isclose(Rounding.parse("binary32/mca").virtual_precision, 24)


@pytest.mark.parametrize("name", ["add", "mul", "div"])
@pytest.mark.parametrize("fmt", ["binary64", "binary32", "ieee(11,52)", "bfloat16"])
def test_farthest_is_the_neighbour_that_nearest_even_leaves(name: str, fmt: str) -> None:
    program = "t0 = {}(x0, x1) @ {}/{}"
    values = [RNG.standard_normal(COUNT) * np.exp2(RNG.integers(-9, 9, COUNT)) for _ in range(2)]
    values[1][: COUNT // 2] = values[0][: COUNT // 2] * RNG.choice([1.0, 2.0**-53, 2.0**-24, 2.0**-8], COUNT // 2)
    got, nearest, down, up = (
        map_kernel(Program.parse(program.format(name, fmt, mode)), ("f64", "f64"), "f64").body.evaluate(*values)[0]
        for mode in ("farthest", "nearest_even", "toward_negative", "toward_positive")
    )
    np.testing.assert_array_equal(got, np.where(nearest == down, up, down))
    rounding = Rounding.parse(f"{fmt}/farthest")
    for i in range(0, COUNT, 7):
        exact = EXACT[name](*(Fraction(float(v[i])) for v in values))
        assert got[i] == round_exact(exact, exact < 0, rounding)
