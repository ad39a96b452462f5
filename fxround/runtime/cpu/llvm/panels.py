"""Copies of a line whose elements are not adjacent along k, one panel at a time.

``panels`` copies the elements of one line, in the order of k, into a buffer of ``PANEL`` elements, and yields each time
the buffer holds as many as fit. It takes blocks of the two innermost dimensions of k and walks each block by its
smaller step, so that memory is read in runs. The whole operand is never copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from llvmlite import ir

from fxround.runtime.cpu.llvm.lines import Description
from fxround.runtime.cpu.llvm.loops import I64, PTR, at, count, least
from fxround.runtime.cpu.llvm.render import bytes_of

# Elements of a panel, chosen so that a panel stays in the second-level cache.
PANEL: Final = 1 << 14


@contextmanager
def panels(b: ir.IRBuilder, d: Description, base: Any, memory: Any, buffer: Any, filled: Any) -> Iterator[Any]:
    """Loop over the panels of the line at ``base``; yields the number of elements in the buffer.

    ``filled()`` gives the place in the buffer, in elements, at which the next panel starts.
    """
    run, step = d.run, d.k_x
    two = b.icmp_signed(">", d.k_dims, I64(1))
    before = b.select(two, b.sub(d.k_dims, I64(2)), I64(0))
    columns = b.select(two, d.column("k_size", before), I64(1))
    column_step = b.select(two, d.column("k_x", before), I64(0))
    area = b.mul(columns, run)
    piece = least(b, run, I64(PANEL))
    wide = least(b, columns, b.sdiv(I64(PANEL), _most(b, run, I64(1))))
    wide = _most(b, wide, I64(1))
    with count(b, I64(0), d.length, _most(b, area, I64(1))) as k:
        outer = b.select(two, before, I64(0))
        (corner,) = d.place(b.sdiv(k, _most(b, area, I64(1))), outer, "k_size", ("k_x",))
        # A panel is ``high`` columns of ``low`` elements. Either the run fits, and panels hold whole runs; or it does
        # not, then ``wide`` is 1 and a panel is a piece of one run. In both cases its elements are consecutive in k.
        with count(b, I64(0), columns, wide) as c, count(b, I64(0), run, piece) as r:
            high, low = least(b, wide, b.sub(columns, c)), least(b, piece, b.sub(run, r))
            offset = b.add(b.add(corner, b.mul(c, column_step)), b.mul(r, step))
            source = at(b, base, offset, memory)
            _copy_block(b, (source, at(b, buffer, filled(), memory)), (high, column_step), (low, step), memory)
            yield b.mul(high, low)


def _copy_block(b: ir.IRBuilder, ends: Any, columns: Any, run: Any, memory: Any) -> None:
    """Set target[j * low + i] = source[j * column_step + i * step], with the smaller step in the inner loop."""
    source, target = ends
    (high, column_step), (low, step) = columns, run
    with b.if_else(b.icmp_signed("==", step, I64(1))) as (dense, strided):
        with dense:
            size = b.mul(low, I64(_bytes(memory)))
            kind = ir.FunctionType(ir.VoidType(), [PTR, PTR, I64, ir.IntType(1)])
            name = "llvm.memcpy.p0.p0.i64"
            copy = b.module.globals.get(name) or ir.Function(b.module, kind, name)
            with count(b, I64(0), high) as j:
                there, here = at(b, target, b.mul(j, low), memory), at(b, source, b.mul(j, column_step), memory)
                b.call(copy, [there, here, size, ir.IntType(1)(0)])
        with strided:
            inner = b.or_(b.icmp_signed("<", step, column_step), b.icmp_signed("==", high, I64(1)))
            outer_size, outer_x, outer_out = (
                b.select(inner, y, z) for y, z in ((high, low), (column_step, step), (low, I64(1)))
            )
            size, x, out = (b.select(inner, z, y) for y, z in ((high, low), (column_step, step), (low, I64(1))))
            with count(b, I64(0), outer_size) as j, count(b, I64(0), size) as i:
                here = at(b, source, b.add(b.mul(j, outer_x), b.mul(i, x)), memory)
                there = at(b, target, b.add(b.mul(j, outer_out), b.mul(i, out)), memory)
                b.store(b.load(here, typ=memory), there)


def _bytes(memory: Any) -> int:
    return memory.width // 8 if isinstance(memory, ir.IntType) else bytes_of("f32" if str(memory) == "float" else "f64")


def _most(b: ir.IRBuilder, x: Any, y: Any) -> Any:
    return b.select(b.icmp_signed("<", x, y), y, x)
