"""Neighbours on a grid: the specification over rational numbers, and a list of all values of the grid."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from scaled_blocks import specified
from torch import Tensor

import fxround
from fxround.numerics.formats import Format
from fxround.numerics.formats.scaled import ScaledRounding, any_rounding
from fxround.numerics.modes import MODES
from fxround.numerics.specification.exact import round_float
from fxround.tuning.grid import Grid, nearest_of

SCALED = [
    *("mxfp8", "mxfp4", "mxint8", "nvfp4", "nvfp4:4x4", "int2:8", "int4:channel", "int8", "uint4:8", "uint8"),
    *("bfp(6,16)", "fixed(8,6)", "fixed(8,6)/nearest_even/wrap", "int8:scale=0.01", "uint4:scale=0.5,zero=9"),
    *("scaled(nf4;16,binary32,nearest)", "scaled(table(-1,0,1);channel,binary32,nearest)"),
    *("scaled(e4m3fn;tensor,binary32,inverse)", "scaled(e2m1fn;16,ue5m3,nearest,binary32)", "nvfp4:16,fit=6:4"),
    *("int4:16,percentile=90", "mxfp4/stochastic", "int4:channel/nearest_away", "scaled(e5m2;8,e8m0fnu,even)/up_down"),
]
PLAIN = ["bfloat16", "e4m3fn", "e5m2/stochastic", "e2m1fn", "e4m3fn/toward_zero/nan", "nf4", "table(-1,0,1)", "posit8"]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def weights(dtype: torch.dtype) -> Tensor:
    x = np.random.default_rng(0).standard_normal((5, 41)) * np.exp2(np.arange(5) * 3 - 9)[:, None]
    x[0, :3] = 0.0, 1.0, -1.0
    return torch.from_numpy(x).to(dtype)


def same(got: Tensor, wanted: list[float]) -> bool:
    expected = torch.tensor(wanted, dtype=torch.float64).reshape(got.shape)
    return torch.equal(got.double().view(torch.int64), expected.view(torch.int64))


@pytest.mark.part(5)
@pytest.mark.parametrize("text", SCALED)
def test_neighbours_of_scaled_formats_are_the_specification_s(text: str) -> None:
    rounding = nearest_of(any_rounding(text))
    assert isinstance(rounding, ScaledRounding)
    for dtype in DTYPES:
        if rounding.format.scaling is None and rounding.format.unit is None and dtype == torch.bfloat16:
            continue  # it does not hold all numbers of fixed(8,6)
        x = weights(dtype)
        grid, values = Grid.of(x, text), x.double().reshape(-1).tolist()
        below, above = (
            specified(x, str(replace(rounding, mode=MODES[mode]))) for mode in ("toward_negative", "toward_positive")
        )
        # A number that is a rounded product is a value of the grid, whatever its quotient by the scale.
        assert same(grid.down(x), [u if u == v else d for d, u, v in zip(below, above, values, strict=True)]), dtype
        assert same(grid.up(x), [d if d == v else u for d, u, v in zip(below, above, values, strict=True)]), dtype
        assert same(grid.nearest(x), specified(x, str(rounding))), dtype


@pytest.mark.parametrize("text", PLAIN)
def test_neighbours_of_formats_without_scales_are_the_specification_s(text: str) -> None:
    x = weights(torch.float32)
    grid = Grid.of(x, text)
    for mode, got in (("toward_negative", grid.down(x)), ("toward_positive", grid.up(x))):
        rounding = replace(any_rounding(text), mode=MODES[mode], overflow="saturate")
        assert same(got, [round_float(v, rounding) for v in x.reshape(-1).tolist()])


@pytest.mark.parametrize("text", ["nvfp4", "mxfp4", "int4:8", "scaled(nf4;16,binary32,nearest)", "e4m3fn", "nf4"])
def test_no_value_of_the_grid_lies_between_the_neighbours(text: str) -> None:
    x = weights(torch.float32)
    grid, rounding = Grid.of(x, text), any_rounding(text)
    form = rounding.format if isinstance(rounding.format, Format) else rounding.format.element
    own = form.values or sorted({s * m for m in form.magnitudes() for s in (1, -1)})
    scales = grid.scales[0].expand(x.shape).reshape(-1).tolist() if grid.scales else [1.0] * x.numel()
    down, up = grid.down(x).reshape(-1).tolist(), grid.up(x).reshape(-1).tolist()
    for value, scale, low, high in zip(x.reshape(-1).tolist(), scales, down, up, strict=True):
        # A product is rounded once, to float32.
        listed = [float(np.float32(Fraction(v) * Fraction(scale))) for v in own]
        assert low == max((v for v in listed if v <= value), default=listed[0])
        assert high == min((v for v in listed if v >= value), default=listed[-1])


def test_scales_stay_those_of_the_tensor_that_they_were_made_of() -> None:
    x = weights(torch.float32)
    grid = Grid.of(x, "nvfp4")
    moved = 3 * x.flip(0)
    kept = grid.nearest(moved)
    assert not torch.equal(kept, fxround.round(moved, "nvfp4"))
    assert all(torch.equal(kept, again) for again in (grid.nearest(kept), *grid.neighbours(kept)))


def test_a_part_of_a_grid_rounds_as_the_whole() -> None:
    x = weights(torch.float32)
    grid, index = Grid.of(x, "uint4:8"), torch.tensor([[40, 3], [7, 100]])
    assert torch.equal(grid.at(index).up(x.reshape(-1)[index]), grid.up(x).reshape(-1)[index])


def test_a_default_rounding_to_nearest_is_that_of_round() -> None:
    x = weights(torch.float32)
    for text in ("nvfp4", "int4:channel", "uint4:8", "bfloat16", "nf4"):
        assert torch.equal(Grid.of(x, text).nearest(x), fxround.round(x, text))


def test_ends_of_the_grid() -> None:
    x = torch.tensor([1000.0, -1000.0, math.ldexp(1.0, -40)])
    grid = Grid.of(x, "e4m3fn")
    assert grid.down(x).tolist() == [448.0, -448.0, 0.0] and grid.up(x).tolist() == [448.0, -448.0, 2.0**-9]


@pytest.mark.parametrize("text", ["hadamard(16)+nvfp4", "scaled(e4m3fn;tensor,binary32,delayed)"])
def test_what_is_no_grid_of_a_tensor_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"belongs to|delayed"):
        Grid.of(torch.ones(16), text)
