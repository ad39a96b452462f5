"""The Contract shape without packing: few rows, or a small product, whose columns lie side by side.

What is true here. An item is a run of columns of one product. Its accumulators stay in registers from the first step to
the last; elements of the first operand are read one by one where they lie, rows of the second one as vectors, the
last under a mask.

Why it is safe. Each lane takes the steps k = 0, 1, 2, ... from +0 with its own stream, numbered by the place of its
result: what the packed kernel does (``contract``). A lane without a column is neither read nor written.

    before   16 rows and a panel packed, 16 steps, results parked and fetched, for each of 96 products of 16x16x16
    after    acc = step(a[row, k], b[k, columns], acc), k = 0, 1, 2, ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from llvmlite import ir

from fxround.kernel import Contract
from fxround.numerics.storage import ELEMENT_OF
from fxround.runtime.llvm.engine import Machine
from fxround.runtime.llvm.loops import (
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
    told,
)
from fxround.runtime.llvm.render import literal, llvm_type, splat
from fxround.runtime.llvm.steps import Steps
from fxround.runtime.llvm.streams import load_seed, start
from fxround.runtime.llvm.tile import tile_for

SIZES: Final = ("rows", "columns", "length", "block", "groups", "runs", "wide")
STRIDES: Final = ("a_batch", "a_row", "a_k", "b_batch", "b_k")
POINTERS: Final = ("layout", "a", "b", "out", "scratch", "key", "flags")


@dataclass(frozen=True)
class DirectVariant:
    """A Contract in registers: lanes of a vector, vectors side by side, and how many rows to compute in turn."""

    kernel: Contract
    lanes: int
    vectors: int
    rows: tuple[int, ...]
    machine: Machine

    @property
    def width(self) -> int:
        """Columns that are computed at a time."""
        return self.lanes * self.vectors

    @property
    def digest(self) -> str:
        """The key of its compiled code."""
        return f"{self.kernel.digest}:direct:{self.lanes}x{self.vectors}x{self.rows}:{self.machine}"


def direct_for(kernel: Contract, machine: Machine, rows: int) -> DirectVariant:
    """As many accumulators as a packed tile has: side by side for a row or two, one below another for more rows."""
    packed = tile_for(kernel, machine, 1)
    most = packed.rows[0] * packed.vectors
    if rows <= 2:
        vectors = min(4, most)
        return DirectVariant(kernel, packed.lanes, vectors, (2, 1) if most >= 2 * vectors else (1,), machine)
    return DirectVariant(kernel, packed.lanes, 1, tuple(n for n in (8, 4, 2, 1) if n <= most), machine)


def build_direct(variant: DirectVariant) -> str:
    """``direct(begin, end, POINTERS...)``; layout: SIZES and STRIDES, int64.

    Items count (batch, ``wide`` times ``width`` columns), the columns fastest; ``runs`` of them are a product.
    a: element (g, m, k) at g * a_batch + m * a_row + k * a_k, with g = batch mod groups (groups 0: g = batch).
    b: element (k, n) at batch * b_batch + k * b_k + n. out: (batch, rows, columns), row-major. block: products of a
    chunk, at least 1.
    """
    module = ir.Module("direct")
    args = [("begin", I64), ("end", I64), *((n, PTR) for n in POINTERS)]
    b, a = define(module, "direct", args, variant.kernel.direction, variant.kernel.watched)
    a = told(b, a, SIZES + STRIDES)
    work = _Direct(b, a, variant)
    with count(b, a["begin"], a["end"]) as item:
        batch = b.sdiv(item, a["runs"])
        first = b.mul(b.sub(item, b.mul(batch, a["runs"])), a["wide"])
        with count(b, first, b.add(first, a["wide"])) as panel:
            work.enter(batch, b.mul(panel, I64(variant.width)))
            row: Any = I64(0)
            for rows in variant.rows:
                end = b.add(row, b.mul(b.sdiv(b.sub(a["rows"], row), I64(rows)), I64(rows)))
                with count(b, row, end, rows) as r:
                    work.tile(r, rows)
                row = end
    work.steps.report(a["flags"])
    b.ret_void()
    return str(module)


class _Direct:
    """The results of one item."""

    def __init__(self, b: ir.IRBuilder, a: dict[str, Any], variant: DirectVariant) -> None:
        self.b, self.a, self.variant, self.kernel, self.lanes = b, a, variant, variant.kernel, variant.lanes
        self.steps = Steps(b, self.kernel, self.lanes, variant.machine)
        self.seed = load_seed(b, a["key"]) if variant.kernel.streams else None
        self.left, self.right, self.out = (MEMORY[s] for s in (*self.kernel.loads, self.kernel.result))

    def enter(self, batch: Any, column: Any) -> None:
        """Which columns of which product, and which of them exist."""
        b, a, lanes = self.b, self.a, self.lanes
        grouped = b.icmp_signed(">", a["groups"], I64(0))
        group = b.srem(batch, b.select(grouped, a["groups"], I64(1)))
        self.a_base = at(b, a["a"], b.mul(b.select(grouped, group, batch), a["a_batch"]), self.left)
        self.b_base = at(b, a["b"], b.add(b.mul(batch, a["b_batch"]), column), self.right)
        self.out_base = b.add(b.mul(b.mul(batch, a["rows"]), a["columns"]), column)
        left = b.trunc(b.sub(a["columns"], column), I32)
        offsets = [b.sub(left, I32(v * lanes)) for v in range(self.variant.vectors)]
        self.exist = [b.icmp_signed("<", iota(lanes, I32), splat(b, offset, lanes)) for offset in offsets]

    def tile(self, row: Any, rows: int) -> None:
        """``rows`` rows of the item, from their first step to their store."""
        b, a, vectors = self.b, self.a, self.variant.vectors
        number = rows * vectors
        places = [self._place(b.add(row, I64(r)), v) for r in range(rows) for v in range(vectors)]
        states = [self._start(place) for place in places] if self.kernel.streams else []
        carried = self.steps.carried([self.steps.zero] * number, states)
        if self.kernel.combine is None:
            self._take(carried, row, rows, I64(0), a["length"])
        else:
            totals = Carried(b, [self.steps.zero] * number)
            with count(b, I64(0), a["length"], a["block"]) as k:
                carried.store([self.steps.zero] * number + carried.load()[number:])
                end = b.add(k, a["block"])
                self._take(carried, row, rows, k, b.select(b.icmp_signed("<", end, a["length"]), end, a["length"]))
                values = carried.load()
                self.steps.combine(values, totals.load())
                carried.store(values)
                totals.store(values[:number])
        values = carried.load() + ([] if states else [literal("u64", 0, self.lanes)] * number)
        for i, place in enumerate(places):
            self._store(self.steps.finish(values[i], values[number + i]), place, self.exist[i % vectors])

    def _place(self, row: Any, vector: int) -> Any:
        b = self.b
        return b.add(b.add(self.out_base, b.mul(row, self.a["columns"])), I64(vector * self.lanes))

    def _start(self, place: Any) -> Any:
        b, lanes = self.b, self.lanes
        return start(b, b.add(splat(b, place, lanes), iota(lanes)), self.seed, lanes, True)

    def _take(self, carried: Carried, row: Any, rows: int, first: Any, end: Any) -> None:
        """Steps first ... end."""
        b, a, lanes, vectors = self.b, self.a, self.lanes, self.variant.vectors
        lines = [at(b, self.a_base, b.mul(b.add(row, I64(r)), a["a_row"]), self.left) for r in range(rows)]
        with self.steps.along(first, end, carried, rows * vectors) as k:
            values = carried.load()
            line, column = at(b, self.b_base, b.mul(k, a["b_k"]), self.right), b.mul(k, a["a_k"])
            right = [self._read(at(b, line, I64(v * lanes), self.right), self.exist[v]) for v in range(vectors)]
            for r in range(rows):
                left = splat(b, self.steps.load_lifted(0, at(b, lines[r], column, self.left), 1), lanes)
                for v in range(vectors):
                    self.steps.step(values, rows * vectors, r * vectors + v, left, right[v])
            carried.store(values)

    def _read(self, address: Any, exist: Any) -> Any:
        b, lanes = self.b, self.lanes
        value = masked_load(b, address, self.right, exist, lanes)
        if ELEMENT_OF[self.kernel.loads[1]] == "u32":
            value = b.zext(value, llvm_type("u32", lanes))
        return self.steps.lift(1, value, lanes)

    def _store(self, rounded: Any, place: Any, exist: Any) -> None:
        b, lanes = self.b, self.lanes
        if ELEMENT_OF[self.kernel.result] == "u32":
            rounded = b.trunc(rounded, ir.VectorType(self.out, lanes))
        masked_store(b, rounded, at(b, self.a["out"], place, self.out), self.out, exist, lanes)
