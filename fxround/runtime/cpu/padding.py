"""Zeros around CPU tensors, written by fxround's threads in one pass."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from fxround.runtime import contractions
from fxround.runtime.cpu.code import native, signature
from fxround.runtime.cpu.llvm.pad import build_pad
from fxround.runtime.cpu.pointwise import addresses, array
from fxround.runtime.cpu.threads import pieces_of, spread

_PAD: Final = signature(2, 3)
# The bytes that make another thread worth its start.
_ENOUGH: Final = 1 << 17


def padded(x: Tensor, before: Sequence[int], after: Sequence[int]) -> Tensor:
    """x, row-major, with this many zeros on each side of a spatial dimension; a negative number removes elements."""
    if any((*before, *after)) and min((*before, *after)) >= 0:
        return pad(x, (0, 0, *before), (0, 0, *after))
    return contractions.padded(x, before, after)


def pad(x: Tensor, before: Sequence[int], after: Sequence[int]) -> Tensor:
    """A row-major tensor with this many zeros, at least 0, on each side of each dimension of a real CPU tensor x."""
    x = x.resolve_neg()
    x = x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()
    sizes = [size + low + high for size, low, high in zip(x.shape, before, after, strict=True)]
    out = torch.empty(sizes, dtype=x.dtype, device="cpu")
    if out.numel() == 0:
        return out
    item = x.itemsize
    layout = [len(sizes) - 1, before[-1] * item, x.shape[-1] * item, after[-1] * item]
    for d in reversed(range(len(sizes) - 1)):
        layout += [sizes[d], before[d], x.shape[d], x.stride(d) * item]
    numbers = array(layout)
    rows = math.prod(sizes[:-1])
    pieces = pieces_of(rows, -(-_ENOUGH // (sizes[-1] * item)))
    arguments = (ctypes.addressof(numbers), *addresses((x, out)))
    spread(native("pad", build_pad, None, "pad", _PAD), range(rows), pieces, arguments)
    return out
