"""Whether a number is an element times a scale, compared with a search through all elements over rational numbers."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from fxround.numerics.formats import FORMATS, Format
from fxround.numerics.formats.scaled import ScaledRounding
from fxround.numerics.formats.scaled.grid import outside_grid
from fxround.numerics.modes import Rounding
from fxround.numerics.specification.exact import round_exact

BINARY32 = FORMATS["binary32"]


def elements(rounding: ScaledRounding, zero: int) -> list[float]:
    """Every element of a small format, less the zero point."""
    form = rounding.format
    if form.scaling is not None and form.scaling.how == "affine":
        return [float(q - zero) for q in range(int(form.element.maximum) + 1)]
    if form.element.values:
        return list(form.element.values)
    least, most = form.span or (-math.inf, math.inf)
    if str(rounding.format).startswith("scaled(custom") and form.scaling is not None:
        # Two's complement: a fault can make -16 of int5.
        return [float(v) for v in range(-16, 16)]
    return [s * m for m in form.element.magnitudes() for s in (-1.0, 1.0) if least <= s * m <= most]


@pytest.mark.parametrize("stored", ["binary32", "bfloat16", "binary16"])
@pytest.mark.parametrize(
    "text",
    [
        "mxfp4",
        "nvfp4/stochastic",
        "mxfp8_e5m2",
        "int5",
        "uint4:channel",
        "fixed(6,3)",
        "uint4:scale=0.3,zero=5",
        "scaled(nf4;8,binary32,nearest)",
        "scaled(e2m1fn;tensor,binary32,inverse)",
    ],
)
def test_a_search_finds_the_same(text: str, stored: str) -> None:
    """Of numbers that elements and scales make, of their neighbours, and of numbers at random."""
    rounding, own, zero = ScaledRounding.parse(text), Rounding.parse(stored), 5
    rng, scaling = np.random.default_rng(0), rounding.format.scaling
    scales = [rounding.format.unit or 1.0] if scaling is None else [0.25, float(np.float32(0.3)), 2.0**-100, 3.0]
    checked = 0
    for read in scales:
        inverse = scaling is not None and scaling.how == "inverse"
        scale = float(np.float32(1) / np.float32(read)) if inverse else read
        products = (Fraction(q) * Fraction(scale) for q in elements(rounding, zero))
        grid = {round_exact(p, p < 0, own) for p in products}
        made = rng.choice(sorted(grid), 40)
        near = np.nextafter(made.astype(np.float32), np.float32(np.inf)).astype(float)
        values = np.concatenate([made, near, rng.standard_normal(40) * scale, [math.nan, math.inf, 0.0, -0.0]])
        others = [] if scaling is None else [np.float64(read)]
        others += [np.float64(zero)] if scaling is not None and scaling.how == "affine" else []
        got = outside_grid(values, rounding, others, Format.parse(stored), BINARY32)
        want = [
            not math.isnan(v) and v not in grid and not (math.isinf(v) and rounding.format.element.inf) for v in values
        ]
        assert got.tolist() == want
        checked += sum(want)
    assert checked > 0
