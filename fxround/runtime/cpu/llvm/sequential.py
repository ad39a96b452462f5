"""Chains along lines, several lines together: Scan, and Reduce under the order ``sequential``.

The lanes are lines whose elements are adjacent along k. A square block of elements is transposed in registers, so that
its columns are the steps; the results of a scan are transposed back. A lane is a line's own chain, wherever the line is
stored, so the bits are those of a walk along each line.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from fxround.kernels.kinds import Reduce, Scan
from fxround.runtime.cpu.llvm.engine import Machine
from fxround.runtime.cpu.llvm.lines import ARGS, Scattered
from fxround.runtime.cpu.llvm.loops import I64, Carried, count, define, load_vector, store_vector, transpose
from fxround.runtime.cpu.llvm.reduce import first_of, one_register, step
from fxround.runtime.cpu.llvm.render import emit
from fxround.runtime.cpu.llvm.streams import Streams, advance


def build_rows(variant: tuple[Reduce | Scan, Machine]) -> str:
    """The LLVM text of ``reduce(begin, end, lines, x, out, key)`` over groups of lines.

    k walks adjacent elements within each run.
    """
    kernel, machine = variant
    module = ir.Module("rows")
    b, a = define(module, "reduce", ARGS)
    lanes, storage = one_register(kernel), kernel.loads[0]
    streams = Streams.load(b, a["key"], kernel.parts)
    lines = Scattered(b, a, kernel, lanes)
    run = lines.description.run
    with lines.each():
        numbers = streams.number(b, lines.elements(), lanes)
        state = streams.start(b, numbers, lanes, kernel.draws or kernel.finish_draws)
        carried = Carried(b, [first_of(kernel, lanes), state])

        def take(x: Any, carried: Carried = carried) -> Any:
            carried.store(step(b, kernel, carried.load(), x, lanes, machine))
            return _finished(b, kernel, carried, lanes) if isinstance(kernel, Scan) else None

        with lines.description.runs() as (_, x, out):
            whole = b.and_(run, I64(-lanes))
            with count(b, I64(0), whole, lanes) as k:
                rows = [load_vector(b, lines.x(r, b.add(x, k)), storage, lanes) for r in range(lanes)]
                # Column s is step k + s of every line: the columns are taken in ascending order.
                results = [take(column) for column in transpose(b, rows)]
                if isinstance(kernel, Scan):
                    for r, value in enumerate(transpose(b, results)):
                        store_vector(b, value, lines.out(r, b.add(out, k)), kernel.result, lanes)
            with count(b, whole, run) as k:
                result = take(lines.load(b.add(x, k)))
                if isinstance(kernel, Scan):
                    lines.store(result, b.add(out, k))
        if isinstance(kernel, Reduce):
            lines.store(_finished(b, kernel, carried, lanes), I64(0))
    b.ret_void()
    return str(module)


def _finished(b: ir.IRBuilder, kernel: Reduce | Scan, carried: Carried, lanes: int) -> Any:
    """Draw for the store and round the present accumulators to the results."""
    acc, state = carried.load()
    bits, state = advance(b, state, lanes, kernel.finish_draws)
    carried.store([acc, state])
    (result,) = emit(kernel.finish, b, [acc, bits], lanes)
    return result
