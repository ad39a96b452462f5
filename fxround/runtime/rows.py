"""Rows: a chain of maps and row reductions runs on a few rows at a time, so that its values stay in the cache.

What is true here. A softmax or a normalisation reads and writes whole tensors several times. Here every kernel of the
chain runs for a few rows, then every kernel for the next ones: what lies between two kernels is a small buffer that
is written over again and again. The kernels, the elements' numbers and the order of every sum are those of the whole.

Why it is safe. A kernel is told the range of rows and the address of element 0 of each tensor: for a buffer that holds
rows r ... r + n that is its own address less r rows, and only those rows are touched. A range begins and ends with a
block of 64 rows, so that no block of random bits is cut. Where that gains nothing (few rows, long rows, an operand that
is not row-major) the chain runs as the graph says.

    before   e = fused(x, m); s = sum(e); y = fused(e, s)                  # e: 16 MB, written once and read twice
    after    for 64 rows at a time: the same                               # e: 256 kB
"""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx, nn

from fxround.graph import float_value
from fxround.kernel import Map, Reduce
from fxround.numerics.randomness import BLOCK
from fxround.runtime import buffers, texts
from fxround.runtime.compiled import current_set
from fxround.runtime.execute import LOADS, STORAGES, Draw, MapCall, dtype_of
from fxround.runtime.lines import Lines
from fxround.runtime.reducing import Loops, loops_for
from fxround.runtime.threads import split
from fxround.specialize import sum_kernel
from fxround.units import Unit, in_order, merged

_FUSED: Final = torch.ops.fxround.fused.default
_POINTWISE: Final = torch.ops.fxround.pointwise.default
_SUM: Final = torch.ops.fxround.sum.default
_LONGEST: Final = 32
_UNKNOWN: Final = "not planned yet"
# The buffers of a range should fit the second-level cache beside what is read and written.
_CACHE: Final = 1 << 20


# ---- which nodes ----


@dataclass(frozen=True)
class Shape:
    """Rows that a node's tensors have in common, and how long they are (None: it has statistics of rows alone)."""

    rows: str
    length: int | None


def _shape(node: fx.Node) -> Shape | None:
    """The rows of a node that can be a part of a chain."""
    value = float_value(node)
    if node.op != "call_function" or not all(_is_operand(n) for n in _tensors(node)):
        return None
    if node.target is _FUSED:
        value = node.meta["val"][0]
    elif node.target is _SUM:
        value = node.args[0].meta["val"]  # type: ignore[union-attr]
        if not _reduces_rows(node, value.dim()):
            return None
    elif node.target is operator.getitem:
        source = node.args[0]
        return _shape(source) if isinstance(source, fx.Node) and source.target is _FUSED else None
    elif node.target is not _POINTWISE:
        return None
    if value is None or value.dim() < 2 or not isinstance(value.shape[-1], int):
        return None
    return Shape(str(tuple(value.shape[:-1])), value.shape[-1] if value.shape[-1] > 1 else None)


def _is_operand(node: fx.Node) -> bool:
    """Whether a kernel can read the node: a float or a mask."""
    value = node.meta.get("val")
    return float_value(node) is not None or (isinstance(value, Tensor) and value.dtype == torch.bool)


def _tensors(node: fx.Node) -> list[fx.Node]:
    """The operands of a node of ours, the random state left out."""
    if node.target in (_FUSED, _POINTWISE):
        return list(node.args[0])  # type: ignore[arg-type]
    return [] if node.target is operator.getitem else node.all_input_nodes[:1]


def _reduces_rows(node: fx.Node, dims: int) -> bool:
    reduced, keepdim = node.args[1], len(node.args) > 2 and node.args[2]
    if not isinstance(reduced, list | tuple) or not keepdim or [d % dims for d in reduced] != [dims - 1]:  # type: ignore[operator]
        return False
    return texts.order(str(node.args[3])).kind != "exact"


