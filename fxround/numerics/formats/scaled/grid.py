"""Which numbers are values of a scaled format, for scales that are known.

A value is R(q s), with q an element, s the scale of its block, and R the rounding to the tensor's own format. The
quotient of a number by the scale lies between two elements, and one of these gives the number if any element does: the
rounding to nearest is monotone. The check shares the rows of formats with the kernels, and none of their programs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fxround.numerics.arithmetic.rounding import rounding_function
from fxround.numerics.formats import Format
from fxround.numerics.formats.encodings import Encoding
from fxround.numerics.formats.fixed_point import integers
from fxround.numerics.formats.scaled import ScaledRounding
from fxround.numerics.modes import MODES, Rounding

Array = npt.NDArray[np.float64]
_TOWARDS: Final = ("toward_negative", "toward_positive")


def outside_grid(
    values: Array, rounding: ScaledRounding, read: Sequence[Array], stored: Format, carrier: Format
) -> npt.NDArray[np.bool_]:
    """Return which values no element and scale make; a NaN is a value of every format.

    read: what the elements' program reads besides a number: its scale, for ``inverse`` and ``delayed`` its multiplier,
    and for ``affine`` its zero point too; each of a shape that broadcasts to that of the values. stored: the format of
    the tensor. carrier: that of the scales.
    """
    form, scaling = rounding.format, rounding.format.scaling
    scale: Any = np.float64(form.unit or 1.0) if scaling is None else read[0]
    if scaling is not None and scaling.how in ("inverse", "delayed"):
        scale = _rounded(1.0 / scale, carrier)
    least, most = form.span or (-math.inf, math.inf)
    element, zero, integers_of = form.element, np.zeros(()), Encoding.of_elements(form).integers
    if scaling is not None and scaling.how == "affine":
        element, zero, least, most = integers(element.precision + 2), read[1], 0.0, element.maximum
    elif integers_of is not None:
        # A fault can make all values that have a code.
        quantum, digits = math.ldexp(1.0, element.quantum_exponent), max(2, integers_of.largest.bit_length())
        least, most = integers_of.least * quantum, (integers_of.least + (1 << integers_of.bits) - 1) * quantum
        element = Format.custom(
            precision=digits,
            emin=digits - 1 + element.quantum_exponent,
            maximum=integers_of.largest * quantum,
            inf=False,
            nan=False,
        )
    inside = np.isnan(values)
    with np.errstate(all="ignore"):
        # An infinity is a product that overflowed, of the last element or of one before it.
        overflown = np.isinf(values)
        quotients = np.where(overflown, np.copysign(np.finfo(np.float64).max, values * scale), values / scale)
        for mode in _TOWARDS:
            steps = _rounded(quotients, element, mode)
            steps = np.where(overflown, np.clip(steps, least - zero, most - zero), steps)
            bounded = (least <= steps + zero) & (steps + zero <= most)
            # The product of an element and a scale is exact in binary64, or rounded to it as the tensor is.
            inside |= bounded & (_rounded(steps * scale, stored) == values)
    # A fault can make a scale zero, infinite or NaN.
    inside |= ((values == 0) & (scale == 0)) | (np.isinf(values) & np.isinf(scale))
    return ~(inside | (np.isinf(values) & element.inf))


def _rounded(x: Any, fmt: Format, mode: str = "nearest_even") -> Any:
    """Return x rounded to a format; beyond its range, to its end or to infinity."""
    rounding = Rounding(fmt, MODES[mode], "saturate" if mode in _TOWARDS else fmt.default_overflow)
    return rounding_function(rounding, "f64").evaluate(np.asarray(x, np.float64), np.uint32(0))[0]
