"""Iterative refinement in three precisions, and the time of a factorization in a low format beside Pychop.

    python -m benchmarks.refinement [--size N] [--large N] [--timed N ...] [--whole N] [--threads N] [--output FILE]

A system is factored in a low format, and the solution is refined in a working precision with residuals in binary64:
E. Carson and N. J. Higham, Accelerating the solution of linear systems by iterative refinement in three precisions,
SIAM J. Sci. Comput. 40 (2018). Matrices have geometrically spaced singular values between 1 and 1 / condition
number, and are scaled by a power of two so that their largest element is at most a tenth of the format's maximum and at
most 1. Every step of the factorization is rounded to the format; "+ binary32" accumulates sums in binary32 as matrix
units do. Pychop's factorization is the textbook loop over columns on NumPy arrays, a chop after each product,
difference and quotient; of matrices larger than ``--whole`` its first ``--columns`` columns are timed. Times are those
of the processor, so that other processes do not count.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import fxround
from benchmarks.harness import conditions, header, table
from fxround import Format, Policy, Rule
from fxround.atomic_files import write_file
from fxround.operators.formulas.triangular import BLOCK

Array = npt.NDArray[Any]
LOW: Final = ("binary16", "binary16 + binary32")
FORMATS: Final = ("binary32", "tf32", *LOW, "bfloat16", "bfloat16 + binary32", "e4m3", "e5m2")
CONDITIONS: Final = (1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9)
LARGE_CONDITIONS: Final = (1e1, 1e2, 1e3, 1e5, 1e7)
WORKING: Final = {torch.float32: "binary32", torch.float64: "binary64"}
MOST_ITERATIONS: Final = 50
SHRINKS: Final = 0.9
SMALL: Final = 0.01


@dataclass(frozen=True)
class Refined:
    """What a refinement ended with: its iterations, and backward and forward errors in the maximum norm.

    converged: whether the backward error is at most the unit roundoff of the working precision, and the next step would
    change the solution by at most 1 %.
    """

    iterations: int
    backward: float
    forward: float
    converged: bool

    def __str__(self) -> str:
        return f"{self.iterations}: {self.backward:.0e}, {self.forward:.0e}" if self.converged else "no"


def policy_of(name: str) -> Policy:
    """Return the policy of a row: the format of every rounding, and after a plus sign that of sums."""
    rounding, _, accumulate = name.partition(" + ")
    return Policy(name, (Rule(rounding=rounding, accumulate=accumulate or rounding),))


def matrix(size: int, condition: float, seed: int) -> Array:
    """Return a random matrix of this condition number, binary64."""
    rng = np.random.default_rng(seed)
    left, right = (np.linalg.qr(rng.standard_normal((size, size)))[0] for _ in range(2))
    values: Array = (left * np.logspace(0, -math.log10(condition), size)) @ right
    return values


def scale(a: Array, name: str) -> float:
    """Return the power of two that the matrix is multiplied by before it is rounded to the format."""
    most = min(Format.parse(name.partition(" + ")[0]).maximum / 10, 1.0)
    return float(2.0 ** math.floor(math.log2(most / np.abs(a).max())))


def solution(a: Array, b: Array) -> Array:
    """Return the solution in NumPy's extended precision, by refinement with its residuals."""
    inverse, wide = np.linalg.inv(a), a.astype(np.longdouble)
    x = (inverse @ b).astype(np.longdouble)
    for _ in range(20):
        x += inverse @ (b - wide @ x).astype(np.float64)
    return x


def norm(x: Array) -> float:
    """Return the norm in which errors are measured: the largest sum of the magnitudes in a row."""
    return float(np.abs(x).sum(-1).max() if x.ndim == 2 else np.abs(x).max())


