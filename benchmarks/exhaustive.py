"""All 2^32 binary32 inputs of a function, in four modes, against an independent reference.

    python -m benchmarks.exhaustive exp tanh            # or --all; a few minutes each
    python -m benchmarks.exhaustive --all --resume      # continues where it was interrupted

Two compiled kernels run: the function rounded to nearest even in binary32, and the function rounded to odd to 26 bits.
The second proves the directed modes: each of their kernels rounds the same binary64 value, ``Elementary.build_sticky``,
by the same algorithm. Rounding to odd with two bits more than binary32 has, its subnormals included, makes a later
rounding to toward_zero, toward_positive or toward_negative equal to that of the exact value (Boldo and Melquiond 2008),
and conversely. So the to-odd result must be strictly in the same open cell as f(x), or be f(x) if that is exact.
``--each`` also runs the three directed kernels.

The comparison runs in blocks of 2^15 encodings. The filter of ``reference`` decides the values of a block in a few
passes over integers. If a monotone function has the same cell at both ends of a block, the whole block has that cell.
A function with parity is compared for x >= 0, and then f(-x) = +-f(x) for the kernels' results. Values that the filter
does not decide, and those that disagree, go to ``reference.settle`` and so to MPFR.

The state is one JSON file per function (--state DIR, by default in the user's cache directory): finished units of 2^25
inputs, counts, and the inputs closest to a boundary. Ctrl-C keeps the finished units.
"""

from __future__ import annotations

import argparse
import datetime
import heapq
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

import fxround  # noqa: F401  (registers the operator)
from benchmarks.reference import (
    F64,
    FUNCTIONS,
    I64,
    MAGNITUDE,
    MODES,
    WINDOW,
    Bool,
    Function,
    Settled,
    cells,
    distance,
    round_to,
    same,
    settle,
)
from fxround.numerics.elementary import ELEMENTARY
from fxround.numerics.formats import FORMATS
from fxround.numerics.modes import Rounding

BLOCK_BITS: Final = 15
CHUNK_BITS: Final = 19
UNIT_BITS: Final = 24
UNITS: Final = 1 << (31 - UNIT_BITS)
"""A unit is 2^24 encodings of non-negative numbers, and their negatives."""
HARDEST: Final = 12
EXAMPLES: Final = 20
BINARY32: Final = FORMATS["binary32"]
STICKY: Final = Rounding.parse("ieee(8,26)/to_odd/inf")
_HALF: Final = 28
_LEAST: Final = (1023 - 126) << 52
_ABOVE: Final = (1023 + 128) << 52
RNG: Final = torch.zeros(2, dtype=torch.int64)


def run(name: str, x: torch.Tensor, rounding: str, dtype: torch.dtype) -> Any:
    """Return the compiled kernel's results as a NumPy array."""
    return torch.ops.fxround.pointwise([x], f"t0 = {name}(x0) @ {rounding}", dtype, RNG, 0).numpy()


@dataclass
class Results:
    """The findings so far, which can be merged and stored as JSON."""

    inputs: int = 0
    near_ties: int = 0
    seconds: float = 0.0
    mismatches: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MODES, 0))
    examples: list[tuple[str, str]] = field(default_factory=list)
    hardest: list[tuple[float, str]] = field(default_factory=list)

    def merge(self, other: Results) -> None:
        """Add the findings of another unit."""
        self.inputs += other.inputs
        self.near_ties += other.near_ties
        self.seconds += other.seconds
        for mode, count in other.mismatches.items():
            self.mismatches[mode] += count
        self.examples = [*self.examples, *((mode, x) for mode, x in other.examples)][:EXAMPLES]
        self.hardest = heapq.nsmallest(HARDEST, [*self.hardest, *((d, x) for d, x in other.hardest)])


def _signed(value: F64) -> I64:
    """Return encodings as integers that increase with the value; -0 and +0 are both 0."""
    code = value.view(np.int64)
    sign = code >> 63
    out = sign & MAGNITUDE
    out ^= code
    out -= sign
    return out


