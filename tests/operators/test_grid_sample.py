"""``grid_sample`` and its gradients: bicubic ones over rational numbers, those of all modes against stock."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product
from math import floor

import pytest
import torch
from torch.nn import functional as F

import fxround

A = Fraction(-3, 4)


def weight(t: Fraction) -> tuple[Fraction, Fraction]:
    """Cubic convolution with a = -3/4 (Keys 1981), and its derivative."""
    s, sign = abs(t), 1 if t >= 0 else -1
    if s <= 1:
        return ((A + 2) * s - (A + 3)) * s * s + 1, (3 * (A + 2) * s - 2 * (A + 3)) * s * sign
    if s < 2:
        return ((A * s - 5 * A) * s + 8 * A) * s - 4 * A, ((3 * A * s - 10 * A) * s + 8 * A) * sign
    return Fraction(0), Fraction(0)


def position(v: float, size: int, align: bool) -> tuple[Fraction, Fraction]:
    """A coordinate of the grid in pixels, and its derivative."""
    slope = Fraction(size - 1, 2) if align else Fraction(size, 2)
    return (Fraction(v) + 1) * slope - (0 if align else Fraction(1, 2)), slope


def bicubic(
    image: torch.Tensor, grid: torch.Tensor, g: torch.Tensor, align: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The samples with zeros outside, and the gradients of sum(samples * g), exactly and then rounded."""
    height, width = image.shape[2:]
    result, slope_x, slope_grid = torch.zeros_like(g), torch.zeros_like(image), torch.zeros_like(grid)
    sums: dict[tuple[int, ...], Fraction] = {}
    for n, i, j in product(range(len(grid)), *map(range, grid.shape[1:3])):
        (x, dx), (y, dy) = (
            position(float(v), size, align) for v, size in zip(grid[n, i, j], (width, height), strict=True)
        )
        along = [Fraction(0), Fraction(0)]
        for c in range(image.shape[1]):
            value, out = Fraction(0), Fraction(float(g[n, c, i, j]))
            for row, column in product(range(floor(y) - 1, floor(y) + 3), range(floor(x) - 1, floor(x) + 3)):
                if not (0 <= row < height and 0 <= column < width):
                    continue
                pixel = Fraction(float(image[n, c, row, column]))
                (wx, sx), (wy, sy) = weight(x - column), weight(y - row)
                value += pixel * wx * wy
                along[0] += out * pixel * sx * wy * dx
                along[1] += out * pixel * wx * sy * dy
                sums[n, c, row, column] = sums.get((n, c, row, column), Fraction(0)) + out * wx * wy
            result[n, c, i, j] = float(value)
        slope_grid[n, i, j] = torch.tensor([float(a) for a in along], dtype=grid.dtype)
    for at, total in sums.items():
        slope_x[at] = float(total)
    return result, slope_x, slope_grid


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    image = torch.rand(2, 3, 5, 6, generator=generator, dtype=torch.float64)
    grid = torch.rand(2, 4, 3, 2, generator=generator, dtype=torch.float64) * 2.8 - 1.4
    g = torch.rand(2, 3, 4, 3, generator=generator, dtype=torch.float64)
    return image.to(dtype).requires_grad_(), grid.to(dtype).requires_grad_(), g.to(dtype)


@pytest.mark.part("torch.float32-True")
@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_bicubic_samples_and_gradients_are_those_of_rational_numbers(dtype: torch.dtype, align: bool) -> None:
    image, grid, g = operands(dtype)
    compiled = fxround.compile(
        lambda x, at: F.grid_sample(x, at, mode="bicubic", padding_mode="zeros", align_corners=align), "reproducible"
    )
    y = compiled(image, grid)
    found = (y, *torch.autograd.grad((y * g).sum(), (image, grid)))
    unit = torch.finfo(dtype).eps
    with torch.no_grad():
        for ours, exact in zip(found, bicubic(image, grid, g, align), strict=True):
            # A tolerance: some sixty roundings of terms whose magnitudes add up to less than 8.
            assert (ours - exact).abs().max() <= 64 * 8 * unit
    again = compiled(image[:1], grid[:1])
    assert torch.equal(again, y[:1])


