"""Tables of values: the algorithm, the specification, and a search by sentences that shares nothing with either."""

from __future__ import annotations

import math
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from neighbours import Array, encodings, float_type, held, random_words

import fxround
from fxround.kernels.maps import map_kernel
from fxround.kernels.program import Program
from fxround.numerics.arithmetic.rounding import rounding_function
from fxround.numerics.formats import FORMATS, TABLES, Format
from fxround.numerics.gradients import Gradient
from fxround.numerics.modes import MODES, Mode, Rounding
from fxround.numerics.specification.exact import round_exact, round_float
from fxround.policy import Policy, Rule


def drawn_values(count: int, kind: Any, seed: int) -> list[float]:
    return np.unique(np.random.default_rng(seed).standard_normal(count).astype(kind)).astype(float).tolist()


FORMS = {
    **TABLES,
    "signs": Format.table([-1, 1]),
    "no zero": Format.table([-2, 1, 3]),
    "positive": Format.table([0.25, 8, 9]),
    "negative": Format.table([-9, -8, -0.25]),
    "far apart": Format.table([-(2.0**-90), 0, 2.0**-100, 1, 2.0**127]),
    "e2m1fn": Format.table(sorted({s * m for m in FORMATS["e2m1fn"].magnitudes() for s in (-1, 1)})),
    "32": Format.table(drawn_values(32, np.float32, 1)),
    "33": Format.table(drawn_values(33, np.float32, 2)),
    "256": Format.table(drawn_values(256, np.float32, 3)),
    "256 in binary64": Format.table(drawn_values(256, np.float64, 4)),
}
NEAREST = [m for m in MODES if m.startswith("nearest_")]
DETERMINISTIC = [name for name, mode in MODES.items() if mode.deterministic]
DRAWING = [
    "stochastic",
    "stochastic:3",
    "stochastic_b:2",
    "stochastic_c:3",
    "stochastic_c",
    "stochastic_equal",
    "up_down",
]
HALVES = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)


def searched(x: Fraction, values: tuple[float, ...], mode: str) -> float:
    """The listed value by a sentence for each mode; for values between the ends."""
    low, high = max(v for v in values if v <= x), min(v for v in values if v >= x)
    inner, outer = sorted((high, low), key=abs)
    gaps = [abs(x - Fraction(v)) for v in values]
    nearest = [v for v, gap in zip(values, gaps, strict=True) if gap == min(gaps)]
    if mode in NEAREST and len(nearest) == 1:
        return nearest[0]
    even, odd = sorted((low, high), key=lambda v: values.index(v) % 2)
    chosen = {
        "nearest_even": even,
        "nearest_odd": odd,
        "nearest_away": outer,
        "nearest_zero": inner,
        "toward_zero": inner,
        "away_from_zero": outer,
        "toward_positive": high,
        "toward_negative": low,
        "to_odd": odd,
    }
    return low if low == high else chosen[mode]


def points(fmt: Format, carrier: str) -> Array:
    """Values, midpoints, and their neighbours in the carrier; zeros, infinities, NaN, and numbers of all exponents."""
    kind, rng = float_type(carrier), np.random.default_rng(7)
    values = np.array(fmt.values)
    near = np.concatenate([values, (values[1:] + values[:-1]) / 2, rng.standard_normal(100)]).astype(kind)
    wide = (rng.standard_normal(100) * np.exp2(rng.uniform(-120, 120, 100))).astype(kind)
    near = np.concatenate([near, np.nextafter(near, kind(np.inf)), np.nextafter(near, kind(-np.inf)), wide])
    return np.concatenate([near, np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -3e38], kind)])


def specified(x: Array, rounding: Rounding, random: Array) -> Array:
    return np.array([round_float(float(v), rounding, int(r)) for v, r in zip(x, random, strict=True)], x.dtype)


CASES = [
    (name, c) for name, fmt in FORMS.items() for c in ("f32", "f64") if held(fmt, c) and (name, c) != ("256", "f64")
]


@pytest.mark.part(5)
@pytest.mark.parametrize("name, carrier", CASES)
def test_the_algorithm_is_the_specification(name: str, carrier: str) -> None:
    every = points(FORMS[name], carrier)
    for number, mode in enumerate((*DETERMINISTIC, *DRAWING)):
        x = every[number % 6 :: 6] if "256" in name else every
        rounding, random = Rounding.parse(f"{FORMS[name]}/{mode}"), random_words(x.size, number)
        got = rounding_function(rounding, carrier).evaluate(x, random)[0]
        np.testing.assert_array_equal(encodings(got), encodings(specified(x, rounding, random)), str(rounding)[:60])


