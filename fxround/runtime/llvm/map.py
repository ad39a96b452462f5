"""The Map shape as LLVM: blocks of 64 elements, vectors inside a block.

What is true here. Element i of the row-major result belongs to block i div 64. A block fetches each operand as 64
consecutive elements: in place where they lie so, through a stack buffer where they are strided,
broadcast or short; draws its random words (16 Philox counters give 64 words); and runs the body
vector by vector.

Why it is safe. Blocks are fixed by the element index, so threads may take any of them; a block touches only
elements below ``total``.

    before   expand().contiguous() for each operand, then a kernel
    after    one pass over memory, whatever the strides
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from llvmlite import ir

from fxround.kernel import Map
from fxround.numerics.randomness import BLOCK, STRIDE, Key, block_words
from fxround.numerics.scalar import Function, param
from fxround.numerics.storage import Storage
from fxround.runtime.llvm.engine import Machine
from fxround.runtime.llvm.fusions import fusions_for
from fxround.runtime.llvm.loops import (
    I32,
    I64,
    MEMORY,
    MEMORY_BYTES,
    PTR,
    at,
    copy_elements,
    count,
    define,
    iota,
    load_vector,
    scratch,
    store_vector,
)
from fxround.runtime.llvm.render import emit, splat

# ``inner`` and ``row`` serve results whose innermost dimension is whole blocks: a block's elements are neighbours in
# the operand, or are one element of it, and neither is fetched.
Access = Literal["contiguous", "scalar", "inner", "row", "strided"]
MAX_DIMS: Final = 16


@dataclass(frozen=True)
class MapVariant:
    """A Map specialised for how each operand lies in memory, and for a processor."""

    kernel: Map
    access: tuple[Access, ...]
    machine: Machine

    @property
    def digest(self) -> str:
        """The key of its compiled code."""
        return f"{self.kernel.digest}:{','.join(self.access)}"


def words_function(draw: int) -> Function:
    """(counter, key) to the four Philox words of a block's lane."""
    counter, key = param("counter", "u64"), Key.params()
    return Function("words", (counter, *key.exprs), block_words(counter, draw, key))


def lanes_of(body: Function) -> int:
    """16 where everything is 32 bits wide, else 8: a vector then fills one AVX-512 register."""
    return 8 if any(n.type in ("u64", "f64") for n in body.schedule) else 16


def build_map(variant: MapVariant) -> str:
    """The LLVM text of ``map(begin, end, total, ndim, sizes, operands, strides, outs, key)``.

    begin, end: block numbers. sizes: ndim. operands, outs: one pointer each. strides: operand by operand,
    ndim each, in elements. key: seed low, seed high, sample, then the node numbers.
    """
    kernel = variant.kernel
    module = ir.Module("map")
    args = [("begin", I64), ("end", I64), ("total", I64), ("ndim", I64), ("sizes", PTR)]
    b, a = define(module, "map", [*args, ("operands", PTR), ("strides", PTR), ("outs", PTR), ("key", PTR)])
    lanes = lanes_of(kernel.body)
    fuse = fusions_for(variant.machine, lanes)
    pointers = [b.load(at(b, a["operands"], I64(i), PTR), typ=PTR) for i in range(len(kernel.loads))]
    buffers = [scratch(b, MEMORY[s], BLOCK) for s in kernel.loads]
    outs = [b.load(at(b, a["outs"], I64(i), PTR), typ=PTR) for i in range(len(kernel.results))]
    ends = [scratch(b, MEMORY[s], BLOCK) for s in kernel.results]
    random = [scratch(b, I32, BLOCK) for _ in kernel.draws]
    key = [b.load(at(b, a["key"], I64(i), I32), typ=I32) for i in range(3 + kernel.nodes)]
    with count(b, a["begin"], a["end"]) as block:
        base = b.mul(block, I64(BLOCK))
        left = b.sub(a["total"], base)
        short = b.icmp_signed("<", left, I64(BLOCK))
        number = b.select(short, left, I64(BLOCK))
        place = _place(b, a, base) if {"inner", "row"} & set(variant.access) else None
        sources = [
            _neighbours(b, a, i, kernel.loads[i], pointers[i], place)
            if access in ("inner", "row")
            else _fetch(b, module, a, access, i, kernel.loads[i], pointers[i], buffers[i], base, number)
            for i, access in enumerate(variant.access)
        ]
        for word, words in zip(kernel.draws, random, strict=True):
            _draw(b, word.draw, words, block, [*key[:3], key[3 + word.node]])
        heads = [at(b, out, base, MEMORY[s]) for out, s in zip(outs, kernel.results, strict=True)]
        targets = [b.select(short, end, head) for end, head in zip(ends, heads, strict=True)]
        with count(b, I64(0), I64(BLOCK), lanes) as i:
            values = [
                splat(b, load_vector(b, source, s, 1), lanes)
                if access in ("scalar", "row")
                else load_vector(b, at(b, source, i, MEMORY[s]), s, lanes)
                for source, s, access in zip(sources, kernel.loads, variant.access, strict=True)
            ]
            vector = ir.VectorType(I32, lanes)
            values += [b.load(at(b, words, i, I32), typ=vector, align=4) for words in random]
            for value, target, s in zip(
                emit(kernel.body, b, values, lanes, fuse), targets, kernel.results, strict=True
            ):
                store_vector(b, value, at(b, target, i, MEMORY[s]), s, lanes)
        with b.if_then(short):
            for head, end, s in zip(heads, ends, kernel.results, strict=True):
                copy_elements(b, head, end, number, MEMORY[s])
    b.ret_void()
    return str(module)


