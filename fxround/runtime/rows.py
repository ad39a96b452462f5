"""Rows: a chain of maps and row reductions runs on a few rows at a time, so that its values stay in the cache.

What is true here. A softmax or a normalisation reads and writes whole tensors several times. Here every kernel of the
chain runs for a few rows, then every kernel for the next ones: what lies between two kernels is a small buffer that
is written over again and again. The kernels, the elements' numbers and the order of every sum are those of the whole.

Why it is safe. A kernel is told the range of rows and the address of element 0 of each tensor: for a buffer that holds
rows r ... r + n that is its own address less r rows, and only those rows are touched. A range begins and ends with a
block of 64 rows, so that no block of random bits is cut. A result takes the memory of an input that nothing else
reaches if no kernel behind its own reads that input: a map reads an element before it writes it. Where a range gains
nothing (few rows, long rows, an operand that is not row-major) the chain runs as the graph says.

    before   e = fused(x, m); s = sum(e); y = fused(e, s)                  # e: 16 MB, written once and read twice
    after    for 64 rows at a time: the same                               # e: 256 kB; y where x was, if x is dead
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
from torch import Tensor, fx, nn

from fxround.graph import float_value
from fxround.kernel import Exact, Reduce
from fxround.numerics.randomness import BLOCK
from fxround.numerics.storage import Storage
from fxround.runtime import buffers, texts
from fxround.runtime.compiled import address_of, current_set, native, signature
from fxround.runtime.execute import STORAGES, MapCall, addresses, array, dtype_of
from fxround.runtime.groups import grouped, is_operand, key_of, map_of, subgraph
from fxround.runtime.library import FUSED, POINTWISE
from fxround.runtime.lines import Lines
from fxround.runtime.llvm.chain import ARGS, build_chain
from fxround.runtime.reducing import Loops, loops_for
from fxround.runtime.threads import pieces_of, scratch, spread
from fxround.specialize import largest_kernel, sum_kernel
from fxround.units import Unit

_SUM: Final = torch.ops.fxround.sum.default
_LARGEST: Final = torch.ops.aten.amax.default
_LONGEST: Final = 32
_UNKNOWN: Final = "not planned yet"
# The buffers of a range should fit the second-level cache beside what is read and written, and may just so fit it.
_CACHE: Final = 1 << 18
_MOST: Final = 1 << 21
# Less than this is in the cache anyway.
_LEAST: Final = 1 << 16
# A thread is worth waking for this many elements.
_ENOUGH: Final = 1 << 14
_LINE: Final = 64
_CHAIN: Final = signature(2, len(ARGS))


# ---- which nodes ----


@dataclass(frozen=True)
class Shape:
    """Rows that a node's tensors have in common, and how long they are (None: it has statistics of rows alone)."""

    rows: str
    length: int | None


def _shape(node: fx.Node) -> Shape | None:
    """The rows of a node that can be a part of a chain."""
    value = float_value(node)
    if node.op != "call_function" or not all(is_operand(n) for n in _tensors(node)):
        return None
    if node.target is FUSED:
        value = node.meta["val"][0]
    elif node.target in (_SUM, _LARGEST):
        value = node.args[0].meta["val"]  # type: ignore[union-attr]
        if not _reduces_rows(node, value.dim()):
            return None
    elif node.target is operator.getitem:
        source = node.args[0]
        return _shape(source) if isinstance(source, fx.Node) and source.target is FUSED else None
    elif node.target is not POINTWISE:
        return None
    if value is None or value.dim() < 2 or not isinstance(value.shape[-1], int):
        return None
    return Shape(str(tuple(value.shape[:-1])), value.shape[-1] if value.shape[-1] > 1 else None)


def _tensors(node: fx.Node) -> list[fx.Node]:
    """The operands of a node of ours, the random state left out."""
    if node.target in (FUSED, POINTWISE):
        return list(node.args[0])  # type: ignore[arg-type]
    return [] if node.target is operator.getitem else node.all_input_nodes[:1]


def _reduces_rows(node: fx.Node, dims: int) -> bool:
    # A maximum of everything has no dimensions among its arguments.
    _, reduced, keepdim, *_ = (*node.args, None, None)
    if not dims or not keepdim or not isinstance(reduced, list | tuple):
        return False
    if [d % dims for d in reduced] != [dims - 1]:
        return False
    if node.target is _LARGEST:
        return all(user.target in (FUSED, POINTWISE) for user in node.users)
    return texts.order(str(node.args[3])).kind != "exact"


def gather_rows(graph: fx.GraphModule) -> fx.GraphModule:
    """A graph in which every chain over rows is one module that runs a few rows at a time."""
    shapes = {node: _shape(node) for node in graph.graph.nodes}

    def joins(a: Unit, b: Unit) -> bool:
        found = [shapes[node] for node in (*a.nodes, *b.nodes)]
        known = [shape for shape in found if shape is not None]
        lengths = {shape.length for shape in known} - {None}
        return len(known) == len(found) <= _LONGEST and len({s.rows for s in known}) == 1 and len(lengths) <= 1

    def build(unit: Unit, inputs: Sequence[fx.Node]) -> Rows | None:
        return Rows(graph, unit.nodes, inputs) if _is_chain(unit) else None

    return grouped(graph, joins, build, "rows")


