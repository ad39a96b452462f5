"""The Map shape as LLVM: blocks of 64 elements, vectors inside a block.

Element i of the row-major result belongs to block i div 64. A block finds each operand as 64 consecutive elements, in
place where they are adjacent, copied to a stack buffer where they are strided, broadcast or too few; draws the random
bits of its 64 elements (1, 16 or 32 outputs of SplitMix64); and runs the body vector by vector. So a map is one pass
over memory whatever the strides are. Blocks are fixed by the index of the element, so threads may take any of them with
the same bits. Only elements below ``total`` are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal

from llvmlite import ir

from fxround.kernels.kinds import Map, Word
from fxround.numerics.arithmetic.branches import needed
from fxround.numerics.arithmetic.randomness import (
    BLOCK,
    GAMMA,
    STREAM_DRAW,
    Part,
    draw_function,
    mix_function,
    shared_function,
    word_function,
)
from fxround.numerics.arithmetic.scalar import Expr
from fxround.numerics.formats.storage import BYTES_OF, Storage
from fxround.runtime.cpu.llvm.engine import STRAIGHT, Machine
from fxround.runtime.cpu.llvm.fusions import fusions_for
from fxround.runtime.cpu.llvm.loops import (
    I16,
    I32,
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
from fxround.runtime.cpu.llvm.render import SCALARS, bytes_of, emit, emit_results, llvm_type, splat
from fxround.runtime.cpu.llvm.stages import LANES, Stage, stages_of
from fxround.runtime.cpu.llvm.streams import load_part, place_in_whole

# ``inner`` and ``row`` serve results whose innermost dimension is a multiple of 64: a block's elements are adjacent in
# the operand, or are all one element of it, and are not copied.
Access = Literal["contiguous", "scalar", "inner", "row", "strided"]
MAX_DIMS: Final = 16
# 64-bit lanes in which the outputs of SplitMix64 are computed, and lanes in which a row is copied.
_OUTPUTS: Final = 8
_COPIED: Final = 16
# The largest number of operators of a body that LLVM optimizes: optimizing saves a tenth of a call's time, and doubles
# that of compiling.
_OPTIMIZED: Final = 2000
# The largest number of operators of a body that is written for each vector of a block. The end of a loop of four
# vectors is as many instructions as such a body has, and that of a loop over a whole row is rarely predicted.
_UNROLLED: Final = 40


@dataclass(frozen=True)
class MapVariant:
    """A Map specialised for how each operand is stored, and for a processor.

    numbered: after seed and sample, the key holds the node and the number of each draw in turn; otherwise the nodes.
    """

    kernel: Map
    access: tuple[Access, ...]
    machine: Machine
    numbered: bool = False

    @property
    def digest(self) -> str:
        """The key of the compiled code."""
        return f"{self.kernel.digest}:{','.join(self.access)}{':numbered' if self.numbered else ''}"


draw_seed, mixed, random_words, _next = (
    cache(f) for f in (draw_function, mix_function, shared_function, word_function)
)


class Body:
    """A map's body for blocks of its elements: their random words, and its stages one after the other."""

    def __init__(
        self, b: ir.IRBuilder, kernel: Map, access: tuple[Access, ...], machine: Machine, seeds: Any, part: Part | None
    ) -> None:
        self.b, self.kernel, self.access, self.machine, self.seeds, self.part = b, kernel, access, machine, seeds, part
        self.stages = stages_of(kernel)
        self._random = scratch(b, I32, BLOCK * len(kernel.draws))
        self._between = {v: scratch(b, SCALARS[v.type], BLOCK) for stage in self.stages[:-1] for v in stage.results}

    @property
    def lanes(self) -> int:
        """The lanes of the vectors of results."""
        return self.stages[-1].lanes

    def shared(self, loaded: dict[Expr, Any]) -> dict[int, dict[Expr, Any]]:
        """What all elements share, by the lanes of a vector: some operands, and quotients and roots of them alone."""
        body = self.kernel.body
        alone: set[Expr] = set(loaded)
        order = needed(body.results, dict.fromkeys(body.params))
        alone |= {node for node in order if node.op == "const"}
        for node in order:
            if node.args and alone.issuperset(node.args):
                alone.add(node)
        slow = tuple(node for node in order if node in alone and node.op in ("fdiv", "sqrt"))
        known = loaded | dict(zip(slow, emit_results(slow, self.b, loaded, 1, None), strict=True))
        widths = {stage.lanes for stage in self.stages}
        return {lanes: {node: splat(self.b, value, lanes) for node, value in known.items()} for lanes in widths}

    def compute(
        self,
        block: Any,
        number: Any,
        sources: Sequence[Any],
        targets: Sequence[Any],
        shared: dict[int, dict[Expr, Any]],
        then: Callable[[Sequence[Any]], None] | None = None,
    ) -> None:
        """Emit the body for the vectors that have the first ``number`` elements of a block.

        targets: where the results go, None for one that is not stored. then: emits what else is done with a vector of
        each result.
        """
        b, kernel = self.b, self.kernel
        if self.part is None:
            _draw(b, self._random, block, self.seeds, [w.width for w in kernel.draws])
        else:
            _draw_in_part(b, self._random, block, self.seeds, kernel.draws, self.part)
        for stage in self.stages:
            for i in self._vectors(stage, number):
                values = self._emit(stage, i, sources, shared[stage.lanes])
                if stage is not self.stages[-1]:
                    for value, result in zip(stage.results, values, strict=True):
                        place = at(b, self._between[value], i, SCALARS[value.type])
                        b.store(result, place, align=bytes_of(value.type))
                    continue
                for result, target, s in zip(values, targets, kernel.results, strict=True):
                    # A result may be in the memory of an operand of its own layout: each vector, and each copied block,
                    # is loaded before the same elements are stored.
                    if target is not None:
                        store_vector(b, result, at(b, target, i, MEMORY[s]), s, stage.lanes)
                if then is not None:
                    then(values)

    def _vectors(self, stage: Stage, number: Any) -> Iterator[Any]:
        """Yield where each vector of a stage begins: all those of a whole block of a short body, or that of a loop."""
        if isinstance(number, ir.Constant) and len(self.kernel.body.schedule) <= _UNROLLED:
            yield from (I64(i) for i in range(0, BLOCK, stage.lanes))
            return
        with count(self.b, I64(0), number, stage.lanes) as i:
            yield i

    def _emit(self, stage: Stage, i: Any, sources: Sequence[Any], shared: dict[Expr, Any]) -> tuple[Any, ...]:
        """Emit a stage for the elements from i on."""
        env = {value: self._load(value, i, stage.lanes, sources) for value in stage.reads if value not in shared}
        return emit_results(stage.results, self.b, env | shared, stage.lanes, fusions_for(self.machine, stage.lanes))

    def _load(self, value: Expr, i: Any, lanes: int, sources: Sequence[Any]) -> Any:
        """The elements from i on of what a stage reads."""
        b, kernel = self.b, self.kernel
        if value in self._between:
            here = at(b, self._between[value], i, SCALARS[value.type])
            return b.load(here, typ=llvm_type(value.type, lanes), align=bytes_of(value.type))
        place = kernel.body.params.index(value)
        if place >= len(kernel.loads):
            d = place - len(kernel.loads)
            width = 32 if kernel.parts else kernel.draws[d].width
            return _words(b, at(b, self._random, I64(d * BLOCK), I32), i, lanes, width, self.machine)
        source, s = sources[place], kernel.loads[place]
        if self.access[place] == "row":
            return splat(b, load_vector(b, source, s, 1), lanes)
        return load_vector(b, at(b, source, i, MEMORY[s]), s, lanes)


