"""Kernels as data: scalar functions of the IR and the shape of the loops around them.

Operators describe kernels, by texts that passes write as a policy says; LLVM, CUDA and the NumPy reference compute
them. A kernel is frozen and contains nothing about a target, so that the results of targets can be compared. Equal
kernels have equal digests, and the digest is the key of all compiled code.

    Map       outs[i] = body(x0[i], x1[i], ..., random words of element i)         any shapes that broadcast
    Blocks    s = figure(the largest magnitude of a block); outs[i] = elements(x[i], s)
    Reduce    acc = step(acc, x, random) in an Order; out = finish(acc, random)   one result per output element
    Scan      acc = step(acc, x[k], random); out[k] = finish(acc, random)         k ascending
    Contract  acc = +0; acc = step(a[k], b[k], acc, random), k ascending; out = finish(acc, random)
    Scatter   acc = lift(self[i]); acc = step(acc, x, random) for each x that goes to i, ascending; out = finish(acc)
    Exact     out = finish(the sum of all x, no rounding before)                  one result per output element

Random words of a Map: draw d of node n for element i is ``randomness.random_bits`` of i and the seed of (d, n); each
operation of a fused chain draws what it would have drawn alone. Random words of the other kernels come from one stream
per output element (Reduce: per chain, stream number element * chains + chain; with S shards, element * S + shard takes
the place of element): a step, a combination and a finish that draw advance it once each, in the order of the formula.
A kernel of a part (``in_part``) counts elements and shards as the whole does.
If each step of a Contract tosses one coin (``coins``), 32 steps share a word: step k, of its shard, sees the coins of
word k div 32 shifted left by k mod 32.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeVar

from fxround.numerics.arithmetic.forms.truncation import Direction
from fxround.numerics.arithmetic.scalar import Expr, Function, Type
from fxround.numerics.formats.storage import Storage
from fxround.numerics.lazy import cached_property
from fxround.numerics.orders import Order

# The steps of a contraction that share a word of coins.
COINS: Final = 32
# The same kernel of the elements of a part of a result, which draw by their numbers in the whole (``in_part``).
_PART: Final = {True: ("part",), False: ()}


def _digest(*parts: object) -> str:
    text = "\n".join(p.text() if isinstance(p, Function) else str(p) for p in parts)
    return hashlib.sha256(text.encode()).hexdigest()


class Chain(NamedTuple):
    """A stream of an element in a shard, and how many words were drawn from it: what a sum of processes goes on with.

    shard: its number, counted from the first one of the part. chains: the streams of a shard; this is the first.
    """

    shard: int
    chains: int
    drawn: int


@dataclass(frozen=True)
class Word:
    """A random word of a Map: draw ``draw`` of the ``node``-th node number that the call is given.

    ``width``: the bits that it has, at its top (``randomness.WIDTHS``). ``chain``: the stream of a chain that the word
    is drawn from; None for those of maps.
    """

    node: int
    draw: int
    width: int = 32
    chain: Chain | None = field(default=None, repr=False)


@dataclass(frozen=True, eq=False)
class Map:
    """A pointwise kernel: body(stored operands..., one u32 random word per draw) -> stored results.

    ``values``: what the statements of its program compute, in order, where ``runtime.cpu.llvm.stages`` may cut a long
    body.
    ``single``: a kernel with this one's bits, whose sums and products are in binary32 where that is possible; or None.
    """

    body: Function
    loads: tuple[Storage, ...]
    results: tuple[Storage, ...]
    draws: tuple[Word, ...]
    values: tuple[Expr, ...] = ()
    single: Map | None = None
    parts: bool = False

    @property
    def nodes(self) -> int:
        """The number of node numbers that a call passes: one more than the highest that is drawn for, at least one."""
        return 1 + max((word.node for word in self.draws), default=0)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that the compiled code depends on."""
        chains = [word.chain for word in self.draws if word.chain is not None]
        return _digest("map", self.body, self.loads, self.results, self.draws, *chains, *_PART[self.parts])


@dataclass(frozen=True, eq=False)
class Blocks:
    """Elements that share scales: the figure of each block, and out[i] = elements(x[i], the figure of i's block).

    figure: of a block's largest finite magnitude and of numbers that all blocks share; one stored result. elements: of
    an element and its figure, one result, or None if the figures are the result. Neither draws. loads: how x is stored.
    """

    figure: Map
    elements: Map | None
    loads: tuple[Storage]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that the compiled code depends on."""
        elements = "" if self.elements is None else self.elements.digest
        return _digest("blocks", self.figure.digest, elements, self.loads)


@dataclass(frozen=True, eq=False)
class Reduce:
    """A reduction: step(acc, x, random), combine(acc, acc, random), finish(acc, random). ``loads`` is one storage.

    ``draws``: whether step and combine advance the stream. ``finish_draws``: whether finish does. ``first``: the value
    that every chain starts from. ``single``: a kernel with this one's bits, whose steps are in binary32 where that is
    possible and whose accumulators are held as ``numerics.arithmetic.forms.single`` says; or None.
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
    single: Reduce | None = None
    parts: bool = False

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that the compiled code depends on."""
        parts = (self.step, self.combine, self.finish, self.order, self.loads, self.result)
        return _digest("reduce", *parts, self.draws, self.finish_draws, self.first, *_PART[self.parts])


@dataclass(frozen=True, eq=False)
class Scan:
    """A prefix operation: step(acc, x, random) and finish(acc, random) for every prefix, k ascending.

    ``first``: the value of acc at the start. ``single``: as a reduction's.
    """

    step: Function
    finish: Function
    loads: tuple[Storage, ...]
    result: Storage
    accumulator: Type
    draws: bool
    finish_draws: bool
    first: float = 0
    single: Scan | None = None
    parts: bool = False

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that the compiled code depends on."""
        parts = (self.step, self.finish, self.loads, self.result, self.draws, self.finish_draws, self.first)
        return _digest("scan", *parts, *_PART[self.parts])


