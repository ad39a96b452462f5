"""Conversions of other packages, whose known deviations are listed here and tested, so that the list stays true.

Known deviations (versions of constraints.txt):
  ml_dtypes  rounds a float64 to binary32 first, so twice; e8m0fnu: every value strictly between 2^-127 and
             2^-126 goes up.
  torch      float8_e4m3fn and float8_e8m0fnu saturate, so overflow is asked for by name here; e8m0fnu as ml_dtypes.
  gfloat     round_float, nearest_away: the number just under half the smallest value goes up (round_ndarray is right);
             to-odd is absent, and e8m0's ties go to the even exponent (ml_dtypes, torch and fxround: to the larger).
"""

from __future__ import annotations

from typing import Any

import gfloat
import gfloat.formats as g
import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat import RoundMode
from neighbours import Array, boundaries, encodings, float_type, random_words

from fxround.numerics.arithmetic.rounding import rounding_function
from fxround.numerics.formats import FORMATS
from fxround.numerics.modes import Rounding

ML_DTYPES: dict[str, Any] = {
    "binary16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e4m3": ml_dtypes.float8_e4m3,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e4m3b11fnuz": ml_dtypes.float8_e4m3b11fnuz,
    "e3m2fn": ml_dtypes.float6_e3m2fn,
    "e2m3fn": ml_dtypes.float6_e2m3fn,
    "e2m1fn": ml_dtypes.float4_e2m1fn,
    "e8m0fnu": ml_dtypes.float8_e8m0fnu,
}
GFLOAT: dict[str, Any] = {
    "binary64": g.format_info_binary64,
    "binary32": g.format_info_binary32,
    "binary16": g.format_info_binary16,
    "bfloat16": g.format_info_bfloat16,
    "e5m2": g.format_info_ocp_e5m2,
    "e4m3fn": g.format_info_ocp_e4m3,
    "e3m2fn": g.format_info_ocp_e3m2,
    "e2m3fn": g.format_info_ocp_e2m3,
    "e2m1fn": g.format_info_ocp_e2m1,
}
GFLOAT_MODES = {
    "toward_zero": RoundMode.TowardZero,
    "toward_negative": RoundMode.TowardNegative,
    "toward_positive": RoundMode.TowardPositive,
    "nearest_even": RoundMode.TiesToEven,
    "nearest_away": RoundMode.TiesToAway,
}


def ours(x: Array, text: str, random: Array | int = 0) -> Array:
    return rounding_function(Rounding.parse(text), "f32" if x.dtype == np.float32 else "f64").evaluate(x, random)[0]


def numbers(size: int, carrier: str) -> Array:
    """Random encodings, and as many values around 1."""
    rng, kind = np.random.default_rng(11), float_type(carrier)
    raw = rng.integers(0, 2 ** (8 * np.dtype(kind).itemsize), size, dtype=encodings(np.zeros(1, kind)).dtype).view(kind)
    return np.concatenate([raw, (rng.standard_normal(size) * np.exp2(rng.uniform(-12, 12, size))).astype(kind)])


def assert_same(got: Array, want: Array, x: Array) -> None:
    """Equal encodings, any NaN equal to any other: peers keep payloads and signs of NaN, fxround has one NaN."""
    wrong = (encodings(got) != encodings(want)) & ~(np.isnan(got) & np.isnan(want))
    assert not wrong.any(), [
        (float(v).hex(), float(a), float(b)) for v, a, b in zip(x[wrong][:5], got[wrong], want[wrong], strict=False)
    ]


def by_ml_dtypes(x: Array, name: str) -> Array:
    with np.errstate(all="ignore"):
        return x.astype(ML_DTYPES[name]).astype(x.dtype)


def usable(x: Array, name: str) -> Array:
    """Without NaN where the format has none: peers make some number of it or raise, fxround keeps it in the carrier."""
    return x if FORMATS[name].nan else x[~np.isnan(x)]


@pytest.mark.parametrize("name", ML_DTYPES)
def test_ml_dtypes_from_binary32(name: str) -> None:
    x = usable(np.concatenate([boundaries(FORMATS[name], "f32"), numbers(50_000, "f32")]), name)
    if name == "e8m0fnu":
        deviates = (x > 2.0**-127) & (x < 2.0**-126)
        assert (by_ml_dtypes(x[deviates], name) == 2.0**-126).all() and (ours(x[deviates], name) < 2.0**-126).any()
        x = x[~deviates]
    assert_same(ours(x, name), by_ml_dtypes(x, name), x)


@pytest.mark.parametrize("name", [n for n in ML_DTYPES if n.endswith("fnuz")])
def test_formats_without_minus_zero_from_every_binary16_number(name: str) -> None:
    x = np.arange(2**16, dtype=np.uint16).view(np.float16)
    with np.errstate(invalid="ignore"):
        want = x.astype(ML_DTYPES[name]).astype(np.float32)
    got = ours(x.astype(np.float32), name)
    assert_same(got, want, x)
    assert not np.signbit(got[got == 0]).any() and np.signbit(x[got == 0]).any()


@pytest.mark.parametrize("name", ML_DTYPES)
def test_ml_dtypes_from_binary64(name: str) -> None:
    x = usable(np.concatenate([boundaries(FORMATS[name], "f64"), numbers(50_000, "f64")]), name)
    if name == "e8m0fnu":
        x = x[~((x > 0) & (x < 2.0**-126))]
    if name == "binary16":  # NumPy's own dtype: rounded once
        assert_same(ours(x, name), by_ml_dtypes(x, name), x)
        return
    twice = ours(ours(x, "binary32"), name)
    assert_same(twice, by_ml_dtypes(x, name), x)
    once = ours(x, name)
    if name != "e8m0fnu":
        assert (encodings(once) != encodings(twice)).any()


