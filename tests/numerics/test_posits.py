"""Posits and the formats of IEEE P3109, compared with their codes, decoded here, and with gfloat."""

from __future__ import annotations

import math
from bisect import bisect_left
from fractions import Fraction
from itertools import product

import gfloat
import gfloat.formats as g
import numpy as np
import pytest
import torch
from gfloat import Domain, RoundMode, Signedness
from neighbours import Array, boundaries, encodings, float_type, held, random_words

import fxround
from fxround.kernels.maps import map_kernel
from fxround.kernels.program import Program
from fxround.numerics.arithmetic.rounding import rounding_function
from fxround.numerics.formats import Format
from fxround.numerics.modes import MODES, Mode, Rounding
from fxround.numerics.specification.exact import round_exact, round_float

POSITS = [(n, es) for n in (3, 4, 5, 6, 7, 8) for es in (0, 1, 2, 3)] + [(10, 2), (16, 1), (16, 2), (16, 3), (32, 2)]
SMALL = [(n, es) for n, es in POSITS if n <= 10]
MODES_HERE = [*MODES, "stochastic:2", "stochastic_c:3"]


def decoded(code: int, n: int, es: int) -> Fraction:
    """The value of a positive posit by the text of the standard: fields of a string of binary digits."""
    digits = format(code, f"0{n}b")[1:]
    run = len(digits) - len(digits.lstrip(digits[0]))
    regime = run - 1 if digits[0] == "1" else -run
    rest = digits[run + 1 :]
    exponent = int(rest[:es].ljust(es, "0") or "0", 2)
    fraction = rest[es:]
    return (1 + Fraction(int(fraction or "0", 2), 2 ** len(fraction))) * Fraction(2) ** (regime * 2**es + exponent)


def points(fmt: Format, carrier: str) -> Array:
    """Values, what is between them in this format and in the one of a bit more, neighbours, and all exponents."""
    kind, rng = float_type(carrier), np.random.default_rng(5)
    n, es = fmt.posit or (0, 0)
    codes = range(1, 2**n) if n <= 8 else rng.integers(1, 2**n, 500).tolist()
    near = np.array([float(decoded(code, n + 1, es)) for code in codes])
    scattered = np.exp2(rng.uniform(fmt.emin - 3, fmt.emax + 3, 200))
    near = np.concatenate([near, scattered]).astype(kind)
    near = np.concatenate([near, np.nextafter(near, kind(np.inf)), np.nextafter(near, kind(0))])
    near = np.concatenate([near, np.array([0.0, np.inf, np.nan, 1e-45, 3e38], kind)])
    return np.concatenate([near, -near])


@pytest.mark.parametrize("n, es", SMALL)
def test_codes_are_the_standard_s(n: int, es: int) -> None:
    fmt = Format.posit_of(n, es)
    values = [decoded(code, n, es) for code in range(1, 2 ** (n - 1))]
    assert values == sorted(set(values)) and list(fmt.magnitudes()) == [0.0, *map(float, values)]
    assert (values[0], values[-1]) == (Fraction(2) ** fmt.emin, Fraction(fmt.maximum))
    held = np.array([*fmt.magnitudes()])
    assert fmt.contains(np.array([held, -held])).all() and fmt.contains(math.nan)
    middles = [float(decoded(2 * code + 1, n + 1, es)) for code in range(2 ** (n - 1) - 1)][1:]
    assert not fmt.contains([*middles, fmt.maximum * 2, 2.0 ** (fmt.emin - 1), math.inf]).any()


