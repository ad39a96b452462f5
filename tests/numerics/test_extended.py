"""Elementary functions in the modes that draw in binary64: the lost fraction of an ulp, against MPFR."""

from __future__ import annotations

import math
from fractions import Fraction

import gmpy2
import numpy as np
import pytest
from cuda_host import built

from benchmarks.adversary import ANCHORS, RANGES, reference
from fxround.numerics.arithmetic.operators import apply
from fxround.numerics.arithmetic.scalar import Function, const, param, select
from fxround.numerics.elementary import ELEMENTARY
from fxround.numerics.modes import Rounding

BOUND = 2.0**-31
"""The greatest error of the lost fraction of an ulp that docs/functions.md states."""
COUNT = 20
COINS = np.array([0, 2**32 - 1], dtype=np.uint32)
MODES = ("stochastic", "stochastic_equal", "up_down")
ELEMENTARY_NAMES = pytest.mark.parametrize("name", ELEMENTARY)


def evaluated(name: str) -> Function:
    """Arguments and random bits to: the nearest number, what it lost, the exponent of both, whether the value is a
    special one, and the result in each of the modes."""
    row, random = ELEMENTARY[name], param("random", "u32")
    params = tuple(param(f"x{i}", "f64") for i in range(row.arity))
    found = (row.extended or row.define)(*params)
    special = const("bool", 0) if found.exact is None else found.exact
    for condition, _ in found.cases:
        special = special | condition
    exponent = const("u64", 0)
    lost = found.lost()
    results = [apply(name, params, Rounding.parse(f"binary64/{mode}"), "f64", random) for mode in MODES]
    parts = (lost.near, lost.size, exponent, select(special, 1.0, const("f64", 0.0)))
    return Function(name, (*params, random), (*parts, *results))


class Evaluated:
    """The functions, compiled."""

    def __init__(self, functions: Evaluated) -> None:
        self._functions = functions

    def parts(self, name: str, operands: list[np.ndarray]) -> tuple[np.ndarray, ...]:
        return self._functions.run(name, *operands, np.zeros(len(operands[0]), dtype=np.uint32))[:4]

    def rounded(self, name: str, mode: str, operands: list[np.ndarray], words: np.ndarray | int) -> np.ndarray:
        words = np.broadcast_to(np.asarray(words, dtype=np.uint32), operands[0].shape)
        return self._functions.run(name, *operands, np.ascontiguousarray(words))[4 + MODES.index(mode)]