def gather_rows(graph: fx.GraphModule) -> fx.GraphModule:
    """A graph in which every chain over rows is one module that runs a few rows at a time."""
    shapes = {node: _shape(node) for node in graph.graph.nodes}

    def joins(a: Unit, b: Unit) -> bool:
        found = [shapes[node] for node in (*a.nodes, *b.nodes)]
        known = [shape for shape in found if shape is not None]
        lengths = {shape.length for shape in known} - {None}
        return len(known) == len(found) <= _LONGEST and len({s.rows for s in known}) == 1 and len(lengths) <= 1

    gathered = fx.Graph()
    parts: dict[str, Any] = {
        str(node.target): operator.attrgetter(str(node.target))(graph)
        for node in graph.graph.nodes
        if node.op in ("get_attr", "call_module")
    }
    made: dict[fx.Node, fx.Node] = {}
    for unit in in_order(merged(graph.graph, joins)):
        if not _is_chain(unit):
            for node in unit.nodes:
                made[node] = gathered.node_copy(node, lambda used: made[used])
            continue
        name = f"rows_{sum(n.op == 'call_module' for n in gathered.nodes)}"
        inputs = [n for n in graph.graph.nodes if n in unit.inputs()]
        parts[name] = Rows(graph, unit.nodes, inputs)
        whole = gathered.call_module(name, tuple(made[n] for n in inputs))
        for i, old in enumerate(unit.results()):
            made[old] = gathered.call_function(operator.getitem, (whole, i))
            made[old].meta = dict(old.meta)
    return fx.GraphModule(parts, gathered)


def _is_chain(unit: Unit) -> bool:
    """Whether a row reduction and a map over whole rows are in it, and every list is taken apart inside."""
    reduced = any(node.target is _SUM for node in unit.nodes)
    mapped = any(node.target in (_FUSED, _POINTWISE) and not _is_statistic(node) for node in unit.nodes)
    return reduced and mapped and all(node.target is not _FUSED for node in unit.results())


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

    rows        how many there are
    range       how many are run at once
    widths      elements of a row of each value: its length, or 1
    dtypes      of each value
    calls       the code of each stage
    """

    rows: int
    range: int
    shape: tuple[int, ...]
    widths: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    calls: tuple[MapCall | SumCall, ...]


class Rows(nn.Module):
    """A chain over rows: (*inputs) -> a list of what is used outside of it."""

    def __init__(self, graph: fx.GraphModule, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> None:
        super().__init__()
        self.whole = _subgraph(graph, nodes, inputs)
        self.rng = next(i for i, n in enumerate(inputs) if not _is_operand(n))
        own = set(nodes)
        values = [*inputs, *(n for n in nodes if n.target is not _FUSED)]
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
        results = self._run(plan, inputs)
        buffers.release(*(inputs[i] for i in self.spent))
        return results

    def _plan(self, inputs: Sequence[Tensor]) -> Plan | None:
        table: dict[int, Tensor] = {
            i: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for i, x in enumerate(inputs)
        }
        calls: list[MapCall | SumCall | None] = []
        for stage in self.stages:
            operands = [table[i] for i in stage.operands]
            shape = torch.broadcast_shapes(*(x.shape for x in operands))
            if not math.prod(shape):
                return None
            if stage.node.target is _SUM:
                calls.append(_sum_call(stage.node, operands[0]))
                table[stage.results[0]] = operands[0].new_empty((*shape[:-1], 1))
                continue
            kernel = _map_of(stage.node, operands)
            calls.append(MapCall.of(kernel, [(x.shape, x.stride()) for x in operands]))
            for i, storage in zip(stage.results, kernel.results, strict=True):
                table[i] = torch.empty(shape, dtype=dtype_of(storage), device="meta")
        return self._worth_it([table[i] for i in range(len(table))], calls)

    def _worth_it(self, table: Sequence[Tensor], calls: Sequence[MapCall | SumCall | None]) -> Plan | None:
        made = table[self.inputs :]
        shape = max((x.shape for x in made), key=math.prod)
        rows, length = math.prod(shape[:-1]), shape[-1]
        between = [x for i, x in enumerate(table) if i >= self.inputs and i not in self.stored and x.shape[-1] > 1]
        wide = max(1, len(between)) * length * max(x.dtype.itemsize for x in made)
        few = max(1, _CACHE // (BLOCK * max(1, wide))) * BLOCK
        known = tuple(call for call in calls if call is not None)
        if len(known) < len(calls) or BLOCK * wide > 2 * _CACHE or rows * wide < 2 * _CACHE:
            return None
        widths = tuple(x.shape[-1] for x in table)
        return Plan(rows, few, tuple(shape[:-1]), widths, tuple(x.dtype for x in table), known)

    def _run(self, plan: Plan, inputs: Sequence[Tensor]) -> list[Tensor]:
        results = {i: buffers.empty((*plan.shape, plan.widths[i]), plan.dtypes[i]) for i in self.stored}
        addresses = [x.data_ptr() for x in inputs] + [0] * (len(plan.widths) - self.inputs)
        for i, result in results.items():
            addresses[i] = result.data_ptr()
        rng = inputs[self.rng]
        keys = [_key(stage.node, rng) for stage in self.stages]
        inner = [i for i in range(self.inputs, len(plan.widths)) if i not in results]

        def work(begin: int, end: int) -> None:
            own = {i: torch.empty(plan.range * plan.widths[i], dtype=plan.dtypes[i]) for i in inner}
            here = list(addresses)
            arrays = [(Addresses(stage.operands), Addresses(stage.results)) for stage in self.stages]
            steps = list(zip(self.stages, plan.calls, keys, arrays, strict=True))
            for item in range(begin, end):
                first, last = item * plan.range, min(plan.rows, (item + 1) * plan.range)
                for i, buffer in own.items():
                    here[i] = buffer.data_ptr() - first * plan.widths[i] * buffer.itemsize
                for stage, call, key, (sources, targets) in steps:
                    width = plan.widths[stage.results[0]]
                    units = first * width // call.unit, -(-last * width // call.unit)
                    call.run(*units, sources.of(here), targets.of(here), key)

        split(work, -(-plan.rows // plan.range), 1)
        return [results[i] for i in self.stored]


def _subgraph(graph: fx.GraphModule, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> fx.GraphModule:
    """The nodes as a graph of their own, from the inputs to what is used outside."""
    own, inside = set(nodes), fx.Graph()
    made = {node: inside.placeholder(node.name) for node in inputs}
    for node in nodes:
        made[node] = inside.node_copy(node, lambda used: made[used])
    inside.output([made[n] for n in nodes if any(user not in own for user in n.users)])
    return fx.GraphModule(graph, inside)


def _stage(node: fx.Node, place: dict[fx.Node, int]) -> Stage:
    operands = tuple(place[n] for n in _tensors(node))
    if node.target is not _FUSED:
        return Stage(node, operands, (place[node],))
    taken = sorted((user.args[1], place[user]) for user in node.users)
    return Stage(node, operands, tuple(at for _, at in taken))


def _key(node: fx.Node, rng: Tensor) -> Any:
    """The random key of a kernel's call."""
    if node.target is _FUSED:
        return Draw.of(rng, 0).keys(node.args[4])  # type: ignore[arg-type]
    return Draw.of(rng, node.args[-1]).key()  # type: ignore[arg-type]


