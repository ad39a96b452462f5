"""Chains over rows as data: what runs, on any device. ``schedule.row_chains`` finds them in a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import fx

from fxround.graph.dialect import MAPS, Fused, Pointwise, Sum
from fxround.kernels.kinds import Exact, Reduce
from fxround.kernels.reductions import largest_kernel
from fxround.numerics.formats.storage import Storage
from fxround.operators.rules import argument

LARGEST: Final = torch.ops.aten.amax.default


@dataclass(frozen=True)
class ChainedKernel:
    """A kernel of the chain; ``operands`` and ``results`` are indices into the table of values.

    call: the call of an operator of ours; None for a maximum.
    """

    call: Pointwise[fx.Node] | Fused[fx.Node] | Sum[fx.Node] | None
    operands: tuple[int, ...]
    results: tuple[int, ...]

    def reduction(self, storage: Storage) -> Reduce | Exact:
        """Return the kernel of a sum or a maximum over rows of elements that are stored so."""
        if self.call is None:
            return largest_kernel(storage)
        assert isinstance(self.call, Sum)
        return self.call.kernel((storage,))


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


def is_largest_of_rows(node: fx.Node, dims: int) -> bool:
    """Whether a maximum is that of rows, is kept with size 1, and may be a zero of either sign (``largest_kernel``)."""
    rows = argument(node, "keepdim") and is_last(argument(node, "dim"), dims)
    # Only our own maps may read such a zero.
    return rows and all(user.target in MAPS for user in node.users)


def is_last(reduced: Sequence[int], dims: int) -> bool:
    """Whether the reduced dimensions are the last of ``dims`` alone; none are named for a maximum of all elements."""
    return dims > 0 and [d % dims for d in reduced] == [dims - 1]
