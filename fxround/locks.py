"""Locks of the process: fxround's own, and a mutex of PyTorch's for which threads could wait for ever.

A fork copies the memory while other threads may be in the middle of a capture or a compilation. It therefore waits
until they have released fxround's locks (``waited_for``), so that the child finds complete state and free locks. A
thread may take a lock again, because a signal handler runs in the middle of whatever its thread does.
"""

from __future__ import annotations

import os
import threading
from typing import Any, Final

import torch
from torch import Tensor

# A thread that keeps a lock for this many seconds is stuck: the fork goes on, and the child reinitializes the lock.
_PATIENCE: Final = 60.0


def waited_for(lock: Any = None) -> Any:
    """Return a reentrant lock that a fork waits for.

    lock: an existing lock that other code takes too; None makes a new one. Take the lock by ``with``: then Ctrl-C
    cannot come between the lock and the block.
    """
    taken: Any = threading.RLock() if lock is None else lock
    waited: list[bool] = []

    def before() -> None:
        acquired = False
        try:
            acquired = taken.acquire(timeout=_PATIENCE)
        finally:
            waited.append(acquired)

    def in_parent() -> None:
        if waited.pop():
            taken.release()

    def in_child() -> None:
        # The child's only thread is the one that forked, under the same identity: it may release what it holds.
        if waited.pop():
            taken.release()
        else:
            taken._at_fork_reinit()

    if hasattr(os, "register_at_fork"):  # Windows has no fork
        os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)
    return taken


# Threads that fxround started, which run no operation of PyTorch's.
WORKERS: Final[list[threading.Thread]] = []


def applied(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Return ``function.apply(*args)``, which cannot hang while another thread computes with the same leaves.

    PyTorch makes a leaf's gradient accumulator where it is first needed, under a mutex of the leaf, and takes the GIL
    meanwhile, for a reference to the leaf. Its operations release the GIL first, ``Function.apply`` does not: if a
    thread waits for the mutex in ``apply`` with the GIL, and another one for the GIL with the mutex, both wait forever
    (seen in torch 2.13). To take an accumulator that exists needs no GIL. A view makes it, and holds it meanwhile.
    """
    held = []
    if threading.active_count() - len(WORKERS) > 1 and torch.is_grad_enabled():
        leaves = (x for x in args if isinstance(x, Tensor) and x.requires_grad and x.is_leaf)
        held = [leaf.view_as(leaf) for leaf in leaves]
    results: Any = function.apply(*args)
    del held
    return results


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=WORKERS.clear)
