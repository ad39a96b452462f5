"""Lines of an operand in memory: where they start, how k walks them, and several of them side by side.

What is true here. A kernel gets the description of ``runtime.lines`` as 64-bit integers: the number of lines, their
length, how many dimensions, then ``MAX_DIMS`` places each for ``COLUMNS``. ``Neighbours`` are lines next to each
other in memory, a vector load apart; ``Scattered`` are any lines, an element load each.

Why it is safe. Every line that a group covers exists: the last group reaches back over its neighbour's lines, and
finds the same; a group that is larger than all of them repeats the last.

    before   a copy of the operand in the one layout that the loops know
    after    line.load(k) ... line.store(result)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from llvmlite import ir

from fxround.kernel import Exact, Reduce, Scan
from fxround.runtime.llvm.loops import (
    I32,
    I64,
    MEMORY,
    PTR,
    Carried,
    at,
    bytes_in,
    count,
    declared,
    iota,
    load_vector,
    scratch,
    store_vector,
)
from fxround.runtime.llvm.render import llvm_type, splat

MAX_DIMS: Final = 8
CACHE_LINE: Final = 64
_SIZES: Final = ("count", "length", "dims", "k_dims")
COLUMNS: Final = ("size", "x", "out", "line", "k_size", "k_x", "k_out")
ARGS: Final = [("begin", I64), ("end", I64), ("lines", PTR), ("x", PTR), ("out", PTR), ("key", PTR)]


class Description:
    """The integers of ``runtime.lines.Lines.array``, loaded once a call."""

    def __init__(self, b: ir.IRBuilder, base: Any) -> None:
        self.b, self.base = b, base
        self.count, self.length, self.dims, self.k_dims = (
            b.load(at(b, base, I64(i), I64), typ=I64) for i in range(len(_SIZES))
        )
        self.run, self.k_x, self.k_out = (self.last(name, self.k_dims) for name in ("k_size", "k_x", "k_out"))

    def column(self, name: str, d: Any) -> Any:
        """Entry d of a column."""
        first = len(_SIZES) + COLUMNS.index(name) * MAX_DIMS
        return self.b.load(at(self.b, self.base, self.b.add(I64(first), d), I64), typ=I64)

    def last(self, name: str, dims: Any) -> Any:
        """A column's entry for the innermost of ``dims`` dimensions."""
        return self.column(name, self.b.sub(dims, I64(1)))

    def place(self, index: Any, dims: Any, size: str, steps: Sequence[str]) -> list[Any]:
        """The offsets of the row-major ``index`` of the first ``dims`` dimensions; zeros if there are none."""
        b = self.b
        rest, *offsets = carried = [index, *(I64(0) for _ in steps)]
        state = Carried(b, carried)
        with count(b, I64(1), dims) as i:
            d = b.sub(dims, i)
            extent = self.column(size, d)
            rest, *offsets = state.load()
            above = b.sdiv(rest, extent)
            here = b.sub(rest, b.mul(above, extent))
            moved = [b.add(o, b.mul(here, self.column(s, d))) for o, s in zip(offsets, steps, strict=True)]
            state.store([above, *moved])
        rest, *offsets = state.load()
        rest = b.select(b.icmp_signed(">", dims, I64(0)), rest, I64(0))
        return [b.add(o, b.mul(rest, self.column(s, I64(0)))) for o, s in zip(offsets, steps, strict=True)]

    def line(self, index: Any) -> list[Any]:
        """(offset in the operand, offset in the result, number) of the line visited as number ``index``."""
        return self.place(index, self.dims, "size", ("x", "out", "line"))

    @contextmanager
    def runs(self) -> Iterator[tuple[Any, Any, Any]]:
        """Loop over the runs of k: (the first k, its offset in the operand, its offset in the result)."""
        b = self.b
        outer = b.sub(self.k_dims, I64(1))
        step = b.select(b.icmp_signed("<", self.run, I64(1)), I64(1), self.run)
        with count(b, I64(0), self.length, step) as k:
            yield k, *self.place(b.sdiv(k, step), outer, "k_size", ("k_x", "k_out"))


