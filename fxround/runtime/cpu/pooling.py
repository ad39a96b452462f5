"""Max pooling of CPU tensors, for which PyTorch's operator compares one element at a time."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from fxround.graph.dtypes import STORAGES
from fxround.runtime.cpu.code import current_set, native, signature
from fxround.runtime.cpu.llvm.pooling import LANES, PoolVariant, build_pool
from fxround.runtime.cpu.pointwise import addresses, array
from fxround.runtime.cpu.threads import pieces_of, spread
from fxround.runtime.layouts import row_major

_POOL: Final = signature(2, 4)
_OPERATOR: Final = torch.ops.aten.max_pool2d_with_indices.default
# The fewest elements of a result that are worth this call, and the elements of windows that are worth another thread.
LEAST: Final = 1 << 10
_ENOUGH: Final = 1 << 16
# The most elements of a plane, whose indices are computed as 32 bits, and the widest windows that code is written for.
_PLANE: Final = 1 << 30
_WIDEST: Final = 16
Sizes = Sequence[int] | int


def run_max_pool2d(
    x: Tensor, kernel: Sizes, stride: Sizes = (), padding: Sizes = 0, dilation: Sizes = 1, ceil_mode: bool = False
) -> Sequence[Tensor]:
    """The largest elements of windows and their indices: what PyTorch's operator returns, or its error.

    Arguments as of ``torch.nn.functional.max_pool2d``; x of shape (N, C, H, W) or (C, H, W).
    """
    windows = tuple(map(_pair, (kernel, stride, padding, dilation)))
    call = _call_for(x, windows, ceil_mode)
    if call is None:
        return _OPERATOR(x, kernel, stride, padding, dilation, ceil_mode)  # type: ignore[no-any-return]
    values, indices = (torch.empty(call.shape, dtype=dtype, device="cpu") for dtype in (x.dtype, torch.int64))
    arguments = (ctypes.addressof(call.layout), *addresses((x, values, indices)))
    spread(call.function, call.items, pieces_of(len(call.items), call.enough), arguments)
    return values, indices


def _pair(sizes: Sizes) -> tuple[int, ...]:
    """Two sizes, of rows and columns; none for a stride that is the kernel."""
    return (sizes, sizes) if isinstance(sizes, int) else tuple(sizes) * 2 if len(sizes) == 1 else tuple(sizes)


@dataclass(frozen=True)
class _PoolCall:
    """The code for tensors of given layouts, and what it reads besides them. enough: items worth another thread."""

    function: Any
    layout: Any
    shape: tuple[int, ...]
    items: range
    enough: int


def _call_for(x: Tensor, windows: tuple[tuple[int, ...], ...], ceil_mode: bool) -> _PoolCall | None:
    """The call for a tensor; None if the code does not read it."""
    if x.dtype not in (torch.float32, torch.float64) or x.layout is not torch.strided or x.is_neg():
        return None
    if not (x.is_cpu and x.is_contiguous()) or x.dim() not in (3, 4):
        return None
    return _planned(x.shape, x.stride(), x.dtype, windows, ceil_mode, current_set())


@lru_cache(maxsize=1024)
def _planned(
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
    windows: tuple[tuple[int, ...], ...],
    ceil_mode: bool,
    isa: str,
) -> _PoolCall | None:
    """The call for a tensor of this layout; None if PyTorch's operator refuses it, or returns another layout."""
    try:
        values, _ = _OPERATOR(torch.empty_strided(shape, strides, dtype=dtype, device="meta"), *windows, ceil_mode)
    except (RuntimeError, TypeError, ValueError):
        return None  # the operator itself is called, and raises it
    (kernel_h, kernel_w), stride, (padding_h, padding_w), (dilation_h, dilation_w) = windows
    step_h, step_w = stride or (kernel_h, kernel_w)
    rows, columns = map(int, values.shape[-2:])
    height, width = map(int, shape[-2:])
    # Of one channel, a row-major operand may have the strides of channels last, and so has the result then.
    if list(values.stride()) != row_major(values.shape) or values.numel() < LEAST:
        return None
    if kernel_w > _WIDEST or height * width > _PLANE:
        return None
    variant = PoolVariant(STORAGES[dtype], kernel_w, step_w, dilation_w)

    def before(reach: int) -> int:
        """The number of columns, from 0 on, whose windows have ``reach`` elements of the operand after the first."""
        return min(columns, (width - 1 - reach + padding_w) // step_w + 1)

    first = min(columns, -(-padding_w // step_w))
    inside, reach = max(first, before((kernel_w - 1) * dilation_w)), variant.vector_reach
    room = 0 if reach is None else min(inside, before(reach)) - first
    lanes = next((lanes for lanes in LANES if lanes <= room), 1)
    vectors, variant = first + room if lanes > 1 else first, replace(variant, lanes=lanes)
    of_rows = rows, columns, height, width, kernel_h, step_h, padding_h, dilation_h
    layout = array((*of_rows, step_w, padding_w, dilation_w, first, vectors, inside))
    function = native(variant.digest, build_pool, variant, "pool", _POOL)
    items, enough = range(values.numel() // columns), max(1, _ENOUGH // (columns * kernel_h * kernel_w))
    return _PoolCall(function, layout, tuple(values.shape), items, enough)
