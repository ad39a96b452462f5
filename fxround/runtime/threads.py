"""One pool of threads that splits outputs, never a reduction.

What is true here. ``split`` cuts a range of independent work items into at most ``torch.get_num_threads()``
pieces and runs them at once; compiled kernels release the GIL, since ctypes does.

Why it is safe. An item writes its own outputs and reads no other's, so the cut changes no bit. Nothing leaves before
every piece has ended, an exception in one of them or Ctrl-C included.

    before   kernel(0, items)
    after    split(kernel, items, enough)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise

import torch


@cache
def _pool(process: int, workers: int) -> ThreadPoolExecutor:
    """A pool for this process (a forked child inherits none of its parent's threads)."""
    return ThreadPoolExecutor(workers, thread_name_prefix="fxround")


def split(run: Callable[[int, int], object], items: int, enough: int) -> None:
    """run(begin, end) over 0..items, in pieces of at least ``enough`` items, one a thread."""
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
    """Wait for all, Ctrl-C or not: a piece writes to memory that the caller frees when it leaves."""
    interrupted: KeyboardInterrupt | None = None
    while True:
        try:
            wait(others)
            break
        except KeyboardInterrupt as error:
            interrupted = error
    if interrupted:
        raise interrupted
