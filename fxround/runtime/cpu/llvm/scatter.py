"""The Scatter shape as LLVM: each destination adds up its own contributions, in the order of their source.

Contributions are listed by destination row: those of row r are ``order[starts[r]:starts[r + 1]]``, each the number of a
row of ``inner`` source elements. A vector is adjacent elements of one destination row. A destination belongs to one
thread and is written once; no operation is atomic, so timing cannot change the order of the additions.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from fxround.kernels.kinds import Scatter
from fxround.runtime.cpu.llvm.loops import (
    I64,
    MEMORY,
    PTR,
    Carried,
    at,
    copy_elements,
    count,
    define,
    iota,
    load_vector,
    scratch,
    store_vector,
)
from fxround.runtime.cpu.llvm.render import emit, splat
from fxround.runtime.cpu.llvm.streams import Streams, advance

ARGS = [("begin", I64), ("end", I64), ("inner", I64)]
POINTERS = [(name, PTR) for name in ("starts", "order", "self", "x", "out", "key")]


def lanes_for(kernel: Scatter, inner: int) -> int:
    """One register of accumulators, or a single lane if a destination row is a single element."""
    return 1 if inner == 1 else 16 if kernel.accumulator == "f32" else 8


def build_scatter(variant: tuple[Scatter, int]) -> str:
    """The LLVM text of ``scatter(begin, end, inner, starts, order, self, x, out, key)`` over vectors of elements.

    Item i is vector i mod v of destination row i div v, with v = ceil(inner / lanes).
    """
    kernel, lanes = variant
    module = ir.Module("scatter")
    b, a = define(module, "scatter", [*ARGS, *POINTERS])
    (storage,), streams = kernel.loads, Streams.load(b, a["key"], kernel.parts)
    memory, stored = MEMORY[storage], MEMORY[kernel.result]
    buffer, last = scratch(b, memory, lanes), scratch(b, stored, lanes)
    vectors = b.sdiv(b.add(a["inner"], I64(lanes - 1)), I64(lanes))
    with count(b, a["begin"], a["end"]) as item:
        row = b.sdiv(item, vectors)
        first = b.mul(b.sub(item, b.mul(row, vectors)), I64(lanes))
        left = b.sub(a["inner"], first)
        short = b.icmp_signed("<", left, I64(lanes))
        index = b.add(b.mul(row, a["inner"]), first)

        def fetch(base: Any, offset: Any, short: Any = short, left: Any = left) -> Any:
            here = at(b, base, offset, memory)
            with b.if_then(short):
                copy_elements(b, buffer, here, left, memory)
            # The last vector of a row is read from a copy: a load in place would go beyond the row, perhaps beyond the
            # tensor.
            return load_vector(b, b.select(short, buffer, here), storage, lanes)

        (value,) = emit(kernel.lift, b, [fetch(a["self"], index)], lanes)
        elements = b.add(splat(b, index, lanes), iota(lanes))
        carried = Carried(b, [value, streams.start(b, streams.number(b, elements, lanes), lanes, kernel.draws)])
        stop = b.load(at(b, a["starts"], b.add(row, I64(1)), I64), typ=I64)
        with count(b, b.load(at(b, a["starts"], row, I64), typ=I64), stop) as c:
            source = b.load(at(b, a["order"], c, I64), typ=I64)
            x = fetch(a["x"], b.add(b.mul(source, a["inner"]), first))
            acc, state = carried.load()
            bits, state = advance(b, state, lanes, kernel.draws)
            (acc,) = emit(kernel.step, b, [acc, x, bits], lanes)
            carried.store([acc, state])
        acc, state = carried.load()
        bits, _ = advance(b, state, lanes, draws=False)
        (result,) = emit(kernel.finish, b, [acc, bits], lanes)
        here = at(b, a["out"], index, stored)
        store_vector(b, result, b.select(short, last, here), kernel.result, lanes)
        with b.if_then(short):
            copy_elements(b, here, last, left, stored)
    b.ret_void()
    return str(module)
