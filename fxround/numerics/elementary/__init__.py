"""Elementary functions in the scalar IR: straight-line binary64 code with the same bits on every IEEE machine.

``ELEMENTARY`` is the table of functions: each has a definition and a row in its family's file. ``EXTENDED`` gives
some of them, by name, a second definition in pairs (``extended``). ATen's name of a function of one argument is taken
from its row; a function of two arguments needs rows of ``_BINARY`` in ``operators.rules``, one for each overload.
A definition returns an ``Approximation``, the value as an unevaluated sum of two binary64 numbers. It uses IEEE
+ - * / sqrt fma, integer operations and selects, and in ``single`` tables of constants; it never calls a libm. For
example: ``ELEMENTARY["exp"].build(param("x", "f64"))``.

Each ``error_bound`` exceeds the worst error of a search against MPFR (``benchmarks.adversary``), a short form of which
is a test. Exact values come out exact (exp(0), log(1), exp2(n), ...). For binary32 arguments every unary function,
through ``build_sticky``, is correctly rounded to binary32 and to every narrower format in every deterministic mode:
``benchmarks.exhaustive`` tries all inputs (docs/functions.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from fxround.numerics.elementary import (
    error_function,
    exponential,
    gamma,
    hyperbolic,
    inverse_trigonometric,
    logarithm,
    logistic,
    modulo,
    power,
    roots,
    trigonometric,
)
from fxround.numerics.elementary.extended import EXTENDED
from fxround.numerics.elementary.function import Elementary

_ROWS: Final[tuple[Elementary, ...]] = (
    *exponential.FUNCTIONS,
    *logarithm.FUNCTIONS,
    *logistic.FUNCTIONS,
    *error_function.FUNCTIONS,
    *trigonometric.FUNCTIONS,
    *power.FUNCTIONS,
    *inverse_trigonometric.FUNCTIONS,
    *hyperbolic.FUNCTIONS,
    *roots.FUNCTIONS,
    *modulo.FUNCTIONS,
    *gamma.FUNCTIONS,
)

ELEMENTARY: Final[Mapping[str, Elementary]] = MappingProxyType(
    {row.name: replace(row, extended=EXTENDED.get(row.name)) for row in _ROWS}
)
"""Every elementary function, by name."""