@pytest.mark.part("bilinear")
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_gradients_of_every_mode_are_stock_s_but_for_roundings(mode: str) -> None:
    image, grid, g = operands(torch.float64)
    for padding, align in (("zeros", False), ("border", True), ("reflection", False)):

        def sampled(x: torch.Tensor, at: torch.Tensor, padding: str = padding, align: bool = align) -> torch.Tensor:
            return F.grid_sample(x, at, mode=mode, padding_mode=padding, align_corners=align)

        found = torch.autograd.grad((fxround.compile(sampled, "reproducible")(image, grid) * g).sum(), (image, grid))
        stock = torch.autograd.grad((sampled(image, grid) * g).sum(), (image, grid))
        for ours, theirs in zip(found, stock, strict=True):
            # A tolerance: the stock kernel adds in another order.
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.part(5)
@pytest.mark.parametrize("policy", ["identity", "reproducible"])
@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_nans_infinities_and_zeros_are_stock_s(mode: str, padding: str, align: bool, policy: str) -> None:
    """A NaN coordinate shows, a sample without pixels is +0, and no sample reads a pixel that is none of its own.

    Coordinates are fourths of pixels, and pixels small whole numbers, so that nothing is rounded, in whatever order.
    """
    nan, inf = math.nan, math.inf
    image = torch.arange(1.0, 13.0).view(1, 1, 3, 4)
    image[0, 0, 0, 0] = -inf
    points = [(nan, 0.0), (0.0, nan), (nan, nan), (-5.0, 0.0), (0.0, 5.0), (3.0, 3.0), (0.5, 0.5), (-0.5, 0.5)]
    grid = torch.tensor(points).view(1, 2, 4, 2)
    compiled = fxround.compile(lambda x, at: F.grid_sample(x, at, mode, padding, align), policy)
    for x in (image, -image):
        # stock: exact numbers, from which an ulp of binary64 does not lead to other ones of binary32
        want = F.grid_sample(x.double(), grid.double(), mode, padding, align).float()
        got = compiled(x, grid)
        assert torch.equal(got.isnan(), want.isnan())
        number = ~want.isnan()
        assert torch.equal(got[number].view(torch.int32), want[number].view(torch.int32))


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("padding", ["border", "reflection"])
def test_at_the_first_and_last_pixel_the_slope_is_that_of_the_kernel(padding: str, align: bool) -> None:
    """0 where a coordinate is clipped, or at the pixel itself: there the slopes of the two sides differ.

    Coordinates are eighths of pixels, and pixels small whole numbers, so that nothing is rounded, in whatever order.
    """
    size = 5 if align else 4
    steps = torch.tensor([-1.0, 1.0, -0.75, 0.75, 0.25, -1.25, 1.25, -2.0, 2.0, 3.0, -3.0], dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(steps, steps, indexing="ij"), -1)[None]
    image = torch.randint(-8, 8, (1, 2, size, size)).double()
    at = grid.clone().requires_grad_()
    # stock: exact numbers, from which an ulp of binary64 does not lead to other ones of binary32
    (want,) = torch.autograd.grad(F.grid_sample(image, at, "bilinear", padding, align).sum(), at)
    (got,) = torch.autograd.grad(
        fxround.compile(lambda x, at: F.grid_sample(x, at, "bilinear", padding, align), "reproducible")(
            image, at
        ).sum(),
        at,
    )
    assert torch.equal(got, want.float().double()) and (got == 0).any() and (got != 0).any()


def test_a_derivative_of_samples_in_the_model_is_that_of_a_derivative_of_the_model() -> None:
    image, grid = torch.randn(1, 2, 4, 4, dtype=torch.float64), torch.rand(1, 3, 3, 2, dtype=torch.float64) * 3 - 1.5

    def sampled(at: torch.Tensor) -> torch.Tensor:
        return F.grid_sample(image, at, padding_mode="border", align_corners=False).square().sum()

    inside = fxround.compile(lambda at: torch.func.grad(sampled)(at), "reproducible")(grid)
    leaf = grid.clone().requires_grad_()
    (outside,) = torch.autograd.grad(fxround.compile(sampled, "reproducible")(leaf), leaf)
    assert torch.equal(inside, outside) and inside.any()
