"""The Exact shape as LLVM: sums in integers, block by block, rounded once at the end.

A block of a line (or of several adjacent lines, one in each lane) is read twice: once for its largest exponent, once to
be added up (``exact_blocks``). A block whose exponents differ too much for that goes into bins (``exact_bins``). All
sums are sums of integers, and integer addition is associative: the order of k, blocks and lanes cannot change the
result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir

from fxround.kernels.kinds import Exact
from fxround.numerics.formats.storage import CARRIER_OF
from fxround.runtime.cpu.llvm import exact_blocks
from fxround.runtime.cpu.llvm.exact_bins import LANES, Bins, Tables, total_function
from fxround.runtime.cpu.llvm.lines import ARGS, Description, Neighbours
from fxround.runtime.cpu.llvm.loops import (
    I64,
    MEMORY,
    at,
    copy_elements,
    count,
    define,
    load_vector,
    scratch,
    store_vector,
)
from fxround.runtime.cpu.llvm.panels import PANEL, panels
from fxround.runtime.cpu.llvm.render import emit, llvm_type, splat
from fxround.runtime.cpu.llvm.streams import Streams, advance

# Elements of a block of a line, and rows of a block of adjacent lines: both stay in the caches. ``exact_blocks``
# relies on at most 2^12 elements in a block, whose integers of at most 2^50 sum to 2^62.
_BLOCK: Final = 4096
_ROWS: Final = 512
_TABLES: Final = 4


def lines_across(kernel: Exact, inner: int) -> int:
    """The number of adjacent lines to take together; 0 if there are too few."""
    most = 64 if CARRIER_OF[kernel.loads[0]] == "f32" else 32
    return next((n for n in (most, 16, 8) if inner >= n), 0)


def build_exact(variant: tuple[Exact, int, bool]) -> str:
    """The LLVM text of ``exact(begin, end, lines, x, out, key)``; ``variant`` is (kernel, lanes, dense).

    With lanes > 0, items are groups of ``lanes`` adjacent lines. Otherwise items are lines, whose elements are adjacent
    in one run (dense) or are copied into panels.
    """
    kernel, lanes, dense = variant
    module = ir.Module("exact")
    b, a = define(module, "exact", ARGS)
    bins = Bins(CARRIER_OF[kernel.loads[0]])
    total = total_function(module, bins, kernel.to_odd)
    exact_blocks.short_function(module, bins, kernel.to_odd)
    (_Across(b, a, kernel, lanes) if lanes else _Along(b, a, kernel, dense)).build(total)
    b.ret_void()
    return str(module)


class _Lines:
    """What both walks have in common: tables, totals, loading and storing."""

    def __init__(self, b: ir.IRBuilder, a: dict[str, Any], kernel: Exact, lines: int, lanes: int) -> None:
        self.b, self.a, self.kernel, self.lanes = b, a, kernel, lanes
        self.bins = Bins(CARRIER_OF[kernel.loads[0]])
        self.memory, self.streams = MEMORY[kernel.loads[0]], Streams.load(b, a["key"], kernel.parts)
        # A line alone spreads its elements over ``_TABLES`` tables; lines side by side have one table each.
        self.tables = Tables(b, kernel, self.bins, max(lines, _TABLES))
        self.totals = exact_blocks.Totals(b, self.tables, lines)

    def read(self, address: Any) -> Any:
        """Load a vector of elements as encodings."""
        elements = load_vector(self.b, address, self.kernel.loads[0], self.lanes)
        return emit(self.kernel.read, self.b, [elements], self.lanes)[0]

    def finish(self, line: Any, place: Any, number: Any, total: ir.Function) -> None:
        """Round and store the sum of a line."""
        b, kernel = self.b, self.kernel
        # The rounding of the sum draws before the rounding of the store, each only if its mode draws.
        state = self.streams.start(b, self.streams.number(b, number, 1), 1, any(kernel.draws))
        once, state = advance(b, state, 1, kernel.draws[0])
        again, _ = advance(b, state, 1, kernel.draws[1])
        (result,) = emit(kernel.finish, b, [self.totals.value(line, total), once, again], 1)
        store_vector(b, result, at(b, self.a["out"], place, MEMORY[kernel.result]), kernel.result, 1)


class _Along(_Lines):
    """One line at a time."""

    def __init__(self, b: ir.IRBuilder, a: dict[str, Any], kernel: Exact, dense: bool) -> None:
        super().__init__(b, a, kernel, 1, 32 if CARRIER_OF[kernel.loads[0]] == "f32" else 16)
        self.dense, self.description = dense, Description(b, a["lines"])
        self.buffer = scratch(b, self.memory, 1 if dense else PANEL)
        self.tail = scratch(b, self.memory, self.lanes)

    def build(self, total: ir.Function) -> None:
        """Emit the loop over the lines."""
        b = self.b
        with count(b, self.a["begin"], self.a["end"]) as item:
            x, out, number = self.description.line(item)
            base = at(b, self.a["x"], x, self.memory)
            self.totals.clear(I64(0))
            if self.dense:
                self._blocks(base, self.description.length)
            else:
                with panels(b, self.description, base, self.memory, self.buffer, lambda: I64(0)) as filled:
                    self._blocks(self.buffer, filled)
            # ``_bin`` spreads a line over several tables; ``Totals.value`` reads the first one.
            with b.if_then(b.icmp_unsigned("!=", b.load(self.totals.used, typ=I64), I64(0)), likely=False):
                self.tables.fold()
            # The number of the line, not the order of the visit, gives its stream.
            self.finish(I64(0), out, number, total)

    def _blocks(self, base: Any, number: Any) -> None:
        """Emit the loop over the blocks of ``number`` adjacent elements."""
        b = self.b
        with count(b, I64(0), number, _BLOCK) as k:
            left = b.sub(number, k)
            self._block(at(b, base, k, self.memory), b.select(b.icmp_signed("<", left, I64(_BLOCK)), left, I64(_BLOCK)))

    def _block(self, base: Any, number: Any) -> None:
        """Add up one block; the last partial vector is copied to a buffer and padded with zeros."""
        b, lanes = self.b, self.lanes
        whole = b.and_(number, I64(-lanes))
        rest = b.sub(number, whole)
        partial = b.icmp_signed(">", rest, I64(0))
        with b.if_then(partial):
            zero = ir.Constant(self.memory, 0 if isinstance(self.memory, ir.IntType) else 0.0)
            with count(b, I64(0), I64(lanes)) as i:
                b.store(zero, at(b, self.tail, i, self.memory))
            copy_elements(b, self.tail, at(b, base, whole, self.memory), rest, self.memory)

        def vectors(take: Callable[[Any], None]) -> None:
            with count(b, I64(0), whole, lanes) as k:
                take(self.read(at(b, base, k, self.memory)))
            with b.if_then(partial):
                take(self.read(self.tail))

        field = b.zext(_reduced(b, "umax", exact_blocks.largest(b, self.bins, vectors, lanes), lanes), I64)
        ok = exact_blocks.ordinary(b, self.bins, field)
        # A zero of the padding adds M and nothing else, so the padding counts among the elements that M is subtracted
        # for.
        taken = b.add(whole, b.select(partial, I64(lanes), I64(0)))
        self._try(vectors, field, taken, list(exact_blocks.levels(self.bins)), ok, lambda: self._bin(base, number))

    def _try(
        self, vectors: Any, field: Any, taken: Any, levels: list[int], ok: Any, otherwise: Callable[[], None]
    ) -> None:
        """Add the block up with the first of ``levels`` that leaves no rest; otherwise call ``otherwise``."""
        b, lanes = self.b, self.lanes
        done = scratch(b, I64, 1)
        b.store(I64(0), done)
        for level in levels:
            wanted = b.and_(ok, b.icmp_unsigned("==", b.load(done, typ=I64), I64(0)))
            with b.if_then(wanted, likely=level == levels[0]):
                lowest = exact_blocks.lowest_unit(b, self.bins, field, level, 1)
                magic = exact_blocks.units(b, self.bins, lowest, level, 1)
                sums, left = exact_blocks.add_up(b, [splat(b, m, lanes) for m in magic], vectors, lanes)
                flags = ir.IntType(lanes)
                # No lane has a rest: every integer is exact. Sums and M * taken wrap modulo 2^64 alike, and their
                # difference is below 2^63 in magnitude, so it is the exact sum.
                with b.if_then(b.icmp_unsigned("==", b.bitcast(left, flags), flags(0)), likely=True):
                    own = [
                        b.sub(_reduced(b, "add", s, lanes), b.mul(m, taken)) for s, m in zip(sums, magic, strict=True)
                    ]
                    self.totals.add(I64(0), exact_blocks.joined(b, own), lowest, _TABLES)
                    b.store(I64(1), done)
        with b.if_then(b.icmp_unsigned("==", b.load(done, typ=I64), I64(0)), likely=False):
            otherwise()

    def _bin(self, base: Any, number: Any) -> None:
        """Add a block to the tables of bins."""
        b, tables = self.b, self.tables
        self.totals.open(I64(0), _TABLES)
        whole = b.and_(number, I64(-LANES))
        with count(b, I64(0), whole, LANES) as k:
            tables.add(at(b, base, k, self.memory))
        rest = b.sub(number, whole)
        with b.if_then(b.icmp_signed(">", rest, I64(0))):
            # Zeros of the padding add 0 to bin 0.
            tables.add(tables.padded(at(b, base, whole, self.memory), rest))


def _reduced(b: ir.IRBuilder, how: str, vector: Any, lanes: int) -> Any:
    """The sum of a vector's lanes (``add``), or the largest of them (``umax``)."""
    element = vector.type.element
    name = f"llvm.vector.reduce.{how}.v{lanes}i{element.width}"
    callee = b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(element, [vector.type]), name)
    return b.call(callee, [vector])


