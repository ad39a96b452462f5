"""Show how far long work is: a bar of tqdm in a terminal, a notebook or a file, and records of the logger ``fxround``.

``progress=None`` shows a bar where somebody may look at it, in a terminal or a notebook; True shows it everywhere, and
in a file as lines, one in 30 seconds; False shows none. Whichever it is, the logger ``fxround`` has a record of level
INFO every 30 seconds and at the end, which ``logging.basicConfig(level=logging.INFO)`` shows. Example output::

    stochastic:  35%|███████           | 7/20 [00:12<00:21,  1.7s/it]
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Final, Protocol, TextIO, TypeVar

from fxround.errors import shown as shown_text
from fxround.significance.bits import require

# Seconds between the lines of a file, and between records.
EVERY: Final = 30.0
LOGGER: Final = logging.getLogger("fxround")

Item = TypeVar("Item")


class Tick(Protocol):
    """A function to call after every step. note: what a reader may want to know at this point."""

    def __call__(self, note: str = "") -> None:
        """Count one more step."""


@contextmanager
def progress(label: str, total: int | None, shown: bool | None) -> Iterator[Tick]:
    """Yield a function to call after every step.

    total: the number of steps; None if it is not known. shown: whether a bar is shown; None shows it in a terminal or a
    notebook if tqdm is installed. Raises TypeError for anything else, and ImportError for True without tqdm.
    """
    if shown is not None and not isinstance(shown, bool):
        raise TypeError(f"progress is {shown_text(shown)}; expected True, False or None")
    bar, began, steps = _bar(label, total, shown), time.monotonic(), 0
    recorded = began

    def tick(note: str = "") -> None:
        nonlocal steps, recorded
        steps += 1
        if bar is not None:
            if note:
                bar.set_postfix_str(note, refresh=False)
            bar.update()
        now = time.monotonic()
        if now - recorded >= EVERY:
            recorded = now
            of = "" if total is None else f" of {total}"
            LOGGER.info("%s: %d%s steps in %.0f s%s", label, steps, of, now - began, f", {note}" if note else "")

    try:
        yield tick
    finally:
        if bar is not None:
            bar.close()
        LOGGER.info("%s: ended after %d steps and %.1f s", label, steps, time.monotonic() - began)


def tracked(items: Iterable[Item], total: int | None, label: str, shown: bool | None = None) -> Iterator[Item]:
    """Yield the items, with a step after each."""
    with progress(label, total, shown) as tick:
        for item in items:
            yield item
            tick()


def _bar(label: str, total: int | None, shown: bool | None) -> Any:
    """Return a bar of tqdm, None for none."""
    looked_at = sys.stderr.isatty() or _in_notebook()
    if shown is False or (shown is None and not (looked_at and find_spec("tqdm") is not None)):
        return None
    tqdm = require("tqdm.auto", "report").tqdm
    if looked_at:
        return tqdm(total=total, desc=label, leave=False, dynamic_ncols=True)
    return tqdm(total=total, desc=label, mininterval=EVERY, file=_Lines(sys.stderr))


def _in_notebook() -> bool:
    """Whether IPython runs this process as the kernel of a notebook."""
    python = sys.modules.get("IPython")
    shell = None if python is None else python.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


class _Lines:
    """A file to which a bar writes lines, where it would overwrite one in a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        """Write what is not blank as a line."""
        if line := text.strip():
            self._stream.write(f"{line}\n")

    def flush(self) -> None:
        """Flush the file."""
        self._stream.flush()
