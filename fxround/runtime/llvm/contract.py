"""The Contract shape as LLVM: packed panels, register tiles, k ascending.

What is true here. An item of work is a panel of results (``width`` columns) for a chunk of rows. Its part of the
second operand is packed k by k into a scratch panel, already lifted to the accumulator's type, a block of
k at a time; a tile of rows x vectors of accumulators then runs over the block and is parked in scratch until
the next one. Each lane is one result with its own accumulator and stream. Where element (k, n) of the second
operand lies is two tables of offsets, so that a matrix of any strides and the windows of an image are one case.

Why it is safe. Parking an accumulator does not change it, so every result sees k = 0, 1, 2, ... whatever the
blocks, tiles and threads. Lanes beyond the last column compute on zeros and are dropped.

    before   a blocked product that adds partial sums as blocks come
    after    acc = step(a[k], b[k], acc), k = 0, 1, 2, ... in every lane
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from llvmlite import ir

from fxround.kernel import Contract
from fxround.runtime.llvm.engine import Machine
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
    transpose,
)
from fxround.runtime.llvm.render import bytes_of, emit, literal, llvm_type, splat
from fxround.runtime.llvm.streams import advance, load_key, start

SIZES: Final = ("begin", "end", "rows", "columns", "length", "panels", "chunk", "block", "groups")
STRIDES: Final = ("a_batch", "a_row", "a_k", "b_batch")
POINTERS: Final = ("a", "b", "b_k", "b_n", "out", "scratch", "key")


@dataclass(frozen=True)
class ContractVariant:
    """A Contract with its register tile: lanes of a vector, vectors of a row, and row counts to try in turn."""

    kernel: Contract
    lanes: int
    vectors: int
    rows: tuple[int, ...]

    @property
    def width(self) -> int:
        """Columns of a panel."""
        return self.lanes * self.vectors

    @property
    def streams(self) -> bool:
        """Whether accumulators have a random stream beside them."""
        return self.kernel.draws or self.kernel.finish_draws

    @property
    def stores_from_registers(self) -> bool:
        """Whether the store's rounding is short enough to stand beside every tile."""
        return len(self.kernel.finish.schedule) < 16 and not self.kernel.finish_draws

    @property
    def digest(self) -> str:
        """The key of its compiled code."""
        return f"{self.kernel.digest}:{self.lanes}x{self.vectors}x{self.rows}"

    def scratch_bytes(self, chunk: int, block: int) -> int:
        """One panel block, and the parked accumulators and streams of a chunk."""
        value = bytes_of(self.kernel.accumulator)
        return self.width * (block * value + chunk * (value + (8 if self.streams else 0)))


def tile_for(kernel: Contract, machine: Machine) -> ContractVariant:
    """As many independent accumulators as the registers hold beside what a step needs."""
    lanes = machine.vector_bytes // bytes_of(kernel.accumulator)
    many = machine.registers >= 32
    if len(kernel.step.schedule) < 8:
        return ContractVariant(kernel, lanes, 2, (14, 8, 4, 2, 1) if many else (6, 3, 1))
    if len(kernel.step.schedule) < 24:
        return ContractVariant(kernel, lanes, 1, (8, 4, 2, 1) if many else (4, 2, 1))
    return ContractVariant(kernel, lanes, 1, (4, 2, 1) if many else (2, 1))


def build_contract(variant: ContractVariant) -> str:
    """``contract(SIZES..., STRIDES..., POINTERS...)``.

    Items count (batch, chunk of rows, panel), the panel fastest. a: element (g, m, k) at
    g * a_batch + m * a_row + k * a_k, with g = batch mod groups (groups 0: g = batch). b: element (k, n) at
    batch * b_batch + b_k[k] + b_n[n]. out: (batch, rows, columns), row-major.
    """
    module = ir.Module("contract")
    args = [*((n, I64) for n in SIZES + STRIDES), *((n, PTR) for n in POINTERS)]
    b, a = define(module, "contract", args)
    work = _Panel(b, a, variant)
    # A sum of no products still has one block, of no steps: it stores +0.
    some = b.icmp_signed(">", a["length"], I64(0))
    length = b.select(some, a["length"], I64(1))
    with count(b, a["begin"], a["end"]) as item:
        work.enter(item)
        with count(b, I64(0), length, a["block"]) as k:
            left = b.sub(a["length"], k)
            last = b.icmp_signed("<=", left, a["block"])
            steps = b.select(last, left, a["block"])
            work.pack(k, steps)
            row = work.first_row
            for rows in variant.rows:
                end = b.add(row, b.mul(b.sdiv(b.sub(work.last_row, row), I64(rows)), I64(rows)))
                with count(b, row, end, rows) as r:
                    work.multiply(r, rows, _Block(k, steps, b.icmp_signed("==", k, I64(0)), last))
                row = end
        if not variant.stores_from_registers:
            work.each_row(work.finish_parked)
    b.ret_void()
    return str(module)


