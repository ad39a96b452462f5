"""The derivation of every polynomial coefficient and table: a fit is a function, an interval and a degree.

``FITS`` names the polynomials, ``TABLES`` the tables and ``EXPANSIONS`` the Taylor series. ``derive`` recomputes a
polynomial with mpmath, and a test asserts that the literals in ``coefficients`` are what it returns. A fit is the
interpolant of ``function`` at the Chebyshev points of [low, high], computed with 400 bits, written in powers of (x -
centre), each coefficient rounded to ``bits`` bits. Its error is within a small factor of the best polynomial's, and is
part of each function's bound. mpmath is imported by the functions that need it: only tests do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final


@dataclass(frozen=True)
class Fit:
    """A polynomial in (x - centre) of a given degree for ``function(mpmath, x)`` on [low, high].

    Its coefficients have ``bits`` bits.
    """

    function: Callable[[Any, Any], Any]
    low: float
    high: float
    degree: int
    centre: float = 0.0
    bits: int = 53


@dataclass(frozen=True)
class Table:
    """The binary32 numbers nearest to ``function(mpmath, j)`` for j = 0 ... count - 1."""

    function: Callable[[Any, int], Any]
    count: int


def _at_zero(limit: Callable[[Any], Any], function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda m, x: function(m, x) if abs(x) > 1e-60 else limit(m)


def _ratio(f: str, z: Any, m: Any) -> Any:
    """Return f(s) / s as a function of z = s^2."""
    return getattr(m, f)(m.sqrt(z)) / m.sqrt(z)


def _inverse_ratio(m: Any, w: Any) -> Any:
    """Return erfinv(x) / x, where w = -log(1 - x^2)."""
    x = m.sqrt(-m.expm1(-w))
    return m.erfinv(x) / x


FITS: Final[dict[str, Fit]] = {
    # exp(r) = 1 + r + r^2 Q(r), |r| <= log(2)/2
    "exp": Fit(_at_zero(lambda m: 0.5, lambda m, r: (m.exp(r) - 1 - r) / r**2), -0.34658, 0.34658, 10),
    # 2 atanh(s) = 2 s + s z P(z), z = s^2, |s| <= (sqrt(2) - 1)/(sqrt(2) + 1)
    "log": Fit(_at_zero(lambda m: m.mpf(2) / 3, lambda m, z: (2 * _ratio("atanh", z, m) - 2) / z), 0.0, 0.02945, 7),
    # atanh(s) = s + s z (1/3 + z P(z)): the tail after the two terms that pow keeps in pairs
    "log_tail": Fit(
        _at_zero(lambda m: m.mpf(1) / 5, lambda m, z: (_ratio("atanh", z, m) - 1 - z / 3) / z**2), 0.0, 0.02945, 7
    ),
    # sin(r) = r + r z P(z), cos(r) = 1 - z/2 + z^2 P(z), z = r^2, |r| <= pi/4
    "sin": Fit(_at_zero(lambda m: -m.mpf(1) / 6, lambda m, z: (_ratio("sin", z, m) - 1) / z), 0.0, 0.61686, 6),
    "cos": Fit(_at_zero(lambda m: m.mpf(1) / 24, lambda m, z: (m.cos(m.sqrt(z)) - 1 + z / 2) / z**2), 0.0, 0.61686, 6),
    # sinh(r) = r + r z P(z), cosh(r) = 1 + z/2 + z^2 P(z), z = r^2, |r| <= log(2)/2
    "sinh": Fit(_at_zero(lambda m: m.mpf(1) / 6, lambda m, z: (_ratio("sinh", z, m) - 1) / z), 0.0, 0.1202, 5),
    "cosh": Fit(_at_zero(lambda m: m.mpf(1) / 24, lambda m, z: (m.cosh(m.sqrt(z)) - 1 - z / 2) / z**2), 0.0, 0.1202, 4),
    # asin(s) = s + s z P(z), z = s^2 <= 1/4; atan(t) = t + t z P(z), z = t^2, |t| <= tan(pi/8)
    "asin": Fit(_at_zero(lambda m: m.mpf(1) / 6, lambda m, z: (_ratio("asin", z, m) - 1) / z), 0.0, 0.25, 12),
    "atan": Fit(_at_zero(lambda m: -m.mpf(1) / 3, lambda m, z: (_ratio("atan", z, m) - 1) / z), 0.0, 0.17158, 11),
    # erf(x) = x (2/sqrt(pi) + z P(z)), z = x^2, |x| <= 3/4
    "erf": Fit(
        _at_zero(lambda m: -2 / (3 * m.sqrt(m.pi)), lambda m, z: (_ratio("erf", z, m) - 2 / m.sqrt(m.pi)) / z),
        0.0,
        0.5625,
        10,
    ),
    # erfc(x) exp(x^2) = u P(u - 0.15), u = 1 / (x + 3), 3/4 <= x <= 27.5
    "erfc": Fit(lambda m, u: m.exp((1 / u - 3) ** 2) * m.erfc(1 / u - 3) / u, 1 / 30.5, 1 / 3.75, 21, centre=0.15),
    # erfinv(x) = x P(w), w = -log(1 - x^2) < 5; x P(sqrt(w)) beyond, up to w = 36.05 at 1 - 2^-53
    "erfinv": Fit(lambda m, w: _inverse_ratio(m, w), 1e-12, 5.0, 23, centre=2.5),
    "erfinv_middle": Fit(lambda m, s: _inverse_ratio(m, s * s), 2.236, 4.0, 23, centre=3.0),
    "erfinv_far": Fit(lambda m, s: _inverse_ratio(m, s * s), 4.0, 6.01, 20, centre=5.0),
    # quick.py. (exp(r) - 1) / r, |r| <= log(2)/2: 2^-37; log1p(f) / f and log2(1 + f) / f on [sqrt(1/2), sqrt(2)] - 1:
    # 2^-38 and 2^-51; erf(x) / x, z = x^2 <= 16: 2^-38; (sin(r) / r - 1) / z and (cos(r) - 1) / z, |r| <= pi/4: 2^-42
    "quick_exp": Fit(_at_zero(lambda m: 1, lambda m, r: m.expm1(r) / r), -0.34658, 0.34658, 7),
    "quick_log": Fit(_at_zero(lambda m: 1, lambda m, f: m.log1p(f) / f), -0.2929, 0.4143, 13),
    "quick_power": Fit(_at_zero(lambda m: 1 / m.log(2), lambda m, f: m.log1p(f) / f / m.log(2)), -0.2929, 0.4143, 19),
    "quick_erf": Fit(_at_zero(lambda m: 2 / m.sqrt(m.pi), lambda m, z: _ratio("erf", z, m)), 0.0, 16.0, 20, centre=8.0),
    "quick_sin": Fit(_at_zero(lambda m: -m.mpf(1) / 6, lambda m, z: (_ratio("sin", z, m) - 1) / z), 0.0, 0.61686, 4),
    # single.py. (exp(r) - 1 - r) / r^2, |r| <= log(2)/64; (log1p(f) - f) / f^2, |f| <= 1/64
    "single_log": Fit(_at_zero(lambda m: -0.5, lambda m, f: (m.log1p(f) - f) / f**2), -0.01563, 0.01563, 3, bits=24),
    "single_exp": Fit(_at_zero(lambda m: 0.5, lambda m, r: (m.exp(r) - 1 - r) / r**2), -0.0109, 0.0109, 2, bits=24),
    "quick_cos": Fit(_at_zero(lambda m: -m.mpf(1) / 2, lambda m, z: (m.cos(m.sqrt(z)) - 1) / z), 0.0, 0.61686, 4),
}


PAIRED: Final = {
    # erfc(x) exp(x^2) = u P(u - 0.15) as above, to 2^-96
    "erfc": Fit(lambda m, u: m.exp((1 / u - 3) ** 2) * m.erfc(1 / u - 3) / u, 1 / 30.5, 1 / 3.75, 35, centre=0.15),
}
"""Polynomials whose coefficients are pairs."""


def _rounded_power(m: Any, j: int) -> Any:
    """Return 2^(j/32) in binary32."""
    return m.mpf(_rounded(m, m.mpf(2) ** (m.mpf(j) / 32), 24))


def _inverse(m: Any, j: int) -> Any:
    """Return 32 / (32 + j) in binary32."""
    return m.mpf(_rounded(m, m.mpf(32) / (32 + j), 24))


def _short_log(m: Any, j: int) -> Any:
    """Return -log of ``_inverse``, rounded to a multiple of 2^-16."""
    return m.nint(-m.log(_inverse(m, j)) * 2**16) / 2**16


def _piece(power: int, rest: bool = False) -> Table:
    """Return the table of one power's coefficients over the 32 pieces of erf(a) / a.

    rest: of what the binary32 coefficients lack instead.
    """

    def value(m: Any, j: int) -> Any:
        exact = _erf_pieces(m, j)[power]
        return exact - m.mpf(_rounded(m, exact, 24)) if rest else exact

    return Table(value, 32)


TABLES: Final[dict[str, Table]] = {
    # 2^(j/32), and by how much j log(2)/32 exceeds the logarithm of its binary32 value
    "exp_power": Table(lambda m, j: m.mpf(2) ** (m.mpf(j) / 32), 32),
    "exp_excess": Table(lambda m, j: j * m.log(2) / 32 - m.log(_rounded_power(m, j)), 32),
    # c = 32 / (32 + j), and -log of its binary32 value in two parts, the first a multiple of 2^-16
    "log_inverse": Table(_inverse, 32),
    "log_head": Table(_short_log, 32),
    "log_rest": Table(lambda m, j: -m.log(_inverse(m, j)) - _short_log(m, j), 32),
    # The coefficients of erf(a) / a around the multiples of 1/8
    **{f"erf_{power}": _piece(power) for power in range(7)},
    **{f"erf_rest_{power}": _piece(power, rest=True) for power in (0, 1)},
}


@dataclass(frozen=True)
class Expansion:
    """Taylor's series of a function at a zero, from the first power on. Each number is a sum of binary64 numbers."""

    zero: Callable[[Any], Any]
    coefficient: Callable[[Any, int], Any]
    terms: int = 11


