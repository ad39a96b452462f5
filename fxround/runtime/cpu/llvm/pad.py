"""Padding: rows of zeros, and rows of an operand between zeros, written once.

A row of the result is a row of the operand if every one of its leading indices, less the zeros before, is an index of
the operand. Sizes of rows and steps are in bytes, so one function serves every dtype.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir

from fxround.runtime.cpu.llvm.loops import I8, I64, PTR, Carried, at, count, declared, define, with_sizes

# leading: the number of leading dimensions. left, middle, right: the bytes of a row before, of, and after the operand.
HEADER: Final = ("leading", "left", "middle", "right")
# Of each leading dimension, the last one first: its size, the zeros before, the operand's size and its step in bytes.
DIMENSION: Final = ("size", "before", "inner", "step")
_I1: Final = ir.IntType(1)


def build_pad(_: None) -> str:
    """The LLVM text of ``pad(begin, end, layout, x, out)`` over rows of a row-major result.

    layout    HEADER, then DIMENSION for each leading dimension
    """
    module = ir.Module("pad")
    names = [("begin", I64), ("end", I64), ("layout", PTR), ("x", PTR), ("out", PTR)]
    b, a = define(module, "pad", names)
    a = with_sizes(b, a, HEADER)
    row = b.add(a["left"], b.add(a["middle"], a["right"]))
    carried = Carried(b, [I64(0), I64(0), _I1(1)])
    with count(b, a["begin"], a["end"]) as r:
        carried.store([r, I64(0), _I1(1)])
        with count(b, I64(0), a["leading"]) as d:
            first = b.add(I64(len(HEADER)), b.mul(d, I64(len(DIMENSION))))
            places = [b.add(first, I64(i)) for i in range(len(DIMENSION))]
            size, before, inner, step = (b.load(at(b, a["layout"], place, I64), typ=I64) for place in places)
            rest, offset, held = carried.load()
            index = b.sub(b.srem(rest, size), before)
            held = b.and_(held, b.icmp_unsigned("<", index, inner))
            carried.store([b.sdiv(rest, size), b.add(offset, b.mul(index, step)), held])
        _, offset, held = carried.load()
        target = at(b, a["out"], b.mul(r, row), I8)
        with b.if_else(held) as (copied, cleared):
            with copied:
                _clear(b, target, a["left"])
                middle = at(b, target, a["left"], I8)
                signature = ir.FunctionType(ir.VoidType(), [PTR, PTR, I64, _I1])
                copy = declared(b, "llvm.memcpy.p0.p0.i64", signature)
                b.call(copy, [middle, at(b, a["x"], offset, I8), a["middle"], _I1(0)])
                _clear(b, at(b, middle, a["middle"], I8), a["right"])
            with cleared:
                _clear(b, target, row)
    b.ret_void()
    return str(module)


def _clear(b: ir.IRBuilder, target: Any, size: Any) -> None:
    signature = ir.FunctionType(ir.VoidType(), [PTR, I8, I64, _I1])
    b.call(declared(b, "llvm.memset.p0.i64", signature), [target, I8(0), size, _I1(0)])
