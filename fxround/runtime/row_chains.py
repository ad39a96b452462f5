"""Chains over rows as data: what runs, on any device. ``schedule.row_chains`` finds them in a graph."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fxround.graph.dialect import Call
from fxround.kernels.kinds import Exact, Reduce
from fxround.kernels.reductions import largest_kernel
from fxround.numerics.formats.storage import Storage


@dataclass(frozen=True)
class ChainedKernel:
    """A kernel of the chain; ``operands`` and ``results`` are indices into the table of values.

    call: the call of an operator of ours; None for a maximum.
    """

    call: Call[fx.Node] | None
    operands: tuple[int, ...]
    results: tuple[int, ...]

    def reduction(self, storage: Storage) -> Reduce | Exact:
        """Return the kernel of a sum or a maximum over rows of elements that are stored so."""
        return largest_kernel(storage) if self.call is None else self.call.kernel((storage,))


@dataclass(frozen=True, eq=False)
class Chain:
    """A chain over rows. Its values are its inputs, then those that its stages make.

    stages      the kernels in order
    inputs      the number of inputs
    rng         which of them is the random state
    stored      the values that are results of the whole
    """

    stages: tuple[ChainedKernel, ...]
    inputs: int
    rng: int
    stored: tuple[int, ...]