def build_map(variant: MapVariant) -> str:
    """The LLVM text of ``map(begin, end, total, ndim, sizes, operands, strides, outs, key)``.

    begin, end       block numbers
    sizes            ndim sizes of the result, neighbouring dimensions merged
    operands, outs   one pointer each
    strides          ndim strides for each operand, in elements
    key              seed low, seed high, sample, then the node numbers (see ``MapVariant``), then those of a part
    """
    kernel = variant.kernel
    module = ir.Module(module_name(kernel))
    args = [("begin", I64), ("end", I64), ("total", I64), ("ndim", I64), ("sizes", PTR)]
    b, a = define(module, "map", [*args, ("operands", PTR), ("strides", PTR), ("outs", PTR), ("key", PTR)])
    pointers = [b.load(at(b, a["operands"], I64(i), PTR), typ=PTR) for i in range(len(kernel.loads))]
    # Twice a block: a repeated element is written as a whole block at any place of the first one (``_copy_run``).
    buffers = [scratch(b, MEMORY[s], 2 * BLOCK) for s in kernel.loads]
    outs = [b.load(at(b, a["outs"], I64(i), PTR), typ=PTR) for i in range(len(kernel.results))]
    ends = [scratch(b, MEMORY[s], BLOCK) for s in kernel.results]
    part = load_part(b, a["key"], 3 + kernel.nodes) if kernel.parts and kernel.draws else None
    seeds = seeds_of(b, a["key"], kernel.draws, variant.numbered)
    body = Body(b, kernel, variant.access, variant.machine, seeds, part)
    # LLVM does not move what all elements share out of the loops: for all that it knows, a result is stored there.
    ones = [i for i, access in enumerate(variant.access) if access == "scalar"]
    shared = body.shared({kernel.body.params[i]: load_vector(b, pointers[i], kernel.loads[i], 1) for i in ones})
    walks = bool({"inner", "row", "strided"} & set(variant.access))
    place = _place(b, a, b.mul(a["begin"], I64(BLOCK))) if walks else None

    if walks and "strided" not in variant.access:
        # Rows are whole blocks, so that no block is short.
        with _runs(b, a, place) as (first, stop):
            starts = [
                _neighbours(b, a, i, kernel.loads[i], pointer, place) if access in ("inner", "row") else pointer
                for i, (access, pointer) in enumerate(zip(variant.access, pointers, strict=True))
            ]
            with count(b, first, stop) as block:
                base, run = b.mul(block, I64(BLOCK)), b.mul(b.sub(block, first), I64(BLOCK))
                steps = {"contiguous": base, "inner": run, "scalar": I64(0), "row": I64(0)}
                walked = zip(starts, variant.access, kernel.loads, strict=True)
                sources = [at(b, start, steps[access], MEMORY[s]) for start, access, s in walked]
                heads = [at(b, out, base, MEMORY[s]) for out, s in zip(outs, kernel.results, strict=True)]
                body.compute(block, I64(BLOCK), sources, heads, shared)
        b.ret_void()
        return str(module)
    with count(b, a["begin"], a["end"]) as block:
        base = b.mul(block, I64(BLOCK))
        left = b.sub(a["total"], base)
        number = b.select(b.icmp_signed("<", left, I64(BLOCK)), left, I64(BLOCK))
        short = _partial(b, number)
        sources = [
            _neighbours(b, a, i, kernel.loads[i], pointers[i], place)
            if access in ("inner", "row")
            else _fetch(b, module, a, access, i, kernel.loads[i], pointers[i], buffers[i], base, number, place)
            for i, access in enumerate(variant.access)
        ]
        heads = [at(b, out, base, MEMORY[s]) for out, s in zip(outs, kernel.results, strict=True)]
        # The body computes whole vectors. In a short block the elements of the last one beyond ``total`` are stale, and
        # stay on the stack: the results go to ``ends``, from which only ``number`` are copied.
        targets = [b.select(short, end, head) for end, head in zip(ends, heads, strict=True)]
        body.compute(block, number, sources, targets, shared)
        with b.if_then(short):
            for head, end, s in zip(heads, ends, kernel.results, strict=True):
                copy_elements(b, head, end, number, MEMORY[s])
        if walks:
            _advance(b, a, place, I64(BLOCK))
    b.ret_void()
    return str(module)


