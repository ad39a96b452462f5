"""Lines of an operand in memory: where they start, how k walks them, and several of them together.

A kernel gets the description of ``runtime.cpu.strides`` as 64-bit integers: the number of lines, their length, the
numbers of dimensions, then ``MAX_DIMS`` entries for each of ``COLUMNS``; a table of shards follows. ``Neighbours`` are
lines that are adjacent in memory and loaded as vectors; ``Scattered`` are any lines, loaded element by element. Every
lane of a group has a line that exists: the last group overlaps the one before it and computes the same results again,
and a group larger than all lines repeats the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from llvmlite import ir

from fxround.kernels.kinds import Exact, Reduce, Scan
from fxround.runtime.cpu.llvm.loops import (
    I64,
    MEMORY,
    PTR,
    Carried,
    at,
    count,
    iota,
    load_vector,
    prefetch,
    scratch,
    store_vector,
)
from fxround.runtime.cpu.llvm.render import llvm_type, splat

MAX_DIMS: Final = 8
_SIZES: Final = ("count", "length", "dims", "k_dims")
COLUMNS: Final = ("size", "x", "out", "line", "k_size", "k_x", "k_out")
DESCRIBED: Final = len(_SIZES) + len(COLUMNS) * MAX_DIMS
ARGS: Final = [("begin", I64), ("end", I64), ("lines", PTR), ("x", PTR), ("out", PTR), ("key", PTR)]


class Description:
    """The integers of ``runtime.cpu.strides.Lines.array``, loaded once in a call."""

    def __init__(self, b: ir.IRBuilder, base: Any) -> None:
        self.b, self.base = b, base
        self.count, self.length, self.dims, self.k_dims = (
            b.load(at(b, base, I64(i), I64), typ=I64) for i in range(len(_SIZES))
        )
        self.run, self.k_x, self.k_out = (self.last(name, self.k_dims) for name in ("k_size", "k_x", "k_out"))

    @property
    def shards(self) -> Any:
        """The address of the table of shards, which follows the description."""
        return at(self.b, self.base, I64(DESCRIBED), I64)

    def column(self, name: str, d: Any) -> Any:
        """Entry d of a column."""
        first = len(_SIZES) + COLUMNS.index(name) * MAX_DIMS
        return self.b.load(at(self.b, self.base, self.b.add(I64(first), d), I64), typ=I64)

    def last(self, name: str, dims: Any) -> Any:
        """A column's entry for the innermost of ``dims`` dimensions."""
        return self.column(name, self.b.sub(dims, I64(1)))

    def place(self, index: Any, dims: Any, size: str, steps: Sequence[str]) -> list[Any]:
        """The offsets, by each of ``steps``, of the row-major ``index`` of the first ``dims`` dimensions.

        They are zeros if there are no dimensions.
        """
        b = self.b
        rest, *offsets = carried = [index, *(I64(0) for _ in steps)]
        state = Carried(b, carried)
        # The outermost dimension needs no division: what is left of the index is its coordinate.
        with count(b, I64(1), dims) as i:
            d = b.sub(dims, i)
            extent = self.column(size, d)
            rest, *offsets = state.load()
            above = b.sdiv(rest, extent)
            here = b.sub(rest, b.mul(above, extent))
            moved = [b.add(o, b.mul(here, self.column(s, d))) for o, s in zip(offsets, steps, strict=True)]
            state.store([above, *moved])
        rest, *offsets = state.load()
        # With no dimensions entry 0 belongs to nothing that is asked for, and must not count.
        rest = b.select(b.icmp_signed(">", dims, I64(0)), rest, I64(0))
        return [b.add(o, b.mul(rest, self.column(s, I64(0)))) for o, s in zip(offsets, steps, strict=True)]

    def line(self, index: Any) -> list[Any]:
        """(offset in the operand, offset in the result, number) of the line visited as number ``index``."""
        return self.place(index, self.dims, "size", ("x", "out", "line"))

    @contextmanager
    def runs(self) -> Iterator[tuple[Any, Any, Any]]:
        """Loop over the runs of k; yields (the first k, its offset in the operand, its offset in the result)."""
        b = self.b
        outer = b.sub(self.k_dims, I64(1))
        # A line of no elements has a run of 0, which is no divisor.
        step = b.select(b.icmp_signed("<", self.run, I64(1)), I64(1), self.run)
        with count(b, I64(0), self.length, step) as k:
            yield k, *self.place(b.sdiv(k, step), outer, "k_size", ("k_x", "k_out"))


