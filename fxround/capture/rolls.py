"""Rolled tensors as pieces: what ``torch.roll`` moves is two slices in another order, which kernels copy row by row.

PyTorch's own formula selects each element by a number, and computes these numbers in every call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def as_pieces(by_numbers: Callable[..., Any]) -> Callable[..., Any]:
    """Return the formula of ``aten.roll`` by slices. by_numbers: PyTorch's formula, for symbolic sizes and errors."""

    @functools.wraps(by_numbers)
    def roll(x: Tensor, shifts: Any, dims: Any = ()) -> Any:
        places, along = (list(n) if isinstance(n, list | tuple) else [n] for n in (shifts, dims))
        inside = all(isinstance(d, int) and -x.dim() <= d < x.dim() for d in along)
        sizes = [x.shape[d] for d in along] if inside else []
        fixed = all(type(n) is int and n > 0 for n in sizes) and all(type(n) is int for n in places)
        if not along or len(along) != len(places) or not inside or not fixed:
            return by_numbers(x, shifts, dims)
        for d, size, n in zip(along, sizes, places, strict=True):
            begin = -n % size
            x = torch.cat([x.narrow(d, begin, size - begin), x.narrow(d, 0, begin)], d) if begin else x
        return x if any(n % size for size, n in zip(sizes, places, strict=True)) else x.clone()

    return roll
