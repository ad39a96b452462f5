"""Convolution and its two gradients as contractions: which elements meet, and in what order.

With a stride s, a dilation d, a padding p and groups, over all spatial dimensions at once:

    y[n, o, i]    = sum over k = (c, t) of  w[o, c, t] * x[n, c, s*i + d*t - p]      c: input channel of o's group
    gw[o, c, t]   = sum over k = (n, i) of  gy[n, o, i] * x[n, c, s*i + d*t - p]
    gx            = the transposed convolution of gy with w

k is row-major and ascending; an element of the padding is +0 and takes its step. A transposed convolution is the plain
one over an input with s - 1 zeros between its elements, with the kernel turned around; those zeros take their steps
too. Shapes are checked first (``geometry``). The offset of an element is a sum of two offset tables, made of indices
that stay inside the padded input; nothing is copied but the padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from fxround.graph.dialect import Convolution, ConvolutionInputGradient, ConvolutionWeightGradient
from fxround.graph.dialect.contractions import require_length
from fxround.graph.geometry import Geometry, require_gradient, require_one_dtype, result_size
from fxround.kernels.kinds import Contract
from fxround.runtime.draw import Draw
from fxround.runtime.layouts import row_major
from fxround.runtime.memo import by_bytes
from fxround.runtime.operands import storage_of

CPU: Final = torch.device("cpu")
# A function of (x, before, after) that pads the spatial dimensions of x with zeros, as ``padded`` does.
Padding = Callable[[Tensor, Sequence[int], Sequence[int]], Tensor]
# The bytes that each cache of tables of offsets may hold: a table has 8 bytes for each column, pixel or step.
TABLES: Final = 1 << 24
# Images of fewer pixels are taken together: alone, their panels would mostly be ends, and weights packed for few
# columns.
_FEW: Final = 512


@by_bytes(TABLES)
def offsets(count: int, stride: int, device: torch.device = CPU) -> Tensor:
    """The table 0, stride, 2 * stride, ... of ``count`` offsets, int64."""
    return torch.arange(count, device=device) * stride


@dataclass(frozen=True)
class Placing:
    """Where results are stored.

    Element (batch, row, n) is at batch * step + row * row_step + offsets[n]; offsets ascend strictly, and follow each
    other in runs of ``run`` adjacent places.
    """

    step: int
    row_step: int
    offsets: Tensor
    run: int


@dataclass(frozen=True)
class Right:
    """Where the second operand is stored.

    Element (batch, k, n) is at batch * step + k_offsets[k] + n_offsets[n]. ``out`` says where the products are stored
    in the result, if that is not row-major. ``k_step`` is the constant step of k_offsets if the columns are adjacent in
    the operand and in the result, else None. ``steps`` are the constant steps of k_offsets and n_offsets, if they have
    such. ``along``: elements that follow each other in k are adjacent in memory, those in n are not.
    """

    batch: int
    step: int
    k_offsets: Tensor
    n_offsets: Tensor
    out: Placing | None = None
    k_step: int | None = None
    steps: tuple[int, int] | None = None
    along: bool = False

    @staticmethod
    def matrices(shape: Sequence[int], strides: Sequence[int], device: torch.device = CPU) -> Right:
        """A batch of matrices of shape (batch, length, columns) with any strides; the tables are on ``device``."""
        step, k, n = strides
        # A single column is adjacent to itself whatever its stride.
        adjacent = n == 1 or shape[2] == 1
        tables = offsets(shape[1], k, device), offsets(shape[2], n, device)
        along = k == 1 and (n != 1 or shape[2] == 1)
        return Right(shape[0], step, *tables, None, k if adjacent else None, (k, n), along)

    def place(self, rows: int) -> Placing:
        """Where the products of this operand with one of ``rows`` rows are stored."""
        columns = self.n_offsets.numel()
        return self.out or Placing(rows * columns, columns, offsets(columns, 1, self.n_offsets.device), columns)


@dataclass(frozen=True)
class Product:
    """A contraction of ``a``, (g, rows, length) of any strides, with ``b``, which ``right`` gives the offsets of.

    With groups = 0 the first operand has one matrix for each batch (g == batch); otherwise batch i uses matrix i mod
    groups. size: the shape of the result, (batch, rows, columns) or another one with as many elements. Raises
    ValueError if inner sizes or batches differ, or if a chain would be too long.
    """

    kernel: Contract
    a: Tensor
    b: Tensor
    right: Right
    groups: int
    draw: Draw
    size: Sequence[int]

    def __post_init__(self) -> None:
        g, _, length = self.a.shape
        batch, columns = self.right.batch, self.right.n_offsets.numel()
        if self.right.k_offsets.numel() != length or g != (self.groups or batch):
            expected = (batch, self.right.k_offsets.numel(), columns)
            raise ValueError(f"contraction of {tuple(self.a.shape)} with {expected}: inner sizes or batches differ")
        require_length(length)

    @property
    def is_empty(self) -> bool:
        """Whether the result has no element."""
        return self.right.batch * self.a.shape[1] * self.right.n_offsets.numel() == 0


def transposed_as_plain(x: Tensor, w: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, Geometry]:
    """Operand, weight and geometry of the plain convolution with the same result as a transposed one."""
    dims, groups = x.dim() - 2, geometry.groups
    before = [geometry.dilation[d] * (w.shape[d + 2] - 1) - geometry.padding[d] for d in range(dims)]
    after = [edge + more for edge, more in zip(before, geometry.output_padding, strict=True)]
    turned = w.flip(list(range(2, w.dim()))).reshape(groups, w.shape[0] // groups, *w.shape[1:]).transpose(1, 2)
    plain = turned.reshape(groups * w.shape[1], w.shape[0] // groups, *w.shape[2:])
    ones, none = (1,) * dims, (0,) * dims
    if tuple(geometry.stride) == ones and before == after and min(before) >= 0:
        # The zeros around it are those that a plain convolution has around its operand.
        return x, plain, Geometry(ones, tuple(before), geometry.dilation, False, none, groups)
    spaced = _spaced(x, geometry.stride, before, after)
    return spaced, plain, Geometry(ones, none, geometry.dilation, False, none, groups)


def _spaced(x: Tensor, stride: Sequence[int], before: Sequence[int], after: Sequence[int]) -> Tensor:
    """x with stride - 1 zeros between its elements, and ``before`` and ``after`` zeros around it.

    A negative number of zeros removes elements.
    """
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


def padded(x: Tensor, before: Sequence[int], after: Sequence[int]) -> Tensor:
    """x, row-major, with this many zeros on each side; a negative number removes elements."""
    edges = [p for d in reversed(range(x.dim() - 2)) for p in (before[d], after[d])]
    return (torch.nn.functional.pad(x, edges) if any(edges) else x).contiguous()


@by_bytes(TABLES)
def windows_of(
    shape: tuple[int, ...],
    taps: tuple[int, ...],
    counts: tuple[int, ...],
    geometry: Geometry,
    device: torch.device = CPU,
) -> Windows:
    """The offsets of ``counts`` windows of ``taps`` taps of a plain convolution in a padded image of this shape."""
    dims, steps = len(shape) - 2, row_major(shape)
    channels = shape[1] // geometry.groups
    reach = [geometry.stride[d] * steps[d + 2] if counts[d] > 1 else 0 for d in range(dims)]
    return Windows(
        channels * steps[1],
        offsets(shape[0], steps[0], device),
        offsets(channels, steps[1], device),
        _sums([offsets(taps[d], geometry.dilation[d] * steps[d + 2], device) for d in range(dims)]),
        _sums([offsets(counts[d], reach[d], device) for d in range(dims)]),
    )


def _sums(tables: list[Tensor]) -> Tensor:
    """Every sum of one offset from each table, row-major."""
    total = tables[0]
    for more in tables[1:]:
        total = (total[:, None] + more).reshape(-1)
    return total


@dataclass(frozen=True)
class Plain:
    """A convolution that is not transposed, of checked operands; ``size`` is the shape of its result."""

    kernel: Contract
    x: Tensor
    w: Tensor
    geometry: Geometry
    draw: Draw
    size: Sequence[int]

    @staticmethod
    def of(
        call: Convolution[Tensor] | ConvolutionInputGradient[Tensor],
        x: Tensor,
        w: Tensor,
        geometry: Geometry,
        size: Sequence[int],
    ) -> Plain:
        """The convolution of x and w that computes a call."""
        loads = (storage_of(w, "convolution's weight"), storage_of(x, "convolution's input"))
        draw = Draw.unread(call.rng, call.node)
        return Plain(draw.of_part(call.kernel(loads)), x, w, geometry, draw, size)

    @property
    def is_empty(self) -> bool:
        """Whether the result has no element."""
        return 0 in self.size

    def product(self, padding: Padding = padded) -> Product:
        """The contraction of the weight with the windows of the padded input."""
        w, geometry, size, groups = self.w, self.geometry, self.size, self.geometry.groups
        x = padding(self.x, geometry.padding, geometry.padding)
        windows = windows_of(x.shape, w.shape[2:], tuple(size[2:]), geometry, x.device)
        k = _sums([windows.channels, windows.taps])
        weights = w.reshape(groups, w.shape[0] // groups, w.shape[1:].numel())
        pixels = windows.pixels.numel()
        if pixels < _FEW and x.shape[0] > 1:
            # The windows of all images are one row of columns; the result has them image by image.
            places = _placed(x.shape[0], w.shape[0] * pixels, pixels, x.device)
            out = Placing(weights.shape[1] * pixels, pixels, places, pixels)
            right = Right(groups, windows.group_step, k, _sums([windows.images, windows.pixels]), out)
            return Product(self.kernel, weights, x, right, 0, self.draw, size)
        # Each batch of the contraction is a group of an image: groups are group_step apart, and images follow the
        # groups.
        right = Right(x.shape[0] * groups, windows.group_step, k, windows.pixels)
        return Product(self.kernel, weights, x, right, groups, self.draw, size)


@by_bytes(TABLES)
def _placed(images: int, image_step: int, pixels: int, device: torch.device) -> Tensor:
    """The offsets of the results of several images in a row-major result."""
    return _sums([offsets(images, image_step, device), offsets(pixels, 1, device)])


def convolution(call: Convolution[Tensor]) -> Plain:
    """A convolution in 1, 2 or 3 dimensions without bias: k over (input channel, kernel position), ascending."""
    require_one_dtype("convolution", call.x.dtype, call.w.dtype)
    size = result_size(call.geometry, call.x.shape, call.w.shape)
    x, w, geometry = call.x.detach(), call.w.detach(), call.geometry
    if geometry.transposed:
        x, w, geometry = transposed_as_plain(x, w, geometry)
    return Plain.of(call, x, w, geometry, size)


def input_gradient(call: ConvolutionInputGradient[Tensor], padding: Padding = padded) -> Plain:
    """The input's gradient: the transposed convolution of ``grad`` (the plain one, if transposed)."""
    geometry, size = call.geometry, tuple(call.size)
    require_one_dtype("convolution's gradient", call.grad.dtype, call.w.dtype)
    require_gradient(geometry, call.grad.shape, size, call.w.shape)
    grad, w = call.grad.detach(), call.w.detach()
    if not geometry.transposed:
        grad, w, plain = transposed_as_plain(grad, w, geometry.reversed_for(size, w.shape))
        return Plain.of(call, grad, w, plain, size)
    zeros, more = geometry.padding, geometry.output_padding
    if any(m >= step for m, step in zip(more, geometry.stride, strict=True)):
        # Past the last window, output_padding leaves room for others, which belong to no element of the input.
        grad = padding(grad, zeros, [p - m for p, m in zip(zeros, more, strict=True)])
        geometry = replace(geometry, padding=(0,) * len(zeros))
    return Plain.of(call, grad, w, geometry.plain(), size)