def module_name(*kernels: Map) -> str:
    """The name of a module with the bodies of these kernels, by which the engine chooses how to optimize it."""
    return STRAIGHT if sum(len(kernel.body.schedule) for kernel in kernels) > _OPTIMIZED else "map"


def seeds_of(b: ir.IRBuilder, key: Any, words: Sequence[Word], numbered: bool) -> Any:
    """An array on the stack of the u64 seeds of a kernel's draws; numbered: as in ``MapVariant``."""
    seeds = scratch(b, I64, len(words))
    if not words:
        return seeds

    def load(array: Any, index: Any) -> Any:
        return b.load(at(b, array, index, I32), typ=I32)

    parts = [load(key, I64(i)) for i in range(3)]
    nodes, draws = (
        _table(b, "nodes", [3 + w.node for w in words]),
        _table(b, "draws", [w.draw if w.chain is None else STREAM_DRAW for w in words]),
    )
    with count(b, I64(0), I64(len(words))) as d:
        if numbered:
            first = b.add(I64(3), b.mul(d, I64(2)))
            node, draw = load(key, first), load(key, b.add(first, I64(1)))
        else:
            node, draw = load(key, load(nodes, d)), load(draws, d)
        (seed,) = emit(draw_seed(), b, [*parts, node, draw], 1)
        b.store(seed, at(b, seeds, d, I64))
    return seeds


