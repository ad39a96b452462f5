"""The order of a reduction: a summation tree that depends on the reduced length alone.

A reduction of x[0..L-1] under an order and a rounding R is one fixed formula:

    sequential   acc = +0; for k ascending: acc = R(acc + x[k])
    lanes:n      acc[l] = +0 for l < n; for k ascending: acc[k mod n] = R(acc[k mod n] + x[k]);
                 then, with w the smallest power of two >= min(n, L), while w > 1: w = w / 2 and
                 acc[l] = R(acc[l] + acc[l + w]) for every l < w with l + w < min(n, L); the sum is acc[0]
    shards:S/T   for S = 1 the order T, sequential or lanes:n; else, with h = L/2 rounded up, a is the sum of x[0..h-1]
                 and b the sum of x[h..L-1], both under shards:(S/2)/T; the sum is R(a + b), and a if L <= 1
    exact        R(x[0] + x[1] + ... + x[L-1]), one rounding of the exact sum; +0 where that is zero

No formula mentions a batch size, a stride, a thread or a vector width, so none of them can change a bit. ``lanes`` is
fast (n independent chains) and more accurate than ``sequential``: its error grows with L/n + log2 n instead of L.
``shards`` can be shared out: the sum of a half, a quarter, ... of the elements depends on these elements alone, so that
several processes can compute one each.
``exact`` has no tree: the result depends on the numbers alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Final, Literal, NamedTuple

from fxround.errors import shown


@dataclass(frozen=True)
class Order:
    """An order of summation: ``sequential``, ``lanes`` or ``exact``, the first two of them also in shards.

    ``sequential`` has one chain, ``lanes`` has ``chains`` of them, a power of two from 2 to 64. With ``shards`` > 1, a
    power of two up to 64, each shard has chains of its own, and a balanced tree adds the sums of the shards. Raises
    ValueError for another number.
    """

    kind: Literal["sequential", "lanes", "exact"]
    chains: int = 1
    shards: int = 1

    def __post_init__(self) -> None:
        if self.kind != "lanes" and self.chains != 1:
            raise ValueError(f"the order {self.kind} has one chain, got {self.chains}")
        if self.kind == "lanes" and self.chains not in (2, 4, 8, 16, 32, 64):
            raise ValueError(f"lanes:{self.chains}: the number of chains must be a power of two from 2 to 64")
        if self.shards != 1 and self.kind == "exact":
            raise ValueError(f"shards:{self.shards}/exact: an exact sum has no tree that could have shards")
        require_shards(self.shards)

    def __str__(self) -> str:
        chains = f"lanes:{self.chains}" if self.kind == "lanes" else self.kind
        return chains if self.shards == 1 else f"shards:{self.shards}/{chains}"

    @staticmethod
    def parse(text: str | Order) -> Order:
        """Parse ``sequential``, ``lanes`` (16 chains), ``lanes:n``, ``exact``, or ``shards:S/`` before one of these.

        ``shards`` alone are 8, of ``lanes:16`` if no order follows.

        Raises ValueError for another text, TypeError for anything that is no text.
        """
        if isinstance(text, Order):
            return text
        if not isinstance(text, str):
            raise TypeError(f"a reduction order is a text like 'lanes:16', got {type(text).__name__}")
        sharded = re.fullmatch(r"shards(?::([0-9]{1,4}))?(?:/((?!shards).*))?", text)
        if sharded is not None:
            return replace(Order.parse(sharded[2] or LANES), shards=int(sharded[1] or SHARDS))
        kind, _, chains = text.partition(":")
        if text in ("sequential", "exact"):
            return SEQUENTIAL if kind == "sequential" else EXACT
        if kind == "lanes" and (not chains or (chains.isdecimal() and len(chains) <= 4)):
            return Order("lanes", int(chains)) if chains else LANES
        raise ValueError(
            f"no reduction order is named {shown(text)}; known: sequential, lanes:n (n a power of two, 2 to 64), "
            "exact, shards:S/sequential and shards:S/lanes:n (S a power of two, 2 to 64)"
        )


def require_shards(count: int) -> None:
    """Raise ValueError unless this is a number of shards: a power of two from 1 to 64."""
    if count not in (1, 2, 4, 8, 16, 32, 64):
        raise ValueError(f"shards:{count}: the number of shards must be a power of two from 2 to 64")


class Shard(NamedTuple):
    """A shard, and what follows its last element in the tree.

    Shard ``number`` has the elements begin ... end - 1. Its sum is added to the sums that wait on the levels first ...
    last - 1, in turn: each was put on its level by an earlier shard, and is the first operand. The result then waits on
    level ``last``. What waits on level log2(S) is the sum of the whole.
    """

    number: int
    begin: int
    end: int
    first: int
    last: int


@lru_cache(maxsize=4096)
def shards_of(length: int, count: int) -> tuple[Shard, ...]:
    """Return the shards that have elements, ascending, of a length in ``count`` shards; of length 0 the first shard."""
    bounds = [0, length]
    while len(bounds) <= count:
        middles = [begin - (begin - end) // 2 for begin, end in pairwise(bounds)]
        bounds = [place for pair in zip(bounds, [*middles, length], strict=True) for place in pair][:-1]
    shards, levels = [], count.bit_length() - 1
    for number, (begin, end) in enumerate(pairwise(bounds)):
        if begin == end and number:
            continue
        last = 0
        # A shard is a first operand on the levels where its number has a zero; it waits where the second one exists.
        while last < levels and (number >> last & 1 or _is_empty(bounds, (number >> last) + 1, last)):
            last += 1
        first = min(last, (number & -number).bit_length() - 1) if number else last
        shards.append(Shard(number, begin, end, first, last))
    return tuple(shards)


def _is_empty(bounds: list[int], node: int, level: int) -> bool:
    """Whether a node of the tree has no elements: only nodes of shards without elements are added to nothing."""
    return bounds[node << level] == bounds[(node + 1) << level]


SEQUENTIAL: Final = Order("sequential")
LANES: Final = Order("lanes", 16)
EXACT: Final = Order("exact")
SHARDS: Final = 8
"""The shards of an order that does not say how many it has."""