def weight_gradient(call: ConvolutionWeightGradient[Tensor], padding: Padding = padded) -> Product:
    """The weight's gradient: k over (image, pixel of ``grad``; of x, if transposed), ascending."""
    geometry, size = call.geometry, tuple(call.size)
    require_one_dtype("convolution's gradient", call.grad.dtype, call.x.dtype)
    require_gradient(geometry, call.grad.shape, call.x.shape, size)
    # For a transposed convolution, input and gradient exchange their parts.
    small, image = (call.x, call.grad) if geometry.transposed else (call.grad, call.x)
    kernel = call.kernel((storage_of(small, "convolution's gradient"), storage_of(image, "convolution's input")))
    image = padding(image.detach(), geometry.padding, geometry.padding)
    windows = windows_of(image.shape, size[2:], tuple(small.shape[2:]), geometry, image.device)
    k = _sums([windows.images, windows.pixels])
    groups = geometry.groups
    along = geometry.stride[-1] == 1
    right = Right(groups, windows.group_step, k, _sums([windows.channels, windows.taps]), along=along)
    pixels = small.shape[2:].numel()
    left = small.detach().movedim(0, 1).reshape(groups, small.shape[1] // groups, small.shape[0] * pixels)
    draw = Draw.unread(call.rng, call.node)
    return Product(draw.of_part(kernel), left, image, right, groups, draw, size)