@pytest.mark.parametrize("n, es", SMALL)
def test_nearest_is_the_standard_s(n: int, es: int) -> None:
    """Every code of two bits more, its neighbours, and numbers beyond the ends: the middle of two posits is the posit
    with one bit more, a tie has the even code, no number becomes zero or NaR."""
    rounding = Rounding.parse(f"posit({n},{es})")
    values, middles = ([decoded(c, n + k, es) for c in range(1, 2 ** (n - 1 + k))] for k in (0, 1))
    x = [decoded(code, n + 2, es) for code in range(1, 2 ** (n + 1))]
    x += [v * (1 + s * Fraction(1, 2**30)) for v in middles for s in (1, -1)] + [values[0] / 1000, values[-1] * 1000]
    got = rounding_function(rounding, "f64").evaluate(np.array([float(v) for v in x]), 0)[0]
    for v, result in zip(x, got, strict=True):
        i = bisect_left(middles, v)
        if (
            i < len(middles) and middles[i] == v and i % 2
        ):  # a value of the format itself: codes of n bits are even there
            want = v
        elif i < len(middles) and middles[i] == v:  # a middle, of the values of codes i / 2 and i / 2 + 1
            even = i // 2 if (i // 2) % 2 == 0 else i // 2 + 1
            want = values[min(max(even, 1), len(values)) - 1]
        else:
            want = values[min(max((i + 1) // 2, 1), len(values)) - 1]
        assert Fraction(float(result)) == want == Fraction(round_exact(v, False, rounding)), v


@pytest.mark.part(9)
@pytest.mark.parametrize("n, es", POSITS)
@pytest.mark.parametrize("carrier", ["f32", "f64"])
def test_the_algorithm_is_the_specification(n: int, es: int, carrier: str) -> None:
    fmt = Format.posit_of(n, es)
    if not held(fmt, carrier):
        assert (n, carrier) == (32, "f32")
        return
    every = points(fmt, carrier)
    for number, mode in enumerate(MODES_HERE):
        x, rounding = every[number % 4 :: 4], Rounding.parse(f"{fmt}/{mode}")
        random = random_words(x.size, number)
        got = rounding_function(rounding, carrier).evaluate(x, random)[0]
        want = np.array([round_float(float(v), rounding, int(r)) for v, r in zip(x, random, strict=True)], x.dtype)
        np.testing.assert_array_equal(encodings(got), encodings(want), str(rounding))


@pytest.mark.parametrize("n, es", [row for row in SMALL if row[0] > 3])
def test_up_down_steps_to_the_next_code(n: int, es: int) -> None:
    """From the nearest value, away from zero or towards it; zero stays, and the largest value steps down only."""
    values = [0.0, *(float(decoded(code, n, es)) for code in range(1, 2 ** (n - 1)))]
    x = np.array([*values, *(-v for v in values)])
    for word, up in ((0, False), (2**31 - 1, False), (2**31, True), (2**32 - 1, True)):
        got = rounding_function(Rounding.parse(f"posit({n},{es})/up_down"), "f64").evaluate(x, np.uint32(word))[0]
        moved = [0.0, *values[2:], values[-2]] if up else [0.0, *values[:-1]]
        want = np.array([*moved, *(-v for v in moved)]) + 0.0
        np.testing.assert_array_equal(encodings(got), encodings(want))


def test_posits_in_kernels_and_operations() -> None:
    x = torch.randn(1000, dtype=torch.float64) * torch.logspace(-30, 30, 1000, dtype=torch.float64)
    for text in ("posit16", "posit(8,1)/toward_zero", "posit32/stochastic"):
        rounding = Rounding.parse(text)
        random = np.zeros(1000, np.uint32)
        if rounding.mode.deterministic:
            want = rounding_function(rounding, "f64").evaluate(x.numpy(), random)[0]
            np.testing.assert_array_equal(fxround.round(x, text).numpy(), want)
        assert rounding.format.contains(fxround.round(x, text)).all()
    a, b = (np.random.default_rng(s).standard_normal(300).astype(np.float32) for s in (1, 2))
    for name, mode in product(("add", "mul", "div"), ("nearest_even", "toward_positive", "to_odd")):
        rounding = Rounding.parse(f"posit(8,2)/{mode}")
        got = map_kernel(Program.parse(f"t0 = {name}(x0, x1) @ {rounding}"), ("f32", "f32"), "f32").body.evaluate(a, b)[
            0
        ]
        for p, q, r in zip(a.tolist(), b.tolist(), got.tolist(), strict=True):
            exact = {
                "add": Fraction(p) + Fraction(q),
                "mul": Fraction(p) * Fraction(q),
                "div": Fraction(p) / Fraction(q),
            }
            assert r == round_exact(exact[name], exact[name] < 0, rounding)


BEYOND = {
    "exp": ([1000.0, -1000.0, 800.0], [1, 0, 1]),
    "sinh": ([1000.0, -1000.0, 800.0], [1, -1, 1]),
    "mul": ([1e300, -1e300, 1e-300], [1, -1, 0], [1e300, 1e300, 1e-300]),
    "add": ([1.7e308, -1.7e308, 1.5], [1, -1, None], [1.7e308, -1.7e308, -1.5]),
}


@pytest.mark.parametrize("mode", ["nearest_even", "toward_zero", "stochastic", "stochastic_equal", "stochastic_c:4"])
@pytest.mark.parametrize("name", BEYOND)
def test_no_operation_rounds_a_finite_number_to_nar_or_a_nonzero_one_to_zero(name: str, mode: str) -> None:
    """1: the largest posit; 0: the smallest one; None: an exact zero. The values are beyond binary64's range too."""
    first, ends, *others = BEYOND[name]
    x = [np.array(v) for v in (first, *others)]
    program = Program.parse(f"t0 = {name}({', '.join(f'x{i}' for i in range(len(x)))}) @ posit(16,2)/{mode}")
    body = map_kernel(program, ("f64",) * len(x), "f64").body
    want = [{1: 2.0**56, -1: -(2.0**56), 0: 2.0**-56, None: 0.0}[end] for end in ends]
    for word in (0, 2**31, 2**32 - 1):
        drawn = () if Mode.parse(mode).deterministic else (np.uint32(word),)
        assert body.evaluate(*x, *drawn)[0].tolist() == want


def test_a_posit_s_limits() -> None:
    x = torch.tensor([1e-30, -1e-30, 1e30, -1e30, math.inf, -math.inf, math.nan, -0.0])
    got = fxround.round(x, "posit(8,2)").tolist()
    assert got[:4] == [2.0**-24, -(2.0**-24), 2.0**24, -(2.0**24)]
    assert all(map(math.isnan, got[4:7])) and math.copysign(1.0, got[7]) == 1.0
    assert fxround.round(x, "posit(8,2)/toward_zero")[0] == 2.0**-24
    for text in ("posit(2,0)", "posit(33,2)", "posit(8,5)"):
        with pytest.raises(ValueError, match="expected 3 to 32 bits and 0 to 4 exponent bits"):
            Format.parse(text)
    assert Format.parse("posit16") == Format.parse("posit(16,2)") and str(Format.parse("posit8")) == "posit(8,2)"
    assert Format.posit_of(8, 2).within(Format.posit_of(16, 2)) and not Format.posit_of(8, 2).within(
        Format.posit_of(8, 1)
    )
    assert Format.posit_of(16, 2).within(Format.parse("binary32")) and not Format.parse("e5m2").within(
        Format.posit_of(16, 2)
    )


# ---- P3109 ----

STANDARD = [
    *((8, p, True, e) for p in range(1, 8) for e in (True, False)),
    *((8, p, False, e) for p in range(1, 9) for e in (True, False)),
    *((k, p, True, True) for k, p in ((3, 2), (4, 2), (6, 3), (16, 8), (11, 1))),
    (5, 1, False, False),
]


def named(k: int, p: int, signed: bool, extended: bool) -> str:
    return f"binary{k}p{p}{'su'[not signed]}{'ef'[not extended]}"


@pytest.mark.parametrize("k, p, signed, extended", STANDARD)
def test_p3109_values_are_those_of_all_codes(k: int, p: int, signed: bool, extended: bool) -> None:
    """Value of code c: exponent field E and trailing significand T, with the bias 2^(k - p - signed)."""
    fmt = Format.parse(named(k, p, signed, extended))
    bias, values = 2 ** (k - p - signed), []
    for code in range(2 ** (k - signed)):
        field, tail = code >> (p - 1), code & (2 ** (p - 1) - 1)
        scale = Fraction(2) ** (max(field, 1) - bias)
        values.append((Fraction(tail, 2 ** (p - 1)) + (field > 0)) * scale)
    finite = values[: len(values) - (not signed) - extended]
    assert [Fraction(v) for v in fmt.magnitudes()] == finite
    assert (fmt.signed, fmt.inf, fmt.nan, fmt.has_minus_zero) == (signed, extended, True, False)
    assert Format.parse(str(fmt)) == fmt


THEIRS = {
    "nearest_even": RoundMode.TiesToEven,
    "nearest_away": RoundMode.TiesToAway,
    "toward_zero": RoundMode.TowardZero,
    "toward_positive": RoundMode.TowardPositive,
    "toward_negative": RoundMode.TowardNegative,
}


@pytest.mark.parametrize("k, p, signed, extended", STANDARD)
def test_p3109_rounds_as_gfloat(k: int, p: int, signed: bool, extended: bool) -> None:
    """Not below zero without a sign, where gfloat keeps the sign. Finite formats become NaN beyond their ends, or
    saturate."""
    fmt = Format.parse(named(k, p, signed, extended))
    info = g.format_info_p3109(
        k, p, Signedness.Signed if signed else Signedness.Unsigned, Domain.Extended if extended else Domain.Finite
    )
    carrier = "f32" if held(fmt, "f32") else "f64"
    x = np.concatenate(
        [boundaries(fmt, carrier), np.random.default_rng(1).standard_normal(300).astype(float_type(carrier))]
    )
    x = x[np.isfinite(x)] if signed else x[np.isfinite(x) & (x >= 0) & ~np.signbit(x)]
    for (mode, theirs), saturate in product(THEIRS.items(), (False, True)):
        rounding = Rounding(fmt, MODES[mode], "saturate" if saturate else fmt.default_overflow)
        with np.errstate(all="ignore"):
            want = gfloat.round_ndarray(info, x.astype(np.float64), theirs, saturate).astype(x.dtype)
        got = rounding_function(rounding, carrier).evaluate(x, 0)[0]
        wrong = (encodings(got) != encodings(want)) & ~(np.isnan(got) & np.isnan(want))
        assert not wrong.any(), (str(rounding), x[wrong][:4], got[wrong][:4], want[wrong][:4])


@pytest.mark.parametrize(
    "text", ["binary8p1se", "binary8p1uf", "binary8p3se", "binary8p4uf", "binary8p8ue", "binary11p1se"]
)
@pytest.mark.parametrize("carrier", ["f32", "f64"])
def test_p3109_algorithm_is_the_specification(text: str, carrier: str) -> None:
    fmt = Format.parse(text)
    if not held(fmt, carrier):
        assert (text, carrier) == ("binary11p1se", "f32")
        return
    every = boundaries(fmt, carrier)
    for number, mode in enumerate([*MODES.values(), Mode.parse("stochastic_b:2")]):
        for overflow in fmt.overflows:
            x, rounding = every[number % 3 :: 3], Rounding(fmt, mode, overflow)
            random = random_words(x.size, number)
            got = rounding_function(rounding, carrier).evaluate(x, random)[0]
            want = np.array([round_float(float(v), rounding, int(r)) for v, r in zip(x, random, strict=True)], x.dtype)
            np.testing.assert_array_equal(encodings(got), encodings(want), str(rounding))


def test_p3109_names() -> None:
    assert Format.parse("binary8p3") == Format.parse("binary8p3se") == Format.p3109(bits=8, precision=3)
    assert str(Format.p3109(bits=8, precision=4, signed=False, extended=False)) == "binary8p4uf"
    assert Format.parse("binary8p3se-flush").subnormals is False
    for text in ("binary8p8se", "binary2p1se", "binary8p0se", "binary17p3se"):
        with pytest.raises(ValueError, match="expected 3 to 16 bits"):
            Format.parse(text)
    with pytest.raises(ValueError, match=r"within binary64|outside the range of binary64"):
        Format.parse("binary16p2se")
    assert (
        "even code" in Format.parse("binary8p1").describe()
        and "posit(8,2): 8 bits" in Format.parse("posit8").describe()
    )
