"""The matrix of a random Hadamard transform."""

from __future__ import annotations

import numpy as np

from fxround.numerics.arithmetic.randomness import random_function
from fxround.numerics.formats.hadamard import Hadamard


def hadamard_matrix(transform: Hadamard) -> list[list[float]]:
    """Return S H / sqrt(size); row i has the sign of bit 0 of the random word of element i."""
    size = transform.size
    words = random_function().evaluate(np.arange(size, dtype=np.uint64), transform.seed, 0, 0, 0)[0]
    unit = size**-0.5
    return [[unit * (-1) ** (int(words[i]) + (i & j).bit_count()) for j in range(size)] for i in range(size)]
