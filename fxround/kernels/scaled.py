"""A scaled rounding as two programs: the scale of each block, and the elements. Each statement is rounded once.

For mxfp8 of a float32 tensor, where x0 is the largest finite magnitude of a block, and then x0 an element and x1 the
scale of its block:

    t0 = div(x0, 0x1p+8) @ e8m0fnu/toward_zero/saturate

    t0 = div(x0, x1) @ e4m3fn/nearest_even/saturate
    t1 = mul(t0, x1) @ binary32/nearest_even/inf

The specification is ``numerics.exact_scaled``.
"""

from __future__ import annotations

import math
from functools import lru_cache

from fxround.kernels.program import Program, Statement
from fxround.numerics.formats import Format
from fxround.numerics.modes import MODES, Rounding
from fxround.numerics.scaled import ScaledRounding, Scaling


@lru_cache(maxsize=1024)
def scale_program(rounding: ScaledRounding, carrier: Format) -> Program:
    """Return the program of the scales: x0 is a block's largest finite magnitude, x1 that of the tensor, if needed.

    carrier: the format of the scales' tensor, binary64 for a tensor of binary64 and binary32 for any other.

    Raises ValueError for fixed point, which has no scale.
    """
    scaling = rounding.format.scaling
    if scaling is None:
        raise ValueError(f"{rounding.format} has no scale")
    written = _Statements()
    _scale(written, scaling, rounding.format.element, carrier)
    return Program(tuple(written.statements))


@lru_cache(maxsize=1024)
def element_program(rounding: ScaledRounding, stored: Format) -> Program:
    """Return the program of the elements of a tensor that is stored in this format: x0 an element, x1 its scale."""
    written = _Statements()
    if rounding.format.scaling is None:
        _fixed(written, rounding, stored)
    else:
        written.add("mul", written.add("div", "x0", "x1", rounding.element), "x1", _nearest(stored))
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
    """Write the scale's statements, of which the last one is the scale; return its target."""
    most, divisor = "x0", scaling.divisor(element)
    if scaling.how == "even" and scaling.whole is None:
        # The quotient is rounded, not the magnitude, which may round to a power of two beyond the carrier.
        largest = math.ldexp(2.0 - math.ldexp(1.0, 1 - element.precision), carrier.emax)
        unbounded = Format.custom(precision=element.precision, emin=scaling.format.emin, maximum=largest)
        quotient = written.add("div", most, divisor, Rounding(unbounded, MODES["nearest_away"], "inf"))
        return _positive(written, written.add("identity", quotient, scaling.rounding), scaling.format)
    if scaling.how == "even":
        unbounded = Format.custom(precision=element.precision, emin=-1022, maximum=2.0**1023).with_range_of(carrier)
        most = written.add("identity", most, Rounding(unbounded, MODES["nearest_away"], "inf"))
    if scaling.whole is None:
        return _positive(written, written.add("div", most, divisor, scaling.rounding), scaling.format)
    # A scale saturates: an infinite one would make NaNs of finite elements.
    wide = Rounding(scaling.whole, MODES["nearest_even"], "saturate")
    outer = _positive(written, written.add("div", "x1", divisor * scaling.format.maximum, wide), scaling.whole)
    inner = written.add("div", written.add("div", most, outer, wide), divisor, scaling.rounding)
    scale = written.add("mul", _positive(written, inner, scaling.format), outer, wide)
    return _positive(written, scale, scaling.whole)


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
