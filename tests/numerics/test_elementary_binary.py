"""Functions of two arguments against an independent reference: random pairs, stored hard cases, pow's exact cases."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fractions import Fraction
from math import ldexp
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.pairs import PAIRS, Check, _floored_to_odd
from benchmarks.reference import MODES
from fxround.numerics.elementary import ELEMENTARY
from fxround.numerics.elementary.power import exact_powers

ROOT = Path(__file__).parents[2]
STORED: dict[str, Any] = json.loads((ROOT / "docs" / "pairs.json").read_text())
CLEAN = dict.fromkeys(MODES, 0)


def test_every_function_of_two_arguments_has_a_reference() -> None:
    assert {name for name, row in ELEMENTARY.items() if row.arity == 2} == set(PAIRS) == set(STORED)


@pytest.mark.part(2)
@pytest.mark.parametrize("name", PAIRS)
def test_random_pairs_and_hard_cases_are_correctly_rounded(name: str) -> None:
    check = Check(name)
    check.random(400_000, seed=len(name))
    hard = [[float.fromhex(v) for v in pair.split()] for _, pair in STORED[name]["hardest"]]
    if hard:
        check.check(*np.array(hard, np.float32).T)
    assert check.results.mismatches == CLEAN, check.results.examples


@pytest.mark.parametrize("name", PAIRS)
def test_stored_and_documented_searches_found_nothing(name: str) -> None:
    found = STORED[name]
    assert found["mismatches"] == CLEAN
    row = f"| `{name}` | {found['inputs']:.0e} | 0 | {found['near_ties']} |"
    assert row in (ROOT / "docs" / "functions.md").read_text(encoding="utf-8")


def odd_bases() -> Iterator[tuple[float, float, float]]:
    """(a, b, a^b) for a = m 2^e, m > 1 odd: part 2 of the proof in power.py."""
    for m, modulus, n, f in exact_powers():
        root = round(m ** (1 / modulus))
        assert root**modulus == m
        top = 128 - m.bit_length()
        for e in range(-(149 // modulus) * modulus, top + 1, modulus):
            exponent = e * n // modulus
            if -175 <= exponent <= 128:
                yield ldexp(m, e), n / 2**f, ldexp(root**n, exponent)


def powers_of_two() -> Iterator[tuple[float, float, float]]:
    """a = 2^e, e b an integer: part 1."""
    for e in range(-149, 128):
        unit = e & -e
        for i in range(-151 * unit // abs(e) if e else 0, 151 * unit // abs(e) + 1 if e else 0):
            yield 2.0**e, i / unit, 2.0 ** (e * i // unit)


@pytest.mark.parametrize("cases", [odd_bases, powers_of_two])
def test_exact_and_midpoint_cases_of_pow_are_decided_exactly(cases: Any) -> None:
    a, b, value = np.array(list(cases()), dtype=np.float64).T
    known = (a >= 2.0**-149) & (a < 2.0**128) & (b != 0)
    a, b, value = a[known], b[known], value[known]
    assert len(a) > 9000
    for sign in (1.0, -1.0):
        usable = (b == np.rint(b)) if sign < 0 else np.ones(len(b), np.bool_)
        signs = np.where((sign < 0) & (b % 2 == 1), -1.0, 1.0)
        x, y = (sign * a[usable]).astype(np.float32), b[usable].astype(np.float32)
        assert (x == sign * a[usable]).all() and (y == b[usable]).all()
        found = Check("pow").against(x, y, (signs * value)[usable])
        assert found.mismatches == CLEAN, found.examples


def test_the_listed_exact_powers_are_all_that_fit() -> None:
    """By brute force over small bases and exponents: z = a^b has at most 25 bits exactly for the listed (m, n, F)."""
    listed = {(m, n, f) for m, _, n, f in exact_powers()}
    for m in range(3, 6000, 2):
        for f in range(4):
            root = round(m ** (1 / 2**f))
            for n in range(1, 40, 1 if f == 0 else 2):
                fits = root ** (2**f) == m and root**n < 1 << 25 and (n, f) != (1, 0)
                assert fits == ((m, n, f) in listed), (m, n, f)


def test_the_floored_remainder_is_rounded_to_odd() -> None:
    rng = np.random.default_rng(0)
    x, y = (
        (rng.standard_normal((2, 500)) * 2.0 ** rng.integers(-30, 30, (2, 500))).astype(np.float32).astype(np.float64)
    )
    for a, b, r in zip(x.tolist(), y.tolist(), _floored_to_odd(x, y).tolist(), strict=True):
        exact = Fraction(a) % Fraction(b)
        assert Fraction(r) == exact or (
            np.float64(r).view(np.int64) & 1 and abs(Fraction(r) - exact) < Fraction(np.spacing(abs(r)))
        )


@pytest.mark.parametrize("name, x, y", [("pow", 1.5, 2.5), ("hypot", 3.0, 4.5), ("remainder", -7.5, 2.0)])
def test_a_wrong_result_is_found(name: str, x: float, y: float) -> None:
    check, a, b = Check(name), np.full(4, x, np.float32), np.full(4, y, np.float32)
    assert check.check(a, b).mismatches == CLEAN
    right = check._run
    check._run = lambda p, q: (np.nextafter(right(p, q)[0], np.float32(9)), right(p, q)[1])  # type: ignore[method-assign]
    assert check.check(a, b).mismatches["nearest_even"] == 4
