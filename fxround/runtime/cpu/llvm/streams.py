"""Random streams in registers: one state for each lane, advanced where a kernel's formula draws.

``start`` and ``advance`` are the functions of ``numerics.arithmetic.randomness``, emitted lane by lane. A kernel that
draws nothing carries no state, and gets zeros where a body asks for random bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from llvmlite import ir

from fxround.numerics.arithmetic.randomness import (
    Part,
    advance_stream,
    coins_function,
    seed_function,
    stream_functions,
)
from fxround.numerics.arithmetic.scalar import Function, param, substitute
from fxround.runtime.cpu.llvm.loops import I32, I64, at
from fxround.runtime.cpu.llvm.render import Fusion, emit, literal, splat


@cache
def _functions() -> dict[str, Function]:
    return {f.name: f for f in (seed_function(), *stream_functions(), coins_function())}


@dataclass(frozen=True)
class Streams:
    """The u64 that all streams of a call share, and where its elements stand in the whole that they are a part of."""

    seed: Any
    part: Part | None

    @staticmethod
    def load(b: ir.IRBuilder, key: Any, parts: bool) -> Streams:
        """Load them from the key (seed low, seed high, sample, node; with ``parts``, then the numbers of a part)."""
        words = [b.load(at(b, key, I64(i), I32), typ=I32) for i in range(4)]
        (seed,) = emit(_functions()["stream_seed"], b, words, 1)
        return Streams(seed, load_part(b, key, 4) if parts else None)

    def number(self, b: ir.IRBuilder, elements: Any, lanes: int, shards: int = 1, shard: Any = None) -> Any:
        """The numbers of the streams of elements (u64 lanes), in a shard of each where the order has shards."""
        if self.part is not None:
            # Shards of a part are some of the whole's.
            number = self.part.shard if shard is None else b.add(self.part.shard, shard)
            wide = b.mul(place_in_whole(b, self.part, elements, lanes), splat(b, self.part.shards, lanes))
            return b.add(wide, splat(b, number, lanes))
        if shards == 1:
            return elements
        return b.add(b.mul(elements, splat(b, I64(shards), lanes)), splat(b, shard, lanes))

    def start(self, b: ir.IRBuilder, number: Any, lanes: int, draws: bool) -> Any:
        """The first states of the streams of these numbers (u64 lanes); zeros if the kernel does not draw."""
        if not draws:
            return literal("u64", 0, lanes)
        (state,) = emit(_functions()["start_stream"], b, [number, splat(b, self.seed, lanes)], lanes)
        return state


def load_part(b: ir.IRBuilder, key: Any, after: int) -> Part:
    """Load the numbers of a part from a key, where they begin after this many words.

    Each number has two words, and the lower one comes first.
    """
    pairs = [[b.zext(b.load(at(b, key, I64(after + 2 * i + j), I32), typ=I32), I64) for j in (0, 1)] for i in range(5)]
    return Part(*(b.or_(low, b.shl(high, I64(32))) for low, high in pairs))


def place_in_whole(b: ir.IRBuilder, part: Part, elements: Any, lanes: int) -> Any:
    """The numbers in the whole of the elements of a part (u64 lanes)."""
    run = b.udiv(elements, splat(b, part.chunk, lanes))
    return b.add(b.add(elements, b.mul(run, splat(b, part.skip, lanes))), splat(b, part.first, lanes))


def advance(b: ir.IRBuilder, state: Any, lanes: int, draws: bool) -> tuple[Any, Any]:
    """(random bits, next states); zeros and the same states if the kernel does not draw."""
    if not draws:
        return literal("u32", 0, lanes), state
    bits, following = emit(_functions()["advance_stream"], b, [state], lanes)
    return bits, following


@cache
def _drawing(function: Function) -> Function:
    """The function (operands..., state) -> (result, next state); the stream's word replaces the random operand."""
    *operands, random = function.params
    state = param("state", "u64")
    word, following = advance_stream(state)
    return Function(function.name, (*operands, state), (*substitute(function.results, {random: word}), following))


def apply(
    b: ir.IRBuilder, function: Function, operands: list[Any], state: Any, lanes: int, draws: bool, fuse: Fusion | None
) -> tuple[Any, Any]:
    """(function(operands..., random), next states).

    The draw and the function are one listing, so that operators of both can fuse into one instruction.
    """
    if not draws:
        (value,) = emit(function, b, [*operands, literal("u32", 0, lanes)], lanes, fuse)
        return value, state
    value, following = emit(_drawing(function), b, [*operands, state], lanes, fuse)
    return value, following


def toss(b: ir.IRBuilder, state: Any, lanes: int) -> tuple[Any, Any]:
    """(a word of 32 coins, next states)."""
    word, following = advance(b, state, lanes, True)
    (coins,) = emit(_functions()["spread_coins"], b, [word], lanes)
    return coins, following