def _digamma_zero(m: Any) -> Any:
    return m.findroot(m.digamma, m.mpf("1.4616321449683623"))


EXPANSIONS: Final[dict[str, Expansion]] = {
    "lgamma_one": Expansion(lambda m: m.mpf(1), lambda m, k: -m.euler if k == 1 else (-1) ** k * m.zeta(k) / k),
    "lgamma_two": Expansion(
        lambda m: m.mpf(2), lambda m, k: 1 - m.euler if k == 1 else (-1) ** k * (m.zeta(k) - 1) / k
    ),
    "digamma": Expansion(_digamma_zero, lambda m, k: m.psi(k, _digamma_zero(m)) / m.factorial(k)),
}


def expand(expansion: Expansion) -> tuple[tuple[float, ...], ...]:
    """Return the zero as three numbers, then each coefficient as two. Needs mpmath."""
    import mpmath  # type: ignore[import-untyped]

    with mpmath.workprec(400):
        rest = [_parts(mpmath, expansion.coefficient(mpmath, k), 2) for k in range(1, expansion.terms + 1)]
        return _parts(mpmath, expansion.zero(mpmath), 3), *rest


def _parts(m: Any, value: Any, count: int) -> tuple[float, ...]:
    """Return ``count`` binary64 numbers whose sum is the value to their joint precision."""
    head = float(value)
    return (head,) if count == 1 else (head, *_parts(m, value - head, count - 1))


