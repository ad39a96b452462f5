"""A chain over rows as LLVM: its maps and row reductions, one row after the other, in the first-level cache.

A reduction that follows the map that makes its operand takes each vector of results as it is computed, or each block of
them from memory. If a chain begins with a reduction, that of a row runs beside the last map of the row before it: this
hides the latency of its steps, and reads a row while another one is written. A value of one number for each row is in a
register. The elements, the random words and the order of every sum are those of the kernels, so that the bits are the
same.

A row is whole blocks of elements, and chains divide a block: no vector and no chain is short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from fxround.kernels.kinds import Map, Reduce
from fxround.numerics.arithmetic.randomness import BLOCK
from fxround.numerics.arithmetic.scalar import Expr
from fxround.numerics.formats.storage import ELEMENT_OF, Storage
from fxround.runtime.cpu.llvm.engine import Machine
from fxround.runtime.cpu.llvm.loops import (
    I64,
    MEMORY,
    PTR,
    Carried,
    at,
    bytes_in,
    count,
    define,
    iota,
    least,
    load_vector,
    prefetch,
    scratch,
    store_vector,
)
from fxround.runtime.cpu.llvm.map import Access, Body, module_name, random_words, seeds_of
from fxround.runtime.cpu.llvm.reduce import combine_lanes, first_of, step
from fxround.runtime.cpu.llvm.render import emit, emit_results, splat
from fxround.runtime.cpu.llvm.streams import Streams, advance


@dataclass(frozen=True)
class Value:
    """A value of a chain.

    wide: whether it is a row of elements, or one number for each row. outside: its number among the tensors that a call
    gives addresses and strides of rows for; None for a value in memory of the kernel's own.
    """

    storage: Storage
    wide: bool
    outside: int | None


@dataclass(frozen=True)
class RowStage:
    """A kernel of a chain; ``operands`` and ``results`` are indices into its values."""

    kernel: Map | Reduce
    operands: tuple[int, ...]
    results: tuple[int, ...]


@dataclass(frozen=True)
class RowVariant:
    """A chain for a processor: its stages in order, and its values."""

    stages: tuple[RowStage, ...]
    values: tuple[Value, ...]
    machine: Machine

    @property
    def digest(self) -> str:
        """The key of the compiled code."""
        stages = (f"{s.kernel.digest}{s.operands}{s.results}" for s in self.stages)
        values = (f"{v.storage}{'*' if v.wide else ''}{v.outside}" for v in self.values)
        return f"rows:{':'.join(stages)}:{','.join(values)}"

    @property
    def space(self) -> int:
        """The bytes of memory of a call's own for each element of a row."""
        return sum(bytes_in(MEMORY[v.storage]) for v in self.values if v.wide and v.outside is None)


def build_row_chain(variant: RowVariant) -> str:
    """The LLVM text of ``rows(begin, end, length, values, strides, keys, space)`` over rows.

    length           the elements of a row
    values, strides  of each tensor outside the address of element 0, and the elements from one row to the next
    keys             the address of each stage's key: seed low, seed high, sample, node numbers
    space            memory of the call's own
    """
    module = ir.Module(module_name(*(s.kernel for s in variant.stages if isinstance(s.kernel, Map))))
    names = [("begin", I64), ("end", I64), ("length", I64)]
    b, a = define(module, "rows", [*names, *((n, PTR) for n in ("values", "strides", "keys", "space"))])
    _Rows(b, a, variant).emit()
    b.ret_void()
    return str(module)


