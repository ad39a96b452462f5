"""A scaled rounding as two programs: the scale of each block, and the elements. Each statement is rounded once.

For mxfp8 of a float32 tensor, where x0 is the largest finite magnitude of a block, and then x0 an element and x1 the
scale of its block:

    t0 = div(x0, 0x1p+8) @ e8m0fnu/toward_zero/saturate

    t0 = div(x0, x1) @ e4m3fn/nearest_even/saturate
    t1 = mul(t0, x1) @ binary32/nearest_even/inf

The specification is ``numerics.specification.exact_scaled``.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np

from fxround.kernels.program import Program, Statement
from fxround.numerics.formats import FORMATS, Format
from fxround.numerics.formats.fixed_point import integers
from fxround.numerics.formats.scaled import ScaledFormat, ScaledRounding, Scaling
from fxround.numerics.gradients import SHARPNESS, STEEPEST, unclamped
from fxround.numerics.modes import MODES, Rounding


def carrier_of(stored: Format) -> Format:
    """Return the format of the scales of a tensor that is stored in this one: binary64 for it, else binary32."""
    return FORMATS["binary64" if stored == FORMATS["binary64"] else "binary32"]


def is_scale_of_largest(scaling: Scaling) -> bool:
    """Return whether a block's scale is a program of its largest magnitude, and of the tensor's if it has ``whole``."""
    return scaling.how != "affine" and not scaling.is_state and scaling.percentile is None and not scaling.fit


@lru_cache(maxsize=1024)
def scale_program(rounding: ScaledRounding, carrier: Format, fit: int = 0) -> Program:
    """Return the program of the scales: x0 is a block's largest finite magnitude, x1 that of the tensor, if needed.

    For ``affine``, x0 is the largest value and x1 minus the least one, neither below zero. For ``delayed``, x0 is the
    largest magnitude of the history and x1 the multiplier so far. carrier: the format of the scales' tensor. fit: the
    position among ``Scaling.fit``.

    Raises ValueError for fixed point, which has no scale.
    """
    scaling = rounding.format.scaling
    if scaling is None or scaling.how == "held":
        raise ValueError(f"{rounding.format} has no scale that is made of a tensor")
    written, element = _Statements(), rounding.format.element
    if scaling.how == "affine":
        # Half of the range, which cannot overflow.
        halves = [written.add("mul", side, 0.5, _nearest(carrier)) for side in ("x0", "x1")]
        half = written.add("add", *halves, _nearest(carrier))
        _positive(written, written.add("div", half, element.maximum / 2, scaling.rounding), scaling.format)
    elif scaling.how in ("inverse", "delayed"):
        # A block of zeros has the multiplier 1, and after steps of zeros a delayed one stays what it was.
        one = written.add("clamp", "x0", math.ldexp(1.0, carrier.quantum_exponent), math.inf, None)
        multiplier = written.add("div", scaling.divisor(element), one, scaling.rounding)
        multiplier = _positive(written, multiplier, scaling.format)
        written.add("where_eq", "x0", 0.0, 1.0 if scaling.how == "inverse" else "x1", multiplier, None)
    else:
        _scale(written, scaling, scaling.fit[fit] if scaling.fit else scaling.divisor(element), element, carrier)
    return Program(tuple(written.statements))


@lru_cache(maxsize=1024)
def zero_program(rounding: ScaledRounding, carrier: Format) -> Program:
    """Return the program of zero points: x0 is minus the least value of a block, x1 its scale."""
    element = rounding.format.element
    written = _Statements()
    written.add("div", "x0", "x1", Rounding(element, MODES["nearest_even"], "saturate"))
    return Program(tuple(written.statements))


@lru_cache(maxsize=1024)
def error_program(rounding: ScaledRounding, carrier: Format) -> Program:
    """Return the program of squared errors relative to a block's largest magnitude: x0 an element, x1 a scale, x2 the
    magnitude. The error is that of the rounding to nearest; infinities and NaNs have none.
    """
    written, nearest = _Statements(), _nearest(carrier)
    quotient = written.add("div", "x0", "x1", replace(rounding.element, mode=MODES["nearest_even"]))
    lost = written.add("sub", "x0", written.add("mul", quotient, "x1", nearest), nearest)
    most = written.add("clamp", "x2", math.ldexp(1.0, carrier.quantum_exponent), math.inf, None)
    ratio = written.add("div", lost, most, nearest)
    squared = written.add("mul", ratio, ratio, nearest)
    written.add("where_le", written.add("abs", "x0", None), carrier.maximum, squared, 0.0, None)
    return Program(tuple(written.statements))


@lru_cache(maxsize=64)
def choice_program(count: int) -> Program:
    """Return the program of the best of ``count`` scales: x0, x1, ... the errors, and then the scales."""
    written = _Statements()
    error, scale = "x0", f"x{count}"
    for i in range(1, count):
        better = written.add("where_lt", f"x{i}", error, f"x{count + i}", scale, None)
        if i < count - 1:
            error = written.add("where_lt", f"x{i}", error, f"x{i}", error, None)
        scale = better
    return Program(tuple(written.statements))


@lru_cache(maxsize=1024)
def element_program(rounding: ScaledRounding, stored: Format) -> Program:
    """Return the program of the elements of a tensor that is stored in this format: x0 an element, x1 its scale.

    For ``inverse`` and ``delayed``, x1 is the multiplier; for ``affine``, x2 is the zero point.
    """
    return Program(tuple(_element_statements(rounding, stored)[0].statements))


def _element_statements(rounding: ScaledRounding, stored: Format) -> tuple[_Statements, str]:
    """Return the statements of ``element_program``, and the one whose value is the element that memory would hold."""
    written, carrier = _Statements(), carrier_of(stored)
    scaling = rounding.format.scaling
    if scaling is None:
        return written, _unscaled(written, rounding, stored)
    if scaling.how in ("inverse", "delayed"):
        element = written.add("mul", "x0", "x1", rounding.element)
        own = written.add("reciprocal", "x1", _nearest(carrier))
        written.add("mul", element, own, _nearest(stored))
    elif scaling.how == "affine":
        # Every sum of integers is exact. The wider integers keep what the zero point brings back into the range.
        exact, most = _nearest(carrier), rounding.format.element.maximum
        quotient = written.add("div", "x0", "x1", replace(rounding.element, format=_wider(rounding.format.element)))
        element = written.add("clamp", written.add("add", quotient, "x2", exact), 0.0, most, None)
        written.add("mul", written.add("sub", element, "x2", exact), "x1", _nearest(stored))
    else:
        element = written.add("div", "x0", "x1", rounding.element)
        written.add("mul", element, "x1", _nearest(stored))
    return written, element


@lru_cache(maxsize=1024)
def clamped_program(rounding: ScaledRounding, stored: Format) -> Program:
    """Return the program that yields 1 where an element is clamped, else 0; operands as for ``element_program``.

    An element is clamped if its quotient, rounded as if the element had any size, is beyond the bounds. The first
    statement draws the bits that the element draws.
    """
    written, form, scaling = _Statements(), rounding.format, rounding.format.scaling
    wide = unclamped(rounding.element)
    least, most = form.span or (-form.element.maximum, form.element.maximum)
    if scaling is None:
        whole = form.unit is None
        quotient = written.add("identity", "x0", wide) if whole else written.add("div", "x0", form.unit, wide)
    elif scaling.how == "inverse":
        quotient = written.add("mul", "x0", "x1", wide)
    else:
        quotient = written.add("div", "x0", "x1", wide)
    if scaling is not None and scaling.how == "affine":
        quotient, least = written.add("add", quotient, "x2", _nearest(carrier_of(stored))), 0.0
    below = written.add("where_lt", quotient, least, 1.0, 0.0, None)
    written.add("where_lt", most, quotient, 1.0, below, None)
    return Program(tuple(written.statements))


@lru_cache(maxsize=1024)
def estimated_program(rounding: Rounding | ScaledRounding, stored: Format) -> Program:
    """Return the program of the derivative that ``numerics.gradients`` estimates; operands as for ``element_program``.

    Each step is rounded to nearest in the carrier, the result to the format in which it is stored. The neighbours are
    those of the quotient of element and scale.
    """
    written, nearest = _Statements(), _nearest(carrier_of(stored))
    if isinstance(rounding, ScaledRounding):
        value, grid, span = _quotient(written, rounding, nearest), rounding.format.element, _span(rounding.format)
    else:
        value, grid, span = "x0", rounding.format, None
    sides = [Rounding(grid, MODES[mode], "saturate") for mode in ("toward_negative", "toward_positive")]
    if span is None:
        low, high = (written.add("identity", value, side) for side in sides)
    else:
        wide = (written.add("identity", value, unclamped(side)) for side in sides)
        low, high = (written.add("clamp", side, *span, None) for side in wide)
    above, below = written.add("sub", value, low, nearest), written.add("sub", high, value, nearest)
    step = written.add("sub", high, low, nearest)
    centered = written.add("abs", written.add("sub", above, below, nearest), None)
    place = written.add("div", centered, step, nearest)
    power = _in(nearest.format, 1 / SHARPNESS - 1)
    flattest = _in(nearest.format, 1 / SHARPNESS)
    slope = written.add("mul", written.add("pow", place, power, nearest), flattest, nearest)
    slope = written.add("clamp", slope, 0.0, STEEPEST, None)
    # Where both neighbours are one: a number of the grid, one beyond an end that is rounded to it, or one that clamps.
    rounded = written.add("identity", value, unclamped(Rounding(grid, MODES["nearest_even"], "saturate")))
    ends = span or ((-grid.maximum, grid.maximum) if grid.signed else (grid.maximum,))
    at_end: str | float = 0.0
    for end in ends:
        at_end = written.add(
            "where_eq", low, end, written.add("where_eq", rounded, end, flattest, 0.0, None), at_end, None
        )
    on_grid = written.add("where_eq", value, low, flattest, at_end, None)
    slope = written.add("where_eq", low, high, on_grid, slope, None)
    written.add("identity", slope, _nearest(stored))
    return Program(tuple(written.statements))


def _quotient(written: _Statements, rounding: ScaledRounding, nearest: Rounding) -> str:
    """Write an element's quotient by its scale, plus the zero point; return its target."""
    form, scaling = rounding.format, rounding.format.scaling
    if scaling is None:
        return "x0" if form.unit is None else written.add("div", "x0", form.unit, nearest)
    quotient = written.add("mul" if scaling.how in ("inverse", "delayed") else "div", "x0", "x1", nearest)
    return written.add("add", quotient, "x2", nearest) if scaling.how == "affine" else quotient


