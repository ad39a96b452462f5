"""The Reduce and Scan shapes as LLVM: lines along vectors, or across them.

What is true here. ``along`` takes one line at a time: the chains of an order are the lanes of a vector, and k walks
the line itself or panels copied from it. ``across`` takes a group of lines side by side, one a lane, the chains an
array of vectors. Both walk k upwards and combine the chains by the formula of ``orders``.

Why it is safe. A lane is a result's own chain in either: no lane ever mixes with another but by
``combine``, where the formula says so.

    before   a tree that depends on the vector width and on how the threads were dealt
    after    Order's formula, once along and once across
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir

from fxround.kernel import Reduce, Scan
from fxround.numerics.scalar import const
from fxround.runtime.llvm.lines import ARGS, Description, Group, Neighbours, Scattered
from fxround.runtime.llvm.loops import (
    I64,
    MEMORY,
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
from fxround.runtime.llvm.panels import PANEL, panels
from fxround.runtime.llvm.render import constant, emit, llvm_type, splat
from fxround.runtime.llvm.streams import advance, load_key, start

# Registers side by side where there are many lines next to each other.
WIDE: Final = 8


def one_register(kernel: Reduce | Scan) -> int:
    """Lines side by side: one AVX-512 register of accumulators."""
    return 16 if kernel.accumulator == "f32" else 8


def across_lanes(kernel: Reduce | Scan, inner: int) -> int:
    """Neighbouring lines side by side: one register of them, or several where there are many.

    Several make the walk down the columns read whole runs of memory, and hide the latency of a step.
    """
    one = one_register(kernel)
    return one * WIDE if inner >= one * WIDE else one


def first_of(kernel: Reduce | Scan, lanes: int) -> Any:
    """What chains start from."""
    return constant(const(kernel.accumulator, kernel.first), lanes)


def build_along(variant: tuple[Reduce, bool]) -> str:
    """``reduce(begin, end, lines, x, out, key)`` over the lines visited as number begin..end.

    dense: k walks neighbouring elements in one run; else panels of them are brought together.
    """
    kernel, dense = variant
    module = ir.Module("along")
    b, a = define(module, "reduce", ARGS)
    n, memory = kernel.order.chains, MEMORY[kernel.loads[0]]
    description, key = Description(b, a["lines"]), load_key(b, a["key"])
    tail = scratch(b, memory, n if dense else PANEL + n)
    with count(b, a["begin"], a["end"]) as item:
        x, out, number = description.line(item)
        base = at(b, a["x"], x, memory)
        elements = b.add(splat(b, b.mul(number, I64(n)), n), iota(n))
        chains = Carried(b, [first_of(kernel, n), start(b, elements, key, n, kernel.draws or kernel.finish_draws)])
        if dense:
            rest = _walk(b, kernel, chains, base, description.length)
            copy_elements(b, tail, at(b, base, b.sub(description.length, rest), memory), rest, memory)
        else:
            rest = _walk_panels(b, kernel, chains, description, base, tail)
        with b.if_then(b.icmp_signed(">", rest, I64(0))):
            stepped = step(b, kernel, chains.load(), load_vector(b, tail, kernel.loads[0], n), n)
            active = b.icmp_signed("<", iota(n), splat(b, rest, n))
            chains.store([b.select(active, new, old) for new, old in zip(stepped, chains.load(), strict=True)])
        acc, state = _combine_lanes(b, kernel, chains.load(), _least(b, description.length, I64(n)))
        if n > 1:
            zero = ir.IntType(32)(0)
            acc, state = b.extract_element(acc, zero), b.extract_element(state, zero)
        bits, _ = advance(b, state, 1, kernel.finish_draws)
        (result,) = emit(kernel.finish, b, [acc, bits], 1)
        store_vector(b, result, at(b, a["out"], out, MEMORY[kernel.result]), kernel.result, 1)
    b.ret_void()
    return str(module)


def _walk(b: ir.IRBuilder, kernel: Reduce, chains: Carried, base: Any, number: Any) -> Any:
    """Take the whole vectors of ``number`` elements; how many are left."""
    n, storage = kernel.order.chains, kernel.loads[0]
    whole = b.and_(number, I64(-n))
    with count(b, I64(0), whole, n) as k:
        x = load_vector(b, at(b, base, k, MEMORY[storage]), storage, n)
        chains.store(step(b, kernel, chains.load(), x, n))
    return b.sub(number, whole)


def _walk_panels(
    b: ir.IRBuilder, kernel: Reduce, chains: Carried, description: Description, base: Any, buffer: Any
) -> Any:
    """The same of a line's panels; what is left stands at the front of the buffer."""
    memory, kept = MEMORY[kernel.loads[0]], Carried(b, [I64(0)])
    with panels(b, description, base, memory, buffer, lambda: kept.load()[0]) as number:
        total = b.add(kept.load()[0], number)
        rest = _walk(b, kernel, chains, buffer, total)
        copy_elements(b, buffer, at(b, buffer, b.sub(total, rest), memory), rest, memory)
        kept.store([rest])
    return kept.load()[0]


