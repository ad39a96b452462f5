"""Chains over CPU tensors: which loops serve an operand (outer, length, inner), before any pointer is passed.

What is true here. Results are new and row-major. Chains that lie along rows and chains that lie across them have
loops of their own; which ones run is decided by the sizes alone, and changes no bit.

    before   torch.sum(x, 1)
    after    run_reduce(kernel, x, draw)             # x: (outer, length, inner)
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch
from torch import Tensor

from fxround.kernel import Reduce, Scan
from fxround.runtime.compiled import native, signature
from fxround.runtime.execute import Draw, dtype_of
from fxround.runtime.llvm.reduce import across_lanes, build_across, build_along, build_scan
from fxround.runtime.llvm.rows import build_rows, row_lanes
from fxround.runtime.threads import split

_REDUCE: Final = signature(4, 3)
# A thread is worth waking for this many scalar steps.
_ENOUGH: Final = 1 << 15


def run_reduce(kernel: Reduce, x: Tensor, draw: Draw) -> Tensor:
    """x: (outer, length, inner). Returns (outer, inner)."""
    outer, length, inner = x.shape
    x = x.detach().contiguous()
    result = torch.empty(outer, inner, dtype=dtype_of(kernel.result))
    if result.numel() == 0:
        return result
    rows = row_lanes(kernel)
    if inner == 1 and kernel.order.kind == "sequential" and outer >= rows:
        run = native(f"{kernel.digest}:rows", build_rows, kernel, "reduce", _REDUCE)
        lanes, items, inner = rows, -(-outer // rows), outer
    elif inner == 1:
        run = native(f"{kernel.digest}:along", build_along, kernel, "reduce", _REDUCE)
        lanes, items = 1, outer
    else:
        lanes = across_lanes(kernel, inner)
        run = native(f"{kernel.digest}:across:{lanes}", build_across, (kernel, lanes), "reduce", _REDUCE)
        items = outer * -(-inner // lanes)
    work = max(1, length * lanes)
    pointers = (ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(result.data_ptr()), draw.key())
    split(lambda lo, hi: run(lo, hi, length, inner, *pointers), items, max(1, _ENOUGH // work))
    return result


def run_scan(kernel: Scan, x: Tensor, draw: Draw) -> Tensor:
    """x: (outer, length, inner). Returns the same shape."""
    outer, length, inner = x.shape
    x = x.detach().contiguous()
    result = torch.empty(outer, length, inner, dtype=dtype_of(kernel.result))
    if result.numel() == 0:
        return result
    lanes = row_lanes(kernel)
    if inner == 1 and outer >= lanes:
        run = native(f"{kernel.digest}:rows", build_rows, kernel, "reduce", _REDUCE)
        items, inner = -(-outer // lanes), outer
    else:
        lanes = across_lanes(kernel, inner)
        run = native(f"{kernel.digest}:scan:{lanes}", build_scan, (kernel, lanes), "reduce", _REDUCE)
        items = outer * -(-inner // lanes)
    work = max(1, length * lanes)
    pointers = (ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(result.data_ptr()), draw.key())
    split(lambda lo, hi: run(lo, hi, length, inner, *pointers), items, max(1, _ENOUGH // work))
    return result