def _span(form: ScaledFormat) -> tuple[float, float] | None:
    """Return the ends of the elements where they are not those of their format."""
    affine = form.scaling is not None and form.scaling.how == "affine"
    return (0.0, form.element.maximum) if affine else form.span


def _in(fmt: Format, constant: float) -> float:
    """Return a constant to nearest in binary32 or binary64."""
    return constant if fmt == FORMATS["binary64"] else float(np.float32(constant))


@lru_cache(maxsize=1024)
def element_parts(rounding: ScaledRounding, stored: Format) -> tuple[Program, Program]:
    """Return the program of the elements that memory would hold, in the carrier, and that of the rest.

    The operands are those of ``element_program``; x0 of the rest is an element.
    """
    written, element = _element_statements(rounding, stored)
    position = next(i for i, s in enumerate(written.statements) if s.target == element)
    first, rest = written.statements[: position + 1], written.statements[position + 1 :]
    if not rest:
        return Program(tuple(first)), Program((Statement("t0", "identity", ("x0",), _nearest(stored)),))
    names = {element: "x0"} | {s.target: f"t{i}" for i, s in enumerate(rest)}
    renamed = (
        replace(s, target=names[s.target], operands=tuple(names.get(str(o), o) for o in s.operands)) for s in rest
    )
    return Program(tuple(first)), Program(tuple(renamed))