def _is_chain(unit: Unit) -> bool:
    """Whether a row reduction and a map over whole rows are in it, and every list is taken apart inside."""
    reduced = any(node.target is _SUM for node in unit.nodes)
    mapped = any(node.target in (FUSED, POINTWISE) and not _is_statistic(node) for node in unit.nodes)
    return reduced and mapped and all(node.target is not FUSED for node in unit.results())


def _is_statistic(node: fx.Node) -> bool:
    shape = _shape(node)
    return shape is None or shape.length is None


# ---- how they run ----


@dataclass(frozen=True)
class Stage:
    """A kernel of the chain. operands, results: places in the table of values."""

    node: fx.Node
    operands: tuple[int, ...]
    results: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """A chain for operands of certain strides.

    ranges      how many ranges of rows there are; a thread is worth waking for ``enough`` of them
    shape       of the rows
    widths      elements of a row of each value: its length, or 1
    dtypes      of each value
    offsets     of the buffers in a thread's scratch, by value; ``space``: bytes of that scratch
    table       what ``llvm.chain`` reads, a C array
    calls       the code of each stage, and what it is told, which the table has the addresses of
    draws       whether each stage draws random bits
    over        inputs that nothing reaches after a call, by the results that may be written over them
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


class Rows(nn.Module):
    """A chain over rows: (*inputs) -> a list of what is used outside of it."""

    def __init__(self, graph: fx.GraphModule, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> None:
        super().__init__()
        self.whole = subgraph(graph, nodes, inputs)
        self.rng = next(i for i, n in enumerate(inputs) if not is_operand(n))
        own = set(nodes)
        values = [*inputs, *(n for n in nodes if n.target is not FUSED)]
        place = {node: i for i, node in enumerate(values)}
        self.inputs = len(inputs)
        self.stages = tuple(_stage(node, place) for node in nodes if node.target is not operator.getitem)
        self.stored = tuple(place[n] for n in nodes if n in place and any(user not in own for user in n.users))
        self.plans: dict[Any, Plan | None] = {}
        # Places of inputs that nothing reaches after a call.
        self.spent: tuple[int, ...] = ()

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        """As the graph says, or a few rows at a time: the same bits."""
        key = (current_set(), *((x.shape, x.stride(), x.dtype) for x in inputs))
        plan = self.plans.get(key, _UNKNOWN)
        if isinstance(plan, str):
            plan = self._plan(inputs)
            if len(self.plans) > _LONGEST:
                self.plans.clear()
            self.plans[key] = plan
        if plan is None:
            results: list[Tensor] = self.whole(*inputs)
            return results
        return self._run(plan, inputs)

    def _plan(self, inputs: Sequence[Tensor]) -> Plan | None:
        table: dict[int, Tensor] = {
            i: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for i, x in enumerate(inputs)
        }
        calls: list[MapCall | LineCall | None] = []
        draws: list[bool] = []
        for stage in self.stages:
            operands = [table[i] for i in stage.operands]
            shape = torch.broadcast_shapes(*(x.shape for x in operands))
            if not math.prod(shape):
                return None
            if stage.node.target in (_SUM, _LARGEST):
                reduction = _reduction_of(stage.node, STORAGES[operands[0].dtype])
                calls.append(_line_call(reduction, operands[0]))
                draws.append(isinstance(reduction, Reduce) and (reduction.draws or reduction.finish_draws))
                table[stage.results[0]] = operands[0].new_empty((*shape[:-1], 1))
                continue
            kernel = map_of(stage.node, operands)
            calls.append(MapCall.of(kernel, [(x.shape, x.stride()) for x in operands]))
            draws.append(bool(kernel.draws))
            for i, storage in zip(stage.results, kernel.results, strict=True):
                table[i] = torch.empty(shape, dtype=dtype_of(storage), device="meta")
        return self._worth_it([table[i] for i in range(len(table))], calls, tuple(draws))

    def _worth_it(
        self, table: Sequence[Tensor], calls: Sequence[MapCall | LineCall | None], draws: tuple[bool, ...]
    ) -> Plan | None:
        made = table[self.inputs :]
        shape = max((x.shape for x in made), key=math.prod)
        rows, length = math.prod(shape[:-1]), shape[-1]
        between = [x for i, x in enumerate(table) if i >= self.inputs and i not in self.stored and x.shape[-1] > 1]
        wide = max(1, len(between)) * length * max(x.dtype.itemsize for x in made)
        few = max(1, _CACHE // (BLOCK * max(1, wide))) * BLOCK
        known = tuple(call for call in calls if call is not None)
        if len(known) < len(calls) or BLOCK * wide > _MOST or rows * wide < _LEAST:
            return None
        inner = [i for i in range(self.inputs, len(table)) if i not in self.stored]
        # An operand may be a number: a tensor of no dimensions.
        widths, dtypes = tuple(x.shape[-1] if x.dim() else 1 for x in table), tuple(x.dtype for x in table)
        sizes = {i: widths[i] * dtypes[i].itemsize for i in inner}
        addresses = len(table) + max(len(s.operands) + len(s.results) for s in self.stages)
        ends = list(accumulate((_aligned(few * sizes[i]) for i in inner), initial=_aligned(8 * addresses)))
        offsets = dict(zip(inner, ends, strict=False))
        words = _table(self.stages, known, (rows, few), [sizes.get(i, 0) for i in range(len(table))])
        enough = _ENOUGH // (few * length)
        ranges = -(-rows // few)
        over = self._overwritten(table)
        return Plan(
            ranges, enough, tuple(shape[:-1]), widths, dtypes, offsets, ends[-1], array(words), known, draws, over
        )

    def _overwritten(self, table: Sequence[Tensor]) -> dict[int, int]:
        """Results that may lie where an input is: of its layout, and made by the last map that reads it, or later."""
        over: dict[int, int] = {}
        for number, stage in enumerate(self.stages):
            later = {i for other in self.stages[number + 1 :] for i in other.operands}
            for i in set(stage.results) & set(self.stored):
                for j in set(self.spent) - later - set(over.values()):
                    like = (table[j].shape, table[j].dtype) == (table[i].shape, table[i].dtype)
                    if like and table[j].is_contiguous() and table[i].shape[-1] > 1:
                        over[i] = j
                        break
        return over

    def _run(self, plan: Plan, inputs: Sequence[Tensor]) -> list[Tensor]:
        over = {i: j for i, j in plan.over.items() if buffers.fills_its_buffer(inputs[j])}
        results = {
            i: buffers.again(inputs[over[i]])
            if i in over
            else buffers.empty((*plan.shape, plan.widths[i]), plan.dtypes[i])
            for i in self.stored
        }
        places = (*range(len(inputs)), *results)
        outside = dict(zip(places, addresses((*inputs, *results.values())), strict=True))
        bases = array([outside.get(i, plan.offsets.get(i, 0)) for i in range(len(plan.widths))])
        rng = inputs[self.rng]
        keys = [key_of(stage.node, rng, draws) for stage, draws in zip(self.stages, plan.draws, strict=True)]
        told = array([ctypes.addressof(key) for key in keys])
        pieces = pieces_of(plan.ranges, plan.enough)
        space, step = scratch(plan.space, pieces > 1)
        arguments = (*map(ctypes.addressof, (plan.table, bases, told)), space)
        chain = native("chain", build_chain, None, "chain", _CHAIN)
        spread(chain, range(plan.ranges), pieces, arguments, {len(arguments) - 1: step})
        buffers.release(*(inputs[i] for i in self.spent if i not in over.values()))
        return [results[i] for i in self.stored]


def _aligned(size: int) -> int:
    return -(-size // _LINE) * _LINE


def _table(
    stages: Sequence[Stage], calls: Sequence[MapCall | LineCall], rows: tuple[int, int], steps: Sequence[int]
) -> list[int]:
    """What ``llvm.chain`` reads. rows: all of them, and those of a range; steps: bytes of a row of each buffer."""
    places: list[int] = []
    described: list[int] = []
    for stage, call in zip(stages, calls, strict=True):
        described += [*call.stage, len(stage.operands), len(stage.results), len(places)]
        places += [*stage.operands, *stage.results]
    return [*rows, len(steps), len(stages), *steps, *described, *places]


def _stage(node: fx.Node, place: dict[fx.Node, int]) -> Stage:
    operands = tuple(place[n] for n in _tensors(node))
    if node.target is not FUSED:
        return Stage(node, operands, (place[node],))
    taken = sorted((user.args[1], place[user]) for user in node.users)
    return Stage(node, operands, tuple(at for _, at in taken))


@dataclass(frozen=True)
class LineCall:
    """A reduction's code for ``lines`` (as kernels read them) that lie one after the other."""

    loops: Loops
    lines: Any

    @property
    def stage(self) -> tuple[int, ...]:
        """As a chain's table has it: ``llvm.chain.STAGE``, up to the number of operands."""
        return address_of(self.loops.function), 1, self.loops.lanes, 1, ctypes.addressof(self.lines), 0, 0, 0


def _line_call(kernel: Reduce | Exact, x: Tensor) -> LineCall | None:
    lines = Lines.of(x, [x.dim() - 1])
    if not isinstance(kernel, Reduce) or not x.is_contiguous():
        return None
    loops = loops_for(kernel, lines)
    return None if loops.neighbours or BLOCK % loops.lanes else LineCall(loops, lines.array())


def _reduction_of(node: fx.Node, storage: Storage) -> Reduce | Exact:
    if node.target is _LARGEST:
        return largest_kernel(storage)
    order, accumulate, rounding = (str(text) for text in node.args[3:6])
    return sum_kernel(texts.order(order), texts.rounding(accumulate), texts.rounding(rounding), storage, storage)