@pytest.mark.part(without=("32",))
@pytest.mark.parametrize("name", [n for n in FORMS if "256" not in n])
def test_the_specification_is_what_a_search_finds(name: str) -> None:
    fmt = FORMS[name]
    for number, mode in enumerate(DETERMINISTIC):
        x = points(fmt, "f32")[number % 3 :: 3]
        rounding = Rounding.parse(f"{fmt}/{mode}")
        for v in x[(x >= fmt.values[0]) & (x <= fmt.values[-1])].tolist():
            assert round_exact(Fraction(v), v < 0, rounding) == searched(Fraction(v), fmt.values, mode), (mode, v)


@pytest.mark.parametrize("name", FORMS)
def test_up_down_steps_to_a_neighbour_in_the_list(name: str) -> None:
    """From the nearest value, outwards or inwards; zero stays, an end has one neighbour, an infinity is the end."""
    values = list(FORMS[name].values)
    rounding = Rounding.parse(f"{FORMS[name]}/up_down")
    near = rounding_function(Rounding.parse(str(FORMS[name])), "f64")
    x = np.concatenate([values, np.random.default_rng(9).uniform(values[0] - 1, values[-1] + 1, 200)])
    for word, outwards in ((0, False), (2**31, True)):
        got = rounding_function(rounding, "f64").evaluate(x, np.uint32(word))[0].tolist()
        for v, result in zip(near.evaluate(x, 0)[0].tolist(), got, strict=True):
            others = {values[max(values.index(v) - 1, 0)], values[min(values.index(v) + 1, len(values) - 1)]} - {v}
            side = {o for o in others if (o > v) == ((v > 0) == outwards)}
            assert result in ({v} if v == 0 else side or others)
        ends = rounding_function(rounding, "f64").evaluate(np.array([math.inf, -math.inf]), np.uint32(word))[0]
        assert ends.tolist() == [values[-1], values[0]]


@pytest.mark.part(3)
@pytest.mark.parametrize("mode", DETERMINISTIC)
def test_every_binary16_number(mode: str) -> None:
    """The kernel of this machine, the IR and a search agree; x beyond an end becomes the end."""
    for name in ("nf4", "no zero", "33"):
        fmt = FORMS[name]
        rounding = Rounding.parse(f"{fmt}/{mode}")
        got = fxround.round(HALVES, rounding)
        np.testing.assert_array_equal(
            encodings(got), encodings(rounding_function(rounding, "f32").evaluate(HALVES, 0)[0])
        )
        assert np.isnan(got[np.isnan(HALVES)]).all()
        assert (got[fmt.values[-1] < HALVES] == np.float32(fmt.values[-1])).all()
        assert (got[fmt.values[0] > HALVES] == np.float32(fmt.values[0])).all()
        inside = np.flatnonzero((fmt.values[0] <= HALVES) & (fmt.values[-1] >= HALVES))[::47]
        want = [searched(Fraction(float(v)), fmt.values, mode) for v in HALVES[inside]]
        assert got[inside].tolist() == np.array(want, np.float32).tolist()


def test_a_table_of_a_format_s_values_rounds_as_the_format() -> None:
    """Ties aside, which go to the even significand there; e2m1fn's are the numbers of its codes, but for minus zero."""
    for mode in DETERMINISTIC:
        if mode in ("nearest_even", "nearest_odd", "to_odd"):
            continue
        got = fxround.round(HALVES, f"{FORMS['e2m1fn']}/{mode}")
        want = fxround.round(HALVES, f"e2m1fn/{mode}/saturate")
        np.testing.assert_array_equal(got, want)


# bitsandbytes, csrc/kernels.cu, dQuantizeNF4: the bounds of the codes, which a value must exceed.
NF4_BOUNDS = (
    *(-0.8480964004993439, -0.6106329262256622, -0.4599952697753906, -0.33967943489551544, -0.23460740596055984),
    *(-0.13791173323988914, -0.045525018125772476, 0.03979014977812767, 0.1202552504837513, 0.2035212516784668),
    *(0.2920137718319893, 0.3893125355243683, 0.5016634166240692, 0.6427869200706482, 0.8614784181118011),
)


def test_nf4_is_quantized_as_in_bitsandbytes() -> None:
    x = np.concatenate(
        [HALVES[np.isfinite(HALVES)], np.random.default_rng(3).uniform(-1, 1, 100_000).astype(np.float32)]
    )
    codes = np.searchsorted(np.array(NF4_BOUNDS, np.float32), x, side="left")
    np.testing.assert_array_equal(fxround.round(x, "nf4"), np.array(FORMS["nf4"].values, np.float32)[codes])