def _agrees(low: I64, high: I64, nearest: Any, sticky: F64) -> Bool:
    """Whether the open interval (low, high) of ordinals is in one cell, and both results are right for that cell.

    It is only computed for normal binary32 numbers, where a cell is 2^28 ordinals, and is False elsewhere.
    """
    cell = low >> _HALF
    codes = _signed(sticky)
    good = ((high - 1) >> _HALF) == cell
    good &= (codes >> _HALF) == cell
    good &= ((codes - 1) >> _HALF) == cell
    # The nearest value is right if its ordinal, with binary64's exponent bias, is half the cell's index rounded up.
    size = np.abs(codes)
    good &= (size >= _LEAST) & (size < _ABOVE)
    code = nearest.view(np.int32).astype(np.int64)
    sign = code >> 63
    ordinal = ((code & 0x7FFFFFFF) ^ sign) - sign
    bias = ((_LEAST >> _HALF) - (1 << 24)) >> 1
    cell += 1
    cell >>= 1
    good &= cell == np.where(sign, ordinal - bias, ordinal + bias)
    return np.asarray(good)


class Check:
    """One function's comparison, block by block."""

    def __init__(self, name: str, each: bool) -> None:
        self.name, self.each = name, each
        self.function: Function = FUNCTIONS[name]
        self.results = Results()
        self.bounded = False

    def unit(self, number: int) -> Results:
        """Compare 2^24 encodings and their negatives."""
        self.bounded = False
        self.results, began = Results(), time.process_time()
        for start in range(number << UNIT_BITS, (number + 1) << UNIT_BITS, 1 << CHUNK_BITS):
            self._chunk(start)
        self.results.seconds = time.process_time() - began
        return self.results

    def _chunk(self, start: int) -> None:
        codes = torch.arange(start, start + (1 << CHUNK_BITS), dtype=torch.int32)
        results = []
        for sign in (0, -(1 << 31)):
            x = (codes | sign).view(torch.float32)
            results.append((x.numpy(), self._nearest(x), self._sticky(x)))
            self.results.inputs += len(x)
            if self.each:
                self._directed(x)
        (_, nearest, sticky), (_, other, other_sticky) = results
        parity = self.function.parity
        if parity and same(other, nearest * parity).all() and same(other_sticky, sticky * parity).all():
            del results[1]
        for chunk in results:
            if not self._constant(*chunk):
                for block in zip(*(np.split(part, 1 << (CHUNK_BITS - BLOCK_BITS)) for part in chunk), strict=True):
                    if not self._constant(*block):
                        self._compare(*block)

    def inputs(self, x: torch.Tensor) -> Results:
        """Compare any binary32 numbers."""
        self.results, began = Results(inputs=x.numel()), time.process_time()
        self.bounded = False
        for part in x.split(1 << BLOCK_BITS):
            self._compare(part.numpy(), self._nearest(part), self._sticky(part))
        self.results.seconds = time.process_time() - began
        return self.results

    def _nearest(self, x: torch.Tensor) -> Any:
        return run(self.name, x, "binary32/nearest_even/inf", torch.float32)

    def _sticky(self, x: torch.Tensor) -> F64:
        return np.asarray(run(self.name, x, str(STICKY), torch.float64))

    def _directed(self, x: torch.Tensor) -> None:
        """Compare the directed kernels themselves with the directed roundings of the to-odd result."""
        sticky = self._sticky(x)
        for mode in MODES[1:]:
            got = run(self.name, x, f"binary32/{mode}/inf", torch.float32)
            self._count(mode, x.numpy(), ~same(got, round_to(sticky, BINARY32, mode).astype(np.float32)))

    def _compare(self, x32: Any, nearest: Any, sticky: F64) -> None:
        with np.errstate(all="ignore"):
            x = x32.astype(np.float64)
            y = np.asarray(self.function.fast(x))
        good = self._near(x, y, nearest, sticky)
        rest = np.flatnonzero(~good)
        if len(rest):
            self._settle(x[rest], nearest[rest], sticky[rest])

    def _near(self, x: F64, y: F64, nearest: Any, sticky: F64) -> Bool:
        """Where the filter decides normal results; f's bounds are used from the first block that needs them on."""
        slack = self.function.slack
        low, high = (_signed(y - slack), _signed(y + slack)) if slack else [_signed(y)] * 2
        if not self.bounded:
            good = _agrees(low - WINDOW, high + WINDOW, nearest, sticky)
            self.bounded = bool(np.count_nonzero(good) < len(x) * 7 // 8)
            if not self.bounded:
                return good
        with np.errstate(all="ignore"):
            below, above = map(_signed, map(np.ascontiguousarray, self.function.bounds(x)))
        return _agrees(np.maximum(low - WINDOW, below), np.minimum(high + WINDOW, above), nearest, sticky)

    def _constant(self, x32: Any, nearest: Any, sticky: F64) -> bool:
        """Whether the ends of a monotone stretch share one cell, or have no value, and every result is right for it."""
        if not self.function.monotone:
            return False
        codes = nearest.view(np.int32)
        if codes[0] != codes[-1] or not (codes == codes[0]).all():
            return False
        with np.errstate(all="ignore"):
            ends = settle(self.name, x32[[0, -1]].astype(np.float64))
        if np.isnan(ends.value).all():
            return bool(np.isnan(nearest).all() and np.isnan(sticky).all())
        if np.isnan(ends.value).any() or np.isnan(sticky).any() or ends.by_mpfr.any():
            return False
        want = round_to(ends.value, BINARY32, "nearest_even").astype(np.float32)
        low, high = cells(*[np.array([*ends.value, sticky.min(), sticky.max()])] * 2)
        one = (low == low[0]).all() and (high == low[0] + 1).all()
        return bool(one and same(want, nearest[:2]).all())

    def _settle(self, x: F64, nearest: Any, sticky: F64) -> None:
        settled = settle(self.name, x)
        wrong = self._disagree(settled, nearest, sticky)
        doubt = wrong["any"] & ~settled.by_mpfr
        if doubt.any():
            # MPFR decides where filter and code disagree: an error of the filter is none of the code.
            exact = [self.function.exact(v) for v in x[doubt].tolist()]
            settled.value[doubt], settled.by_mpfr[doubt] = exact, True
            wrong = self._disagree(settled, nearest, sticky)
        self.results.near_ties += int(np.count_nonzero(settled.by_mpfr))
        for mode in MODES:
            self._count(mode, x, wrong[mode])
        self._remember(x, settled)

    def _disagree(self, settled: Settled, nearest: Any, sticky: F64) -> dict[str, Bool]:
        want = {mode: round_to(settled.value, BINARY32, mode).astype(np.float32) for mode in MODES}
        got = {mode: round_to(sticky, BINARY32, mode).astype(np.float32) for mode in MODES[1:]}
        wrong = {mode: ~same(want[mode], {"nearest_even": nearest, **got}[mode]) for mode in MODES}
        return wrong | {"any": np.logical_or.reduce(list(wrong.values()))}

    def _count(self, mode: str, x: F64, wrong: Bool) -> None:
        if wrong.any():
            self.results.mismatches[mode] += int(np.count_nonzero(wrong))
            examples = [(mode, float(v).hex()) for v in x[wrong][:EXAMPLES].tolist()]
            self.results.examples = [*self.results.examples, *examples][:EXAMPLES]

    def _remember(self, x: F64, settled: Settled) -> None:
        """Keep the inputs whose value is closest to a boundary without being on it."""
        chosen = x[settled.by_mpfr & np.isfinite(x) & (x != 0) & np.isfinite(settled.value)]
        near = [(d, float(v).hex()) for v in chosen.tolist() if (d := distance(self.name, v)) is not None]
        self.results.hardest = heapq.nsmallest(HARDEST, [*self.results.hardest, *near])


def digest(name: str) -> str:
    """Return the digest of the function's code, to which a proof belongs."""
    return ELEMENTARY[name].digest if name in ELEMENTARY else "arithmetic"


@dataclass
class State:
    """A function's file: the finished units, and the digest of the code."""

    path: Path
    function: str
    digest: str
    done: list[int] = field(default_factory=list)
    results: Results = field(default_factory=Results)
    date: str = ""

    @staticmethod
    def open(folder: Path, name: str, resume: bool) -> State:
        """Return the state to continue from; a new one if there is none, or the code has changed since."""
        state = State(folder / f"{name}.json", name, digest(name))
        if not resume or not state.path.exists():
            return state
        data = json.loads(state.path.read_text())
        if data["digest"] != state.digest:
            print(f"{name}: the code has changed since the stored state; starting anew", file=sys.stderr)
            return state
        state.done, state.date = data["done"], data["date"]
        state.results.merge(Results(**data["results"]))
        return state

    @property
    def missing(self) -> list[int]:
        """Return the units that have not run."""
        return [u for u in range(UNITS) if u not in set(self.done)]

    def add(self, unit: int, results: Results) -> None:
        """Add a finished unit, and write it to disk at once."""
        self.done.append(unit)
        self.results.merge(results)
        self.date = datetime.datetime.now(datetime.UTC).date().isoformat()
        data = asdict(self) | {"complete": not self.missing}
        del data["path"]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".part")
        temporary.write_text(json.dumps(data, indent=1))
        temporary.replace(self.path)

    def line(self) -> str:
        """Return the result in one line."""
        r = self.results
        wrong = ", ".join(f"{mode} {count}" for mode, count in r.mismatches.items())
        return (
            f"{self.function}: {r.inputs} of 2^32 inputs; mismatches: {wrong}; "
            f"{r.near_ties} settled by MPFR; {r.seconds / 60:.1f} minutes of processor time"
        )


