"""How time is measured here: medians of calls that are interleaved, so that a slow minute slows every row.

A rate is only as good as what stands beside it: ``header`` says which machine, how busy it was, how many threads
and which versions.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

PASSES = 5
# Seconds of calls of one row in one pass, one call at least.
PASS_SECONDS = 0.08


def machine() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor() or platform.machine()


def versions(packages: Iterable[str]) -> str:
    """Name and version of those that are installed."""
    found = []
    for name in packages:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def header(packages: Sequence[str]) -> str:
    """What every table is to be read with."""
    python = f"Python {platform.python_version()}"
    load = f"load {os.getloadavg()[0]:.1f} at the start"
    return f"{machine()}, {load}; {torch.get_num_threads()} thread(s); {python}, {versions(packages)}"


def medians(
    calls: Mapping[str, Callable[[], object]], clock: Callable[[], float] = time.perf_counter, passes: int = PASSES
) -> dict[str, float]:
    """Median seconds of each call over interleaved passes, after one call to warm it up."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(passes):
        for name, call in calls.items():
            began = time.perf_counter()
            while True:
                started = clock()
                call()
                times[name].append(clock() - started)
                if time.perf_counter() - began > PASS_SECONDS:
                    break
    return {name: statistics.median(t) for name, t in times.items()}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns aligned, numbers to the right: Markdown, readable as it is."""
    cells = [list(head), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        first, *rest = (c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        return f"| {' | '.join([first, *rest])} |"

    rule = f"|{'-' * (widths[0] + 2)}|{'|'.join('-' * (w + 1) + ':' for w in widths[1:])}|"
    return "\n".join([line(cells[0]), rule, *map(line, cells[1:])])


@cache
def vision_operators() -> Any:
    """torchvision's compiled operators may be missing beside a CPU build of torch: declared here, never called."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library
