"""Random bits as a function of (seed, sample, node, element, draw), without a state.

No generator is advanced, so threads, tiles, vector width, device and order of evaluation cannot change the bits. Each
draw of a node has a seed of 64 bits, words 1 and 0 of Philox4x32-10:

    Philox input  (0, draw * 2^16, node, sample)      key (seed low, seed high)

It seeds a SplitMix64 sequence, whose output number n is a function of n alone. A rounding that draws at most b = 1, 16
or 32 bits uses the smallest such b, and 64 / b neighbouring elements share an output:

    element i    bits b (i mod (64 / b)) to b (i mod (64 / b)) + b - 1 of output number i div (64 / b)

Inside a contraction or a reduction each output element owns a stream, which advances once per rounding: the linear
congruential sequence x -> A x + C modulo 2^52, whose 32 highest bits are drawn. Its first state is output number
``element`` of the SplitMix64 sequence of draw 0xffff.

An iteration of a loop has a seed of its own, and the sample of the call: words 0 and 1 of the Philox block whose number
is that of the iteration, with draw 0xfffe and the number of the loop, less the highest of their 64 bits.

Philox and SplitMix64 pass BigCrush; the tests check them against published vectors. The linear congruential sequence
has period 2^52 from any state (Hull and Dobell: C is odd, A mod 4 is 1), and the tests compute how far its lattices in
two to eight dimensions are from the densest ones. Its high bits are the best ones: bit j of a word alone repeats after
2^(j+21) words. Where all bits of a word count equally, ``spread_coins`` mixes its lower half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from fxround.numerics.arithmetic.scalar import Expr, Function, const, narrow, param, widen

# Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC11, section 3.
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_ROUNDS: Final = 10
_WORD: Final = (1 << 32) - 1

# Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, figure 16 (Stafford's variant 13).
GAMMA: Final = 0x9E3779B97F4A7C15
_MIXING: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))

# Among 20,000 multipliers of 32 bits that are 5 modulo 8, drawn at random, the one whose lattices in two to eight
# dimensions are nearest to the densest ones: the shortest vector of the dual is 0.70 of the longest possible or more.
STREAM_MULTIPLIER: Final = 0xCAC74EE5
STREAM_INCREMENT: Final = 0x9E3779B97F4A7
# A product modulo 2^52, plus a constant, is one instruction of processors that multiply 52-bit integers.
STREAM_BITS: Final = 52

# The numbers of bits that a map draws for an element, and the elements that a kernel takes at once: a whole number of
# outputs of SplitMix64 for each of them.
WIDTHS: Final = (1, 16, 32)
BLOCK: Final = 64
STREAM_DRAW: Final = 0xFFFF
ITERATION_DRAW: Final = 0xFFFE


class Part(NamedTuple):
    """Where the elements of a part of a result stand in the whole, whose numbers they draw by.

    A part has runs of ``chunk`` elements of the whole, one after the other: its element e is number e + (e div chunk)
    skip + first. A sum of which it has some shards has ``shards`` shards in the whole, and the part begins with number
    ``shard``.
    """

    chunk: int
    skip: int
    first: int
    shards: int
    shard: int


@dataclass(frozen=True)
class Key:
    """The numbers that a node's random bits depend on besides the element, as u32 expressions."""

    seed_low: Expr
    seed_high: Expr
    sample: Expr
    node: Expr

    @staticmethod
    def params() -> Key:
        """Return the four parameters of a kernel that draws."""
        return Key(*(param(n, "u32") for n in ("seed_low", "seed_high", "sample", "node")))

    @property
    def exprs(self) -> tuple[Expr, ...]:
        """The four expressions in call order."""
        return (self.seed_low, self.seed_high, self.sample, self.node)


def philox(counter: Sequence[Expr], key: Sequence[Expr]) -> tuple[Expr, Expr, Expr, Expr]:
    """Return Philox4x32-10 of four u32 counter words and two u32 key words: four u32 words.

    Words are held in u64 whose bits above 31 are arbitrary: a product reads the low halves only, which is what a 32 x
    32 -> 64 bit multiplier does, and the high halves are dropped at the end.
    """
    c0, c1, c2, c3 = (widen(c) for c in counter)
    k0, k1 = key
    for _ in range(_ROUNDS):
        low, high = (c0 & _WORD) * _MULTIPLIERS[0], (c2 & _WORD) * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ widen(k0), high, (low >> 32) ^ c3 ^ widen(k1), low
        k0, k1 = k0 + _WEYL[0], k1 + _WEYL[1]
    return narrow(c0), narrow(c1), narrow(c2), narrow(c3)


def block_words(counter: Expr, draw: int | Expr, key: Key) -> tuple[Expr, Expr, Expr, Expr]:
    """Return the four words of a block. counter: u64 below 2^48. draw: the number of the draw, below 2^16."""
    high = narrow(counter >> 32) | (draw << 16)
    return philox((narrow(counter), high, key.node, key.sample), (key.seed_low, key.seed_high))


def draw_seed(draw: int | Expr, key: Key) -> Expr:
    """Return the u64 seed that all elements of a draw share. draw: its number, below 2^16."""
    words = block_words(const("u64", 0), draw, key)
    return (widen(words[1]) << 32) | widen(words[0])


def stream_seed(key: Key) -> Expr:
    """Return the u64 seed that all streams of a node share."""
    return draw_seed(STREAM_DRAW, key)


