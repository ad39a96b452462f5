"""Scatters over CPU tensors: the elements of the destination are split over threads."""

from __future__ import annotations

import ctypes
from typing import Final

from torch import Tensor

from fxround.graph.dtypes import dtype_of
from fxround.kernels.kinds import Scatter
from fxround.runtime import buffers
from fxround.runtime.contributions import Contributions
from fxround.runtime.cpu.code import native, signature
from fxround.runtime.cpu.llvm.scatter import build_scatter, lanes_for
from fxround.runtime.cpu.pointwise import addresses
from fxround.runtime.cpu.threads import pieces_of, spread
from fxround.runtime.draw import Draw

_SCATTER: Final = signature(3, 6)
_ENOUGH: Final = 1 << 13


def run_scatter(kernel: Scatter, x: Tensor, contributions: Contributions, draw: Draw) -> Tensor:
    """x with the contributions added, row-major."""
    x = x.detach().contiguous()
    result = buffers.empty(x.shape, dtype_of(kernel.result))
    if result.numel() == 0:
        return result
    source = contributions.source
    inner = source.shape[1]
    rows = x.numel() // inner
    order, starts = contributions.sorted(rows)
    lanes = lanes_for(kernel, inner)
    run = native(f"{kernel.digest}:{lanes}", build_scatter, (kernel, lanes), "scatter", _SCATTER)
    tensors = (starts, order, x, source, result)
    items, key = rows * -(-inner // lanes), draw.key()
    arguments = (inner, *addresses(tensors), ctypes.addressof(key))
    spread(run, range(items), pieces_of(items, _ENOUGH // lanes), arguments)
    return result
