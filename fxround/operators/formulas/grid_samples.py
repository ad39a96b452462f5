"""``grid_sample``: an image read between its pixels, and its gradients.

The arithmetic is that of PyTorch's decompositions. Where an image has no pixel, the value is 0, and its weight is kept:
a NaN among the coordinates is one in the result, and no other pixel is read. Of bicubic samples, the row and the column
of a neighbour are checked once, and not for each of the sixteen neighbours. Gradients are those of the formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from fxround.operators.formulas.table import formula

aten = torch.ops.aten


_MODES: Final = ("bilinear", "nearest", "bicubic")
_PADDINGS: Final = ("zeros", "border", "reflection")


class _WithoutSlope(torch.autograd.Function):
    """A result as it is, whose gradient with respect to the grid is 0."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, grid: Tensor) -> Tensor:
        ctx.save_for_backward(grid)
        return result.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (grid,) = ctx.saved_tensors
        return gradients[0], torch.zeros_like(grid)


@formula(F.grid_sample)
def grid_sample(
    x: Tensor, grid: Tensor, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool | None = None
) -> Any:
    """grid_sample_backward(g) = the derivative of PyTorch's formula, products with g added in the order of the grid"""
    known = mode in _MODES and padding_mode in _PADDINGS
    if not known or x.dim() != 4 or x.dtype != grid.dtype:
        return NotImplemented
    # Dynamo's graph contains the function itself, so that its formula can be differentiated.
    align = bool(align_corners)
    if mode == "bicubic":
        return _bicubic(x, grid, padding_mode, align)
    if mode == "bilinear":
        return _bilinear(x, grid, padding_mode, align)
    result = _nearest(x, grid, padding_mode, align)
    return _WithoutSlope.apply(result, grid) if grid.requires_grad else result  # type: ignore[no-untyped-call]


def _nearest(image: Tensor, grid: Tensor, padding: str, align: bool) -> Tensor:
    """Return the pixels of (N, C, H, W) at (N, h, w, 2)."""
    x, y = (at.round() for at in _coordinates(image, grid, padding, align))
    return _pixels(image, x, y, padding)


def _bilinear(image: Tensor, grid: Tensor, padding: str, align: bool) -> Tensor:
    """Return the samples of (N, C, H, W) at (N, h, w, 2): four pixels with the areas of the opposite corners."""
    x, y = _coordinates(image, grid, padding, align)
    left, top = x.floor(), y.floor()
    right, bottom = left + 1, top + 1
    corners = (
        (left, top, (right - x) * (bottom - y)),
        (right, top, (x - left) * (bottom - y)),
        (left, bottom, (right - x) * (y - top)),
        (right, bottom, (x - left) * (y - top)),
    )
    first, *others = (_pixels(image, column, row, padding) * area for column, row, area in corners)
    for other in others:
        first = first + other
    return first


def _coordinates(image: Tensor, grid: Tensor, padding: str, align: bool) -> tuple[Tensor, Tensor]:
    """Return the columns and rows that samples are read at, for each channel: (N, C, h, w)."""
    (channels, height, width), (n, *shape) = image.shape[1:], grid.shape[:3]
    places = grid.view(n, 1, *shape, 2).expand(n, channels, *shape, 2)
    made = []
    for i, size in ((0, width), (1, height)):
        at = places[..., i] * (size * 0.5 - 0.5 if align else size * 0.5) + (size * 0.5 - 0.5)
        at = _turned(at, size, padding, align)
        if padding != "zeros":
            # As PyTorch's kernel: the slope is 0 at the first and the last pixel, too, where that of clamp is 1, and a
            # NaN is read at 0, because each coordinate has a pixel.
            at = _or_zero(torch.where((at > 0) & (at < size - 1), at, at.detach().clamp(0, size - 1)))
        made.append(at)
    return made[0], made[1]


def _or_zero(at: Tensor) -> Tensor:
    return torch.where(at.isnan(), 0.0, at)


