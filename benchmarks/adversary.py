"""Errors of the elementary functions in ulps of binary64 against MPFR, at float64 arguments drawn to find large ones.

A draw mixes all encodings, subnormal numbers, ranges with subnormal, largest or cancelling results, powers of two,
multiples of 1/2, log(2)/2 and pi/4, every constant of the function's own code, numbers near each of these at any
distance down to one ulp, and numbers near the worst arguments so far. The two arguments of a function of two are
similar, differ by any power of two, or are such that a power is in range. The kernels are the compiled ones.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import gmpy2
import numpy as np
import torch

import fxround  # noqa: F401  (registers the operator)
from benchmarks.pairs import PAIRS
from benchmarks.reference import F64, FUNCTIONS
from fxround.numerics.arithmetic.scalar import Function, param
from fxround.numerics.elementary import ELEMENTARY

BITS: Final = 256
BATCH: Final = 4096
KEPT: Final = 48
NEAREST: Final = "binary64/nearest_even/inf"
LARGEST: Final = float(np.finfo(np.float64).max)
RNG: Final = torch.zeros(2, dtype=torch.int64)

RANGES: Final[dict[str, tuple[tuple[float, float], ...]]] = {
    "": ((-1, 1), (0, 4), (-10, 10), (-750, 750), (-1100, 1100)),
    "exp": ((-745.2, -708.3), (709, 709.8)),
    "exp2": ((-1075.2, -1021.8), (1023, 1024.1)),
    "expm1": ((-40, -30), (709, 709.8)),
    "sigmoid": ((-745.2, -708.3), (30, 40)),
    "softplus": ((-745.2, -708.3), (30, 40)),
    "erfc": ((26.5, 27.3), (-6, -5)),
    "erf": ((5, 6.1), (0.7, 0.8)),
    "tanh": ((17, 22.1),),
    "sinh": ((709, 710.6),),
    "cosh": ((709, 710.6),),
    "lgamma": ((0.5, 2.6), (-5, -2), (-180, -3)),
    "digamma": ((1.4, 1.5), (-5, 0), (-180, -3)),
}
"""Where to look: "" is every function's."""
ANCHORS: Final[dict[str, tuple[float, ...]]] = {
    "lgamma": (2, -2.4570247382208, -2.7476826467274, -3.1435808883500, -3.9552942848586, -4.0391618490280, 2.55e305),
    "digamma": (1.4616321449683623, -0.5040830082644554, -1.5734984731623904, -2.610720868444145, -3.635293366436901),
    "erfinv": (0.7111556, 0.99999),
}
"""Where a function is zero, nearly overflows or is evaluated otherwise, and no constant of its code says so."""


@dataclass(frozen=True)
class Point:
    """Arguments, the result there, and its error in ulps: the whole, and without the part that ``near_zeros`` allows.

    ``beyond``: the part of the absolute error over half an ulp, for a result below 1 at a negative argument.
    """

    whole: float
    error: float
    beyond: float
    args: tuple[float, ...]
    got: float


@dataclass
class Found:
    """The findings of a search; ``near`` are the points near which it continues."""

    samples: int = 0
    near: list[Point] = field(default_factory=list)
    worst: Point | None = None
    beyond: float = 0.0

    def add(self, points: list[Point]) -> None:
        """Keep the worst points, one for each argument list."""
        self.samples += len(points)
        self.near = heapq.nlargest(KEPT, {p.args: p for p in (*self.near, *points)}.values(), key=lambda p: p.whole)
        self.worst = max(points if self.worst is None else (self.worst, *points), key=lambda p: p.error)
        self.beyond = max(self.beyond, *(p.beyond for p in points))


def run(name: str, args: list[Any], rounding: str) -> F64:
    """Return the compiled kernel's results in binary64."""
    names = ", ".join(f"x{i}" for i in range(len(args)))
    program = f"t0 = {name}({names}) @ {rounding}"
    tensors = [torch.from_numpy(np.ascontiguousarray(a)) for a in args]
    return np.asarray(torch.ops.fxround.pointwise(tensors, program, torch.float64, RNG, 0).numpy())


def _floored(x: Any, y: Any) -> Any:
    """Return x - floor(x / y) y; a zero has the sign of x, as PyTorch's."""
    r = gmpy2.fmod(x, y)
    return r if r == 0 or (r < 0) == (y < 0) else r + y


