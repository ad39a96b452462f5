"""The Reduce and Scan shapes as LLVM: loops along lines, or across several lines.

``build_along`` takes one line at a time: the chains of the order are the lanes of a vector, and k walks the line itself
or panels copied from it. ``build_across`` takes a group of lines, one in each lane, and holds the chains in an array of
vectors. Both walk k upwards and combine the chains by the formula of ``numerics.orders``, so they give the same bits.
Lanes are mixed only by ``combine``, where the formula says so; the result depends on neither vector width nor threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir

from fxround.kernels.kinds import Reduce, Scan
from fxround.numerics.arithmetic.scalar import const
from fxround.numerics.orders import Shard
from fxround.runtime.cpu.llvm.engine import Machine
from fxround.runtime.cpu.llvm.fusions import fusions_for
from fxround.runtime.cpu.llvm.lines import ARGS, Description, Group, Neighbours, Scattered
from fxround.runtime.cpu.llvm.loops import (
    I64,
    MEMORY,
    Carried,
    at,
    copy_elements,
    count,
    define,
    iota,
    least,
    load_vector,
    scratch,
    store_vector,
)
from fxround.runtime.cpu.llvm.panels import PANEL, panels
from fxround.runtime.cpu.llvm.render import constant, emit, llvm_type, splat
from fxround.runtime.cpu.llvm.shards import each_shard, levels_of, row_of
from fxround.runtime.cpu.llvm.streams import Streams, advance, apply

# Registers of adjacent lines to use where there are many lines.
WIDE: Final = 8
# Lines of adjacent elements that are walked together.
TOGETHER: Final = 4
# How many elements ahead of the present one are prefetched.
AHEAD: Final = 8


def one_register(kernel: Reduce | Scan) -> int:
    """The number of lines in one AVX-512 register of accumulators."""
    return 16 if kernel.accumulator == "f32" else 8


def across_lanes(kernel: Reduce | Scan, inner: int) -> int:
    """The number of adjacent lines to take together: one register of them, or several where there are many.

    Several registers read whole runs of memory on the way down the columns, and hide the latency of a step.
    """
    one = one_register(kernel)
    return one * WIDE if inner >= one * WIDE else one


def first_of(kernel: Reduce | Scan, lanes: int) -> Any:
    """The value from which chains start."""
    return constant(const(kernel.accumulator, kernel.first), lanes)


def build_along(variant: tuple[Reduce, bool, Machine]) -> str:
    """The LLVM text of ``reduce(begin, end, lines, x, out, key)`` over the lines visited as number begin ... end.

    dense: k walks adjacent elements in one run; otherwise they are copied into panels. An order of shards is for dense
    lines.
    """
    kernel, dense, machine = variant
    module = ir.Module("along")
    b, a = define(module, "reduce", ARGS)
    walk = Along(b, a, kernel, machine)
    if kernel.order.shards > 1:
        assert dense
        with count(b, a["begin"], a["end"]) as item:
            walk.shards(item)
        b.ret_void()
        return str(module)
    together = TOGETHER if dense else 1
    with count(b, a["begin"], a["end"], together) as first:
        lines = least(b, b.sub(a["end"], first), I64(together))
        with count(b, I64(0), lines) as slot:
            walk.begin(slot, b.add(first, slot))
        if not dense:
            walk.panels()
        else:
            walk.dense(lines, together)
        with count(b, I64(0), lines) as slot:
            walk.end(slot, dense)
    b.ret_void()
    return str(module)


class Along:
    """Some lines whose chains are the lanes of a vector: their start, their steps and their end."""

    def __init__(self, b: ir.IRBuilder, a: dict[str, Any], kernel: Reduce, machine: Machine) -> None:
        self.b, self.a, self.kernel, self.machine = b, a, kernel, machine
        self.lanes, self.storage = kernel.order.chains, kernel.loads[0]
        self.memory = MEMORY[self.storage]
        self.description, self.streams = Description(b, a["lines"]), Streams.load(b, a["key"], kernel.parts)
        self.length = self.description.length
        self.tail = scratch(b, self.memory, PANEL + self.lanes)
        self.types = llvm_type(kernel.accumulator, self.lanes), llvm_type("u64", self.lanes)
        self.chains = [scratch(b, t, TOGETHER) for t in self.types]
        self.places = [scratch(b, I64, TOGETHER) for _ in ("x", "out")]
        # The number of elements at the front of ``tail`` that no step has taken yet: fewer than there are lanes.
        self.rest = Carried(b, [I64(0)])

    def begin(self, slot: Any, item: Any, shard: Shard | None = None) -> None:
        """Find where a line, or a shard of it, and its result are stored, and start its chains."""
        b, n, kernel = self.b, self.lanes, self.kernel
        x, out, number = self.description.line(item)
        if shard is not None:
            x = b.add(x, shard.begin)
        number = self.streams.number(b, number, 1, kernel.order.shards, None if shard is None else shard.number)
        # Each chain has a stream of its own: number line * chains + chain, wherever and whenever the line is visited.
        elements = b.add(splat(b, b.mul(number, I64(n)), n), iota(n))
        state = self.streams.start(b, elements, n, kernel.draws or kernel.finish_draws)
        self._put(slot, [first_of(kernel, n), state])
        for place, array in zip((x, out), self.places, strict=True):
            b.store(place, at(b, array, slot, I64))

    def dense(self, lines: Any, together: int) -> None:
        """Walk lines of one run each, several together where there are enough: that hides the latency of a step."""
        b = self.b
        if together > 1:
            with b.if_else(b.icmp_signed("==", lines, I64(together))) as (all_of_them, fewer):
                with all_of_them:
                    self._walk([I64(i) for i in range(together)])
                with fewer, count(b, I64(0), lines) as slot:
                    self._walk([slot])
        else:
            self._walk([I64(0)])

    def _walk(self, slots: list[Any]) -> None:
        b, n = self.b, self.lanes
        bases, carried = [self._base(slot) for slot in slots], [Carried(b, self._chain(slot)) for slot in slots]
        with count(b, I64(0), self._whole(self.length), n) as k:
            for base, chain in zip(bases, carried, strict=True):
                chain.store(self._step(chain.load(), at(b, base, k, self.memory)))
        for slot, chain in zip(slots, carried, strict=True):
            self._put(slot, chain.load())

    def shards(self, item: Any) -> None:
        """Sum a dense line in shards."""
        b, one = self.b, I64(0)
        tree = Tree(b, self.kernel, 1)
        with each_shard(b, self.description.shards) as shard:
            self.length = b.sub(shard.end, shard.begin)
            self.begin(one, item, shard)
            self._walk([one])
            tree.add(shard, self._sum(one, True))
        self._finish(one, tree.whole())

    def panels(self) -> None:
        """Walk a line in panels; the elements that are left of one panel are moved to the front of the next."""
        b, chain = self.b, Carried(self.b, self._chain(I64(0)))
        self.rest.store([I64(0)])
        base = self._base(I64(0))
        with panels(b, self.description, base, self.memory, self.tail, lambda: self.rest.load()[0]) as number:
            total = b.add(self.rest.load()[0], number)
            with count(b, I64(0), self._whole(total), self.lanes) as k:
                # Each panel gives a multiple of n elements to the chains, so lane l still takes the elements with k mod
                # n = l.
                chain.store(self._step(chain.load(), at(b, self.tail, k, self.memory)))
            left = b.sub(total, self._whole(total))
            # Either nothing was taken and the elements stay where they are, or source and target are n or more apart:
            # the copy never reads what it has written.
            copy_elements(b, self.tail, at(b, self.tail, self._whole(total), self.memory), left, self.memory)
            self.rest.store([left])
        self._put(I64(0), chain.load())

    def end(self, slot: Any, dense: bool) -> None:
        """Take the last elements, fewer than there are chains; combine the chains; round and store."""
        self._finish(slot, self._sum(slot, dense))

    def _sum(self, slot: Any, dense: bool) -> list[Any]:
        """Take the last elements, and combine the chains: the sum and its stream."""
        b, n, kernel, length = self.b, self.lanes, self.kernel, self.length
        if dense:
            left = b.sub(length, self._whole(length))
            copy_elements(b, self.tail, at(b, self._base(slot), self._whole(length), self.memory), left, self.memory)
        else:
            (left,) = self.rest.load()
        chain = Carried(b, self._chain(slot))
        with b.if_then(b.icmp_signed(">", left, I64(0))):
            # Lanes without an element step on stale data, and keep their accumulator and their state.
            active = b.icmp_signed("<", iota(n), splat(b, left, n))
            stepped = self._step(chain.load(), self.tail)
            chain.store([b.select(active, new, old) for new, old in zip(stepped, chain.load(), strict=True)])
        acc, state = combine_lanes(b, kernel, chain.load(), least(b, length, I64(n)))
        if n > 1:
            zero = ir.IntType(32)(0)
            acc, state = b.extract_element(acc, zero), b.extract_element(state, zero)
        return [acc, state]

    def _finish(self, slot: Any, total: list[Any]) -> None:
        """Round a sum and store it."""
        b, kernel, (acc, state) = self.b, self.kernel, total
        bits, _ = advance(b, state, 1, kernel.finish_draws)
        (result,) = emit(kernel.finish, b, [acc, bits], 1)
        out = at(b, self.a["out"], self._place(1, slot), MEMORY[kernel.result])
        store_vector(b, result, out, kernel.result, 1)

    def _step(self, chain: list[Any], address: Any) -> list[Any]:
        x = load_vector(self.b, address, self.storage, self.lanes)
        return step(self.b, self.kernel, chain, x, self.lanes, self.machine)

    def _whole(self, number: Any) -> Any:
        return self.b.and_(number, I64(-self.lanes))

    def _base(self, slot: Any) -> Any:
        return at(self.b, self.a["x"], self._place(0, slot), self.memory)

    def _place(self, which: int, slot: Any) -> Any:
        return self.b.load(at(self.b, self.places[which], slot, I64), typ=I64)

    def _chain(self, slot: Any) -> list[Any]:
        b = self.b
        return [b.load(at(b, p, slot, t), typ=t, align=8) for p, t in zip(self.chains, self.types, strict=True)]

    def _put(self, slot: Any, chain: list[Any]) -> None:
        for value, array, type_ in zip(chain, self.chains, self.types, strict=True):
            self.b.store(value, at(self.b, array, slot, type_), align=8)


def step(b: ir.IRBuilder, kernel: Reduce | Scan, chain: list[Any], x: Any, lanes: int, machine: Machine) -> list[Any]:
    """(accumulators, states) after one more element."""
    acc, state = chain
    return list(apply(b, kernel.step, [acc, x], state, lanes, kernel.draws, fusions_for(machine, lanes)))


def combine_lanes(b: ir.IRBuilder, kernel: Reduce, chain: list[Any], used: Any) -> list[Any]:
    """Combine the chains in lanes; ``used`` is the number of chains that have an element."""
    n, width = kernel.order.chains, kernel.order.chains // 2
    while width >= 1:
        acc, state = chain
        # The formula starts at the smallest power of two >= used. From a larger width on, no lane has a partner until
        # that width is reached, so nothing changes there. Only lanes that combine advance their streams.
        shifted = [ir.IntType(32)(min(i + width, n - 1)) for i in range(n)]
        other = b.shuffle_vector(acc, acc, ir.Constant(ir.VectorType(ir.IntType(32), n), shifted))
        bits, following = advance(b, state, n, kernel.draws)
        (total,) = emit(kernel.combine, b, [acc, other, bits], n)
        partner = b.icmp_signed("<", b.add(iota(n), splat(b, I64(width), n)), splat(b, used, n))
        active = b.and_(partner, b.icmp_signed("<", iota(n), splat(b, I64(width), n)))
        chain = [b.select(active, total, acc), b.select(active, following, state)]
        width //= 2
    return chain


class Tree:
    """The sums of shards and their streams that wait for others, on the levels of ``numerics.orders``."""

    def __init__(self, b: ir.IRBuilder, kernel: Reduce, lanes: int) -> None:
        self.b, self.kernel, self.lanes = b, kernel, lanes
        self.types = llvm_type(kernel.accumulator, lanes), llvm_type("u64", lanes)
        self.levels = levels_of(kernel.order.shards)
        self.arrays = [scratch(b, t, self.levels + 1) for t in self.types]

    def add(self, shard: Shard, total: list[Any]) -> None:
        """Add the sum of a shard to those that wait for it, with their streams."""
        b, kernel = self.b, self.kernel
        carried = Carried(b, total)
        with count(b, shard.first, shard.last) as level:
            other, _ = carried.load()
            acc, state = self._load(level)
            bits, state = advance(b, state, self.lanes, kernel.draws)
            (value,) = emit(kernel.combine, b, [acc, other, bits], self.lanes)
            carried.store([value, state])
        self.put(shard.last, carried.load())

    def put(self, level: Any, total: list[Any]) -> None:
        """Let a sum wait on a level."""
        for value, array, type_ in zip(total, self.arrays, self.types, strict=True):
            self.b.store(value, at(self.b, array, level, type_))

    def whole(self) -> list[Any]:
        """The sum of the whole."""
        return self._load(I64(self.levels))

    def _load(self, level: Any) -> list[Any]:
        b = self.b
        return [b.load(at(b, p, level, t), typ=t) for p, t in zip(self.arrays, self.types, strict=True)]


def _group(b: ir.IRBuilder, a: dict[str, Any], kernel: Reduce | Scan, lanes: int, neighbours: bool) -> Group:
    """The group of lines that a kernel takes."""
    return (Neighbours if neighbours else Scattered)(b, a, kernel, lanes)


def build_across(variant: tuple[Reduce, int, bool, Machine]) -> str:
    """The LLVM text of ``reduce(begin, end, lines, x, out, key)`` over groups of ``lanes`` lines, adjacent or any."""
    kernel, lanes, neighbours, machine = variant
    module = ir.Module("across")
    b, a = define(module, "reduce", ARGS)
    n, streams = kernel.order.chains, Streams.load(b, a["key"], kernel.parts)
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

    def begin(shard: Any) -> None:
        numbers = streams.number(b, lines.elements(), lanes, kernel.order.shards, shard)
        numbers = b.mul(numbers, splat(b, I64(n), lanes))
        with count(b, I64(0), I64(n)) as c:
            elements = b.add(numbers, splat(b, c, lanes))
            state = streams.start(b, elements, lanes, kernel.draws or kernel.finish_draws)
            put(c, [first_of(kernel, lanes), state])

    sharded, table, tree = kernel.order.shards > 1, lines.description.shards, Tree(b, kernel, lanes)

    def end(row: Any, first: Any, last: Any) -> None:
        _combine_chains(b, kernel, lanes, least(b, b.sub(last, first), I64(n)), chain, put)
        tree.add(row_of(b, table, row), chain(I64(0)))
        with b.if_then(b.icmp_signed("<", last, lines.description.length)):
            following = row_of(b, table, b.add(row, I64(1)))
            begin(following.number)
            at_hand.store([b.add(row, I64(1)), following.begin, following.end])

    with lines.each():
        begin(I64(0))
        # The row of the shard at hand, its first element, and the first one after it.
        at_hand = Carried(b, [I64(0), I64(0), row_of(b, table, I64(0)).end])
        tree.put(I64(tree.levels), chain(I64(0)))
        with lines.description.runs() as (k, offset, _), count(b, I64(0), lines.description.run) as j:
            row, first, last = at_hand.load() if sharded else [I64(0)] * 3
            # Chain k mod n: the number of chains is a power of two.
            c = b.and_(b.sub(b.add(k, j), first), I64(n - 1))
            x = lines.load(b.add(offset, b.mul(j, lines.description.k_x)))
            if isinstance(lines, Neighbours):
                lines.prefetch(b.add(offset, b.mul(b.add(j, I64(AHEAD)), lines.description.k_x)))
            put(c, step(b, kernel, chain(c), x, lanes, machine))
            if sharded:
                with b.if_then(b.icmp_signed("==", b.add(b.add(k, j), I64(1)), last)):
                    end(row, first, last)
        if not sharded:
            _combine_chains(b, kernel, lanes, least(b, lines.description.length, I64(n)), chain, put)
        acc, state = tree.whole() if sharded else chain(I64(0))
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
    """Combine the chains in the array; ``used`` is the number of chains that have an element."""
    width = kernel.order.chains // 2
    while width >= 1:
        # Pairs (c, c + width) with c < width and c + width < used; none where the difference is negative.
        pairs = least(b, b.sub(used, I64(width)), I64(width))
        with count(b, I64(0), pairs) as c:
            acc, state = chain(c)
            other, _ = chain(b.add(c, I64(width)))
            bits, state = advance(b, state, lanes, kernel.draws)
            (total,) = emit(kernel.combine, b, [acc, other, bits], lanes)
            put(c, [total, state])
        width //= 2


def build_scan(variant: tuple[Scan, int, bool, Machine]) -> str:
    """The LLVM text of ``reduce(begin, end, lines, x, out, key)``: every prefix of groups of lines."""
    kernel, lanes, neighbours, machine = variant
    module = ir.Module("scan")
    b, a = define(module, "reduce", ARGS)
    streams, lines = Streams.load(b, a["key"], kernel.parts), _group(b, a, kernel, lanes, neighbours)
    with lines.each():
        numbers = streams.number(b, lines.elements(), lanes)
        first = streams.start(b, numbers, lanes, kernel.draws or kernel.finish_draws)
        carried = Carried(b, [first_of(kernel, lanes), first])
        with lines.description.runs() as (_, x, out), count(b, I64(0), lines.description.run) as j:
            element = lines.load(b.add(x, b.mul(j, lines.description.k_x)))
            acc, state = step(b, kernel, carried.load(), element, lanes, machine)
            # A prefix draws for its step, then for its store, from the line's one stream: the state of both is carried
            # on.
            bits, state = advance(b, state, lanes, kernel.finish_draws)
            (result,) = emit(kernel.finish, b, [acc, bits], lanes)
            lines.store(result, b.add(out, b.mul(j, lines.description.k_out)))
            carried.store([acc, state])
    b.ret_void()
    return str(module)
