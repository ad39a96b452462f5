"""Formats: the rows against their standards' tables, parsing without loss, and the words of ``describe``."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from neighbours import ALL_FORMATS

from fxround.numerics.accumulation import Accumulation
from fxround.numerics.formats import FORMATS, Format
from fxround.numerics.formats.names import ALIASES
from fxround.numerics.gradients import Gradient
from fxround.numerics.modes import MODES, Rounding
from fxround.numerics.specification.exact import round_float

# precision, emin, maximum, smallest positive value, number of finite magnitudes: IEEE 754-2019 table 3.5,
# OCP 8-bit floating point 1.0 table 1, OCP Microscaling 1.0 tables 1 to 5.
TABLE = {
    "binary64": (53, -1022, float.fromhex("0x1.fffffffffffffp+1023"), 2.0**-1074),
    "binary32": (24, -126, float.fromhex("0x1.fffffep+127"), 2.0**-149),
    "binary16": (11, -14, 65504.0, 2.0**-24),
    "bfloat16": (8, -126, 3.3895313892515355e38, 2.0**-133),
    "tf32": (11, -126, 3.4011621342146535e38, 2.0**-136),
    "e5m2": (3, -14, 57344.0, 2.0**-16),
    "e4m3fn": (4, -6, 448.0, 2.0**-9),
    "e4m3": (4, -6, 240.0, 2.0**-9),
    # OpenXLA RFC 20230309 and ml_dtypes: e4m3b11fnuz has the bias 11.
    "e5m2fnuz": (3, -15, 57344.0, 2.0**-17),
    "e4m3fnuz": (4, -7, 240.0, 2.0**-10),
    "e4m3b11fnuz": (4, -10, 30.0, 2.0**-13),
    "e3m2fn": (3, -2, 28.0, 0.0625),
    "e2m3fn": (4, 0, 7.5, 0.125),
    "e2m1fn": (2, 0, 6.0, 0.5),
    "e8m0fnu": (1, -127, 2.0**127, 2.0**-127),
    "ue5m3": (4, -14, 114688.0, 2.0**-17),
}
DTYPES = {
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
    "binary16": np.float16,
}


def test_every_named_format_is_in_the_table() -> None:
    assert set(TABLE) == set(FORMATS)
    assert all(name == fmt.name for name, fmt in FORMATS.items())


@pytest.mark.parametrize("name", TABLE)
def test_rows(name: str) -> None:
    fmt = FORMATS[name]
    assert (fmt.precision, fmt.emin, fmt.maximum, math.ldexp(1.0, fmt.quantum_exponent)) == TABLE[name]


@pytest.mark.parametrize("name", DTYPES)
def test_magnitudes_are_the_values_of_all_codes(name: str) -> None:
    dtype = np.dtype(DTYPES[name])
    width = {"e3m2fn": 6, "e2m3fn": 6, "e2m1fn": 4}.get(name, 8 * dtype.itemsize)
    codes = np.arange(2**width, dtype=np.uint16 if width == 16 else np.uint8)
    with np.errstate(invalid="ignore"):  # signalling NaNs among the codes
        values = codes.view(dtype).astype(np.float64)
    fmt = FORMATS[name]
    finite = sorted({abs(v) for v in values.tolist() if math.isfinite(v)})
    assert list(fmt.magnitudes()) == finite
    assert fmt.inf == bool(np.isinf(values).any())
    assert fmt.nan == bool(np.isnan(values).any())
    assert fmt.signed == bool((values < 0).any())
    assert fmt.zero == (0.0 in finite)
    assert fmt.has_minus_zero == bool(((values == 0) & np.signbit(values)).any())


@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=str)
def test_text_loses_nothing(fmt: Format) -> None:
    assert Format.parse(str(fmt)) == fmt
    assert Format.parse(str(fmt.without_subnormals())) == fmt.without_subnormals()


@given(
    st.builds(
        lambda p, e, span, flags: Format.custom(
            precision=p,
            emin=e,
            maximum=math.ldexp(2 - 2.0 ** (1 - p), e + span),
            **dict(zip(("signed", "inf", "nan", "zero", "subnormals", "minus_zero"), flags, strict=True)),
        ),
        st.integers(1, 53),
        st.integers(-1000, 900),
        st.integers(0, 100),
        st.tuples(*[st.booleans()] * 6),
    )
)
def test_any_custom_format_survives_its_text(fmt: Format) -> None:
    assert Format.parse(str(fmt)) == fmt


def test_custom_maximum_in_decimal_or_hexadecimal() -> None:
    assert Format.parse("custom(2,-4,12,signed)").maximum == 12.0
    assert Format.parse("custom(2,-4,0x1.8p+3,signed)").maximum == 12.0


def test_ieee_rows_are_the_standard_formats() -> None:
    for name, exponent_bits in {
        "binary64": 11,
        "binary32": 8,
        "binary16": 5,
        "bfloat16": 8,
        "tf32": 8,
        "e5m2": 5,
    }.items():
        fmt = FORMATS[name]
        other = Format.ieee(exponent_bits=exponent_bits, precision=fmt.precision)
        assert (other.emin, other.maximum, other.quantum_exponent) == (fmt.emin, fmt.maximum, fmt.quantum_exponent)


def test_overflow_choices() -> None:
    defaults = {name: fmt.default_overflow for name, fmt in FORMATS.items()}
    fnuz = {"e5m2fnuz", "e4m3fnuz", "e4m3b11fnuz"}
    assert {n for n, o in defaults.items() if o == "nan"} == {"e4m3fn", "e8m0fnu", "ue5m3", *fnuz}
    assert {n for n, o in defaults.items() if o == "saturate"} == {"e3m2fn", "e2m3fn", "e2m1fn"}
    assert FORMATS["e4m3fn"].overflows == ("saturate", "nan")
    assert all("saturate" in f.overflows and f.default_overflow in f.overflows for f in ALL_FORMATS)


@pytest.mark.parametrize("inner", [f for f in FORMATS.values() if f.precision <= 8 and f.emax < 20], ids=str)
@pytest.mark.parametrize("outer", [f for f in FORMATS.values() if f.precision <= 8 and f.emax < 20], ids=str)
def test_within_is_the_subset_of_values(inner: Format, outer: Format) -> None:
    def values(fmt: Format) -> set[float | str]:
        magnitudes = set(fmt.magnitudes())
        negative = {-m for m in magnitudes} if fmt.signed else set()
        return magnitudes | negative | ({"-0"} if fmt.has_minus_zero else set())

    assert inner.within(outer) == (values(inner) <= values(outer))


@pytest.mark.parametrize(
    "text, message",
    [
        ("bfloat61", r"no format is named 'bfloat61'; did you mean bfloat16"),
        ("e4m3nf", r"did you mean e4m3fn"),
        ("quux", r"no format is named 'quux'.*Known: binary64, binary32"),
        ("ieee(1,3)", r"exponent_bits is 1: expected 2 to 11"),
        ("ieee(12,3)", r"exponent_bits is 12: expected 2 to 11"),
        ("ieee(5,1)", r"precision is 1: expected 2 to 53"),
        ("ieee(8,54)", r"precision is 54: expected 2 to 53"),
        ("custom(2,-4,0x1.cp+3,signed)", r"maximum 14.0 does not fit 2 bits"),
        ("custom(2,4,0x1.0p+3,signed)", r"maximum 8.0 must be finite and at least 2\^4"),
        ("custom(60,-4,0x1.8p+3,signed)", r"precision 60 is not in 1..53"),
        ("custom(3,-1100,0x1.8p+3,signed)", r"2\^-1100 is outside the range of binary64"),
    ],
)
def test_a_wrong_text_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Format.parse(text)


@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=str)
def test_describe_states_the_four_decisions(fmt: Format) -> None:
    lines = fmt.describe().splitlines()
    assert lines[0].startswith(f"{fmt.name}: p={fmt.precision}")
    assert [line.split()[0] for line in lines[1:]] == ["ties", "subnormals", "minus", "overflow"]


def test_describe_golden() -> None:
    assert FORMATS["e4m3fn"].describe() == (
        "e4m3fn: p=4, emin=-6, emax=8, maximum=448\n"
        "  ties        to the even significand (nearest_even)\n"
        "  subnormals  down to 2^-9\n"
        "  minus zero  kept\n"
        "  overflow    nan by default; possible: saturate, nan"
    )


def test_every_alias_is_another_name_of_a_format() -> None:
    assert all(name == format or name not in FORMATS for name, format in ALIASES.items())
    for alias, name in ALIASES.items():
        assert Format.parse(alias) == Format.parse(name) and str(Format.parse(name)) == name
        assert name not in FORMATS or Format.parse(alias) is FORMATS[name]
        assert Format.parse(f" torch.{alias}-flush") == Format.parse(name).without_subnormals()


TORCH_FLOATS = sorted({str(d) for d in vars(torch).values() if isinstance(d, torch.dtype) and d.is_floating_point})


def test_every_floating_dtype_of_torch_is_a_format_with_its_limits() -> None:
    assert set(TORCH_FLOATS) >= {"torch.float16", "torch.float8_e8m0fnu", "torch.float8_e4m3fnuz"}
    for name in TORCH_FLOATS:
        dtype = getattr(torch, name.removeprefix("torch."))
        fmt = Format.parse(dtype)
        assert fmt == Format.parse(name)
        if "x2" in name:  # torch.finfo lacks it: two e2m1fn in a byte
            assert fmt.name == "e2m1fn"
            continue
        limits = torch.finfo(dtype)
        # The least normal number of e8m0fnu is its least number.
        assert (fmt.maximum, math.ldexp(1.0, fmt.emin)) == (limits.max, limits.smallest_normal)
        if fmt.name == "e5m2fnuz":  # torch.finfo has half of it; ml_dtypes and all codes agree with fxround
            limits = ml_dtypes.finfo(ml_dtypes.float8_e5m2fnuz)
        assert math.ldexp(1.0, 1 - fmt.precision) == limits.eps


@pytest.mark.parametrize("name", DTYPES)
def test_numpys_dtypes_are_formats(name: str) -> None:
    assert Format.parse(DTYPES[name]).name == Format.parse(np.dtype(DTYPES[name])).name == name


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.quint8, torch.uint16, np.int32, "int4"])
def test_a_dtype_of_integers_is_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match="is a dtype of integers or truth values, which are not rounded: expected"):
        Format.parse(dtype)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.chalf, np.complex128, "cfloat"])
def test_a_dtype_of_complex_numbers_is_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match="is a dtype of complex numbers"):
        Format.parse(dtype)


@pytest.mark.parametrize(
    "name, meant", [("fp8", "e4m3fn or e5m2"), ("FP16", "binary16"), ("BFloat16", "bfloat16"), ("mxfp4", "e2m1fn")]
)
def test_an_unsure_name_is_refused_with_what_may_be_meant(name: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean {meant}"):
        Format.parse(name)


def test_roundings_accumulations_and_gradients_take_the_same_names() -> None:
    assert Rounding.parse(torch.half) == Rounding.parse(FORMATS["binary16"]) == Rounding.parse("binary16")
    assert str(Rounding.parse("torch.float8_e5m2/stochastic/saturate")) == "e5m2/stochastic/saturate"
    assert str(Accumulation.parse("bf16 product=half chunk=8 combine=fp32")) == (
        "bfloat16/nearest_even/inf product=binary16/nearest_even/inf chunk=8 combine=binary32/nearest_even/inf"
    )
    assert Accumulation.parse(torch.float32) == Accumulation.parse("binary32")
    assert str(Gradient.parse("zero_clamped fp8_e5m2")) == "zero_clamped e5m2/nearest_even/inf"
    assert Gradient.parse(torch.bfloat16) == Gradient.parse(Rounding.parse("bf16")) == Gradient.parse("bfloat16")


def contained(values: list[float], fmt: Format) -> list[bool]:
    """Whether the specification over rationals leaves a value as it is; a NaN counts as a value of every format."""
    rounding = Rounding(fmt, MODES["toward_zero"], "inf" if fmt.inf else "saturate")
    return [math.isnan(v) or round_float(v, rounding) == v for v in values]


@pytest.mark.part(3)
@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=str)
def test_a_format_contains_what_rounding_leaves(fmt: Format) -> None:
    """At the ends of every binade of binary64 from below the format to above it, with one bit more than it has."""
    rng = np.random.default_rng(0)
    exponents = np.arange(max(fmt.quantum_exponent - 3, -1074), min(fmt.emax + 3, 1024))[:: 1 + 5 * (fmt.emin < -900)]
    lasts = [1.0, 2.0 - 2.0 ** -(fmt.precision - 1), 2.0 - 2.0**-fmt.precision, 1.0 + 2.0**-fmt.precision, 1.5]
    some = 1 + rng.integers(0, 2 ** min(fmt.precision + 1, 52), 20) / 2.0 ** min(fmt.precision + 1, 52)
    values = [math.ldexp(s, int(e)) for e in exponents for s in (*lasts, *some[:: 1 + 4 * (fmt.precision > 20)])]
    values += [0.0, fmt.maximum, math.inf, math.nan, 5e-324, float.fromhex("0x1p1023")]
    values = [v * sign for v in values for sign in (1.0, -1.0)]
    found = fmt.contains(np.reshape(values, (2, -1)))
    assert found.shape == (2, len(values) // 2)
    assert found.flatten().tolist() == contained(values, fmt)


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].precision < 9])
def test_a_format_contains_its_values_and_no_others_of_bfloat16(name: str) -> None:
    fmt = FORMATS[name]
    bits = np.arange(2**16, dtype=np.uint32) << 16
    with np.errstate(invalid="ignore"):  # signalling NaNs
        values = bits.view(np.float32).astype(np.float64)
    expected = {v * s for v in fmt.magnitudes() for s in ((1.0, -1.0) if fmt.signed else (1.0,))}
    expected |= {math.inf, -math.inf} if fmt.inf else set()
    if not fmt.signed:
        expected -= {-math.inf}
    assert fmt.contains(values).tolist() == [math.isnan(v) or v in expected for v in values]
