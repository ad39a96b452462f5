"""Chains over rows of CPU tensors: every kernel of a chain runs for one range of rows, then for the next one.

A kernel is passed the range of rows and the address of element 0 of each tensor. For a buffer whose first row is row r,
this address is that of the buffer less r rows, so a kernel of a chain must touch no row outside of its range. A range
begins at a multiple of 64 rows, so that no block of random bits is cut. A result may take the memory of an input that
nothing else reaches, if no later kernel reads that input: a map reads an element before it writes it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor

from fxround.graph.dialect import ProgramCall
from fxround.graph.dtypes import STORAGES, dtype_of
from fxround.kernels.kinds import Exact, Reduce
from fxround.numerics.arithmetic.randomness import BLOCK
from fxround.runtime import buffers
from fxround.runtime.cpu.code import address_of, native, signature
from fxround.runtime.cpu.llvm.row_chain import ARGS, build_chain
from fxround.runtime.cpu.pointwise import MapCall, addresses, array
from fxround.runtime.cpu.reduction import Loops, loops_for
from fxround.runtime.cpu.strides import Lines
from fxround.runtime.cpu.threads import pieces_of, scratch, spread
from fxround.runtime.draw import NO_KEY, key_of
from fxround.runtime.operands import map_of
from fxround.runtime.row_chains import Chain, ChainedKernel

# The bytes that a range's buffers should have, to fit the second-level cache beside operands and results, and the most
# that a range of 64 rows may have.
_CACHE: Final = 1 << 18
_MOST: Final = 1 << 21
# Values of fewer bytes stay in the cache anyway.
_LEAST: Final = 1 << 16
# The elements that make another thread worth its start.
_ENOUGH: Final = 1 << 14
_LINE: Final = 64
_CHAIN: Final = signature(2, len(ARGS))


@dataclass(frozen=True)
class Ranges:
    """A chain for operands of given strides.

    ranges      the number of ranges of rows
    enough      the ranges that make another thread worth its start
    shape       the shape of the rows
    widths      elements of a row of each value: its length, or 1
    dtypes      the dtype of each value
    offsets     the offsets of the buffers in a thread's scratch, by value
    space       the bytes of that scratch
    table       the C array that ``llvm.row_chain`` reads
    calls       the code and arrays of each stage, whose addresses the table has
    draws       whether each stage draws random bits
    over        for results that may overwrite an input that nothing reaches after the call, that input
    spent       the inputs that nothing reaches after the call
    chain       the chain
    """

    ranges: int
    enough: int
    shape: tuple[int, ...]
    widths: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    offsets: dict[int, int]
    space: int
    table: Any
    calls: tuple[MapCall | LineCall, ...]
    draws: tuple[bool, ...]
    over: dict[int, int]
    spent: tuple[int, ...]
    chain: Chain

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run the chain range by range, split over threads."""
        over = {i: j for i, j in self.over.items() if buffers.fills_its_buffer(inputs[j])}
        results = {
            i: buffers.again(inputs[over[i]])
            if i in over
            else buffers.empty((*self.shape, self.widths[i]), self.dtypes[i])
            for i in self.chain.stored
        }
        places = (*range(len(inputs)), *results)
        outside = dict(zip(places, addresses((*inputs, *results.values())), strict=True))
        # A value outside of the chain has the address of its element 0, a buffer its offset in scratch.
        # ``llvm.row_chain`` takes a value for a buffer if the table gives it bytes of a row.
        bases = array([outside.get(i, self.offsets.get(i, 0)) for i in range(len(self.widths))])
        rng = inputs[self.chain.rng]
        keys = [
            NO_KEY if stage.call is None else key_of(stage.call, rng, draws)
            for stage, draws in zip(self.chain.stages, self.draws, strict=True)
        ]
        key_addresses = array([ctypes.addressof(key) for key in keys])
        pieces = pieces_of(self.ranges, self.enough)
        space, step = scratch(self.space, pieces > 1)
        arguments = (*map(ctypes.addressof, (self.table, bases, key_addresses)), space)
        chain = native("chain", build_chain, None, "chain", _CHAIN)
        spread(chain, range(self.ranges), pieces, arguments, {len(arguments) - 1: step})
        buffers.release(*(inputs[i] for i in self.spent if i not in over.values()))
        return [results[i] for i in self.chain.stored]


def plan_rows(chain: Chain, inputs: Sequence[Tensor], spent: tuple[int, ...]) -> Ranges | None:
    """The plan for inputs of these layouts; None if the chain is to run as the graph says."""
    table: dict[int, Tensor] = {
        i: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for i, x in enumerate(inputs)
    }
    calls: list[MapCall | LineCall | None] = []
    draws: list[bool] = []
    for stage in chain.stages:
        operands = [table[i] for i in stage.operands]
        shape = torch.broadcast_shapes(*(x.shape for x in operands))
        if not math.prod(shape):
            return None
        if not isinstance(stage.call, ProgramCall):
            reduction = stage.reduction(STORAGES[operands[0].dtype])
            calls.append(_line_call(reduction, operands[0]))
            draws.append(isinstance(reduction, Reduce) and (reduction.draws or reduction.finish_draws))
            table[stage.results[0]] = operands[0].new_empty((*shape[:-1], 1))
            continue
        kernel = map_of(stage.call, operands)
        if kernel is None:
            return None
        calls.append(MapCall.of(kernel, [(x.shape, x.stride()) for x in operands]))
        draws.append(bool(kernel.draws))
        for i, storage in zip(stage.results, kernel.results, strict=True):
            table[i] = torch.empty(shape, dtype=dtype_of(storage), device="meta")
    return _worth_it(chain, spent, [table[i] for i in range(len(table))], calls, tuple(draws))


