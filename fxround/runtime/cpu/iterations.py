"""The random states of a loop's iterations: the IR's function, evaluated by NumPy for all iterations at once."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

from fxround.graph.dialect import Iterations
from fxround.numerics.arithmetic.randomness import iteration_function
from fxround.numerics.arithmetic.scalar import Function
from fxround.runtime import buffers
from fxround.runtime.draw import Draw

_MOST: Final = 1 << 48


@lru_cache(maxsize=1)
def _function() -> Function:
    return iteration_function()


@lru_cache(maxsize=64)
def _seeds(draw: Draw, counters: bytes) -> bytes:
    """The seeds of iterations, whose numbers and seeds are the bytes of int64; remembered, since calls repeat them."""
    numbers = np.frombuffer(counters, np.uint64)
    low, high = _function().evaluate(numbers, *(np.uint32(word) for word in draw.key()))
    seeds = low.astype(np.int64) | high.astype(np.int64) << 32
    return bytes(seeds.tobytes())


def iterations(call: Iterations[Tensor]) -> Tensor:
    """Return (seed, sample) of each iteration. Raises ValueError for a counter outside 0 to 2^48 - 1."""
    draw, counters = Draw.of(call.rng, call.node), call.counters.cpu().numpy()
    if counters.size and not 0 <= counters.min() <= counters.max() < _MOST:
        raise ValueError(f"a loop has iterations {counters.min()} to {counters.max()}; expected 0 to 2^48 - 1")
    seeds = np.frombuffer(_seeds(draw, counters.tobytes()), np.int64).reshape(counters.shape)
    keys = buffers.empty((*counters.shape, 2), torch.int64)
    keys.numpy()[..., 0], keys.numpy()[..., 1] = seeds, draw.sample
    return keys