def _table(b: ir.IRBuilder, name: str, values: Sequence[int]) -> Any:
    """A constant array of u32 in the module."""
    content = ir.Constant(ir.ArrayType(I32, len(values)), values)
    table = ir.GlobalVariable(b.module, content.type, b.module.get_unique_name(name))
    table.linkage, table.global_constant, table.initializer = "internal", True, content
    return table.bitcast(PTR)


def _draw(b: ir.IRBuilder, random: Any, block: Any, seeds: Any, widths: Sequence[int]) -> None:
    """Emit the outputs of SplitMix64 that the elements of a block share, at place 64 d of ``random`` for draw d."""
    for width in sorted(set(widths)):
        places = [d for d, w in enumerate(widths) if w == width]
        listed = None if len(places) == len(widths) else _table(b, f"draws{width}", places)
        with count(b, I64(0), I64(len(places))) as n:
            d = n if listed is None else b.zext(b.load(at(b, listed, n, I32), typ=I32), I64)
            words, lanes = at(b, random, b.mul(d, I64(BLOCK)), I32), min(width, _OUTPUTS)
            first = b.add(b.mul(b.mul(block, I64(width)), I64(GAMMA)), b.load(at(b, seeds, d, I64), typ=I64))
            for i in range(0, width, lanes):
                steps = [I64((i + lane + 1) * GAMMA % 2**64) for lane in range(lanes)]
                more = ir.Constant(ir.VectorType(I64, lanes), steps) if lanes > 1 else steps[0]
                (outputs,) = emit(mixed(), b, [b.add(splat(b, first, lanes), more)], lanes)
                b.store(outputs, at(b, words, I64(i), I64), align=64)