def mix(x: Expr) -> Expr:
    """Return SplitMix64's output for a u64 state: each bit of the state changes half of its bits."""
    for shift, factor in _MIXING:
        x = (x ^ (x >> shift)) * factor
    return x ^ (x >> 31)


def splitmix64(number: Expr, seed: Expr) -> Expr:
    """Return output ``number`` (u64) of the SplitMix64 sequence with this seed (u64): a u64."""
    return mix((number + 1) * GAMMA + seed)


def width_of(bits: int) -> int:
    """Return how many random bits an element takes of a shared output, for a rounding that draws 1 to 32."""
    return next(width for width in WIDTHS if bits <= width)


def random_bits(element: Expr, seed: Expr, width: int = 32) -> Expr:
    """Return the random bits of one element (u64, its row-major index in the result) as the top of a u32.

    seed: that of the draw. width: one of ``WIDTHS``; the other bits are zero.
    """
    shared, size = (64 // width).bit_length() - 1, width.bit_length() - 1
    word = splitmix64(element >> shared, seed) >> ((element & ((1 << shared) - 1)) << size)
    return narrow(word) if width == 32 else narrow(word) << (32 - width)


def iteration_seed(iteration: Expr, key: Key) -> tuple[Expr, Expr]:
    """Return the seed of an iteration (u64, below 2^48) as its lower 32 and its upper 31 bits. key.node: the loop."""
    words = block_words(iteration, ITERATION_DRAW, key)
    return words[0], words[1] & 0x7FFFFFFF


def start_stream(element: Expr, seed: Expr) -> Expr:
    """Return the first state of an element's stream: SplitMix64's output number ``element``.

    The state is a u64, of which the 52 lowest bits count.
    """
    return splitmix64(element, seed)


def advance_stream(state: Expr) -> tuple[Expr, Expr]:
    """Return (32 random bits, next state): bits 20 to 51 of the state, then A x + C in its 52 lowest bits."""
    product = (state * STREAM_MULTIPLIER) & ((1 << STREAM_BITS) - 1)
    return narrow(state >> (STREAM_BITS - 32)), product + STREAM_INCREMENT


def word_of_stream(number: Expr, seed: Expr, drawn: int) -> Expr:
    """Return the 32 random bits that a stream gives after ``drawn`` others. number: of the stream (u64)."""
    factor, summand = 1, 0
    for _ in range(drawn):
        factor = factor * STREAM_MULTIPLIER % (1 << STREAM_BITS)
        summand = (summand * STREAM_MULTIPLIER + STREAM_INCREMENT) % (1 << STREAM_BITS)
    state = (start_stream(number, seed) * factor + summand) & ((1 << STREAM_BITS) - 1)
    return advance_stream(state)[0]


def spread_coins(word: Expr) -> Expr:
    """Return 32 coins of a stream's word: each bit of the lower half is xored with one of the upper half."""
    return word ^ (word >> 16)


def philox_function() -> Function:
    """Return Philox as a function of the IR, for the published test vectors."""
    counter = tuple(param(f"c{i}", "u32") for i in range(4))
    key = tuple(param(f"k{i}", "u32") for i in range(2))
    return Function("philox4x32_10", counter + key, philox(counter, key))


def random_function(draw: int = 0, width: int = 32) -> Function:
    """Return (element, key) to the random bits of an element as a function of the IR."""
    element, key = param("element", "u64"), Key.params()
    return Function("random_bits", (element, *key.exprs), (random_bits(element, draw_seed(draw, key), width),))


def shared_function(width: int) -> Function:
    """Return (element, seed of the draw) to the random bits of an element as a function of the IR."""
    element, seed = param("element", "u64"), param("seed", "u64")
    return Function(f"random_{width}", (element, seed), (random_bits(element, seed, width),))


def draw_function() -> Function:
    """Return (key, draw) to the seed of a draw as a function of the IR."""
    key, draw = Key.params(), param("draw", "u32")
    return Function("draw_seed", (*key.exprs, draw), (draw_seed(draw, key),))


def mix_function() -> Function:
    """Return ``mix`` as a function of the IR."""
    state = param("state", "u64")
    return Function("mix", (state,), (mix(state),))


def seed_function() -> Function:
    """Return (key) to the seed of a node's streams as a function of the IR."""
    key = Key.params()
    return Function("stream_seed", key.exprs, (stream_seed(key),))


def iteration_function() -> Function:
    """Return (iteration, key) to the seed of an iteration, low and high, as a function of the IR."""
    iteration, key = param("iteration", "u64"), Key.params()
    return Function("iteration_seed", (iteration, *key.exprs), iteration_seed(iteration, key))


def stream_functions() -> tuple[Function, Function]:
    """Return start, (element, seed) to state, and advance, state to (bits, state), as functions of the IR."""
    element, seed, state = param("element", "u64"), param("seed", "u64"), param("state", "u64")
    start = Function("start_stream", (element, seed), (start_stream(element, seed),))
    return start, Function("advance_stream", (state,), advance_stream(state))


def word_function(drawn: int) -> Function:
    """Return (number of a stream, seed of streams) to its word after ``drawn`` others as a function of the IR."""
    number, seed = param("number", "u64"), param("seed", "u64")
    return Function(f"word_{drawn}", (number, seed), (word_of_stream(number, seed, drawn),))


def coins_function() -> Function:
    """Return ``spread_coins`` as a function of the IR."""
    word = param("word", "u32")
    return Function("spread_coins", (word,), (spread_coins(word),))
