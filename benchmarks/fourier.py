"""Time of Fourier transforms over stock PyTorch's, and of their captures: the table of docs/complex.md.

python -m benchmarks.fourier           # measures, and stores benchmarks/results/fourier.json
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

import fxround
from benchmarks.harness import conditions, medians, table
from benchmarks.tables import RESULTS

# Name, function and argument.
CASES: Final[tuple[tuple[str, Callable[[Tensor], Tensor], Tensor], ...]] = (
    ("rfft, 512", torch.fft.rfft, torch.randn(1, 512)),
    ("rfft, 64 rows of 512", torch.fft.rfft, torch.randn(64, 512)),
    ("rfft, 4096", torch.fft.rfft, torch.randn(1, 4096)),
    ("fft, 4096", torch.fft.fft, torch.randn(1, 4096, dtype=torch.complex64)),
    ("fft, 16 rows of 4096", torch.fft.fft, torch.randn(16, 4096, dtype=torch.complex64)),
    ("irfft, 16 rows of 4096", torch.fft.irfft, torch.randn(16, 2049, dtype=torch.complex64)),
    ("rfft2, 256 x 256", torch.fft.rfft2, torch.randn(1, 256, 256)),
    ("fft, 1009 (a prime)", torch.fft.fft, torch.randn(1, 1009, dtype=torch.complex64)),
)
COLUMNS: Final = ["transform, float32", "stock", "reproducible", "stochastic", "first call"]


def main() -> None:
    """Print the table and store it. Times are processor times of the one thread."""
    torch.set_num_threads(1)
    first, loads = {}, [os.getloadavg()[0]]
    runs: dict[tuple[str, str], Callable[[], Any]] = {}
    for name, function, x in CASES:
        runs[name, "stock"] = partial(function, x)
        for policy in ("reproducible", "stochastic"):
            begun = time.perf_counter()
            compiled = fxround.compile(function, policy)
            compiled(x)
            first.setdefault(name, time.perf_counter() - begun)
            runs[name, policy] = partial(compiled, x)
    with torch.no_grad():
        times = medians(runs, time.thread_time)
    rows = []
    for name, _, _ in CASES:
        stock = times[name, "stock"]
        ratios = [f"{times[name, policy] / stock:.1f}" for policy in ("reproducible", "stochastic")]
        rows.append([name, f"{stock * 1e6:.0f} us", *ratios, f"{first[name]:.1f} s"])
    loads.append(os.getloadavg()[0])
    stored = conditions("python -m benchmarks.fourier", loads, ", one thread") | {
        "columns": COLUMNS,
        "numbers": [1, 2, 3, 4],
        "rows": rows,
    }
    (RESULTS / "fourier.json").write_text(json.dumps({"fourier": stored}, indent=2) + "\n", encoding="utf-8")
    print(table(COLUMNS, rows))


if __name__ == "__main__":
    main()
