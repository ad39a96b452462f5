"""Operands of kernels in every layout, and the comparison of results with the NumPy reference's encodings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fxround.graph.dtypes import STORAGES
from fxround.kernels.reductions import scatter_kernel
from fxround.numerics.modes import MODES, Rounding
from fxround.runtime import reference
from fxround.runtime.draw import Draw

DRAW = Draw(seed=0x1234_5678_9ABC_DEF0, sample=3, node=17)
KEY = (0x9ABC_DEF0, 0x1234_5678, 3, 17)
BINARY32 = Rounding.parse("binary32")
# Every mode in the accumulator, and formats of each kind: full range, narrow range, no inf.
ACCUMULATORS = [
    *(f"binary32/{m}" for m in MODES),
    "binary64",
    "bfloat16",
    "bfloat16/stochastic:5",
    "binary16/stochastic",
    "binary16/toward_zero/saturate",
    "e5m2/up_down",
    "e4m3fn/nearest_even/saturate",
    "tf32/to_odd",
    "bfloat16 chunk=8 combine=binary32",
    "ieee(8,14)/toward_zero chunk=5 combine=binary32/stochastic",
    "binary32 chunk=16 combine=binary32",
    "binary32/stochastic product=binary32/stochastic",
    "binary32 product=bfloat16",
    "binary32 product=binary32 chunk=1 combine=binary16",
]
SPECIALS = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 2.0**-149, -(2.0**-126), 3.4e38, -65504.0, 1e-8]


def values(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32, special: bool = False) -> Tensor:
    """Normal deviates over many binades; every fifth one special if wanted."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 6, shape))
    if special:
        x = np.where(rng.random(shape) < 0.2, rng.choice(SPECIALS, shape), x)
    return torch.from_numpy(np.asarray(x)).to(dtype)


def stored(x: Tensor) -> Any:
    """Elements in the form that the kernels' scalar bodies read: floats, or codes of 16 and 8 bits in a uint32."""
    x = x.detach().contiguous()
    if x.is_floating_point() and x.itemsize < 4:
        kinds = {2: (torch.int16, np.uint16), 1: (torch.uint8, np.uint8)}
        integers, codes = kinds[x.itemsize]
        return x.view(integers).numpy().view(codes).astype(np.uint32)
    return x.numpy()


def same(got: Tensor, want: Any) -> None:
    """Equal encodings, minus zero and NaN included."""
    found, expected = np.atleast_1d(stored(got)), np.atleast_1d(want)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    kind = {4: np.uint32, 8: np.uint64}[found.dtype.itemsize]
    different = np.nonzero(found.view(kind) != expected.view(kind))
    assert len(different[0]) == 0, (different[0][:5], found[different][:5], expected[different][:5])


def layouts(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """The same values contiguous, transposed, sliced, strided, reversed in memory order, and broadcast."""
    x = values(shape, seed, dtype)
    yield x
    yield x.transpose(0, -1).contiguous().transpose(0, -1)
    wide = torch.empty(*shape[:-1], shape[-1] * 2 + 1, dtype=dtype)
    wide[..., 1::2] = x
    yield wide[..., 1::2]
    padded = torch.empty(shape[0] + 2, *shape[1:], dtype=dtype)
    padded[1:-1] = x
    yield padded[1:-1]


OPS = torch.ops.fxround
RNG = torch.tensor([DRAW.seed, DRAW.sample])


def scattered(x: Tensor, places: Tensor, source: Tensor, accumulate: str) -> Any:
    """The reference's scatter: source[k] is added to the element places[k] of x, k ascending."""
    kernel = scatter_kernel(Rounding.parse(accumulate), STORAGES[x.dtype])
    flat = (stored(x).reshape(-1), places.reshape(-1).numpy(), stored(source).reshape(-1))
    return reference.scatter(kernel, *flat, KEY).reshape(x.shape)
