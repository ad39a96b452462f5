"""Convolutions of few channels without packing: how the image is cut, and where its taps are.

Most such convolutions are depthwise. A convolution in 1 or 2 dimensions is one in three, some of them of size 1; the
first dimension is cut into items whose planes fit in the second-level cache. ``planned`` says whether the kernel of
``llvm.planes`` does a convolution. It does not where results would be mostly gaps, where one cut is too large, or where
a group has enough output channels to share a packed panel. The choice never changes a bit, so it may depend on the
machine. Sizes come from shapes that ``Geometry.result_size`` has checked, and every offset stays inside a plane.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from fxround.graph.dtypes import dtype_of
from fxround.kernels.kinds import Contract
from fxround.runtime.contractions import TABLES
from fxround.runtime.cpu.code import current_set, native, signature
from fxround.runtime.cpu.contraction import Code, Pending, Work, enough_for, in_lines
from fxround.runtime.cpu.llvm.engine import machine_of
from fxround.runtime.cpu.llvm.planes import POINTERS, PlanesVariant, build_planes
from fxround.runtime.cpu.llvm.render import bytes_of
from fxround.runtime.cpu.llvm.shards import table_of
from fxround.runtime.cpu.llvm.tile import quick_for, tile_for
from fxround.runtime.cpu.pointwise import addresses, array
from fxround.runtime.memo import by_bytes

_PLANES: Final = signature(2, len(POINTERS))
# The number of output channels of a group from which packed panels are faster.
_FEW: Final = 5
# The most lanes of an item for each of its results: beyond this, most lanes are gaps.
_GAPS: Final = 2
# The most bytes of an item's planes, which stay in the second-level cache.
_PLANES_BYTES: Final = 1 << 19


@dataclass(frozen=True)
class ConvolutionSizes:
    """The sizes of a convolution in three dimensions, of which the first is cut into items."""

    images: int
    groups: int
    channels: int
    outputs: int
    image: tuple[int, int, int]
    taps: tuple[int, int, int]
    stride: tuple[int, int, int]
    padding: tuple[int, int, int]
    dilation: tuple[int, int, int]

    @property
    def results(self) -> tuple[int, int, int]:
        """The spatial sizes of the result."""
        return tuple(  # type: ignore[return-value]
            (self.image[d] + 2 * self.padding[d] - self.dilation[d] * (self.taps[d] - 1) - 1) // self.stride[d] + 1
            for d in range(3)
        )

    def lines(self, cut: int) -> tuple[int, int, int]:
        """The sizes of a part of a plane for ``cut`` results of the first dimension."""
        wanted = (cut, *self.results[1:])
        return tuple(  # type: ignore[return-value]
            # A tap at distance r is met r // stride lines further on in the part of remainder r % stride.
            wanted[d] + self.dilation[d] * (self.taps[d] - 1) // self.stride[d]
            for d in range(3)
        )

    @property
    def length(self) -> int:
        """The number of products of a result."""
        return self.channels * prod(self.taps)


def shape_of(
    x: Sequence[int],
    w: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> ConvolutionSizes:
    """The shape of a convolution that is not transposed.

    Of two spatial dimensions, the middle one has size 1; of one, also the first.
    """

    def three(values: Sequence[int], other: int) -> tuple[int, int, int]:
        first, middle, last = {1: (None, None, 0), 2: (0, None, 1), 3: (0, 1, 2)}[len(values)]
        return tuple(other if d is None else values[d] for d in (first, middle, last))  # type: ignore[return-value]

    sizes = (three(x[2:], 1), three(w[2:], 1), three(stride, 1), three(padding, 0), three(dilation, 1))
    return ConvolutionSizes(x[0], groups, x[1] // groups, w[0] // groups, *sizes)


@dataclass(frozen=True)
class Planes:
    """How a convolution is done over planes: its plan, and the tables that its code reads."""

    shape: ConvolutionSizes
    plan: Work
    taps: Tensor
    places: Tensor


def planned(kernel: Contract, shape: ConvolutionSizes) -> Planes | None:
    """The plan on this machine; None if packed panels are to be used."""
    return _planned(kernel, current_set(), torch.get_num_threads(), shape)


@by_bytes(TABLES)
def _planned(kernel: Contract, isa: str, threads: int, shape: ConvolutionSizes) -> Planes | None:
    """The same, remembered for each instruction set and number of threads."""
    if shape.outputs >= _FEW or shape.length == 0 or min(shape.results) <= 0 or shape.images * shape.groups == 0:
        return None
    machine = machine_of(isa)
    general, quick = _variant(kernel, isa, shape), quick_for(kernel, machine)
    first = general if quick is None else _variant(quick, isa, shape)
    cut = _cut(shape, general, threads)
    if cut == 0 or first.lanes * -(-_positions(shape, cut) // first.lanes) > _GAPS * cut * prod(shape.results[1:]):
        return None
    cuts = -(-shape.results[0] // cut)

    def code(variant: PlanesVariant) -> Code:
        run = native(variant.digest, build_planes, variant, "planes", _PLANES)
        lines, part, plane = _extents(shape, cut, variant)
        block = kernel.chunk or shape.length
        counts = (shape.outputs, shape.channels, shape.groups, shape.length, block, cuts, cut)
        sizes = (*counts, *shape.results, *shape.image, *shape.padding, *shape.stride, *lines, part, plane)
        space = variant.scratch_bytes(shape.length, shape.channels * plane, _positions(shape, cut))
        return Code(run, array((*sizes, *table_of(shape.length, kernel.shards))), space)

    items = shape.images * shape.groups * cuts
    enough = max(1, enough_for(kernel) // (cut * prod(shape.results[1:]) * shape.outputs * shape.length))
    # Both variants read these tables: ``part`` is the same for both, whatever their lanes.
    taps, places = _taps(shape, cut, general), _places(shape, cut)
    size, plane = prod(shape.results), prod(shape.results[1:])
    # With several output channels, an item writes to as many places: elements are final only when all cuts of a group
    # are.
    complete = in_lines(1, cut * plane, size) if shape.outputs == 1 else in_lines(cuts, shape.outputs * size)
    first_code = None if quick is None else code(first)
    plan = Work(cache(lambda: code(general)), first_code, items, enough, complete)
    return Planes(shape, plan, taps, places)


def _variant(kernel: Contract, isa: str, shape: ConvolutionSizes) -> PlanesVariant:
    """The variant with as many independent accumulators as a packed tile, in one row."""
    machine = machine_of(isa)
    packed = tile_for(kernel, machine, 1)
    most = packed.rows[0] * packed.vectors
    tiles = tuple(n for n in (8, 4, 2, 1) if n <= most)
    flat = shape.image[1] == shape.taps[1] == 1 and shape.padding[1] == 0
    step = shape.stride[2] if shape.stride[2] <= 2 else 0
    return PlanesVariant(kernel, packed.lanes, tiles, step, flat, machine)


def _cut(shape: ConvolutionSizes, variant: PlanesVariant, threads: int) -> int:
    """Results of the first dimension in an item, in equal parts; 0 if a single one is too many."""
    size = shape.results[0]
    for parts in range(1, size + 1):
        cut = -(-size // parts)
        plane = _extents(shape, cut, variant)[2]
        if shape.channels * plane * bytes_of(variant.kernel.accumulator) <= _PLANES_BYTES:
            wanted = -(-2 * threads // (shape.images * shape.groups)) if threads > 1 else 1
            return min(cut, -(-size // wanted))
    return 0


def _extents(shape: ConvolutionSizes, cut: int, variant: PlanesVariant) -> tuple[tuple[int, int, int], int, int]:
    """The lines of a part, and the elements of a part and of a plane, with room for a vector after each part."""
    lines = shape.lines(cut)
    part = prod(lines) + _LANES
    return lines, part, prod(shape.stride) * part


# Elements of room after a part: the widest vector of any variant, since all variants read the same tables of offsets.
_LANES: Final = 16


def _positions(shape: ConvolutionSizes, cut: int) -> int:
    """The number of positions of a part from the first result to the last one."""
    _, lines1, lines2 = shape.lines(cut)
    return ((cut - 1) * lines1 + shape.results[1] - 1) * lines2 + shape.results[2]


def _taps(shape: ConvolutionSizes, cut: int, variant: PlanesVariant) -> Tensor:
    """The offset in the planes of a group of each product's element, for the result at position 0."""
    lines, part, plane = _extents(shape, cut, variant)
    offsets = torch.arange(shape.channels, device="cpu") * plane
    # A tap is met in the part of its remainder by the stride, ``reach // stride`` lines or columns further on.
    line, number = (lines[1] * lines[2], lines[2], 1), (shape.stride[1] * shape.stride[2], shape.stride[2], 1)
    for d in range(3):
        reach = shape.dilation[d] * torch.arange(shape.taps[d], device="cpu")
        taps = reach // shape.stride[d] * line[d] + reach % shape.stride[d] * number[d] * part
        offsets = (offsets[:, None] + taps).reshape(-1)
    return offsets


def _places(shape: ConvolutionSizes, cut: int) -> Tensor:
    """The number within the item of the result at each position, and of a vector of positions more."""
    _, lines1, lines2 = shape.lines(cut)
    size1, size2 = shape.results[1:]
    # Positions in gaps get numbers of other results: they start streams whose results are dropped.
    position = torch.arange(_positions(shape, cut) + _LANES, device="cpu")
    row = position // lines2
    return ((row // lines1) * size1 + row % lines1) * size2 + position % lines2


def begin_planes(kernel: Contract, planes: Planes, x: Tensor, w: Tensor, key: Any, size: Sequence[int]) -> Pending:
    """The convolution of x (images, groups * channels, *image) with w (groups * outputs, channels, *taps)."""
    held = (x.contiguous(), w.contiguous(), planes.taps, planes.places)
    return Pending(size, dtype_of(kernel.result), planes.plan, addresses(held), held, key)
