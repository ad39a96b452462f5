"""The values of posits, from their codes and by themselves.

Source: Standard for Posit Arithmetic (2022), section 3. A code has a sign, a regime (equal bits, and one of the other
kind), exponent bits and a fraction, as far as there is room for them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def posit_value(code: int, bits: int, exponent_bits: int) -> float:
    """Return the value of a positive code, 1 to 2^(bits - 1) - 1. Values ascend with codes; 0 is zero."""
    rest = bits - 1
    first = code >> (rest - 1)
    run = rest - ((code ^ ((1 << rest) - 1)) if first else code).bit_length()
    left = max(rest - run - 1, 0)
    tail = code & ((1 << left) - 1)
    cut = left - exponent_bits
    exponent = tail >> cut if cut >= 0 else tail << -cut
    fraction = tail & ((1 << cut) - 1) if cut > 0 else 0
    regime = run - 1 if first else -run
    return math.ldexp(1.0 + math.ldexp(fraction, -max(cut, 0)), (regime << exponent_bits) + exponent)


def are_posits(values: Any, bits: int, exponent_bits: int) -> Any:
    """Return for each number of an array whether it is a posit of this size: a bool array of the same shape.

    values: numbers that binary64 holds. -0 counts as 0, and a NaN as NaR.
    """
    x = np.abs(np.asarray(values, dtype=np.float64))
    last = (bits - 2) << exponent_bits
    inside = (x >= math.ldexp(1.0, -last)) & (x <= math.ldexp(1.0, last))
    significand, exponent = np.frexp(np.where(inside, x, 1.0))
    exponent = exponent - 1
    regime = exponent >> exponent_bits
    left = np.maximum(bits - 1 - np.where(regime >= 0, regime + 2, 1 - regime), 0)
    # A code without room for all exponent bits has zeros in their place, and no fraction.
    fraction_bits, missing = np.maximum(left - exponent_bits, 0), np.maximum(exponent_bits - left, 0)
    scaled = np.ldexp(significand, fraction_bits + 1)
    held = (scaled == np.rint(scaled)) & (exponent & ((1 << missing) - 1) == 0)
    return np.isnan(x) | (x == 0) | (inside & held)
