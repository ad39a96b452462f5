"""The value of a function, computed independently of fxround: a fast filter, and MPFR where the filter cannot decide.

The numbers at which a rounding to binary32, or to a format within it, can change are binary32's values and the
midpoints of neighbours: the multiples of half a quantum. They divide the line into open cells. All f(x) of a cell round
to the same value, in every mode, so that a ``representative`` of the cell can replace f(x).

    filter   y = a binary64 value of NumPy's or PyTorch's, with measured errors of a few ulps. f(x) is assumed to be
             within WINDOW = 256 ulps of y, and strictly inside the bounds of ``Function.bounds``, which are theorems
             (tanh x < x for x > 0). If that leaves one cell, y's cell is f(x)'s.
    MPFR     f(x) rounded to odd to 53 bits, for the rest: near-ties, exact values, poles, zeros.

MPFR rounds correctly (composites and erfinv: 2000 and 250 bits, see their functions). The caller also sends to MPFR
every value that disagrees with the filter, so that a wrong filter can hide an error only by making the same one; filter
and code under test share nothing. A test compares ``round_to(representative, "binary32", mode)`` with the result, as
encodings.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import gmpy2
import numpy as np
import numpy.typing as npt
import torch

from fxround.numerics.formats import Format

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

WINDOW: Final = 256
"""How many binary64 ulps the filter's value is trusted to."""
MAGNITUDE: Final = (1 << 63) - 1
_LEAST_NORMAL: Final = (1023 - 126) << 52
HALF_QUANTA: Final = 2.0**150
TOP_CELL: Final = 2 * 0x7F7FFFFF + 1
"""The cell above binary32's maximum plus half its quantum; it has no end."""
MODES: Final = ("nearest_even", "toward_zero", "toward_positive", "toward_negative")

# ---- MPFR ----

_EXACT: Final = gmpy2.context(precision=53, round=gmpy2.RoundToZero, emin=-1073, emax=1024, subnormalize=True)
_WIDE_BITS: Final = 2000


def _odd(truncated: float, inexact: bool) -> float:
    """Return a value that was rounded to zero, made odd if it is inexact."""
    code = np.float64(truncated).view(np.int64)
    return float((code | np.int64(1)).view(np.float64)) if inexact and np.isfinite(truncated) else truncated


def _inverse_erf(x: Any) -> Any:
    """Newton's iteration on erf, to 250 bits; from a binary64 value three steps are enough.

    |x| <= 1 - 2^-24 keeps erf'(y) = 2/sqrt(pi) exp(-y^2) above 2^-23, so that y is good to 2^-220.
    """
    with gmpy2.context(precision=250):
        y = gmpy2.mpfr(float(torch.erfinv(torch.tensor(float(x), dtype=torch.float64))))
        half_root = gmpy2.sqrt(gmpy2.const_pi()) / 2
        for _ in range(4):
            y -= (gmpy2.erf(y) - x) * half_root * gmpy2.exp(y * y)
        return y


def _clamped(x: Any) -> Any:
    """Limit |x| to 1000; beyond, exp(-|x|) < 2^-1442 only decides on which side of a boundary f(x) is."""
    return min(max(x, gmpy2.mpfr(-1000)), gmpy2.mpfr(1000))


def _at(table: dict[float, float]) -> Callable[[float], float | None]:
    return lambda x: x if x != x else table.get(x)


def _erfinv_edges(x: float) -> float | None:
    if abs(x) < 1:
        return None if x else x
    return float(np.copysign(np.inf, x)) if abs(x) == 1 else float("nan")


def _rsqrt(x: Any) -> Any:
    """IEEE 754-2019, 9.2.1: rSqrt(+-0) is +-inf; MPFR's rec_sqrt(-0) is +inf."""
    return 1 / x if x == 0 else gmpy2.rec_sqrt(x)


def _lgamma(x: Any) -> Any:
    return gmpy2.lgamma(x)[0]


def _digamma(x: Any) -> Any:
    """digamma with PyTorch's poles: -inf at +0, +inf at -0, NaN at the negative integers."""
    if x == 0:
        return gmpy2.mpfr("inf" if gmpy2.is_signed(x) else "-inf")
    return gmpy2.digamma(x)


# ---- the filter: binary64 values, and what is known for certain ----

Bounds = Callable[[F64], tuple[F64, F64]]
INF: Final = np.inf