def _draw_in_part(b: ir.IRBuilder, random: Any, block: Any, seeds: Any, words: Sequence[Word], part: Part) -> None:
    """Emit a block's random words by the numbers of its elements in the whole, at place 64 d of ``random`` for draw d.

    Neighbours in a part need not be neighbours in the whole, so that each element takes its own bits of an output.
    """
    first = b.mul(block, I64(BLOCK))
    with count(b, I64(0), I64(BLOCK), _OUTPUTS) as i:
        elements = b.add(splat(b, b.add(first, i), _OUTPUTS), iota(_OUTPUTS))
        numbers = place_in_whole(b, part, elements, _OUTPUTS)
        for d, word in enumerate(words):
            function, number = random_words(word.width), numbers
            if word.chain is not None:
                shard = b.add(part.shard, I64(word.chain.shard))
                wide = b.add(b.mul(numbers, splat(b, part.shards, _OUTPUTS)), splat(b, shard, _OUTPUTS))
                number = b.mul(wide, splat(b, I64(word.chain.chains), _OUTPUTS))
                function = _next(word.chain.drawn)
            seed = splat(b, b.load(at(b, seeds, I64(d), I64), typ=I64), _OUTPUTS)
            (drawn,) = emit(function, b, [number, seed], _OUTPUTS)
            b.store(drawn, at(b, random, b.add(I64(d * BLOCK), i), I32), align=4)


def _words(b: ir.IRBuilder, words: Any, i: Any, lanes: int, width: int, machine: Machine) -> Any:
    """The random words of a block's elements i to i + lanes - 1: the bits of the outputs, in ascending order."""
    vector = ir.VectorType(I32, lanes)
    if width == 32:
        return b.load(at(b, words, i, I32), typ=vector, align=4)
    if width == 1 and machine.vector_bytes < 64:
        # No mask registers: each lane moves its own coin to the top. The modes of one coin read nothing below it.
        coins = b.trunc(b.lshr(b.load(words, typ=I64), i), I32)
        return b.shl(splat(b, coins, lanes), ir.Constant(vector, [I32(31 - lane) for lane in range(lanes)]))
    if width == 1:
        coins = b.trunc(b.lshr(b.load(words, typ=I64), i), ir.IntType(lanes))
        short = b.bitcast(coins, ir.VectorType(ir.IntType(1), lanes))
    else:
        short = b.load(at(b, words, i, I16), typ=ir.VectorType(I16, lanes), align=2)
    return b.shl(b.zext(short, vector), ir.Constant(vector, [I32(32 - width)] * lanes))


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
    place: Any,
) -> Any:
    """The address of 64 consecutive elements of an operand (of one element for a scalar)."""
    memory = MEMORY[storage]
    if access == "scalar":
        return pointer
    if access == "strided":
        strides = at(b, a["strides"], b.mul(I64(operand), a["ndim"]), I64)
        gather = gather_function(module, storage)
        return b.call(gather, [buffer, pointer, place, number, a["ndim"], a["sizes"], strides])
    here = at(b, pointer, base, memory)
    short = _partial(b, number)
    with b.if_then(short):
        copy_elements(b, buffer, here, number, memory)
    # The last vector of a short block would read beyond the operand's last element: they read the copy.
    return b.select(short, buffer, here)


def _partial(b: ir.IRBuilder, number: Any) -> Any:
    """Whether a block's elements may end inside of a vector: vectors have ``LANES`` elements, or half as many."""
    return b.icmp_signed("!=", b.and_(number, I64(LANES - 1)), I64(0))


def _place(b: ir.IRBuilder, a: dict[str, Any], base: Any) -> Any:
    """The coordinates of element number ``base``, one for each dimension."""
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


