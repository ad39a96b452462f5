"""Sums over processes: each process has the sum of its part, and all get the sum of the parts.

add_processes(x, "tp", 2, float32, "", "binary32/nearest_even/inf shards=8", "binary32/nearest_even/inf", 16, rng, 4)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, fx

from fxround.graph.dialect.call import STATE, Call, T, empty, operator, require_state
from fxround.graph.dtypes import result_storage
from fxround.graph.geometry import Sizes
from fxround.kernels import from_text
from fxround.kernels.kinds import Contract, Exact, Map, Reduce
from fxround.kernels.sums_of_processes import sum_of_processes
from fxround.numerics.arithmetic.randomness import Part
from fxround.numerics.formats.storage import Storage


@operator("add_processes")
@dataclass(frozen=True)
class AddProcesses(Call[T]):
    """The sum of what the processes of a group have summed each, in a balanced tree of neighbours; then its rounding.

    x           this process's accumulators
    group       the name of the process group
    processes   their number, a power of two
    dtype       of the operands and of the result in one process
    order       of the whole sum; "" for a sum of products
    accumulate  how the whole accumulates, as in ``Sum`` and ``Matmul``
    length      the number of elements that a process sums
    rng         the random state of a part of the whole (``StateOfPart``), if an addition draws
    """

    x: T
    group: str
    processes: int
    dtype: torch.dtype
    order: str
    accumulate: str
    rounding: str
    length: int
    rng: T
    node: int

    @property
    def whole(self) -> Contract | Reduce:
        """The kernel that computes the whole sum in one process."""
        stored = result_storage(self.dtype)
        if not self.order:
            return from_text.contract(self.accumulate, self.rounding, (stored, stored), stored)
        kernel = from_text.total(self.order, self.accumulate, self.rounding, stored)
        if isinstance(kernel, Exact):
            raise ValueError(f"the order {self.order} has no shards, which {self.processes} processes could share")
        return kernel

    def kernel(self, loads: tuple[Storage, ...]) -> Map:
        """Return the kernel: its operands are the accumulators of the processes in the order of their ranks."""
        kernel = sum_of_processes(self.whole, self.processes, self.length)
        if loads[0] != kernel.loads[0]:
            raise ValueError(f"accumulators of {self.accumulate} are stored as {kernel.loads[0]}, got {loads[0]}")
        return kernel

    def fake(self: AddProcesses[Tensor]) -> Tensor:
        """Return a tensor of the operand's size."""
        self.kernel(self.loads())
        require_state(self.rng)
        return empty(self.x, self.x.shape, self.dtype)


@operator("state_of_part")
@dataclass(frozen=True)
class StateOfPart(Call[T]):
    """The random state (seed, sample) of a part of a result, with the numbers of ``randomness.Part``: int64 [7].

    chunk      sizes whose product is the number of elements of a run: of the shared dimension, as far as this process
               has it, and of the dimensions after it; none if all processes have all elements
    first      how much of the shared dimension is before what this process has, how much it has, and how much all
    own        processes have (``site.Share``); of equal parts, each is one
    whole
    shards     those of the whole sum, and the first one of this process
    """

    rounds: ClassVar[bool] = False

    rng: T
    chunk: Sizes
    first: int
    own: int
    whole: int
    shards: int
    shard: int

    @property
    def part(self) -> Part:
        """Where the elements stand in the whole."""
        chunk, own = math.prod(int(size) for size in self.chunk), self.own
        # A part without elements has no run; its length is a divisor in kernels.
        skip, first = chunk * (self.whole - own) // own, chunk * self.first // own
        return Part(max(chunk, 1), skip, first, self.shards, self.shard)

    def kernel(self, loads: tuple[Storage, ...]) -> None:
        """Return None: nothing is computed."""

    def fake(self: StateOfPart[Tensor]) -> Tensor:
        """Return an int64 tensor [7]."""
        require_state(self.rng, parts=False)
        return empty(self.rng, (STATE + len(Part._fields),))


def draws_in_parts(graph: fx.GraphModule) -> bool:
    """Whether operations of a lowered graph draw by the numbers that a part's elements have in the whole."""
    return bool(graph.graph.find_nodes(op="call_function", target=StateOfPart.overload))