def _split(negative: tuple[Any, Any], positive: tuple[Any, Any]) -> Bounds:
    """Return strict bounds (below, above) of f for x < 0 and for x > 0; a bound is a number or a function of x."""

    def bounds(x: F64) -> tuple[F64, F64]:
        def side(index: int) -> F64:
            values = [pair[index] for pair in (negative, positive)]
            below, above = (v(x) if callable(v) else np.full_like(x, v) for v in values)
            return np.where(x < 0, below, above)

        return side(0), side(1)

    return bounds


def _odd_function(below: Any, above: Any) -> Bounds:
    """Return the bounds of an odd function from those of x > 0, given as functions of |x| or numbers."""

    def at(v: Any, x: F64) -> F64:
        return np.asarray(v(np.abs(x)) if callable(v) else np.full_like(x, v))

    def bounds(x: F64) -> tuple[F64, F64]:
        low, high = at(below, x), at(above, x)
        return np.where(x < 0, -high, low), np.where(x < 0, -low, high)

    return bounds


def _identity(x: F64) -> F64:
    return x


def _both(low: Any, high: Any) -> Bounds:
    return _split((low, high), (low, high))


def _unbounded(x: F64) -> tuple[F64, F64]:
    return np.full_like(x, -INF), np.full_like(x, INF)


def _at_a_pole(x: F64) -> Bool:
    """The poles of lgamma: zero and the negative integers."""
    return np.asarray((x <= 0) & (x == np.rint(x)))


def _torch(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[F64], F64]:
    return lambda x: np.asarray(function(torch.from_numpy(np.ascontiguousarray(x))).numpy())


def _softplus(x: F64) -> F64:
    return np.asarray(np.maximum(x, 0.0) + np.log1p(np.exp(-np.abs(x))))


def _below_pole(x: F64) -> F64:
    """tan x > x for 0 < x < pi/2."""
    return np.where(x < 1.5, x, -INF)


def _tangent(x: F64) -> F64:
    """Return 1/2 + x/4, the tangent at the inflection of the sigmoid, rounded away from 1/2 if it is inexact."""
    y = 0.5 + x / 4
    return np.where((y - 0.5) * 4 == x, y, np.nextafter(y, np.where(x < 0, -INF, INF)))


@dataclass(frozen=True)
class Function:
    """f by MPFR, f by the filter, and strict bounds on f for finite x != 0.

    compute     one correctly rounded function of MPFR; if there is ``known``, several operations, good to at least 200
                bits in a context of 2000
    known       x to f(x) where that is exact, else None
    slack       the absolute error that the filter may have beyond WINDOW ulps, for a value from a cancellation
    parity      -1 for an odd function, 1 for an even one
    monotone    on the positive and on the negative numbers of its domain, which is an interval; NaN outside
    infinite    where f is +inf
    """

    compute: Callable[[Any], Any]
    fast: Callable[[F64], F64]
    bounds: Bounds = _unbounded
    slack: float = 0.0
    parity: int = 0
    monotone: bool = True
    known: Callable[[float], float | None] | None = None
    infinite: Callable[[F64], Bool] | None = None

    def exact(self, x: float) -> float:
        """Return f(x) rounded to odd to binary64: f(x) itself if it is a binary64 number."""
        if self.known is not None:
            known = self.known(x)
            if known is not None:
                return known
            wide = self.wide(x, _WIDE_BITS)
        with gmpy2.context(_EXACT) as context:
            value = float(self.compute(gmpy2.mpfr(x)) if self.known is None else +wide)
            return _odd(value, context.inexact)

    def wide(self, x: float, precision: int = _WIDE_BITS) -> Any:
        """Return f(x) in MPFR's own range."""
        with gmpy2.context(precision=precision):
            return self.compute(gmpy2.mpfr(x))


_GROWTH: Final = _split((0.0, 1.0), (1.0, INF))
_CONCAVE: Final = _odd_function(-INF, _identity)
_CONVEX: Final = _odd_function(_identity, INF)
_TANH: Final = _odd_function(-INF, lambda x: np.minimum(x, 1.0))
_SINE: Final = _odd_function(-1.0, lambda x: np.minimum(x, 1.0))
_UNIT: Final = _odd_function(-1.0, 1.0)


def _sigmoid_exact(x: Any) -> Any:
    return 1 / (1 + gmpy2.exp(-_clamped(x)))


def _softplus_exact(x: Any) -> Any:
    return gmpy2.log1p(gmpy2.exp(-abs(_clamped(x)))) + max(x, gmpy2.mpfr(0))


