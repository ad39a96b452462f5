"""Exact sums of CPU tensors: shapes and layouts, before any pointer is passed.

The order ``exact`` has no tree: only the split into results is decided here, and the reduced dimensions are walked in
the order of their strides. Nothing is copied but panels of a line, and operands of too many dimensions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

from torch import Tensor

from fxround.graph.dtypes import dtype_of
from fxround.kernels.kinds import Exact
from fxround.runtime import buffers
from fxround.runtime.cpu.code import native, signature
from fxround.runtime.cpu.llvm.exact import build_exact, lines_across
from fxround.runtime.cpu.pointwise import addresses
from fxround.runtime.cpu.reduction import described
from fxround.runtime.cpu.threads import pieces_of, spread
from fxround.runtime.draw import Draw

_EXACT: Final = signature(2, 4)
_ENOUGH: Final = 1 << 14
# The elements that take as long as rounding a result.
_RESULT: Final = 128


def run_exact(kernel: Exact, x: Tensor, draw: Draw, dims: Sequence[int] = (1,)) -> Tensor:
    """Sum ``dims`` (ascending, none negative) of x exactly; the result has the other dimensions."""
    result = buffers.empty([n for d, n in enumerate(x.shape) if d not in dims], dtype_of(kernel.result))
    x, lines = described(x, dims, ordered=False)
    if lines.length >= 1 << 35:
        raise ValueError(f"an exact sum of {lines.length} elements: its bins hold sums of fewer than 2^35")
    if lines.count == 0:
        return result
    inner = lines.results[-1]
    lanes = lines_across(kernel, inner.size) if inner.x == 1 else 0
    items = lines.count // inner.size * -(-inner.size // lanes) if lanes else lines.count
    dense = lines.dense and not lanes
    run = native(f"{kernel.digest}:{lanes}:{dense}", build_exact, (kernel, lanes, dense), "exact", _EXACT)
    places, key = lines.array(), draw.key()
    arguments = (ctypes.addressof(places), *addresses((x, result)), ctypes.addressof(key))
    spread(run, range(items), pieces_of(items, _ENOUGH // (max(1, lanes) * (lines.length + _RESULT))), arguments)
    return result
