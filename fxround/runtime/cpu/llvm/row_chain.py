"""Several kernels in one call, a few rows at a time: the loop over ranges of rows, and over stages in a range.

A table says which kernels make up a chain and where the values between them are stored. For each range of rows every
kernel runs on its part. A value between two stages is a buffer of the thread's own with as many rows as a range; a
kernel is passed the address where element 0 would be, so it may touch only the rows of its range. A stage writes its
buffer before a later stage reads it.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir

from fxround.runtime.cpu.llvm.loops import I64, PTR, at, call_address, count, define

# The table: HEADER; the bytes of a row of each value, 0 if the value is stored outside; STAGE for each stage; places.
HEADER: Final = ("rows", "range", "values", "stages")
# lines: whether the kernel reduces lines. unit, width: elements of an item and of a row. a, b, c, d: further arguments
# of the kernel. places: the index, among the places, of the stage's list of operands and then results.
STAGE: Final = ("function", "lines", "unit", "width", "a", "b", "c", "d", "operands", "results", "places")
ARGS: Final = ("table", "bases", "keys", "scratch")


def build_chain(_: None) -> str:
    """The LLVM text of ``chain(begin, end, ARGS...)`` over ranges of rows.

    bases    the address of element 0 of each value, or the offset of its buffer in ``scratch``
    keys     an address for each stage
    scratch  room for an address of each value, for those of a stage's operands and results, and for the buffers
    """
    module = ir.Module("chain")
    b, a = define(module, "chain", [("begin", I64), ("end", I64), *((name, PTR) for name in ARGS)])
    rows, size, values, stages = (_word(b, a["table"], I64(i)) for i in range(len(HEADER)))
    steps, first_stage = I64(len(HEADER)), b.add(values, I64(len(HEADER)))
    places = b.add(first_stage, b.mul(stages, I64(len(STAGE))))
    own = b.ptrtoint(a["scratch"], I64)
    with count(b, a["begin"], a["end"]) as item:
        first = b.mul(item, size)
        end = b.add(first, size)
        last = b.select(b.icmp_signed("<", rows, end), rows, end)
        with count(b, I64(0), values) as i:
            step, base = _word(b, a["table"], b.add(steps, i)), _word(b, a["bases"], i)
            # The address that row 0 would have: row ``first`` is the first of the buffer. An integer, since it may be
            # out of bounds.
            buffer = b.add(base, b.sub(own, b.mul(first, step)))
            outside = b.icmp_signed("==", step, I64(0))
            b.store(b.select(outside, base, buffer), at(b, a["scratch"], i, I64))
        with count(b, I64(0), stages) as s:
            start = b.add(first_stage, b.mul(s, I64(len(STAGE))))
            stage = {name: _word(b, a["table"], b.add(start, I64(i))) for i, name in enumerate(STAGE)}
            listed, used = b.add(places, stage["places"]), b.add(stage["operands"], stage["results"])
            with count(b, I64(0), used) as i:
                place = _word(b, a["table"], b.add(listed, i))
                address = _word(b, a["scratch"], place)
                b.store(address, at(b, a["scratch"], b.add(values, i), I64))
            _call(b, a, stage, _word(b, a["keys"], s), values, first, last)
    b.ret_void()
    return str(module)


def _call(b: ir.IRBuilder, a: dict[str, Any], stage: dict[str, Any], key: Any, at_: Any, first: Any, last: Any) -> None:
    """Call one stage for the rows first ... last.

    The addresses of its operands and then of its results are in scratch from number ``at_`` on.
    """
    unit, width = stage["unit"], stage["width"]
    # A range begins at a multiple of 64 rows and so at a whole item, provided that 64 is a multiple of ``unit``.
    begin = b.sdiv(b.mul(first, width), unit)
    end = b.sdiv(b.add(b.mul(last, width), b.sub(unit, I64(1))), unit)
    operands = at(b, a["scratch"], at_, I64)
    results = at(b, operands, stage["operands"], I64)
    with b.if_else(b.icmp_signed("!=", stage["lines"], I64(0))) as (lines, elements):
        with lines:
            x, out = _word(b, operands, I64(0)), _word(b, results, I64(0))
            call_address(b, stage["function"], [begin, end, stage["a"], x, out, key])
        with elements:
            total, dims, sizes, strides = (stage[name] for name in "abcd")
            sources, targets = b.ptrtoint(operands, I64), b.ptrtoint(results, I64)
            call_address(b, stage["function"], [begin, end, total, dims, sizes, sources, strides, targets, key])


def _word(b: ir.IRBuilder, base: Any, index: Any) -> Any:
    return b.load(at(b, base, index, I64), typ=I64)