def _worth_it(
    chain: Chain,
    spent: tuple[int, ...],
    table: Sequence[Tensor],
    calls: Sequence[MapCall | LineCall | None],
    draws: tuple[bool, ...],
) -> Ranges | None:
    """The plan, if every stage has code and ranges gain something; else None."""
    made, stored = table[chain.inputs :], chain.stored
    shape = max((x.shape for x in made), key=math.prod)
    rows, length = math.prod(shape[:-1]), shape[-1]
    between = [x for i, x in enumerate(table) if i >= chain.inputs and i not in chain.stored and x.shape[-1] > 1]
    wide = max(1, len(between)) * length * max(x.dtype.itemsize for x in made)
    # A multiple of 64 rows: whatever the length of a row, a range then begins with a whole block of 64 elements.
    few = max(1, _CACHE // (BLOCK * max(1, wide))) * BLOCK
    known = tuple(call for call in calls if call is not None)
    if len(known) < len(calls) or BLOCK * wide > _MOST or rows * wide < _LEAST:
        return None
    inner = [i for i in range(chain.inputs, len(table)) if i not in stored]
    # An operand may be a tensor of no dimensions.
    widths, dtypes = tuple(x.shape[-1] if x.dim() else 1 for x in table), tuple(x.dtype for x in table)
    sizes = {i: widths[i] * dtypes[i].itemsize for i in inner}
    addresses = len(table) + max(len(s.operands) + len(s.results) for s in chain.stages)
    # Scratch: the addresses that ``llvm.row_chain`` keeps there, then a buffer of one range of rows for each value
    # between two stages, each on cache lines of its own.
    ends = list(accumulate((_aligned(few * sizes[i]) for i in inner), initial=_aligned(8 * addresses)))
    offsets = dict(zip(inner, ends, strict=False))
    words = _table(chain.stages, known, (rows, few), [sizes.get(i, 0) for i in range(len(table))])
    enough = _ENOUGH // (few * length)
    ranges = -(-rows // few)
    laid_out = enough, tuple(shape[:-1]), widths, dtypes, offsets, ends[-1], array(words)
    return Ranges(ranges, *laid_out, known, draws, _overwritten(chain, spent, table), spent, chain)


def _overwritten(chain: Chain, spent: tuple[int, ...], table: Sequence[Tensor]) -> dict[int, int]:
    """Results that may overwrite an input: one of the same layout that no later stage reads."""
    over: dict[int, int] = {}
    for number, stage in enumerate(chain.stages):
        later = {i for other in chain.stages[number + 1 :] for i in other.operands}
        for i in set(stage.results) & set(chain.stored):
            for j in set(spent) - later - set(over.values()):
                like = (table[j].shape, table[j].dtype) == (table[i].shape, table[i].dtype)
                if like and table[j].is_contiguous() and table[i].shape[-1] > 1:
                    over[i] = j
                    break
    return over


def _aligned(size: int) -> int:
    """A size rounded up to whole cache lines."""
    return -(-size // _LINE) * _LINE


def _table(
    stages: Sequence[ChainedKernel], calls: Sequence[MapCall | LineCall], rows: tuple[int, int], steps: Sequence[int]
) -> list[int]:
    """The integers that ``llvm.row_chain`` reads. rows: all, and of a range; steps: bytes of a row of each buffer."""
    places: list[int] = []
    described: list[int] = []
    for stage, call in zip(stages, calls, strict=True):
        described += [*call.stage, len(stage.operands), len(stage.results), len(places)]
        places += [*stage.operands, *stage.results]
    return [*rows, len(steps), len(stages), *steps, *described, *places]


@dataclass(frozen=True)
class LineCall:
    """The code of a reduction for adjacent lines, and their description as kernels read it."""

    loops: Loops
    lines: Any

    @property
    def stage(self) -> tuple[int, ...]:
        """The stage's entry in a chain's table: ``llvm.row_chain.STAGE`` up to the number of operands."""
        return address_of(self.loops.function), 1, self.loops.lanes, 1, ctypes.addressof(self.lines), 0, 0, 0


def _line_call(kernel: Reduce | Exact, x: Tensor) -> LineCall | None:
    """The call that reduces the rows of x; None if x is not row-major or the loops do not fit ranges of 64 rows."""
    lines = Lines.of(x, [x.dim() - 1])
    if not isinstance(kernel, Reduce) or not x.is_contiguous():
        return None
    loops = loops_for(kernel, lines)
    if lines.count % loops.lanes:
        # The last group of lines would move back into the rows before its range, which are not in the scratch.
        loops = loops_for(kernel, lines, grouped=False)
    # A group of lines must not span two ranges, so the number of lines in a group divides 64.
    return None if loops.neighbours or BLOCK % loops.lanes else LineCall(loops, lines.array(kernel.order.shards))
