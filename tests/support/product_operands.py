"""Operands of products and convolutions, of many kinds, and the comparison of binary32 encodings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fxround  # noqa: F401  registers the operators

OPS = torch.ops.fxround
RNE = "binary32/nearest_even/inf"
SPECIALS = [0.0, -0.0, math.inf, -math.inf, math.nan, 2.0**-149, -(2.0**-126), 3.4e38, -3.4e38, 1e-30]
KINDS = ("normal", "integers", "tiny", "huge", "special", "zeros", "halves")


def values(shape: tuple[int, ...], seed: int, kind: str = "normal") -> Tensor:
    """binary32 numbers of many binades, integers (for midpoints), numbers near the ends of the range, specials."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 6, shape))
    if kind == "integers":
        x = rng.integers(-20, 20, shape).astype(np.float64)
    if kind == "halves":
        # One long significand, the rest powers of two: sums come close to midpoints, from both sides.
        x = np.exp2(rng.integers(-14, 3, shape)) * rng.choice([1, -1, 1.5, 1 + 2.0**-23, 1 - 2.0**-24], shape)
    if kind in ("tiny", "huge"):
        x = x * 2.0 ** (-70 if kind == "tiny" else 62)
    if kind in ("special", "zeros"):
        x = np.where(rng.random(shape) < 0.3, rng.choice(SPECIALS[: 2 if kind == "zeros" else None], shape), x)
    return torch.from_numpy(np.asarray(x, dtype=np.float32))


def encodings(x: Tensor | Any) -> Any:
    return np.ascontiguousarray(x.contiguous().numpy() if isinstance(x, Tensor) else x).view(np.uint32)


def same(got: Tensor, want: Tensor | Any) -> None:
    found, expected = encodings(got), encodings(want)
    assert found.shape == expected.shape
    different = np.argwhere(found != expected)
    assert len(different) == 0, (different[:5], found[found != expected][:5], expected[found != expected][:5])


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