class Solver:
    """Compiled steps for systems of one size: the factorization by format, solutions and residuals by precision."""

    def __init__(self, size: int) -> None:
        self.size = size
        a, b = torch.eye(size), torch.ones(size, 1)
        self._factor = fxround.compile(torch.linalg.lu_factor_ex, policy_of(FORMATS[0]), example_inputs=a)
        self.solve = fxround.compile(torch.linalg.lu_solve, "reproducible")
        self.residual = fxround.compile(lambda a, x, b: b - a @ x, "reproducible")
        self._policies: dict[str, Any] = {}
        self._example = b

    def factor(self, name: str) -> Callable[[Tensor], Any]:
        """Return the factorization under the policy of a row."""
        if name not in self._policies:
            self._policies[name] = self._factor.with_policy(policy_of(name))
        found: Callable[[Tensor], Any] = self._policies[name]
        return found

    @torch.no_grad()
    def refine(self, name: str, a: Array, b: Array, exact: Array, working: torch.dtype) -> Refined:
        """Return the end of a refinement with this format and working precision.

        It ends when a step is not smaller than 0.9 times the step before (J. Demmel et al., Error bounds from
        extra-precise iterative refinement, ACM TOMS 32 (2006)), or after 50 of them.
        """
        factor, wide = scale(a, name), torch.from_numpy(a)
        packed, pivots, _ = self.factor(name)(fxround.round((wide * factor).float(), name.partition(" + ")[0]))
        packed, right = packed.to(working), torch.from_numpy(b).unsqueeze(1)
        unit, tiny = torch.finfo(working).eps / 2, torch.finfo(working).tiny
        bound = norm(a)
        x = torch.zeros(len(a), 1, dtype=working)
        before, iterations = math.inf, 0
        while True:
            residual = self.residual(wide, x.double(), right)
            values, size = x.double().numpy()[:, 0], norm(residual.numpy()[:, 0])
            backward = size / (bound * norm(values) + norm(b))
            # Residuals shrink below the range of narrow formats: they are scaled to 1, as the step afterwards.
            step = self.solve(packed, pivots, (residual / max(size, tiny)).to(working)).double() * (size * factor)
            length = norm(step.numpy()[:, 0])
            if not length <= SHRINKS * before or iterations == MOST_ITERATIONS:
                break
            x, before, iterations = (x.double() + step).to(working), length, iterations + 1
        converged = backward <= unit and length <= SMALL * norm(values)
        return Refined(iterations, backward, norm(values - exact) / norm(exact), converged)


def problem(size: int, condition: float, seed: int, working: torch.dtype) -> tuple[Array, Array, Array]:
    """Return a matrix of numbers of the working precision, a right side and the solution."""
    a = matrix(size, condition, seed)
    if working == torch.float32:
        a = a.astype(np.float32).astype(np.float64)
    b = np.random.default_rng(100 + seed).standard_normal(size)
    return a, b, solution(a, b)


def refinements(solver: Solver, working: torch.dtype, condition_numbers: tuple[float, ...]) -> dict[str, Any]:
    """Return the table of formats against condition numbers."""
    rows = [[name] for name in FORMATS]
    for seed, condition in enumerate(condition_numbers):
        a, b, exact = problem(solver.size, condition, seed, working)
        for row in rows:
            row.append(str(solver.refine(row[0], a, b, exact, working)))
        print(f"condition {condition:.0e}:", *(row[-1] for row in rows), sep="  ", flush=True)
    heads = ["factored in", *(f"{condition:.0e}".replace("e+0", "e") for condition in condition_numbers)]
    return {"columns": heads, "numbers": list(range(1, len(heads))), "rows": rows}


def chopped(columns: int | None = None) -> Callable[[Array], tuple[Array, Array]]:
    """Return the factorization with Pychop's binary16, of all columns or of the first ones. Raises ImportError."""
    from pychop import Chop, backend

    backend("numpy")
    chop = Chop(exp_bits=5, sig_bits=10, rmode=1)

    def factor(a: Array) -> tuple[Array, Array]:
        a, order = chop(a), np.arange(len(a))
        for k in range(min(columns or len(a), len(a) - 1)):
            pivot = k + np.abs(a[k:, k]).argmax()
            a[[k, pivot]], order[[k, pivot]] = a[[pivot, k]], order[[pivot, k]]
            a[k + 1 :, k] = chop(a[k + 1 :, k] / a[k, k])
            a[k + 1 :, k + 1 :] = chop(a[k + 1 :, k + 1 :] - chop(np.outer(a[k + 1 :, k], a[k, k + 1 :])))
        return a, order

    return factor


