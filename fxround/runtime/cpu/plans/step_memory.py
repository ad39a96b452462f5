"""Memory of the values of a step of a loop: a value is written where one was that nothing reads any more.

Without this, a step of large values passes through more memory than the caches hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, fx


class StepMemory:
    """Gives memory to the values of a body while its nodes are planned, in order.

    held    the tensors that own it, by the number of the memory
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.held: dict[int, Tensor] = {}
        self._places = {node: i for i, node in enumerate(graph.nodes)}
        # The place of the last node that reads a memory, and the memories whose last reader is at a place.
        self._until: dict[int, int] = {}
        self._ending = defaultdict[int, list[int]](list)
        # The memories that nothing reads any more, by size, and those that the node in work has taken.
        self._free = defaultdict[int, list[int]](list)
        self._taken: list[int] = []

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a row-major tensor that the node in work may write to."""
        wanted = torch.empty(tuple(shape), dtype=dtype, device="meta").nbytes
        if self._free[wanted]:
            memory = self._free[wanted].pop()
            made = self.held[memory].view(dtype).view(tuple(shape))
        else:
            # A byte for a value of none: without one, it would have no memory to tell it from others by.
            owner = torch.empty(max(1, wanted), dtype=torch.uint8, device="cpu")
            memory = memory_of(owner)
            self.held[memory] = owner
            made = owner[:wanted].view(dtype).view(tuple(shape))
        self._until.pop(memory, None)
        self._taken.append(memory)
        return made

    def note(self, node: fx.Node, values: Iterable[Tensor]) -> None:
        """Note what a node's values are, when it is planned; what it read for the last time is free from now on."""
        now = self._places[node]
        # What the graph returns is read after all steps.
        last = max((self._places[user] for user in node.users), default=now)
        for memory in {memory_of(value) for value in values} & self.held.keys():
            self._extend(memory, last)
        for memory in self._taken:
            if memory not in self._until:
                self._extend(memory, now)
        self._taken.clear()
        for memory in self._ending.pop(now, ()):
            if self._until.get(memory) == now:
                del self._until[memory]
                self._free[self.held[memory].nbytes].append(memory)

    def _extend(self, memory: int, last: int) -> None:
        if last > self._until.get(memory, -1):
            self._until[memory] = last
            self._ending[last].append(memory)

    def ends_with(self, tensor: Tensor, node: fx.Node) -> bool:
        """Whether a tensor is the whole of a memory of which a node, the next to be planned, is the last reader."""
        memory = memory_of(tensor)
        whole = memory in self.held and tensor.is_contiguous() and tensor.nbytes == self.held[memory].nbytes
        return whole and self._until.get(memory) == self._places[node]


def memory_of(tensor: Tensor) -> int:
    """Return the number of the memory that a tensor is in."""
    return tensor.untyped_storage().data_ptr()
