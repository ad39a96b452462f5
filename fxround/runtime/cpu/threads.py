"""Threads: outputs are split between PyTorch's own threads, reductions never are.

``spread`` cuts a range of independent items into pieces, which at most ``torch.get_num_threads()`` threads take one
after the other, in machine code and without the GIL: a thread that the system delays leaves its pieces to the others.
An item writes only its own outputs and reads those of no other, so neither the cut nor the thread that takes a piece
changes a bit. The call returns only when every piece has ended, Ctrl-C included.

The threads are those of the OpenMP runtime that PyTorch has loaded. They keep spinning for a while after each of
PyTorch's operators, and threads of another pool would compete with them for the processor. OpenMP's threads do not
survive a fork: a forked child, and a PyTorch without OpenMP, use the threads of a Python pool.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor

from fxround.runtime.cpu.code import address_of, native
from fxround.runtime.cpu.llvm.team import HEADER, build_team

# Pieces for each thread: several, so that all threads end at about the same time even if one was delayed.
_PIECES: Final = 4
_TEAM: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_PARALLEL: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
_PROCESS: Final = os.getpid()
_NONE: Final[Mapping[int, int]] = {}
_KEPT: Final = threading.local()
_PAGE: Final = 4096


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
    parallel = _parallel() if os.getpid() == _PROCESS else None
    if parallel is not None:
        parallel(address_of(team), task, threads, 0)
        return
    at = ctypes.addressof(task)
    split(lambda begin, end: team(at), min(threads, pieces), 1)


def scratch(size: int, shared: bool) -> tuple[int, int]:
    """The address of this thread's scratch, and the bytes, at least ``size``, that each thread of its team has there.

    The memory belongs to the thread until it asks again. shared: whether there is a team at all.
    """
    # Whole pages: no two threads write to one cache line.
    step = -(-size // _PAGE) * _PAGE
    total = step * (torch.get_num_threads() if shared else 1)
    kept: tuple[int, int, Tensor] | None = getattr(_KEPT, "scratch", None)
    if kept is None or kept[0] < total:
        memory = torch.empty(total, dtype=torch.uint8)
        kept = _KEPT.scratch = (total, memory.data_ptr(), memory)
    return kept[1], step


@cache
def _parallel() -> Any:
    """GOMP_parallel of PyTorch's OpenMP runtime, which runs a function on a team of threads; None if there is none."""
    # The lookup also searches the libraries that this one is linked with.
    found = getattr(ctypes.CDLL(torch._C.__file__), "GOMP_parallel", None)
    return None if found is None else _PARALLEL(ctypes.cast(found, ctypes.c_void_p).value or 0)


@cache
def _pool(process: int, workers: int) -> ThreadPoolExecutor:
    """The thread pool of this process (a forked child inherits none of its parent's threads)."""
    return ThreadPoolExecutor(workers, thread_name_prefix="fxround")


def split(run: Callable[[int, int], object], items: int, enough: int) -> None:
    """Call run(begin, end) over 0 ... items in pieces of at least ``enough``, one for each thread of a Python pool."""
    pieces = min(torch.get_num_threads(), max(1, items // max(1, enough)))
    if pieces <= 1:
        run(0, items)
        return
    cuts = [items * i // pieces for i in range(pieces + 1)]
    pool = _pool(os.getpid(), pieces - 1)
    others = [pool.submit(run, lo, hi) for lo, hi in pairwise(cuts[1:])]
    try:
        run(cuts[0], cuts[1])
    finally:
        _join(others)
    for other in others:
        other.result()


def _join(others: Sequence[Future[object]]) -> None:
    """Wait for all, Ctrl-C or not: a piece writes to memory that the caller frees when it returns."""
    interrupted: KeyboardInterrupt | None = None
    while True:
        try:
            wait(others)
            break
        except KeyboardInterrupt as error:
            interrupted = error
    if interrupted:
        raise interrupted