@dataclass(frozen=True)
class _Block:
    """Steps k ... k + steps, and whether they are an accumulator's first or last ones."""

    k: Any
    steps: Any
    first: Any
    last: Any


class _Panel:
    """The results of one item, and the scratch that they are computed in."""

    def __init__(self, b: ir.IRBuilder, a: dict[str, Any], variant: ContractVariant) -> None:
        self.b, self.a, self.variant, self.kernel = b, a, variant, variant.kernel
        self.lanes = variant.lanes
        self.value = llvm_type(self.kernel.accumulator, 1)
        self.vector = llvm_type(self.kernel.accumulator, variant.lanes)
        self.key = load_key(b, a["key"])
        self.ends = scratch(b, MEMORY[self.kernel.result], self.lanes)
        panel = b.mul(a["block"], I64(variant.width))
        self.panel = a["scratch"]
        self.accs = at(b, self.panel, panel, self.value)
        self.states = at(b, self.accs, b.mul(a["chunk"], I64(variant.width)), self.value)

    def enter(self, item: Any) -> None:
        """Which rows and columns of which batch this item is."""
        b, a = self.b, self.a
        chunks = b.sdiv(b.add(a["rows"], b.sub(a["chunk"], I64(1))), a["chunk"])
        line = b.sdiv(item, a["panels"])
        self.batch = b.sdiv(line, chunks)
        self.column = b.mul(b.sub(item, b.mul(line, a["panels"])), I64(self.variant.width))
        self.first_row = b.mul(b.sub(line, b.mul(self.batch, chunks)), a["chunk"])
        last = b.add(self.first_row, a["chunk"])
        self.last_row = b.select(b.icmp_signed("<", last, a["rows"]), last, a["rows"])
        grouped = b.icmp_signed(">", a["groups"], I64(0))
        group = b.srem(self.batch, b.select(grouped, a["groups"], I64(1)))
        self.a_base = b.mul(b.select(grouped, group, self.batch), a["a_batch"])
        self.b_base = b.mul(self.batch, a["b_batch"])

    def each_row(self, act: Any) -> None:
        """act(row, vector) for every vector of results of the item."""
        with count(self.b, self.first_row, self.last_row) as row:
            for vector in range(self.variant.vectors):
                act(row, vector)

    def pack(self, k: Any, steps: Any) -> None:
        """Rows k ... k + steps of the second operand, lifted, at the start of the scratch."""
        b, a, variant = self.b, self.a, self.variant
        storage = self.kernel.loads[1]
        memory = MEMORY[storage]
        for vector in range(variant.vectors):
            column = b.add(self.column, I64(vector * self.lanes))
            left = b.sub(a["columns"], column)
            whole = b.icmp_signed(">=", left, I64(self.lanes))
            here = b.select(whole, column, I64(0))
            ends = b.select(whole, b.add(column, I64(self.lanes - 1)), I64(0))
            near, far = (b.load(at(b, a["b_n"], i, I64), typ=I64) for i in (here, ends))
            adjacent = b.and_(whole, b.icmp_signed("==", b.sub(far, near), I64(self.lanes - 1)))
            with b.if_else(adjacent) as (vectors, others):
                with vectors, count(b, I64(0), steps) as i:
                    value = load_vector(b, self._right(b.add(k, i), near, memory), storage, self.lanes)
                    (lifted,) = emit(self.kernel.lifts[1], b, [value], self.lanes)
                    b.store(lifted, self._packed(i, vector), align=4)
                with others, b.if_else(b.and_(whole, self._runs_along_k(k, steps))) as (turned, scalars):
                    with turned:
                        self._pack_turned(k, steps, vector, column)
                    with scalars:
                        self._pack_scalars(k, I64(0), steps, vector, column, left)

    def _runs_along_k(self, k: Any, steps: Any) -> Any:
        """Offsets grow with k: they are consecutive if the last is steps - 1 above the first."""
        b, a = self.b, self.a
        some = b.icmp_signed(">", steps, I64(0))
        ends = b.select(some, b.add(k, b.sub(steps, I64(1))), I64(0))
        near, far = (b.load(at(b, a["b_k"], i, I64), typ=I64) for i in (b.select(some, k, I64(0)), ends))
        return b.and_(some, b.icmp_signed("==", b.sub(far, near), b.sub(steps, I64(1))))

    def _pack_turned(self, k: Any, steps: Any, vector: int, column: Any) -> None:
        """Square blocks of a transposed matrix, turned in registers; what is left of k one by one."""
        b, a, lanes = self.b, self.a, self.lanes
        storage = self.kernel.loads[1]
        whole = b.and_(steps, I64(-lanes))
        offsets = [b.load(at(b, a["b_n"], b.add(column, I64(n)), I64), typ=I64) for n in range(lanes)]
        with count(b, I64(0), whole, lanes) as i:
            rows = [
                load_vector(b, self._right(b.add(k, i), offset, MEMORY[storage]), storage, lanes) for offset in offsets
            ]
            for step, value in enumerate(transpose(b, rows)):
                (lifted,) = emit(self.kernel.lifts[1], b, [value], lanes)
                b.store(lifted, self._packed(b.add(i, I64(step)), vector), align=4)
        self._pack_scalars(k, whole, steps, vector, column, I64(lanes))

    def _pack_scalars(self, k: Any, first: Any, steps: Any, vector: int, column: Any, left: Any) -> None:
        b, a = self.b, self.a
        storage = self.kernel.loads[1]
        with b.if_then(b.icmp_signed("<", left, I64(self.lanes))), count(b, I64(0), steps) as i:
            b.store(literal(self.kernel.accumulator, 0, self.lanes), self._packed(i, vector), align=4)
        valid = b.select(b.icmp_signed("<", left, I64(self.lanes)), left, I64(self.lanes))
        with count(b, I64(0), valid) as n:
            offset = b.load(at(b, a["b_n"], b.add(column, n), I64), typ=I64)
            with count(b, first, steps) as i:
                value = load_vector(b, self._right(b.add(k, i), offset, MEMORY[storage]), storage, 1)
                (lifted,) = emit(self.kernel.lifts[1], b, [value], 1)
                b.store(lifted, at(b, self._packed(i, vector), n, self.value), align=4)

    def _right(self, k: Any, offset: Any, memory: Any) -> Any:
        b, a = self.b, self.a
        step = b.load(at(b, a["b_k"], k, I64), typ=I64)
        return at(b, a["b"], b.add(self.b_base, b.add(step, offset)), memory)

    def _packed(self, step: Any, vector: int) -> Any:
        b = self.b
        index = b.add(b.mul(step, I64(self.variant.width)), I64(vector * self.lanes))
        return at(b, self.panel, index, self.value)

    def multiply(self, row: Any, rows: int, block: _Block) -> None:
        """The block's steps for ``rows`` rows."""
        b, kernel, lanes, vectors = self.b, self.kernel, self.lanes, self.variant.vectors
        places = [(b.add(row, I64(r)), v) for r in range(rows) for v in range(vectors)]
        lines = [self._left(b.add(row, I64(r)), block.k) for r in range(rows)]
        carried = self._begin(places, block)
        with count(b, I64(0), block.steps) as i:
            values = carried.load()
            accs, states = values[: len(places)], values[len(places) :]
            right = [b.load(self._packed(i, v), typ=self.vector, align=4) for v in range(vectors)]
            for r, line in enumerate(lines):
                left = self._lift_left(line, i)
                for v in range(vectors):
                    place = r * vectors + v
                    bits: Any = literal("u32", 0, lanes)
                    if kernel.draws:
                        bits, states[place] = advance(b, states[place], lanes, True)
                    (accs[place],) = emit(kernel.step, b, [left, right[v], accs[place], bits], lanes)
            carried.store(accs + states)
        if kernel.combine is not None:
            with b.if_then(b.icmp_signed(">", block.steps, I64(0))):
                self._combine(places, carried, block)
        if not self.variant.stores_from_registers:
            self._park(places, carried.load())
            return
        with b.if_else(block.last) as (done, more):
            with done:
                self._finish(places, carried.load())
            with more:
                self._park(places, carried.load())

    def _combine(self, places: list[tuple[Any, int]], carried: Carried, block: _Block) -> None:
        """total = combine(total, acc): the parked values are totals, and every block is a chunk."""
        b, kernel = self.b, self.kernel
        assert kernel.combine is not None
        totals = Carried(b, [literal(kernel.accumulator, 0, self.lanes)] * len(places))
        with b.if_then(b.not_(block.first)):
            totals.store([b.load(self._slots(row, v)[0], typ=self.vector, align=4) for row, v in places])
        values, combined = carried.load(), totals.load()
        for i in range(len(places)):
            bits: Any = literal("u32", 0, self.lanes)
            if kernel.draws:
                bits, values[len(places) + i] = advance(b, values[len(places) + i], self.lanes, True)
            (values[i],) = emit(kernel.combine, b, [combined[i], values[i], bits], self.lanes)
        carried.store(values)

    def _begin(self, places: list[tuple[Any, int]], block: _Block) -> Carried:
        """acc = +0 and the streams' first states, or what the block before has parked."""
        b, lanes, streams = self.b, self.lanes, self.variant.streams
        zero, idle = literal(self.kernel.accumulator, 0, lanes), literal("u64", 0, lanes)
        carried = Carried(b, [zero] * len(places) + [idle] * (len(places) if streams else 0))
        slots = [self._slots(row, v) for row, v in places]
        with b.if_else(block.first) as (first, later):
            with first:
                if streams:
                    indices = [splat(b, self._index(row, v)[0], lanes) for row, v in places]
                    states = [start(b, b.add(n, iota(lanes)), self.key, lanes, True) for n in indices]
                    carried.store([zero] * len(places) + states)
            with later:
                accs = [b.load(acc, typ=self.vector, align=4) for acc, _ in slots]
                accs = accs if self.kernel.combine is None else [zero] * len(places)
                states = [b.load(s, typ=llvm_type("u64", lanes), align=8) for _, s in slots] if streams else []
                carried.store(accs + states)
        return carried

    def _park(self, places: list[tuple[Any, int]], values: list[Any]) -> None:
        for i, (row, v) in enumerate(places):
            acc, state = self._slots(row, v)
            self.b.store(values[i], acc, align=4)
            if self.variant.streams:
                self.b.store(values[len(places) + i], state, align=8)

    def _finish(self, places: list[tuple[Any, int]], values: list[Any]) -> None:
        idle = literal("u64", 0, self.lanes)
        for i, (row, v) in enumerate(places):
            state = values[len(places) + i] if self.variant.streams else idle
            self._store(row, v, values[i], state)

    def finish_parked(self, row: Any, vector: int) -> None:
        """The store of one parked vector."""
        b = self.b
        acc, state = self._slots(row, vector)
        parked: Any = literal("u64", 0, self.lanes)
        if self.variant.streams:
            parked = b.load(state, typ=llvm_type("u64", self.lanes), align=8)
        self._store(row, vector, b.load(acc, typ=self.vector, align=4), parked)

    def _left(self, row: Any, k: Any) -> Any:
        b, a = self.b, self.a
        offset = b.add(self.a_base, b.add(b.mul(row, a["a_row"]), b.mul(k, a["a_k"])))
        return at(b, a["a"], offset, MEMORY[self.kernel.loads[0]])

    def _lift_left(self, line: Any, step: Any) -> Any:
        b, storage = self.b, self.kernel.loads[0]
        address = at(b, line, b.mul(step, self.a["a_k"]), MEMORY[storage])
        (lifted,) = emit(
            self.kernel.lifts[0], b, [splat(b, load_vector(b, address, storage, 1), self.lanes)], self.lanes
        )
        return lifted

    def _store(self, row: Any, vector: int, value: Any, state: Any) -> None:
        """The store's rounding, and the store."""
        b, kernel, result = self.b, self.kernel, self.kernel.result
        bits, _ = advance(b, state, self.lanes, kernel.finish_draws)
        (rounded,) = emit(kernel.finish, b, [value, bits], self.lanes)
        index, column = self._index(row, vector)
        here = at(b, self.a["out"], index, MEMORY[result])
        left = b.sub(self.a["columns"], column)
        short = b.icmp_signed("<", left, I64(self.lanes))
        store_vector(b, rounded, b.select(short, self.ends, here), result, self.lanes)
        with b.if_then(b.and_(short, b.icmp_signed(">", left, I64(0)))):
            copy_elements(b, here, self.ends, left, MEMORY[result])

    def _index(self, row: Any, vector: int) -> tuple[Any, Any]:
        b, a = self.b, self.a
        column = b.add(self.column, I64(vector * self.lanes))
        line = b.add(b.mul(self.batch, a["rows"]), row)
        return b.add(b.mul(line, a["columns"]), column), column

    def _slots(self, row: Any, vector: int) -> tuple[Any, Any]:
        b = self.b
        place = b.mul(b.sub(row, self.first_row), I64(self.variant.width))
        index = b.add(place, I64(vector * self.lanes))
        return at(b, self.accs, index, self.value), at(b, self.states, index, I64)
