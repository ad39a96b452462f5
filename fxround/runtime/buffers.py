"""Memory for results: what a graph no longer needs is used again instead of asking for fresh pages.

What is true here. ``empty`` gives an uninitialised row-major tensor, of a buffer that was released if there is one of
just that many bytes. Buffers that wait are kept between calls, a thread's own; with those in use they never hold more
than were in use at once in some call, or a few megabytes: peak memory is that of a run that frees at once.

Why it is safe. A buffer is taken up again only after ``release``, which the schedule calls for a tensor that a kernel
of ours made and nothing can reach any more: neither another value of the graph nor its caller.

    before   torch.empty(40 MB) at each call: 10,000 page faults
    after    empty(shape, dtype); ...; release(tensor)
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

# Smaller results are quicker from the C library, which keeps them itself.
_WORTHWHILE: Final = 1 << 16
# What a thread may keep whatever it used.
_MODEST: Final = 1 << 22


class _Pool(threading.local):
    """A thread's waiting buffers by size, oldest first; how many bytes are in use, wait, and were in use at most."""

    def __init__(self) -> None:
        self.waiting: dict[int, list[Any]] = {}
        self.used = self.kept = self.peak = 0

    def take(self, size: int) -> Any | None:
        """A waiting buffer of ``size`` bytes, or None after making room for a fresh one."""
        self.used += size
        self.peak = max(self.peak, self.used)
        found = self.waiting.get(size)
        if found:
            self.kept -= size
            buffer = found.pop()
            if not found:
                del self.waiting[size]
            return buffer
        self.shrink()
        return None

    def give(self, buffer: Any, size: int) -> None:
        self.used = max(0, self.used - size)
        self.kept += size
        # The latest size last: it is the last to be dropped.
        self.waiting[size] = [*self.waiting.pop(size, ()), buffer]
        self.shrink()

    def shrink(self) -> None:
        while self.waiting and self.used + self.kept > max(self.peak, _MODEST):
            size, buffers = next(iter(self.waiting.items()))
            buffers.pop(0)
            self.kept -= size
            if not buffers:
                del self.waiting[size]


_POOL: Final = _Pool()


def begin() -> None:
    """A call starts: nothing of this thread's is in use by a graph."""
    _POOL.used = 0


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised row-major tensor on the CPU."""
    size = math.prod(shape) * dtype.itemsize
    if size < _WORTHWHILE:
        return torch.empty(shape, dtype=dtype)
    buffer = _POOL.take(size)
    if buffer is None:
        return torch.empty(shape, dtype=dtype)
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    return torch.empty(0, dtype=dtype).set_(buffer, 0, tuple(shape), strides)


def again(dead: Tensor) -> Tensor:
    """A row-major tensor in the memory of one that fills its own, and that nothing reaches any more but its reader."""
    strides = [math.prod(dead.shape[d + 1 :]) for d in range(dead.dim())]
    return torch.empty(0, dtype=dead.dtype).set_(dead.untyped_storage(), 0, tuple(dead.shape), strides)


def release(*dead: Tensor) -> None:
    """Take back the memory of tensors that nothing reaches any more; each is the only one on its memory."""
    for tensor in dead:
        storage = tensor.untyped_storage()
        if storage.nbytes() >= _WORTHWHILE:
            _POOL.give(storage, storage.nbytes())


def kept() -> int:
    """How many bytes wait in this thread."""
    return _POOL.kept


def forget() -> None:
    """Give this thread's waiting buffers back to the system."""
    _POOL.__init__()  # type: ignore[misc]
