"""Time of elementary functions, and their errors in binary64.

    python -m benchmarks.functions                                  # time, as a multiple of PyTorch's in the same run
    python -m benchmarks.functions bounds --output docs/bounds.json # errors: some minutes; fails beyond a stated bound
    python -m benchmarks.functions contracts                        # the table of docs/functions.md

Times are of 1e6 binary32 numbers on one thread, in the thread's own processor time, which other processes change less
than wall time; they are medians of interleaved calls. Each result is correctly rounded to nearest even or upwards, or
stochastically rounded. Errors are the worst of ``adversary``'s samples against MPFR, which gmpy2 has
(``pip install 'fxround[dev]'``).
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

import fxround  # noqa: F401  (registers the operator)
from benchmarks.harness import header, machine, medians, table
from fxround.numerics.elementary import ELEMENTARY, Elementary
from fxround.significance.progress import tracked

COUNT = 10**6
# Goals of the nearest-even column: 1.5 times PyTorch's time for the first five, 2.5 times for the others.
FUNCTIONS = ("exp", "log", "tanh", "erf", "sigmoid", "sin", "cos", "pow")
MODES = ("nearest_even", "toward_positive", "stochastic")
RNG = torch.zeros(2, dtype=torch.int64)
BOUNDS: Final = Path(__file__).parents[1] / "docs" / "bounds.json"
CARRIERS: Final = {"float64": np.float64, "float32": np.float32}


def operands(name: str) -> tuple[Tensor, ...]:
    """Return numbers at which the function is neither constant nor undefined."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(COUNT, generator=generator) * 2
    if name == "pow":
        return x.abs(), torch.randn(COUNT, generator=generator)
    return (x.abs() if name == "log" else x,)


def calls(name: str) -> dict[str, Callable[[], object]]:
    """Return the calls of PyTorch's function, and of fxround's in each mode."""
    xs = operands(name)
    names = ", ".join(f"x{i}" for i in range(len(xs)))
    timed: dict[str, Callable[[], object]] = {"torch": partial(getattr(torch, name), *xs)}
    for mode in MODES:
        program = f"t0 = {name}({names}) @ binary32/{mode}/inf"
        timed[mode] = partial(torch.ops.fxround.pointwise, list(xs), program, torch.float32, RNG, 0)
    return timed


def times() -> None:
    """Print the table of times."""
    print(header(("fxround", "torch")))
    rows = []
    for name in FUNCTIONS:
        seconds = medians(calls(name), clock=time.thread_time)
        stock = seconds.pop("torch")
        rows.append([name, f"{stock / COUNT * 1e9:.2f}", *(f"{s / stock:.2f}" for s in seconds.values())])
    print(table(["1e6 binary32 numbers", "torch, ns each", *(f"{m} / torch" for m in MODES)], rows))


# ---- errors ----


def bounds(names: list[str], count: int, seed: int, output: Path | None) -> int:
    """Search every function, updating the file; return 1 if a bound that the registry states does not hold."""
    if find_spec("gmpy2") is None:
        sys.exit("gmpy2 is needed here and not installed: pip install 'fxround[dev]'")
    from benchmarks import adversary

    measured: dict[str, Any] = {}
    broken = 0
    for name in tracked(names, len(names), "bounds"):
        row = ELEMENTARY[name]
        measured[name] = {}
        for carrier, dtype in CARRIERS.items():
            result = adversary.search(name, count if carrier == "float64" else count // 4, seed, dtype)
            worst = result.worst
            assert worst is not None
            broken += worst.error > row.error_bound
            measured[name][carrier] = {
                "samples": result.samples,
                "ulps": worst.error,
                "at": [a.hex() for a in worst.args],
                "beyond_half": result.beyond if row.near_zeros else 0.0,
            }
            print(f"{name} {carrier}: {measured[name][carrier]}, stated {row.error_bound}", flush=True)
        if output:
            told = {"processor": machine(), "date": datetime.date.today().isoformat(), "seed": seed}
            before = json.loads(output.read_text())["functions"] if output.exists() else {}
            output.write_text(json.dumps(told | {"functions": before | measured}, indent=1) + "\n")
    return int(broken > 0)


def stated(row: Elementary) -> str:
    """Return the bound in words."""
    zeros = f" + 2^{int(math.log2(row.near_zeros))} where x < 0" if row.near_zeros else ""
    return f"{row.error_bound}{zeros}"


def contract_row(row: Elementary, measured: dict[str, Any]) -> str:
    """Return a row of the table: the bound, the worst error found, and the source of the bound."""
    special, where = row.special.replace("|", r"\|"), row.define.__module__.rpartition(".")[2]
    # Rounded up, so that the printed bound is not below the worst error found.
    worst = " | ".join(f"{math.ceil(measured[c]['ulps'] * 1000) / 1000:.3f}" for c in CARRIERS)
    short = "yes" if row.quick else ""
    return f"| `{row.name}` | {special} | {stated(row)} | {worst} | {row.source} | `{where}.py` | {short} |"


def contracts() -> Iterator[str]:
    """Yield the table of docs/functions.md, and the run that it is from."""
    stored = json.loads(BOUNDS.read_text())
    measured = stored["functions"]
    counts = [f"{sum(row[c]['samples'] for row in measured.values()):.2g}" for c in CARRIERS]
    samples = [f"{min(row[c]['samples'] for row in measured.values())}" for c in CARRIERS]
    yield f"{' and '.join(samples)} samples of each function at least, {' and '.join(counts)} of all, with float64 and"
    yield f"float32 arguments; seed {stored['seed']}, {stored['date']}, {stored['processor']}."
    yield ""
    yield "| function | special values | binary64 ulps | worst, float64 | float32 | source of method | file | short |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in ELEMENTARY.values():
        yield contract_row(row, measured[row.name])


def main(arguments: list[str] | None = None) -> int:
    """Print the time table, or run the command that the first argument names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("times", "bounds", "contracts"), default="times")
    parser.add_argument("names", nargs="*", choices=(*ELEMENTARY, []), help="bounds: of these functions alone")
    parser.add_argument("--count", type=lambda v: int(float(v)), default=10**6, help="samples of each (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON, merged into what is there")
    options = parser.parse_args(arguments or [])
    torch.set_num_threads(1)
    if options.what == "bounds":
        return bounds(options.names or list(ELEMENTARY), options.count, options.seed, options.output)
    if options.what == "contracts":
        print("\n".join(contracts()))
    else:
        times()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
