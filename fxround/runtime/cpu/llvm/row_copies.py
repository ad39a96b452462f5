"""Copies of rows: as many bytes of each row, from rows at a constant distance to rows at another one."""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir

from fxround.runtime.cpu.llvm.loops import I8, I64, PTR, at, count, define, with_sizes

SIZES: Final = ("bytes", "source_step", "target_step")
# The bytes that are copied at once, widest first.
_WIDTHS: Final = (64, 16, 4, 1)


def build_rows(_: None) -> str:
    """The LLVM text of ``rows(begin, end, layout, source, target, key)``; ``layout`` holds SIZES as int64.

    Row i is at i * source_step bytes, and goes to i * target_step bytes. The key is not read.
    """
    module = ir.Module("rows")
    names = ("layout", "source", "target", "key")
    b, a = define(module, "rows", [("begin", I64), ("end", I64), *((name, PTR) for name in names)])
    a = with_sizes(b, a, SIZES)
    with count(b, a["begin"], a["end"]) as row:
        source = at(b, a["source"], b.mul(row, a["source_step"]), I8)
        target = at(b, a["target"], b.mul(row, a["target_step"]), I8)
        done: Any = I64(0)
        for width in _WIDTHS:
            end = b.add(done, b.mul(b.sdiv(b.sub(a["bytes"], done), I64(width)), I64(width)))
            with count(b, done, end, width) as i:
                wide = ir.VectorType(I8, width) if width > 1 else I8
                b.store(b.load(at(b, source, i, I8), typ=wide, align=1), at(b, target, i, I8), align=1)
            done = end
    b.ret_void()
    return str(module)
