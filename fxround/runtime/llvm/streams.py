"""Streams in registers: one state a lane, advanced where a kernel's formula draws.

What is true here. A kernel that draws nothing carries no state, and gets zeros where a body asks for bits.

Why it is safe. ``start`` and ``advance`` are the functions of ``randomness``, emitted lane by lane.

    before   a generator shared by the threads
    after    bits, state = advance(b, state, lanes, draws)
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir

from fxround.numerics.randomness import advance_stream, coins_function, seed_function, stream_functions
from fxround.numerics.scalar import Function, param, substitute
from fxround.runtime.llvm.loops import I32, I64, at
from fxround.runtime.llvm.render import Fusion, emit, literal, splat


@cache
def _functions() -> dict[str, Function]:
    return {f.name: f for f in (seed_function(), *stream_functions(), coins_function())}


def load_seed(b: ir.IRBuilder, key: Any) -> Any:
    """What the streams of a call have in common. key: seed low, seed high, sample, node."""
    words = [b.load(at(b, key, I64(i), I32), typ=I32) for i in range(4)]
    (seed,) = emit(_functions()["stream_seed"], b, words, 1)
    return seed


def start(b: ir.IRBuilder, element: Any, seed: Any, lanes: int, draws: bool) -> Any:
    """The first states of the streams numbered ``element`` (u64 lanes)."""
    if not draws:
        return literal("u64", 0, lanes)
    (state,) = emit(_functions()["start_stream"], b, [element, splat(b, seed, lanes)], lanes)
    return state


def advance(b: ir.IRBuilder, state: Any, lanes: int, draws: bool) -> tuple[Any, Any]:
    """(random bits, next states)."""
    if not draws:
        return literal("u32", 0, lanes), state
    bits, following = emit(_functions()["advance_stream"], b, [state], lanes)
    return bits, following


@cache
def _drawing(function: Function) -> Function:
    """(operands..., state) to (result, next state): a function of one result with the word that its stream draws."""
    *operands, random = function.params
    state = param("state", "u64")
    word, following = advance_stream(state)
    return Function(function.name, (*operands, state), (*substitute(function.results, {random: word}), following))


def apply(
    b: ir.IRBuilder, function: Function, operands: list[Any], state: Any, lanes: int, draws: bool, fuse: Fusion | None
) -> tuple[Any, Any]:
    """(function(operands..., random), next states), the draw and the function in one listing, so that they can fuse."""
    if not draws:
        (value,) = emit(function, b, [*operands, literal("u32", 0, lanes)], lanes, fuse)
        return value, state
    value, following = emit(_drawing(function), b, [*operands, state], lanes, fuse)
    return value, following


def toss(b: ir.IRBuilder, state: Any, lanes: int) -> tuple[Any, Any]:
    """(32 coins, next states)."""
    word, following = advance(b, state, lanes, True)
    (coins,) = emit(_functions()["spread_coins"], b, [word], lanes)
    return coins, following
