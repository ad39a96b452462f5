"""Packing: the operands of a contraction, lifted to the accumulator's type, in the order in which a tile reads them.

A row of the first operand is copied along k, a panel of the second one step by step, ``width`` columns each. How the
columns of a vector are stored decides only how they are loaded: adjacent, in two runs (windows of an image that meet
the end of a line), adjacent along k (a transposed matrix), or anywhere. The same scratch takes one block of one panel
after the other; no window of an image is copied as a whole. A lane without a column is not loaded: it is zero.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from fxround.numerics.formats.storage import ELEMENT_OF
from fxround.runtime.cpu.llvm.loops import (
    I32,
    I64,
    MEMORY,
    PTR,
    at,
    bytes_in,
    count,
    declared,
    iota,
    load_vector,
    masked_load,
    name_of,
    transpose,
)
from fxround.runtime.cpu.llvm.render import llvm_type, splat
from fxround.runtime.cpu.llvm.tile import Block, Item

BOOL = ir.IntType(1)


def pack_left(item: Item, block: Block) -> None:
    """Pack the item's rows of the first operand, ``pitch`` accumulators apart."""
    b, a = item.b, item.a
    # Vectors cover whole multiples of the lanes, scalars the rest: nothing after a row's last element is loaded.
    whole = b.and_(block.steps, I64(-item.lanes))
    along = b.icmp_signed("==", a["a_k"], I64(1))
    across = b.and_(b.icmp_signed("==", a["a_row"], I64(1)), b.icmp_signed(">", whole, I64(0)))
    with b.if_else(along) as (vectors, others):
        with vectors, count(b, item.first_row, item.last_row) as row:
            with count(b, I64(0), whole, item.lanes) as i:
                value = item.steps.load_lifted(0, _left(item, row, b.add(block.k, i)), item.lanes)
                b.store(value, _packed(item, row, i), align=4)
            _copy(item, block, row, whole)
        with others, b.if_else(across) as (turned, scalars):
            with turned:
                _turn_left(item, block, whole)
            with scalars, count(b, item.first_row, item.last_row) as row:
                _copy(item, block, row, I64(0))


def _left(item: Item, row: Any, k: Any) -> Any:
    """The address of element (row, k) of the first operand."""
    b, a = item.b, item.a
    offset = b.add(item.a_base, b.add(b.mul(row, a["a_row"]), b.mul(k, a["a_k"])))
    return at(b, a["a"], offset, MEMORY[item.kernel.loads[0]])


def _packed(item: Item, row: Any, step: Any) -> Any:
    """The address of a step of a packed row."""
    b = item.b
    return at(b, item.left, b.add(b.mul(b.sub(row, item.first_row), I64(item.variant.pitch)), step), item.value)


def _copy(item: Item, block: Block, row: Any, first: Any) -> None:
    """Pack the steps of a row from ``first`` on, one by one."""
    with count(item.b, first, block.steps) as i:
        item.b.store(item.steps.load_lifted(0, _left(item, row, item.b.add(block.k, i)), 1), _packed(item, row, i))


def _turn_left(item: Item, block: Block, whole: Any) -> None:
    """Pack square blocks of a transposed matrix, transposed in registers; what is left of rows and steps one by one."""
    b, lanes = item.b, item.lanes
    # A vector holds one step of ``lanes`` rows, so only whole groups of rows may be loaded this way.
    rows = b.and_(b.sub(item.last_row, item.first_row), I64(-lanes))
    last = b.add(item.first_row, rows)
    with count(b, item.first_row, last, lanes) as row:
        with count(b, I64(0), whole, lanes) as i:
            places = [_left(item, row, b.add(block.k, b.add(i, I64(s)))) for s in range(lanes)]
            columns = [load_vector(b, place, item.kernel.loads[0], lanes) for place in places]
            for r, value in enumerate(transpose(b, columns)):
                b.store(item.steps.lift(0, value, lanes), _packed(item, b.add(row, I64(r)), i), align=4)
        for r in range(lanes):
            _copy(item, block, b.add(row, I64(r)), whole)
    with count(b, last, item.last_row) as row:
        _copy(item, block, row, I64(0))


