"""Stopping: what Ctrl-C does to long work.

The first Ctrl-C sets a flag that is read between the steps of the work, so that the steps taken are complete and are
reported as partial; a second one raises KeyboardInterrupt. While this process only waits for workers, within
``workers``, the first one ends the wait by ``Stopped``. Processes that start there are out of the reach of a
terminal's Ctrl-C, which would end them in the midst of their imports.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from multiprocessing import resource_tracker
from types import FrameType

from fxround.significance.progress import LOGGER

# Set while the main thread waits for workers.
_WAITS = threading.Event()


class Stopped(KeyboardInterrupt):
    """Raised by the first Ctrl-C in a wait for workers."""


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed; a second press interrupts.

    Outside the main thread signals are not changed.
    """
    pressed = count()
    stopped = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        stopped.set()
        if next(pressed):
            raise KeyboardInterrupt
        if _WAITS.is_set():
            raise Stopped
        LOGGER.warning("Ctrl-C: this ends after the running step, with what is complete; a second one ends it at once")

    if threading.current_thread() is not threading.main_thread():
        yield stopped.is_set
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield stopped.is_set
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def workers() -> Iterator[None]:
    """Wait for workers within the block, which Ctrl-C ends by ``Stopped``. Outside the main thread nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    over = threading.Event()
    # A new process inherits what its parent's thread blocks. Python's handler runs whichever thread has the signal.
    taker = threading.Thread(target=over.wait, name="fxround-interrupts", daemon=True)
    taker.start()
    # Where it starts, Python 3.11 unblocks the signal afterwards, and a worker would start it.
    resource_tracker.ensure_running()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    _WAITS.set()
    try:
        yield
    finally:
        _WAITS.clear()
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        over.set()
        taker.join()