def _map_of(node: fx.Node, operands: Sequence[Tensor]) -> Map:
    """The kernel of a map over these operands."""
    loads, text = tuple(LOADS[x.dtype] for x in operands), str(node.args[1])
    if node.target is _FUSED:
        return texts.fused(text, loads, str(node.args[2]))
    return texts.pointwise(text, loads, STORAGES[node.args[2]])  # type: ignore[index]


class Addresses:
    """An array of the addresses of some values of the table, filled anew for each range of rows."""

    def __init__(self, places: tuple[int, ...]) -> None:
        self.places = places
        self.array = (ctypes.c_int64 * len(places))()

    def of(self, table: Sequence[int]) -> Any:
        """The array, filled."""
        self.array[:] = [table[i] for i in self.places]
        return self.array


@dataclass(frozen=True)
class SumCall:
    """A sum's code for ``lines`` (as kernels read them) that lie one after the other; ``unit`` of them are an item."""

    loops: Loops
    lines: Any

    @property
    def unit(self) -> int:
        """Lines of an item."""
        return self.loops.lanes

    def run(self, begin: int, end: int, sources: Any, targets: Any, key: Any) -> None:
        """Items begin ... end. sources, targets: arrays of the address of element 0 of the operand and the result."""
        self.loops.function(begin, end, self.lines, sources[0], targets[0], key)


def _sum_call(node: fx.Node, x: Tensor) -> SumCall | None:
    order, accumulate, rounding = (str(text) for text in node.args[3:6])
    storage = STORAGES[x.dtype]
    kernel = sum_kernel(texts.order(order), texts.rounding(accumulate), texts.rounding(rounding), storage, storage)
    lines = Lines.of(x, [x.dim() - 1])
    if not isinstance(kernel, Reduce) or not x.is_contiguous():
        return None
    loops = loops_for(kernel, lines)
    return None if loops.neighbours or BLOCK % loops.lanes else SumCall(loops, lines.array())
