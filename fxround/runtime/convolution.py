"""Convolution and its two gradients as contractions: which elements meet, and in what order.

What is true here. With a stride s, a dilation d, a padding p and groups, over all spatial dimensions at once:

    y[n, o, i]    = sum over k = (c, t) of  w[o, c, t] * x[n, c, s*i + d*t - p]      c: input channel of o's group
    gw[o, c, t]   = sum over k = (n, i) of  gy[n, o, i] * x[n, c, s*i + d*t - p]
    gx            = the transposed convolution of gy with w

k is row-major and ascending; what lies in the padding is +0 and takes its step. A transposed convolution is the
plain one over an input with s - 1 zeros between its elements, and the kernel turned around; those zeros
take their steps too.

Why it is safe. Shapes are checked first. Where an element lies is a sum of two offset tables, made of
indices that stay inside the padded input.

    before   im2col, then a product in whatever order
    after    windows_of: two tables of offsets, no copy but the padding's
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from fxround.runtime.contractions import Pending, Placing, Right, begin_contract, contract_of, finished, offsets
from fxround.runtime.execute import Draw, storage_of
from fxround.runtime.planes import begin_planes, planned, shape_of

# Pixels of an image whose panels would mostly be ends, and its weights packed for too little.
_FEW: Final = 512


@dataclass(frozen=True)
class Geometry:
    """How windows lie on the input: one number a spatial dimension, and the number of channel groups."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int

    def output_size(self, x: Tensor, w: Tensor) -> list[Any]:
        """[batch, channels, *spatial] of the result; ValueError where operand and weight do not fit."""
        dims = x.dim() - 2
        if dims not in (1, 2, 3) or w.dim() != x.dim():
            raise ValueError(f"convolution takes 1 to 3 spatial dimensions, got {tuple(x.shape)} with {tuple(w.shape)}")
        if x.dtype != w.dtype:
            raise TypeError(f"convolution of {x.dtype} with {w.dtype} weights: expected one dtype")
        lists = (self.stride, self.padding, self.dilation, *([self.output_padding] if self.transposed else []))
        if any(len(v) != dims for v in lists):
            raise ValueError(f"convolution in {dims} dimensions: stride, padding and dilation need {dims} values each")
        groups = self.groups
        expected = w.shape[0] if self.transposed else w.shape[1] * groups
        if x.shape[1] != expected or w.shape[0] % groups:
            raise ValueError(f"convolution of {tuple(x.shape)} with {tuple(w.shape)}: channels differ for {groups=}")
        spatial = [self._extent(x.shape[d + 2], w.shape[d + 2], d) for d in range(dims)]
        if any(isinstance(s, int) and s < 0 for s in spatial):
            raise ValueError(f"convolution of {tuple(x.shape)} with {tuple(w.shape)}: the kernel exceeds the input")
        return [x.shape[0], w.shape[1] * groups if self.transposed else w.shape[0], *spatial]

    def _extent(self, size: Any, taps: Any, d: int) -> Any:
        reach = self.dilation[d] * (taps - 1)
        if self.transposed:
            return (size - 1) * self.stride[d] - 2 * self.padding[d] + reach + self.output_padding[d] + 1
        return (size + 2 * self.padding[d] - reach - 1) // self.stride[d] + 1

    def reversed_for(self, x_size: Sequence[int], w: Tensor) -> Geometry:
        """The transposed convolution that leads from the result's size back to ``x_size``."""
        plain = Geometry(self.stride, self.padding, self.dilation, True, [0] * len(self.stride), self.groups)
        forward = [self._extent(size, w.shape[d + 2], d) for d, size in enumerate(x_size[2:])]
        back = [plain._extent(size, w.shape[d + 2], d) for d, size in enumerate(forward)]
        extra = [size - reached for size, reached in zip(x_size[2:], back, strict=True)]
        return Geometry(self.stride, self.padding, self.dilation, True, extra, self.groups)


