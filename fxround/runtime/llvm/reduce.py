"""The Reduce and Scan shapes as LLVM: a result a row, or a vector of results side by side.

What is true here. The operand is (outer, length, inner), row-major. ``along`` serves inner = 1: the chains of an
order are the lanes of a vector. ``across`` serves the rest: the lanes are neighbouring results, the
chains an array of vectors. Both walk k upwards and combine the chains by the formula of ``orders``.

Why it is safe. A lane is a result's own chain in either: no lane ever mixes with another but by
``combine``, where the formula says so.

    before   a tree that depends on the vector width and on how the threads were dealt
    after    Order's formula, once along and once across
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from llvmlite import ir

from fxround.kernel import Reduce, Scan
from fxround.numerics.scalar import const
from fxround.runtime.llvm.loops import (
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
from fxround.runtime.llvm.render import constant, emit, llvm_type, splat
from fxround.runtime.llvm.streams import advance, load_key, start

# Registers side by side where rows are long.
WIDE: Final = 8
ARGS = [("begin", I64), ("end", I64), ("length", I64), ("inner", I64), ("x", PTR), ("out", PTR), ("key", PTR)]


def across_lanes(kernel: Reduce | Scan, inner: int) -> int:
    """Neighbouring results side by side: one AVX-512 register of accumulators, or several where there are many.

    Several make the walk down the columns read whole runs of memory, and hide the latency of a step.
    """
    one = 16 if kernel.accumulator == "f32" else 8
    return one * WIDE if inner >= one * WIDE else one


def _first(kernel: Reduce | Scan, lanes: int) -> Any:
    return constant(const(kernel.accumulator, kernel.first), lanes)


def build_along(kernel: Reduce) -> str:
    """``reduce(begin, end, length, inner=1, x, out, key)`` over rows begin..end."""
    module = ir.Module("along")
    b, a = define(module, "reduce", ARGS)
    n, storage = kernel.order.chains, kernel.loads[0]
    memory, key = MEMORY[storage], load_key(b, a["key"])
    tail = scratch(b, memory, n)
    with count(b, a["begin"], a["end"]) as row:
        base = at(b, a["x"], b.mul(row, a["length"]), memory)
        elements = b.add(splat(b, b.mul(row, I64(n)), n), iota(n))
        chains = Carried(b, [_first(kernel, n), start(b, elements, key, n, kernel.draws or kernel.finish_draws)])
        whole = b.and_(a["length"], I64(-n))
        with count(b, I64(0), whole, n) as k:
            x = load_vector(b, at(b, base, k, memory), storage, n)
            chains.store(_step(b, kernel, chains.load(), x, n))
        rest = b.sub(a["length"], whole)
        with b.if_then(b.icmp_signed(">", rest, I64(0))):
            copy_elements(b, tail, at(b, base, whole, memory), rest, memory)
            stepped = _step(b, kernel, chains.load(), load_vector(b, tail, storage, n), n)
            active = b.icmp_signed("<", iota(n), splat(b, rest, n))
            chains.store([b.select(active, new, old) for new, old in zip(stepped, chains.load(), strict=True)])
        used = b.select(b.icmp_signed("<", a["length"], I64(n)), a["length"], I64(n))
        acc, state = _combine_lanes(b, kernel, chains.load(), used)
        if n > 1:
            zero = ir.IntType(32)(0)
            acc, state = b.extract_element(acc, zero), b.extract_element(state, zero)
        bits, _ = advance(b, state, 1, kernel.finish_draws)
        (result,) = emit(kernel.finish, b, [acc, bits], 1)
        store_vector(b, result, at(b, a["out"], row, MEMORY[kernel.result]), kernel.result, 1)
    b.ret_void()
    return str(module)


def _step(b: ir.IRBuilder, kernel: Reduce | Scan, chain: list[Any], x: Any, lanes: int) -> list[Any]:
    acc, state = chain
    bits, state = advance(b, state, lanes, kernel.draws)
    (acc,) = emit(kernel.step, b, [acc, x, bits], lanes)
    return [acc, state]


def _combine_lanes(b: ir.IRBuilder, kernel: Reduce, chain: list[Any], used: Any) -> list[Any]:
    n, width = kernel.order.chains, kernel.order.chains // 2
    while width >= 1:
        acc, state = chain
        shifted = [ir.IntType(32)(min(i + width, n - 1)) for i in range(n)]
        other = b.shuffle_vector(acc, acc, ir.Constant(ir.VectorType(ir.IntType(32), n), shifted))
        bits, following = advance(b, state, n, kernel.draws)
        (total,) = emit(kernel.combine, b, [acc, other, bits], n)
        partner = b.icmp_signed("<", b.add(iota(n), splat(b, I64(width), n)), splat(b, used, n))
        active = b.and_(partner, b.icmp_signed("<", iota(n), splat(b, I64(width), n)))
        chain = [b.select(active, total, acc), b.select(active, following, state)]
        width //= 2
    return chain


def build_across(variant: tuple[Reduce, int]) -> str:
    """``reduce(begin, end, length, inner, x, out, key)`` over vectors of so many results.

    Item i is vector i mod v of outer index i div v, v = ceil(inner / lanes).
    """
    kernel, lanes = variant
    module = ir.Module("across")
    b, a = define(module, "reduce", ARGS)
    n = kernel.order.chains
    accs = scratch(b, llvm_type(kernel.accumulator, lanes), n)
    states = scratch(b, llvm_type("u64", lanes), n)
    lines = _Lines(b, a, kernel, lanes)

    def chain(c: Any) -> list[Any]:
        return [b.load(p, typ=t) for p, t in slots(c)]

    def slots(c: Any) -> list[tuple[Any, Any]]:
        types = llvm_type(kernel.accumulator, lanes), llvm_type("u64", lanes)
        return [(at(b, array, c, t), t) for array, t in zip((accs, states), types, strict=True)]

    def put(c: Any, values: list[Any]) -> None:
        for (slot, _), value in zip(slots(c), values, strict=True):
            b.store(value, slot)

    with lines.each() as line:
        with count(b, I64(0), I64(n)) as c:
            elements = b.add(b.mul(line.elements, splat(b, I64(n), lanes)), splat(b, c, lanes))
            put(
                c,
                [
                    _first(kernel, lanes),
                    start(b, elements, lines.key, lanes, kernel.draws or kernel.finish_draws),
                ],
            )
        with count(b, I64(0), a["length"]) as k:
            c = b.and_(k, I64(n - 1))
            put(c, _step(b, kernel, chain(c), line.load(k), lanes))
        used = b.select(b.icmp_signed("<", a["length"], I64(n)), a["length"], I64(n))
        width = n // 2
        while width >= 1:
            pairs = b.sub(used, I64(width))
            pairs = b.select(b.icmp_signed("<", pairs, I64(width)), pairs, I64(width))
            with count(b, I64(0), pairs) as c:
                acc, state = chain(c)
                other, _ = chain(b.add(c, I64(width)))
                bits, state = advance(b, state, lanes, kernel.draws)
                (total,) = emit(kernel.combine, b, [acc, other, bits], lanes)
                put(c, [total, state])
            width //= 2
        acc, state = chain(I64(0))
        bits, _ = advance(b, state, lanes, kernel.finish_draws)
        (result,) = emit(kernel.finish, b, [acc, bits], lanes)
        line.store(result, None)
    b.ret_void()
    return str(module)


def build_scan(variant: tuple[Scan, int]) -> str:
    """``reduce(begin, end, length, inner, x, out, key)``: every prefix, in the operand's layout."""
    kernel, lanes = variant
    module = ir.Module("scan")
    b, a = define(module, "reduce", ARGS)
    lines = _Lines(b, a, kernel, lanes)
    with lines.each() as line:
        first = start(b, line.elements, lines.key, lanes, kernel.draws or kernel.finish_draws)
        carried = Carried(b, [_first(kernel, lanes), first])
        with count(b, I64(0), a["length"]) as k:
            acc, state = _step(b, kernel, carried.load(), line.load(k), lanes)
            bits, state = advance(b, state, lanes, kernel.finish_draws)
            (result,) = emit(kernel.finish, b, [acc, bits], lanes)
            line.store(result, k)
            carried.store([acc, state])
    b.ret_void()
    return str(module)


