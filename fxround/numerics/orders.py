"""The order of a reduction: a summation tree that depends on the reduced length alone.

A reduction of x[0..L-1] under an order and a rounding R is one fixed formula:

    sequential   acc = +0; for k ascending: acc = R(acc + x[k])
    lanes:n      acc[l] = +0 for l < n; for k ascending: acc[k mod n] = R(acc[k mod n] + x[k]);
                 then, with w the smallest power of two >= min(n, L), while w > 1: w = w / 2 and
                 acc[l] = R(acc[l] + acc[l + w]) for every l < w with l + w < min(n, L); the sum is acc[0]
    exact        R(x[0] + x[1] + ... + x[L-1]), one rounding of the exact sum; +0 where that is zero

No formula mentions a batch size, a stride, a thread or a vector width, so none of them can change a bit. ``lanes`` is
fast (n independent chains) and more accurate than ``sequential``: its error grows with L/n + log2 n instead of L.
``exact`` has no tree: the result depends on the numbers alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from fxround.errors import shown


@dataclass(frozen=True)
class Order:
    """An order of summation: ``sequential``, ``lanes`` or ``exact``.

    ``sequential`` has one chain, ``lanes`` has ``chains`` of them, a power of two from 2 to 64. Raises ValueError for
    another number.
    """

    kind: Literal["sequential", "lanes", "exact"]
    chains: int = 1

    def __post_init__(self) -> None:
        if self.kind != "lanes" and self.chains != 1:
            raise ValueError(f"the order {self.kind} has one chain, got {self.chains}")
        if self.kind == "lanes" and self.chains not in (2, 4, 8, 16, 32, 64):
            raise ValueError(f"lanes:{self.chains}: the number of chains must be a power of two from 2 to 64")

    def __str__(self) -> str:
        return f"lanes:{self.chains}" if self.kind == "lanes" else self.kind

    @staticmethod
    def parse(text: str | Order) -> Order:
        """Parse ``sequential``, ``lanes`` (16 chains), ``lanes:n`` or ``exact``.

        Raises ValueError for another text, TypeError for anything that is no text.
        """
        if isinstance(text, Order):
            return text
        if not isinstance(text, str):
            raise TypeError(f"a reduction order is a text like 'lanes:16', got {type(text).__name__}")
        kind, _, chains = text.partition(":")
        if text in ("sequential", "exact"):
            return SEQUENTIAL if kind == "sequential" else EXACT
        if kind == "lanes" and (not chains or (chains.isdecimal() and len(chains) <= 4)):
            return Order("lanes", int(chains)) if chains else LANES
        raise ValueError(
            f"no reduction order is named {shown(text)}; known: sequential, lanes:n (n a power of two, 2 to 64), exact"
        )


SEQUENTIAL: Final = Order("sequential")
LANES: Final = Order("lanes", 16)
EXACT: Final = Order("exact")