def _advance(b: ir.IRBuilder, a: dict[str, Any], place: Any, by: Any) -> None:
    """Move the coordinates on by elements, with carries outwards; only a carry costs a division."""
    last = b.sub(a["ndim"], I64(1))
    # The outermost coordinate has no carry: after the last block it is beyond its size, and is not used.
    dimension, moved = Carried(b, [last]), Carried(b, [b.add(b.load(at(b, place, last, I64), typ=I64), by)])
    loop, carry, done = (b.append_basic_block(n) for n in ("advance", "carry", "settled"))
    b.branch(loop)
    b.position_at_end(loop)
    (d,), (reached,) = dimension.load(), moved.load()
    size = b.load(at(b, a["sizes"], d, I64), typ=I64)
    b.store(reached, at(b, place, d, I64))
    b.cbranch(b.and_(b.icmp_signed(">=", reached, size), b.icmp_signed(">", d, I64(0))), carry, done)
    b.position_at_end(carry)
    over, outer = b.udiv(reached, size), b.sub(d, I64(1))
    b.store(b.sub(reached, b.mul(over, size)), at(b, place, d, I64))
    moved.store([b.add(b.load(at(b, place, outer, I64), typ=I64), over)])
    dimension.store([outer])
    b.branch(loop)
    b.position_at_end(done)


@contextmanager
def _runs(b: ir.IRBuilder, a: dict[str, Any], place: Any) -> Iterator[tuple[Any, Any]]:
    """Loop over runs of blocks in one row, from the block at ``place`` on: the first block and the end of each."""
    block, last = Carried(b, [a["begin"]]), b.sub(a["ndim"], I64(1))
    loop, body, done = (b.append_basic_block(n) for n in ("runs", "run", "walked"))
    b.branch(loop)
    b.position_at_end(loop)
    (first,) = block.load()
    b.cbranch(b.icmp_signed("<", first, a["end"]), body, done)
    b.position_at_end(body)
    size, reached = (b.load(at(b, array, last, I64), typ=I64) for array in (a["sizes"], place))
    end = b.add(first, b.udiv(b.sub(size, reached), I64(BLOCK)))
    stop = b.select(b.icmp_signed("<", end, a["end"]), end, a["end"])
    yield first, stop
    _advance(b, a, place, b.mul(b.sub(stop, first), I64(BLOCK)))
    block.store([stop])
    b.branch(loop)
    b.position_at_end(done)


def _neighbours(b: ir.IRBuilder, a: dict[str, Any], operand: int, storage: Storage, pointer: Any, place: Any) -> Any:
    """The address of an operand's element at ``place``."""
    strides = at(b, a["strides"], b.mul(I64(operand), a["ndim"]), I64)
    return at(b, pointer, _offset(b, place, a["ndim"], strides), MEMORY[storage])


def _offset(b: ir.IRBuilder, place: Any, ndim: Any, strides: Any) -> Any:
    """The offset of the element at ``place``."""
    offset = Carried(b, [I64(0)])
    with count(b, I64(0), ndim) as d:
        step = b.mul(b.load(at(b, place, d, I64), typ=I64), b.load(at(b, strides, d, I64), typ=I64))
        offset.store([b.add(offset.load()[0], step)])
    return offset.load()[0]


def gather_function(module: ir.Module, storage: Storage) -> ir.Function:
    """The function gather(buffer, x, place, number, ndim, sizes, strides): ``number`` elements of a strided array.

    They start at ``place``. Whole vectors that are consecutive are returned in place; anything else is copied to the
    buffer, run by run of the innermost dimension. Elements of the buffer after them are overwritten.
    """
    memory = MEMORY[storage]
    name = f"gather_{storage}"
    defined = module.globals.get(name)
    if defined is not None:
        return defined
    function = ir.Function(module, ir.FunctionType(PTR, [PTR, PTR, PTR, I64, I64, PTR, PTR]), name)
    function.linkage = "internal"
    buffer, x, place, number, ndim, sizes, strides = function.args
    b = ir.IRBuilder(function.append_basic_block("entry"))
    last = b.sub(ndim, I64(1))
    inner, size = (b.load(at(b, array, last, I64), typ=I64) for array in (strides, sizes))
    first, begin = b.load(at(b, place, last, I64), typ=I64), _offset(b, place, ndim, strides)
    room = b.sub(size, first)
    whole = b.and_(b.not_(_partial(b, number)), b.icmp_signed(">=", room, number))
    with b.if_then(b.and_(whole, b.icmp_signed("==", inner, I64(1)))):
        b.ret(at(b, x, begin, memory))
    # A copy: the caller advances ``place`` itself, for all operands.
    here = scratch(b, I64, MAX_DIMS)
    copy_elements(b, here, place, ndim, I64)
    state = Carried(b, [I64(0), room, begin])
    loop, more, done = (b.append_basic_block(n) for n in ("run", "more", "done"))
    b.branch(loop)
    b.position_at_end(loop)
    filled, room, offset = state.load()
    left = b.sub(number, filled)
    length = b.select(b.icmp_signed("<", left, room), left, room)
    _copy_run(b, at(b, buffer, filled, memory), at(b, x, offset, memory), length, inner, storage)
    filled = b.add(filled, length)
    b.cbranch(b.icmp_signed("<", filled, number), more, done)
    b.position_at_end(more)
    # The run has reached the end of its row: go back to the row's beginning, then to the next row.
    row = b.sub(offset, b.mul(b.sub(size, room), inner))
    state.store([filled, size, _next_row(b, here, row, last, sizes, strides)])
    b.branch(loop)
    b.position_at_end(done)
    b.ret(buffer)
    return function