class Neighbours:
    """Lines whose elements are neighbours in memory. Group i is vector i mod v of the outer index i div v,
    v = ceil(inner / lanes); there are at least as many inner lines as lanes.
    """

    def __init__(self, b: ir.IRBuilder, a: dict[str, Any], kernel: Reduce | Scan | Exact, lanes: int) -> None:
        self.b, self.a, self.kernel, self.lanes = b, a, kernel, lanes
        self.description = d = Description(b, a["lines"])
        self.inner, self.out_step, self.line_step = (d.last(n, d.dims) for n in ("size", "out", "line"))
        self.ends = scratch(b, MEMORY[kernel.result], lanes)
        self.base: list[Any] = []

    @contextmanager
    def each(self) -> Iterator[None]:
        """Loop over the groups."""
        b, d, lanes = self.b, self.description, self.lanes
        vectors = b.sdiv(b.add(self.inner, I64(lanes - 1)), I64(lanes))
        with count(b, self.a["begin"], self.a["end"]) as item:
            outer = b.sdiv(item, vectors)
            first = b.mul(b.sub(item, b.mul(outer, vectors)), I64(lanes))
            last = b.sub(self.inner, I64(lanes))
            first = b.select(b.icmp_signed("<", last, first), last, first)
            base = d.place(outer, b.sub(d.dims, I64(1)), "size", ("x", "out", "line"))
            steps = (I64(1), self.out_step, self.line_step)
            self.base = [b.add(o, b.mul(first, s)) for o, s in zip(base, steps, strict=True)]
            yield

    def elements(self) -> Any:
        """The numbers of the lines."""
        b, lanes = self.b, self.lanes
        return b.add(splat(b, self.base[2], lanes), b.mul(iota(lanes), splat(b, self.line_step, lanes)))

    def load(self, offset: Any) -> Any:
        """One vector."""
        b, storage = self.b, self.kernel.loads[0]
        here = at(b, self.a["x"], b.add(self.base[0], offset), MEMORY[storage])
        return load_vector(b, here, storage, self.lanes)

    def prefetch(self, offset: Any) -> None:
        """Ask for a vector that is needed soon; it may lie beyond the last."""
        b, memory = self.b, MEMORY[self.kernel.loads[0]]
        here = at(b, self.a["x"], b.add(self.base[0], offset), memory)
        callee = declared(b, "llvm.prefetch.p0", ir.FunctionType(ir.VoidType(), [PTR, I32, I32, I32]))
        per_line = CACHE_LINE // bytes_in(memory)
        for element in range(0, self.lanes, per_line):
            # For reading, to stay in all levels, data.
            b.call(callee, [at(b, here, I64(element), memory), I32(0), I32(3), I32(1)])

    def store(self, value: Any, offset: Any) -> None:
        """One vector where the results are neighbours too."""
        b, result, type_ = self.b, self.kernel.result, MEMORY[self.kernel.result]
        here = at(b, self.a["out"], b.add(self.base[1], offset), type_)
        with b.if_else(b.icmp_signed("==", self.out_step, I64(1))) as (together, apart):
            with together:
                store_vector(b, value, here, result, self.lanes)
            with apart:
                store_vector(b, value, self.ends, result, self.lanes)
                with count(b, I64(0), I64(self.lanes)) as lane:
                    element = b.load(at(b, self.ends, lane, type_), typ=type_)
                    b.store(element, at(b, here, b.mul(lane, self.out_step), type_))


class Scattered:
    """Any lines: group i is the lines visited as number i * lanes and after."""

    def __init__(self, b: ir.IRBuilder, a: dict[str, Any], kernel: Reduce | Scan, lanes: int) -> None:
        self.b, self.a, self.kernel, self.lanes = b, a, kernel, lanes
        self.description = Description(b, a["lines"])
        self.places = [scratch(b, I64, lanes) for _ in range(3)]
        self.row = scratch(b, MEMORY[kernel.loads[0]], lanes)
        self.ends = scratch(b, MEMORY[kernel.result], lanes)

    @contextmanager
    def each(self) -> Iterator[None]:
        """Loop over the groups."""
        b, d = self.b, self.description
        with count(b, self.a["begin"], self.a["end"]) as item:
            wanted, last = b.mul(item, I64(self.lanes)), b.sub(d.count, I64(self.lanes))
            first = b.select(b.icmp_signed("<", last, wanted), last, wanted)
            first = b.select(b.icmp_signed("<", first, I64(0)), I64(0), first)
            with count(b, I64(0), I64(self.lanes)) as lane:
                index, end = b.add(first, lane), b.sub(d.count, I64(1))
                index = b.select(b.icmp_signed("<", index, end), index, end)
                for offset, places in zip(d.line(index), self.places, strict=True):
                    b.store(offset, at(b, places, lane, I64))
            yield

    def elements(self) -> Any:
        """The numbers of the lines."""
        return self.b.load(self.places[2], typ=llvm_type("u64", self.lanes), align=64)

    def x(self, lane: int, offset: Any) -> Any:
        """The address of a lane's element."""
        return self._address("x", 0, lane, offset, MEMORY[self.kernel.loads[0]])

    def out(self, lane: int, offset: Any) -> Any:
        """The address of a lane's result."""
        return self._address("out", 1, lane, offset, MEMORY[self.kernel.result])

    def _address(self, base: str, column: int, lane: int, offset: Any, type_: Any) -> Any:
        b = self.b
        own = b.load(at(b, self.places[column], I64(lane), I64), typ=I64)
        return at(b, self.a[base], b.add(own, offset), type_)

    def load(self, offset: Any) -> Any:
        """One element a lane."""
        b, storage = self.b, self.kernel.loads[0]
        memory = MEMORY[storage]
        row: Any = ir.Constant(ir.VectorType(memory, self.lanes), ir.Undefined)
        for lane in range(self.lanes):
            row = b.insert_element(row, b.load(self.x(lane, offset), typ=memory), ir.IntType(32)(lane))
        b.store(row, self.row, align=64)
        return load_vector(b, self.row, storage, self.lanes)

    def store(self, value: Any, offset: Any) -> None:
        """One element a lane."""
        b, memory = self.b, MEMORY[self.kernel.result]
        store_vector(b, value, self.ends, self.kernel.result, self.lanes)
        for lane in range(self.lanes):
            b.store(b.load(at(b, self.ends, I64(lane), memory), typ=memory), self.out(lane, offset))


Group = Neighbours | Scattered