def _erfc(x: Any) -> Any:
    """Return erfc; for |x| >= 28, where MPFR is slow, a number that rounds as it does."""
    return gmpy2.erfc(x) if abs(x) < 28 else gmpy2.mpfr(2) ** -1200 if x > 0 else gmpy2.mpfr(2)


def _inverse_erf(x: Any) -> Any:
    """Newton's iteration on erfc(y) = 1 - |x|, or on erf(y) = |x| up to 1/2; from 1.5 digits six steps are enough."""
    size = abs(x)
    if size >= 1:
        return x / 0 if size == 1 else gmpy2.nan()
    half_root = gmpy2.sqrt(gmpy2.const_pi()) / 2
    y = size * half_root
    if size > 0.5:
        logarithm = gmpy2.log1p(-size * size) / 2
        y = gmpy2.sqrt(gmpy2.sqrt((4.33 + logarithm) ** 2 - logarithm * 13.6) - 4.33 - logarithm)
    for _ in range(7):
        error = gmpy2.erfc(y) - (1 - size) if size > 0.5 else size - gmpy2.erf(y)
        y += error * half_root * gmpy2.exp(y * y)
    return gmpy2.copy_sign(y, x)


_OWN: Final[dict[str, Callable[..., Any]]] = {"remainder": _floored, "erfc": _erfc, "erfinv": _inverse_erf}


def reference(name: str) -> Callable[..., Any]:
    """Return the function over MPFR numbers."""
    return _OWN.get(name) or (PAIRS[name].compute if name in PAIRS else FUNCTIONS[name].compute)


def distance(got: float, want: Any) -> tuple[float, int]:
    """Return |got - want| in ulps of binary64 at ``want``, and the exponent of the ulp.

    An infinity counts as 2^1024, and so does a number beyond MPFR's range; signs of zeros and NaN must agree.
    """
    if math.isnan(got) or gmpy2.is_nan(want):
        return 0.0 if math.isnan(got) and gmpy2.is_nan(want) else math.inf, 0
    if gmpy2.is_signed(want) != (math.copysign(1.0, got) < 0):
        return math.inf, 0
    limit = gmpy2.mpfr(2) ** 1024
    value, exact = min(limit, abs(gmpy2.mpfr(got))), min(limit, abs(want))
    exponent = min(1024, max(gmpy2.frexp(exact)[0] if exact else -1021, -1021)) - 53
    return float(gmpy2.mul_2exp(abs(value - exact), 1100) / gmpy2.mpfr(2) ** (exponent + 1100)), exponent


def judge(name: str, args: list[Any], rounding: str = NEAREST) -> list[Point]:
    """Return the error of every point."""
    function, got, allowed = reference(name), run(name, args, rounding).tolist(), ELEMENTARY[name].near_zeros
    points = []
    with gmpy2.context(precision=BITS):
        for y, xs in zip(got, zip(*(a.tolist() for a in args), strict=True), strict=True):
            whole, exponent = distance(y, function(*map(gmpy2.mpfr, xs)))
            error = max(0.0, whole - math.ldexp(allowed, -exponent)) if allowed and xs[0] < 0 else whole
            beyond = math.ldexp(max(0.0, whole - 0.5), exponent) if xs[0] < 0 and exponent < -53 else 0.0
            points.append(Point(whole, error, beyond, xs, y))
    return points


# ---- where to look ----


def constants(name: str) -> list[float]:
    """Return the magnitudes of the nonzero binary64 constants with which the function's code compares."""
    row = ELEMENTARY[name]
    params = tuple(param(f"x{i}", "f64") for i in range(row.arity))
    nodes = Function(name, params, (row.build(*params),)).schedule
    compared = {a for n in nodes if n.op in ("flt", "fle", "feq") for a in n.args if a.op == "const"}
    values = (float(np.uint64(c.attr).view(np.float64)) for c in compared if isinstance(c.attr, int))
    return sorted({abs(v) for v in values if math.isfinite(v) and v})


