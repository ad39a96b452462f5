"""Two threads against one while other processes use the processors: wall time of two over that of one.

Each pair of calls is interleaved; the figures are medians. Other processes that run at the same time add to the load.

python -m benchmarks.busy [--processes 4]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

import fxround
from benchmarks.cost import models
from benchmarks.harness import header, table

_PASSES = 15
_SETTLE = 60.0


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Run this many processes that compute without end during the block, once the system counts them."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        end = time.monotonic() + _SETTLE
        while os.getloadavg()[0] < 0.9 * processes and time.monotonic() < end:
            time.sleep(1)
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def works() -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    """Yield name, model and input."""
    yield from models()
    yield "layer_norm, 4096x1024", nn.LayerNorm(1024), torch.rand(4096, 1024)
    yield "gelu, 1e5", nn.GELU(), torch.rand(100_000)


def seconds(call: Callable[[], object], passes: int = _PASSES) -> tuple[float, float]:
    """Return the median seconds of a call on one thread and on two, interleaved."""
    times: dict[int, list[float]] = {1: [], 2: []}
    for turn in range(passes + 2):
        for threads in times:
            torch.set_num_threads(threads)
            start = time.perf_counter()
            call()
            # The first calls compile and plan.
            if turn >= 2:
                times[threads].append(time.perf_counter() - start)
    return statistics.median(times[1]), statistics.median(times[2])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4, help="that compute at the same time (%(default)s)")
    arguments = parser.parse_args()
    rows = []
    with torch.no_grad(), busy(arguments.processes):
        print(header(("torch",)))
        for name, model, x in works():
            model.eval()
            calls = {"stock": partial(model, x)}
            calls |= {policy: partial(fxround.compile(model, policy), x) for policy in ("reproducible", "stochastic")}
            for kind, call in calls.items():
                one, two = seconds(call)
                rows.append((name, kind, f"{1e3 * one:.2f}", f"{1e3 * two:.2f}", f"{two / one:.2f}"))
        load = f"{os.getloadavg()[0]:.1f}"
    print(table(("work", "model", "1 thread, ms", "2 threads, ms", "2 / 1"), rows))
    print(f"{arguments.processes} other processes; load {load} at the end")


if __name__ == "__main__":
    main()
