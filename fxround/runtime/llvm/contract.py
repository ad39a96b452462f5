"""The Contract shape as LLVM: register tiles of results, k ascending.

What is true here. The second operand comes as panels: panel p holds columns p * width ... of b, k by k,
padded with zeros. A tile is ``rows`` x ``width`` results; each lane is one result with its own
accumulator (and stream), so k ascends for every result whatever the tile. Padded lanes are computed and dropped.

Why it is safe. The body of a step sees one result at a time; tiles, threads and vector width only choose
which results are computed together.

    before   a blocked product that adds partial sums as blocks come
    after    acc = step(a[k], b[k], acc), k = 0, 1, 2, ... in every lane
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from fxround.kernel import Contract
from fxround.runtime.llvm.loops import (
    I64,
    MEMORY,
    PTR,
    Carried,
    at,
    copy_elements,
    count,
    define,
    iota,
    load_vector,
    scratch,
    store_vector,
)
from fxround.runtime.llvm.render import emit, literal, splat
from fxround.runtime.llvm.streams import advance, load_key, start

ARGS = [
    *((n, I64) for n in ("begin", "end", "rows", "columns", "length", "panels", "chunk", "a_groups")),
    *((n, I64) for n in ("a_batch", "a_row", "a_k")),
    *((n, PTR) for n in ("a", "b", "out", "key")),
]


def lanes_of(kernel: Contract) -> int:
    """One AVX-512 register of accumulators."""
    return 16 if kernel.accumulator == "f32" else 8


def tile_of(kernel: Contract) -> tuple[int, int]:
    """(rows, vectors): as many accumulators as leave room for what the step needs beside them."""
    if kernel.accumulator == "f32" or len(kernel.step.schedule) < 12:
        return (6, 2)
    return (4, 1)


def panel_width(kernel: Contract) -> int:
    """Columns in a panel of the second operand."""
    return lanes_of(kernel) * tile_of(kernel)[1]


def build_contract(kernel: Contract) -> str:
    """``contract(begin, end, rows, columns, length, panels, chunk, a_groups, a_batch, a_row, a_k, a, b, out, key)``.

    Items count (batch, panel, chunk of rows), the last fastest; ``chunk`` rows each. a: element (g, m, k)
    at g * a_batch + m * a_row + k * a_k with g = batch mod a_groups (a_groups 0: g = batch).
    b: (batch, panels, length, width). out: (batch, rows, columns).
    """
    module = ir.Module("contract")
    b, a = define(module, "contract", ARGS)
    tile = _Tile(b, a, kernel)
    rows, _ = tile_of(kernel)
    chunks = b.sdiv(b.add(a["rows"], b.sub(a["chunk"], I64(1))), a["chunk"])
    with count(b, a["begin"], a["end"]) as item:
        panel = b.sdiv(item, chunks)
        tile.enter(panel)
        first = b.mul(b.sub(item, b.mul(panel, chunks)), a["chunk"])
        last = b.add(first, a["chunk"])
        last = b.select(b.icmp_signed("<", last, a["rows"]), last, a["rows"])
        whole = b.add(first, b.mul(b.sdiv(b.sub(last, first), I64(rows)), I64(rows)))
        with count(b, first, whole, rows) as row:
            tile.compute(row, rows)
        with count(b, whole, last) as row:
            tile.compute(row, 1)
    b.ret_void()
    return str(module)


class _Tile:
    """The results of one panel, a few rows at a time."""

    def __init__(self, b: ir.IRBuilder, a: dict[str, Any], kernel: Contract) -> None:
        self.b, self.a, self.kernel = b, a, kernel
        self.lanes = lanes_of(kernel)
        self.vectors = tile_of(kernel)[1]
        self.width = self.lanes * self.vectors
        self.key = load_key(b, a["key"])
        self.ends = scratch(b, MEMORY[kernel.result], self.lanes)

    def enter(self, item: Any) -> None:
        """Where this panel's operands and results are."""
        b, a = self.b, self.a
        self.batch = b.sdiv(item, a["panels"])
        self.panel = b.sub(item, b.mul(self.batch, a["panels"]))
        grouped = b.icmp_signed(">", a["a_groups"], I64(0))
        groups = b.select(grouped, a["a_groups"], I64(1))
        group = b.select(grouped, b.srem(self.batch, groups), self.batch)
        self.a_base = b.mul(group, a["a_batch"])
        panel_size = b.mul(a["length"], I64(self.width))
        self.b_base = at(b, a["b"], b.mul(item, panel_size), MEMORY[self.kernel.loads[1]])
        self.column = b.mul(self.panel, I64(self.width))

    def compute(self, row: Any, rows: int) -> None:
        """Every k of ``rows`` rows from ``row``, then their store."""
        b, kernel, lanes = self.b, self.kernel, self.lanes
        streams = kernel.draws or kernel.finish_draws
        zero = literal(kernel.accumulator, 0, lanes)
        places = [(r, v) for r in range(rows) for v in range(self.vectors)]
        states = [start(b, self._elements(b.add(row, I64(r)), v), self.key, lanes, streams) for r, v in places]
        carried = Carried(b, [zero] * len(places) + states)
        with count(b, I64(0), self.a["length"]) as k:
            values = carried.load()
            accs, states = values[: len(places)], values[len(places) :]
            right = [self._right(k, v) for v in range(self.vectors)]
            left = [splat(b, self._left(b.add(row, I64(r)), k), lanes) for r in range(rows)]
            for i, (r, v) in enumerate(places):
                bits, states[i] = advance(b, states[i], lanes, kernel.draws)
                (accs[i],) = emit(kernel.step, b, [left[r], right[v], accs[i], bits], lanes)
            carried.store(accs + states)
        values = carried.load()
        for i, (r, v) in enumerate(places):
            bits, _ = advance(b, values[len(places) + i], lanes, kernel.finish_draws)
            (result,) = emit(kernel.finish, b, [values[i], bits], lanes)
            self._store(result, b.add(row, I64(r)), v)

    def _index(self, row: Any, vector: int) -> tuple[Any, Any]:
        b, a = self.b, self.a
        column = b.add(self.column, I64(vector * self.lanes))
        line = b.add(b.mul(self.batch, a["rows"]), row)
        return b.add(b.mul(line, a["columns"]), column), column

    def _elements(self, row: Any, vector: int) -> Any:
        return self.b.add(splat(self.b, self._index(row, vector)[0], self.lanes), iota(self.lanes))

    def _left(self, row: Any, k: Any) -> Any:
        b, a, storage = self.b, self.a, self.kernel.loads[0]
        offset = b.add(self.a_base, b.add(b.mul(row, a["a_row"]), b.mul(k, a["a_k"])))
        return load_vector(b, at(b, a["a"], offset, MEMORY[storage]), storage, 1)

    def _right(self, k: Any, vector: int) -> Any:
        b, storage = self.b, self.kernel.loads[1]
        offset = b.add(b.mul(k, I64(self.width)), I64(vector * self.lanes))
        return load_vector(b, at(b, self.b_base, offset, MEMORY[storage]), storage, self.lanes)

    def _store(self, value: Any, row: Any, vector: int) -> None:
        b, result = self.b, self.kernel.result
        index, column = self._index(row, vector)
        here = at(b, self.a["out"], index, MEMORY[result])
        left = b.sub(self.a["columns"], column)
        short = b.icmp_signed("<", left, I64(self.lanes))
        store_vector(b, value, b.select(short, self.ends, here), result, self.lanes)
        with b.if_then(b.and_(short, b.icmp_signed(">", left, I64(0)))):
            copy_elements(b, here, self.ends, left, MEMORY[result])
