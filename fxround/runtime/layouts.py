"""Layouts of operands: row-major strides, strides after broadcasting, and neighbouring dimensions merged."""

from __future__ import annotations

import math
from collections.abc import Sequence


def row_major(shape: Sequence[int]) -> list[int]:
    """The steps of a row-major tensor."""
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]


def collapse(shape: Sequence[int], strides: list[list[int]]) -> tuple[list[int], list[list[int]]]:
    """Merge neighbouring dimensions that every operand walks as one, and drop those of size 1."""
    sizes: list[int] = []
    merged: list[list[int]] = [[] for _ in strides]
    for d, size in enumerate(shape):
        if size == 1:
            continue
        if sizes and all(m[-1] == s[d] * size for m, s in zip(merged, strides, strict=True)):
            sizes[-1] *= size
            for m, s in zip(merged, strides, strict=True):
                m[-1] = s[d]
            continue
        sizes.append(size)
        for m, s in zip(merged, strides, strict=True):
            m.append(s[d])
    return sizes, merged


def expanded(shape: Sequence[int], own: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The strides of an operand after broadcasting to ``shape``."""
    missing = len(shape) - len(own)
    kept = (
        0 if n == 1 and size != 1 else stride for n, stride, size in zip(own, strides, shape[missing:], strict=True)
    )
    return [0] * missing + list(kept)
