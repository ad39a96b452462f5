"""Integers of a highest width that serve every lower width by a second rounding, and the numbers that they stand for.

The arithmetic of "Double Rounding" (Huang et al., "Nearly Lossless Adaptive Bit Switching", arXiv 2502.01199, section
3.1). With h bits stored, l bits served, d = h - l and the scale s of h bits:

    (1)  q_h = clip(round(w / s), -2^(h-1), 2^(h-1) - 1)
    (2)  q_l = clip(round(q_h / 2^d), -2^(l-1), 2^(l-1) - 1)
    (3)  w_l = q_l * s * 2^d

Both roundings are to the nearest integer, ties to even, where the paper says nothing about ties; (1) may have another
mode to nearest. (2) is computed in integers. s * 2^d is rounded once to the format of the scale,
which is exact unless it overflows, and the product with q_l once to the dtype of the weight. Integers have no negative
zero: a weight that becomes 0 becomes +0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from fxround.graph.dtypes import FORMAT_OF
from fxround.kernels.program import Program, Statement
from fxround.kernels.scaled import carrier_of
from fxround.numerics.formats import Format
from fxround.numerics.formats.fixed_point import integers
from fxround.numerics.modes import MODES, Mode, Rounding
from fxround.runtime.draw import Draw
from fxround.runtime.run import run_map

# The least and the largest width.
LEAST, MOST = 2, 16
# The elements that are decoded at once: what a switch of widths needs beside the weights.
_PIECE: Final = 1 << 18
# The mode of the paper's roundings.
EVEN: Final = MODES["nearest_even"]


@dataclass(frozen=True)
class Scales:
    """The scales of a tensor, one for each block.

    values   in binary32, binary64 for a tensor of float64; its size along each dimension is the number of blocks
    blocks   how many consecutive elements share a scale, for each dimension; the last block may have fewer
    """

    values: Tensor
    blocks: tuple[int, ...]

    @staticmethod
    def of(full: Tensor, blocks: Sequence[int]) -> Scales:
        """Return the scales of a tensor that has one for each element, equal within blocks."""
        values = full
        for d, size in enumerate(blocks):
            values = values.index_select(d, torch.arange(0, full.shape[d], size, device=full.device))
        return Scales(values.clone(), tuple(blocks))

    def full(self, shape: Sequence[int]) -> Tensor:
        """Return the scales of all elements, to broadcast with them."""
        return self.rows(shape, 0, shape[0]) if shape else self.values

    def rows(self, shape: Sequence[int], start: int, stop: int) -> Tensor:
        """Return the scales of the elements start to stop of the first dimension, to broadcast with them."""
        values = self.values
        for d, size in enumerate(self.blocks):
            first, last = (start, stop) if d == 0 else (0, shape[d])
            if values.shape[d] > 1:
                values = values.index_select(d, torch.arange(first, last, device=values.device) // size)
        return values


def blocks_of(scales: Sequence[Tensor]) -> tuple[int, ...]:
    """Return how many consecutive elements share a scale along each dimension, in all of some tensors of one shape."""
    blocks = []
    for d, size in enumerate(scales[0].shape):
        starts: set[int] = set()
        for scale in scales:
            apart = scale.narrow(d, 1, size - 1) != scale.narrow(d, 0, size - 1)
            rest = [i for i in range(apart.dim()) if i != d]
            starts |= set((1 + (apart.any(rest) if rest else apart).nonzero().flatten()).tolist())
        blocks.append(math.gcd(*starts) or max(1, size))
    return tuple(blocks)


def encode(x: Tensor, scale: Tensor, bits: int, mode: Mode = EVEN) -> Tensor:
    """Return the integers (1) of a tensor, in int8, or in int16 for more than 8 bits.

    scale: broadcasts to x. mode: one to nearest.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    quotient = run_map(_quotient(bits, mode), (x, scale), dtype, Draw())
    return quotient.to(torch.int8 if bits <= 8 else torch.int16)


def narrow(q: Tensor, stored: int, served: int) -> Tensor:
    """Return the integers (2) of fewer bits, in int32."""
    wide, shift = q.to(torch.int32), stored - served
    if shift:
        # A tie, half of 2^shift, goes up from an odd quotient and down from an even one.
        wide = (wide + (1 << shift - 1) - 1 + (wide >> shift & 1)) >> shift
    return wide.clamp_(-(1 << served - 1), (1 << served - 1) - 1)


def decode(q: Tensor, scale: Tensor, stored: int, served: int, dtype: torch.dtype) -> Tensor:
    """Return the numbers (3) of stored integers in fewer bits; scale broadcasts to them."""
    elements = narrow(q, stored, served).to(scale.dtype)
    factor = torch.tensor(2.0 ** (stored - served), dtype=scale.dtype, device=scale.device)
    return run_map(_product(FORMAT_OF[dtype]), (elements, scale, factor), dtype, Draw())


def decoded(q: Tensor, scales: Scales, stored: int, served: int, dtype: torch.dtype) -> Iterator[tuple[Any, Tensor]]:
    """Yield the numbers (3) of a tensor, piece by piece: the index of rows of the first dimension, and the numbers."""
    if not q.dim():
        yield ..., decode(q, scales.values, stored, served, dtype)
        return
    count = max(1, _PIECE * len(q) // max(1, q.numel()))
    for start in range(0, len(q), count):
        stop = min(start + count, len(q))
        yield slice(start, stop), decode(q[start:stop], scales.rows(q.shape, start, stop), stored, served, dtype)


@lru_cache(maxsize=64)
def _quotient(bits: int, mode: Mode) -> Program:
    """Return the program of (1): x0 an element, x1 its scale."""
    wide = Rounding(integers(bits + 1), mode, "saturate")
    least, most = -(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1
    return Program((Statement("t0", "div", ("x0", "x1"), wide), Statement("t1", "clamp", ("t0", least, most), None)))


@lru_cache(maxsize=8)
def _product(stored: str) -> Program:
    """Return the program of (3): x0 an integer, x1 its scale, x2 the power of two."""
    fmt = Format.parse(stored)
    scale, result = (Rounding(f, EVEN, "inf") for f in (carrier_of(fmt), fmt))
    return Program((Statement("t0", "mul", ("x1", "x2"), scale), Statement("t1", "mul", ("x0", "t0"), result)))