def _copy_run(b: ir.IRBuilder, target: Any, source: Any, length: Any, stride: Any, storage: Storage) -> None:
    """Copy ``length`` elements of a row that are ``stride`` apart; may write up to 64 elements after the first."""
    memory, lanes = MEMORY[storage], _COPIED
    vector, align = ir.VectorType(memory, lanes), BYTES_OF[storage]

    def move(first: Any) -> None:
        several = b.load(at(b, source, first, memory), typ=vector, align=align)
        b.store(several, at(b, target, first, memory), align=align)

    with b.if_else(b.icmp_signed("==", stride, I64(0))) as (repeated, apart):
        with repeated:
            # A whole block of the element: a loop would have an end that is hard to predict. Later runs overwrite the
            # excess.
            one = splat(b, b.load(source, typ=memory), lanes)
            for i in range(0, BLOCK, lanes):
                b.store(one, at(b, target, I64(i), memory), align=align)
        with apart:
            long = b.and_(b.icmp_signed("==", stride, I64(1)), b.icmp_signed(">=", length, I64(lanes)))
            with b.if_else(long) as (vectors, elements):
                with vectors:
                    # The last vector ends with the run and may overlap the one before it: nothing beyond the run is
                    # read.
                    end = b.sub(length, I64(lanes))
                    with count(b, I64(0), end, lanes) as i:
                        move(i)
                    move(end)
                with elements, count(b, I64(0), length) as i:
                    one = b.load(at(b, source, b.mul(i, stride), memory), typ=memory)
                    b.store(one, at(b, target, i, memory))


def _next_row(b: ir.IRBuilder, place: Any, offset: Any, last: Any, sizes: Any, strides: Any) -> Any:
    """The offset at which the next row of the innermost dimension begins, in row-major order."""
    state = Carried(b, [last, offset])
    loop, again, done = (b.append_basic_block(n) for n in ("carry", "again", "settled"))
    b.branch(loop)
    b.position_at_end(loop)
    inner, here = state.load()
    d = b.sub(inner, I64(1))
    size, stride = (b.load(at(b, array, d, I64), typ=I64) for array in (sizes, strides))
    moved, there = b.add(b.load(at(b, place, d, I64), typ=I64), I64(1)), b.add(here, stride)
    full = b.icmp_signed("==", moved, size)
    b.store(b.select(full, I64(0), moved), at(b, place, d, I64))
    state.store([d, b.select(full, b.sub(there, b.mul(size, stride)), there)])
    b.cbranch(b.and_(full, b.icmp_signed(">", d, I64(0))), again, done)
    b.position_at_end(again)
    b.branch(loop)
    b.position_at_end(done)
    return state.load()[1]