def pack_right(item: Item, block: Block) -> None:
    """Pack the steps k ... k + steps of the panel's columns."""
    b = item.b
    for vector in range(item.variant.vectors):
        # Every way stores the same lifted elements; they are tried from the quickest to the most general.
        columns = Columns(item, vector)
        # ``along`` needs all lanes to have a column, since it loads whole vectors of each of them.
        with b.if_else(columns.adjacent) as (side_by_side, others):
            with side_by_side:
                _each_step(item, block, vector, columns.read_adjacent)
            with others, b.if_else(b.and_(columns.whole, _runs_along_k(item, block))) as (along, scattered):
                with along:
                    _turn_right(item, block, vector, columns)
                with scattered, b.if_else(columns.two_runs) as (runs, anywhere):
                    with runs:
                        _each_step(item, block, vector, columns.read_runs)
                    with anywhere:
                        _each_step(item, block, vector, columns.read_anywhere)


class Columns:
    """The offsets of one vector's columns, which of its lanes have a column, and which ways of loading fit."""

    def __init__(self, item: Item, vector: int) -> None:
        self.item, b, a, lanes = item, item.b, item.a, item.lanes
        column = b.add(item.column, I64(vector * lanes))
        # ``lower``: the lanes whose offset is the first one's plus the lane, ``upper``: those of the run that ends at
        # the last column. A lane is loaded by a run only at its own offset, so both runs are right whatever b_n holds.
        left = b.sub(a["columns"], column)
        self.whole = b.icmp_signed(">=", left, I64(lanes))
        some = b.icmp_signed(">", left, I64(0))
        # A vector without any column looks up column 0 and loads nothing.
        first = b.select(some, column, I64(0))
        last = b.select(self.whole, b.add(column, I64(lanes - 1)), b.select(some, b.sub(a["columns"], I64(1)), I64(0)))
        self.near, self.far = (b.load(at(b, a["b_n"], i, I64), typ=I64) for i in (first, last))
        lane = iota(lanes)
        self.valid = b.icmp_signed("<", lane, splat(b, left, lanes))
        self.offsets = masked_load(b, at(b, a["b_n"], first, I64), I64, self.valid, lanes)
        # The offset that lane 0 has in the run that ends at the last column, which is lane last - first.
        self.begin = b.sub(self.far, b.sub(last, first))
        upper = b.icmp_signed("==", self.offsets, b.add(splat(b, self.begin, lanes), lane))
        lower = b.icmp_signed("==", self.offsets, b.add(splat(b, self.near, lanes), lane))
        self.lower, self.upper = b.and_(lower, self.valid), b.and_(b.and_(upper, b.not_(lower)), self.valid)
        self.adjacent = b.and_(self.whole, _all(b, lower, lanes))
        self.two_runs = _all(b, b.or_(b.or_(lower, upper), b.not_(self.valid)), lanes)

    def read_adjacent(self, line: Any) -> Any:
        """All lanes by one load."""
        item = self.item
        return load_vector(item.b, self._at(line, self.near), item.kernel.loads[1], item.lanes)

    def read_runs(self, line: Any) -> Any:
        """Two masked loads, each of the lanes of its run."""
        item, memory = self.item, MEMORY[self.item.kernel.loads[1]]
        # ``begin`` may be before the tensor: only the lanes of ``upper`` are loaded from there.
        low = masked_load(item.b, self._at(line, self.near), memory, self.lower, item.lanes)
        high = masked_load(item.b, self._at(line, self.begin), memory, self.upper, item.lanes, low)
        return self._element(high)

    def read_anywhere(self, line: Any) -> Any:
        """Each lane from its own offset."""
        item, memory = self.item, MEMORY[self.item.kernel.loads[1]]
        pointers = item.b.gep(line, [self.offsets], source_etype=memory)
        pointers.type = ir.VectorType(PTR, item.lanes)
        return self._element(gather(item.b, pointers, memory, self.valid, item.lanes))

    def _at(self, line: Any, offset: Any) -> Any:
        return at(self.item.b, line, offset, MEMORY[self.item.kernel.loads[1]])

    def _element(self, value: Any) -> Any:
        """Zero-extend 16-bit codes to the IR's u32."""
        wide = ELEMENT_OF[self.item.kernel.loads[1]] == "u32"
        return self.item.b.zext(value, llvm_type("u32", self.item.lanes)) if wide else value


