"""Blocks: the largest finite magnitude among elements that share a scale, and scales as wide as the elements.

block_maximum(x, [1, 32])        for a matrix [M, N], the maxima of 32 consecutive columns, [M, ceil(N / 32)]
block_maximum(x, [1, 0])         of each row, [M, 1]
block_expand(scales, x, [1, 32])    [M, N]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fxround.graph.dialect.call import Call, T, operator
from fxround.graph.geometry import differ
from fxround.numerics.storage import Storage


class BlockCall(Call[T]):
    """What both operators have in common: a tensor, the size of a block in each dimension, and no rounding.

    sizes: from the beginning of a dimension; 0 for the whole dimension. The last block may be shorter.
    """

    rounds: ClassVar[bool] = False

    x: T
    sizes: Sequence[int]

    def kernel(self, loads: tuple[Storage, ...]) -> None:
        """Nothing is rounded, and there is no kernel to build."""

    def blocks(self: BlockCall[Tensor]) -> list[Any]:
        """Return the number of blocks in each dimension. Raises ValueError for sizes that do not fit the tensor."""
        if len(self.sizes) != self.x.dim() or any(n < 0 for n in self.sizes):
            raise ValueError(
                f"{self.name}: sizes {list(self.sizes)} for a tensor with {self.x.dim()} dimensions; expected one of "
                "at least 0 for each dimension"
            )
        return [1 if not n else -(-size // n) for size, n in zip(self.x.shape, self.sizes, strict=True)]


@operator("block_maximum")
@dataclass(frozen=True)
class BlockMaximum(BlockCall[T]):
    """The largest finite magnitude of each block; 0 for a block without one."""

    x: T
    sizes: Sequence[int]

    def fake(self: BlockMaximum[Tensor]) -> Tensor:
        """Return a tensor with an element for each block."""
        self.loads()
        return self.x.new_empty(self.blocks())


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
        return self.scales.new_empty(self.size())


def block_sizes(block: Any, dims: Sequence[int], ndim: int) -> list[int]:
    """Return the sizes of blocks in each dimension, as ``BlockMaximum`` takes them.

    block: as ``numerics.scaled.Scaling`` has it. dims: the dimension along which blocks run; several for "channel".

    Raises ValueError for a block that the dimensions cannot have, IndexError for a dimension out of range.
    """
    if any(not -ndim <= d < ndim for d in dims):
        raise IndexError(f"dim {list(dims)} of a tensor with {ndim} dimensions: out of range")
    along = {d % ndim for d in dims}
    if block == "tensor":
        return [0] * ndim
    if block == "channel":
        return [0 if d in along else 1 for d in range(ndim)]
    if len(block) == 2:
        if ndim < 2:
            raise ValueError(f"a tile of {block[0]}x{block[1]} needs two dimensions, got a tensor with {ndim}")
        return [1] * (ndim - 2) + list(block)
    if len(along) != 1:
        raise ValueError(f"blocks of {block[0]} run along one dimension, got {list(dims)}")
    return [block[0] if d in along else 1 for d in range(ndim)]
