"""Locks of the process: reentrant, waited for by a fork, and free in the forked child.

A fork copies the memory while other threads may be in the middle of a capture or of a compilation. It therefore waits
until they have left (``waited_for``), so that a child finds complete state and free locks. The same thread may take a
lock again: a signal handler runs in the middle of whatever its thread does.
"""

from __future__ import annotations

import os
import threading
from typing import Any, Final

# A thread that keeps a lock for this long is stuck: the child renews the lock, and the fork goes on.
_PATIENCE: Final = 60.0


def waited_for(lock: Any = None) -> Any:
    """A reentrant lock that a fork waits for; ``lock``: one that exists already and is taken elsewhere too.

    It is to be taken by ``with``: Ctrl-C does not come between the lock and the block.
    """
    taken: Any = threading.RLock() if lock is None else lock
    waited: list[bool] = []

    def before() -> None:
        found = False
        try:
            found = taken.acquire(timeout=_PATIENCE)
        finally:
            waited.append(found)

    def in_parent() -> None:
        if waited.pop():
            taken.release()

    def in_child() -> None:
        # The thread that forked is the child's only one, under the same identity: what it holds it may release.
        if waited.pop():
            taken.release()
        else:
            taken._at_fork_reinit()

    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)
    return taken