def _each_step(item: Item, block: Block, vector: int, read: Any) -> None:
    """Pack a vector of columns step by step."""
    b = item.b
    with count(b, I64(0), block.steps) as i:
        b.store(item.steps.lift(1, read(_line(item, b.add(block.k, i))), item.lanes), item.packed(i, vector), align=4)


def _line(item: Item, k: Any) -> Any:
    """The address of row k of the batch's second operand; columns are offsets from it."""
    b, a = item.b, item.a
    step = b.load(at(b, a["b_k"], k, I64), typ=I64)
    return at(b, a["b"], b.add(item.b_base, step), MEMORY[item.kernel.loads[1]])


def _runs_along_k(item: Item, block: Block) -> Any:
    """Whether the block's steps are adjacent in memory: a whole vector of them or more, with consecutive offsets."""
    b, a = item.b, item.a
    # Offsets along k never decrease, and rise strictly unless an operand is repeated along k: if the last is steps - 1
    # above the first, all are consecutive.
    many = b.icmp_signed(">=", block.steps, I64(item.lanes))
    ends = b.select(many, b.add(block.k, b.sub(block.steps, I64(1))), I64(0))
    near, far = (b.load(at(b, a["b_k"], i, I64), typ=I64) for i in (b.select(many, block.k, I64(0)), ends))
    return b.and_(many, b.icmp_signed("==", b.sub(far, near), b.sub(block.steps, I64(1))))


def _turn_right(item: Item, block: Block, vector: int, columns: Columns) -> None:
    """Pack square blocks by transposing in registers; the steps that are left by their offsets."""
    b, lanes = item.b, item.lanes
    whole = b.and_(block.steps, I64(-lanes))
    offsets = [b.extract_element(columns.offsets, I32(n)) for n in range(lanes)]
    memory = MEMORY[item.kernel.loads[1]]
    with count(b, I64(0), whole, lanes) as i:
        line = _line(item, b.add(block.k, i))
        # Row n: ``lanes`` consecutive steps of column n. Transposed, row s is step s of all columns.
        rows = [load_vector(b, at(b, line, offset, memory), item.kernel.loads[1], lanes) for offset in offsets]
        for step, value in enumerate(transpose(b, rows)):
            b.store(item.steps.lift(1, value, lanes), item.packed(b.add(i, I64(step)), vector), align=4)
    with count(b, whole, block.steps) as i:
        value = columns.read_anywhere(_line(item, b.add(block.k, i)))
        b.store(item.steps.lift(1, value, lanes), item.packed(i, vector), align=4)


def _all(b: ir.IRBuilder, mask: Any, lanes: int) -> Any:
    """Whether every lane of a mask is set."""
    whole = ir.IntType(lanes)
    return b.icmp_unsigned("==", b.bitcast(mask, whole), whole(-1))


def gather(b: ir.IRBuilder, pointers: Any, memory: Any, mask: Any, lanes: int) -> Any:
    """The elements at the pointers under the mask; the other lanes are not read, and are zero."""
    kind = ir.VectorType(memory, lanes)
    name = f"llvm.masked.gather.v{lanes}{name_of(memory)}.v{lanes}p0"
    signature = ir.FunctionType(kind, [pointers.type, I32, mask.type, kind])
    zeros = ir.Constant(kind, [memory(0)] * lanes)
    return b.call(declared(b, name, signature), [pointers, I32(bytes_in(memory)), mask, zeros])
