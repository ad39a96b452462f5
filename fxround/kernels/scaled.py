"""A scaled rounding as a program: scale, quotient and product are statements of their own, each rounded once.

x0 is the tensor, x1 the largest finite magnitude of each element's block, and x2 that of the tensor, if the scaling
divides by a scale of the whole tensor. For mxfp8 of a float32 tensor:

    t0 = div(x1, 0x1p+8) @ e8m0fnu/toward_zero/saturate
    t1 = div(x0, t0) @ e4m3fn/nearest_even/saturate
    t2 = mul(t1, t0) @ binary32/nearest_even/inf

The specification is ``numerics.exact_scaled``.
"""

from __future__ import annotations

import math
from functools import lru_cache

from fxround.kernels.program import Program, Statement
from fxround.numerics.formats import FORMATS, Format
from fxround.numerics.modes import MODES, Rounding
from fxround.numerics.scaled import ScaledRounding, Scaling


@lru_cache(maxsize=1024)
def scaled_program(rounding: ScaledRounding, stored: Format) -> Program:
    """Return the program of a scaled rounding of a tensor that is stored in this format."""
    written = _Statements()
    scaling = rounding.format.scaling
    if scaling is None:
        _fixed(written, rounding, stored)
    else:
        carrier = FORMATS["binary64" if stored.precision > 24 else "binary32"]
        scale = _scale(written, scaling, rounding.format.element, carrier)
        quotient = written.add("div", "x0", scale, rounding.element)
        written.add("mul", quotient, scale, _nearest(stored))
    return Program(tuple(written.statements))


class _Statements:
    """Statements in order, with targets t0, t1, ..."""

    def __init__(self) -> None:
        self.statements: list[Statement] = []

    def add(self, operator: str, *operands: str | float | Rounding | None) -> str:
        """Append a statement, the last operand of which is its rounding (None: exact); return its target."""
        *read, rounding = operands
        target = f"t{len(self.statements)}"
        self.statements.append(Statement(target, operator, tuple(read), rounding))  # type: ignore[arg-type]
        return target


def _scale(written: _Statements, scaling: Scaling, element: Format, carrier: Format) -> str:
    most, divisor = "x1", scaling.divisor(element)
    if scaling.how == "even":
        unbounded = Format.custom(precision=element.precision, emin=-1022, maximum=2.0**1023).with_range_of(carrier)
        most = written.add("identity", most, Rounding(unbounded, MODES["nearest_away"], "inf"))
    if scaling.whole is None:
        return _positive(written, written.add("div", most, divisor, scaling.rounding), scaling.format)
    wide = _nearest(scaling.whole)
    outer = _positive(written, written.add("div", "x2", divisor * scaling.format.maximum, wide), scaling.whole)
    inner = written.add("div", written.add("div", most, outer, wide), divisor, scaling.rounding)
    return written.add("mul", _positive(written, inner, scaling.format), outer, wide)


def _positive(written: _Statements, scale: str, fmt: Format) -> str:
    """Replace a zero by the smallest positive value of the scale's format."""
    if not fmt.zero:
        return scale
    return written.add("clamp", scale, math.ldexp(1.0, fmt.quantum_exponent), math.inf, None)


def _fixed(written: _Statements, rounding: ScaledRounding, stored: Format) -> None:
    """Fixed point needs no scale; two's complement has one value less above zero than below."""
    found = written.add("identity", "x0", rounding.element)
    least = rounding.format.lowest
    if least is not None:
        most = -least - math.ldexp(1.0, rounding.format.element.quantum_exponent)
        found = written.add("clamp", found, least, most, None)
    if not rounding.format.element.within(stored):
        written.add("identity", found, _nearest(stored))


def _nearest(fmt: Format) -> Rounding:
    return Rounding(fmt, MODES["nearest_even"], fmt.default_overflow)