@lru_cache(maxsize=1024)
def inner_program(rounding: ScaledRounding, carrier: Format, fit: int = 0) -> Program:
    """Return the program of the scales of blocks as they are stored, relative to a scale of the tensor.

    The operands are those of ``scale_program``.
    """
    scaling, element = rounding.format.scaling, rounding.format.element
    assert scaling is not None
    written = _Statements()
    _relative(written, scaling, scaling.fit[fit] if scaling.fit else scaling.divisor(element), element, carrier)
    return Program(tuple(written.statements))


@lru_cache(maxsize=1024)
def outer_program(rounding: ScaledRounding) -> Program:
    """Return the program of the scales by which elements are multiplied: x0 is a block's, x1 that of the tensor.

    It is that of ``scale_program``, also for scales that are zero or negative after bits of them have flipped.
    """
    scaling = rounding.format.scaling
    assert scaling is not None and scaling.whole is not None
    written, wide = _Statements(), Rounding(scaling.whole, MODES["nearest_even"], "saturate")
    product = written.add("mul", "x0", "x1", wide)
    least = math.ldexp(1.0, scaling.whole.quantum_exponent)
    other = written.add("where_eq", "x0", 0.0, 0.0, least, None)
    other = written.add("where_eq", "x1", 0.0, 0.0, other, None)
    written.add("where_eq", product, 0.0, other, product, None)
    return Program(tuple(written.statements))


@lru_cache(maxsize=1024)
def whole_program(rounding: ScaledRounding) -> Program:
    """Return the program of the scale of the tensor as it is stored: x0 is the tensor's largest magnitude."""
    scaling, element = rounding.format.scaling, rounding.format.element
    assert scaling is not None
    written = _Statements()
    _outer(written, scaling, element, "x0")
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