@pytest.mark.parametrize("length", [64, 100, 7])
def test_nf4_in_blocks_scaled_by_the_largest_magnitude(length: int) -> None:
    """bitsandbytes: x / absmax to the nearest of the 16 values, times absmax, in binary32."""
    x = torch.randn(5, length) * torch.logspace(-3, 3, 5)[:, None]
    got, values = fxround.round(x, "scaled(nf4;64,binary32,nearest)"), torch.tensor(FORMS["nf4"].values)
    for row, found in zip(x, got, strict=True):
        for block, result in zip(row.split(64), found.split(64), strict=True):
            scale = block.abs().max()
            quotient = (block.double() / scale.double())[:, None]
            nearest = values[(quotient - values.double()).abs().argmin(1)]
            assert torch.equal(result, nearest * scale)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["stochastic", "stochastic_b", "stochastic_c"])
def test_the_probability_is_the_distance_cut_to_n_bits(name: str, n: int) -> None:
    """Every word of n bits. The kept neighbour is the one of the smaller magnitude."""
    cut = {"stochastic": math.floor, "stochastic_b": lambda p: math.floor(p + Fraction(1, 2)), "stochastic_c": round}
    words = np.arange(2**n, dtype=np.uint32) << np.uint32(32 - n)
    function = rounding_function(Rounding.parse(f"table(-3,0,1,1.75)/{name}:{n}"), "f32")
    for kept, other in ((0.0, -3.0), (0.0, 1.0), (1.0, 1.75)):
        for k in range(1, 48):
            x = kept + (other - kept) * k / 48
            got = function.evaluate(np.float32(x), words)[0]
            lost = (Fraction(float(np.float32(x))) - Fraction(kept)) / (Fraction(other) - Fraction(kept))
            assert set(got.tolist()) <= {kept, other}
            assert int((got == other).sum()) == cut[name](lost * 2**n)


def test_stochastic_rounding_to_a_table_is_unbiased() -> None:
    """Six standard deviations of a binomial: a false alarm in 5e8 seeds for each of the seven numbers."""
    n = 100_000
    for x in (-0.9, -0.6, -0.05, 0.01, 0.3, 0.5, 0.9):
        low = max(v for v in FORMS["nf4"].values if v <= x)
        high = min(v for v in FORMS["nf4"].values if v > x)
        p = (x - low) / (high - low)
        up = int((fxround.round(torch.full((n,), x, dtype=torch.float64), "nf4/stochastic", seed=4) == high).sum())
        assert abs(up - n * p) <= 6 * math.sqrt(n * p * (1 - p))


@pytest.mark.parametrize("name", ["add", "mul", "div", "fma", "sqrt"])
def test_operations_round_their_exact_value_once(name: str) -> None:
    exact = {
        "add": lambda a, b: a + b,
        "mul": lambda a, b: a * b,
        "div": lambda a, b: a / b,
        "fma": lambda a, b, c: a * b + c,
    }
    rng = np.random.default_rng(8)
    arity = {"fma": 3, "sqrt": 1}.get(name, 2)
    # Sums near a midpoint of nf4, from both sides, among others.
    operands = [np.concatenate([rng.choice(FORMS["nf4"].values, 200), rng.uniform(0, 1, 200)]) for _ in range(arity)]
    operands = [v.astype(np.float32) for v in operands]
    operands[-1][:100] = operands[-1][:100] * np.float32(2.0**-60)
    for mode in DETERMINISTIC:
        text = f"t0 = {name}({', '.join(f'x{i}' for i in range(arity))}) @ nf4/{mode}"
        body = map_kernel(Program.parse(text), ("f32",) * arity, "f32").body
        with np.errstate(all="ignore"):
            got = body.evaluate(*operands)[0]
        rounding = Rounding.parse(f"nf4/{mode}")
        for i in range(400):
            row = [Fraction(float(v[i])) for v in operands]
            if name == "sqrt":
                # A root is on the same side of a bound as its argument is of the bound's square.
                assert row[0] < 0 or abs(float(got[i])) <= 1
                continue
            if name == "div" and row[1] == 0:
                continue
            want = round_exact(exact[name](*row), False, rounding)
            assert float(got[i]) == want, (mode, i, row)


