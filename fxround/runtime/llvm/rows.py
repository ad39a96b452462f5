"""Chains along rows, several rows side by side: Scan, and Reduce under the order ``sequential``, with inner = 1.

What is true here. The lanes are neighbouring rows. A square block of elements is turned in registers, so that its
columns are the steps; a scan's results are turned back.

Why it is safe. A lane is a row's own chain. The last group of rows reaches back over its neighbour's, and
finds the same.

    before   x.t().contiguous(), then a walk down the columns
    after    16 rows x 16 columns at a time, in registers
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from fxround.kernel import Reduce, Scan
from fxround.numerics.scalar import const
from fxround.runtime.llvm.loops import (
    I64,
    MEMORY,
    Carried,
    at,
    count,
    define,
    iota,
    load_vector,
    scratch,
    store_vector,
    transpose,
)
from fxround.runtime.llvm.reduce import ARGS
from fxround.runtime.llvm.render import constant, emit, splat
from fxround.runtime.llvm.streams import advance, load_key, start


def row_lanes(kernel: Reduce | Scan) -> int:
    """Rows side by side: one AVX-512 register of accumulators."""
    return 16 if kernel.accumulator == "f32" else 8


def build_rows(kernel: Reduce | Scan) -> str:
    """``reduce(begin, end, length, rows, x, out, key)`` over groups of rows; there are at least as many as lanes."""
    module = ir.Module("rows")
    b, a = define(module, "reduce", ARGS)
    lanes, storage = row_lanes(kernel), kernel.loads[0]
    key = load_key(b, a["key"])
    column = scratch(b, MEMORY[storage], lanes)
    ends = scratch(b, MEMORY[kernel.result], lanes)
    with count(b, a["begin"], a["end"]) as item:
        wanted, last = b.mul(item, I64(lanes)), b.sub(a["inner"], I64(lanes))
        first = b.select(b.icmp_signed("<", last, wanted), last, wanted)
        state = start(b, b.add(splat(b, first, lanes), iota(lanes)), key, lanes, kernel.draws or kernel.finish_draws)
        carried = Carried(b, [constant(const(kernel.accumulator, kernel.first), lanes), state])

        def place(base: Any, type_: Any, lane: int, k: Any, first: Any = first) -> Any:
            return at(b, base, b.add(b.mul(b.add(first, I64(lane)), a["length"]), k), type_)

        def step(x: Any, carried: Carried = carried) -> Any:
            acc, state = carried.load()
            bits, state = advance(b, state, lanes, kernel.draws)
            (acc,) = emit(kernel.step, b, [acc, x, bits], lanes)
            carried.store([acc, state])
            return _finished(b, kernel, carried, lanes) if isinstance(kernel, Scan) else None

        whole = b.and_(a["length"], I64(-lanes))
        with count(b, I64(0), whole, lanes) as k:
            rows = [load_vector(b, place(a["x"], MEMORY[storage], r, k), storage, lanes) for r in range(lanes)]
            results = [step(x) for x in transpose(b, rows)]
            if isinstance(kernel, Scan):
                for r, value in enumerate(transpose(b, results)):
                    store_vector(b, value, place(a["out"], MEMORY[kernel.result], r, k), kernel.result, lanes)
        with count(b, whole, a["length"]) as k:
            for r in range(lanes):
                element = b.load(place(a["x"], MEMORY[storage], r, k), typ=MEMORY[storage])
                b.store(element, at(b, column, I64(r), MEMORY[storage]))
            result = step(load_vector(b, column, storage, lanes))
            if isinstance(kernel, Scan):
                store_vector(b, result, ends, kernel.result, lanes)
                for r in range(lanes):
                    element = b.load(at(b, ends, I64(r), MEMORY[kernel.result]), typ=MEMORY[kernel.result])
                    b.store(element, place(a["out"], MEMORY[kernel.result], r, k))
        if isinstance(kernel, Reduce):
            here = at(b, a["out"], first, MEMORY[kernel.result])
            store_vector(b, _finished(b, kernel, carried, lanes), here, kernel.result, lanes)
    b.ret_void()
    return str(module)


def _finished(b: ir.IRBuilder, kernel: Reduce | Scan, carried: Carried, lanes: int) -> Any:
    """The result of the present accumulators."""
    acc, state = carried.load()
    bits, state = advance(b, state, lanes, kernel.finish_draws)
    carried.store([acc, state])
    (result,) = emit(kernel.finish, b, [acc, bits], lanes)
    return result
