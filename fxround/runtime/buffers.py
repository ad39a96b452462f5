"""Memory for results: what a graph no longer needs is used again instead of asking for fresh pages.

``empty`` gives an uninitialised row-major tensor, on a buffer that was released if one of just that many bytes waits.
Buffers that wait are kept between calls, for each thread its own; together with those in use they never hold more
than were in use at once in some call, or a few megabytes. A buffer is taken up again only after ``release``, which the
schedule calls for a tensor that a kernel of ours made and that nothing can reach any more. A buffer that is released
twice, or that was never lent, is an error. ``guarded`` finds kernels and schedules that use memory that is not theirs.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fxround.errors import VerificationError

# Smaller results are quicker from the C library, which keeps them itself.
_WORTHWHILE: Final = 1 << 16
# What a thread may keep whatever it used.
_MODEST: Final = 1 << 22
# Bytes before and after a guarded buffer, and what they hold.
_GUARD: Final = 64
_WORD: Final = 0xA5
# Signalling NaNs, as integers of the width of each dtype.
_SIGNALLING: Final = {
    torch.float64: (torch.int64, 0x7FF4_0000_0000_0000),
    torch.float32: (torch.int32, 0x7FA0_0000),
    torch.float16: (torch.int16, 0x7D00),
    torch.bfloat16: (torch.int16, 0x7FA0),
}


class _Pool(threading.local):
    """A thread's waiting buffers by size, oldest first; how many bytes are in use, wait, and were in use at most."""

    def __init__(self) -> None:
        self.waiting: dict[int, list[Any]] = {}
        self.used = self.kept = self.peak = 0
        self.guard: _Guard | None = None

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


class _Guard:
    """Buffers between guard words, which are never used again: what was released keeps its signalling NaNs."""

    def __init__(self) -> None:
        self.lent: list[Tensor] = []
        self.released: list[tuple[Tensor, Tensor]] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        memory = torch.full((size + 2 * _GUARD,), _WORD, dtype=torch.uint8)
        inside = memory[_GUARD : _GUARD + size].view(dtype).view(tuple(shape))
        _poison(inside)
        self.lent.append(memory)
        return inside

    def release(self, dead: Tensor) -> None:
        memory = next((m for m in self.lent if m.data_ptr() == dead.untyped_storage().data_ptr()), None)
        if memory is None:
            raise VerificationError(
                f"a tensor of shape {tuple(dead.shape)} was released that is not in use: twice, or nobody lent it"
            )
        self.lent = [m for m in self.lent if m is not memory]
        self._check_words(memory)
        inside = memory[_GUARD:-_GUARD].view(dead.dtype)
        _poison(inside)
        self.released.append((memory, inside.clone()))

    def check(self) -> None:
        """Raise VerificationError if anything was written beside a buffer or into a released one."""
        for memory in self.lent:
            self._check_words(memory)
        for memory, poisoned in self.released:
            self._check_words(memory)
            if not torch.equal(memory[_GUARD:-_GUARD], poisoned.view(torch.uint8)):
                raise VerificationError(f"a released buffer of {len(memory) - 2 * _GUARD} bytes was written to")

    def _check_words(self, memory: Tensor) -> None:
        if not bool((memory[:_GUARD] == _WORD).all() and (memory[-_GUARD:] == _WORD).all()):
            raise VerificationError(f"a kernel wrote beside its result of {len(memory) - 2 * _GUARD} bytes")


def _poison(memory: Tensor) -> None:
    width, word = _SIGNALLING[memory.dtype]
    memory.view(width).fill_(word)


_POOL: Final = _Pool()


def begin() -> None:
    """A call starts: nothing of this thread's is in use by a graph."""
    _POOL.used = 0


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised row-major tensor on the CPU."""
    if _POOL.guard is not None:
        return _POOL.guard.empty(shape, dtype)
    size = math.prod(shape) * dtype.itemsize
    if size < _WORTHWHILE:
        return torch.empty(shape, dtype=dtype)
    buffer = _POOL.take(size)
    if buffer is None:
        fresh = torch.empty(shape, dtype=dtype)
        fresh.untyped_storage().lent = True  # type: ignore[attr-defined]
        return fresh
    buffer.lent = True
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    return torch.empty(0, dtype=dtype).set_(buffer, 0, tuple(shape), strides)


def fills_its_buffer(tensor: Tensor) -> bool:
    """Whether a tensor that ``empty`` gave, or a view of it, is all of that buffer."""
    around = 0 if _POOL.guard is None else 2 * _GUARD
    return tensor.untyped_storage().nbytes() == tensor.nbytes + around


def again(dead: Tensor) -> Tensor:
    """A row-major tensor in the memory of one that fills its own, and that nothing reaches any more but its reader."""
    strides = [math.prod(dead.shape[d + 1 :]) for d in range(dead.dim())]
    made = torch.empty(0, dtype=dead.dtype)
    return made.set_(dead.untyped_storage(), dead.storage_offset(), tuple(dead.shape), strides)


def release(*dead: Tensor) -> None:
    """Take back the memory of tensors that nothing reaches any more; each is the only one on its memory.

    Raises VerificationError for memory that is not in use: it was released before, or ``empty`` did not give it.
    """
    for tensor in dead:
        if _POOL.guard is not None:
            _POOL.guard.release(tensor)
            continue
        storage: Any = tensor.untyped_storage()
        size = storage.nbytes()
        if size < _WORTHWHILE:
            continue
        # A storage waits at most once, so that no two results are ever given the same one.
        if not getattr(storage, "lent", False):
            raise VerificationError(
                f"a tensor of shape {tuple(tensor.shape)} was released that is not in use: twice, or nobody lent it"
            )
        storage.lent = False
        _POOL.give(storage, size)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Run this thread's graphs with every result between guard words, and look at them when the context ends.

    A fresh buffer and a released one hold signalling NaNs, so that what a kernel left out or read too late is seen in
    the numbers. No buffer is used again before the context ends. For tests: it costs time and memory.

    Raises VerificationError at the release of memory that is not in use, and at the end if a kernel wrote beside its
    result or into a released buffer.
    """
    outer, _POOL.guard = _POOL.guard, _Guard()
    try:
        yield
        _POOL.guard.check()
    finally:
        _POOL.guard = outer


def kept() -> int:
    """How many bytes wait in this thread."""
    return _POOL.kept


def forget() -> None:
    """Give this thread's waiting buffers back to the system."""
    _POOL.waiting.clear()
    _POOL.used = _POOL.kept = _POOL.peak = 0