class _Across(_Lines):
    """Groups of adjacent lines, one in each lane."""

    def __init__(self, b: ir.IRBuilder, a: dict[str, Any], kernel: Exact, lanes: int) -> None:
        super().__init__(b, a, kernel, lanes, lanes)
        self.lines = Neighbours(b, a, kernel, lanes)
        self.offsets = scratch(b, I64, _ROWS)
        self.column = scratch(b, self.memory, LANES)
        self.fields, self.lowest, self.done = (scratch(b, I64, lanes) for _ in range(3))
        self.sums = [scratch(b, I64, lanes) for _ in range(max(exact_blocks.levels(self.bins)))]

    def build(self, total: ir.Function) -> None:
        """Emit the loop over the groups."""
        b, lines = self.b, self.lines
        length = lines.description.length
        with lines.each():
            base = at(b, self.a["x"], lines.base[0], self.memory)
            with count(b, I64(0), I64(self.lanes)) as lane:
                self.totals.clear(lane)
            with count(b, I64(0), length, _ROWS) as k:
                left = b.sub(length, k)
                self._block(base, k, b.select(b.icmp_signed("<", left, I64(_ROWS)), left, I64(_ROWS)))
            with count(b, I64(0), I64(self.lanes)) as lane:
                place, number = (
                    b.add(first, b.mul(lane, step))
                    for first, step in zip(lines.base[1:], (lines.out_step, lines.line_step), strict=True)
                )
                # A line that two groups have in common gets the same sum and the same stream from both.
                self.finish(lane, place, number, total)

    def _row(self, base: Any, r: Any) -> Any:
        """The address of the group's elements of row r of the block."""
        return at(self.b, base, self.b.load(at(self.b, self.offsets, r, I64), typ=I64), self.memory)

    def _block(self, base: Any, first: Any, rows: Any) -> None:
        """Add up ``rows`` rows of the group, from row ``first`` on."""
        b, lanes, description = self.b, self.lanes, self.lines.description
        with count(b, I64(0), rows) as r:
            # The offsets of the rows are found once, and read by every pass over the block.
            (offset,) = description.place(b.add(first, r), description.k_dims, "k_size", ("k_x",))
            b.store(offset, at(b, self.offsets, r, I64))

        def vectors(take: Callable[[Any], None]) -> None:
            with count(b, I64(0), rows) as r:
                take(self.read(self._row(base, r)))

        # Each lane is a line with units of its own.
        fields = exact_blocks.wide(b, exact_blocks.largest(b, self.bins, vectors, lanes), lanes)
        b.store(fields, self.fields, align=64)
        b.store(ir.Constant(llvm_type("u64", lanes), None), self.done, align=64)
        # A lane that is added up at one level is done; the next level reads all lanes again and takes the others.
        again = scratch(b, I64, 1)
        b.store(I64(1), again)
        for level in exact_blocks.levels(self.bins):
            with b.if_then(b.icmp_unsigned("!=", b.load(again, typ=I64), I64(0))):
                self._add_up(vectors, rows, level, again)
        with b.if_then(b.icmp_unsigned("!=", b.load(again, typ=I64), I64(0)), likely=False):
            self._bin_rest(base, rows)

    def _add_up(self, vectors: Any, rows: Any, level: int, again: Any) -> None:
        """Add up at this level the lanes that are not done and have no rest; set ``again`` if any is left."""
        b, lanes = self.b, self.lanes
        fields = b.load(self.fields, typ=llvm_type("u64", lanes), align=64)
        lowest = exact_blocks.lowest_unit(b, self.bins, fields, level, lanes)
        magic = exact_blocks.units(b, self.bins, lowest, level, lanes)
        sums, left = exact_blocks.add_up(b, magic, vectors, lanes)
        # As for a line alone: the differences are the exact sums. Levels that are not used keep their places unread.
        for m, s, place in zip(magic, sums, self.sums, strict=False):
            b.store(b.sub(s, b.mul(m, splat(b, rows, lanes))), place, align=64)
        b.store(lowest, self.lowest, align=64)
        rest = scratch(b, I64, lanes)
        b.store(b.zext(left, llvm_type("u64", lanes)), rest, align=64)
        b.store(I64(0), again)
        with count(b, I64(0), I64(lanes)) as lane:
            field, unit, done, lost, *own = (
                b.load(at(b, p, lane, I64), typ=I64)
                for p in (self.fields, self.lowest, self.done, rest, *self.sums[:level])
            )
            fine = b.and_(exact_blocks.ordinary(b, self.bins, field), b.icmp_unsigned("==", lost, I64(0)))
            fresh = b.icmp_unsigned("==", done, I64(0))
            with b.if_then(b.and_(fresh, fine), likely=True):
                self.totals.add(lane, exact_blocks.joined(b, own), unit)
                b.store(I64(1), at(b, self.done, lane, I64))
            with b.if_then(b.and_(fresh, b.not_(fine)), likely=False):
                b.store(I64(1), again)

    def _bin_rest(self, base: Any, rows: Any) -> None:
        """Put the lanes that no level could add up into bins."""
        b = self.b
        with count(b, I64(0), I64(self.lanes)) as lane:
            done = b.load(at(b, self.done, lane, I64), typ=I64)
            with b.if_then(b.icmp_unsigned("==", done, I64(0))):
                self._bin(base, rows, lane)

    def _bin(self, base: Any, rows: Any, lane: Any) -> None:
        """Put one lane's elements of a block into its table."""
        b = self.b
        self.totals.open(lane, 1)
        zero = ir.Constant(self.memory, 0 if isinstance(self.memory, ir.IntType) else 0.0)
        with count(b, I64(0), rows, LANES) as r:
            for i in range(LANES):
                b.store(zero, at(b, self.column, I64(i), self.memory))
            left = b.sub(rows, r)
            with count(b, I64(0), b.select(b.icmp_signed("<", left, I64(LANES)), left, I64(LANES))) as i:
                element = b.load(at(b, self._row(base, b.add(r, i)), lane, self.memory), typ=self.memory)
                b.store(element, at(b, self.column, i, self.memory))
            self.tables.add(self.column, lane)
