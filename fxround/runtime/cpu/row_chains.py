"""Chains over rows of CPU tensors: one kernel does all stages for one row after the other, or each stage has its own.

Where rows are whole blocks of elements, a chain is one kernel (``llvm.row_chain``). Elsewhere every kernel of the chain
runs for one range of rows, then for the next one: a list of launches whose steps are ranges of rows (``cpu.launches``).
A kernel is passed the address of element 0 of each tensor. For a buffer whose first row is row r, this address is that
of the buffer less r rows, so a kernel of a chain must touch no row outside of its range. A range begins at a multiple
of 64 rows, so that no block of random bits is cut. A result may take the memory of an input that nothing else reaches,
if no later kernel reads that input: a map reads an element before it writes it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from fxround.graph.dialect import ProgramCall
from fxround.graph.dtypes import STORAGES, dtype_of
from fxround.kernels.kinds import Map, Reduce
from fxround.numerics.arithmetic.randomness import BLOCK
from fxround.runtime import buffers
from fxround.runtime.cpu.code import current_machine, native, signature
from fxround.runtime.cpu.launches import Address, KeyAddress, Launch, LaunchTable, Space, map_launch, reduction_launch
from fxround.runtime.cpu.llvm.row_chain import RowStage, RowVariant, Value, build_row_chain
from fxround.runtime.cpu.pointwise import MapCall, addresses, array
from fxround.runtime.cpu.reduction import Reduction, loops_for
from fxround.runtime.cpu.strides import Lines
from fxround.runtime.cpu.threads import pieces_of
from fxround.runtime.draw import NO_KEY, Draw, key_of
from fxround.runtime.layouts import collapse
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
_NO_DRAW: Final = Draw()
_ROWS: Final = signature(3, 4)
# The least number of chains of a reduction that are worth the lanes of a register.
_CHAINS: Final = 4


@dataclass(frozen=True)
class Ranges:
    """A chain for operands of given strides.

    ranges      the number of ranges of rows
    enough      the ranges that make another thread worth its start
    stored      the shape and the dtype of each value that is a result
    table       the launches of a range; the homes outside are inputs, then results
    draws       whether they draw random bits
    over        for results that may overwrite an input that nothing reaches after the call, that input
    spent       the inputs that nothing reaches after the call
    chain       the chain
    """

    ranges: int
    enough: int
    stored: dict[int, tuple[tuple[int, ...], torch.dtype]]
    table: LaunchTable
    draws: bool
    over: dict[int, int]
    spent: tuple[int, ...]
    chain: Chain

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run the chain range by range, split over threads."""
        over = {i: j for i, j in self.over.items() if buffers.fills_its_buffer(inputs[j])}
        results = {
            i: buffers.again(inputs[over[i]]) if i in over else buffers.empty(shape, dtype)
            for i, (shape, dtype) in self.stored.items()
        }
        draw = Draw.of(inputs[self.chain.rng], 0) if self.draws else _NO_DRAW
        outside = addresses((*inputs, *results.values()))
        self.table.spread(outside, draw, self.ranges, pieces_of(self.ranges, self.enough))
        buffers.release(*(inputs[i] for i in self.spent if i not in over.values()))
        return [results[i] for i in self.chain.stored]


def plan_rows(chain: Chain, inputs: Sequence[Tensor], spent: tuple[int, ...]) -> Ranges | None:
    """The plan for inputs of these layouts; None if the chain is to run as the graph says."""
    layouts: dict[int, Tensor] = {
        i: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for i, x in enumerate(inputs)
    }
    kernels: list[Map | Reduce] = []
    for stage in chain.stages:
        operands = [layouts[i] for i in stage.operands]
        shape = torch.broadcast_shapes(*(x.shape for x in operands))
        if not math.prod(shape):
            return None
        if isinstance(stage.call, ProgramCall):
            kernel = map_of(stage.call, operands)
            if kernel is None:
                return None
            kernels.append(kernel)
            for i, storage in zip(stage.results, kernel.results, strict=True):
                layouts[i] = torch.empty(shape, dtype=dtype_of(storage), device="meta")
        else:
            reduction = stage.reduction(STORAGES[operands[0].dtype])
            if not isinstance(reduction, Reduce):
                return None
            kernels.append(reduction)
            layouts[stage.results[0]] = operands[0].new_empty((*shape[:-1], 1))
    return _worth_it(chain, spent, [layouts[i] for i in range(len(layouts))], kernels)