def test_text_loses_nothing() -> None:
    for fmt in FORMS.values():
        assert Format.parse(str(fmt)) == fmt
        for mode in (*DETERMINISTIC, *DRAWING):
            rounding = Rounding(fmt, Mode.parse(mode), "saturate")
            assert Rounding.parse(str(rounding)) == rounding == pickle.loads(pickle.dumps(rounding))
            program = Program.parse(f"t0 = identity(x0) @ {rounding}")
            assert str(Program.parse(str(program))) == str(program)
    assert str(Format.parse("table(-1, -0.5, 0, 0x1p-1, 1)")) == "table(-1,-0.5,0,0.5,1)"
    assert fxround.table(torch.tensor([-1, 0.5])) == fxround.table(np.array([-1, 0.5])) == Format.parse("table(-1,0.5)")
    assert FORMS["nf4"].boundary_precision == 26


@pytest.mark.parametrize(
    "text, message",
    [
        ("table(1)", "2 to 256 values, got 1"),
        (f"table({','.join(map(str, range(257)))})", "2 to 256 values, got 257"),
        ("table(1,1)", "ascend, each once: 1.0 follows 1.0"),
        ("table(1,0)", "ascend, each once: 0.0 follows 1.0"),
        ("table(-0.0,0)", "ascend"),
        ("table(0,inf)", "finite values of magnitudes up to"),
        ("table(0,1e302)", "finite values of magnitudes up to"),
        ("table(0,x)", "'x' is not a number"),
        ("table()", "no format is named"),
        ("nf4/nearest_even/inf", "nf4 cannot overflow to 'inf'; it can: saturate"),
    ],
)
def test_a_wrong_table_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rounding.parse(text)


@pytest.mark.parametrize("values", [3, None])
def test_a_table_is_made_of_numbers(values: Any) -> None:
    with pytest.raises(TypeError, match="expected 2 to 256 numbers in ascending order"):
        fxround.table(values)


def test_what_a_table_does_not_do() -> None:
    with pytest.raises(ValueError, match="values of nf4 that a bfloat16 tensor cannot store"):
        fxround.round(torch.zeros(2, dtype=torch.bfloat16), "nf4")
    with pytest.raises(ValueError, match=r"a table of 256 values that .*; use .* or list numbers of this dtype"):
        fxround.round(torch.zeros(2), FORMS["256 in binary64"])
    with pytest.raises(ValueError, match="two bits more than binary64 has"):
        map_kernel(Program.parse(f"t0 = add(x0, x1) @ {FORMS['256 in binary64']}"), ("f64", "f64"), "f64")
    with pytest.raises(ValueError, match="zero_clamped"):
        fxround.round(torch.zeros(2), "nf4", gradient="zero_clamped")
    assert str(Gradient.parse("nf4")) == "nf4/nearest_even/saturate"


def test_within_and_contains() -> None:
    small = Format.table([-1, 0, 0.5])
    assert small.within(FORMATS["e2m1fn"]) and small.within(Format.table([-1, 0, 0.5, 9]))
    assert not small.within(Format.table([-1, 0, 1])) and not small.within(FORMATS["ue5m3"])
    assert not FORMATS["e2m1fn"].within(FORMS["e2m1fn"])
    held = [*FORMS["nf4"].values, math.nan, -0.0]
    assert FORMS["nf4"].contains(held).all() and not FORMS["nf4"].contains([1.5, math.inf, -math.inf, 1e-30]).any()


def test_a_policy_rounds_operands_and_results_to_tables() -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Linear(64, 3, bias=False), torch.rand(2, 64) / 8
    policy = Policy(
        "tables",
        (
            Rule(rounding="dtype", accumulate="binary32"),
            Rule(operator="mm", operands="nf4"),
            Rule(operator="mm", role="weight", operands="table(-0.0625,0,0.0625)"),
        ),
    )
    assert Policy.from_toml(policy.to_toml()) == policy
    compiled = fxround.compile(model, policy, example_inputs=x)
    wanted = (
        fxround.round(x, "nf4").double() @ fxround.round(model.weight.detach(), "table(-0.0625,0,0.0625)").double().T
    )
    # Products of 24 and 1 bits with an exponent of four values: binary32 sums differ from binary64's by 64 roundings.
    torch.testing.assert_close(compiled(x).double(), wanted, rtol=0, atol=64 * 2.0**-24)
    results = fxround.compile(model, Policy("results", (Rule(rounding="nf4/stochastic"),)), example_inputs=x)(x)
    assert set(results.flatten().tolist()) <= set(FORMS["nf4"].values)
    scaled = fxround.compile(model, "scaled(nf4;64,binary32,nearest)", example_inputs=x)
    assert "nf4/nearest_even/saturate" in scaled.graph_text()
