"""Functions of two arguments against an independent reference, on random pairs and wherever results are near a
boundary.

    python -m benchmarks.pairs pow atan2 --count 1e8 [--seed 0] [--output FILE]

There are 2^64 pairs, so this is a search and not a proof. Pairs are drawn where the function has something to round:
pow with a result in binary32's range, the others with arguments of similar size; a sixteenth of each from all
encodings. As in ``exhaustive`` two kernels run, to nearest even and to odd with 26 bits, and MPFR decides the pairs
that binary64 values, trusted to 256 ulps, and bounds that are theorems do not decide. The result of fmod is a binary32
number, which C's fmod of binary64 gives; the floored remainder is that, plus the divisor if the signs differ: a sum
whose error is known exactly. Integer quotients follow from fmod too, or from rational numbers where they are long. The
pairs closest to a boundary are kept as hard cases.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Final

import gmpy2
import numpy as np
import torch

import fxround  # noqa: F401  (registers the operator)
from benchmarks.exhaustive import BINARY32, EXAMPLES, HARDEST, RNG, STICKY, Results, _agrees, _signed
from benchmarks.reference import (
    F64,
    I64,
    MODES,
    WINDOW,
    Function,
    cells,
    inside,
    part_of_cell,
    round_to,
    same,
    shifted,
)
from fxround.significance.progress import tracked

BLOCK: Final = 1 << 16
Draw = Callable[[np.random.Generator, int], tuple[Any, Any]]


def anything(rng: np.random.Generator, count: int) -> tuple[Any, Any]:
    """Return finite nonzero binary32 numbers, every encoding equally likely."""
    codes = rng.integers(1, 0x7F800000, (2, count), dtype=np.uint32) | rng.integers(0, 2, (2, count), np.uint32) << 31
    x, y = codes.view(np.float32)
    return x, y


def similar(rng: np.random.Generator, count: int) -> tuple[Any, Any]:
    """Return arguments whose exponents differ by up to 30."""
    x, _ = anything(rng, count)
    y = rng.uniform(1, 2, count) * rng.choice([-1, 1], count) * 2.0 ** rng.integers(-30, 31, count)
    with np.errstate(all="ignore"):
        y = (np.abs(x) * y).astype(np.float32)
    usable = np.isfinite(y) & (y != 0)
    return x, np.where(usable, y, x)


def in_range(rng: np.random.Generator, count: int) -> tuple[Any, Any]:
    """Return x > 0 of any size or near 1, and y with x^y between 2^-150 and 2^128."""
    x = np.abs(anything(rng, count)[0])
    x = np.where(rng.integers(0, 2, count) == 1, x, rng.uniform(0.25, 4, count).astype(np.float32))
    with np.errstate(all="ignore"):
        y = (rng.uniform(-150, 128, count) / np.log2(x.astype(np.float64))).astype(np.float32)
    return x, np.where(np.isfinite(y) & (y != 0), y, np.float32(1.5))


@dataclass(frozen=True)
class Pairs:
    """A function of two: compute(x, y) by MPFR; fast, bounds: as in ``reference.Function``; draw: its pairs."""

    compute: Callable[[Any, Any], Any]
    fast: Callable[[F64, F64], F64]
    draw: Draw
    bounds: Callable[[F64, F64], tuple[F64, F64]] | None = None

    def at(self, y: float) -> Function:
        """Return the function of x alone."""
        return Function(lambda x: self.compute(x, gmpy2.mpfr(y)), lambda x: self.fast(x, np.full_like(x, y)))


def _beside_one(x: F64, y: F64) -> tuple[F64, F64]:
    """x^y > 0 for x > 0 or an even y; for 0 < x < 1 and x > 1, x^y > 1 exactly if (x > 1) = (y > 0)."""
    grows = (x > 1) == (y > 0)
    known = (x > 0) & (x != 1)
    positive = (x > 0) | (y / 2 == np.rint(y / 2))
    below = np.where(known & grows, 1.0, np.where(positive, 0.0, -np.inf))
    return below, np.where(known & ~grows, 1.0, np.inf)


def _above_both(x: F64, y: F64) -> tuple[F64, F64]:
    """hypot(x, y) > max(|x|, |y|) for x, y not 0."""
    return np.maximum(np.abs(x), np.abs(y)), np.full_like(x, np.inf)


def _torch(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[F64, F64], F64]:
    return lambda x, y: np.asarray(function(torch.from_numpy(x), torch.from_numpy(y)).numpy())


def _floored(x: Any, y: Any) -> Any:
    """Return x - floor(x / y) y without rounding."""
    a, b = gmpy2.mpq(x), gmpy2.mpq(y)
    return gmpy2.mpfr(a - (a // b) * b)


def _floored_to_odd(x: F64, y: F64) -> F64:
    """Return the floored remainder rounded to odd to binary64: r + y by two_sum, if the signs differ."""
    r = np.fmod(x, y)
    addend = np.where((r != 0) & ((r < 0) != (y < 0)), y, 0.0)
    total = r + addend
    part = total - r
    error = (r - (total - part)) + (addend - part)
    code = total.view(np.int64)
    inexact = (error != 0) & ((code & 1) == 0)
    moved = np.where((error < 0) != (total < 0), code - 1, code + 1)
    value = np.where(inexact, moved, code).view(np.float64)
    return np.where(value == 0, np.copysign(0.0, x), value)


def _integer_quotient(x: Any, y: Any, floored: bool) -> Any:
    """Return floor(x / y), or trunc(x / y), without rounding; a zero has the sign of x / y."""
    if y == 0:
        return x / y
    ratio = gmpy2.mpq(x) / gmpy2.mpq(y)
    whole = ratio.numerator // ratio.denominator
    whole += ratio < 0 and ratio != whole and not floored
    negative = gmpy2.is_signed(gmpy2.mpfr(x)) != gmpy2.is_signed(gmpy2.mpfr(y))
    return gmpy2.mpfr(whole) if whole else gmpy2.mpfr(-0.0 if negative else 0.0)


def _integer_quotients_to_odd(x: F64, y: F64, floored: bool) -> F64:
    """Return the integer quotients rounded to odd to binary64, for binary32 numbers.

    x - fmod(x, y) is the quotient times y. Below 2^50 the errors of the subtraction and the division leave it next to
    the integer.
    """
    r = np.fmod(x, y)
    value = np.rint((x - r) / y) - (floored & (r != 0) & ((x < 0) != (y < 0)))
    for i in np.flatnonzero(np.abs(value) >= 2.0**50).tolist():
        exact = Fraction(float(x[i])) / Fraction(float(y[i]))
        whole = math.floor(exact) if floored else math.trunc(exact)
        size = max(abs(whole).bit_length() - 53, 0)
        kept = abs(whole) >> size
        value[i] = math.ldexp(kept | (kept << size != abs(whole)), size) * (1 if whole > 0 else -1)
    return np.where(value == 0, np.copysign(0.0, x) * np.copysign(1.0, y), value)


PAIRS: Final = {
    "pow": Pairs(lambda x, y: x**y, np.power, in_range, _beside_one),
    "atan2": Pairs(gmpy2.atan2, _torch(torch.atan2), similar),
    "hypot": Pairs(gmpy2.hypot, _torch(torch.hypot), similar, _above_both),
    "fmod": Pairs(gmpy2.fmod, np.fmod, similar),
    "remainder": Pairs(_floored, _floored_to_odd, similar),
    "floordiv": Pairs(
        partial(_integer_quotient, floored=True), partial(_integer_quotients_to_odd, floored=True), similar
    ),
    "truncdiv": Pairs(
        partial(_integer_quotient, floored=False), partial(_integer_quotients_to_odd, floored=False), similar
    ),
}
EXACT: Final = ("fmod", "remainder", "floordiv", "truncdiv")
"""Functions whose ``fast`` is to-odd already."""


class Check:
    """One function's comparison."""

    def __init__(self, name: str) -> None:
        self.name, self.pairs, self.results = name, PAIRS[name], Results()

    def random(self, count: int, seed: int) -> Results:
        """Compare ``count`` pairs, the same for the same seed."""
        rng, blocks = np.random.default_rng(seed), -(-count // BLOCK)
        for block in tracked(range(blocks), blocks, self.name):
            began = time.process_time()
            self.check(*(anything if block % 16 == 0 else self.pairs.draw)(rng, min(BLOCK, count - block * BLOCK)))
            self.results.seconds += time.process_time() - began
        return self.results

    def _run(self, x32: Any, y32: Any) -> tuple[Any, F64]:
        tensors = [torch.from_numpy(np.ascontiguousarray(v)) for v in (x32, y32)]
        self.results.inputs += len(x32)
        program = f"t0 = {self.name}(x0, x1) @"
        nearest = torch.ops.fxround.pointwise(tensors, f"{program} binary32/nearest_even/inf", torch.float32, RNG, 0)
        sticky = torch.ops.fxround.pointwise(tensors, f"{program} {STICKY}", torch.float64, RNG, 0)
        return nearest.numpy(), sticky.numpy()

    def against(self, x32: Any, y32: Any, value: F64) -> Results:
        """Compare at these pairs with f's exact values."""
        self._judge(x32.astype(np.float64), y32.astype(np.float64), value, *self._run(x32, y32))
        return self.results

    def check(self, x32: Any, y32: Any) -> Results:
        """Compare at these pairs of finite nonzero binary32 numbers."""
        nearest, sticky = self._run(x32, y32)
        x, y = x32.astype(np.float64), y32.astype(np.float64)
        with np.errstate(all="ignore"):
            value = np.asarray(self.pairs.fast(x, y))
        if self.name in EXACT:
            self._judge(x, y, value, nearest, sticky)
            return self.results
        unbounded = np.full_like(x, -np.inf), np.full_like(x, np.inf)
        below, above = self.pairs.bounds(x, y) if self.pairs.bounds else unbounded
        middle, limits = _signed(value), [_signed(np.ascontiguousarray(b)) for b in (below, above)]
        low, high = np.maximum(middle - WINDOW, limits[0]), np.minimum(middle + WINDOW, limits[1])
        good = _agrees(low, high, nearest, sticky) | (np.isnan(value) & np.isnan(nearest) & np.isnan(sticky))
        if (rest := np.flatnonzero(~good)).size:
            x, y, value, below, above = (v[rest] for v in (x, y, value, below, above))
            low_end, high_end = np.maximum(shifted(value, -WINDOW), below), np.minimum(shifted(value, WINDOW), above)
            self._settle(x, y, cells(low_end, high_end), nearest[rest], sticky[rest])
        return self.results

    def _settle(self, x: F64, y: F64, ends: tuple[I64, I64], nearest: Any, sticky: F64) -> None:
        """Decide results next to a boundary or beyond the normal numbers, by their cell if possible, else by MPFR."""
        one = ends[1] - ends[0] == 1
        value = inside(ends[0])
        pairs = zip(x[~one].tolist(), y[~one].tolist(), strict=True)
        value[~one] = [self.pairs.at(b).exact(a) for a, b in pairs]
        self.results.near_ties += int(np.count_nonzero(~one))
        self._judge(x, y, value, nearest, sticky)
        self._remember(x[~one], y[~one], value[~one])

    def _judge(self, x: F64, y: F64, value: F64, nearest: Any, sticky: F64) -> None:
        for mode in MODES:
            got = nearest if mode == "nearest_even" else round_to(sticky, BINARY32, mode).astype(np.float32)
            wrong = ~same(got, round_to(value, BINARY32, mode).astype(np.float32))
            if wrong.any():
                self.results.mismatches[mode] += int(np.count_nonzero(wrong))
                examples = [
                    (mode, f"{a.hex()} {b.hex()}") for a, b in zip(x[wrong].tolist(), y[wrong].tolist(), strict=True)
                ]
                self.results.examples = [*self.results.examples, *examples][:EXAMPLES]

    def _remember(self, x: F64, y: F64, exact: F64) -> None:
        low, high = cells(exact, exact)
        near = []
        for i in np.flatnonzero((low != high) & np.isfinite(exact)).tolist():
            part = part_of_cell(self.pairs.at(y[i]), float(x[i]), int(low[i]))
            if part is not None:
                near.append((part, f"{x[i].hex()} {y[i].hex()}"))
        self.results.hardest = heapq.nsmallest(HARDEST, [*self.results.hardest, *near])


def command(arguments: list[str] | None = None) -> int:
    """Run the command; return 0 for no mismatch, 1 for one, 130 after Ctrl-C, which keeps what was checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("functions", nargs="+", choices=PAIRS, metavar="FUNCTION", help=", ".join(PAIRS))
    parser.add_argument("--count", type=lambda v: int(float(v)), default=10**8, help="pairs of each (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="JSON: results by function, merged into what is there"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    wrong = 0
    for name in options.functions:
        check, interrupted = Check(name), False
        try:
            check.random(options.count, options.seed)
        except KeyboardInterrupt:
            interrupted = True
        results = check.results
        wrong += sum(results.mismatches.values())
        print(f"{name}: {results.inputs} pairs, {results.near_ties} settled by MPFR, mismatches {results.mismatches}")
        print(*results.examples, sep="\n", flush=True)
        if options.output:
            data = json.loads(options.output.read_text()) if options.output.exists() else {}
            options.output.write_text(json.dumps(data | {name: asdict(results)}, indent=1) + "\n")
        if interrupted:
            return 130
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(command())
