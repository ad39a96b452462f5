"""Run code in a new interpreter, or in several at once, that find the same modules.

It has the module search path of this process, so that it imports the same fxround and the same PyTorch. A terminal's
Ctrl-C does not reach it: this process decides whether it waits for the new one, or kills it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import IO, Final

# The child sets sys.path before it imports anything of fxround's or the caller's.
_HEAD: Final = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1))\n"


def run(
    code: str, *arguments: str, environment: Mapping[str, str] | None = None, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python code, with ``arguments`` in ``sys.argv[1:]``, and return what it printed.

    environment: variables to set besides those of this process. timeout: in seconds; subprocess.TimeoutExpired follows.
    """
    return subprocess.run(
        _command(code, arguments),
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        start_new_session=True,
        check=False,
    )


def run_together(
    code: str, arguments: Sequence[Sequence[str]], *, grace: float
) -> list[subprocess.CompletedProcess[str]]:
    """Run Python code in one process for each list of arguments, at once, and return what they printed, as they ended.

    Of those that end within one look, one that a signal has ended is first: others may have failed because of it. When
    one fails, the others have ``grace`` seconds to end before they are killed. None is left after an exception.
    """
    with ExitStack() as stack:
        running: dict[subprocess.Popen[str], tuple[IO[str], IO[str]]] = {}
        ended: list[subprocess.CompletedProcess[str]] = []
        stack.callback(_end, running)
        for own in arguments:
            out, err = (stack.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in range(2))
            process = subprocess.Popen(
                _command(code, own), stdout=out, stderr=err, text=True, start_new_session=True, stdin=subprocess.DEVNULL
            )
            running[process] = out, err
        until = float("inf")
        while running:
            now = [process for process in running if process.poll() is not None]
            for process in sorted(now, key=lambda process: process.returncode >= 0):
                printed = map(_text, running.pop(process))
                ended.append(subprocess.CompletedProcess(process.args, process.returncode, *printed))
                if process.returncode:
                    until = min(until, time.monotonic() + grace)
            if time.monotonic() > until:
                _end(running)
            time.sleep(_PAUSE)
        return ended


# Between two looks at running processes, in seconds.
_PAUSE: Final = 0.02


def _end(processes: Iterable[subprocess.Popen[str]]) -> None:
    """Kill processes, and wait for them."""
    for process in processes:
        process.kill()
        process.wait()


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _command(code: str, arguments: Sequence[str]) -> list[str]:
    paths = json.dumps([os.getcwd() if entry == "" else entry for entry in sys.path])
    return [sys.executable, "-c", _HEAD + code, paths, *arguments]
