"""Scatters: contributions are added to elements of a destination, in row-major order of their source.

scatter_add(x, 0, index, src, "binary32/nearest_even/inf", rng, 4)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Literal

import torch
from torch import Tensor

from fxround.graph.dialect.call import Call, T, empty, operator, require_state, value_of
from fxround.graph.dtypes import stored_as
from fxround.graph.geometry import differ, require_one_dtype, surely
from fxround.kernels import from_text
from fxround.kernels.kinds import Scatter
from fxround.numerics.formats.storage import Storage

_INDICES: Final = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _require_index(index: Tensor, what: str) -> None:
    """Raise TypeError for an index of another dtype or layout than indexing takes."""
    if index.dtype not in _INDICES or index.layout != torch.strided:
        raise TypeError(
            f"{what}: got an index of {index.dtype}, {index.layout}; expected int64 or int32 (or a bool mask)"
        )


class ScatterCall(Call[T]):
    """What both scatters have in common: the destination x and the rounding of each addition."""

    kind: ClassVar[Literal["reduction"]] = "reduction"

    x: T
    accumulate: str
    rng: T
    node: int

    @property
    def operands(self) -> Sequence[T]:
        """The destination; what is added to it has its dtype."""
        return (self.x,)

    def loads(self) -> tuple[Storage, ...]:
        """Return how the destination is stored."""
        return (stored_as(value_of(self.x).dtype, "the destination"),)

    def kernel(self, loads: tuple[Storage, ...]) -> Scatter:
        """Return the kernel."""
        return from_text.scatter(self.accumulate, *loads)

    @abstractmethod
    def require(self: ScatterCall[Tensor]) -> None:
        """Raise IndexError, TypeError or ValueError for arguments that do not fit each other."""

    def fake(self: ScatterCall[Tensor]) -> Tensor:
        """Return a tensor of the destination's size."""
        self.kernel(self.loads())
        self.require()
        require_state(self.rng)
        return empty(self.x, self.x.shape)


@operator("scatter_add", aten=("scatter_add.default",))
@dataclass(frozen=True)
class ScatterAdd(ScatterCall[T]):
    """``x`` with src[i, j, ...] added at index[i, j, ...] along ``dim``, in index order of src."""

    x: T
    dim: int
    index: T
    src: T
    accumulate: str
    rng: T
    node: int

    def require(self: ScatterAdd[Tensor]) -> None:
        """Raise IndexError, TypeError or ValueError for arguments that do not fit each other."""
        dims = max(1, self.x.dim())
        if not -dims <= self.dim < dims:
            raise IndexError(f"scatter_add: dim {self.dim} of a tensor with {self.x.dim()} dimensions: out of range")
        _require_index(self.index, "scatter_add")
        require_one_dtype("scatter_add", self.x.dtype, self.src.dtype)
        own, at, given = (tuple(t.shape) or (1,) for t in (self.x, self.index, self.src))
        shapes = f"self {own}, index {at}, src {given}"
        if not len(own) == len(at) == len(given):
            raise ValueError(f"scatter_add: {shapes}: expected as many dimensions in each")
        sizes = enumerate(zip(at, given, own, strict=True))
        if any(surely(n > s) or (d != self.dim % dims and surely(n > m)) for d, (n, s, m) in sizes):
            raise ValueError(f"scatter_add: {shapes}: the index exceeds src, or self outside of dim {self.dim}")


@operator("index_put")
@dataclass(frozen=True)
class IndexPut(ScatterCall[T]):
    """``x`` with values added at the indexed places, in index order of values."""

    x: T
    indices: Sequence[T | None]
    values: T
    accumulate: str
    rng: T
    node: int

    def require(self: IndexPut[Tensor]) -> None:
        """Raise IndexError, TypeError or ValueError for arguments that do not fit each other."""
        require_one_dtype("index_put", self.x.dtype, self.values.dtype)
        at = 0
        for index in self.indices:
            if index is not None and index.dtype == torch.bool:
                if not index.dim() or differ(index.shape, self.x.shape[at : at + index.dim()]):
                    raise IndexError(
                        f"index_put: a mask of shape {tuple(index.shape)} at dimension {at} of {tuple(self.x.shape)}"
                    )
                at += index.dim()
                continue
            if index is not None:
                _require_index(index, "index_put")
            at += 1
        if at > self.x.dim():
            raise IndexError(f"index_put: {at} indices for a tensor with {self.x.dim()} dimensions")
        if all(index is None for index in self.indices):
            raise IndexError("index_put: expected at least one index tensor")
