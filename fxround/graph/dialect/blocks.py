"""Blocks: the largest finite magnitude among the elements that share a scale.

block_maximum(x, [1, 32])   for each element of a matrix, that of the 32 consecutive columns to which it belongs
block_maximum(x, [1, 0])    of each row, as a column
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fxround.graph.dialect.call import Call, T, operator
from fxround.numerics.storage import Storage


@operator("block_maximum")
@dataclass(frozen=True)
class BlockMaximum(Call[T]):
    """For each element, the largest finite magnitude in its block; 0 in a block without one.

    sizes: the size of a block in each dimension, from its beginning; 0 for the whole dimension, which then has size 1
    in the result. The last block of a dimension may be shorter.
    """

    rounds: ClassVar[bool] = False

    x: T
    sizes: Sequence[int]

    def kernel(self, loads: tuple[Storage, ...]) -> None:
        """Nothing is rounded, and there is no kernel to build."""

    def require(self: BlockMaximum[Tensor]) -> list[Any]:
        """Return the sizes of the result. Raises ValueError for sizes that do not fit the operand."""
        if len(self.sizes) != self.x.dim() or any(n < 0 for n in self.sizes):
            raise ValueError(
                f"block_maximum: sizes {list(self.sizes)} for a tensor with {self.x.dim()} dimensions; expected one of "
                "at least 0 for each dimension"
            )
        return [size if n else 1 for size, n in zip(self.x.shape, self.sizes, strict=True)]

    def fake(self: BlockMaximum[Tensor]) -> Tensor:
        """Return a tensor of the operand's dtype."""
        self.loads()
        return self.x.new_empty(self.require())


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
