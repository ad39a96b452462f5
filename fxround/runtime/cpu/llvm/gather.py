"""Gathers along the last dimension: elements that indices choose, moved as integers of their size.

Item i is piece i mod ``pieces`` of row i div ``pieces`` of the indices. Eight indices are compared with the size at
once, and no element is read before its index is known to be one.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir

from fxround.runtime.cpu.llvm.loops import I32, I64, PTR, Carried, at, count, define, with_sizes
from fxround.runtime.cpu.llvm.render import splat

# inner: the indices of a row. size: the elements of a row of the operand. leading: the number of leading dimensions.
HEADER: Final = ("inner", "pieces", "size", "leading")
# Of each leading dimension, the last one first: its size, and its steps in the operand and in the indices.
DIMENSION: Final = ("size", "step", "index_step")
# How many indices a piece has, and how many are compared by one instruction.
PIECE: Final = 1 << 12
_TESTED: Final = 8


def build_gather(itemsize: int) -> str:
    """The LLVM text of ``gather(begin, end, layout, x, index, outside, out)`` for elements of ``itemsize`` bytes.

    layout      HEADER, then DIMENSION for each leading dimension; steps in elements
    outside     an i32 that is set to 1 if an index is none of the operand's: the result is then not complete
    """
    module = ir.Module("gather")
    names = ("layout", "x", "index", "outside", "out")
    b, a = define(module, "gather", [("begin", I64), ("end", I64), *((name, PTR) for name in names)])
    a = with_sizes(b, a, HEADER)
    element = ir.IntType(8 * itemsize)
    carried = Carried(b, [I64(0)] * 3)
    with count(b, a["begin"], a["end"]) as item:
        row = b.udiv(item, a["pieces"])
        first = b.mul(b.sub(item, b.mul(row, a["pieces"])), I64(PIECE))
        carried.store([row, I64(0), I64(0)])
        with count(b, I64(0), a["leading"]) as d:
            place = b.add(I64(len(HEADER)), b.mul(d, I64(len(DIMENSION))))
            places = [b.add(place, I64(i)) for i in range(len(DIMENSION))]
            size, step, index_step = (b.load(at(b, a["layout"], p, I64), typ=I64) for p in places)
            rest, x_offset, index_offset = carried.load()
            after = b.udiv(rest, size)
            here = b.sub(rest, b.mul(after, size))
            carried.store([after, b.add(x_offset, b.mul(here, step)), b.add(index_offset, b.mul(here, index_step))])
        _, x_offset, index_offset = carried.load()
        x, index = at(b, a["x"], x_offset, element), at(b, a["index"], index_offset, I64)
        out = at(b, a["out"], b.mul(row, a["inner"]), element)
        stop = b.add(first, I64(PIECE))
        stop = b.select(b.icmp_signed("<", stop, a["inner"]), stop, a["inner"])
        whole = b.add(first, b.and_(b.sub(stop, first), I64(-_TESTED)))
        for begin, end, lanes in ((first, whole, _TESTED), (whole, stop, 1)):
            with count(b, begin, end, lanes) as i:
                _move(b, a, x, index, out, i, lanes, element)
    b.ret_void()
    return str(module)


def _move(b: ir.IRBuilder, a: dict[str, Any], x: Any, index: Any, out: Any, i: Any, lanes: int, element: Any) -> None:
    """Move the elements for ``lanes`` indices from i on, or note that one of the indices is outside."""
    kind = I64 if lanes == 1 else ir.VectorType(I64, lanes)
    indices = b.load(at(b, index, i, I64), typ=kind, align=8)
    # As an unsigned number, a negative index is above every size.
    outside = b.icmp_unsigned(">=", indices, splat(b, a["size"], lanes))
    if lanes > 1:
        flags = ir.IntType(lanes)
        outside = b.icmp_unsigned("!=", b.bitcast(outside, flags), flags(0))
    with b.if_else(outside) as (refused, moved):
        with refused:
            b.store(I32(1), a["outside"])
        with moved:
            for lane in range(lanes):
                here = b.add(i, I64(lane))
                chosen = b.load(at(b, index, here, I64), typ=I64)
                b.store(b.load(at(b, x, chosen, element), typ=element), at(b, out, here, element))