def _unit(name: str, number: int, each: bool) -> tuple[int, Results]:
    torch.set_num_threads(1)
    return number, Check(name, each).unit(number)


def _units(name: str, missing: list[int], each: bool, jobs: int) -> Iterator[tuple[int, Results]]:
    """Yield finished units in any order; a few at a time are in progress."""
    if jobs == 1:
        for number in missing:
            yield _unit(name, number, each)
        return
    with ProcessPoolExecutor(jobs) as pool:
        pending: set[Future[tuple[int, Results]]] = set()
        queue = list(missing)
        while queue or pending:
            while queue and len(pending) < 2 * jobs:
                pending.add(pool.submit(_unit, name, queue.pop(0), each))
            finished, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in finished:
                yield future.result()


def exhaust(name: str, state: State, each: bool, jobs: int) -> None:
    """Run the missing units, with a progress bar and the remaining time."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(file=sys.stderr), refresh_per_second=1) as progress:
        task = progress.add_task(name, total=UNITS, completed=len(state.done))
        for number, results in _units(name, state.missing, each, jobs):
            state.add(number, results)
            progress.advance(task)


def default_state() -> Path:
    """Return the directory exhaustive/ in fxround's part of the user's cache directory."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "fxround" / "exhaustive"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the options, which name at least one function."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("functions", nargs="*", metavar="FUNCTION", help=", ".join(FUNCTIONS))
    parser.add_argument("--all", action="store_true", help="every function")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="what to report (all)")
    parser.add_argument("--each", action="store_true", help="run the kernels of the directed modes too")
    parser.add_argument("--resume", action="store_true", help="go on with what the state has")
    parser.add_argument("--jobs", type=int, default=1, help="processes (1)")
    parser.add_argument("--state", type=Path, default=default_state(), help="folder of the state (%(default)s)")
    parser.add_argument("--collect", type=Path, metavar="FILE", help="write the state's results to one file, and stop")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.functions if name not in FUNCTIONS]
    if unknown or not (options.functions or options.all or options.collect):
        parser.error(f"unknown function {unknown[0]!r}" if unknown else "name a function, or --all")
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: expected 1 or more")
    return options


def collect(folder: Path, target: Path) -> None:
    """Write the results for the present code in one file, by function, for docs/functions.md and the tests."""
    collected = {}
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text())
        if data["digest"] != digest(data["function"]):
            continue
        collected[data["function"]] = {"units": len(data["done"])} | {k: data[k] for k in ("date", "digest", "results")}
    target.write_text(json.dumps(collected, indent=1) + "\n")


def command(arguments: list[str] | None = None) -> int:
    """Run the command; return 0 for no mismatch in any requested mode, 1 for a mismatch, 130 after Ctrl-C."""
    options = parse(arguments)
    torch.set_num_threads(1)
    if options.collect:
        collect(options.state, options.collect)
        return 0
    wrong = 0
    for name in dict.fromkeys([*options.functions, *(FUNCTIONS if options.all else ())]):
        state = State.open(options.state, name, options.resume)
        try:
            exhaust(name, state, options.each, options.jobs)
        except KeyboardInterrupt:
            print(f"interrupted; {len(state.done)} of {UNITS} units of {name} are kept: go on with --resume")
            return 130
        print(state.line(), *state.results.examples, sep="\n  ", flush=True)
        wrong += sum(state.results.mismatches[mode] for mode in options.modes)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(command())
