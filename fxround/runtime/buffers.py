"""Memory for results: a buffer that a graph no longer needs is used again instead of fresh pages.

``empty`` gives an uninitialised row-major tensor, on a released buffer of just that many bytes if there is one. Each
thread keeps its released buffers between calls; together with those in use they never hold more bytes than were in use
at once in some call, or a few megabytes. A buffer is used again only after ``release``, which the schedule calls for a
tensor that a kernel of ours made and that nothing can reach any more. Releasing a buffer twice, or one that ``empty``
did not give, is an error. ``guarded`` finds kernels and schedules that use memory which is not theirs.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fxround.errors import VerificationError

# Smaller results are allocated faster by the C library, which keeps their memory itself.
WORTHWHILE: Final = 1 << 16
# The bytes that a thread may keep whatever it used.
_MODEST: Final = 1 << 22
# The bytes before and after a guarded buffer, and the value of each.
_GUARD: Final = 64
_WORD: Final = 0xA5
# Signalling NaNs as integers of each dtype's width.
_SIGNALLING: Final = {
    torch.float64: (torch.int64, 0x7FF4_0000_0000_0000),
    torch.float32: (torch.int32, 0x7FA0_0000),
    torch.float16: (torch.int16, 0x7D00),
    torch.bfloat16: (torch.int16, 0x7FA0),
}


class _Pool(threading.local):
    """A thread's released buffers by size, oldest first, and the bytes in use, kept, and in use at most so far."""

    def __init__(self) -> None:
        self.waiting: dict[int, list[Any]] = {}
        self.used = self.kept = self.peak = 0
        self.guard: _Guard | None = None

    def take(self, size: int) -> Any | None:
        """A kept buffer of ``size`` bytes, or None after making room for a fresh one."""
        self.used += size
        self.peak = max(self.peak, self.used)
        free = self.waiting.get(size)
        if free:
            self.kept -= size
            buffer = free.pop()
            if not free:
                del self.waiting[size]
            return buffer
        self.shrink()
        return None

    def give(self, buffer: Any, size: int) -> None:
        """Keep a released buffer."""
        self.used = max(0, self.used - size)
        self.kept += size
        # The latest size moves to the end, so it is dropped last.
        self.waiting[size] = [*self.waiting.pop(size, ()), buffer]
        self.shrink()

    def shrink(self) -> None:
        """Drop the oldest buffers beyond the most that was in use at once."""
        while self.waiting and self.used + self.kept > max(self.peak, _MODEST):
            size, buffers = next(iter(self.waiting.items()))
            buffers.pop(0)
            self.kept -= size
            if not buffers:
                del self.waiting[size]


class _Guard:
    """Buffers between guard words that are never used again: a released one keeps its signalling NaNs."""

    def __init__(self) -> None:
        self.lent: list[Tensor] = []
        self.released: list[tuple[Tensor, Tensor]] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of signalling NaNs between guard words."""
        size = math.prod(shape) * dtype.itemsize
        memory = torch.full((size + 2 * _GUARD,), _WORD, dtype=torch.uint8, device="cpu")
        inside = memory[_GUARD : _GUARD + size].view(dtype).view(tuple(shape))
        _poison(inside)
        self.lent.append(memory)
        return inside

    def release(self, dead: Tensor) -> None:
        """Fill a buffer with signalling NaNs; VerificationError if it is not in use."""
        memory = next((m for m in self.lent if m.data_ptr() == dead.untyped_storage().data_ptr()), None)
        if memory is None:
            raise VerificationError(
                f"a tensor of shape {tuple(dead.shape)} was released but is not in use: it was released before, or "
                "never lent"
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
        """Raise VerificationError unless the guard words are intact."""
        if not bool((memory[:_GUARD] == _WORD).all() and (memory[-_GUARD:] == _WORD).all()):
            raise VerificationError(f"a kernel wrote beside its result of {len(memory) - 2 * _GUARD} bytes")


def _poison(memory: Tensor) -> None:
    """Fill with signalling NaNs."""
    width, word = _SIGNALLING.get(memory.dtype, (torch.uint8, _WORD))
    memory.view(width).fill_(word)


_POOL: Final = _Pool()


def begin() -> None:
    """Begin a call: no buffer of this thread is in use by a graph."""
    _POOL.used = 0


_CPU: Final = torch.device("cpu")


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device = _CPU) -> Tensor:
    """An uninitialised row-major tensor; on other devices than the CPU from PyTorch's own allocator."""
    if device.type != "cpu":
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    if _POOL.guard is not None:
        return _POOL.guard.empty(shape, dtype)
    size = math.prod(shape) * dtype.itemsize
    if size < WORTHWHILE:
        return torch.empty(shape, dtype=dtype, device=_CPU)
    buffer = _POOL.take(size)
    if buffer is None:
        fresh = torch.empty(shape, dtype=dtype, device=_CPU)
        fresh.untyped_storage().lent = True  # type: ignore[attr-defined]
        return fresh
    buffer.lent = True
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    return torch.empty(0, dtype=dtype, device=_CPU).set_(buffer, 0, tuple(shape), strides)


def out_of_memory(error: torch.OutOfMemoryError, what: str, operands: Iterable[Any]) -> torch.OutOfMemoryError:
    """PyTorch's error with the operation, and the operands that it has, in its text."""
    listed = ", ".join(f"{x.dtype} {list(x.shape)}" for x in operands if isinstance(x, Tensor))
    return torch.OutOfMemoryError(f"{what} of {listed}: no memory for its result. {error}")


def fills_its_buffer(tensor: Tensor) -> bool:
    """Whether a tensor that ``empty`` gave, or a view of it, covers its whole buffer."""
    around = 0 if _POOL.guard is None else 2 * _GUARD
    return tensor.untyped_storage().nbytes() == tensor.nbytes + around


def again(dead: Tensor) -> Tensor:
    """A row-major tensor in the memory of one that covers its buffer and that only its reader still reaches."""
    strides = [math.prod(dead.shape[d + 1 :]) for d in range(dead.dim())]
    made = torch.empty(0, dtype=dead.dtype, device=_CPU)
    return made.set_(dead.untyped_storage(), dead.storage_offset(), tuple(dead.shape), strides)


def release(*dead: Tensor) -> None:
    """Take back the memory of tensors that nothing reaches any more; each is the only one on its memory.

    Raises VerificationError for memory that is not in use: it was released before, or ``empty`` did not give it.
    """
    for tensor in dead:
        if not tensor.is_cpu:
            # PyTorch's own allocator takes it back with the last reference.
            continue
        if _POOL.guard is not None:
            _POOL.guard.release(tensor)
            continue
        storage: Any = tensor.untyped_storage()
        size = storage.nbytes()
        if size < WORTHWHILE:
            continue
        # The mark is set while the storage is in use: it can be released once, and never given to two results.
        if not getattr(storage, "lent", False):
            raise VerificationError(
                f"a tensor of shape {tuple(tensor.shape)} was released but is not in use: it was released before, or "
                "never lent"
            )
        storage.lent = False
        _POOL.give(storage, size)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Run this thread's graphs with every result between guard words, and check them when the context ends.

    A fresh buffer and a released one hold signalling NaNs, so that an element that a kernel left out or read too late
    shows in the numbers. No buffer is used again before the context ends. For tests: it costs time and memory.

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
    """The bytes of this thread's kept buffers."""
    return _POOL.kept


def forget() -> None:
    """Free this thread's kept buffers."""
    _POOL.waiting.clear()
    _POOL.used = _POOL.kept = _POOL.peak = 0
