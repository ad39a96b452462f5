"""Speed of ``fxround.round`` on one thread, compared with memory, torch's own dtypes and the peers.

    python -m benchmarks.rounding [--peers PYTHON]

PYTHON: an interpreter of another environment in which qtorch, pychop, ml_dtypes or gfloat are installed with torch;
without it, those of this environment are measured. Rates are 10^9 elements per second, medians.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import fxround
from benchmarks import peers
from benchmarks.harness import header, medians, table
from fxround.numerics.modes import MODES

MILLION, TEN_MILLION = 10**6, 10**7
SIZES = (MILLION, TEN_MILLION)
FORMATS = ("bfloat16", "binary16", "e5m2", "e4m3fn", "e2m1fn", "tf32", "e8m0fnu")
ROUNDINGS = (
    *(f"{f}/nearest_even" for f in FORMATS),
    *(f"e4m3fn/{m}" for m in MODES if m != "nearest_even"),
    *(f"{f}/stochastic" for f in FORMATS if f != "e4m3fn"),
    "e4m3fn/stochastic:8",
    "binary32/stochastic",
    "binary32/up_down",
)
COPY = "copy"
Call = Callable[[], object]


def stock(x: torch.Tensor, out: torch.Tensor) -> dict[str, Call]:
    """Return PyTorch's calls: a copy, round trips through its dtypes into used memory, and random numbers."""
    calls: dict[str, Call] = {COPY: lambda: out.copy_(x)}
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float8_e4m3fn):
        between = torch.empty(x.shape, dtype=dtype)
        name = str(dtype).removeprefix("torch.")
        calls[f"torch {name} and back, out="] = partial(_through, x, between, out)
    calls["torch uniform_"] = lambda: out.uniform_()
    return calls


def _through(x: torch.Tensor, between: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(between.copy_(x))


def ours(x: torch.Tensor, out: torch.Tensor) -> dict[str, Call]:
    """Return the calls of fxround.round into used memory, one of them into new memory, and one on binary64."""
    calls: dict[str, Call] = {f"{r}, out=": partial(fxround.round, x, r, seed=1, out=out) for r in ROUNDINGS}
    calls["e4m3fn/nearest_even, new memory"] = lambda: fxround.round(x, "e4m3fn")
    wide, wide_out = x.double(), torch.empty(x.shape, dtype=torch.float64)
    for r in ("binary32/nearest_even", "binary32/stochastic", "e4m3fn/nearest_even"):
        calls[f"{r} of float64, out="] = partial(fxround.round, wide, r, seed=1, out=wide_out)
    return calls


def rates(seconds: dict[int, dict[str, float]]) -> list[list[str]]:
    """Return rows: name, and for each size the rate and its ratio to copy's."""
    names = dict.fromkeys(name for column in seconds.values() for name in column)
    rows = []
    for name in names:
        row = [name]
        for size, column in seconds.items():
            duration = column.get(name)
            row += [f"{size / duration / 1e9:.3f}", f"{column[COPY] / duration:.3f}"] if duration else ["", ""]
        rows.append(row)
    return rows


def measure_peers(python: str | None) -> dict[int, dict[str, float]]:
    """Return seconds by size and name, from this process or from the peers' own interpreter."""
    if python is None:
        return {size: medians(peers.calls(peers.numbers(size))) for size in SIZES}
    command = [python, "-m", "benchmarks.peers", *map(str, SIZES)]
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    print(f"peers: {result['versions']}, in their own environment")
    return {int(size): column for size, column in result["seconds"].items()}


def threads() -> list[list[str]]:
    """Return rates at 1e7 elements with one thread and with two."""
    x = peers.numbers(TEN_MILLION)
    out = torch.empty_like(x)
    rows = {r: [f"{r}, out="] for r in ("e4m3fn/nearest_even", "bfloat16/nearest_even", "e4m3fn/stochastic")}
    for count in (1, 2):
        torch.set_num_threads(count)
        seconds = medians({r: partial(fxround.round, x, r, seed=1, out=out) for r in rows})
        for r, row in rows.items():
            row.append(f"{TEN_MILLION / seconds[r] / 1e9:.3f}")
    torch.set_num_threads(1)
    return list(rows.values())


def main(arguments: list[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", metavar="PYTHON", help="interpreter of an environment that has the peers")
    options = parser.parse_args(arguments or [])
    torch.set_num_threads(1)
    print(header(("fxround", *peers.PACKAGES)))
    beside = measure_peers(options.peers)
    seconds = {}
    for size in SIZES:
        x = peers.numbers(size)
        out = torch.empty_like(x)
        seconds[size] = medians(stock(x, out) | ours(x, out)) | beside[size]
    head = ["10^9 elements/s, one thread", *(f"{size:.0e}{part}" for size in SIZES for part in ("", " / copy"))]
    print(table(head, rates(seconds)))
    print()
    print(table(["10^9 elements/s at 1e+07", "1 thread", "2 threads"], threads()))


if __name__ == "__main__":
    main(sys.argv[1:])
