"""Kernels in NumPy: the formulas of ``kernels.kinds`` and ``numerics.orders``, one step at a time.

Every loop is Python's and every step is ``Function.evaluate``, so this file can be compared with the documentation line
by line. It is slow, and is what the compiled kernels are tested against. It shares the scalar bodies with them, and
nothing of their loops, layouts, tails, tiles or threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from fxround.kernels.kinds import Contract, Exact, Map, Reduce, Scan, Scatter
from fxround.numerics.arithmetic.randomness import coins_function, random_function, seed_function, stream_functions
from fxround.numerics.modes import Rounding
from fxround.numerics.specification.exact import round_exact

Array = npt.NDArray[Any]
Key = tuple[int, int, int, int]


def map_(kernel: Map, operands: list[Array], key: Key) -> Array:
    """A map of one result. ``operands`` are stored elements (16-bit codes as uint32) that broadcast."""
    (result,) = maps(kernel, operands, key[:3], (key[3],))
    return result


def maps(kernel: Map, operands: list[Array], key: tuple[int, int, int], nodes: tuple[int, ...]) -> tuple[Array, ...]:
    """A map of several results and nodes. ``key`` is seed low, seed high and sample."""
    shape = np.broadcast_shapes(*(x.shape for x in operands))
    index = np.arange(int(np.prod(shape)), dtype=np.uint64).reshape(shape)
    words = [random_function(w.draw, w.width).evaluate(index, *key, nodes[w.node])[0] for w in kernel.draws]
    full = [np.broadcast_to(x, shape) for x in operands]
    return tuple(kernel.body.evaluate(*full, *words))


class Streams:
    """The random streams of some elements; empty if the kernel draws nothing."""

    def __init__(self, elements: Array, key: Key, used: bool) -> None:
        start, self._advance = stream_functions()
        self.used, self.state = used, np.zeros(elements.shape)
        if used:
            (self.state,) = start.evaluate(elements.astype(np.uint64), *seed_function().evaluate(*key))

    def draw(self, where: Any = ..., wanted: bool = True) -> Array:
        """The next 32 bits of the streams ``where`` if the formula draws there, else zeros."""
        if not (self.used and wanted):
            return np.zeros(np.shape(self.state[where]), np.uint32)
        bits, self.state[where] = self._advance.evaluate(self.state[where])
        return bits


def reduce(kernel: Reduce, x: Array, key: Key) -> Array:
    """Reduce x, stored elements of shape (results, length), to (results,)."""
    results, length = x.shape
    chains, shards = kernel.order.chains, kernel.order.shards
    elements = np.arange(results)[:, None, None] * shards * chains + np.arange(shards * chains).reshape(shards, chains)
    streams = Streams(elements, key, kernel.draws or kernel.finish_draws)
    acc = np.full(elements.shape, kernel.first, np.float32 if kernel.accumulator == "f32" else np.float64)

    def combine(first: tuple[slice, int, int], second: tuple[slice, int, int]) -> None:
        acc[first] = kernel.combine.evaluate(acc[first], acc[second], streams.draw(first, kernel.draws))[0]

    def shard(number: int, begin: int, end: int) -> None:
        for k in range(begin, end):
            chain = (slice(None), number, (k - begin) % chains)
            acc[chain] = kernel.step.evaluate(acc[chain], x[:, k], streams.draw(chain, kernel.draws))[0]
        used = min(chains, end - begin)
        width = 1
        while width < used:
            width *= 2
        while width > 1:
            width //= 2
            for chain_number in range(width):
                if chain_number + width < used:
                    combine((slice(None), number, chain_number), (slice(None), number, chain_number + width))

    _tree(shards, 0, length, shard, lambda i, j: combine((slice(None), i, 0), (slice(None), j, 0)))
    whole = (slice(None), 0, 0)
    return kernel.finish.evaluate(acc[whole], streams.draw(whole, kernel.finish_draws))[0]


def _tree(
    shards: int, begin: int, end: int, shard: Callable[[int, int, int], None], add: Callable[[int, int], None]
) -> None:
    """Do the shards of the elements begin ... end - 1, and add them as ``numerics.orders`` says.

    ``shard(number, begin, end)`` makes the sum of a shard, and ``add(i, j)`` adds that of the nodes that begins with
    shard j to that of the node that begins with shard i.
    """

    def node(first: int, count: int, begin: int, end: int) -> None:
        if count == 1:
            shard(first, begin, end)
            return
        half, second = begin + -(-(end - begin) // 2), first + count // 2
        node(first, count // 2, begin, half)
        if half < end:
            node(second, count // 2, half, end)
            add(first, second)

    node(0, shards, begin, end)


def scan(kernel: Scan, x: Array, key: Key) -> Array:
    """Every prefix of x, stored elements of shape (lines, length); returns the same shape."""
    streams = Streams(np.arange(x.shape[0]), key, kernel.draws or kernel.finish_draws)
    acc = np.full(x.shape[0], kernel.first, np.float32 if kernel.accumulator == "f32" else np.float64)
    columns = []
    for k in range(x.shape[1]):
        acc = kernel.step.evaluate(acc, x[:, k], streams.draw(..., kernel.draws))[0]
        columns.append(kernel.finish.evaluate(acc, streams.draw(..., kernel.finish_draws))[0])
    return np.stack(columns, axis=1) if columns else np.zeros(x.shape)


def scatter(kernel: Scatter, x: Array, places: Array, source: Array, key: Key) -> Array:
    """Add source[k] to x[places[k]], k ascending; all are stored elements. Returns the shape of x, (elements,)."""
    streams = Streams(np.arange(len(x)), key, kernel.draws)
    acc = kernel.lift.evaluate(x)[0].copy()
    # Additions to one element have an order. The next ones of all elements are evaluated together.
    left = np.arange(len(places))
    while left.size:
        where, firsts = np.unique(places[left], return_index=True)
        chosen = left[firsts]
        acc[where] = kernel.step.evaluate(acc[where], source[chosen], streams.draw(where, kernel.draws))[0]
        left = np.delete(left, firsts)
    return kernel.finish.evaluate(acc, np.uint32(0))[0]


def exact(kernel: Exact, x: Array, key: Key) -> Array:
    """Sum x, stored elements of shape (results, length), in rational arithmetic to (results,)."""
    streams = Streams(np.arange(x.shape[0]), key, any(kernel.draws))
    bits = kernel.read.evaluate(x)[0]
    rows = bits.view(np.float32 if bits.dtype == np.uint32 else np.float64).astype(np.float64)
    rounding = _TO_ODD if kernel.to_odd else _NEAREST
    totals = np.array([_exact_total(row.tolist(), rounding) for row in rows], dtype=np.float64)
    first = streams.draw(..., kernel.draws[0])
    return kernel.finish.evaluate(totals, first, streams.draw(..., kernel.draws[1]))[0]


def _exact_total(row: list[float], rounding: Rounding) -> float:
    """The exact sum rounded once, or the infinity or NaN that IEEE 754 gives for the elements that are not finite."""
    special = [v for v in row if not math.isfinite(v)]
    if special:
        return sum(special)
    total = sum(map(Fraction, row), Fraction(0))
    return round_exact(total, total < 0, rounding)


_TO_ODD, _NEAREST = Rounding.parse("binary64/to_odd"), Rounding.parse("binary64/nearest_even")


def contract(kernel: Contract, a: Array, b: Array, key: Key) -> Array:
    """Contract a, (batch, rows, length), with b, (batch, length, columns): (batch, rows, columns), stored elements."""
    shape = (kernel.shards, a.shape[0], a.shape[1], b.shape[2])
    elements = np.arange(int(np.prod(shape))).reshape(*shape[1:], kernel.shards)
    streams = Streams(np.moveaxis(elements, -1, 0), key, kernel.draws or kernel.finish_draws)
    sums = np.zeros(shape, np.float32 if kernel.accumulator == "f32" else np.float64)

    def shard(number: int, begin: int, end: int) -> None:
        acc = total = sums[number]
        for k in range(begin, end):
            left = kernel.lifts[0].evaluate(a[:, :, k, None])[0]
            right = kernel.lifts[1].evaluate(b[:, k, None, :])[0]
            step = k - begin
            if not kernel.coins or step % 32 == 0:
                word = streams.draw(number, kernel.draws)
                word = coins_function().evaluate(word)[0] if kernel.coins else word
            shared = word << np.uint32(step % 32) if kernel.coins else word
            acc = kernel.step.evaluate(left, right, acc, shared)[0]
            if kernel.chunk and ((k + 1) % kernel.chunk == 0 or k + 1 == end):
                total = combined(total, acc, number)
                acc = np.zeros_like(acc)
        sums[number] = total if kernel.chunk else acc

    def combined(first: Array, second: Array, number: int) -> Array:
        assert kernel.combine is not None
        return np.asarray(kernel.combine.evaluate(first, second, streams.draw(number, kernel.draws))[0])

    def add(i: int, j: int) -> None:
        sums[i] = combined(sums[i], sums[j], i)

    _tree(kernel.shards, 0, a.shape[2], shard, add)
    return kernel.finish.evaluate(sums[0], streams.draw(0, kernel.finish_draws))[0]
