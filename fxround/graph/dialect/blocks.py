"""Blocks: figures of elements that share a scale, such as the largest magnitude, and scales as wide as the elements.

block_maximum(x, [1, 32])        for a matrix [M, N], the maxima of 32 consecutive columns, [M, ceil(N / 32)]
block_maximum(x, [1, 0])         of each row, [M, 1]
block_percentile(x, [1, 0], 99)  the least magnitude of each row that 99 percent do not exceed
block_sum(x, [1, 32])            the exact sums, rounded once
block_expand(scales, x, [1, 32])    [M, N]
hadamard(x, 1, 16, 0)            every 16 consecutive columns times a matrix of signs divided by 4, [M, N]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fxround.graph.dialect.call import Call, T, empty, operator
from fxround.graph.geometry import differ
from fxround.numerics.formats.hadamard import Hadamard
from fxround.numerics.formats.storage import Storage


class BlockCall(Call[T]):
    """What these operators have in common: a tensor, the size of a block in each dimension, and no kernel.

    They round nothing that a policy chooses: a sum is rounded once to nearest.

    sizes: from the beginning of a dimension; 0 for the whole dimension. The last block may be shorter.
    """

    rounds: ClassVar[bool] = False

    x: T
    sizes: Sequence[int]

    def kernel(self, loads: tuple[Storage, ...]) -> None:
        """There is no kernel to build."""

    def blocks(self: BlockCall[Tensor]) -> list[Any]:
        """Return the number of blocks in each dimension. Raises ValueError for sizes that do not fit the tensor."""
        if len(self.sizes) != self.x.dim() or any(n < 0 for n in self.sizes):
            raise ValueError(
                f"{self.name}: sizes {list(self.sizes)} for a tensor with {self.x.dim()} dimensions; expected one of "
                "at least 0 for each dimension"
            )
        return [1 if not n else -(-size // n) for size, n in zip(self.x.shape, self.sizes, strict=True)]


class BlockFigure(BlockCall[T]):
    """What the operators with one result for each block have in common."""

    def fake(self: BlockFigure[Tensor]) -> Tensor:
        """Return a tensor with an element for each block."""
        self.loads()
        return empty(self.x, self.blocks())


@operator("block_maximum")
@dataclass(frozen=True)
class BlockMaximum(BlockFigure[T]):
    """The largest finite magnitude of each block; 0 for a block without one."""

    x: T
    sizes: Sequence[int]


@operator("block_percentile")
@dataclass(frozen=True)
class BlockPercentile(BlockFigure[T]):
    """The least finite magnitude of a block that a percentage of them do not exceed; 0 if there is none."""

    x: T
    sizes: Sequence[int]
    percentile: float


@operator("block_sum")
@dataclass(frozen=True)
class BlockSum(BlockFigure[T]):
    """The exact sum of each block, rounded once to nearest."""

    x: T
    sizes: Sequence[int]


@operator("block_expand")
@dataclass(frozen=True)
class BlockExpand(BlockCall[T]):
    """The scale of each element of x's; a dimension that is one block keeps the size 1."""

    scales: T
    x: T
    sizes: Sequence[int]

    def size(self: BlockExpand[Tensor]) -> list[Any]:
        """Return the sizes of the result. Raises ValueError unless there is a scale for each block."""
        blocks = self.blocks()
        if differ(self.scales.shape, blocks):
            raise ValueError(f"block_expand: scales {tuple(self.scales.shape)}, expected {tuple(blocks)}")
        return [size if n else 1 for size, n in zip(self.x.shape, self.sizes, strict=True)]

    def fake(self: BlockExpand[Tensor]) -> Tensor:
        """Return a tensor of the scales' dtype."""
        self.loads()
        return empty(self.scales, self.size())


@operator("hadamard")
@dataclass(frozen=True)
class HadamardTransform(Call[T]):
    """Each ``size`` consecutive elements along ``dim`` times the matrix of ``numerics.formats.hadamard.Hadamard``.

    Each sum is accumulated in binary32 (binary64 for binary64), k ascending, and rounded to the dtype. Elements after
    the last complete group stay as they are.
    """

    x: T
    dim: int
    size: int
    seed: int

    def kernel(self, loads: tuple[Storage, ...]) -> None:
        """The kernel is that of a product of matrices."""

    def fake(self: HadamardTransform[Tensor]) -> Tensor:
        """Return a tensor of x's shape."""
        self.loads()
        self.require()
        return empty(self.x, self.x.shape)

    def require(self: HadamardTransform[Tensor]) -> None:
        """Raise IndexError for a dimension that x lacks, ValueError for a size without a matrix."""
        if not -self.x.dim() <= self.dim < self.x.dim():
            raise IndexError(f"hadamard along dimension {self.dim} of a tensor with {self.x.dim()}: out of range")
        Hadamard(self.size, self.seed)


def block_sizes(block: Any, dims: Sequence[int], ndim: int) -> list[int]:
    """Return the sizes of blocks in each dimension, as ``BlockMaximum`` takes them.

    block: as ``numerics.formats.scaled.Scaling`` has it. dims: the dimension along which blocks run; several for
    "channel"; the two of a tile, which has the last two otherwise.

    Raises ValueError for a block that the dimensions cannot have, IndexError for a dimension out of range.
    """
    if any(not -ndim <= d < ndim for d in dims):
        raise IndexError(f"dim {list(dims)} of a tensor with {ndim} dimensions: out of range")
    along = {d % ndim for d in dims}
    if len(along) < len(dims):
        raise ValueError(f"dim {list(dims)} names a dimension twice; expected each once")
    if block == "tensor":
        return [0] * ndim
    if block == "channel":
        return [0 if d in along else 1 for d in range(ndim)]
    if len(block) == 2:
        if ndim < 2:
            raise ValueError(
                f"a tile of {block[0]}x{block[1]} needs two dimensions, got a tensor with fewer, as a bias has: give "
                f"it blocks of a row, such as {block[1]}, in a rule of its own"
            )
        tile = dict(zip(dims if len(along) == 2 else (ndim - 2, ndim - 1), block, strict=True))
        return [tile.get(d, 1) for d in range(ndim)]
    if len(along) != 1:
        raise ValueError(f"blocks of {block[0]} run along one dimension, got {list(dims)}")
    return [block[0] if d in along else 1 for d in range(ndim)]