@dataclass(frozen=True, eq=False)
class Contract:
    """A sum of products: step(lift(a), lift(b), acc, random) from acc = +0, k ascending; then finish(acc, random).

    lifts: convert a stored element of each operand to the accumulator's type, exactly. chunk n > 0: every n steps, and
    after the last one, total = combine(total, acc, random) and acc = +0; the result is finish(total, random). shards S
    > 1: acc of each shard of k from +0, and acc = combine(first acc, second acc, random) on the way up the tree of
    ``numerics.orders``, with the stream of the first; the result is finish(acc, random) of the whole. coins: a
    step uses only the highest bit of its random word. direction: the rounding direction of the hardware while the
    kernel runs. watched: subnormal results are flushed, and the results are valid only if nothing overflowed, was
    subnormal, or ended infinite or NaN. bounded: the results are valid only if all operands are such as
    ``forms.dithered`` asks for. quick: a watched or bounded kernel whose results, where they are valid, are this one's;
    or None. single: a kernel in binary32 with this one's bits, whose step also gives whether the chain may go on, or
    None; its step draws as this one's.
    """

    lifts: tuple[Function, Function]
    step: Function
    finish: Function
    chunk: int
    shards: int
    combine: Function | None
    loads: tuple[Storage, Storage]
    result: Storage
    accumulator: Type
    draws: bool
    finish_draws: bool
    coins: bool = False
    direction: Direction = "nearest"
    watched: bool = False
    bounded: bool = False
    quick: Contract | None = None
    single: Contract | None = None
    parts: bool = False

    @property
    def streams(self) -> bool:
        """Whether each accumulator has a random stream."""
        return self.draws or self.finish_draws

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that the compiled code depends on."""
        functions = (*self.lifts, self.step, self.finish, self.combine or "")
        randomness, hardware = (self.draws, self.finish_draws, self.coins), (self.direction, self.watched)
        # A contraction has chunks or shards, not both.
        parts = self.chunk if self.shards == 1 else f"shards:{self.shards}"
        further = (*(("bounded",) if self.bounded else ()), *_PART[self.parts])
        return _digest("contract", *functions, parts, self.loads, self.result, randomness, hardware, *further)


@dataclass(frozen=True, eq=False)
class Scatter:
    """An accumulating scatter: lift(self's element), step(acc, x, random), finish(acc, 0).

    There is one stream per destination element. ``single``: as a reduction's.
    """

    lift: Function
    step: Function
    finish: Function
    loads: tuple[Storage]
    result: Storage
    accumulator: Type
    draws: bool
    single: Scatter | None = None
    parts: bool = False

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that the compiled code depends on."""
        functions = (self.lift, self.step, self.finish)
        return _digest("scatter", *functions, self.loads, self.result, self.draws, *_PART[self.parts])


@dataclass(frozen=True, eq=False)
class Exact:
    """An exact sum: finish(total, random, random), where total is a binary64 value that rounds as the sum does.

    read: a stored element as its carrier's encoding. to_odd: whether ``total`` is the sum rounded to odd in binary64
    (else to nearest even). draws: whether the sum's rounding draws, and whether the store's does.
    """

    read: Function
    finish: Function
    to_odd: bool
    loads: tuple[Storage]
    result: Storage
    draws: tuple[bool, bool]
    parts: bool = False

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that the compiled code depends on."""
        functions = (self.read, self.finish, self.to_odd)
        return _digest("exact", *functions, self.loads, self.result, self.draws, *_PART[self.parts])


Kernel = Map | Reduce | Scan | Contract | Scatter | Exact
K = TypeVar("K", Map, Reduce, Scan, Contract, Scatter, Exact)


def in_part(kernel: K) -> K:
    """Return the kernel of elements that are a part of a result: they draw by their numbers in the whole.

    Its key has the numbers of the part (``randomness.Part``) after those of the nodes.
    """
    return _in_part(kernel)  # type: ignore[no-any-return]


@lru_cache(maxsize=1024)
def _in_part(kernel: Any) -> Any:
    others = {name: getattr(kernel, name, None) for name in ("single", "quick")}
    return replace(kernel, parts=True, **{name: in_part(other) for name, other in others.items() if other is not None})
