"""How long reductions take, as a multiple of stock PyTorch in the same run.

python -m benchmarks.reductions [--threads N]

With one thread the clock is the thread's own processor time, which a busy machine does not stretch; with more it
is the wall's. Sums and scatters are the operators alone; softmax and layer_norm are compiled modules, every
operation of their formulas rounded.
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
    """torch.sum, and ours under each accumulator."""
    calls: Calls = {STOCK: lambda: x.sum(dims)}
    for name, accumulate in ACCUMULATORS.items():
        calls[name] = partial(OPS.sum, x, dims, False, order, accumulate, STORE, RNG, 0)
    return calls


def scans(x: Tensor) -> Calls:
    """torch.cumsum along the last dimension, and ours."""
    calls: Calls = {STOCK: lambda: x.cumsum(-1)}
    for name, accumulate in ACCUMULATORS.items():
        calls[name] = partial(OPS.cumsum, x, -1, accumulate, STORE, RNG, 0)
    return calls


def scatters(rows: int, count: int, width: int) -> Calls:
    """index_put of ``count`` rows into ``rows``, as an embedding's gradient does."""
    x, source = torch.zeros(rows, width), torch.randn(count, width)
    index = torch.randint(0, rows, (count,), generator=torch.Generator().manual_seed(1))
    calls: Calls = {STOCK: lambda: torch.index_put(x, (index,), source, accumulate=True)}
    for name, accumulate in ACCUMULATORS.items():
        calls[name] = partial(OPS.index_put, x, [index], source, accumulate, RNG, 0)
    return calls


def composites(module: torch.nn.Module, x: Tensor) -> Calls:
    """A module as it is, and compiled under each policy."""
    calls: Calls = {STOCK: partial(module, x)}
    for name, policy in POLICIES.items():
        calls[name] = partial(fxround.compile(module, policy), x)
    return calls


def works() -> Iterator[tuple[str, Calls]]:
    """Name and calls of each row."""
    square, long = torch.randn(4096, 4096), torch.randn(10**7)
    for order in ("lanes:16", "sequential", "exact"):
        yield f"sum 4096x4096, last, {order}", sums(square, [1], order)
        yield f"sum 4096x4096, first, {order}", sums(square, [0], order)
    for order in ("lanes:16", "exact"):
        yield f"sum of 1e7, {order}", sums(long, [0], order)
    yield "cumsum 4096x4096, last", scans(square)
    yield "index_put of 1e5 rows of 64", scatters(10**4, 10**5, 64)
    wide = torch.randn(4096, 1024)
    yield "softmax 4096x1024", composites(torch.nn.Softmax(-1), wide)
    yield "layer_norm 4096x1024", composites(torch.nn.LayerNorm(1024), wide)


def processor_medians(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """``medians`` by the calling thread's processor time."""
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
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments or [])
    torch.set_num_threads(options.threads)
    measure = processor_medians if options.threads == 1 else medians
    print(header(("fxround", "torch")))
    rows = []
    with torch.no_grad():
        for name, calls in works():
            seconds = measure(calls)
            ratios = [f"{seconds[c] / seconds[STOCK]:.2f}" if c in seconds else "" for c in ACCUMULATORS]
            rows.append([name, f"{seconds[STOCK] * 1e3:.2f}", *ratios])
    print(table(["time / torch", "torch, ms", *ACCUMULATORS], rows))


if __name__ == "__main__":
    main(sys.argv[1:])