FUNCTIONS: Final = MappingProxyType(
    {
        "exp": Function(gmpy2.exp, np.exp, _GROWTH),
        "exp2": Function(gmpy2.exp2, np.exp2, _GROWTH),
        "expm1": Function(gmpy2.expm1, np.expm1, _both(lambda x: np.maximum(x, -1.0), INF)),
        "log": Function(gmpy2.log, _torch(torch.log)),
        "log2": Function(gmpy2.log2, _torch(torch.log2)),
        "log10": Function(gmpy2.log10, _torch(torch.log10)),
        "log1p": Function(gmpy2.log1p, _torch(torch.log1p), _both(-INF, _identity)),
        "sqrt": Function(gmpy2.sqrt, np.sqrt),
        "rsqrt": Function(_rsqrt, lambda x: 1.0 / np.sqrt(x)),
        "reciprocal": Function(lambda x: 1 / x, lambda x: 1.0 / x),
        "cbrt": Function(gmpy2.cbrt, np.cbrt, parity=-1),
        "sin": Function(
            gmpy2.sin, np.sin, _odd_function(-1.0, lambda x: np.minimum(x, 1.0)), parity=-1, monotone=False
        ),
        "cos": Function(gmpy2.cos, _torch(torch.cos), _both(-1.0, 1.0), parity=1, monotone=False),
        "tan": Function(gmpy2.tan, np.tan, _odd_function(_below_pole, INF), parity=-1, monotone=False),
        "asin": Function(gmpy2.asin, _torch(torch.asin), _CONVEX, parity=-1),
        "acos": Function(gmpy2.acos, _torch(torch.acos)),
        "atan": Function(gmpy2.atan, np.arctan, _CONCAVE, parity=-1),
        "sinh": Function(gmpy2.sinh, np.sinh, _CONVEX, parity=-1),
        "cosh": Function(gmpy2.cosh, np.cosh, _both(1.0, INF), parity=1),
        "tanh": Function(gmpy2.tanh, np.tanh, _TANH, parity=-1),
        "asinh": Function(gmpy2.asinh, np.arcsinh, _CONCAVE, parity=-1),
        "acosh": Function(gmpy2.acosh, np.arccosh),
        "atanh": Function(gmpy2.atanh, np.arctanh, _CONVEX, parity=-1),
        "erf": Function(gmpy2.erf, _torch(torch.erf), _UNIT, parity=-1),
        "erfc": Function(gmpy2.erfc, _torch(torch.erfc), _split((1.0, 2.0), (0.0, 1.0))),
        "erfinv": Function(_inverse_erf, _torch(torch.erfinv), parity=-1, known=_erfinv_edges),
        "sigmoid": Function(
            _sigmoid_exact,
            lambda x: 1.0 / (1.0 + np.exp(-x)),
            _split((lambda x: np.maximum(_tangent(x), 0.0), 0.5), (0.5, lambda x: np.minimum(_tangent(x), 1.0))),
            known=_at({0.0: 0.5, INF: 1.0, -INF: 0.0}),
        ),
        "softplus": Function(
            _softplus_exact,
            _softplus,
            _both(lambda x: np.maximum(x, 0.0), INF),
            known=_at({INF: INF, -INF: 0.0}),
        ),
        "lgamma": Function(_lgamma, _torch(torch.lgamma), slack=2.0**-42, monotone=False, infinite=_at_a_pole),
        "digamma": Function(_digamma, _torch(torch.digamma), slack=2.0**-42, monotone=False),
    }
)


# ---- cells ----


def cells(low: F64, high: F64) -> tuple[I64, I64]:
    """Return the floor of ``low`` and the ceiling of ``high`` in half quanta of binary32; equal on a boundary."""
    return _floor(low), -_floor(-high)


def _floor(v: F64) -> I64:
    size = np.abs(v)
    code = size.view(np.int64)
    down = ((code - _LEAST_NORMAL) >> 28) + (1 << 24)
    up = -((_LEAST_NORMAL - code) >> 28) + (1 << 24)
    small = np.where(code < _LEAST_NORMAL, size, 0.0) * HALF_QUANTA
    normal = code >= _LEAST_NORMAL
    down = np.minimum(np.where(normal, down, np.floor(small).astype(np.int64)), TOP_CELL)
    up = np.minimum(np.where(normal, up, np.ceil(small).astype(np.int64)), TOP_CELL + 1)
    return np.asarray(np.where(v < 0, -up, down))


def inside(cell: I64) -> F64:
    """Return a number strictly inside an open cell: its middle; 2^128 for the last one."""
    negative = cell < 0
    k = np.where(negative, -cell - 1, cell)
    code = _LEAST_NORMAL + ((k - (1 << 24)) << 28) + (1 << 27)
    value = np.where(k < 1 << 24, (k + 0.5) / HALF_QUANTA, code.view(np.float64))
    value = np.where(k >= TOP_CELL, 2.0**128, value)
    return np.asarray(np.where(negative, -value, value))


