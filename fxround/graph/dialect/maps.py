"""Maps: programs of rounded operations on each element of operands that broadcast.

pointwise([x0, x1], "t0 = mul(x0, x1) @ binary32/stochastic/inf", float32, rng, 7)
fused([x0, x1], "t0 = mul(x0, x1) @ R; t1 = relu(t0) @ exact; return t1", "f32", rng, [7])
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, fx

from fxround.errors import shown
from fxround.graph.dialect.call import Call, T, empty, operator, read, require_state, value_of
from fxround.graph.dtypes import LOADS, dtype_of, result_storage, stored_as
from fxround.graph.geometry import broadcast
from fxround.kernels import from_text
from fxround.kernels.kinds import Map
from fxround.kernels.long_programs import is_long
from fxround.numerics.formats.storage import Storage


@dataclass(frozen=True)
class ProgramCall(Call[T]):
    """What both operators have: the operands and the program."""

    xs: Sequence[T]
    program: str

    @property
    def operands(self) -> Sequence[T]:
        """The operands x0, x1, ... of the program."""
        return self.xs

    def loads(self) -> tuple[Storage, ...]:
        """Return how the operands are stored, masks among them. Raises ValueError if there are none."""
        if not self.xs:
            raise ValueError(f"{shown(self.program)}: a pointwise operator needs at least one tensor operand")
        return tuple(stored_as(value_of(x).dtype, f"operand {i}", LOADS) for i, x in enumerate(self.xs))

    @property
    @abstractmethod
    def results(self) -> tuple[Storage, ...]:
        """How the results are stored."""

    @abstractmethod
    def kernel(self, loads: tuple[Storage, ...]) -> Map | None:
        """Return the kernel; None for a program that runs in parts."""


@operator("pointwise")
@dataclass(frozen=True)
class Pointwise(ProgramCall[T]):
    """A program of one result, stored as ``dtype``. Its draws are those of the node."""

    dtype: torch.dtype
    rng: T
    node: int

    @property
    def results(self) -> tuple[Storage, ...]:
        """How the result is stored."""
        return (result_storage(self.dtype),)

    def kernel(self, loads: tuple[Storage, ...]) -> Map | None:
        """Return the kernel; None for a program that runs in parts."""
        (result,) = self.results
        return None if is_long(self.program, loads, (result,)) else from_text.pointwise(self.program, loads, result)

    def fake(self: Pointwise[Tensor]) -> Tensor:
        """Return a tensor of the shape to which the operands broadcast."""
        self.kernel(self.loads())
        require_state(self.rng)
        return empty(self.xs[0], broadcast("pointwise", *(x.shape for x in self.xs)), dtype=self.dtype)


@operator("fused", returns="Tensor[]")
@dataclass(frozen=True)
class Fused(ProgramCall[T]):
    """A chain of operations in one pass over memory: the bits of one call for each.

    stored      how each result is stored, for example ``f32 bf16``
    nodes       the number of each operation that draws, in order
    """

    stored: str
    rng: T
    nodes: Sequence[int]

    @property
    def results(self) -> tuple[Storage, ...]:
        """How the results are stored."""
        return from_text.storages(self.stored)

    def kernel(self, loads: tuple[Storage, ...]) -> Map | None:
        """Return the kernel; None for a program that runs in parts. Raises ValueError for too few node numbers."""
        self.require_nodes()
        long = is_long(self.program, loads, self.results)
        return None if long else from_text.fused(self.program, loads, self.stored)

    def require_nodes(self) -> None:
        """Raise ValueError for too few node numbers."""
        drawn = from_text.drawn(self.program)
        if len(self.nodes) < drawn:
            raise ValueError(f"{shown(self.program)} draws {drawn} times, got {len(self.nodes)} node numbers")

    def fake(self: Fused[Tensor]) -> list[Tensor]:
        """Return a tensor of the operands' shape for each result."""
        self.kernel(self.loads())
        require_state(self.rng)
        shape = broadcast("fused", *(x.shape for x in self.xs))
        return [empty(self.xs[0], shape, dtype=dtype_of(storage)) for storage in self.results]


POINTWISE: Final = Pointwise.overload
FUSED: Final = Fused.overload
MAPS: Final = frozenset((POINTWISE, FUSED))


def read_map(node: fx.Node) -> Pointwise[fx.Node] | Fused[fx.Node] | None:
    """Return the map that a node calls, None for any other node."""
    call = read(node)
    return call if isinstance(call, Pointwise | Fused) else None