def _worth_it(
    chain: Chain, spent: tuple[int, ...], layouts: Sequence[Tensor], kernels: Sequence[Map | Reduce]
) -> Ranges | None:
    """The plan, if ranges gain something; else None."""
    made = layouts[chain.inputs :]
    shape = max((x.shape for x in made), key=math.prod)
    rows, length = math.prod(shape[:-1]), shape[-1]
    inner = {i: x for i, x in enumerate(layouts) if i >= chain.inputs and i not in chain.stored}
    wide = max(1, sum(x.shape[-1] > 1 for x in inner.values())) * length * max(x.dtype.itemsize for x in made)
    if BLOCK * wide > _MOST or rows * wide < _LEAST:
        return None
    # A multiple of 64 rows: whatever the length of a row, a range then begins with a whole block of 64 elements.
    few = max(1, _CACHE // (BLOCK * wide)) * BLOCK
    outside = *range(chain.inputs), *chain.stored
    table = _row_by_row(chain, layouts, kernels, rows, few)
    if table is None:
        table = _one_after_the_other(chain, layouts, kernels, few, outside)
    if table is None:
        return None
    stored = {i: ((*shape[:-1], layouts[i].shape[-1]), layouts[i].dtype) for i in chain.stored}
    over, draws = _overwritten(chain, spent, layouts), any(map(_draws, kernels))
    return Ranges(-(-rows // few), _ENOUGH // (few * length), stored, table, draws, over, spent, chain)


def _draws(kernel: Map | Reduce) -> bool:
    return bool(kernel.draws) or (isinstance(kernel, Reduce) and kernel.finish_draws)


def _row_by_row(
    chain: Chain, layouts: Sequence[Tensor], kernels: Sequence[Map | Reduce], rows: int, few: int
) -> LaunchTable | None:
    """The launch of one kernel that does all stages for one row after the other; None if it does not fit them."""
    places = sorted({i for stage in chain.stages for i in (*stage.operands, *stage.results)})
    index = {place: number for number, place in enumerate(places)}
    length = max(layouts[i].shape[-1] for i in places if layouts[i].dim())
    homes = [i for i in places if i < chain.inputs or i in chain.stored]
    strides = [_row_stride(layouts[i], rows, length) for i in homes]
    wide = {i: layouts[i].dim() > 0 and layouts[i].shape[-1] > 1 for i in places}
    stages = [
        RowStage(kernel, tuple(index[i] for i in stage.operands), tuple(index[i] for i in stage.results))
        for stage, kernel in zip(chain.stages, kernels, strict=True)
    ]
    reductions = [(s.kernel, wide[places[s.operands[0]]]) for s in stages if isinstance(s.kernel, Reduce)]
    fits = all(k.order.shards == 1 and k.order.chains >= _CHAINS and along for k, along in reductions)
    if length % BLOCK or not fits or any(kernel.parts for kernel in kernels):
        return None
    steps = [stride for stride in strides if stride is not None]
    if len(steps) < len(homes):
        return None
    values = (Value(STORAGES[layouts[i].dtype], wide[i], homes.index(i) if i in homes else None) for i in places)
    variant = RowVariant(tuple(stages), tuple(values), current_machine())
    function = native(variant.digest, build_row_chain, variant, "rows", _ROWS)
    held = array(steps)
    keys = tuple(_key(stage, _draws(kernel)) for stage, kernel in zip(chain.stages, kernels, strict=True))
    addresses_of = tuple(Address(home) for home in homes)
    space = Space(variant.space * length)
    arguments = length, addresses_of, ctypes.addressof(held), keys, space
    launch = Launch(function, rows, arguments, (held,), share=few)
    return LaunchTable([launch], (*range(chain.inputs), *chain.stored), {})


def _row_stride(x: Tensor, rows: int, length: int) -> int | None:
    """The elements from one row of x to the next, 0 if all have the same; None if there is no such number."""
    if x.dim() and x.shape[-1] > 1 and (x.stride(-1) != 1 or x.shape[-1] != length):
        return None
    sizes, (strides,) = collapse(x.shape[:-1], [list(x.stride()[:-1])])
    if not sizes:
        return 0
    return strides[0] if sizes == [rows] else None


def _one_after_the_other(
    chain: Chain, layouts: Sequence[Tensor], kernels: Sequence[Map | Reduce], few: int, outside: tuple[int, ...]
) -> LaunchTable | None:
    """The launches of the stages, each for a range of rows; None if one of them does not fit ranges."""
    calls = [
        _call(kernel, [layouts[i] for i in stage.operands]) for stage, kernel in zip(chain.stages, kernels, strict=True)
    ]
    sizes = {
        i: layouts[i].shape[-1] * layouts[i].dtype.itemsize
        for i in range(chain.inputs, len(layouts))
        if i not in outside
    }
    # Row 0 would be before the buffer, whose first row is that of the range.
    places = [Address(i, growth=-few * sizes.get(i, 0)) for i in range(len(layouts))]
    launches = [
        _launch(
            call,
            [places[i] for i in stage.operands],
            [places[i] for i in stage.results],
            _key(stage, _draws(kernel)),
            few,
        )
        for stage, call, kernel in zip(chain.stages, calls, kernels, strict=True)
        if call is not None
    ]
    if None in calls:
        return None
    return LaunchTable(launches, outside, {i: few * size for i, size in sizes.items()})


def _call(kernel: Map | Reduce, operands: Sequence[Tensor]) -> MapCall | LineCall | None:
    """The call of a stage; None if it has too many dimensions, or its loops do not fit ranges of 64 rows."""
    if isinstance(kernel, Reduce):
        return _line_call(kernel, operands[0])
    return MapCall.of(kernel, [(x.shape, x.stride()) for x in operands])


def _launch(
    call: MapCall | LineCall, operands: Sequence[Address], results: Sequence[Address], key: KeyAddress, rows: int
) -> Launch:
    """The launch each of whose steps does ``rows`` rows, a multiple of 64."""
    if isinstance(call, LineCall):
        return reduction_launch(call.reduction, operands[0], results[0], key, rows // call.lanes)
    return map_launch(call, operands, results, key, rows * math.prod(call.shape[-1:]) // BLOCK)


def _key(stage: ChainedKernel, draws: bool) -> KeyAddress:
    return KeyAddress(NO_KEY if stage.call is None else key_of(stage.call, None, draws), draws)


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


@dataclass(frozen=True)
class LineCall:
    """A reduction of adjacent lines, and the lines of an item."""

    reduction: Reduction
    lanes: int


def _line_call(kernel: Reduce, x: Tensor) -> LineCall | None:
    """The call that reduces the rows of x; None if x is not row-major or the loops do not fit ranges of 64 rows."""
    lines = Lines.of(x, [x.dim() - 1])
    if not x.is_contiguous():
        return None
    loops = loops_for(kernel, lines)
    if lines.count % loops.lanes:
        # The last group of lines would move back into the rows before its range, which are not in the scratch.
        loops = loops_for(kernel, lines, grouped=False)
    # A group of lines must not span two ranges, so the number of lines in a group divides 64.
    if loops.neighbours or BLOCK % loops.lanes:
        return None
    described = lines.array(kernel.order.shards)
    return LineCall(Reduction(loops.function, x.shape[:-1], described, lines.count // loops.lanes, 1), loops.lanes)
