"""Threads: outputs are split between threads of fxround's own, reductions never are.

``spread`` cuts a range of independent items into pieces, which at most ``torch.get_num_threads()`` threads take one
after the other, in machine code and without the GIL: a thread that the system delays leaves its pieces to the others,
and the caller waits for no thread that has not begun. An item writes only its own outputs and reads those of no other,
so neither the cut nor the thread that takes a piece changes a bit. The call returns only when every piece has ended,
Ctrl-C included.

PyTorch's own threads, OpenMP's, wait for milliseconds after each of its operators, without giving up their processors.
They are ended before others are to run there.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from fxround.locks import WORKERS, waited_for
from fxround.runtime.cpu.code import address_of, native, signature
from fxround.runtime.cpu.llvm.engine import host_architecture
from fxround.runtime.cpu.llvm.team import HEADER, build_team
from fxround.runtime.cpu.llvm.thread_pool import LINE, MOST, PLACE, SIZE, build_thread_pool

# Pieces for each thread: several, so that all threads end at about the same time even if one was delayed.
_PIECES: Final = 4
_TEAM: Final = signature(1, 0)
_NONE: Final[Mapping[int, int]] = {}
_KEPT: Final = threading.local()
_PAGE: Final = 4096
_LOCK: Final = waited_for()
# omp_pause_soft (OpenMP 5.0, section 3.2.43): give up threads, keep data.
_SOFT: Final = 1
# Set in a process that was forked: OpenMP would wait there for threads that only the parent has.
_FORKED: Final = threading.Event()
# PF_FORKNOEXEC of the flags in /proc/self/stat.
_NO_PROGRAM: Final = 0x40


def pieces_of(items: int, enough: int) -> int:
    """How many pieces of at least ``enough`` items to cut the work into; 1 if it is not worth a second thread."""
    threads = torch.get_num_threads()
    if threads == 1 or items < 2 * enough:
        return 1
    return min(_PIECES * threads, items, items // max(1, enough))


def piece_of(items: range, pieces: int, piece: int) -> range:
    """The items of a piece."""
    return items[len(items) * piece // pieces : len(items) * (piece + 1) // pieces]


def spread(
    function: Any,
    items: range,
    pieces: int,
    arguments: Sequence[int],
    by_member: Mapping[int, int] = _NONE,
    by_piece: Mapping[int, int] = _NONE,
) -> None:
    """Call function(begin, end, *arguments) over the items, cut into pieces.

    ``function`` comes from ``compiled.native``; ``arguments`` are numbers and addresses. ``by_member`` and ``by_piece``
    give, by the index of an argument, what it grows by from thread to thread (of at most ``torch.get_num_threads()``)
    and from piece to piece.
    """
    if pieces <= 1:
        function(items.start, items.stop, *arguments)
        return
    count, threads = len(arguments), torch.get_num_threads()
    steps = [*(by_member.get(i, 0) for i in range(count)), *(by_piece.get(i, 0) for i in range(count))]
    task = (ctypes.c_int64 * (len(HEADER) + 3 * count))(
        0, 0, pieces, items.start, len(items), address_of(function), *arguments, *steps
    )
    team = native(f"team:{count}", build_team, count, "team", _TEAM)
    _pool().share(team, ctypes.addressof(task), min(threads, pieces, MOST))


def scratch(size: int, shared: bool) -> tuple[Tensor, int]:
    """This thread's scratch, and the bytes, at least ``size``, that each thread of its team has there.

    The memory belongs to the thread until it asks again, as a signal handler may before machine code is called: the
    caller holds the tensor until then. shared: whether there is a team at all.
    """
    # Whole pages: no two threads write to one cache line.
    step = -(-size // _PAGE) * _PAGE
    total = step * (torch.get_num_threads() if shared else 1)
    kept: Tensor | None = getattr(_KEPT, "scratch", None)
    if kept is None or kept.numel() < total:
        kept = _KEPT.scratch = torch.empty(total, dtype=torch.uint8, device="cpu")
    return kept, step


class _Pool:
    """The threads of this process that share the work of a caller; none, once the interpreter ends."""

    def __init__(self) -> None:
        memory = (ctypes.c_int64 * (SIZE + LINE))()
        # Never freed: a daemon thread may be in a call while the interpreter ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
        # Aligned: each word that threads read again and again has a cache line of its own.
        start = ctypes.addressof(memory)
        self._address = start + -start % (8 * LINE)
        self._threads: list[threading.Thread] = []
        self._libc = _semaphores()
        self._pause = None if _FORKED.is_set() or _runs_no_program() else _pausing()
        self._processors = _processors()
        # Without semaphores no thread can sleep: callers work alone.
        self._closed = self._libc is None
        if self._libc is not None:
            for name in ("post", "wait"):
                self._word(name).value = ctypes.cast(self._libc[f"sem_{name}"], ctypes.c_void_p).value or 0
            for name in ("work", "done"):
                self._closed |= self._libc.sem_init(ctypes.byref(self._word(name)), 0, 0) != 0

    def share(self, function: Any, task: int, members: int) -> None:
        """Call function(task), which comes from ``native``, in this thread and in at most ``members`` - 1 others."""
        if len(self._threads) < members - 1:
            self._grow(members - 1)
        if self._pause is not None and torch.get_num_threads() + members - 1 > self._processors:
            self._pause(_SOFT)
        _native("share", 4)(self._address, address_of(function), task, members)

    def close(self) -> None:
        """End all threads; later callers work alone."""
        with _LOCK:
            self._closed = True
            self._word("stopping").value = 1
            for _ in self._threads:
                self._libc.sem_post(ctypes.byref(self._word("work")))
        for thread in self._threads:
            WORKERS.remove(thread)
            thread.join()

    def _grow(self, number: int) -> None:
        with _LOCK:
            while len(self._threads) < number and not self._closed:
                serve = _native("serve", 1)
                thread = threading.Thread(target=serve, args=(self._address,), name="fxround", daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    # The process is at its limit of threads: those that it has do the work.
                    return
                self._threads.append(thread)
                WORKERS.append(thread)

    def _word(self, name: str) -> ctypes.c_int64:
        return ctypes.c_int64.from_address(self._address + 8 * PLACE[name])


def _semaphores() -> Any:
    """The C library that has POSIX semaphores in memory; None on a system that lacks them (macOS, Windows)."""
    return ctypes.CDLL(None) if sys.platform not in ("darwin", "win32") else None


def _pausing() -> Callable[[int], int] | None:
    """Return ``omp_pause_resource_all`` of the library that PyTorch's operators use; None where there is none.

    It ends the threads of the calling thread's team, which have nothing to do between two operators; the next operator
    of PyTorch's that needs a team starts them again.
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        # Also found in what the library depends on.
        return ctypes.CDLL(str(library)).omp_pause_resource_all
    except (OSError, AttributeError):
        return None


def _runs_no_program() -> bool:
    """Whether this process is, or may be, a fork that has not begun another program, by what Linux says of it.

    The process may be a fork of one without fxround, so that no function of ours was called in it.
    """
    try:
        stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True  # not known: to wait for threads that do not exist would be for ever
    # After the name in parentheses: the state, five numbers of other processes, and the flags.
    return bool(int(stat.rpartition(")")[2].split()[6]) & _NO_PROGRAM)


def _processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_POOL: Final[list[_Pool]] = []


def _pool() -> _Pool:
    """The pool of this process (a forked child has none of its parent's threads, and makes its own)."""
    if not _POOL:
        with _LOCK:
            if not _POOL:
                _POOL.append(_Pool())
    return _POOL[0]


def _native(name: str, arguments: int) -> Any:
    return native(f"thread pool:{name}", build_thread_pool, host_architecture(), name, signature(arguments, 0))


@atexit.register
def _close() -> None:
    for pool in _POOL:
        pool.close()


def _begin_child() -> None:
    _FORKED.set()
    _POOL.clear()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_begin_child)
