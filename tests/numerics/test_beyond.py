"""Rounding to 52 and 53 bits: operators on float64 operands, compared with rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import gmpy2
import numpy as np
import pytest

from fxround.kernels.maps import map_kernel
from fxround.kernels.program import Program
from fxround.numerics.arithmetic.operators import OPERATORS
from fxround.numerics.modes import MODES, Rounding
from fxround.numerics.specification.exact import round_exact

EXACT = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "fma": lambda a, b, c: a * b + c,
}
RNG = np.random.default_rng(5)


def operands(arity: int, count: int) -> list[np.ndarray]:
    return [RNG.standard_normal(count) * np.exp2(RNG.integers(-30, 30, count)) for _ in range(arity)]


def neighbours(exact: Fraction) -> tuple[Fraction, Fraction]:
    """The binary64 numbers at or next to ``exact``, below and above."""
    near = Fraction(float(exact))
    if near == exact:
        return near, near
    other = Fraction(math.nextafter(float(exact), math.inf if near < exact else -math.inf))
    return min(near, other), max(near, other)


@pytest.mark.parametrize("mode", ["stochastic", "stochastic_equal"])
@pytest.mark.parametrize("name", EXACT)
def test_the_result_is_the_neighbour_that_the_drawn_bits_choose(name: str, mode: str) -> None:
    """Away from zero if r + floor(lost 2^32) >= 2^32, where the estimate of ``lost`` may have an error of 2^-31."""
    arity = OPERATORS[name].arity
    arguments = ", ".join(f"x{i}" for i in range(arity))
    body = map_kernel(Program.parse(f"t0 = {name}({arguments}) @ binary64/{mode}"), ("f64",) * arity, "f64").body
    values, random = operands(arity, 400), RNG.integers(0, 2**32, 400, dtype=np.uint32)
    got = body.evaluate(*values, random)[0]
    for i in range(400):
        exact = EXACT[name](*(Fraction(float(v[i])) for v in values))
        low, high = neighbours(exact)
        if low == high:
            assert Fraction(float(got[i])) == low
            continue
        inner, outer = (low, high) if exact > 0 else (high, low)
        lost = (exact - inner) / (outer - inner)
        if mode == "stochastic_equal":
            away = random[i] >= 2**31
        else:
            gap = lost + Fraction(int(random[i]), 2**32) - 1
            if abs(gap) < Fraction(1, 2**31):
                continue
            away = gap > 0
        assert Fraction(float(got[i])) == (outer if away else inner), (name, i, float(lost))


@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
def test_a_step_is_drawn_from_the_right_word_on(name: str) -> None:
    """Within two words of 2^32 (1 - lost), sums that cancel included; exact values stay, with all words."""
    arity = OPERATORS[name].arity
    arguments = ", ".join(f"x{i}" for i in range(arity))
    program = Program.parse(f"t0 = {name}({arguments}) @ binary64/stochastic")
    body, count = map_kernel(program, ("f64",) * arity, "f64").body, 600
    values = [v * RNG.choice([1, 1, 2.0**-30, 0], count) for v in operands(arity, count)]
    others = -(values[0] * values[1]) if name == "fma" else values[0] * (-1 if name == "add" else 1)
    factors = RNG.choice([1, 1 + 2.0**-52, 1 - 2.0**-53, 1 + 2.0**-40, 2.0**-53, -(2.0**-54) * 1.25], count)
    if name != "mul":
        values[-1] = np.where(RNG.random(count) < 0.5, others * factors, values[-1])
    exact = [EXACT[name](*(Fraction(float(v[i])) for v in values)) for i in range(count)]
    ends = [sorted(neighbours(x), key=abs) for x in exact]
    lost = [
        (x - inner) / (outer - inner) if inner != outer else Fraction(0)
        for x, (inner, outer) in zip(exact, ends, strict=True)
    ]
    first = [2**32 - int(f * 2**32) for f in lost]
    for offset in (-(2**32), -2, 2, 2**32):
        words = np.array([min(max(word + offset, 0), 2**32 - 1) for word in first], np.uint32)
        got = body.evaluate(*values, words)[0]
        for (inner, outer), word, f, start, value in zip(ends, words, lost, first, got, strict=True):
            want = outer if f and int(word) >= start else inner
            assert Fraction(float(value)) == want or abs(int(word) - start) < 2, (name, float(f), word)
    assert sum(f == 0 for f in lost) > 20 and sum(f > 0 for f in lost) > 200


@pytest.mark.part(3)
@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_stays_within_one_ulp_and_keeps_specials(name: str) -> None:
    arity = OPERATORS[name].arity
    arguments = ", ".join(f"x{i}" for i in range(arity))
    bodies = {
        mode: map_kernel(Program.parse(f"t0 = {name}({arguments}) @ binary64/{mode}"), ("f64",) * arity, "f64").body
        for mode in ("nearest_even", "stochastic")
    }
    specials = [0.0, -0.0, 1.0, 2.0, math.inf, -math.inf, math.nan, 0.5, 1e300, 5e-324]
    values = [np.concatenate([v, RNG.choice(specials, 60)]) for v in operands(arity, 60)]
    nearest = bodies["nearest_even"].evaluate(*values)[0]
    random = RNG.integers(0, 2**32, 120, dtype=np.uint32)
    perturbed = bodies["stochastic"].evaluate(*values, random)[0]
    special = ~np.isfinite(nearest) | (nearest == 0)
    np.testing.assert_array_equal(perturbed[special], nearest[special])
    distance = perturbed[~special].view(np.int64) - nearest[~special].view(np.int64)
    assert np.abs(distance).max(initial=0) <= 1


def at_the_ends(name: str, count: int) -> list[np.ndarray]:
    """Operands of few and many bits near both ends of binary64's exponents and in between, with sums that cancel."""
    exponents = [-1074, -1070, -560, -512, -53, 0, 460, 969, 971]
    values = []
    for _ in range(OPERATORS[name].arity):
        few = np.ldexp(RNG.integers(1, 2 ** RNG.integers(1, 53, count)).astype(float), RNG.choice(exponents, count))
        every = RNG.integers(0, 2**64, count, dtype=np.uint64).view(np.float64)
        every[~np.isfinite(every)] = 1.0
        near = RNG.standard_normal(count) * np.exp2(RNG.integers(-4, 4, count))
        values.append(np.choose(RNG.integers(0, 3, count), [few * RNG.choice([-1, 1], count), every, near]))
    half = RNG.random(count) < 0.5
    if name in ("add", "sub"):
        values[1][half] = (values[0] * RNG.choice([1, -1, 0.5, 2.0**-52, 2.0**-53, 2.0**-54, 3 * 2.0**-54], count))[
            half
        ]
    if name == "fma":
        with np.errstate(all="ignore"):
            product = -(values[0] * values[1]) * RNG.choice([1, 1 + 2.0**-52, 0.5, 2.0**-53, 2.0**60], count)
        values[2] = np.where(half & np.isfinite(product), product, values[2])
    return values