def _draw(b: ir.IRBuilder, draw: int, words: Any, block: Any, key: list[Any]) -> None:
    """64 random words: Philox of 16 counters, word w of counter l at element 16 w + l."""
    first = b.add(splat(b, b.mul(block, I64(STRIDE)), STRIDE), iota(STRIDE))
    results = emit(words_function(draw), b, [first, *(splat(b, k, STRIDE) for k in key)], STRIDE)
    for w, value in enumerate(results):
        b.store(value, at(b, words, I64(w * STRIDE), I32), align=4)


def _fetch(
    b: ir.IRBuilder,
    module: ir.Module,
    a: dict[str, Any],
    access: Access,
    operand: int,
    storage: Storage,
    pointer: Any,
    buffer: Any,
    base: Any,
    number: Any,
) -> Any:
    """The address of 64 consecutive elements of an operand (of one, for a scalar)."""
    memory = MEMORY[storage]
    if access == "scalar":
        return pointer
    if access == "strided":
        strides = at(b, a["strides"], b.mul(I64(operand), a["ndim"]), I64)
        gather = gather_function(module, storage)
        return b.call(gather, [buffer, pointer, base, number, a["ndim"], a["sizes"], strides])
    here = at(b, pointer, base, memory)
    short = b.icmp_signed("<", number, I64(BLOCK))
    with b.if_then(short):
        copy_elements(b, buffer, here, number, memory)
    return b.select(short, buffer, here)


def _place(b: ir.IRBuilder, a: dict[str, Any], base: Any) -> Any:
    """The coordinates of element ``base``, one for each dimension."""
    place = scratch(b, I64, MAX_DIMS)
    with b.goto_entry_block():
        rest = b.alloca(I64)
    b.store(base, rest)
    with count(b, I64(0), a["ndim"]) as j:
        d = b.sub(b.sub(a["ndim"], I64(1)), j)
        size = b.load(at(b, a["sizes"], d, I64), typ=I64)
        before = b.load(rest, typ=I64)
        after = b.udiv(before, size)
        b.store(b.sub(before, b.mul(after, size)), at(b, place, d, I64))
        b.store(after, rest)
    return place


def _neighbours(b: ir.IRBuilder, a: dict[str, Any], operand: int, storage: Storage, pointer: Any, place: Any) -> Any:
    """The address of an operand's element at ``place``."""
    with b.goto_entry_block():
        offset = b.alloca(I64)
    b.store(I64(0), offset)
    strides = at(b, a["strides"], b.mul(I64(operand), a["ndim"]), I64)
    with count(b, I64(0), a["ndim"]) as d:
        step = b.mul(b.load(at(b, place, d, I64), typ=I64), b.load(at(b, strides, d, I64), typ=I64))
        b.store(b.add(b.load(offset, typ=I64), step), offset)
    return at(b, pointer, b.load(offset, typ=I64), MEMORY[storage])


