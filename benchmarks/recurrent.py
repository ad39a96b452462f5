"""Recurrent layers as loops, beside stock PyTorch: time of the capture, of the first call, and of a step.

    python -m benchmarks.recurrent            # hidden sizes 32, 64 and 128, batches of 1, 16 and 32
    python -m benchmarks.recurrent 32 1       # one size and batch

An LSTM of 2 layers runs 128 steps under ``"reproducible"``, forward. capture: ``compile`` with example inputs. A step
is one time step of both layers: the median time of a call by 128. One thread runs everything, and all times are its own
processor time, since a busy machine interrupts long calls more often than short ones. Kernels come from the cache of
machine code if it has them.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

import fxround
from benchmarks.harness import header, medians, table

STEPS = 128
SIZES = (32, 64, 128)
BATCHES = (1, 16, 32)


def measure(hidden: int, batch: int) -> tuple[str, ...]:
    """Return a row: size, batch, seconds of capture and first call, microseconds of a step here and in PyTorch."""
    torch.manual_seed(0)
    layer = nn.LSTM(hidden, hidden, num_layers=2).eval()
    x = torch.randn(STEPS, batch, hidden)
    with torch.no_grad():
        times = [time.thread_time()]
        compiled = fxround.compile(layer, "reproducible", example_inputs=(x,))
        times.append(time.thread_time())
        compiled(x)
        times.append(time.thread_time())
        durations = medians({"rounded": lambda: compiled(x), "stock": lambda: layer(x)}, time.thread_time)
    capture, first = times[1] - times[0], times[2] - times[1]
    rounded, stock = (durations[name] / STEPS * 1e6 for name in ("rounded", "stock"))
    numbers = f"{capture:.2f}", f"{first:.2f}", f"{rounded:.0f}", f"{stock:.0f}", f"{rounded / stock:.1f}x"
    return str(hidden), str(batch), *numbers


def main(arguments: tuple[str, ...] = ()) -> None:
    """Print the table of all sizes and batches, or of one."""
    torch.set_num_threads(1)
    if arguments:
        hidden, batch = (int(text) for text in arguments)
        chosen = [(hidden, batch)]
    else:
        chosen = [(hidden, batch) for hidden in SIZES for batch in BATCHES]
    head = ("hidden", "batch", "capture, s", "first call, s", "a step, us", "stock, us", "ratio")
    print(header(("torch", "llvmlite")))
    print(table(head, (measure(*row) for row in chosen)), flush=True)


if __name__ == "__main__":
    main(tuple(sys.argv[1:]))
