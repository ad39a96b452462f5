"""Reductions: sums and products over dimensions, and of all prefixes along one.

Several reduced dimensions count as one, in row-major order of their elements. Rules, lowering and running are those of
the base classes: another reduction is a class here and its kernel in ``kernels.reductions``.

    sum(x, [1], True, "lanes:16", "binary32/stochastic/inf", "binary32/nearest_even/inf", rng, 4)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from fxround.graph.dialect.call import Call, T, empty, operator, require_state
from fxround.graph.dtypes import dtype_of
from fxround.kernels import from_text
from fxround.kernels.kinds import Exact, Reduce, Scan
from fxround.kernels.reductions import cumprod_kernel, cumsum_kernel, prod_kernel
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.formats.storage import Storage
from fxround.numerics.modes import Rounding


def dims_of(x: Tensor, dims: Sequence[int]) -> list[int]:
    """Return the dimensions as non-negative numbers, ascending, each once; all of them if none is named.

    Raises IndexError for one out of range, ValueError for one that is named twice.
    """
    wanted = list(dims) or list(range(x.dim()))
    if any(not -max(1, x.dim()) <= d < max(1, x.dim()) for d in wanted):
        raise IndexError(f"dims {list(dims)} of a tensor with {x.dim()} dimensions: out of range")
    if x.dim() == 0:
        return []
    places = sorted(d % x.dim() for d in wanted)
    if len(set(places)) != len(places):
        raise ValueError(f"dims {list(dims)} name a dimension twice")
    return places


class ChainCall(Call[T]):
    """What reductions and scans have in common: an operand, and the roundings of a step and of a result."""

    kind: ClassVar[Literal["reduction"]] = "reduction"

    x: T
    accumulate: str
    rounding: str
    rng: T
    node: int

    def arithmetic(self, loads: tuple[Storage, ...]) -> tuple[Accumulation, Rounding, Storage, Storage]:
        """Return what specializes a kernel: both roundings, and how operand and result are stored."""
        (stored,) = loads
        return from_text.accumulation(self.accumulate), from_text.rounding(self.rounding), stored, stored


class ReductionCall(ChainCall[T]):
    """What sums and products over dimensions have in common."""

    dims: Sequence[int]
    keepdim: bool

    @abstractmethod
    def kernel(self, loads: tuple[Storage, ...]) -> Reduce | Exact:
        """Return the kernel."""

    def reduced(self: ReductionCall[Tensor]) -> list[int]:
        """Return the reduced dimensions, none negative, ascending."""
        return dims_of(self.x, self.dims)

    def size(self: ReductionCall[Tensor]) -> list[Any]:
        """Return the sizes of the result."""
        reduced = self.reduced()
        if self.keepdim:
            return [1 if d in reduced else s for d, s in enumerate(self.x.shape)]
        return [s for d, s in enumerate(self.x.shape) if d not in reduced]

    def fake(self: ReductionCall[Tensor]) -> Tensor:
        """Return a tensor without the reduced dimensions, or with size 1 in each."""
        kernel = self.kernel(self.loads())
        require_state(self.rng)
        return empty(self.x, self.size(), dtype_of(kernel.result))


@operator("sum", aten=("sum.default", "sum.dim_IntList"))
@dataclass(frozen=True)
class Sum(ReductionCall[T]):
    """The sum over ``dims``, each addition rounded; under the order ``exact``, the exact sum rounded once."""

    x: T
    dims: Sequence[int]
    keepdim: bool
    order: str
    accumulate: str
    rounding: str
    rng: T
    node: int

    def kernel(self, loads: tuple[Storage, ...]) -> Reduce | Exact:
        """Return the kernel of the order."""
        return from_text.total(self.order, self.accumulate, self.rounding, *loads)


@operator("prod", aten=("prod.default", "prod.dim_int"))
@dataclass(frozen=True)
class Prod(ReductionCall[T]):
    """The product over ``dims``, k ascending from 1."""

    x: T
    dims: Sequence[int]
    keepdim: bool
    accumulate: str
    rounding: str
    rng: T
    node: int

    def kernel(self, loads: tuple[Storage, ...]) -> Reduce:
        """Return the kernel."""
        return prod_kernel(*self.arithmetic(loads))


@dataclass(frozen=True)
class ScanCall(ChainCall[T]):
    """The results of a chain after each of its steps, along one dimension."""

    x: T
    dim: int
    accumulate: str
    rounding: str
    rng: T
    node: int

    @abstractmethod
    def kernel(self, loads: tuple[Storage, ...]) -> Scan:
        """Return the kernel."""

    def fake(self: ScanCall[Tensor]) -> Tensor:
        """Return a tensor of the operand's size."""
        self.kernel(self.loads())
        dims_of(self.x, [self.dim])
        require_state(self.rng)
        return empty(self.x, self.x.shape)


@operator("cumsum", aten=("cumsum.default",))
@dataclass(frozen=True)
class Cumsum(ScanCall[T]):
    """Every prefix sum, k ascending from +0."""

    def kernel(self, loads: tuple[Storage, ...]) -> Scan:
        """Return the kernel."""
        return cumsum_kernel(*self.arithmetic(loads))


@operator("cumprod", aten=("cumprod.default",))
@dataclass(frozen=True)
class Cumprod(ScanCall[T]):
    """Every prefix product, k ascending from 1."""

    def kernel(self, loads: tuple[Storage, ...]) -> Scan:
        """Return the kernel."""
        return cumprod_kernel(*self.arithmetic(loads))
