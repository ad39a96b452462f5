"""Random streams in registers: one state for each lane, advanced where a kernel's formula draws.

``start`` and ``advance`` are the functions of ``numerics.arithmetic.randomness``, emitted lane by lane. A kernel that
draws nothing carries no state, and gets zeros where a body asks for random bits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir

from fxround.numerics.arithmetic.randomness import advance_stream, coins_function, seed_function, stream_functions
from fxround.numerics.arithmetic.scalar import Function, param, substitute
from fxround.runtime.cpu.llvm.loops import I32, I64, at
from fxround.runtime.cpu.llvm.render import Fusion, emit, literal, splat


@cache
def _functions() -> dict[str, Function]:
    return {f.name: f for f in (seed_function(), *stream_functions(), coins_function())}


def load_seed(b: ir.IRBuilder, key: Any) -> Any:
    """The u64 that all streams of a call share, from the key (seed low, seed high, sample, node)."""
    words = [b.load(at(b, key, I64(i), I32), typ=I32) for i in range(4)]
    (seed,) = emit(_functions()["stream_seed"], b, words, 1)
    return seed


def start(b: ir.IRBuilder, element: Any, seed: Any, lanes: int, draws: bool) -> Any:
    """The first states of the streams numbered ``element`` (u64 lanes); zeros if the kernel does not draw."""
    if not draws:
        return literal("u64", 0, lanes)
    (state,) = emit(_functions()["start_stream"], b, [element, splat(b, seed, lanes)], lanes)
    return state


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
