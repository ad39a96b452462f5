"""A map over several lists of tensors that it overwrites, such as the parameters of an optimizer, as one call.

``Several`` is what to run. The CPU walks a table of addresses in machine code, and a GPU takes the table with the
arguments of its kernel, so that no memory of a call outlives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fxround.kernels.kinds import Map


@dataclass(frozen=True, eq=False)
class Several:
    """A map, and the tensors that it reads and overwrites.

    kernel      the map
    columns     for each operand, its place in an entry; -1 for a number
    targets     for each result, the place in an entry of the tensor that it overwrites
    numbers     for each operand that is a number, a tensor of no dimensions on the CPU; None for the others
    entries     lists of tensors, row-major, of one shape in an entry, all on one device, of the dtypes of the kernel
    seeds       the seed of each entry
    sample      the sample of all
    nodes       the numbers of the nodes that draw, at least one
    """

    kernel: Map
    columns: tuple[int, ...]
    targets: tuple[int, ...]
    numbers: tuple[Tensor | None, ...]
    entries: Sequence[Sequence[Tensor]]
    seeds: Sequence[int]
    sample: int
    nodes: tuple[int, ...]

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.entries[0][0].device

    def of(self, first: int, last: int) -> Several:
        """The same map over some of the entries."""
        return replace(self, entries=self.entries[first:last], seeds=self.seeds[first:last])

    def apart(self) -> bool:
        """Whether no two entries share memory; those that do must run one after the other, in their order."""
        spans = sorted(
            (x.data_ptr(), x.data_ptr() + x.nbytes, n) for n, entry in enumerate(self.entries) for x in entry
        )
        end, owner = 0, -1
        for begin, stop, n in spans:
            if begin < end and n != owner:
                return False
            if stop > end:
                end, owner = stop, n
        return True
