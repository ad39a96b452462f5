"""Elementary functions in the scalar IR: straight-line binary64 code with the same bits on every IEEE machine.

``ELEMENTARY`` is the table of functions: each has a row here and a definition in its family's file. A definition
returns an ``Approximation``, the value as an unevaluated sum of two binary64 numbers. It uses IEEE + - * / sqrt fma,
integer operations and selects, and in ``single`` tables of constants; it never calls a libm. For example:
``ELEMENTARY["exp"].build(param("x", "f64"))``.

Each ``error_bound`` exceeds the worst error of a search against MPFR (``benchmarks.adversary``), a short form of which
is a test. Exact values come out exact (exp(0), log(1), exp2(n), ...). For binary32 arguments every unary function,
through ``build_sticky``, is correctly rounded to binary32 and to every narrower format in every deterministic mode:
``benchmarks.exhaustive`` tries all inputs (docs/functions.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from fxround.numerics.elementary import quick, single
from fxround.numerics.elementary.approximation import Approximation
from fxround.numerics.elementary.error_function import erf, erfc, erfinv
from fxround.numerics.elementary.exponential import exp, exp2, expm1
from fxround.numerics.elementary.gamma import digamma, lgamma
from fxround.numerics.elementary.hyperbolic import acosh, asinh, atanh, cosh, sinh, tanh
from fxround.numerics.elementary.inverse_trigonometric import acos, asin, atan, atan2
from fxround.numerics.elementary.logarithm import log, log1p, log2, log10
from fxround.numerics.elementary.logistic import sigmoid, softplus
from fxround.numerics.elementary.modulo import fmod, remainder
from fxround.numerics.elementary.power import power
from fxround.numerics.elementary.quick import Quick
from fxround.numerics.elementary.roots import cbrt, hypot, rsqrt
from fxround.numerics.elementary.single import Single
from fxround.numerics.elementary.trigonometric import cos, sin, tan
from fxround.numerics.scalar import Expr, Function, param, widen


@dataclass(frozen=True)
class Elementary:
    """A function of binary64 arguments.

    ``error_bound``: of ``build``, in binary64 ulps, subnormal results included. ``near_zeros``: an additional absolute
    error at negative arguments; it matters next to a zero of the function that is no binary64 number. ``special``: the
    values at special arguments, in words. ``reference``: the function in mpmath's notation. ``source``: the source of
    the method. ``quick``: a short evaluation for binary32 arguments and results to nearest even, or None. ``single``:
    an evaluation in binary32 that is tried before ``quick``, or None.
    """

    name: str
    arity: int
    define: Callable[..., Approximation]
    error_bound: float
    special: str
    reference: str
    source: str
    quick: Callable[..., Quick] | None = None
    single: Callable[..., Single] | None = None
    near_zeros: float = 0.0

    def build(self, *args: Expr) -> Expr:
        """Return the value in binary64, within ``error_bound`` ulps, for f64 expressions."""
        return self.define(*self._checked(args)).nearest()

    def build_rounded_by(self, rule: Callable[[Expr, Expr], Expr], *args: Expr) -> Expr:
        """Return the value as ``rule`` rounds (the nearest binary64 number, what it lost), for the modes that draw."""
        return self.define(*self._checked(args)).rounded_by(rule)

    def build_sticky(self, *args: Expr) -> Expr:
        """Return the value rounded to odd, for a later rounding to at most 51 bits in any deterministic mode."""
        return self.define(*self._checked(args)).sticky()

    @property
    def digest(self) -> str:
        """SHA-256 of the code that binary32 arguments run: a proof by enumeration holds for this code only."""
        params = tuple(param(f"x{i}", "f32") for i in range(self.arity))
        args = tuple(map(widen, params))
        found = self.quick(*args) if self.quick else None
        short = [found.value, found.doubtful()] if found else []
        if self.single:
            first = self.single(*params)
            short += [first.value, first.doubtful()]
        return Function(self.name, params, (self.build_sticky(*args), *short)).digest

    def _checked(self, args: tuple[Expr, ...]) -> tuple[Expr, ...]:
        types = [a.type for a in args]
        if types != ["f64"] * self.arity:
            raise TypeError(f"{self.name} takes {self.arity} f64 expressions, got {types}: widen f32 ones first")
        return args


_ROWS: Final = (
    Elementary("exp", 1, exp, 0.65, "exp(-inf) = +0", "exp(x)", "Tang 1989", quick.exp, single.exp),
    Elementary("exp2", 1, exp2, 0.65, "exact at the integers", "2**x", "Tang 1989"),
    Elementary("expm1", 1, expm1, 1.1, "expm1(+-0) = +-0, expm1(-inf) = -1", "expm1(x)", "Tang 1992"),
    Elementary(
        "log",
        1,
        log,
        0.65,
        "log(+-0) = -inf, log(x < 0) = NaN, log(1) = +0",
        "log(x)",
        "Tang 1990",
        quick.log,
        single.log,
    ),
    Elementary("log2", 1, log2, 0.7, "as log; exact at powers of 2", "log(x, 2)", "Tang 1990"),
    Elementary("log10", 1, log10, 0.7, "as log; exact at powers of 10", "log10(x)", "Tang 1990"),
    Elementary("log1p", 1, log1p, 0.7, "log1p(+-0) = +-0, log1p(-1) = -inf", "log1p(x)", "Tang 1990"),
    Elementary(
        "tanh", 1, tanh, 0.9, "tanh(+-0) = +-0, tanh(+-inf) = +-1", "tanh(x)", "from expm1", quick.tanh, single.tanh
    ),
    Elementary(
        "sigmoid",
        1,
        sigmoid,
        0.65,
        "sigmoid(-inf) = +0, sigmoid(inf) = 1",
        "1/(1+exp(-x))",
        "from exp",
        quick.sigmoid,
        single.sigmoid,
    ),
    Elementary("softplus", 1, softplus, 0.7, "softplus(-inf) = +0", "softplus(x)", "from exp and log1p"),
    Elementary(
        "erf",
        1,
        erf,
        1.1,
        "erf(+-0) = +-0, erf(+-inf) = +-1",
        "erf(x)",
        "Shepherd and Laframboise 1981",
        quick.erf,
        single.erf,
    ),
    Elementary("erfc", 1, erfc, 2.2, "erfc(-inf) = 2, erfc(inf) = +0", "erfc(x)", "Shepherd and Laframboise 1981"),
    Elementary(
        "sin", 1, sin, 0.9, "sin(+-0) = +-0, sin(+-inf) = NaN", "sin(x)", "Payne and Hanek 1983, fdlibm", quick.sin
    ),
    Elementary("cos", 1, cos, 0.95, "cos(+-inf) = NaN", "cos(x)", "Payne and Hanek 1983, fdlibm", quick.cos),
    Elementary("tan", 1, tan, 1.0, "tan(+-0) = +-0, tan(+-inf) = NaN", "tan(x)", "Payne and Hanek 1983, fdlibm"),
    Elementary("pow", 2, power, 0.7, "C23, annex F.10.4.4", "x**y", "Markstein 2000", quick.power),
    Elementary("asin", 1, asin, 0.7, "asin(+-0) = +-0, asin(|x| > 1) = NaN", "asin(x)", "fdlibm"),
    Elementary("acos", 1, acos, 0.7, "acos(1) = +0, acos(|x| > 1) = NaN", "acos(x)", "fdlibm"),
    Elementary("atan", 1, atan, 0.75, "atan(+-0) = +-0", "atan(x)", "fdlibm"),
    Elementary("atan2", 2, atan2, 0.75, "C23, annex F.10.1.4", "atan2(x, y)", "fdlibm"),
    Elementary("sinh", 1, sinh, 0.8, "sinh(+-0) = +-0", "sinh(x)", "as exp, even and odd parts"),
    Elementary("cosh", 1, cosh, 0.8, "cosh(0) = 1", "cosh(x)", "as exp, even and odd parts"),
    Elementary("asinh", 1, asinh, 0.8, "asinh(+-0) = +-0", "asinh(x)", "from log1p"),
    Elementary("acosh", 1, acosh, 0.8, "acosh(1) = +0, acosh(x < 1) = NaN", "acosh(x)", "from log1p"),
    Elementary("atanh", 1, atanh, 0.8, "atanh(+-1) = +-inf, atanh(|x| > 1) = NaN", "atanh(x)", "from log1p"),
    Elementary("cbrt", 1, cbrt, 0.501, "cbrt(+-0) = +-0; exact cubes are exact", "sign(x)*cbrt(abs(x))", "Householder"),
    Elementary("rsqrt", 1, rsqrt, 0.501, "rsqrt(+-0) = +-inf, NaN below", "1/sqrt(x)", "Markstein 2000"),
    Elementary("hypot", 2, hypot, 0.501, "hypot(+-inf, NaN) = +inf", "hypot(x, y)", "Borges 2020"),
    Elementary(
        "fmod", 2, fmod, 0.0, "fmod(x, 0) = fmod(inf, y) = NaN", "sign(x)*fmod(abs(x), abs(y))", "long division"
    ),
    Elementary("remainder", 2, remainder, 0.5, "floored; a zero has the sign of x", "fmod(x, y)", "long division"),
    Elementary("erfinv", 1, erfinv, 2.2, "erfinv(+-1) = +-inf, erfinv(|x| > 1) = NaN", "erfinv(x)", "Giles 2010"),
    Elementary(
        "lgamma",
        1,
        lgamma,
        0.501,
        "lgamma(1) = lgamma(2) = +0, +inf at the poles",
        "re(loggamma(x))",
        "DLMF 5.11.1",
        near_zeros=2.0**-88,
    ),
    Elementary(
        "digamma",
        1,
        digamma,
        0.501,
        "digamma(+-0) = -+inf, NaN at the other poles",
        "digamma(x)",
        "DLMF 5.11.2",
        near_zeros=2.0**-88,
    ),
)

ELEMENTARY: Final[Mapping[str, Elementary]] = MappingProxyType({row.name: row for row in _ROWS})
"""Every elementary function, by name."""