class _Lines:
    """The vectors of neighbouring results of an (outer, length, inner) operand."""

    def __init__(self, b: ir.IRBuilder, a: dict[str, Any], kernel: Reduce | Scan, lanes: int) -> None:
        self.b, self.a, self.kernel, self.lanes = b, a, kernel, lanes
        self.key = load_key(b, a["key"])
        self.buffer = scratch(b, MEMORY[kernel.loads[0]], lanes)
        self.ends = scratch(b, MEMORY[kernel.result], lanes)
        self.elements: Any = None

    @contextmanager
    def each(self) -> Iterator[_Lines]:
        """Loop over the items begin..end; inside, ``load``, ``store`` and ``elements`` speak of one."""
        b, a, lanes = self.b, self.a, self.lanes
        vectors = b.sdiv(b.add(a["inner"], I64(lanes - 1)), I64(lanes))
        with count(b, a["begin"], a["end"]) as item:
            self.outer = b.sdiv(item, vectors)
            self.first = b.mul(b.sub(item, b.mul(self.outer, vectors)), I64(lanes))
            # The last vector reaches back over its neighbour's results, and finds the same.
            last = b.sub(a["inner"], I64(lanes))
            self.short = b.icmp_signed("<", last, I64(0))
            reach = b.select(b.icmp_signed("<", last, self.first), last, self.first)
            self.first = b.select(self.short, self.first, reach)
            self.number = b.select(self.short, a["inner"], I64(lanes))
            index = b.add(b.mul(self.outer, a["inner"]), self.first)
            self.elements = b.add(splat(b, index, lanes), iota(lanes))
            yield self

    def load(self, k: Any) -> Any:
        """The operand's vector at k."""
        b, a, storage = self.b, self.a, self.kernel.loads[0]
        here = at(b, a["x"], self._offset(k), MEMORY[storage])
        with b.if_then(self.short):
            copy_elements(b, self.buffer, here, self.number, MEMORY[storage])
        return load_vector(b, b.select(self.short, self.buffer, here), storage, self.lanes)

    def store(self, value: Any, k: Any | None) -> None:
        """The result's vector (at k, for a scan)."""
        b, a, result = self.b, self.a, self.kernel.result
        index = b.add(b.mul(self.outer, a["inner"]), self.first) if k is None else self._offset(k)
        here = at(b, a["out"], index, MEMORY[result])
        store_vector(b, value, b.select(self.short, self.ends, here), result, self.lanes)
        with b.if_then(self.short):
            copy_elements(b, here, self.ends, self.number, MEMORY[result])

    def _offset(self, k: Any) -> Any:
        b, a = self.b, self.a
        return b.add(b.mul(b.add(b.mul(self.outer, a["length"]), k), a["inner"]), self.first)
