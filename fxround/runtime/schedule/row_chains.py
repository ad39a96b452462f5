"""Rows: a chain of maps and row reductions runs on a few rows at a time, so that its values stay in the cache.

A softmax or a normalization reads and writes whole tensors several times. Here every kernel of the chain runs for one
range of rows, then for the next one, and a value between two kernels is a small buffer that every range uses again. The
kernels, the numbers of the elements and the order of every sum are those of the whole tensor, so the bits are the same.

A kernel is passed the range of rows and the address of element 0 of each tensor. For a buffer whose first row is row r,
this address is that of the buffer less r rows, so a kernel of a chain must touch no row outside of its range. A range
begins at a multiple of 64 rows, so that no block of random bits is cut. A result may take the memory of an input that
nothing else reaches, if no later kernel reads that input: a map reads an element before it writes it. Where ranges gain
nothing (few rows, very long rows, a reduced operand that is not row-major) the chain runs as the graph says.
"""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor, fx

from fxround.graph.dialect import FUSED, MAPS, POINTWISE, Fused, ProgramCall, Sum, read, read_map
from fxround.graph.dtypes import STORAGES, dtype_of
from fxround.graph.grouping import Unit
from fxround.graph.site import float_value
from fxround.kernels import from_text
from fxround.kernels.kinds import Exact, Reduce
from fxround.numerics.arithmetic.randomness import BLOCK
from fxround.operators.rules import argument
from fxround.runtime import buffers
from fxround.runtime.cpu.code import address_of, current_set, native, signature
from fxround.runtime.cpu.llvm.row_chain import ARGS, build_chain
from fxround.runtime.cpu.pointwise import MapCall, addresses, array
from fxround.runtime.cpu.reduction import Loops, loops_for
from fxround.runtime.cpu.strides import Lines
from fxround.runtime.cpu.threads import pieces_of, scratch, spread
from fxround.runtime.cuda.launcher import has_slow_binary64, runs_texts
from fxround.runtime.cuda.row_chain import RowsCall, plan_rows
from fxround.runtime.draw import NO_KEY
from fxround.runtime.row_chains import Chain, ChainedKernel
from fxround.runtime.schedule.groups import Part, grouped, is_operand, key_of, map_of, subgraph

LARGEST: Final = torch.ops.aten.amax.default
_LONGEST: Final = 32
_UNKNOWN: Final = "not planned yet"
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


# ---- which nodes ----


@dataclass(frozen=True)
class RowShape:
    """The rows that a node's tensors have in common, and their length (None: the node has statistics of rows alone)."""

    rows: str
    length: int | None


def _shape(node: fx.Node) -> RowShape | None:
    """The rows of a node that can be a part of a chain, else None."""
    value = float_value(node)
    if node.op != "call_function" or not all(is_operand(n) for n in _tensors(node)):
        return None
    if node.target is FUSED:
        value = node.meta["val"][0]
    elif node.target in (Sum.overload, LARGEST):
        value = node.all_input_nodes[0].meta["val"]
        if not _reduces_rows(node, value.dim()):
            return None
    elif node.target is operator.getitem:
        source = node.args[0]
        return _shape(source) if isinstance(source, fx.Node) and source.target is FUSED else None
    elif node.target is not POINTWISE:
        return None
    if value is None or value.dim() < 2 or not isinstance(value.shape[-1], int):
        return None
    return RowShape(str(tuple(value.shape[:-1])), value.shape[-1] if value.shape[-1] > 1 else None)


def _tensors(node: fx.Node) -> list[fx.Node]:
    """The operands of one of our nodes, without the random state."""
    call = read_map(node)
    if call is not None:
        return list(call.xs)
    return [] if node.target is operator.getitem else node.all_input_nodes[:1]


def _reduces_rows(node: fx.Node, dims: int) -> bool:
    """Whether a node reduces the last dimension alone and keeps it with size 1."""
    call = read(node)
    if isinstance(call, Sum):
        rows = call.keepdim and _is_last(call.dims, dims)
        return rows and from_text.order(call.order).kind != "exact"
    return is_largest_of_rows(node, dims)


def is_largest_of_rows(node: fx.Node, dims: int) -> bool:
    """Whether a maximum is that of rows, is kept with size 1, and may be a zero of either sign (``largest_kernel``)."""
    rows = argument(node, "keepdim") and _is_last(argument(node, "dim"), dims)
    # Only our own maps may read such a zero.
    return rows and all(user.target in MAPS for user in node.users)


def _is_last(reduced: Sequence[int], dims: int) -> bool:
    """Whether the reduced dimensions are the last of ``dims`` alone; none are named for a maximum of all elements."""
    return dims > 0 and [d % dims for d in reduced] == [dims - 1]