class _Rows:
    """The loop over rows.

    tensors    by value, the address of element 0 and the elements from one row to the next
    numbers    by value of one number for each row, where the present row's is
    inner      by wide value in memory of the call's own, where it is
    bodies     by stage that is a map, its body
    streams    by stage that is a reduction, its streams
    """

    def __init__(self, b: ir.IRBuilder, a: dict[str, Any], variant: RowVariant) -> None:
        self.b, self.a, self.values, self.machine = b, a, variant.values, variant.machine
        self.stages = variant.stages
        self.tensors: dict[int, tuple[Any, Any]] = {}
        self.numbers: dict[int, Any] = {}
        self.inner: dict[int, Any] = {}
        self.bodies: dict[int, Body] = {}
        self.streams: dict[int, Streams] = {}
        offset: Any = I64(0)
        for i, value in enumerate(self.values):
            memory = MEMORY[value.storage]
            if value.outside is not None:
                pointer = b.load(at(b, a["values"], I64(value.outside), PTR), typ=PTR)
                self.tensors[i] = pointer, b.load(at(b, a["strides"], I64(value.outside), I64), typ=I64)
            elif value.wide:
                self.inner[i] = b.gep(a["space"], [offset], source_etype=ir.IntType(8))
                offset = b.add(offset, b.mul(a["length"], I64(bytes_in(memory))))
            if not value.wide:
                self.numbers[i] = scratch(b, memory, 1)
        for number, stage in enumerate(self.stages):
            key = b.load(at(b, a["keys"], I64(number), PTR), typ=PTR)
            if isinstance(stage.kernel, Reduce):
                self.streams[number] = Streams.load(b, key, False)
                continue
            seeds = seeds_of(b, key, stage.kernel.draws, False)
            access = tuple[Access, ...]("contiguous" if self.values[i].wide else "row" for i in stage.operands)
            self.bodies[number] = Body(b, stage.kernel, access, self.machine, seeds, None)
        self.wide_maps = [n for n in self.bodies if self.values[self.stages[n].results[0]].wide]

    def emit(self) -> None:
        """Emit the loop."""
        b, a = self.b, self.a
        ahead = self._first_chains() if self._begins_early() else None
        if ahead is not None:
            with b.if_then(b.icmp_signed("<", a["begin"], a["end"])):
                ahead.store(self._start(0, a["begin"]))
                self._reduce(0, ahead, a["begin"])
        with count(b, a["begin"], a["end"]) as row:
            self._load_numbers(row)
            following = least(b, b.add(row, I64(1)), b.sub(a["end"], I64(1)))
            for number, stage in enumerate(self.stages):
                if isinstance(stage.kernel, Reduce):
                    if number == 0 and ahead is not None:
                        self._finish(number, ahead, row)
                    elif number not in map(self._taker, self.wide_maps):
                        chain = Carried(b, self._start(number, row))
                        self._reduce(number, chain, row)
                        self._finish(number, chain, row)
                elif number not in self.wide_maps:
                    self._compute_numbers(number, row)
                else:
                    self._compute_row(number, row, following, ahead if number == self.wide_maps[-1] else None)

    def _begins_early(self) -> bool:
        """Whether the first stage is a reduction of what a call gives, which can run beside a map of the row before."""
        return 0 in self.streams and self.stages[0].operands[0] in self.tensors and bool(self.wide_maps)

    # ---- where values are ----

    def _address(self, i: int, row: Any, first: Any = None) -> Any:
        """The address of a wide value's row, or of its element ``first``."""
        b, memory = self.b, MEMORY[self.values[i].storage]
        if i in self.inner:
            start = self.inner[i]
        else:
            pointer, stride = self.tensors[i]
            start = at(b, pointer, b.mul(row, stride), memory)
        return start if first is None else at(b, start, first, memory)

    def _load_numbers(self, row: Any) -> None:
        """Load the numbers of a row that the call gives."""
        b = self.b
        made = {i for stage in self.stages for i in stage.results}
        for i in sorted(self.numbers.keys() - made):
            (pointer, stride), memory = self.tensors[i], MEMORY[self.values[i].storage]
            b.store(b.load(at(b, pointer, b.mul(row, stride), memory), typ=memory), self.numbers[i])

    def _put_number(self, i: int, value: Any, row: Any) -> None:
        """Keep a number of a row, and store it where the call wants it."""
        b, storage = self.b, self.values[i].storage
        store_vector(b, value, self.numbers[i], storage, 1)
        if i in self.tensors:
            pointer, stride = self.tensors[i]
            store_vector(b, value, at(b, pointer, b.mul(row, stride), MEMORY[storage]), storage, 1)

    def _loaded(self, number: int) -> dict[Expr, Any]:
        """The operands of a map of which the row has one number."""
        stage = self.stages[number]
        operands = zip(self.bodies[number].kernel.body.params, stage.operands, strict=False)
        return {
            param: load_vector(self.b, self.numbers[i], self.values[i].storage, 1)
            for param, i in operands
            if i in self.numbers
        }

    # ---- maps ----

    def _compute_numbers(self, number: int, row: Any) -> None:
        """Emit a map of one number for each row."""
        b, stage, kernel = self.b, self.stages[number], self.bodies[number].kernel
        env = self._loaded(number)
        for d, (word, param) in enumerate(zip(kernel.draws, kernel.body.params[len(kernel.loads) :], strict=True)):
            seed = b.load(at(b, self.bodies[number].seeds, I64(d), I64), typ=I64)
            (env[param],) = emit(random_words(word.width), b, [row, seed], 1)
        for i, result in zip(stage.results, emit_results(kernel.body.results, b, env, 1, None), strict=True):
            self._put_number(i, result, row)

    def _compute_row(self, number: int, row: Any, following: Any, ahead: Carried | None) -> None:
        """Emit a map over a row, and what runs beside it: the reduction of a result, and ``ahead`` of the next row."""
        b, stage, body, values = self.b, self.stages[number], self.bodies[number], self.values
        taker = self._taker(number)
        chain = None if taker is None else Carried(b, self._start(taker, row))
        if ahead is not None:
            ahead.store(self._start(0, following))
        place = None if taker is None else self._register_of(number, taker)
        shared = body.shared(self._loaded(number))
        blocks = b.sdiv(self.a["length"], I64(BLOCK))
        before = b.mul(row, blocks)
        later = self._read_next(following) if number == self.wide_maps[0] else []

        def then(vectors: Sequence[Any]) -> None:
            if taker is not None and chain is not None and place is not None:
                chain.store(self._step(taker, chain, vectors[place]))

        with count(b, I64(0), blocks) as k:
            first = b.mul(k, I64(BLOCK))
            sources = [self._address(i, row, first) if values[i].wide else self.numbers[i] for i in stage.operands]
            targets = [
                None if place is not None and not self._is_read(i, number) else self._address(i, row, first)
                for i in stage.results
            ]
            body.compute(b.add(before, k), I64(BLOCK), sources, targets, shared, then)
            for address, storage in later:
                prefetch(b, at(b, address, first, MEMORY[storage]), MEMORY[storage], BLOCK)
            if taker is not None and chain is not None and place is None:
                self._take(taker, chain, row, first)
            if ahead is not None:
                self._take(0, ahead, following, first)
        if taker is not None and chain is not None:
            self._finish(taker, chain, row)

    def _taker(self, number: int) -> int | None:
        """The stage after a map over rows, if it reduces one of the map's results."""
        following = number + 1
        takes = following in self.streams and self.stages[following].operands[0] in self.stages[number].results
        return following if takes else None

    def _register_of(self, number: int, taker: int) -> int | None:
        """Which of a map's results a reduction takes vector by vector; None if it reads them from memory."""
        stage, kernel = self.stages[taker], self.stages[taker].kernel
        assert isinstance(kernel, Reduce)
        # What is stored of it must be what is computed.
        plain = ELEMENT_OF[kernel.loads[0]] != "u32"
        alike = plain and self.bodies[number].lanes == kernel.order.chains
        return self.stages[number].results.index(stage.operands[0]) if alike else None

    def _is_read(self, i: int, number: int) -> bool:
        """Whether a result of a map is read otherwise than by the reduction after it."""
        return i in self.tensors or any(i in stage.operands for stage in self.stages[number + 2 :])

    def _read_next(self, following: Any) -> list[tuple[Any, Storage]]:
        """Where the next row of the chain's first wide operand is."""
        wide = (i for stage in self.stages for i in stage.operands if i in self.tensors and self.values[i].wide)
        return [(self._address(i, following), self.values[i].storage) for i in wide][:1]

    # ---- reductions ----

    def _kernel(self, number: int) -> Reduce:
        kernel = self.stages[number].kernel
        assert isinstance(kernel, Reduce)
        return kernel

    def _first_chains(self) -> Carried:
        """The chains of the first stage, of which nothing is used yet."""
        kernel = self._kernel(0)
        chains = kernel.order.chains
        return Carried(self.b, [first_of(kernel, chains), ir.Constant(ir.VectorType(I64, chains), [I64(0)] * chains)])

    def _start(self, number: int, row: Any) -> list[Any]:
        """The chains of a row at their start."""
        b, kernel = self.b, self._kernel(number)
        n = kernel.order.chains
        elements = b.add(splat(b, b.mul(row, I64(n)), n), iota(n))
        state = self.streams[number].start(b, elements, n, kernel.draws or kernel.finish_draws)
        return [first_of(kernel, n), state]

    def _step(self, number: int, chain: Carried, x: Any) -> list[Any]:
        kernel = self._kernel(number)
        return step(self.b, kernel, chain.load(), x, kernel.order.chains, self.machine)

    def _take(self, number: int, chain: Carried, row: Any, first: Any) -> None:
        """Emit the steps of a reduction for the block of elements from ``first`` on."""
        b, kernel = self.b, self._kernel(number)
        n, storage = kernel.order.chains, kernel.loads[0]
        block = self._address(self.stages[number].operands[0], row, first)

        def take(i: Any) -> None:
            chain.store(self._step(number, chain, load_vector(b, at(b, block, i, MEMORY[storage]), storage, n)))

        if kernel.draws:
            with count(b, I64(0), I64(BLOCK), n) as i:
                take(i)
            return
        for i in range(0, BLOCK, n):
            take(I64(i))

    def _reduce(self, number: int, chain: Carried, row: Any) -> None:
        """Emit all steps of a reduction."""
        with count(self.b, I64(0), self.a["length"], BLOCK) as first:
            self._take(number, chain, row, first)

    def _finish(self, number: int, chain: Carried, row: Any) -> None:
        """Combine the chains of a row, and round the sum."""
        b, kernel = self.b, self._kernel(number)
        combined = combine_lanes(b, kernel, chain.load(), I64(kernel.order.chains))
        acc, state = (b.extract_element(x, ir.IntType(32)(0)) for x in combined)
        bits, _ = advance(b, state, 1, kernel.finish_draws)
        (rounded,) = emit(kernel.finish, b, [acc, bits], 1)
        self._put_number(self.stages[number].results[0], rounded, row)
