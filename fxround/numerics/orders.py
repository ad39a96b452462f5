"""The order of a reduction: a tree given by the reduced length alone.

What is true here. A reduction of x[0..L-1] under an order and a rounding R is one fixed formula:

    sequential   acc = +0; for k ascending: acc = R(acc + x[k])
    lanes:n      acc[l] = +0 for l < n; for k ascending: acc[k mod n] = R(acc[k mod n] + x[k]);
                 then, with w the smallest power of two >= min(n, L), while w > 1: w = w / 2 and
                 acc[l] = R(acc[l] + acc[l + w]) for every l < w with l + w < min(n, L); the sum is acc[0]

Why it is safe. Neither formula mentions a batch size, a stride, a thread or a vector width, so none of
them can change a bit. ``lanes`` is fast (n independent chains) and more accurate: its error grows with
L/n + log2 n instead of L.

    before   x.sum()                  # whatever this build, machine and shape pick
    after    Order.parse("lanes:16")
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal


@dataclass(frozen=True)
class Order:
    """``sequential`` (one chain) or ``lanes`` with n chains, n a power of two from 2 to 64."""

    kind: Literal["sequential", "lanes"]
    chains: int = 1

    def __post_init__(self) -> None:
        if self.kind == "sequential" and self.chains != 1:
            raise ValueError(f"a sequential order has one chain, got {self.chains}")
        if self.kind == "lanes" and self.chains not in (2, 4, 8, 16, 32, 64):
            raise ValueError(f"lanes:{self.chains}: the number of chains must be a power of two from 2 to 64")

    def __str__(self) -> str:
        return self.kind if self.kind == "sequential" else f"lanes:{self.chains}"

    @staticmethod
    def parse(text: str | Order) -> Order:
        """``sequential``, ``lanes`` (16 chains) or ``lanes:n``."""
        if isinstance(text, Order):
            return text
        kind, _, chains = text.partition(":")
        if kind == "sequential" and not chains:
            return SEQUENTIAL
        if kind == "lanes" and (chains.isdecimal() or not chains):
            return Order("lanes", int(chains)) if chains else LANES
        raise ValueError(
            f"no reduction order is named {text!r}; known: sequential, lanes:n (n a power of two, 2 to 64)"
        )


SEQUENTIAL: Final = Order("sequential")
LANES: Final = Order("lanes", 16)
