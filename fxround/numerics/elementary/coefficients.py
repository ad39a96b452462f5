"""Where every polynomial coefficient comes from: a fit is a function, an interval and a degree.

What is true here. ``FITS`` names the polynomials; ``derive`` recomputes one with mpmath, and a test asserts that
the literals in ``tables`` are what it returns. A fit is the interpolant of ``function`` at the Chebyshev
points of [low, high], computed with 400 bits, written in powers of (x - centre), each coefficient rounded
to binary64. Its error is within a small factor of the best polynomial's, and is part of each function's bound.

Why it is safe. mpmath is imported inside ``derive``: the package needs it only to be tested.

    before   static const double Lg1 = 6.666666666666735130e-01;   # whence?
    after    "log": Fit("log1p on (2 + f)s", lambda m, z: ..., low=0.0, high=0.0295, degree=7)
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class Fit:
    """A polynomial in (x - centre) of this degree for ``function(mpmath, x)`` on [low, high]."""

    function: Callable[[Any, Any], Any]
    low: float
    high: float
    degree: int
    centre: float = 0.0


def _at_zero(limit: Callable[[Any], Any], function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda m, x: function(m, x) if abs(x) > 1e-60 else limit(m)


def _ratio(f: str, z: Any, m: Any) -> Any:
    """f(s) / s as a function of z = s^2."""
    return getattr(m, f)(m.sqrt(z)) / m.sqrt(z)


def _inverse_ratio(m: Any, w: Any) -> Any:
    """erfinv(x) / x, where w = -log(1 - x^2)."""
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
    "quick_cos": Fit(_at_zero(lambda m: -m.mpf(1) / 2, lambda m, z: (m.cos(m.sqrt(z)) - 1) / z), 0.0, 0.61686, 4),
}


def derive(fit: Fit) -> tuple[float, ...]:
    """The coefficients, lowest power first. Needs mpmath."""
    import mpmath  # type: ignore[import-untyped]

    with mpmath.workprec(400):
        low, high, count = mpmath.mpf(fit.low), mpmath.mpf(fit.high), fit.degree + 1
        points = [
            (low + high) / 2 + (high - low) / 2 * mpmath.cos(mpmath.pi * (2 * i + 1) / (2 * count))
            for i in range(count)
        ]
        powers = mpmath.matrix([[(x - fit.centre) ** j for j in range(count)] for x in points])
        solution = mpmath.lu_solve(powers, mpmath.matrix([fit.function(mpmath, x) for x in points]))
        return tuple(float(c) for c in solution)


if __name__ == "__main__":
    for name in sys.argv[1:] or FITS:
        print(f'    "{name}": (')
        print("\n".join(f"        {c!r}," for c in derive(FITS[name])))
        print("    ),")