def gather_rows(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph with every chain over rows as one module that runs a few rows at a time."""
    shapes = {node: _shape(node) for node in graph.graph.nodes}

    def joins(a: Unit, b: Unit) -> bool:
        joined = [shapes[node] for node in (*a.nodes, *b.nodes)]
        known = [shape for shape in joined if shape is not None]
        lengths = {shape.length for shape in known} - {None}
        return len(known) == len(joined) <= _LONGEST and len({s.rows for s in known}) == 1 and len(lengths) <= 1

    def build(unit: Unit, inputs: Sequence[fx.Node]) -> RowsPart | None:
        return RowsPart(graph, unit.nodes, inputs) if _is_chain(unit) else None

    return grouped(graph, joins, build, "rows")


def _is_chain(unit: Unit) -> bool:
    """Whether a unit has a row sum and a map over whole rows, and takes all its own lists of results apart alone."""
    if any(node.target is operator.getitem and node.args[0] not in unit.nodes for node in unit.nodes):
        return False
    reduced = any(node.target is Sum.overload for node in unit.nodes)
    mapped = any(node.target in MAPS and not _is_statistic(node) for node in unit.nodes)
    return reduced and mapped and all(node.target is not FUSED for node in unit.results())


def _is_statistic(node: fx.Node) -> bool:
    """Whether a node has one value for each row."""
    shape = _shape(node)
    return shape is None or shape.length is None


# ---- how they run ----


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


class RowsPart(Part):
    """A chain over rows as a module: (*inputs) -> a list of the values that are used outside of it."""

    def __init__(self, graph: fx.GraphModule, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> None:
        super().__init__()
        self.whole = subgraph(graph, nodes, inputs)
        rng = next(i for i, n in enumerate(inputs) if not is_operand(n))
        own = set(nodes)
        values = [*inputs, *(n for n in nodes if n.target is not FUSED)]
        place = {node: i for i, node in enumerate(values)}
        stages = tuple(_stage(node, place) for node in nodes if node.target is not operator.getitem)
        stored = tuple(place[n] for n in nodes if n in place and any(user not in own for user in n.users))
        self.chain = Chain(stages, len(inputs), rng, stored)
        self.plans: dict[Any, Ranges | None] = {}
        self.calls: dict[Any, RowsCall | None] = {}
        # Indices of inputs that nothing reaches after a call; the schedule sets them.
        self.spent: tuple[int, ...] = ()

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        """Run as the graph says, or a few rows at a time: the same bits."""
        if runs_texts(inputs):
            return self._as_text(inputs)
        # Everything that the plan's code and tables depend on; addresses are passed with each call.
        key = (current_set(), *((x.shape, x.stride(), x.dtype) for x in inputs))
        plan = self.plans.get(key, _UNKNOWN)
        if isinstance(plan, str):
            plan = self._plan(inputs)
            if len(self.plans) > _LONGEST:
                self.plans.clear()
            self.plans[key] = plan
        if plan is None:
            results: list[Tensor] = self.whole.forward(*inputs)
            return results
        return self._run(plan, inputs)

    def _as_text(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run as one CUDA kernel, or as the graph says where there is none: the same bits."""
        device = next((x.device for x in inputs if x.is_cuda), inputs[0].device)
        key = has_slow_binary64(device), *((x.shape, x.stride(), x.dtype) for x in inputs)
        call = self.calls.get(key, _UNKNOWN)
        if isinstance(call, str):
            call = plan_rows(self.chain, inputs, device)
            if len(self.calls) > _LONGEST:
                self.calls.clear()
            self.calls[key] = call
        if call is None:
            return list(self.whole.forward(*inputs))
        results = call.run(self.chain, inputs)
        buffers.release(*(inputs[i] for i in self.spent))
        return results

    def _plan(self, inputs: Sequence[Tensor]) -> Ranges | None:
        """The plan for inputs of these layouts; None if the chain is to run as the graph says."""
        table: dict[int, Tensor] = {
            i: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for i, x in enumerate(inputs)
        }
        calls: list[MapCall | LineCall | None] = []
        draws: list[bool] = []
        for stage in self.chain.stages:
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
        return self._worth_it([table[i] for i in range(len(table))], calls, tuple(draws))

    def _worth_it(
        self, table: Sequence[Tensor], calls: Sequence[MapCall | LineCall | None], draws: tuple[bool, ...]
    ) -> Ranges | None:
        """The plan, if every stage has code and ranges gain something; else None."""
        made, stored = table[self.chain.inputs :], self.chain.stored
        shape = max((x.shape for x in made), key=math.prod)
        rows, length = math.prod(shape[:-1]), shape[-1]
        between = [
            x for i, x in enumerate(table) if i >= self.chain.inputs and i not in self.chain.stored and x.shape[-1] > 1
        ]
        wide = max(1, len(between)) * length * max(x.dtype.itemsize for x in made)
        # A multiple of 64 rows: whatever the length of a row, a range then begins with a whole block of 64 elements.
        few = max(1, _CACHE // (BLOCK * max(1, wide))) * BLOCK
        known = tuple(call for call in calls if call is not None)
        if len(known) < len(calls) or BLOCK * wide > _MOST or rows * wide < _LEAST:
            return None
        inner = [i for i in range(self.chain.inputs, len(table)) if i not in stored]
        # An operand may be a tensor of no dimensions.
        widths, dtypes = tuple(x.shape[-1] if x.dim() else 1 for x in table), tuple(x.dtype for x in table)
        sizes = {i: widths[i] * dtypes[i].itemsize for i in inner}
        addresses = len(table) + max(len(s.operands) + len(s.results) for s in self.chain.stages)
        # Scratch: the addresses that ``llvm.row_chain`` keeps there, then a buffer of one range of rows for each value
        # between two stages, each on cache lines of its own.
        ends = list(accumulate((_aligned(few * sizes[i]) for i in inner), initial=_aligned(8 * addresses)))
        offsets = dict(zip(inner, ends, strict=False))
        words = _table(self.chain.stages, known, (rows, few), [sizes.get(i, 0) for i in range(len(table))])
        enough = _ENOUGH // (few * length)
        ranges = -(-rows // few)
        over = self._overwritten(table)
        return Ranges(
            ranges, enough, tuple(shape[:-1]), widths, dtypes, offsets, ends[-1], array(words), known, draws, over
        )

    def _overwritten(self, table: Sequence[Tensor]) -> dict[int, int]:
        """Results that may overwrite an input: one of the same layout that no later stage reads."""
        over: dict[int, int] = {}
        for number, stage in enumerate(self.chain.stages):
            later = {i for other in self.chain.stages[number + 1 :] for i in other.operands}
            for i in set(stage.results) & set(self.chain.stored):
                for j in set(self.spent) - later - set(over.values()):
                    like = (table[j].shape, table[j].dtype) == (table[i].shape, table[i].dtype)
                    if like and table[j].is_contiguous() and table[i].shape[-1] > 1:
                        over[i] = j
                        break
        return over

    def _run(self, plan: Ranges, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run the chain range by range, split over threads."""
        over = {i: j for i, j in plan.over.items() if buffers.fills_its_buffer(inputs[j])}
        results = {
            i: buffers.again(inputs[over[i]])
            if i in over
            else buffers.empty((*plan.shape, plan.widths[i]), plan.dtypes[i])
            for i in self.chain.stored
        }
        places = (*range(len(inputs)), *results)
        outside = dict(zip(places, addresses((*inputs, *results.values())), strict=True))
        # A value outside of the chain has the address of its element 0, a buffer its offset in scratch.
        # ``llvm.row_chain`` takes a value for a buffer if the table gives it bytes of a row.
        bases = array([outside.get(i, plan.offsets.get(i, 0)) for i in range(len(plan.widths))])
        rng = inputs[self.chain.rng]
        keys = [
            NO_KEY if stage.call is None else key_of(stage.call, rng, draws)
            for stage, draws in zip(self.chain.stages, plan.draws, strict=True)
        ]
        key_addresses = array([ctypes.addressof(key) for key in keys])
        pieces = pieces_of(plan.ranges, plan.enough)
        space, step = scratch(plan.space, pieces > 1)
        arguments = (*map(ctypes.addressof, (plan.table, bases, key_addresses)), space)
        chain = native("chain", build_chain, None, "chain", _CHAIN)
        spread(chain, range(plan.ranges), pieces, arguments, {len(arguments) - 1: step})
        buffers.release(*(inputs[i] for i in self.spent if i not in over.values()))
        return [results[i] for i in self.chain.stored]


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


def _stage(node: fx.Node, place: dict[fx.Node, int]) -> ChainedKernel:
    """A node as a stage; ``place`` gives the index of each value."""
    operands = tuple(place[n] for n in _tensors(node))
    call = read(node)
    if not isinstance(call, Fused):
        return ChainedKernel(call, operands, (place[node],))
    taken = sorted((user.args[1], place[user]) for user in node.users)
    return ChainedKernel(call, operands, tuple(at for _, at in taken))


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