def _pixels(image: Tensor, column: Tensor, row: Tensor, padding: str) -> Tensor:
    """Return the pixels at whole coordinates (N, C, h, w), 0 where there is none."""
    (n, channels, height, width), device = image.shape, image.device
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    x, y = (torch.where(inside, at.to(torch.int64), 0) for at in (column, row))
    images = torch.arange(n, device=device).view(n, 1, 1, 1)
    value = image[images, torch.arange(channels, device=device).view(1, channels, 1, 1), y, x]
    return torch.where(inside, value, 0.0)


def _bicubic(image: Tensor, grid: Tensor, padding: str, align: bool) -> Tensor:
    """Return samples of (N, C, H, W) at (N, h, w, 2): rows of four neighbours first, and then the four rows."""
    (height, width), channels = image.shape[2:], image.shape[1]
    neighbours, slopes = [], []
    for i, size in ((0, width), (1, height)):
        position = grid[..., i].flatten(1) * (size * 0.5 - 0.5 if align else size * 0.5) + (size * 0.5 - 0.5)
        begin = position.floor()
        slopes.append([weight.unsqueeze(1) for weight in _cubic_weights(position - begin)])
        neighbours.append(_neighbours(begin, size, padding, align))
    (inside_x, x), (inside_y, y) = neighbours
    # Of all sixteen neighbours at once: (N, 4, 4, h w), rows first.
    pixels, at = image.flatten(2), y.unsqueeze(2) * width + x.unsqueeze(1)
    indices = at.flatten(1, 2).unsqueeze(2).expand(-1, -1, channels, -1)
    insides = (inside_y.unsqueeze(2) & inside_x.unsqueeze(1)).flatten(1, 2).unsqueeze(2)
    rows = []
    for row in range(0, 16, 4):
        values = []
        for i in range(row, row + 4):
            value = pixels.gather(2, indices.select(1, i))
            # Beyond the borders, other paddings read a pixel; there is none for a NaN alone, and its weights are NaNs.
            values.append(torch.where(insides.select(1, i), value, 0.0) if padding == "zeros" else value)
        rows.append(_weighted(values, slopes[0]))
    return _weighted(rows, slopes[1]).reshape(*image.shape[:2], *grid.shape[1:3])


def _neighbours(begin: Tensor, size: int, padding: str, align: bool) -> tuple[Tensor, Tensor]:
    """Return whether the neighbours -1, 0, 1, 2 of (N, L) whole coordinates are pixels, and their indices: (N, 4, L).

    The index is 0 if there is no such pixel.
    """
    at = torch.stack([_padded(begin + step, size, padding, align) for step in (-1, 0, 1, 2)], 1)
    inside = (at >= 0) & (at < size)
    return inside, torch.where(inside, at.to(torch.int64), 0)


def _padded(at: Tensor, size: int, padding: str, align: bool) -> Tensor:
    """Return the coordinate of the pixel that a padding reads for a whole coordinate."""
    at = _turned(at, size, padding, align)
    return at if padding == "zeros" else at.clamp(0, size - 1)


def _turned(at: Tensor, size: int, padding: str, align: bool) -> Tensor:
    """Return coordinates, reflected at the borders of the image if the padding is a reflection."""
    if padding != "reflection":
        return at
    return _reflected(at, 0.0 if align else -0.5, size - 1.0 if align else float(size))


def _reflected(at: Tensor, low: float, span: float) -> Tensor:
    """Return coordinates reflected at ``low`` and ``low + span`` until they are between them."""
    if span == 0:
        return torch.zeros_like(at)
    distance = (at - low).abs()
    rest, flips = torch.fmod(distance, span), (distance / span).floor().to(torch.int8)
    return torch.where(flips & 1 == 0, rest + low, (span + low) - rest)


def _cubic_weights(t: Tensor) -> tuple[Tensor, ...]:
    """Return the weights of the neighbours -1, 0, 1, 2: cubic convolution with a = -3/4 (Keys 1981)."""
    a = -0.75

    def near(x: Tensor) -> Tensor:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Tensor) -> Tensor:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return far(t + 1.0), near(t), near(1.0 - t), far(2.0 - t)


def _weighted(values: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    products = [value * weight for value, weight in zip(values, weights, strict=True)]
    return products[0] + products[1] + products[2] + products[3]
