"""The random Hadamard transform of the operands of a product."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hadamard:
    """A random Hadamard transform of ``size`` consecutive elements: x S H / sqrt(size).

    H is Sylvester's matrix, and S changes the signs that are drawn from the seed (``arithmetic.hadamard``). Its columns
    are orthogonal, so that the product of two operands that were transformed along the sum is that of the operands.
    """

    size: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.size not in (4, 16, 64, 256):
            raise ValueError(
                f"hadamard({self.size}): expected 4, 16, 64 or 256 elements, whose square root is a power of two"
            )

    def __str__(self) -> str:
        return f"hadamard({self.size}{f',{self.seed}' if self.seed else ''})"
