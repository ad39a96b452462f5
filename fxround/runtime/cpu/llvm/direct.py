"""The Contract shape without packing: products of few rows, or small ones, whose columns are adjacent in memory.

An item is a run of columns of one product. Its accumulators stay in registers from the first step to the last. Elements
of the first operand are loaded one by one from where they are stored, rows of the second one as vectors, the last
vector under a mask. Packing pays only where many tiles read a packed panel.

Each lane takes the steps k = 0, 1, 2, ... from +0 with its own stream, which is numbered by the place of its result:
exactly as the packed kernel does (``contract``). A lane without a column is neither loaded nor stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from llvmlite import ir

from fxround.kernels.kinds import Contract
from fxround.numerics.formats.storage import ELEMENT_OF
from fxround.runtime.cpu.llvm.engine import Machine
from fxround.runtime.cpu.llvm.loops import (
    I32,
    I64,
    MEMORY,
    PTR,
    Carried,
    at,
    count,
    define,
    iota,
    masked_load,
    masked_store,
    with_sizes,
)
from fxround.runtime.cpu.llvm.render import literal, llvm_type, splat
from fxround.runtime.cpu.llvm.shards import each_shard
from fxround.runtime.cpu.llvm.steps import Steps, WaitingSums
from fxround.runtime.cpu.llvm.streams import Streams
from fxround.runtime.cpu.llvm.tile import tile_for

SIZES: Final = ("rows", "columns", "length", "block", "groups", "runs", "wide")
STRIDES: Final = ("a_batch", "a_row", "a_k", "b_batch", "b_k")
POINTERS: Final = ("layout", "a", "b", "out", "scratch", "key", "flags")


@dataclass(frozen=True)
class DirectVariant:
    """A Contract in registers: lanes of a vector, adjacent vectors, and the heights of tiles to use in turn."""

    kernel: Contract
    lanes: int
    vectors: int
    rows: tuple[int, ...]
    machine: Machine

    @property
    def width(self) -> int:
        """The number of columns that are computed at a time."""
        return self.lanes * self.vectors

    @property
    def digest(self) -> str:
        """The key of the compiled code."""
        return f"{self.kernel.digest}:direct:{self.lanes}x{self.vectors}x{self.rows}:{self.machine}"


def direct_for(kernel: Contract, machine: Machine, rows: int) -> DirectVariant:
    """The variant for this many rows, with no more accumulators than a packed tile has.

    One or two rows get up to four adjacent vectors; more rows get one vector each.
    """
    packed = tile_for(kernel, machine, 1)
    most = packed.rows[0] * packed.vectors
    if rows <= 2:
        vectors = min(4, most)
        return DirectVariant(kernel, packed.lanes, vectors, (2, 1) if most >= 2 * vectors else (1,), machine)
    # Like all heights these end in 1, so that every number of rows is covered.
    return DirectVariant(kernel, packed.lanes, 1, tuple(n for n in (8, 4, 2, 1) if n <= most), machine)


def build_direct(variant: DirectVariant) -> str:
    """The LLVM text of ``direct(begin, end, POINTERS...)``; the array ``layout`` holds SIZES and STRIDES as int64.

    Items count (batch, ``wide`` times ``width`` columns), the columns fastest; ``runs`` items make a product.

        a      element (g, m, k) at g * a_batch + m * a_row + k * a_k, g = batch mod groups (groups 0: g = batch)
        b      element (k, n) at batch * b_batch + k * b_k + n
        out    (batch, rows, columns), row-major
        block  products of a chunk, at least 1

    After these numbers the array has the table of the shards of ``length`` (``shards``).
    """
    module = ir.Module("direct")
    args = [("begin", I64), ("end", I64), *((n, PTR) for n in POINTERS)]
    b, a = define(module, "direct", args, variant.kernel.direction, variant.kernel.watched)
    a = with_sizes(b, a, SIZES + STRIDES)
    work = _Direct(b, a, variant)
    with count(b, a["begin"], a["end"]) as item:
        batch = b.sdiv(item, a["runs"])
        first = b.mul(b.sub(item, b.mul(batch, a["runs"])), a["wide"])
        # The last item may have panels beyond the last column: their masks are empty, so they load and store no column.
        with count(b, first, b.add(first, a["wide"])) as panel:
            work.enter(batch, b.mul(panel, I64(variant.width)))
            row: Any = I64(0)
            # The tallest tiles first; heights differ in speed alone, since no lane reads another.
            for rows in variant.rows:
                end = b.add(row, b.mul(b.sdiv(b.sub(a["rows"], row), I64(rows)), I64(rows)))
                with count(b, row, end, rows) as r:
                    work.tile(r, rows)
                row = end
    b.ret_void()
    return str(module)


class _Direct:
    """The results of one item."""

    def __init__(self, b: ir.IRBuilder, a: dict[str, Any], variant: DirectVariant) -> None:
        self.b, self.a, self.variant, self.kernel, self.lanes = b, a, variant, variant.kernel, variant.lanes
        self.steps = Steps(b, self.kernel, self.lanes, variant.machine, a["flags"])
        self.streams: Any = Streams.load(b, a["key"], variant.kernel.parts) if variant.kernel.streams else None
        self.left, self.right, self.out = (MEMORY[s] for s in (*self.kernel.loads, self.kernel.result))

    def enter(self, batch: Any, column: Any) -> None:
        """Find the operands of a panel of columns, and the lanes that have a column."""
        b, a, lanes = self.b, self.a, self.lanes
        # The select keeps the remainder away from a division by zero.
        grouped = b.icmp_signed(">", a["groups"], I64(0))
        group = b.srem(batch, b.select(grouped, a["groups"], I64(1)))
        self.a_base = at(b, a["a"], b.mul(b.select(grouped, group, batch), a["a_batch"]), self.left)
        self.b_base = at(b, a["b"], b.add(b.mul(batch, a["b_batch"]), column), self.right)
        self.out_base = b.add(b.mul(b.mul(batch, a["rows"]), a["columns"]), column)
        # The comparison of 32-bit lanes is one instruction. The panel asks only for its own columns, so what is left
        # beyond them is cut off before 2^31 columns or more would overflow.
        left, width = b.sub(a["columns"], column), I64(self.variant.width)
        left = b.trunc(b.select(b.icmp_signed("<", left, width), left, width), I32)
        offsets = [b.sub(left, I32(v * lanes)) for v in range(self.variant.vectors)]
        self.exist = [b.icmp_signed("<", iota(lanes, I32), splat(b, offset, lanes)) for offset in offsets]

    def tile(self, row: Any, rows: int) -> None:
        """Compute ``rows`` rows of the panel from their first step to their store."""
        b, a, vectors = self.b, self.a, self.variant.vectors
        number = rows * vectors
        places = [self._place(b.add(row, I64(r)), v) for r in range(rows) for v in range(vectors)]
        states = [self._start(place, I64(0)) for place in places] if self.kernel.streams else []
        carried = self.steps.carried([self.steps.zero] * number, states)
        if self.kernel.shards > 1:
            waiting = WaitingSums(self.steps, number)
            with each_shard(b, at(b, a["layout"], I64(len(SIZES + STRIDES)), I64)) as shard:
                states = [self._start(place, shard.number) for place in places] if self.kernel.streams else []
                carried.store([self.steps.zero] * number + states + carried.load()[number + len(states) :])
                self._take(carried, row, rows, shard.begin, shard.end)
                self.steps.add_shards(carried, number, shard, waiting.load)
                waiting.store(shard.last, carried.load())
        elif not self.kernel.chunk:
            self._take(carried, row, rows, I64(0), a["length"])
        else:
            totals = Carried(b, [self.steps.zero] * number)
            with count(b, I64(0), a["length"], a["block"]) as k:
                # A chunk starts from +0; the streams go on.
                carried.store([self.steps.zero] * number + carried.load()[number:])
                end = b.add(k, a["block"])
                self._take(carried, row, rows, k, b.select(b.icmp_signed("<", end, a["length"]), end, a["length"]))
                values = carried.load()
                self.steps.combine(values, totals.load())
                carried.store(values)
                totals.store(values[:number])
        # Without streams ``finish`` draws nothing, and its state is a placeholder.
        values = carried.load() + ([] if states else [literal("u64", 0, self.lanes)] * number)
        for i, place in enumerate(places):
            self._store(self.steps.finish(values[i], values[number + i]), place, self.exist[i % vectors])

    def _place(self, row: Any, vector: int) -> Any:
        """The number in the row-major result of lane 0 of a vector."""
        b = self.b
        return b.add(b.add(self.out_base, b.mul(row, self.a["columns"])), I64(vector * self.lanes))

    def _start(self, place: Any, shard: Any) -> Any:
        """The first states of the streams of a vector of results in a shard."""
        b, lanes = self.b, self.lanes
        # The same numbers as in ``contract`` for a row-major result, hence the same random bits.
        elements = b.add(splat(b, place, lanes), iota(lanes))
        return self.streams.start(b, self.streams.number(b, elements, lanes, self.kernel.shards, shard), lanes, True)

    def _take(self, carried: Carried, row: Any, rows: int, first: Any, end: Any) -> None:
        """Take the steps first ... end, ascending."""
        b, a, lanes, vectors = self.b, self.a, self.lanes, self.variant.vectors
        # ``first`` is 0, or begins a chunk or a shard. Kernels that toss coins have no chunks, so that a chain begins
        # there.
        lines = [at(b, self.a_base, b.mul(b.add(row, I64(r)), a["a_row"]), self.left) for r in range(rows)]
        with self.steps.along(first, end, carried, rows * vectors) as k:
            values = carried.load()
            line, column = at(b, self.b_base, b.mul(k, a["b_k"]), self.right), b.mul(k, a["a_k"])
            # One load of a row of the second operand serves all rows of the tile.
            right = [self._read(at(b, line, I64(v * lanes), self.right), self.exist[v]) for v in range(vectors)]
            for r in range(rows):
                left = splat(b, self.steps.load_lifted(0, at(b, lines[r], column, self.left), 1), lanes)
                for v in range(vectors):
                    self.steps.step(values, rows * vectors, r * vectors + v, left, right[v])
            carried.store(values)

    def _read(self, address: Any, exist: Any) -> Any:
        """Load and lift a vector of the second operand; lanes without a column are zero."""
        b, lanes = self.b, self.lanes
        # Without the mask the last vector would read beyond the row, perhaps beyond the tensor.
        value = masked_load(b, address, self.right, exist, lanes)
        if ELEMENT_OF[self.kernel.loads[1]] == "u32":
            value = b.zext(value, llvm_type("u32", lanes))
        return self.steps.lift(1, value, lanes)

    def _store(self, rounded: Any, place: Any, exist: Any) -> None:
        """Store the lanes that have a column."""
        b, lanes = self.b, self.lanes
        if ELEMENT_OF[self.kernel.result] == "u32":
            rounded = b.trunc(rounded, ir.VectorType(self.out, lanes))
        masked_store(b, rounded, at(b, self.a["out"], place, self.out), self.out, exist, lanes)
