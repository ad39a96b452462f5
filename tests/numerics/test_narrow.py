"""A sample of ``benchmarks.narrow``: element formats of 8 bits or fewer from every binary16 number."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import narrow
from benchmarks.narrow import HALVES, Element, blocks, floats, given, integers, p3109, plain, posits, rounded, scalings

ELEMENTS = {e.text: e for kind in (floats, p3109, posits, integers) for e in kind()}
DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    "text", ["e4m3fn", "e5m2", "e4m3b11fnuz", "binary6p2uf", "posit(6,1)", "ufixed(5,-2)", "fixed(8,7)"]
)
def test_no_encoding_differs_without_a_scale(text: str) -> None:
    found = plain(ELEMENTS[text], ("nearest_even", "toward_negative"))
    assert (found.wrong, found.first) == (0, "") and found.numbers == found.roundings * 2**16


@pytest.mark.parametrize("text", ["e2m1fn", "int8"])
def test_no_encoding_differs_with_scales_at_their_edges(text: str) -> None:
    assert given(ELEMENTS[text], narrow.SCALES[1:2]).wrong == 0
    for scaling in list(scalings())[2::3]:
        found = blocks(ELEMENTS[text], scaling)
        assert found.wrong == 0 and found.numbers > 10**6, found.first


def test_the_comparison_finds_a_number_that_differs() -> None:
    e2m1 = ELEMENTS["e2m1fn"]
    even, odd = (rounded(HALVES, e2m1, mode, "saturate") for mode in ("nearest_even", "nearest_odd"))
    ties = {abs(float(x)) for x in HALVES[(even != odd) & ~np.isnan(HALVES)]}
    assert ties == {0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0}
    other = Element("e2m1fn", np.append(e2m1.values[:-1], 5.0), 8.0)
    assert plain(other, ("nearest_even",)).wrong > 1000


def test_the_last_result_names_every_format() -> None:
    text = (DOCS / "scaled.md").read_text()
    counts = [int(n) for n in re.findall(r"^\| [^|]*no scale \| ([0-9]+) \|", text, re.MULTILINE)]
    assert counts == [len(list(kind())) for kind in (floats, p3109, posits, integers)]