def _least(b: ir.IRBuilder, x: Any, y: Any) -> Any:
    return b.select(b.icmp_signed("<", x, y), x, y)


def step(b: ir.IRBuilder, kernel: Reduce | Scan, chain: list[Any], x: Any, lanes: int) -> list[Any]:
    """(accumulators, states) after one more element."""
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


def _group(b: ir.IRBuilder, a: dict[str, Any], kernel: Reduce | Scan, lanes: int, neighbours: bool) -> Group:
    return (Neighbours if neighbours else Scattered)(b, a, kernel, lanes)


def build_across(variant: tuple[Reduce, int, bool]) -> str:
    """``reduce(begin, end, lines, x, out, key)`` over groups of so many lines: neighbours, or any."""
    kernel, lanes, neighbours = variant
    module = ir.Module("across")
    b, a = define(module, "reduce", ARGS)
    n, key = kernel.order.chains, load_key(b, a["key"])
    accs = scratch(b, llvm_type(kernel.accumulator, lanes), n)
    states = scratch(b, llvm_type("u64", lanes), n)
    lines = _group(b, a, kernel, lanes, neighbours)

    def slots(c: Any) -> list[tuple[Any, Any]]:
        types = llvm_type(kernel.accumulator, lanes), llvm_type("u64", lanes)
        return [(at(b, array, c, t), t) for array, t in zip((accs, states), types, strict=True)]

    def chain(c: Any) -> list[Any]:
        return [b.load(p, typ=t) for p, t in slots(c)]

    def put(c: Any, values: list[Any]) -> None:
        for (slot, _), value in zip(slots(c), values, strict=True):
            b.store(value, slot)

    with lines.each():
        numbers = b.mul(lines.elements(), splat(b, I64(n), lanes))
        with count(b, I64(0), I64(n)) as c:
            elements = b.add(numbers, splat(b, c, lanes))
            state = start(b, elements, key, lanes, kernel.draws or kernel.finish_draws)
            put(c, [first_of(kernel, lanes), state])
        with lines.description.runs() as (k, offset, _), count(b, I64(0), lines.description.run) as j:
            c = b.and_(b.add(k, j), I64(n - 1))
            x = lines.load(b.add(offset, b.mul(j, lines.description.k_x)))
            put(c, step(b, kernel, chain(c), x, lanes))
        _combine_chains(b, kernel, lanes, _least(b, lines.description.length, I64(n)), chain, put)
        acc, state = chain(I64(0))
        bits, _ = advance(b, state, lanes, kernel.finish_draws)
        (result,) = emit(kernel.finish, b, [acc, bits], lanes)
        lines.store(result, I64(0))
    b.ret_void()
    return str(module)


def _combine_chains(
    b: ir.IRBuilder,
    kernel: Reduce,
    lanes: int,
    used: Any,
    chain: Callable[[Any], list[Any]],
    put: Callable[[Any, list[Any]], None],
) -> None:
    width = kernel.order.chains // 2
    while width >= 1:
        pairs = _least(b, b.sub(used, I64(width)), I64(width))
        with count(b, I64(0), pairs) as c:
            acc, state = chain(c)
            other, _ = chain(b.add(c, I64(width)))
            bits, state = advance(b, state, lanes, kernel.draws)
            (total,) = emit(kernel.combine, b, [acc, other, bits], lanes)
            put(c, [total, state])
        width //= 2


def build_scan(variant: tuple[Scan, int, bool]) -> str:
    """``reduce(begin, end, lines, x, out, key)``: every prefix of groups of lines."""
    kernel, lanes, neighbours = variant
    module = ir.Module("scan")
    b, a = define(module, "reduce", ARGS)
    key, lines = load_key(b, a["key"]), _group(b, a, kernel, lanes, neighbours)
    with lines.each():
        first = start(b, lines.elements(), key, lanes, kernel.draws or kernel.finish_draws)
        carried = Carried(b, [first_of(kernel, lanes), first])
        with lines.description.runs() as (_, x, out), count(b, I64(0), lines.description.run) as j:
            element = lines.load(b.add(x, b.mul(j, lines.description.k_x)))
            acc, state = step(b, kernel, carried.load(), element, lanes)
            bits, state = advance(b, state, lanes, kernel.finish_draws)
            (result,) = emit(kernel.finish, b, [acc, bits], lanes)
            lines.store(result, b.add(out, b.mul(j, lines.description.k_out)))
            carried.store([acc, state])
    b.ret_void()
    return str(module)
