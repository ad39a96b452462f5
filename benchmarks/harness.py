"""Time measurement: medians of interleaved calls, so that a slow minute slows every row.

``header`` states the conditions of a measurement: machine, load, threads and versions.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from fxround.runtime.cpu.code import current_set

K = TypeVar("K")
PASSES = 5
# Seconds of calls of one row in one pass, with at least one call.
PASS_SECONDS = 0.08

# Flags of Linux for vector instructions, the widest first, and what a table calls them.
VECTORS: Final = {"avx512f": "AVX-512", "avx2": "AVX2"}


def machine() -> str:
    """Return the processor's name, its vector instructions and its cores: some names are those of many processors."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    if not names:
        return platform.processor() or platform.machine()
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    vectors = next((f" with {said}" for flag, said in VECTORS.items() if flag in flags), "")
    return f"{names[0]}{vectors}, {len(names)} cores"


def versions(packages: Iterable[str]) -> str:
    """Return name and version of the installed packages among these."""
    named = []
    for name in packages:
        try:
            named.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(named)


def header(packages: Sequence[str]) -> str:
    """Return the conditions under which a table was measured."""
    python = f"Python {platform.python_version()}"
    load = f"load {os.getloadavg()[0]:.1f} at the start"
    stock = f"PyTorch's as {torch.backends.cpu.get_cpu_capability()}"
    code = "" if current_set() == "host" else f", fxround's kernels as {current_set()} code, {stock}"
    return f"{machine()}{code}, {load}; {torch.get_num_threads()} thread(s); {python}, {versions(packages)}"


def conditions(command: str, loads: Sequence[float] = (), where: str = "") -> dict[str, str]:
    """Return what a stored table says of its measurement: today's date, the versions, and the machine.

    loads: system loads that were seen during the measurement; none for that of now. where: what the machine's name is
    followed by, such as ", one thread".
    """
    loads = loads or [os.getloadavg()[0]]
    return {
        "command": command,
        "machine": f"{machine()}{where}",
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__.partition("+")[0],
        "load": " to ".join(dict.fromkeys(f"{load:.0f}" for load in (min(loads), max(loads)))),
    }


def medians(
    calls: Mapping[K, Callable[[], object]], clock: Callable[[], float] = time.perf_counter, passes: int = PASSES
) -> dict[K, float]:
    """Return the median seconds of each call over interleaved passes, after one call to warm it up."""
    for call in calls.values():
        call()
    times: dict[K, list[float]] = {name: [] for name in calls}
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
    """Return a Markdown table with aligned columns, numbers to the right."""
    cells = [list(head), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        first, *rest = (c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        return f"| {' | '.join([first, *rest])} |"

    rule = f"|{'-' * (widths[0] + 2)}|{'|'.join('-' * (w + 1) + ':' for w in widths[1:])}|"
    return "\n".join([line(cells[0]), rule, *map(line, cells[1:])])


@cache
def vision_operators() -> Any:
    """Declare the operators of a torchvision that was compiled for another build of torch; they are never called.

    A torchvision whose library is loaded declares them itself, and a second declaration ends the process.
    """
    try:
        importlib.import_module("torchvision")
    except ImportError:
        return None
    except RuntimeError:  # operator torchvision::nms does not exist
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
    else:
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library
