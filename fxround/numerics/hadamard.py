"""The random Hadamard transform of the operands of a product."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fxround.numerics.randomness import random_function


@dataclass(frozen=True)
class Hadamard:
    """A random Hadamard transform of ``size`` consecutive elements: x S H / sqrt(size).

    H is Sylvester's matrix, and S changes the signs that are drawn from the seed. Its columns are orthogonal, so that
    the product of two operands that were transformed along the sum is that of the operands.
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

    def matrix(self) -> list[list[float]]:
        """Return S H / sqrt(size); row i has the sign of bit 0 of the random word of element i."""
        words = random_function().evaluate(np.arange(self.size, dtype=np.uint64), self.seed, 0, 0, 0)[0]
        unit = self.size**-0.5
        return [
            [unit * (-1) ** (int(words[i]) + (i & j).bit_count()) for j in range(self.size)] for i in range(self.size)
        ]