def timed(call: Callable[[], object], times: int) -> float:
    """Return the median seconds of the processor for some calls."""
    taken = []
    for _ in range(times):
        began = time.process_time()
        call()
        taken.append(time.process_time() - began)
    return statistics.median(taken)


def peer(x: Tensor, columns: int | None, own: Callable[[Tensor], Any]) -> str:
    """Return the time of Pychop's factorization, and which share of a small one has fxround's values."""
    try:
        factor = chopped(columns)
    except ImportError:
        return "not installed"
    found: list[Array] = []
    seconds = timed(lambda: found.append(factor(x.double().numpy())[0]), 1)
    part = f" for {columns} columns of {len(x):,}" if columns else ""
    equal = f", {np.mean(own(x)[0].double().numpy() == found[0]):.1%} equal" if len(x) <= BLOCK else ""
    return f"{seconds:.1f} s{part}{equal}"


@torch.no_grad()
def times(sizes: list[int], whole: int, columns: int) -> dict[str, Any]:
    """Return the table of times. whole: the largest size of which Pychop factors all columns."""
    rows = []
    for size in sizes:
        a = np.random.default_rng(0).standard_normal((size, size)) / 8
        x = fxround.round(torch.from_numpy(a).float(), "binary16")
        began = time.process_time()
        solver = Solver(size)
        solver.factor(LOW[0])(x)
        first = time.process_time() - began
        factors = [solver.factor(name) for name in LOW]
        seconds = [timed(partial(factor, x), 4) for factor in factors]
        stock = timed(partial(torch.linalg.lu_factor, x), 3)
        row = [f"{size:,}", *(f"{s:.2f} s" for s in seconds), f"{first:.1f} s", f"{stock * 1e3:.1f} ms"]
        rows.append([*row, peer(x, None if size <= whole else columns, factors[0])])
        print(*rows[-1], sep="  ", flush=True)
    heads = ["n", "binary16", "binary16 + binary32", "capture and first call", "stock, binary32", "Pychop, binary16"]
    return {"columns": heads, "numbers": [0, 1, 2, 3, 4, 5], "rows": rows}


def main(arguments: list[str] | None = None) -> None:
    """Print the tables, and put each of them into the file of results that --output names when it is made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=500, help="of the systems of all condition numbers; 0: none")
    parser.add_argument("--large", type=int, default=2000, help="of the systems of some condition numbers; 0: none")
    parser.add_argument("--timed", type=int, nargs="*", default=[64, 250, 500, 2000])
    parser.add_argument("--whole", type=int, default=500, help="the largest size of which Pychop factors all columns")
    parser.add_argument("--columns", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments or [])
    torch.set_num_threads(options.threads)
    print(header(("fxround", "torch", "numpy", "pychop")), flush=True)
    command = "python -m benchmarks.refinement"

    def keep(name: str, made: dict[str, Any]) -> None:
        print(table(made["columns"], made["rows"]), flush=True)
        if options.output:
            stored = json.loads(options.output.read_text(encoding="utf-8")) if options.output.exists() else {}
            write_file(options.output, json.dumps(stored | {name: made}, indent=1) + "\n")

    where = f", {options.threads} threads" if options.threads > 1 else ", one thread"
    if options.timed:
        keep("refinement-time", times(options.timed, options.whole, options.columns) | conditions(command, where=where))
    sizes = ((options.large, "-large", LARGE_CONDITIONS), (options.size, "", CONDITIONS))
    for size, name, condition_numbers in (row for row in sizes if row[0]):
        solver = Solver(size)
        for working, precision in WORKING.items():
            made = refinements(solver, working, condition_numbers)
            keep(f"refinement{name}-{precision}", made | conditions(command, where=where))


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
