"""The register tile of the packed contraction: where its results start, step, wait and are stored.

A tile is ``rows`` x ``vectors`` accumulators; each lane is one result with its own stream. A tile starts from +0 or
from the values that the previous block of k parked in scratch, takes the steps of its block, and ends in scratch or in
the result. Parking does not change an accumulator, so every result takes the steps k = 0, 1, 2, ... whatever the
blocks, tiles and threads are. ``Item._store`` is the only place where the packed kernel writes a result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from fxround.kernels.kinds import Contract
from fxround.numerics.arithmetic.scalar import Expr, Function
from fxround.numerics.orders import Shard
from fxround.runtime.cpu.llvm.engine import Machine
from fxround.runtime.cpu.llvm.loops import I64, MEMORY, Carried, at, count, iota, masked_load, scratch, store_vector
from fxround.runtime.cpu.llvm.render import bytes_of, literal, llvm_type, splat
from fxround.runtime.cpu.llvm.shards import levels_of
from fxround.runtime.cpu.llvm.steps import Steps
from fxround.runtime.cpu.llvm.streams import Streams


@dataclass(frozen=True)
class ContractVariant:
    """A Contract with its register tile.

    ``lanes`` is the width of a vector, ``vectors`` the number of vectors in a row of the tile, ``rows`` the heights to
    use in turn, ``pitch`` the distance between two packed rows of the first operand in accumulators.
    """

    kernel: Contract
    lanes: int
    vectors: int
    rows: tuple[int, ...]
    pitch: int
    machine: Machine

    @property
    def width(self) -> int:
        """The number of columns of a panel."""
        return self.lanes * self.vectors

    @property
    def stores_from_registers(self) -> bool:
        """Whether the store's rounding is short enough to be emitted after every tile."""
        # The store is emitted once for each accumulator of each tile height. A finish that draws needs the state of its
        # stream, which only the parked path reads.
        return len(self.kernel.finish.schedule) < 16 and not self.kernel.finish_draws

    @property
    def digest(self) -> str:
        """The key of the compiled code."""
        return f"{self.kernel.digest}:{self.lanes}x{self.vectors}x{self.rows}:{self.pitch}:{self.machine}"

    @property
    def parked_bytes(self) -> int:
        """The bytes of a parked accumulator and of its stream."""
        return bytes_of(self.kernel.accumulator) + (8 if self.kernel.streams else 0)

    @property
    def levels(self) -> int:
        """The number of results that may be parked for each place: those that wait in the tree of shards, and one."""
        return levels_of(self.kernel.shards) + 1

    def scratch_bytes(self, chunk: int, wide: int, block: int) -> int:
        """The bytes of scratch for an item of ``chunk`` rows and ``wide`` panels in blocks of ``block`` steps.

        They hold the packed rows, one packed panel and the parked results; ``Item.__init__`` lays them out in this
        order.
        """
        packed = bytes_of(self.kernel.accumulator) * (chunk * self.pitch + block * self.width)
        return packed + chunk * wide * self.width * self.parked_bytes * self.levels


