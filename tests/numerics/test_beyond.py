"""Stochastic modes at binary64 itself: operators on float64 operands, compared with rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from fxround.kernels.maps import map_kernel
from fxround.kernels.program import Program
from fxround.numerics.arithmetic.operators import OPERATORS

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
