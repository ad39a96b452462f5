"""How long elementary functions take on 1e6 binary32 numbers, one thread, as a multiple of PyTorch's in the same run.

    python -m benchmarks.functions

The clock is the thread's own processor time, which a busy machine stretches less than the wall's; medians of
interleaved calls. Each result is correctly rounded to nearest even or upwards, or stochastically rounded.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import fxround  # noqa: F401  (registers the operator)
from benchmarks.harness import header, medians, table

COUNT = 10**6
# Goals of the nearest-even column: 1.5 times PyTorch's time for the first five, 2.5 times for the others.
FUNCTIONS = ("exp", "log", "tanh", "erf", "sigmoid", "sin", "cos", "pow")
MODES = ("nearest_even", "toward_positive", "stochastic")
RNG = torch.zeros(2, dtype=torch.int64)


def operands(name: str) -> tuple[Tensor, ...]:
    """Numbers where the function is neither constant nor undefined."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(COUNT, generator=generator) * 2
    if name == "pow":
        return x.abs(), torch.randn(COUNT, generator=generator)
    return (x.abs() if name == "log" else x,)


def calls(name: str) -> dict[str, Callable[[], object]]:
    """PyTorch's function, and ours in each mode."""
    xs = operands(name)
    names = ", ".join(f"x{i}" for i in range(len(xs)))
    found: dict[str, Callable[[], object]] = {"torch": partial(getattr(torch, name), *xs)}
    for mode in MODES:
        program = f"t0 = {name}({names}) @ binary32/{mode}/inf"
        found[mode] = partial(torch.ops.fxround.pointwise, list(xs), program, torch.float32, RNG, 0)
    return found


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print(header(("fxround", "torch")))
    rows = []
    for name in FUNCTIONS:
        seconds = medians(calls(name), clock=time.thread_time)
        stock = seconds.pop("torch")
        rows.append([name, f"{stock / COUNT * 1e9:.2f}", *(f"{s / stock:.2f}" for s in seconds.values())])
    print(table(["1e6 binary32 numbers", "torch, ns each", *(f"{m} / torch" for m in MODES)], rows))


if __name__ == "__main__":
    main(sys.argv[1:])
