"""Ctrl-C in the command ``fxround``: one line and status 130, also while the package is imported.

The package imports this module before any other, and the imports of PyTorch take seconds. In a process that runs the
command, Ctrl-C ends it at once from then on, except within ``interruptible``, where KeyboardInterrupt is raised.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any, Final

# The exit status of a command that Ctrl-C ended, as of a shell's.
INTERRUPTED: Final = 130
SAID: Final = "fxround: interrupted"


def is_command() -> bool:
    """Whether this process runs ``fxround`` or ``python -m fxround``, whose first argument is ``-m`` until it runs."""
    first = sys.argv[0] if sys.argv else ""
    if first == "-m":
        return "fxround" in sys.orig_argv[1:] and sys.orig_argv[sys.orig_argv.index("fxround") - 1] == "-m"
    return os.path.basename(first).removesuffix(".exe") == "fxround"


def _end(_signal: int, _frame: Any) -> None:
    # No exception: an import may catch it, or turn it into an error of its own.
    with contextlib.suppress(OSError):
        os.write(2, f"{SAID}\n".encode())
    os._exit(INTERRUPTED)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt where it would end the process at once."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not _end:
        yield
        return
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
    finally:
        signal.signal(signal.SIGINT, _end)


if (
    threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    and is_command()
):
    signal.signal(signal.SIGINT, _end)