TORCH: dict[str, Any] = {
    "binary16": torch.float16,
    "bfloat16": torch.bfloat16,
    "e5m2": torch.float8_e5m2,
    "e4m3fn/nearest_even/saturate": torch.float8_e4m3fn,
    "e5m2fnuz": torch.float8_e5m2fnuz,
    "e4m3fnuz": torch.float8_e4m3fnuz,
}


@pytest.mark.parametrize("text", TORCH)
def test_torch_dtypes_from_binary32(text: str) -> None:
    fmt = Rounding.parse(text).format
    x = np.concatenate([boundaries(fmt, "f32"), numbers(50_000, "f32")])
    want = torch.from_numpy(x).to(TORCH[text]).to(torch.float32).numpy()
    assert_same(ours(x, text), want, x)


def test_torch_e8m0fnu_from_positive_numbers() -> None:
    x = np.concatenate([boundaries(FORMATS["e8m0fnu"], "f32"), numbers(50_000, "f32")])
    x = x[(x >= 0) & np.isfinite(x)]
    want = torch.from_numpy(x).to(torch.float8_e8m0fnu).to(torch.float32).numpy()
    got = ours(x, "e8m0fnu/nearest_even/saturate")
    deviates = (x > 2.0**-127) & (x < 2.0**-126)
    assert (want[deviates] == 2.0**-126).all() and (got[deviates] < 2.0**-126).any()
    inside = (x < 1.5 * 2.0**127) & ~deviates
    assert_same(got[inside], want[inside], x[inside])


GFLOAT_CASES = [
    (n, m, c) for n in GFLOAT for m in GFLOAT_MODES for c in ("f32", "f64") if (n, c) != ("binary64", "f32")
]


@pytest.mark.parametrize("name, mode, carrier", GFLOAT_CASES)
def test_gfloat_arrays(name: str, mode: str, carrier: str) -> None:
    x = usable(np.concatenate([boundaries(FORMATS[name], carrier), numbers(2000, carrier)]), name)
    saturate = FORMATS[name].default_overflow == "saturate"
    with np.errstate(all="ignore"):
        want = gfloat.round_ndarray(GFLOAT[name], x, GFLOAT_MODES[mode], saturate).astype(x.dtype)
    assert_same(ours(x, f"{name}/{mode}"), want, x)


@pytest.mark.parametrize("mode", GFLOAT_MODES)
@pytest.mark.parametrize("name", GFLOAT)
def test_gfloat_numbers(name: str, mode: str) -> None:
    fmt = FORMATS[name]
    x = usable(np.concatenate([boundaries(fmt, "f64", spread=4), numbers(50, "f64")]), name)
    saturate = fmt.default_overflow == "saturate"
    want = np.array([gfloat.round_float(GFLOAT[name], float(v), GFLOAT_MODES[mode], saturate) for v in x])
    under_half = np.nextafter(2.0 ** (fmt.quantum_exponent - 1), 0)
    deviates = (np.abs(x) == under_half) & (mode == "nearest_away") & (name != "binary64")
    if deviates.any():
        assert (np.abs(want[deviates]) == 2.0**fmt.quantum_exponent).all()
    assert_same(ours(x, f"{name}/{mode}")[~deviates], want[~deviates], x[~deviates])


GFLOAT_STOCHASTIC = {
    "stochastic": RoundMode.StochasticFastest,
    "stochastic_b": RoundMode.StochasticFast,
    "stochastic_c": RoundMode.Stochastic,
}


@pytest.mark.parametrize("drawn_by", GFLOAT_STOCHASTIC)
@pytest.mark.parametrize("bits", [1, 4, 10])
@pytest.mark.parametrize("name", ["binary16", "bfloat16", "e5m2", "e2m1fn"])
def test_gfloat_stochastic(name: str, bits: int, drawn_by: str) -> None:
    """Its modes by Fitzgibbon and Felix, On stochastic rounding with few random bits, ARITH 2025."""
    x = usable(np.concatenate([boundaries(FORMATS[name], "f32"), numbers(2000, "f32")]), name)
    random = random_words(x.size)
    saturate = FORMATS[name].default_overflow == "saturate"
    with np.errstate(all="ignore"):
        drawn = (random >> np.uint32(32 - bits)).astype(np.int64)
        mode = GFLOAT_STOCHASTIC[drawn_by]
        want = gfloat.round_ndarray(GFLOAT[name], x.astype(np.float64), mode, saturate, drawn, bits).astype(x.dtype)
    assert_same(ours(x, f"{name}/{drawn_by}:{bits}", random), want, x)


def test_gfloat_ties_of_a_one_bit_significand() -> None:
    x = np.array([3.0, 6.0, 1.5, 0.75])
    theirs = [gfloat.round_float(g.format_info_ocp_e8m0, float(v)) for v in x]
    assert theirs == [2.0, 8.0, 2.0, 0.5]
    assert ours(x, "e8m0fnu").tolist() == [4.0, 8.0, 2.0, 1.0]
    assert ours(x, "e8m0fnu").tolist() == x.astype(ml_dtypes.float8_e8m0fnu).astype(float).tolist()
