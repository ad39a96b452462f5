"""Descriptions of formats: figures from the standards, values by their codes, and a text that contains everything."""

from __future__ import annotations

import json
from typing import Any, get_args

import ml_dtypes
import numpy as np
import pytest
import torch

import fxround
from fxround import cli
from fxround.numerics.formats import FORMATS, TABLES, Format
from fxround.numerics.formats.scaled import SCALED
from fxround.numerics.formats.scaled.format import How
from fxround.views.descriptions import FormatDescription, ScaledDescription

PEERS: dict[str, Any] = {
    "binary16": np.float16,
    "binary32": np.float32,
    "binary64": np.float64,
    "bfloat16": ml_dtypes.bfloat16,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e4m3": ml_dtypes.float8_e4m3,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e3m2fn": ml_dtypes.float6_e3m2fn,
    "e2m1fn": ml_dtypes.float4_e2m1fn,
}
OTHERS = ["posit8", "posit16", "posit32", "posit(5,0)", "binary8p1", "binary8p4uf", "tf32-flush", "table(-3,-2)"]


def described(text: Any) -> FormatDescription:
    found = fxround.describe(text)
    assert isinstance(found, FormatDescription)
    return found


@pytest.mark.parametrize("name", PEERS)
def test_figures_are_those_of_numpy_and_ml_dtypes(name: str) -> None:
    found, peer = described(name), ml_dtypes.finfo(PEERS[name])
    assert (found.largest, found.lowest) == (float(peer.max), float(peer.min))
    assert (found.smallest_normal, found.smallest) == (float(peer.smallest_normal), float(peer.smallest_subnormal))
    assert found.unit_roundoff == float(peer.eps) / 2
    assert found.precision == peer.nmant + 1


@pytest.mark.parametrize("text", [*FORMATS, *TABLES, *OTHERS])
def test_data_and_text_agree(text: str) -> None:
    found = described(text)
    fmt = Format.parse(text)
    assert fxround.Rounding.parse(found.rounding) == fxround.Rounding.parse(text)
    assert json.loads(found.to_json()) == json.loads(json.dumps(found.to_dict()))
    assert [name for name, _ in found.decisions] == ["ties", "subnormals", "minus zero", "overflow"]
    assert ("-0" in found.special, "inf" in found.special) == (fmt.has_minus_zero, fmt.inf)
    lines = str(found).splitlines()
    assert lines[0] == fmt.said and all(line == line.rstrip() for line in lines)
    assert fmt.contains([v for v in (found.largest, found.lowest, found.smallest) if v is not None]).all()
    listed = [word for line in lines for word in line.split() if line.startswith("    ")]
    assert len(listed) == len(found.values)
    if found.values:
        ends = found.values[0], found.values[-1]
        assert ends == ((0.0 if fmt.zero else found.smallest) if not fmt.values else found.lowest, found.largest)
        assert fmt.contains(found.values).all()


def test_values_are_listed_up_to_8_bits() -> None:
    counts = {
        text: len(described(text).values) for text in ("e4m3fn", "e2m1fn", "e8m0fnu", "posit8", "nf4", "binary16")
    }
    assert counts == {"e4m3fn": 127, "e2m1fn": 8, "e8m0fnu": 255, "posit8": 128, "nf4": 16, "binary16": 0}
    assert described("table(-3,-2)").smallest is None
    assert described("binary32/stochastic").rounding == "binary32/stochastic/inf"
    assert described(torch.bfloat16).name == described(Format.parse("bf16")).name == "bfloat16"


@pytest.mark.parametrize(
    "text",
    [*SCALED, "int8:channel", "int4:128", "bfp(8,16)", "fixed(8,4)", "nvfp4:16x16", "int8", "uint8", "int8:scale=0.5"],
)
def test_scaled_formats(text: str) -> None:
    found = fxround.describe(text)
    assert isinstance(found, ScaledDescription)
    rounding = fxround.ScaledRounding.parse(text)
    assert fxround.ScaledRounding.parse(found.rounding) == rounding
    assert found.name == text
    if rounding.format.span is None and "uint" not in text:
        assert found.element == described(str(rounding.element))
    assert (found.scale is None) == (rounding.format.scaling is None)
    assert str(found).splitlines()[0] == text and found.block in str(found)
    assert json.loads(found.to_json())["element"]["largest"] == found.element.largest


def test_a_scaled_format_in_words() -> None:
    assert str(fxround.describe("nvfp4")).splitlines()[:7] == [
        "nvfp4",
        "  rounding        scaled(e2m1fn;16,e4m3fn,nearest,binary32)/nearest_even/saturate",
        "  block           16 consecutive elements",
        "  scale           e4m3fn, up to 448",
        "  how             largest magnitude / largest element, to the scale format's nearest value",
        "  tensor's scale  binary32",
        "  element e2m1fn",
    ]


def test_what_scales_are_made_of_in_words() -> None:
    assert "magnitude that 90 % do not exceed / largest element" in str(fxround.describe("int8:8,percentile=90"))
    assert "largest magnitude / 6 or 4, by the least error" in str(fxround.describe("nvfp4:16,fit=6:4"))
    fixed, given = fxround.describe("fixed(8,4)"), fxround.describe("int8:scale=0.5")
    assert isinstance(fixed, ScaledDescription) and isinstance(given, ScaledDescription)
    assert fixed.span == (-8.0, 7.9375) and "-8 to 7.9375" in str(fixed)
    assert given.unit == 0.5 and "given scale" in str(given)


@pytest.mark.parametrize("how", get_args(How))
def test_every_way_to_make_scales_is_said(how: How) -> None:
    texts: dict[str, str] = {
        "affine": "uint8:32",
        "delayed": "scaled(e4m3fn;tensor,binary32,delayed,history=4)",
        "held": "scaled(e4m3fn;channel,binary32,held)",
    }
    description = fxround.describe(texts.get(how, f"scaled(e2m1fn;16,e8m0fnu,{how})"))
    assert isinstance(description, ScaledDescription) and description.how


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["describe", "mxfp8"]) == 0
    assert capsys.readouterr().out == f"{fxround.describe('mxfp8')}\n"
    assert cli.main(["describe", "e4m3fn", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["largest"] == 448.0
    assert cli.main(["describe", "e4m3nf"]) == 2
    assert "did you mean e4m3fn" in capsys.readouterr().err