class Neighbours:
    """Lines whose elements are adjacent in memory, one in each lane.

    Group i is vector i mod v of the outer index i div v, with v = ceil(inner / lanes). There are at least as many inner
    lines as lanes.
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
            # The last vector of a row of lines moves back to end with it. Lines of two groups are computed twice, with
            # their own numbers and so the same bits; two threads may then store the same values to the same places.
            first = b.select(b.icmp_signed("<", last, first), last, first)
            base = d.place(outer, b.sub(d.dims, I64(1)), "size", ("x", "out", "line"))
            steps = (I64(1), self.out_step, self.line_step)
            self.base = [b.add(o, b.mul(first, s)) for o, s in zip(base, steps, strict=True)]
            yield

    def elements(self) -> Any:
        """The numbers of the group's lines."""
        b, lanes = self.b, self.lanes
        return b.add(splat(b, self.base[2], lanes), b.mul(iota(lanes), splat(b, self.line_step, lanes)))

    def load(self, offset: Any) -> Any:
        """Load one vector: an element of each line."""
        b, storage = self.b, self.kernel.loads[0]
        here = at(b, self.a["x"], b.add(self.base[0], offset), MEMORY[storage])
        return load_vector(b, here, storage, self.lanes)

    def prefetch(self, offset: Any) -> None:
        """Prefetch a vector that is needed soon; it may be beyond the last one, which a prefetch permits."""
        memory = MEMORY[self.kernel.loads[0]]
        here = at(self.b, self.a["x"], self.b.add(self.base[0], offset), memory)
        prefetch(self.b, here, memory, self.lanes)

    def store(self, value: Any, offset: Any) -> None:
        """Store one vector; element by element if the results are not adjacent."""
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
    """Any lines, one in each lane: group i is the lines visited as number i * lanes and after."""

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
            # The last group moves back to end with the last line, so a caller must make every line before it available
            # too. If there are fewer lines than lanes, it starts at 0 and the lanes beyond repeat the last line.
            wanted, last = b.mul(item, I64(self.lanes)), b.sub(d.count, I64(self.lanes))
            first = b.select(b.icmp_signed("<", last, wanted), last, wanted)
            first = b.select(b.icmp_signed("<", first, I64(0)), I64(0), first)
            with count(b, I64(0), I64(self.lanes)) as lane:
                index, end = b.add(first, lane), b.sub(d.count, I64(1))
                # Never beyond the last line, also with fewer lines than lanes.
                index = b.select(b.icmp_signed("<", index, end), index, end)
                for offset, places in zip(d.line(index), self.places, strict=True):
                    b.store(offset, at(b, places, lane, I64))
            yield

    def elements(self) -> Any:
        """The numbers of the group's lines."""
        return self.b.load(self.places[2], typ=llvm_type("u64", self.lanes), align=64)

    def x(self, lane: int, offset: Any) -> Any:
        """The address of a lane's element."""
        return self._address("x", 0, lane, offset, MEMORY[self.kernel.loads[0]])

    def out(self, lane: int, offset: Any) -> Any:
        """The address of a lane's result."""
        return self._address("out", 1, lane, offset, MEMORY[self.kernel.result])

    def _address(self, base: str, column: int, lane: int, offset: Any, type_: Any) -> Any:
        """The address of an element of a lane's line; column 0 of ``places`` is the operand's, 1 the result's."""
        b = self.b
        own = b.load(at(b, self.places[column], I64(lane), I64), typ=I64)
        return at(b, self.a[base], b.add(own, offset), type_)

    def load(self, offset: Any) -> Any:
        """Load one element of each line."""
        b, storage = self.b, self.kernel.loads[0]
        memory = MEMORY[storage]
        row: Any = ir.Constant(ir.VectorType(memory, self.lanes), ir.Undefined)
        for lane in range(self.lanes):
            row = b.insert_element(row, b.load(self.x(lane, offset), typ=memory), ir.IntType(32)(lane))
        # Through memory, so that ``load_vector`` alone knows how stored elements become the IR's.
        b.store(row, self.row, align=64)
        return load_vector(b, self.row, storage, self.lanes)

    def store(self, value: Any, offset: Any) -> None:
        """Store one element for each line."""
        b, memory = self.b, MEMORY[self.kernel.result]
        # Lanes that repeat the last line store the same result to the same place again.
        store_vector(b, value, self.ends, self.kernel.result, self.lanes)
        for lane in range(self.lanes):
            b.store(b.load(at(b, self.ends, I64(lane), memory), typ=memory), self.out(lane, offset))


Group = Neighbours | Scattered
