"""Time of reductions, as a multiple of stock PyTorch's time in the same run.

    python -m benchmarks.reductions [--threads N ...] [--all]

By default the rows with a goal are measured, on one thread and on two; --all adds other orders, layouts, scans,
scatters and accumulators. On one thread the time is the thread's own processor time, which other processes do not
change; on more it is wall time. Sums and scatters are the operators alone; softmax and layer_norm are compiled modules
with every operation of their formulas rounded.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

import fxround
from benchmarks.harness import PASSES, header, medians, table

STORE = "binary32/nearest_even/inf"
ACCUMULATORS = {
    "nearest": STORE,
    "SR": "binary32/stochastic",
    "UD": "binary32/up_down",
    "bfloat16": "bfloat16/nearest_even",
}
POLICIES = {"nearest": "reproducible", "SR": "stochastic", "UD": "up_down"}
RNG = torch.zeros(2, dtype=torch.int64)
OPS = torch.ops.fxround
STOCK = "torch"
Calls = dict[str, Callable[[], object]]


def sums(x: Tensor, dims: list[int], order: str) -> Calls:
    """Return the calls of torch.sum, and of fxround's under each accumulator."""
    calls: Calls = {STOCK: lambda: x.sum(dims)}
    for name, accumulate in ACCUMULATORS.items():
        calls[name] = partial(OPS.sum, x, dims, False, order, accumulate, STORE, RNG, 0)
    return calls


def scans(x: Tensor) -> Calls:
    """Return the calls of torch.cumsum along the last dimension, and of fxround's."""
    calls: Calls = {STOCK: lambda: x.cumsum(-1)}
    for name, accumulate in ACCUMULATORS.items():
        calls[name] = partial(OPS.cumsum, x, -1, accumulate, STORE, RNG, 0)
    return calls


def scatters(rows: int, count: int, width: int) -> Calls:
    """Return the calls of index_put of ``count`` rows into ``rows``, as in an embedding's gradient."""
    x, source = torch.zeros(rows, width), torch.randn(count, width)
    index = torch.randint(0, rows, (count,), generator=torch.Generator().manual_seed(1))
    calls: Calls = {STOCK: lambda: torch.index_put(x, (index,), source, accumulate=True)}
    for name, accumulate in ACCUMULATORS.items():
        calls[name] = partial(OPS.index_put, x, [index], source, accumulate, RNG, 0)
    return calls


def composites(module: torch.nn.Module, x: Tensor) -> Calls:
    """Return the calls of a module as it is, and compiled under each policy."""
    calls: Calls = {STOCK: partial(module, x)}
    for name, policy in POLICIES.items():
        calls[name] = partial(fxround.compile(module, policy), x)
    return calls


def goals() -> Iterator[tuple[str, str, Calls]]:
    """Yield name, goal and calls of each row that has a goal."""
    square, wide = torch.randn(4096, 4096), torch.randn(4096, 1024)
    for where, dim in (("last", 1), ("first", 0)):
        yield f"sum 4096x4096, {where}, lanes:16", "1.2, 3", sums(square, [dim], "lanes:16")
    yield "sum of 1e7, exact", "6", sums(torch.randn(10**7), [0], "exact")
    yield "softmax 4096x1024", "1.2, 3.5", composites(torch.nn.Softmax(-1), wide)
    yield "layer_norm 4096x1024", "1.2, 5", composites(torch.nn.LayerNorm(1024), wide)


def others() -> Iterator[tuple[str, str, Calls]]:
    """Yield the rows without a goal."""
    square, long = torch.randn(4096, 4096), torch.randn(10**7)
    images = torch.randn(32, 64, 56, 56)
    layouts: dict[str, tuple[Tensor, list[int]]] = {
        "last": (square, [1]),
        "first": (square, [0]),
        "last, transposed": (square.t(), [1]),
        "last, every second": (square[:, ::2], [1]),
        "all, transposed": (square.t(), [0, 1]),
    }
    for order in ("lanes:16", "sequential", "exact"):
        for name, (x, dims) in layouts.items():
            if order != "lanes:16" or name not in ("last", "first"):
                yield f"sum 4096x4096, {name}, {order}", "", sums(x, dims, order)
        yield f"sum 32x64x56x56 but channels, {order}", "", sums(images, [0, 2, 3], order)
    yield "sum of 1e7, lanes:16", "", sums(long, [0], "lanes:16")
    yield "sum of 1e7 over 200 binades, exact", "", sums(long * torch.exp2(long * 30), [0], "exact")
    yield "cumsum 4096x4096, last", "", scans(square)
    yield "index_put of 1e5 rows of 64", "", scatters(10**4, 10**5, 64)


def processor_medians(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return ``medians`` of the calling thread's processor time."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(PASSES):
        for name, call in calls.items():
            began = time.thread_time()
            call()
            times[name].append(time.thread_time() - began)
    return {name: statistics.median(t) for name, t in times.items()}


def main(arguments: list[str] | None = None) -> None:
    """Print a table for each number of threads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args(arguments or [])
    before = torch.get_num_threads()
    try:
        for threads in options.threads:
            torch.set_num_threads(threads)
            report(options.all)
    finally:
        torch.set_num_threads(before)


def report(everything: bool) -> None:
    """Print the table for the present number of threads."""
    measure = processor_medians if torch.get_num_threads() == 1 else medians
    print(header(("fxround", "torch")))
    columns, rows = list(ACCUMULATORS) if everything else ["nearest", "SR"], []
    with torch.no_grad():
        for name, goal, calls in (*goals(), *(others() if everything else ())):
            seconds = measure({c: call for c, call in calls.items() if c in (STOCK, *columns)})
            ratios = [f"{seconds[c] / seconds[STOCK]:.2f}" if c in seconds else "" for c in columns]
            rows.append([name, f"{seconds[STOCK] * 1e3:.2f}", *ratios, goal])
    print(table(["time / torch", "torch, ms", *columns, "goal"], rows), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