@pytest.fixture(scope="module")
def functions(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    return Evaluated(built({n: evaluated(n) for n in ELEMENTARY}, compiler, tmp_path_factory.mktemp("extended")))


def arguments(name: str) -> list[np.ndarray]:
    arity, rng = ELEMENTARY[name].arity, np.random.default_rng(len(name))
    shape = (arity, COUNT)

    def signs() -> np.ndarray:
        return rng.choice([-1.0, 1.0], shape)

    found = [rng.uniform(low, high, shape) for low, high in (*RANGES[""], *RANGES.get(name, ()))]
    near = [1 + signs() * np.exp2(rng.uniform(-52, -2, shape)) for _ in range(2)]
    found += [near[0], near[1] * 2, np.exp2(rng.uniform(-60, 2, shape)) * signs()]
    found += [a * (1 + signs() * np.exp2(rng.uniform(-52, -2, shape))) for a in ANCHORS.get(name, ())]
    found.append(rng.integers(0, 2047 << 52, shape).astype(np.uint64).view(np.float64) * signs())
    return [np.ascontiguousarray(row) for row in np.concatenate(found, 1)]


def in_range(want: gmpy2.mpfr) -> bool:
    """Whether a value has an ulp of 53 bits whose parts do not underflow."""
    limits = gmpy2.mpfr(2) ** -960, gmpy2.mpfr(2) ** 1023
    return bool(gmpy2.is_finite(want) and limits[0] < abs(want) < limits[1])


def context() -> gmpy2.context:
    return gmpy2.context(precision=400, emin=-(2**40), emax=2**40)


@ELEMENTARY_NAMES
def test_what_an_evaluation_says_is_lost_is_good_to_the_stated_bound(functions: Evaluated, name: str) -> None:
    x, row, checked = arguments(name), ELEMENTARY[name], 0
    total, error, exponent, special = functions.parts(name, x)
    with context():
        for i in range(len(x[0])):
            args = [gmpy2.mpfr(float(v[i])) for v in x]
            want = gmpy2.mpfr("nan") if special[i] else reference(name)(*args)
            if not in_range(want) or (name == "erfc" and abs(x[0][i]) > 27):
                continue
            got = gmpy2.mul_2exp(gmpy2.mpfr(float(total[i])) + gmpy2.mpfr(float(error[i])), 2048)
            got = gmpy2.div_2exp(got, 2048 - int(exponent.view(np.int64)[i]))
            ulp = gmpy2.mpfr(2) ** (gmpy2.frexp(want)[0] - 53)
            allowed = BOUND * ulp + (row.near_zeros if x[0][i] < 0 else 0)
            assert abs(got - want) <= allowed, (name, [float(v[i]) for v in x], float(abs(got - want) / ulp))
            checked += 1
    assert checked > 2 * COUNT


def neighbours(want: gmpy2.mpfr) -> tuple[float, float, Fraction]:
    """The binary64 numbers next to a value, towards zero and away from it, and the lost fraction."""
    with gmpy2.context(precision=53, round=gmpy2.RoundToZero):
        kept = float(+want)
    away = math.nextafter(kept, math.copysign(math.inf, kept))
    lost = (Fraction(*want.as_integer_ratio()) - Fraction(kept)) / (Fraction(away) - Fraction(kept))
    return kept, away, lost


@ELEMENTARY_NAMES
def test_the_word_where_the_step_begins(functions: Evaluated, name: str) -> None:
    """A step is drawn if r + floor(lost 2^32) >= 2^32, where ``lost`` may be off by 2^-31 and a rounding down."""
    x, row = arguments(name), ELEMENTARY[name]
    cases = []
    with context():
        for i in range(0, len(x[0]), 4):
            want = reference(name)(*(gmpy2.mpfr(float(v[i])) for v in x))
            inside = in_range(want) and (name != "erfc" or abs(x[0][i]) < 27)
            if inside and (x[0][i] > 0 or not row.near_zeros):
                cases.append((i, *neighbours(want)))
    kept, away = (np.array([case[j] for case in cases]) for j in (1, 2))
    lost = np.array([math.floor(case[3] * 2**32) for case in cases])
    operands = [v[[case[0] for case in cases]] for v in x]
    for offset, expected in ((-4, kept), (4, away)):
        words = 2**32 - lost + offset
        usable = (words >= 0) & (words < 2**32)
        got = functions.rounded(name, "stochastic", operands, np.clip(words, 0, 2**32 - 1))
        exact = np.array([case[3] == 0 for case in cases])
        np.testing.assert_array_equal(got[usable & ~exact], expected[usable & ~exact])
        np.testing.assert_array_equal(got[exact], kept[exact])
    inexact = ~exact & (lost > 2) & (lost < 2**32 - 2)
    for word, expected in ((0, kept), (2**32 - 1, away)):
        got = functions.rounded(name, "stochastic_equal", operands, word)
        np.testing.assert_array_equal(got[inexact], expected[inexact])


@ELEMENTARY_NAMES
def test_up_down_steps_from_the_nearest_number(functions: Evaluated, name: str) -> None:
    x, row = arguments(name), ELEMENTARY[name]
    for word, outward in ((0, 0.0), (2**32 - 1, math.inf)):
        got = functions.rounded(name, "up_down", x, word)
        with context():
            for i in range(0, len(x[0]), 3):
                want = reference(name)(*(gmpy2.mpfr(float(v[i])) for v in x))
                beside = row.near_zeros and x[0][i] < 0
                if not in_range(want) or beside or (name == "erfc" and abs(x[0][i]) > 27):
                    continue
                kept, away, lost = neighbours(want)
                if abs(lost - Fraction(1, 2)) < BOUND:
                    continue
                nearest = away if lost > Fraction(1, 2) else kept
                step = math.nextafter(nearest, math.copysign(outward, nearest))
                assert got[i] == step, (name, [float(v[i]) for v in x])


EXACT = {
    "exp": [(0.0,)], "exp2": [(5.0,), (-3.0,)], "log": [(1.0,)], "log2": [(8.0,), (0.25,)], "log10": [(1000.0,)],
    "pow": [(3.0, 2.0), (1.5, 30.0), (7.0, 3.0), (9.0, 0.5), (3.0, 33.0), (2.0, -7.0)], "cbrt": [(27.0,), (-3.375,)],
    "rsqrt": [(0.25,), (4.0,)], "hypot": [(3.0, 4.0), (5.0, 12.0)], "cosh": [(0.0,)], "cos": [(0.0,)], "erfc": [(0.0,)],
    "sigmoid": [(0.0,)], "acos": [(1.0,)], "acosh": [(1.0,)], "lgamma": [(1.0,), (2.0,)], "fmod": [(5.3, 1.7)],
    "floordiv": [(7.0, 2.0)],
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_exact_values_never_move(functions: Evaluated, name: str) -> None:
    for args in EXACT[name]:
        operands = [np.full(2, a) for a in args]
        with context():
            want = float(reference(name)(*map(gmpy2.mpfr, args)))
        for mode in ("stochastic", "stochastic_equal"):
            got = functions.rounded(name, mode, operands, COINS)
            assert got.tolist() == [want, want], (name, args, mode)


@pytest.mark.parametrize("name", ["sin", "tan", "asin", "atan", "sinh", "tanh", "asinh", "atanh", "expm1", "log1p"])
@pytest.mark.parametrize("x", [1e-170, -1e-170, 3e-200])
def test_a_value_whose_lost_part_underflows_is_not_exact(functions: Evaluated, name: str, x: float) -> None:
    both = functions.rounded(name, "stochastic_equal", [np.full(2, x)], COINS)
    with gmpy2.context(precision=3000):
        kept, away, _ = neighbours(reference(name)(gmpy2.mpfr(x)))
    assert both.tolist() == [kept, away]


def test_midpoints_of_powers_go_to_the_even_number(functions: Evaluated) -> None:
    """Squares and cubes of 54 bits: up_down steps from the even neighbour."""
    a = np.array([(2**27 - 1) / 2.0**27, 1 + 2.0**-26 + 2.0**-27, 2.0**18 - 1, 189573.0])
    b = np.array([2.0, 2.0, 3.0, 3.0])
    nearest = np.array([float(Fraction(x) ** int(y)) for x, y in zip(a, b, strict=True)])
    got = functions.rounded("pow", "up_down", [a, b], 2**32 - 1)
    np.testing.assert_array_equal(got, np.nextafter(nearest, np.inf))
