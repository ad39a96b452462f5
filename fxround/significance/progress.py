"""Show on standard error how many samples are done and how long the rest will take.

Example output::

    stochastic ━━━━━━━╸          7/20  0:00:12  left 0:00:21
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TypeVar

from fxround.significance.bits import require

Item = TypeVar("Item")


@contextmanager
def progress(label: str, total: int | None, shown: bool | None) -> Iterator[Callable[[], None]]:
    """Yield a function to call after every step.

    shown: whether a bar is shown; None shows it if standard error is a terminal and rich is installed. Raises
    ImportError for True without rich.
    """
    if shown is None:
        shown = sys.stderr.isatty() and find_spec("rich") is not None
    if not shown:
        yield lambda: None
        return
    rich, console = require("rich.progress", "report"), require("rich.console", "report").Console(stderr=True)
    columns = (
        rich.TextColumn("{task.description:<26}"),
        rich.BarColumn(bar_width=32),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        rich.TextColumn("left"),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda: bar.advance(task)


def tracked(items: Iterable[Item], total: int | None, label: str, shown: bool | None = None) -> Iterator[Item]:
    """Yield the items, with a step after each."""
    with progress(label, total, shown) as tick:
        for item in items:
            yield item
            tick()
