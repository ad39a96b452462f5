"""A contraction over CPU tensors and the map after it, step by step.

Both run the kernels that they run alone, and elements keep their numbers, so bits and random words are the same. A step
of the contraction has ended, and every item whose quick results did not count is done again, before the map reads;
``Work.complete`` says how many leading elements are then final, and blocks that are not final wait for the next step.
No item reads a result. The map reads an element of the contraction's result only for the same element of its own
result, and reads a block before it writes it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from fxround.graph.dialect import Matmul
from fxround.graph.dtypes import dtype_of
from fxround.numerics.arithmetic.randomness import BLOCK
from fxround.runtime import buffers
from fxround.runtime.cpu.begin import begin
from fxround.runtime.cpu.contraction import Pending, Work
from fxround.runtime.cpu.matmul import Bound, bound_matmul
from fxround.runtime.cpu.pointwise import MapCall, addresses, array
from fxround.runtime.draw import key_of
from fxround.runtime.epilogues import CONTRACTION, Followed

# The bytes that a step completes for each thread: half of a second-level cache, which also holds the map's operands.
_STEP: Final = 1 << 19
# The least items of a step for each thread: with fewer, threads would wait for the last one.
_ITEMS: Final = 4


@dataclass(frozen=True)
class Stepping:
    """A contraction and the map after it for operands of given strides.

    call        the map's code
    draws       whether it draws random bits
    bound       the product and the number of its node, if the contraction is one
    dtypes      the dtypes of its results
    place       which of them overwrites the contraction's result; None if that needs memory of its own
    steps       items of the contraction, and the blocks of the map that are complete after them
    spent       the inputs that nothing reaches after the call
    followed    what runs
    """

    call: MapCall
    draws: bool
    bound: tuple[Bound, int] | None
    dtypes: tuple[torch.dtype, ...]
    place: int | None
    steps: tuple[tuple[range, range], ...]
    spent: tuple[int, ...]
    followed: Followed

    def run(self, inputs: Sequence[Any]) -> list[Tensor]:
        """Run the steps: items of the contraction, then the blocks of the map that are complete."""
        followed, pending = self.followed, self._begin(inputs)
        results = [buffers.empty(self.call.shape, dtype) for dtype in self.dtypes]
        made = buffers.empty(pending.shape, pending.dtype) if self.place is None else results[self.place]
        sources = array(addresses([made if i is None else inputs[i] for i in followed.operands]))
        targets, key = array(addresses(results)), key_of(followed.map, inputs[followed.rng], self.draws)
        for items, blocks in self.steps:
            # Returns when all items are final, those included whose quick results did not count.
            pending.run(made.data_ptr(), items)
            self.call.over(blocks, sources, targets, key)
        if self.place is None and CONTRACTION not in followed.outside:
            buffers.release(made)
        buffers.release(*(inputs[i] for i in self.spent))
        return [made if number == CONTRACTION else results[number] for number in followed.outside]

    def _begin(self, inputs: Sequence[Any]) -> Pending:
        """Begin the contraction; a product of operands of known layouts needs no second look at them."""
        followed = self.followed
        if self.bound is None or followed.factors is None:
            return begin(followed.call(*inputs))
        (bound, node), (a, b) = self.bound, followed.factors
        return bound.begin(inputs[a], inputs[b], inputs[followed.rng], node)


def plan_followed(followed: Followed, inputs: Sequence[Any], spent: tuple[int, ...]) -> Stepping | None:
    """The plan for inputs of these layouts; None if the graph is to run as it says."""
    contraction = followed.call(*inputs)
    pending = begin(contraction)
    mapped = followed.map_over(inputs, pending.shape, pending.dtype)
    if pending.plan is None or mapped is None or any(isinstance(x, Tensor) and not x.is_cpu for x in inputs):
        return None
    kernel, operands = mapped
    call = MapCall.of(kernel, [(x.shape, x.stride()) for x in operands])
    dtypes = tuple(dtype_of(storage) for storage in kernel.results)
    steps = tuple(_steps(pending.plan, math.prod(pending.shape), pending.dtype.itemsize))
    alone = CONTRACTION not in followed.outside
    place = dtypes.index(pending.dtype) if pending.dtype in dtypes and alone else None
    if call is None or (place is None and len(steps) == 1):
        return None
    bound = None
    if isinstance(contraction, Matmul) and followed.one_rng:
        bound = bound_matmul(contraction), contraction.node
    return Stepping(call, bool(kernel.draws), bound, dtypes, place, steps, spent, followed)


def _steps(contraction: Work, total: int, itemsize: int) -> Iterator[tuple[range, range]]:
    """Items, and the blocks that are complete after them: about as much at a time as the caches hold."""
    threads, complete, items = torch.get_num_threads(), contraction.complete, contraction.items
    wanted, least = max(1, _STEP * threads // itemsize), 1 if threads == 1 else _ITEMS * threads
    begin = block = 0
    while begin < items:
        done = block * BLOCK + wanted
        end = min(items, max(bisect_left(range(items + 1), done, lo=begin + 1, key=complete), begin + least))
        if 2 * (total - complete(end)) < wanted or 2 * (items - end) < least:
            end = items
        # Only whole blocks below ``complete`` are final; the last step takes what is left, a short block included.
        until = -(-total // BLOCK) if end == items else complete(end) // BLOCK
        yield range(begin, end), range(block, until)
        begin, block = end, until
