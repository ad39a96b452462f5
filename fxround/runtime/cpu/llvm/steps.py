"""The arithmetic of a contraction on vectors of results: start, step, combine and finish, each with its random bits.

The values that a loop over k carries are one list: the accumulators, then their stream states in the same order, then,
where 32 steps share a word, one word of coins for each accumulator. A kernel that draws nothing has no states. All
three loop nests of a contraction (``tile``, ``direct`` and ``planes``) compute through ``Steps``, so they cannot differ
in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from llvmlite import ir

from fxround.kernels.kinds import COINS, Contract
from fxround.numerics.arithmetic.forms.dithered import is_operand
from fxround.numerics.arithmetic.scalar import WIDTH, Function, param
from fxround.numerics.formats.carriers import CARRIERS
from fxround.numerics.orders import Shard
from fxround.runtime.cpu.llvm.engine import Machine
from fxround.runtime.cpu.llvm.fusions import fusions_for
from fxround.runtime.cpu.llvm.loops import I32, I64, Carried, at, count, load_vector, scratch
from fxround.runtime.cpu.llvm.render import emit, literal, llvm_type, splat
from fxround.runtime.cpu.llvm.shards import levels_of
from fxround.runtime.cpu.llvm.streams import advance, apply, toss

# From a level to the accumulators and the states that wait there; no states in a kernel without streams.
Waiting = Callable[[Any], tuple[list[Any], list[Any]]]


class WaitingSums:
    """Sums that wait in the tree of shards, and their streams, for accumulators in registers."""

    def __init__(self, steps: Steps, places: int) -> None:
        kernel, self.b, self.places = steps.kernel, steps.b, places
        levels = levels_of(kernel.shards) + 1
        self.types = [llvm_type(kernel.accumulator, steps.lanes)]
        self.types += [llvm_type("u64", steps.lanes)] if kernel.streams else []
        self.arrays = [scratch(self.b, type_, levels * places) for type_ in self.types]

    def load(self, level: Any) -> tuple[list[Any], list[Any]]:
        """The accumulators and the states that wait on a level."""
        loaded = [
            [self.b.load(slot, typ=type_) for slot in self._slots(array, type_, level)]
            for array, type_ in zip(self.arrays, self.types, strict=True)
        ]
        return loaded[0], loaded[1] if len(loaded) > 1 else []

    def store(self, level: Any, values: list[Any]) -> None:
        """Let the carried values wait on a level."""
        for n, (array, type_) in enumerate(zip(self.arrays, self.types, strict=True)):
            for slot, value in zip(self._slots(array, type_, level), values[n * self.places :], strict=False):
                self.b.store(value, slot)

    def _slots(self, array: Any, type_: Any, level: Any) -> list[Any]:
        first = self.b.mul(level, I64(self.places))
        return [at(self.b, array, self.b.add(first, I64(place)), type_) for place in range(self.places)]


class Steps:
    """A kernel's functions on vectors of ``lanes`` results.

    flags: the address of an i32, which is set to nonzero if a result was infinite or NaN in a watched kernel, or an
    operand is not for a bounded one. It is never cleared: one bad value makes no result of the call's items count.
    """

    def __init__(self, b: ir.IRBuilder, kernel: Contract, lanes: int, machine: Machine, flags: Any) -> None:
        self.b, self.kernel, self.lanes, self.flags = b, kernel, lanes, flags
        self.fuse = fusions_for(machine, lanes)

    @property
    def zero(self) -> Any:
        """The value that an accumulator starts from."""
        return literal(self.kernel.accumulator, 0, self.lanes)

    def lift(self, operand: int, value: Any, lanes: int) -> Any:
        """Convert stored elements of an operand to the accumulator's type, which is exact."""
        (lifted,) = emit(self.kernel.lifts[operand], self.b, [value], lanes)
        if self.kernel.bounded:
            (bounded,) = emit(_bounded(), self.b, [lifted], lanes)
            self._note(self.b.not_(bounded), lanes)
        return lifted

    def load_lifted(self, operand: int, address: Any, lanes: int) -> Any:
        """Load ``lanes`` stored elements of an operand and convert them to the accumulator's type."""
        return self.lift(operand, load_vector(self.b, address, self.kernel.loads[operand], lanes), lanes)

    def carried(self, accumulators: Sequence[Any], states: Sequence[Any]) -> Carried:
        """The values that a loop over k carries: accumulators, states and, for coins, empty words."""
        words = [literal("u32", 0, self.lanes)] * (len(accumulators) if self.kernel.coins else 0)
        return Carried(self.b, [*accumulators, *states, *words])

    @contextmanager
    def along(self, begin: Any, end: Any, carried: Carried, places: int) -> Iterator[Any]:
        """Emit ``for (k = begin; k < end; ++k)`` and draw each word that 32 steps share.

        With coins, ``begin`` must be a multiple of 32 steps from where the chain began. ``places`` is the number of
        accumulators.
        """
        b = self.b
        if not self.kernel.coins:
            with count(b, begin, end) as k:
                yield k
            return
        # A word belongs to the steps 32 i ... 32 i + 31 of the whole chain, so a block of k that began elsewhere would
        # draw other words. Words are not parked between blocks: each block begins with a fresh one.
        with count(b, begin, end, COINS) as first:
            values = carried.load()
            for place in range(places):
                word, state = toss(b, values[places + place], self.lanes)
                values[places + place], values[2 * places + place] = state, word
            carried.store(values)
            last = b.add(first, I64(COINS))
            with count(b, first, b.select(b.icmp_signed("<", last, end), last, end)) as k:
                self._coin = splat(b, b.lshr(I32(1 << 31), b.trunc(b.sub(k, first), I32)), self.lanes)
                yield k

    def step(self, values: list[Any], places: int, place: int, left: Any, right: Any) -> None:
        """Emit acc = step(left, right, acc, random) for accumulator number ``place`` of ``places``."""
        operands = [left, right, values[place]]
        if self.kernel.coins:
            coin = self._toss(values[2 * places + place])
            (values[place],) = emit(self.kernel.step, self.b, [*operands, coin], self.lanes, self.fuse)
            return
        self._apply(self.kernel.step, operands, values, places, place)

    def combine(self, values: list[Any], totals: list[Any]) -> None:
        """Emit total = combine(total, acc, random) for every place; totals replace the accumulators in ``values``."""
        assert self.kernel.combine is not None
        for place, total in enumerate(totals):
            self._apply(self.kernel.combine, [total, values[place]], values, len(totals), place)

    def add_shards(self, carried: Carried, places: int, shard: Shard, waiting: Waiting) -> None:
        """Emit acc = combine(first, acc) for the sums that wait for a shard's, with the streams of the first."""
        b = self.b
        with count(b, shard.first, shard.last) as level:
            values, (totals, states) = carried.load(), waiting(level)
            values[places : places + len(states)] = states
            self.combine(values, totals)
            carried.store(values)

    def finish(self, value: Any, state: Any) -> Any:
        """Emit the rounding of the store; ``state`` is the result's stream."""
        if self.kernel.watched:
            self._look_at(value)
        bits, _ = advance(self.b, state, self.lanes, self.kernel.finish_draws)
        (rounded,) = emit(self.kernel.finish, self.b, [value, bits], self.lanes)
        return rounded

    def _apply(self, function: Function, operands: list[Any], values: list[Any], places: int, place: int) -> None:
        """Emit acc = function(operands..., random) for one place, and advance its stream if the kernel draws."""
        b, kernel, state = self.b, self.kernel, values[places + place] if self.kernel.draws else None
        # Step and combination advance the same stream, in the order of the chain.
        values[place], state = apply(b, function, operands, state, self.lanes, kernel.draws, self.fuse)
        if kernel.draws:
            values[places + place] = state

    def _toss(self, word: Any) -> Any:
        """The coin of this step at bit 31, all other bits zero."""
        b = self.b
        # The word shifted left by k mod 32, of which a step reads bit 31 alone (``Contract.coins``): ``_coin`` selects
        # bit 31 - k mod 32, which is the same bit without a shift by a variable count.
        tossed = b.icmp_unsigned("!=", b.and_(word, self._coin), literal("u32", 0, self.lanes))
        return b.select(tossed, literal("u32", 1 << 31, self.lanes), literal("u32", 0, self.lanes))

    def _look_at(self, value: Any) -> None:
        """Note whether a lane of the accumulators is infinite or NaN."""
        b, carrier = self.b, CARRIERS[self.kernel.accumulator]
        # Every lane counts, also one that has no result. Such a lane can only report too much, and the results are then
        # computed again by the general kernel.
        magnitude = literal(carrier.code, (1 << (WIDTH[carrier.code] - 1)) - 1, self.lanes)
        ordinal = b.and_(b.bitcast(value, magnitude.type), magnitude)
        self._note(b.icmp_unsigned(">=", ordinal, literal(carrier.code, carrier.infinity, self.lanes)), self.lanes)

    def _note(self, bad: Any, lanes: int) -> None:
        """Note whether a lane is bad.

        In memory: of a flag in a register, which nested loops carry, NewGVN of LLVM 22.1 finds that it stays zero.
        """
        b, some = self.b, bad
        if lanes > 1:
            some = b.icmp_unsigned("!=", b.bitcast(bad, ir.IntType(lanes)), ir.IntType(lanes)(0))
        with b.if_then(some, likely=False):
            b.store(I32(1), self.flags)


@cache
def _bounded() -> Function:
    """Return the function that says whether an operand is one of a bounded kernel."""
    x = param("x", "f64")
    return Function("bounded", (x,), (is_operand(x),))