def transposed_as_plain(x: Tensor, w: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, Geometry]:
    """Operand, weight and geometry of the plain convolution with the same result."""
    dims, groups = x.dim() - 2, geometry.groups
    before = [geometry.dilation[d] * (w.shape[d + 2] - 1) - geometry.padding[d] for d in range(dims)]
    after = [edge + more for edge, more in zip(before, geometry.output_padding, strict=True)]
    spaced = _spaced(x, geometry.stride, before, after)
    turned = w.flip(list(range(2, w.dim()))).reshape(groups, w.shape[0] // groups, *w.shape[1:]).transpose(1, 2)
    plain = turned.reshape(groups * w.shape[1], w.shape[0] // groups, *w.shape[2:])
    ones, none = [1] * dims, [0] * dims
    return spaced, plain, Geometry(ones, none, geometry.dilation, False, none, groups)


def _spaced(x: Tensor, stride: Sequence[int], before: Sequence[int], after: Sequence[int]) -> Tensor:
    """x with stride - 1 zeros between its elements, and so many around it; an edge below zero takes elements away."""
    sizes, inner, kept = [], [], []
    for size, step, low, high in zip(x.shape[2:], stride, before, after, strict=True):
        length, first = (size - 1) * step + 1 if size else 0, max(0, low)
        sizes.append(first + length + max(0, high))
        inner.append(slice(first, first + length, step))
        kept.append(slice(max(0, -low), sizes[-1] - max(0, -high)))
    wide = x.new_zeros(*x.shape[:2], *sizes)
    wide[(slice(None), slice(None), *inner)] = x
    return wide[(slice(None), slice(None), *kept)]


@dataclass(frozen=True)
class Windows:
    """Offsets in a padded image: of images, channels of a group, kernel taps and output pixels."""

    group_step: int
    images: Tensor
    channels: Tensor
    taps: Tensor
    pixels: Tensor


def padded(x: Tensor, padding: Sequence[int]) -> Tensor:
    """Row-major, with zeros around it."""
    edges = [p for d in reversed(range(x.dim() - 2)) for p in (padding[d], padding[d])]
    return (torch.nn.functional.pad(x, edges) if any(edges) else x).contiguous()


@lru_cache(maxsize=64)
def windows_of(
    shape: tuple[int, ...], taps: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...], groups: int
) -> Windows:
    """Where the windows of a plain convolution lie in a padded image."""
    dims, steps = len(shape) - 2, _row_major(shape)
    channels = shape[1] // groups
    counts = [(shape[d + 2] - dilation[d] * (taps[d] - 1) - 1) // stride[d] + 1 for d in range(dims)]
    return Windows(
        channels * steps[1],
        offsets(shape[0], steps[0]),
        offsets(channels, steps[1]),
        _sums([offsets(taps[d], dilation[d] * steps[d + 2]) for d in range(dims)]),
        _sums([offsets(counts[d], stride[d] * steps[d + 2]) for d in range(dims)]),
    )


def _row_major(shape: Sequence[int]) -> list[int]:
    """The steps of a contiguous tensor; its strides say nothing about dimensions of size 1."""
    steps = [1]
    for size in reversed(shape[1:]):
        steps.insert(0, steps[0] * size)
    return steps


def _sums(tables: list[Tensor]) -> Tensor:
    """Every sum of one offset from each table, row-major."""
    total = tables[0]
    for more in tables[1:]:
        total = (total[:, None] + more).reshape(-1)
    return total


def begin_convolution(
    x: Tensor,
    w: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    accumulate: str,
    rounding: str,
    rng: Tensor,
    node: int,
) -> Pending:
    """Convolution in 1, 2 or 3 dimensions without bias: k over (input channel, kernel position), ascending."""
    geometry = Geometry(stride, padding, dilation, transposed, output_padding, groups)
    size = geometry.output_size(x, w)
    loads = (storage_of(w, "convolution's weight"), storage_of(x, "convolution's input"))
    kernel = contract_of(accumulate, rounding, loads, loads[1])
    x, w = x.detach(), w.detach()
    if transposed:
        x, w, geometry = transposed_as_plain(x, w, geometry)
    if x.numel() == 0 and 0 in size:
        return Pending(size, x.dtype)
    shape = shape_of(x.shape, w.shape, geometry.stride, geometry.padding, geometry.dilation, groups)
    plan = planned(kernel, shape)
    if plan is not None:
        return begin_planes(kernel, plan, x, w, Draw.of(rng, node).key(), size)
    x = padded(x, geometry.padding)
    found = windows_of(x.shape, w.shape[2:], tuple(geometry.stride), tuple(geometry.dilation), groups)
    k = _sums([found.channels, found.taps])
    weights = w.reshape(groups, w.shape[0] // groups, w.shape[1:].numel())
    pixels = found.pixels.numel()
    if pixels < _FEW and x.shape[0] > 1:
        # The windows of all images are one line of columns; the result has them image by image.
        out = Placing(weights.shape[1] * pixels, pixels, _placed(x.shape[0], w.shape[0] * pixels, pixels))
        right = Right(groups, found.group_step, k, _sums([found.images, found.pixels]), out)
        return begin_contract(kernel, weights, x, right, 0, Draw.of(rng, node), size)
    # A batch of the contraction is a group of an image: groups lie group_step apart, images follow.
    right = Right(x.shape[0] * groups, found.group_step, k, found.pixels)
    return begin_contract(kernel, weights, x, right, groups, Draw.of(rng, node), size)


@lru_cache(maxsize=256)
def _placed(images: int, image_step: int, pixels: int) -> Tensor:
    return _sums([offsets(images, image_step), offsets(pixels, 1)])


def begin_input_gradient(
    grad: Tensor,
    w: Tensor,
    input_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    accumulate: str,
    rounding: str,
    rng: Tensor,
    node: int,
) -> Pending:
    """The gradient of a convolution's input: the transposed convolution of ``grad`` (the plain one, if transposed)."""
    tail = (accumulate, rounding, rng, node)
    none = [0] * len(stride)
    if transposed:
        return begin_convolution(grad, w, stride, padding, dilation, False, none, groups, *tail)
    back = Geometry(stride, padding, dilation, False, none, groups).reversed_for(input_size, w)
    return begin_convolution(grad, w, stride, padding, dilation, True, back.output_padding, groups, *tail)


def begin_weight_gradient(
    grad: Tensor,
    x: Tensor,
    weight_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    accumulate: str,
    rounding: str,
    rng: Tensor,
    node: int,
) -> Pending:
    """The gradient of a convolution's weight: k over (image, pixel of ``grad``; of x, if transposed), ascending."""
    geometry = Geometry(stride, padding, dilation, transposed, output_padding, groups)
    expected = geometry.output_size(x, x.new_empty(weight_size, device="meta").to(x.dtype))
    if list(grad.shape) != expected or grad.dtype != x.dtype:
        raise ValueError(f"convolution's gradient is {grad.dtype} {tuple(grad.shape)}, expected {x.dtype} {expected}")
    # Backwards, a transposed convolution is a plain one: input and gradient exchange their parts.
    small, image = (x, grad) if transposed else (grad, x)
    loads = (storage_of(small, "convolution's gradient"), storage_of(image, "convolution's input"))
    kernel = contract_of(accumulate, rounding, loads, loads[1])
    image = padded(image.detach(), padding)
    found = windows_of(image.shape, tuple(weight_size[2:]), tuple(stride), tuple(dilation), groups)
    pixels = small.shape[2:].numel()
    k = _sums([found.images, found.pixels[:pixels]])
    right = Right(groups, found.group_step, k, _sums([found.channels, found.taps]))
    left = small.detach().movedim(0, 1).reshape(groups, small.shape[1] // groups, small.shape[0] * pixels)
    return begin_contract(kernel, left, image, right, groups, Draw.of(rng, node), weight_size)


convolution: Final = finished(begin_convolution)
input_gradient: Final = finished(begin_input_gradient)
weight_gradient: Final = finished(begin_weight_gradient)
