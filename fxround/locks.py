"""Locks of the process: reentrant, waited for by a fork, and free in the forked child.

A fork copies the memory while other threads may be in the middle of a capture or a compilation. It therefore waits
until they have released their locks (``waited_for``), so that the child finds complete state and free locks. A thread
may take a lock again, because a signal handler runs in the middle of whatever its thread does.
"""

from __future__ import annotations

import os
import threading
from typing import Any, Final

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
