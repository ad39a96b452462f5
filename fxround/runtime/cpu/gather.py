"""Gathers over CPU tensors, for which PyTorch's operator takes a walk of all layouts for each element."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from fxround.runtime import buffers
from fxround.runtime.cpu.code import current_set, native, signature
from fxround.runtime.cpu.llvm.gather import PIECE, build_gather
from fxround.runtime.cpu.pointwise import addresses, array
from fxround.runtime.cpu.threads import pieces_of, spread
from fxround.runtime.layouts import collapse

_GATHER: Final = signature(2, 5)
# The fewest elements that are worth this call, and those that are worth another thread.
_LEAST: Final = 1 << 14
_ENOUGH: Final = 1 << 16
_SIZES: Final = (2, 4, 8)


def run_gather(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """The elements of x that indices choose along a dimension: what PyTorch's gather returns, or its error."""
    out = buffers.empty(index.shape, x.dtype)
    call = _call_for(x, dim, index)
    if call is None:
        return torch.gather(x, dim, index, out=out)
    outside = ctypes.c_int32(0)
    at_x, at_index, at_out = addresses((x, index, out))
    arguments = (ctypes.addressof(call.layout), at_x, at_index, ctypes.addressof(outside), at_out)
    spread(call.function, call.items, pieces_of(len(call.items), call.enough), arguments)
    # An index outside of x: PyTorch's operator raises.
    return torch.gather(x, dim, index, out=out) if outside.value else out


@dataclass(frozen=True)
class _GatherCall:
    """The code for tensors of given layouts, and what it reads besides them. enough: items worth another thread."""

    function: Any
    layout: Any
    items: range
    enough: int


def _call_for(x: Tensor, dim: int, index: Tensor) -> _GatherCall | None:
    """The call for these tensors; None if the code does not read them."""
    # Element by element, an int32 index is another number, and a view with the negative bit has other elements.
    if index.numel() < _LEAST or index.dtype != torch.int64 or x.itemsize not in _SIZES or x.is_neg():
        return None
    if x.is_complex() or x.is_quantized or not (x.layout is index.layout is torch.strided):
        return None
    layouts = (x.shape, x.stride()), (index.shape, index.stride())
    return _planned(x.itemsize, dim, *layouts, current_set())


@lru_cache(maxsize=1024)
def _planned(
    itemsize: int,
    dim: int,
    x: tuple[Sequence[int], Sequence[int]],
    index: tuple[Sequence[int], Sequence[int]],
    isa: str,
) -> _GatherCall | None:
    """The call for tensors of these shapes and strides; None unless it gathers adjacent elements of the last dimension.

    PyTorch's operator raises for what does not fit.
    """
    (shape, strides), (indices, index_strides) = x, index
    if len(shape) != len(indices) or dim not in (-1, len(shape) - 1):
        return None
    if any(own > size for own, size in zip(indices[:-1], shape[:-1], strict=True)) or 0 in shape:
        return None
    if strides[-1] != 1 or index_strides[-1] != 1:
        return None
    sizes, (steps, index_steps) = collapse(indices[:-1], [list(strides[:-1]), list(index_strides[:-1])])
    pieces = -(-indices[-1] // PIECE)
    layout = [indices[-1], pieces, shape[-1], len(sizes)]
    for dimension in reversed(list(zip(sizes, steps, index_steps, strict=True))):
        layout += dimension
    function = native(f"gather:{itemsize}", build_gather, itemsize, "gather", _GATHER)
    rows = torch.Size(indices[:-1]).numel()
    return _GatherCall(function, array(layout), range(rows * pieces), max(1, _ENOUGH // min(indices[-1], PIECE)))