def shifted(y: F64, ulps: int) -> F64:
    """Return y moved by a number of ulps; ordinals below zero are negative."""
    code = y.view(np.int64)
    ordinal = np.where(code < 0, -(code & MAGNITUDE), code) + ulps
    ordinal = np.clip(ordinal, -(0x7FF << 52), 0x7FF << 52)
    return np.asarray(np.where(ordinal < 0, -((-ordinal).view(np.float64)), np.abs(ordinal).view(np.float64)))


@dataclass(frozen=True)
class Settled:
    """Representatives of f(x) for every x (an exact f(x) is its own), and which of them MPFR computed."""

    value: F64
    by_mpfr: Bool


def settle(name: str, x: F64) -> Settled:
    """Return a representative of f(x) for every binary32 value x, stored in binary64; NaN where f has no value."""
    function = FUNCTIONS[name]
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y = np.asarray(function.fast(x))
        low, high = shifted(y, -WINDOW), shifted(y, WINDOW)
        if function.slack:
            low, high = low - function.slack, high + function.slack
        below, above = function.bounds(x)
    low, high = np.maximum(low, below), np.minimum(high, above)
    first, last = cells(low, high)
    # The other poles: 0 and +-1.
    special = ~np.isfinite(x) | (x == 0) | (np.abs(x) == 1)
    unsettled = ((last - first != 1) & ~np.isnan(y)) | (special & ~np.isnan(x))
    value = np.where(np.isnan(y), np.nan, inside(first))
    if function.infinite is not None:
        poles = function.infinite(x)
        value[poles], unsettled = INF, unsettled & ~poles
    value[unsettled] = [function.exact(v) for v in x[unsettled].tolist()]
    return Settled(value, unsettled)


# ---- rounding a representative, by its definition ----


def round_to(value: F64, fmt: Format, mode: str) -> F64:
    """Round values to a format within binary32: to the multiple of the quantum that the mode selects."""
    finite = np.isfinite(value)
    v = np.where(finite, value, 0.0)
    exponent = np.maximum(np.frexp(v)[1] - 1, fmt.emin)
    quantum = np.ldexp(1.0, np.where(v == 0, fmt.emin, exponent) - (fmt.precision - 1))
    steps = v / quantum
    whole = {"nearest_even": np.rint, "toward_zero": np.trunc, "toward_positive": np.ceil, "toward_negative": np.floor}
    rounded = whole[mode](steps) * quantum
    stays: Any = {"nearest_even": False, "toward_zero": True, "toward_positive": v < 0, "toward_negative": v > 0}[mode]
    limit = np.where(stays, fmt.maximum, np.inf)
    rounded = np.where(np.abs(rounded) > fmt.maximum, np.copysign(limit, v), rounded)
    return np.asarray(np.where(finite, np.copysign(rounded, v), value))


def same(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> Bool:
    """Whether encodings are equal; all NaNs are equal."""
    bits_a, bits_b = (np.ascontiguousarray(v).view(f"i{v.dtype.itemsize}") for v in (a, b))
    return np.asarray((bits_a == bits_b) | (np.isnan(a) & np.isnan(b)))


def distance(name: str, x: float) -> float | None:
    """Return the distance of f(x) from the nearest boundary in half quanta; None on it or beyond the range."""
    function = FUNCTIONS[name]
    rounded = np.array([function.exact(x)])
    low, high = (int(c[0]) for c in cells(rounded, rounded))
    return None if low == high else part_of_cell(function, x, low)


def part_of_cell(function: Function, x: float, cell: int) -> float | None:
    """Return the distance of f(x) in this open cell from its nearer end in half quanta; None without an end."""
    if not -TOP_CELL <= cell < TOP_CELL:
        return None
    with gmpy2.context(precision=200):
        below, above = map(_boundary, (cell, cell + 1))
        part = (function.wide(x, _WIDE_BITS if function.known else 200) - below) / (above - below)
        return float(min(part, 1 - part))


def _boundary(index: int) -> float:
    """Return the multiple of half a quantum with this number."""
    k = abs(index)
    normal = float(np.int64(_LEAST_NORMAL + ((k - (1 << 24)) << 28)).view(np.float64))
    size = normal if k > 1 << 24 else k / HALF_QUANTA
    return -size if index < 0 else size
