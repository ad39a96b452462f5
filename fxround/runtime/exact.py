"""The exact sum of CPU tensors: shapes and layouts, before any pointer is passed.

What is true here. The order ``exact`` has no tree, so only the split into results is decided here.

    before   math.fsum(row) for each row
    after    run_exact(kernel, x, draw)
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch
from torch import Tensor

from fxround.kernel import Exact
from fxround.runtime.compiled import native, signature
from fxround.runtime.execute import Draw, dtype_of
from fxround.runtime.llvm.exact import LANES, build_exact
from fxround.runtime.threads import split

_EXACT: Final = signature(4, 3)
_ENOUGH: Final = 1 << 14
# A result costs as much as this many elements: clearing its bins, and carrying through them.
_RESULT: Final = 512


def run_exact(kernel: Exact, x: Tensor, draw: Draw) -> Tensor:
    """x: (outer, length, inner). Returns (outer, inner)."""
    outer, length, inner = x.shape
    if length >= 1 << 35:
        raise ValueError(f"an exact sum of {length} elements: its bins hold sums of fewer than 2^35")
    x = x.detach().contiguous()
    result = torch.empty(outer, inner, dtype=dtype_of(kernel.result))
    if result.numel() == 0:
        return result
    along = inner == 1
    run = native(f"{kernel.digest}:{along}", build_exact, (kernel, along), "exact", _EXACT)
    items, results = (outer, 1) if along else (outer * -(-inner // LANES), LANES)
    pointers = (ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(result.data_ptr()), draw.key())
    enough = max(1, _ENOUGH // (results * (length + _RESULT)))
    split(lambda lo, hi: run(lo, hi, length, inner, *pointers), items, enough)
    return result