@pytest.mark.part(7)
@pytest.mark.parametrize("overflow", ["inf", "saturate"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fmt", ["ieee(11,52)", "ieee(8,52)", "ieee(11,53)", "ieee(11,40)"])
@pytest.mark.parametrize("name", EXACT)
def test_bits_of_the_specification_from_the_smallest_to_the_largest_numbers(
    name: str, fmt: str, mode: str, overflow: str
) -> None:
    """Two exceptions of the modes that draw: what binary64 makes infinite overflows, and below 2^-958 the lost part of
    a product may have underflowed."""
    rounding = Rounding.parse(f"{fmt}/{mode}/{overflow}")
    arguments = ", ".join(f"x{i}" for i in range(OPERATORS[name].arity))
    program, loads = Program.parse(f"t0 = {name}({arguments}) @ {rounding}"), ("f64",) * OPERATORS[name].arity
    if fmt == "ieee(11,53)" and mode in ("nearest_away", "nearest_zero", "nearest_odd"):
        with pytest.raises(ValueError, match="a precision up to 52"):
            map_kernel(program, loads, "f64")
        return
    values, random = at_the_ends(name, 400), RNG.integers(0, 2**32, 400, dtype=np.uint32)
    words = [random] if rounding.mode.random_bits else []
    with np.errstate(all="ignore"):
        got = map_kernel(program, loads, "f64").body.evaluate(*values, *words)[0]
    compared = 0
    for i in range(400):
        operands = [Fraction(float(v[i])) for v in values]
        if name == "div" and operands[1] == 0:
            continue
        exact = EXACT[name](*operands)
        draws = rounding.mode.random_bits > 0 and not rounding.mode.jitter
        near_infinity = 2**1024 - 2**970 <= abs(exact) < 2**1024
        underflows = name not in ("add", "sub") and abs(exact) < Fraction(2) ** -958
        if exact == 0 or (draws and (near_infinity or underflows)):
            continue
        want = round_exact(exact, exact < 0, rounding, int(random[i]))
        assert float(got[i]).hex() == want.hex(), (str(rounding), [float(v[i]).hex() for v in values], random[i])
        compared += 1
    assert compared > 150


@pytest.mark.parametrize("mode", ["stochastic", "stochastic_b", "stochastic_c"])
def test_sums_of_the_smallest_numbers_round_at_random(mode: str) -> None:
    """To 52 and 40 bits: from the smallest subnormal number to 2^-940, with lost parts of one bit to all."""
    scales = RNG.integers(-1074, -940, (2, 600))
    scales[1] = np.maximum(scales[0] - RNG.integers(0, 60, 600), -1074)
    numbers = RNG.integers(1, 2**53, (2, 600)) >> RNG.integers(0, 53, (2, 600))
    x, y = np.ldexp(numbers.astype(float), scales) * RNG.choice([-1, 1], (2, 600))
    random = RNG.integers(0, 2**32, 600, dtype=np.uint32)
    for fmt in ("ieee(11,52)", "ieee(11,40)", "ieee(11,53)"):
        rounding = Rounding.parse(f"{fmt}/{mode}/inf")
        body = map_kernel(Program.parse(f"t0 = add(x0, x1) @ {rounding}"), ("f64", "f64"), "f64").body
        got = body.evaluate(x, y, random)[0]
        for i in range(600):
            exact = Fraction(float(x[i])) + Fraction(float(y[i]))
            want = round_exact(exact, exact < 0, rounding, int(random[i])) if exact else 0.0
            assert float(got[i]) == want, (fmt, x[i].hex(), y[i].hex(), random[i])


@pytest.mark.part(3)
@pytest.mark.parametrize("mode", [m for m in MODES if MODES[m].deterministic or MODES[m].jitter])
@pytest.mark.parametrize("name", ["exp", "log", "sin", "tanh", "expm1"])
def test_elementary_functions_of_52_bits(name: str, mode: str) -> None:
    rounding = Rounding.parse(f"ieee(11,52)/{mode}")
    body = map_kernel(Program.parse(f"t0 = {name}(x0) @ {rounding}"), ("f64",), "f64").body
    x = np.concatenate([RNG.standard_normal(60), RNG.uniform(-800, 800, 60), [2.0**-60, 3 * 2.0**-600, 709.9, -744.0]])
    x = np.abs(x) if name == "log" else x
    random = RNG.integers(0, 2**32, x.size, dtype=np.uint32)
    with np.errstate(all="ignore"):
        got = body.evaluate(x, *([random] if rounding.mode.random_bits else []))[0]
    with gmpy2.context(precision=3000, emin=-(10**6), emax=10**6):
        for i, v in enumerate(x):
            exact = Fraction(*map(int, getattr(gmpy2, name)(gmpy2.mpfr(float(v))).as_integer_ratio()))
            want = round_exact(exact, exact < 0, rounding, int(random[i]))
            assert float(got[i]).hex() == want.hex(), (str(rounding), v)
