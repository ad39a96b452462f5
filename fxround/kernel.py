"""Kernels as data: a scalar body and the shape of the loops around it. The waist of fxround.

What is true here. Everything above (operators, policies, passes) speaks of kernels, everything below
(LLVM, CUDA, the NumPy reference) of numbers. A kernel holds scalar functions of the IR and says how they are
applied; equal kernels have equal digests, and the digest is the key of all compiled code.

    Map       outs[i] = body(x0[i], x1[i], ..., random words of element i)         any shapes that broadcast
    Reduce    acc = step(acc, x, random) in an Order; out = finish(acc, random)   one result per output element
    Scan      acc = step(acc, x[k], random); out[k] = finish(acc, random)         k ascending
    Contract  acc = +0; acc = step(a[k], b[k], acc, random), k ascending; out = finish(acc, random)
    Scatter   acc = lift(self[i]); acc = step(acc, x, random) for each x that goes to i, ascending; out = finish(acc)
    Exact     out = finish(the sum of all x, no rounding before)                  one result per output element

Random words of a Map: draw d of node n for element i is ``randomness.random_bits(i, d, key of n)``; a fused chain
draws for each operation what it would have drawn alone. Random words of the others come from one stream per
output element (Reduce: per chain, stream number element * chains + chain): a step, a combination and a finish that
draw advance it once each, in the order of the formula. A Contract whose steps toss one coin each (``coins``) shares a
word between 32 of them: step k sees the coins of word k div 32 shifted left by k mod 32.

Why it is safe. A kernel is frozen and knows no target: what LLVM, CUDA and NumPy make of it can be compared.

    before   a loop in C++, another in CUDA, a third in the tests, each with its own idea of the arithmetic
    after    Contract(lifts, step, finish, ...): one body, three loops around it
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from fxround.numerics.lazy import cached_property
from fxround.numerics.orders import Order
from fxround.numerics.scalar import Function, Type
from fxround.numerics.storage import Storage
from fxround.numerics.truncation import Direction


def _digest(*parts: object) -> str:
    text = "\n".join(p.text() if isinstance(p, Function) else str(p) for p in parts)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Word:
    """A random word of a Map: draw ``draw`` of the ``node``-th node number that the call is given."""

    node: int
    draw: int


@dataclass(frozen=True, eq=False)
class Map:
    """body(stored operands..., one u32 random word per draw) -> stored results."""

    body: Function
    loads: tuple[Storage, ...]
    results: tuple[Storage, ...]
    draws: tuple[Word, ...]

    @property
    def nodes(self) -> int:
        """How many node numbers a call gives: one more than the highest that is drawn for, at least one."""
        return 1 + max((word.node for word in self.draws), default=0)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that the compiled code depends on."""
        return _digest("map", self.body, self.loads, self.results, self.draws)


@dataclass(frozen=True, eq=False)
class Reduce:
    """step(acc, x, random), combine(acc, acc, random), finish(acc, random); ``loads`` is one storage.

    ``draws`` says whether step and combine advance the stream; ``finish_draws`` whether finish does.
    ``first`` is the value that every chain starts from.
    """

    step: Function
    combine: Function
    finish: Function
    order: Order
    loads: tuple[Storage, ...]
    result: Storage
    accumulator: Type
    draws: bool
    finish_draws: bool
    first: float = 0

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that the compiled code depends on."""
        parts = (self.step, self.combine, self.finish, self.order, self.loads, self.result)
        return _digest("reduce", *parts, self.draws, self.finish_draws, self.first)


@dataclass(frozen=True, eq=False)
class Scan:
    """step(acc, x, random) and finish(acc, random) for every prefix, k ascending from ``first``."""

    step: Function
    finish: Function
    loads: tuple[Storage, ...]
    result: Storage
    accumulator: Type
    draws: bool
    finish_draws: bool
    first: int = 0

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that the compiled code depends on."""
        parts = (self.step, self.finish, self.loads, self.result, self.draws, self.finish_draws, self.first)
        return _digest("scan", *parts)


@dataclass(frozen=True, eq=False)
class Contract:
    """step(lift(a), lift(b), acc, random) from acc = +0, k ascending; finish(acc, random).

    lifts: a stored element of each operand to the accumulator's type, exactly. chunk n > 0: every n steps, and
    after the last one, total = combine(total, acc, random) and acc = +0; the result is finish(total, random).
    coins: of its random word, a step uses the highest bit alone.
    direction: how the hardware must round while the kernel runs. watched: subnormal results are flushed, and the
    results count only if nothing overflowed, was subnormal, or ended infinite or NaN.
    quick: such a kernel, whose results, where they count, are this one's.
    """

    lifts: tuple[Function, Function]
    step: Function
    finish: Function
    chunk: int
    combine: Function | None
    loads: tuple[Storage, Storage]
    result: Storage
    accumulator: Type
    draws: bool
    finish_draws: bool
    coins: bool = False
    direction: Direction = "nearest"
    watched: bool = False
    quick: Contract | None = None

    @property
    def streams(self) -> bool:
        """Whether accumulators have a random stream beside them."""
        return self.draws or self.finish_draws

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that the compiled code depends on."""
        functions = (*self.lifts, self.step, self.finish, self.combine or "")
        randomness, hardware = (self.draws, self.finish_draws, self.coins), (self.direction, self.watched)
        return _digest("contract", *functions, self.chunk, self.loads, self.result, randomness, hardware)


@dataclass(frozen=True, eq=False)
class Scatter:
    """lift(self's element), step(acc, x, random), finish(acc, 0): one stream per destination element."""

    lift: Function
    step: Function
    finish: Function
    loads: tuple[Storage]
    result: Storage
    accumulator: Type
    draws: bool

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that the compiled code depends on."""
        return _digest("scatter", self.lift, self.step, self.finish, self.loads, self.result, self.draws)


@dataclass(frozen=True, eq=False)
class Exact:
    """finish(total, random, random): the exact sum, as a binary64 value that rounds as it does, rounded and stored.

    read: a stored element as its carrier's encoding. to_odd: whether ``total`` is the sum rounded to odd in
    binary64 (else to nearest even). draws: which of the two roundings draw, sum first, then store.
    """

    read: Function
    finish: Function
    to_odd: bool
    loads: tuple[Storage]
    result: Storage
    draws: tuple[bool, bool]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that the compiled code depends on."""
        return _digest("exact", self.read, self.finish, self.to_odd, self.loads, self.result, self.draws)


Kernel = Map | Reduce | Scan | Contract | Scatter | Exact
