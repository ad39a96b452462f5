"""The kernel that goes on with a sum where several processes have computed a part of it each: the tree, and the store.

It is made of the functions of the kernel that computes the whole sum in one process, so that it has its bits. Where an
addition or the store draws, it takes the next word of the stream that the first operand has drawn from.
"""

from __future__ import annotations

from functools import lru_cache

from fxround.kernels.accumulators import held_as
from fxround.kernels.kinds import COINS, Chain, Contract, Map, Reduce, Word
from fxround.numerics.arithmetic.scalar import Expr, Function, param, substitute
from fxround.numerics.formats.storage import ELEMENT_OF, load
from fxround.numerics.orders import shards_of


@lru_cache(maxsize=1024)
def sum_of_processes(whole: Contract | Reduce, processes: int, length: int) -> Map:
    """Return the kernel of the accumulators of the processes, in the order of their ranks.

    whole: the kernel of the sum in one process. length: the number of elements that a process sums, if a word is drawn.

    Raises ValueError unless the number of processes is a power of two that divides the shards.
    """
    shards = whole.shards if isinstance(whole, Contract) else whole.order.shards
    if processes < 1 or processes & (processes - 1) or shards % processes:
        raise ValueError(f"{shards} shards, which {processes} processes cannot share evenly; expected a power of two")
    chains = 1 if isinstance(whole, Contract) else whole.order.chains
    held = held_as(whole.accumulator)
    elements = [param(f"x{i}", ELEMENT_OF[held]) for i in range(processes)]
    values, randoms, words = [load(x, held) for x in elements], list[Expr](), list[Word]()
    drawn = words_of_part(whole, length, shards // processes) if whole.draws or whole.finish_draws else 0

    def word(first: int, level: int) -> Expr:
        """The next word of the stream of a process's first chain, after the additions on the levels below."""
        before = drawn + (level if whole.draws else 0)
        words.append(Word(0, len(words), chain=Chain(first * (shards // processes), chains, before)))
        randoms.append(param(f"r{len(randoms)}", "u32"))
        return randoms[-1]

    level = 0
    while len(values) > 1:
        assert whole.combine is not None
        first, second, random = whole.combine.params
        values = [
            substitute(
                whole.combine.results,
                {first: values[i], second: values[i + 1], **({random: word(i << level, level)} if whole.draws else {})},
            )[0]
            for i in range(0, len(values), 2)
        ]
        level += 1
    acc, random = whole.finish.params
    last = {random: word(0, level)} if whole.finish_draws else {}
    results = substitute(whole.finish.results, {acc: values[0], **last})
    body = Function("map", (*elements, *randoms), tuple(results))
    return Map(body, (held,) * processes, (whole.result,), tuple(words))


def words_of_part(whole: Contract | Reduce, length: int, shards: int) -> int:
    """Return how many words the first stream of a part gives, of this length in this many shards."""
    if not whole.draws:
        return 0
    rows = shards_of(length, shards)
    first = rows[0].end
    # The first shard is a first operand on each level where the second operand has elements.
    added = sum(any(row.number >> level == 1 for row in rows) for level in range(shards.bit_length() - 1))
    if isinstance(whole, Contract):
        return (-(-first // COINS) if whole.coins else first) + added
    used = min(whole.order.chains, first)
    return -(-first // whole.order.chains) + max(used - 1, 0).bit_length() + added