def near(rng: np.random.Generator, x: F64) -> F64:
    """Return x, moved by up to four ulps, or by a part of it between 2^-53 and 1/2, or not at all."""
    steps = x.view(np.int64) + rng.integers(-4, 5, x.size)
    moved = x * (1 + rng.choice([-1, 1], x.size) * 2.0 ** rng.uniform(-53, -1, x.size))
    return np.where(rng.integers(0, 2, x.size) == 0, steps.view(np.float64), moved)


def lattice(rng: np.random.Generator, count: int) -> F64:
    """Return multiples of the numbers by which ranges are reduced, and powers of two, of 10 and of 2 from sqrt(1/2)."""
    step = rng.choice([0.5, 1 / 16, math.log(2) / 2, math.pi / 4], count)
    multiple = step * np.floor(2.0 ** rng.uniform(0, 12, count))
    scaled = rng.choice([1, math.sqrt(0.5)], count) * 2.0 ** rng.integers(-1074, 1024, count)
    ten = 10.0 ** rng.integers(-300, 300, count)
    return np.choose(rng.integers(0, 5, count), [multiple, multiple, scaled, scaled, ten])


def draw(name: str, rng: np.random.Generator, count: int) -> F64:
    """Return arguments of a function of one argument."""
    ranges = np.array((*RANGES[""], *3 * RANGES.get(name, ())))
    low, high = ranges[rng.integers(0, len(ranges), count)].T
    anchors = np.array([*constants(name), *ANCHORS.get(name, ()), 1.0, LARGEST, 2.0**-1022])
    codes = rng.integers(0, 0x7FF << 52, count).view(np.float64)
    # Half of them have all 52 bits, for which a double rounding gives a wrong result.
    subnormal = rng.integers(1, 1 << rng.choice([*range(1, 52), *[52] * 51], count)).view(np.float64)
    close = [near(rng, v) for v in (rng.choice(anchors, count), lattice(rng, count))]
    kinds = [codes, subnormal, rng.uniform(low, high), *close]
    x = np.choose(rng.choice(5, count, p=(0.1, 0.1, 0.4, 0.2, 0.2)), kinds)
    return np.where(np.isfinite(x), x * rng.choice([-1, 1], count), 1.0)


def draw_pair(name: str, rng: np.random.Generator, count: int) -> list[F64]:
    """Return arguments of a function of two arguments."""
    x = draw(name, rng, count)
    apart = x * 2.0 ** rng.uniform(-60, 60, count)
    far = np.ldexp(x * rng.uniform(0.5, 1, count), rng.integers(-1080, 1080, count))
    with np.errstate(all="ignore"):
        goal = rng.uniform(-1075, rng.choice([-1021, 1024], count))
        power = goal / np.log2(np.abs(x))
    whole = np.rint(power)
    other = [draw(name, rng, count), near(rng, x), apart, far, power, whole]
    kinds = rng.choice(6, count, p=(0.1, 0.1, 0.1, 0.1, 0.4, 0.2) if name == "pow" else (0.2, 0.15, 0.3, 0.35, 0, 0))
    y = np.choose(kinds, other)
    return [x, np.where(np.isfinite(y), y, 1.5)]


def batch(name: str, rng: np.random.Generator, count: int, points: list[Point]) -> list[F64]:
    """Return arguments, a quarter of them near the worst so far."""
    fresh = [draw(name, rng, count)] if ELEMENTARY[name].arity == 1 else draw_pair(name, rng, count)
    if not points:
        return fresh
    chosen = np.array([p.args for p in points])[rng.integers(0, len(points), count // 4)].T
    for row, column in zip(fresh, map(np.ascontiguousarray, chosen), strict=True):
        close = near(rng, column) if rng.integers(0, 3) else column
        row[: close.size] = np.where(np.isfinite(close), close, 1.0)
    return fresh


def search(
    name: str, count: int, seed: int = 0, dtype: Any = np.float64, size: int = BATCH, rounding: str = NEAREST
) -> Found:
    """Return the worst of ``count`` samples, the same for the same seed; of binary32 arguments if dtype is float32.

    ``size``: the number drawn before the worst are updated. ``rounding``: of the results.
    """
    rng, results = np.random.default_rng(seed), Found()
    while results.samples < count:
        with np.errstate(all="ignore"):
            args = [a.astype(dtype) for a in batch(name, rng, min(size, count - results.samples), results.near)]
        results.add(judge(name, [np.where(np.isfinite(a), a, dtype(1)) for a in args], rounding))
    return results