def gather_function(module: ir.Module, storage: Storage) -> ir.Function:
    """gather(buffer, x, base, number, ndim, sizes, strides): where elements base... of a strided array lie.

    In place if they are consecutive and a whole block, else copied (one of them repeated) to the buffer.
    """
    memory = MEMORY[storage]
    name = f"gather_{storage}"
    found = module.globals.get(name)
    if found is not None:
        return found
    function = ir.Function(module, ir.FunctionType(PTR, [PTR, PTR, I64, I64, I64, PTR, PTR]), name)
    function.linkage = "internal"
    buffer, x, base, number, ndim, sizes, strides = function.args
    b = ir.IRBuilder(function.append_basic_block("entry"))
    place = scratch(b, I64, MAX_DIMS)
    with b.goto_entry_block():
        rest, offset = b.alloca(I64), b.alloca(I64)
    b.store(base, rest)
    b.store(I64(0), offset)
    last = b.sub(ndim, I64(1))
    with count(b, I64(0), ndim) as j:
        d = b.sub(last, j)
        size = b.load(at(b, sizes, d, I64), typ=I64)
        before = b.load(rest, typ=I64)
        after = b.udiv(before, size)
        coordinate = b.sub(before, b.mul(after, size))
        b.store(coordinate, at(b, place, d, I64))
        b.store(after, rest)
        stride = b.load(at(b, strides, d, I64), typ=I64)
        b.store(b.add(b.load(offset, typ=I64), b.mul(coordinate, stride)), offset)
    inner = b.load(at(b, strides, last, I64), typ=I64)
    room = b.sub(b.load(at(b, sizes, last, I64), typ=I64), b.load(at(b, place, last, I64), typ=I64))
    whole = b.and_(b.icmp_signed("==", number, I64(BLOCK)), b.icmp_signed(">=", room, number))
    with b.if_then(b.and_(whole, b.icmp_signed("==", inner, I64(1)))):
        b.ret(at(b, x, b.load(offset, typ=I64), memory))
    # One element a row: a mean, a maximum, a sum to be divided by.
    with b.if_then(b.and_(whole, b.icmp_signed("==", inner, I64(0)))):
        one = splat(b, b.load(at(b, x, b.load(offset, typ=I64), memory), typ=memory), STRIDE)
        for i in range(0, BLOCK, STRIDE):
            b.store(one, at(b, buffer, I64(i), memory), align=MEMORY_BYTES[storage])
        b.ret(buffer)
    with count(b, I64(0), number) as i:
        b.store(b.load(at(b, x, b.load(offset, typ=I64), memory), typ=memory), at(b, buffer, i, memory))
        _advance(b, place, offset, last, sizes, strides)
    b.ret(buffer)
    return function


def _advance(b: ir.IRBuilder, place: Any, offset: Any, last: Any, sizes: Any, strides: Any) -> None:
    """The next element in row-major order: the innermost coordinate, with carries outwards."""
    with b.goto_entry_block():
        dimension = b.alloca(I64)
    b.store(last, dimension)
    loop, carry, done = (b.append_basic_block(n) for n in ("odometer", "carry", "settled"))
    b.branch(loop)
    b.position_at_end(loop)
    d = b.load(dimension, typ=I64)
    stride = b.load(at(b, strides, d, I64), typ=I64)
    size = b.load(at(b, sizes, d, I64), typ=I64)
    moved = b.add(b.load(at(b, place, d, I64), typ=I64), I64(1))
    full = b.icmp_signed("==", moved, size)
    back = b.select(full, b.mul(b.sub(size, I64(1)), b.neg(stride)), stride)
    b.store(b.add(b.load(offset, typ=I64), back), offset)
    b.store(b.select(full, I64(0), moved), at(b, place, d, I64))
    b.cbranch(b.and_(full, b.icmp_signed(">", d, I64(0))), carry, done)
    b.position_at_end(carry)
    b.store(b.sub(d, I64(1)), dimension)
    b.branch(loop)
    b.position_at_end(done)