def _scale(written: _Statements, scaling: Scaling, divisor: float, element: Format, carrier: Format) -> str:
    """Write the scale's statements, of which the last one is the scale; return its target."""
    most = "x0"
    if scaling.whole is not None:
        inner, outer = _relative(written, scaling, divisor, element, carrier)
        # A scale saturates: an infinite one would make NaNs of finite elements.
        wide = Rounding(scaling.whole, MODES["nearest_even"], "saturate")
        return _positive(written, written.add("mul", inner, outer, wide), scaling.whole)
    if scaling.how == "even":
        # The quotient is rounded, not the magnitude, which may round to a power of two beyond the carrier.
        largest = math.ldexp(2.0 - math.ldexp(1.0, 1 - element.precision), carrier.emax)
        unbounded = Format.custom(precision=element.precision, emin=scaling.format.emin, maximum=largest)
        quotient = written.add("div", most, divisor, Rounding(unbounded, MODES["nearest_away"], "inf"))
        return _positive(written, written.add("identity", quotient, scaling.rounding), scaling.format)
    return _positive(written, written.add("div", most, divisor, scaling.rounding), scaling.format)


def _relative(
    written: _Statements, scaling: Scaling, divisor: float, element: Format, carrier: Format
) -> tuple[str, str]:
    """Write the statements of a block's scale relative to the tensor's; return the targets of both."""
    assert scaling.whole is not None
    most = "x0"
    if scaling.how == "even":
        unbounded = Format.custom(precision=element.precision, emin=-1022, maximum=2.0**1023).with_range_of(carrier)
        most = written.add("identity", most, Rounding(unbounded, MODES["nearest_away"], "inf"))
    wide = Rounding(scaling.whole, MODES["nearest_even"], "saturate")
    outer = _outer(written, scaling, element)
    inner = written.add("div", written.add("div", most, outer, wide), divisor, scaling.rounding)
    return _positive(written, inner, scaling.format), outer


def _outer(written: _Statements, scaling: Scaling, element: Format, most: str = "x1") -> str:
    """Write the scale of the tensor, with the largest magnitude ``most``; return its target."""
    assert scaling.whole is not None
    # It is relative to the element format's largest value whatever the block is fitted to.
    largest = scaling.divisor(element) * scaling.format.maximum
    quotient = written.add("div", most, largest, Rounding(scaling.whole, MODES["nearest_even"], "saturate"))
    return _positive(written, quotient, scaling.whole)


def _positive(written: _Statements, scale: str, fmt: Format) -> str:
    """Replace a zero by the smallest positive value of the scale's format."""
    if not fmt.zero:
        return scale
    return written.add("clamp", scale, math.ldexp(1.0, fmt.quantum_exponent), math.inf, None)


def _unscaled(written: _Statements, rounding: ScaledRounding, stored: Format) -> str:
    """Write the statements of elements that share no scale: fixed point, or a scale that is given.

    Return the target of the element.
    """
    form, carrier = rounding.format, carrier_of(stored)
    if form.unit is None and not form.element.within(stored):
        least, most = form.span or (-form.element.maximum, form.element.maximum)
        raise ValueError(
            f"numbers from {least:g} to {most:g} in steps of 2^{form.element.quantum_exponent} have "
            f"{form.element.precision} significant bits, and a {stored} tensor cannot store all; use a wider dtype"
        )
    used = rounding.multiples(carrier) if rounding.overflow == "wrap" else rounding.element
    quotient = written.add("identity", "x0", used) if form.unit is None else written.add("div", "x0", form.unit, used)
    if rounding.overflow == "wrap":
        quotient = _wrapped(written, quotient, form, stored if form.unit is None else carrier, carrier)
    elif form.span is not None:
        quotient = written.add("clamp", quotient, *form.span, None)
    if form.unit is not None:
        written.add("mul", quotient, form.unit, _nearest(stored))
    return quotient


def _wrapped(written: _Statements, value: str, form: ScaledFormat, result: Format, carrier: Format) -> str:
    """Write value modulo the number of elements, within their span; infinities become NaN.

    Each step is exact. result: a format that has the elements.
    """
    assert form.span is not None
    (least, most), exact = form.span, _nearest(carrier)
    count = most - least + math.ldexp(1.0, form.element.quantum_exponent)
    rest = written.add("remainder", value, count, exact)
    folded = written.add("where_le", rest, most, rest, written.add("sub", rest, count, exact), None)
    # -0 becomes +0.
    return written.add("add", folded, 0.0, _nearest(result))


def _wider(element: Format) -> Format:
    """Return the integers of one bit more."""
    return integers(element.precision + 2)


def _nearest(fmt: Format) -> Rounding:
    return Rounding(fmt, MODES["nearest_even"], fmt.default_overflow)