def derive(fit: Fit) -> tuple[float, ...]:
    """Return the coefficients, lowest power first. Needs mpmath."""
    import mpmath

    with mpmath.workprec(400):
        return tuple(_rounded(mpmath, c, fit.bits) for c in _interpolant(mpmath, fit))


def derive_pairs(fit: Fit) -> tuple[tuple[float, ...], ...]:
    """Return the coefficients as pairs, lowest power first. Needs mpmath."""
    import mpmath

    with mpmath.workprec(600):
        return tuple(_parts(mpmath, c, 2) for c in _interpolant(mpmath, fit))


def _interpolant(m: Any, fit: Fit) -> tuple[Any, ...]:
    low, high, count = m.mpf(fit.low), m.mpf(fit.high), fit.degree + 1
    points = [(low + high) / 2 + (high - low) / 2 * m.cos(m.pi * (2 * i + 1) / (2 * count)) for i in range(count)]
    powers = m.matrix([[(x - fit.centre) ** j for j in range(count)] for x in points])
    return tuple(m.lu_solve(powers, m.matrix([fit.function(m, x) for x in points])))


@cache
def _erf_pieces(m: Any, j: int) -> tuple[Any, ...]:
    """Return the coefficients of erf(a) / a in powers of a - j/8, |a - j/8| <= 1/16, unrounded."""
    ratio = _at_zero(lambda m: 2 / m.sqrt(m.pi), lambda m, a: m.erf(a) / a)
    return _interpolant(m, Fit(lambda m, u: ratio(m, m.mpf(j) / 8 + u), -0.0625, 0.0625, 6))


def tabulate(table: Table) -> tuple[float, ...]:
    """Return the entries of a table. Needs mpmath."""
    import mpmath

    with mpmath.workprec(400):
        return tuple(_rounded(mpmath, table.function(mpmath, j), 24) for j in range(table.count))


def _rounded(m: Any, value: Any, bits: int) -> float:
    """Round to the nearest number of ``bits`` bits.

    A value below 2^-100 is a zero with an error of elimination, and becomes 0.
    """
    with m.workprec(bits):
        return float(+m.mpf(value)) if abs(value) > 2.0**-100 else 0.0


if __name__ == "__main__":
    known: tuple[tuple[Any, Any], ...] = (
        (FITS, derive),
        (PAIRED, derive_pairs),
        (TABLES, tabulate),
        (EXPANSIONS, expand),
    )
    for name, function, row in [(name, function, rows[name]) for rows, function in known for name in rows]:
        if name in (sys.argv[1:] or (name,)):
            print(f'    "{name}": (')
            print("\n".join(f"        {c!r}," for c in function(row)))
            print("    ),")