def tile_for(kernel: Contract, machine: Machine, block: int) -> ContractVariant:
    """The variant with as many independent accumulators as the registers hold beside the operands of a step.

    ``block`` is the largest number of steps in a block.
    """
    lanes = machine.vector_bytes // bytes_of(kernel.accumulator)
    many = machine.registers >= 32
    # A pitch of a large power of two bytes would put one step of all rows into the same set of the first-level cache;
    # sixteen elements beyond the block avoid that for chunks of 2^n steps. A row of ``block`` steps fits into its
    # pitch.
    pitch = -(-block // 16) * 16 + 16
    work = _usual(kernel.step)
    # Every tuple of heights ends in 1, so that ``contract`` covers any number of rows. Registers: 14 x 2 accumulators,
    # two vectors of the second operand and one of the first are 31 of 32; 6 x 2 + 3 are 15 of 16. Longer steps leave
    # room for their intermediate values.
    if work < 3:
        return ContractVariant(kernel, lanes, 2, (14, 8, 4, 2, 1) if many else (6, 3, 1), pitch, machine)
    if kernel.coins and kernel.accumulator == "f32":
        return ContractVariant(kernel, lanes, 2, (6, 4, 2, 1) if many else (2, 1), pitch, machine)
    if kernel.accumulator == "f32":
        return ContractVariant(kernel, lanes, 2, (8, 4, 2, 1) if many else (3, 1), pitch, machine)
    if kernel.bounded:
        # A step waits for itself: with fewer accumulators nothing else is computed meanwhile.
        return ContractVariant(kernel, lanes, 2, (4, 2, 1) if many else (3, 1), pitch, machine)
    if work < 20 and kernel.streams and not many:
        # So do short steps that draw. Those that draw nothing took longer in this tile on Zen 3.
        return ContractVariant(kernel, lanes, 2, (3, 1), pitch, machine)
    if work < 20:
        return ContractVariant(kernel, lanes, 1, (8, 4, 2, 1) if many else (4, 2, 1), pitch, machine)
    return ContractVariant(kernel, lanes, 1, (4, 2, 1) if many else (2, 1), pitch, machine)


def _usual(step: Function) -> int:
    """The number of operators of a step without those that are seldom needed."""
    seen: set[Expr] = set()
    stack = list(step.results)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend((node.args[0], node.args[2]) if node.op == "rarely" else node.args)
    return sum(node.op not in ("const", "param", "bits", "from_bits", "widen") for node in seen)


def quick_for(kernel: Contract, machine: Machine) -> Contract | None:
    """The kernel's quick equal; a watched one needs a fused multiply-add and known exception flags."""
    return kernel.quick if kernel.quick is None or kernel.quick.bounded or machine.directed else None


@dataclass(frozen=True)
class Block:
    """The steps k ... k + steps of a shard.

    first   whether they are the first ones of an accumulator
    ends    whether they are its last ones, and its sum is added to those that wait for it
    last    whether they are the last ones of a result
    """

    k: Any
    steps: Any
    shard: Shard
    first: Any
    ends: Any
    last: Any


class Item:
    """The results of one item of work, and the scratch in which they are computed."""

    def __init__(self, b: ir.IRBuilder, a: dict[str, Any], variant: ContractVariant) -> None:
        self.b, self.a, self.variant, self.kernel = b, a, variant, variant.kernel
        self.lanes = variant.lanes
        self.value = llvm_type(self.kernel.accumulator, 1)
        self.vector = llvm_type(self.kernel.accumulator, variant.lanes)
        self.streams: Any = Streams.load(b, a["key"], variant.kernel.parts) if variant.kernel.streams else None
        self.ends = scratch(b, MEMORY[self.kernel.result], self.lanes)
        # Scratch: ``chunk`` packed rows of ``pitch``, a panel of ``block`` steps by ``width`` columns, then the parked
        # accumulators and the parked states, ``chunk`` x ``width`` of each for every panel, on every level of the tree
        # of shards. All accumulator counts are even, so the states are aligned to 8 bytes even where accumulators have
        # 4.
        self.left = a["scratch"]
        self.panel = at(b, self.left, b.mul(a["chunk"], I64(variant.pitch)), self.value)
        self.accs = at(b, self.panel, b.mul(a["block"], I64(variant.width)), self.value)
        self.of_level = b.mul(b.mul(a["chunk"], a["wide"]), I64(variant.width))
        self.states = at(b, self.accs, b.mul(self.of_level, I64(variant.levels)), self.value)
        self.level: Any = I64(0)
        self.steps = Steps(b, self.kernel, variant.lanes, variant.machine, a["flags"])

    def enter(self, item: Any) -> None:
        """Find the batch, rows and panels of an item: panels vary fastest, then chunks of rows."""
        b, a = self.b, self.a
        chunks, groups = self._ceiling(a["rows"], a["chunk"]), self._ceiling(a["panels"], a["wide"])
        line = b.sdiv(item, groups)
        self.batch = b.sdiv(line, chunks)
        self.first_panel = b.mul(b.sub(item, b.mul(line, groups)), a["wide"])
        self.last_panel = self._smaller(b.add(self.first_panel, a["wide"]), a["panels"])
        self.first_row = b.mul(b.sub(line, b.mul(self.batch, chunks)), a["chunk"])
        self.last_row = self._smaller(b.add(self.first_row, a["chunk"]), a["rows"])
        # With groups, the first operand is shared: batch i reads matrix i mod groups. The select keeps the remainder
        # away from a division by zero.
        grouped = b.icmp_signed(">", a["groups"], I64(0))
        group = b.srem(self.batch, b.select(grouped, a["groups"], I64(1)))
        self.a_base = b.mul(b.select(grouped, group, self.batch), a["a_batch"])
        self.b_base = b.mul(self.batch, a["b_batch"])

    def _ceiling(self, n: Any, parts: Any) -> Any:
        return self.b.sdiv(self.b.add(n, self.b.sub(parts, I64(1))), parts)

    def _smaller(self, x: Any, y: Any) -> Any:
        return self.b.select(self.b.icmp_signed("<", x, y), x, y)

    def enter_shard(self, shard: Shard) -> None:
        """Park on the level on which the sum of a shard will wait; nothing waits there before."""
        self.level = shard.last

    def enter_panel(self, panel: Any) -> None:
        """Move to the columns of a panel, and find whether all exist and are consecutive in the result."""
        b = self.b
        self.column = b.mul(panel, I64(self.variant.width))
        self.whole = self._side_by_side(self.column, self.variant.width)
        self.parked = b.mul(b.sub(panel, self.first_panel), self.a["chunk"])

    def _side_by_side(self, column: Any, number: int) -> Any:
        """Whether the result has ``number`` columns from ``column`` on at consecutive addresses."""
        b = self.b
        # out_n is strictly ascending: if the last of n offsets is n - 1 above the first, all are consecutive. Where the
        # columns do not all exist, entry 0 is read instead, which every non-empty result has.
        exist = b.icmp_signed("<=", b.add(column, I64(number)), self.a["columns"])
        last = b.select(exist, b.add(column, I64(number - 1)), I64(0))
        near, far = self._out(b.select(exist, column, I64(0))), self._out(last)
        return b.and_(exist, b.icmp_signed("==", b.sub(far, near), I64(number - 1)))

    def _out(self, column: Any) -> Any:
        return self.b.load(at(self.b, self.a["out_n"], column, I64), typ=I64)

    def each_row(self, act: Any) -> None:
        """Call act(row, vector) for every vector of results of the panel."""
        with count(self.b, self.first_row, self.last_row) as row:
            for vector in range(self.variant.vectors):
                act(row, vector)

    def start_stream(self, row: Any, vector: int, shard: Any) -> None:
        """Park the first states of one vector of streams of a shard."""
        b = self.b
        line, column = self._index(row, vector)
        exists = b.icmp_signed(
            "<", b.add(splat(b, column, self.lanes), iota(self.lanes)), splat(b, self.a["columns"], self.lanes)
        )
        # A stream is numbered by the place of its result, so it does not depend on how the work is cut. Lanes without a
        # column get the stream of offset 0, and their results are dropped.
        offsets = masked_load(b, at(b, self.a["out_n"], column, I64), I64, exists, self.lanes)
        elements = b.add(splat(b, line, self.lanes), offsets)
        state = self.streams.start(
            b, self.streams.number(b, elements, self.lanes, self.kernel.shards, shard), self.lanes, True
        )
        b.store(state, self._slots(row, vector, self.level)[1], align=8)

    def multiply(self, row: Any, rows: int, block: Block) -> None:
        """Take the block's steps for ``rows`` rows, then park or store their results."""
        b, lanes, vectors = self.b, self.lanes, self.variant.vectors
        # Each lane steps through this block alone and in ascending order of k; ``contract`` visits the blocks in
        # ascending order. No two accumulators are ever added but by ``combine``, where the kernel asks for it.
        places = [(b.add(row, I64(r)), v) for r in range(rows) for v in range(vectors)]
        line = at(b, self.left, b.mul(b.sub(row, self.first_row), I64(self.variant.pitch)), self.value)
        carried = self._begin(places, block)
        with self.steps.along(I64(0), block.steps, carried, len(places)) as i:
            values = carried.load()
            here = at(b, line, i, self.value)
            right = [b.load(self.packed(i, v), typ=self.vector, align=4) for v in range(vectors)]
            for r in range(rows):
                one = b.load(at(b, here, I64(r * self.variant.pitch), self.value), typ=self.value, align=4)
                left = splat(b, one, lanes)
                for v in range(vectors):
                    self.steps.step(values, len(places), r * vectors + v, left, right[v])
            carried.store(values)
        if self.kernel.shards > 1:
            with b.if_then(block.ends):
                self.steps.add_shards(carried, len(places), block.shard, lambda level: self._parked(places, level))
        if self.kernel.chunk:
            # A sum of no products has no chunk: it draws no word for a combination.
            with b.if_then(b.icmp_signed(">", block.steps, I64(0))):
                self._combine(places, carried, block)
        if not self.variant.stores_from_registers:
            self._park(places, carried.load())
            return
        with b.if_else(b.and_(block.last, self.whole)) as (done, more):
            with done:
                for i, (r, v) in enumerate(places):
                    self._store(r, v, carried.load()[i], literal("u64", 0, lanes), whole=True)
            with more:
                self._park(places, carried.load())

    def _combine(self, places: list[tuple[Any, int]], carried: Carried, block: Block) -> None:
        """Emit total = combine(total, acc): every block is a chunk, and the parked values are totals."""
        b = self.b
        totals = Carried(b, [self.steps.zero] * len(places))
        with b.if_then(b.not_(block.first)):
            totals.store(self._parked(places, self.level)[0])
        values = carried.load()
        self.steps.combine(values, totals.load())
        carried.store(values)

    def _begin(self, places: list[tuple[Any, int]], block: Block) -> Carried:
        """Start from +0 or from what the previous block parked; states are always parked."""
        b = self.b
        _, states = self._parked(places, self.level)
        carried = self.steps.carried([self.steps.zero] * len(places), states)
        if not self.kernel.chunk:
            with b.if_then(b.not_(block.first)):
                values = carried.load()
                # A chunk starts from +0: there the parked values are totals, and ``_combine`` reads them.
                values[: len(places)] = self._parked(places, self.level)[0]
                carried.store(values)
        return carried

    def _parked(self, places: list[tuple[Any, int]], level: Any) -> tuple[list[Any], list[Any]]:
        """The accumulators and the states that are parked on a level; no states in a kernel without streams."""
        b, streams = self.b, llvm_type("u64", self.lanes)
        slots = [self._slots(row, v, level) for row, v in places]
        states = [b.load(state, typ=streams, align=8) for _, state in slots] if self.kernel.streams else []
        return [b.load(acc, typ=self.vector, align=4) for acc, _ in slots], states

    def _park(self, places: list[tuple[Any, int]], values: list[Any]) -> None:
        """Store the accumulators and states in scratch."""
        for i, (row, v) in enumerate(places):
            acc, state = self._slots(row, v, self.level)
            self.b.store(values[i], acc, align=4)
            if self.kernel.streams:
                self.b.store(values[len(places) + i], state, align=8)

    def finish_parked(self, row: Any, vector: int) -> None:
        """Round and store one parked vector."""
        (acc,), states = self._parked([(row, vector)], self.level)
        (state,) = states or [literal("u64", 0, self.lanes)]
        self._store(row, vector, acc, state, whole=False)

    def _store(self, row: Any, vector: int, value: Any, state: Any, whole: bool) -> None:
        """Round and store one vector of results. ``whole``: every lane has its column, and they are consecutive."""
        b, result = self.b, self.kernel.result
        rounded = self.steps.finish(value, state)
        line, column = self._index(row, vector)
        here = at(b, self.a["out"], line, MEMORY[result])
        if whole:
            first = self._out(column)
            store_vector(b, rounded, at(b, here, first, MEMORY[result]), result, self.lanes)
            return
        with b.if_else(self._side_by_side(column, self.lanes)) as (together, apart):
            with together:
                store_vector(b, rounded, at(b, here, self._out(column), MEMORY[result]), result, self.lanes)
            with apart:
                # A vector store here could write over a neighbour's result, or beyond the tensor: only the ``left``
                # lanes that have a column are copied, each to its own place. With none left the loop does not run.
                store_vector(b, rounded, self.ends, result, self.lanes)
                left = self._smaller(b.sub(self.a["columns"], column), I64(self.lanes))
                with count(b, I64(0), left) as n:
                    one = b.load(at(b, self.ends, n, MEMORY[result]), typ=MEMORY[result])
                    b.store(one, at(b, here, self._out(b.add(column, n)), MEMORY[result]))

    def packed(self, step: Any, vector: int) -> Any:
        """The address in the packed panel of a vector of step ``step``."""
        b = self.b
        index = b.add(b.mul(step, I64(self.variant.width)), I64(vector * self.lanes))
        return at(b, self.panel, index, self.value)

    def _index(self, row: Any, vector: int) -> tuple[Any, Any]:
        """The offset of a row in the result, and the first column of a vector."""
        b, a = self.b, self.a
        column = b.add(self.column, I64(vector * self.lanes))
        return b.add(b.mul(self.batch, a["out_batch"]), b.mul(row, a["out_row"])), column

    def _slots(self, row: Any, vector: int, level: Any) -> tuple[Any, Any]:
        """The addresses in scratch of a vector's accumulators and states on a level."""
        b = self.b
        place = b.mul(b.add(self.parked, b.sub(row, self.first_row)), I64(self.variant.width))
        index = b.add(b.mul(level, self.of_level), b.add(place, I64(vector * self.lanes)))
        return at(b, self.accs, index, self.value), at(b, self.states, index, I64)
